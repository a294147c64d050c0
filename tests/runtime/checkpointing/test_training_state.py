"""What a training run needs besides model and optimizer: kept in the same publish, read without running anything."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, SequentialLR

import ckptx
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.checkpointing.save import load_optimizer, save
from ckptx.runtime.checkpointing.save_planner import SavePlanner, WholeObject
from ckptx.runtime.checkpointing.stored_state import compute_digest, open_state, to_plain
from ckptx.runtime.checkpointing.training_state import PerRank, load_training_state
from ckptx.runtime.parallel.distributed import mesh_of
from ckptx.runtime.parallel.randomness import RandomState, seed
from tests.support.load_ranks import load_with_transformers as from_pretrained
from tests.support.models import EVERY, build
from tests.support.pool import GlooPool

BOTH = ParallelDims(tp=2, dp_shard=2)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "llama"
    build(EVERY["llama-untied"]).float().save_pretrained(path)
    return path


class Position:
    """A place in data, as a loader has one."""

    def __init__(self) -> None:
        self.at, self.seen = 0, torch.zeros(0, dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.seen = state["at"], state["seen"]


def schedulers(optimizer: Any) -> Any:
    """One that counts milestones, behind one that follows a cosine, in a sequence."""
    steps = [CosineAnnealingLR(optimizer, 3), MultiStepLR(optimizer, [1, 1, 4])]
    return SequentialLR(optimizer, steps, [2]), MultiStepLR(optimizer, [2, 2, 3])


PLAIN = {
    "epoch": 3, "name": "a b", "none": None, "flag": True, "rate": float("inf"), "pair": (1, [2.5, "x"], {}),
    "numbers": {0: "a", 7: torch.arange(5, dtype=torch.int16)}, "empty": torch.zeros(0, 3),
    "nested": {"deep.er": [{"t": torch.tensor(1.5)}], "ordered": OrderedDict(b=1, a=2)}, "dtype": torch.bfloat16,
    "half": torch.ones(2).bfloat16(),
}  # fmt: skip


def saved(rank: int, world_size: int, hf: Path, path: Path, dims: ParallelDims) -> dict[str, Any]:
    """Saves a state that is another one on each rank, and gives it back, with what this rank draws next."""
    mesh = mesh_of(dims, "cpu")
    model = from_pretrained(hf)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sequence, milestones = schedulers(optimizer)
    for _ in range(3):
        optimizer.step()
        sequence.step()
        milestones.step()
    seed(4, mesh)
    data = Position()
    data.at, data.seen = 10 + rank // dims.tp, torch.arange(rank // dims.tp)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    state = {
        "sequence": sequence,
        "milestones": milestones,
        "rng": PerRank(RandomState()),
        "data": PerRank(data),
        **PLAIN,
    }
    save(model, None, path, step=7, training_state=state, mesh=mesh)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:], "saving draws numbers"
    return {**told(sequence, milestones, data), **drawn()}


def told(sequence: Any, milestones: Any, data: Position) -> dict[str, Any]:
    return {
        "sequence": compute_digest(to_plain(sequence.state_dict(), "")), "milestones": dict(milestones.milestones),
        "steps": milestones.last_epoch, "at": data.at, "seen": data.seen.tolist(),
    }  # fmt: skip


def drawn() -> dict[str, Any]:
    return {"python": random.random(), "numpy": float(np.random.rand()), "torch": float(torch.rand(()))}


def loaded(rank: int, world_size: int, path: Path, dims: ParallelDims) -> dict[str, Any]:
    """Goes on with what was saved; also proves that plain values came back as they were."""
    mesh = mesh_of(dims, "cpu")
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    (sequence, milestones), data = schedulers(optimizer), Position()
    state = {"sequence": sequence, "milestones": milestones, "data": data, "rng": PerRank(RandomState())}
    found = load_training_state(path, state, mesh=mesh)
    assert compute_digest({key: found[key] for key in PLAIN}) == compute_digest(to_plain(PLAIN, ""))
    assert found["step"] == 7 and found["data"]["at"] == data.at
    assert found["half"].dtype is torch.bfloat16 and found["pair"][0] == 1 and type(found["pair"]) is tuple
    milestones._get_closed_form_lr()  # counts milestones
    return {**told(sequence, milestones, data), **drawn()}


@pytest.fixture(scope="module")
def checkpoint(pool: GlooPool, hf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("state") / "saved"
    return path, pool.run(saved, 4, hf, path, BOTH)


def test_every_rank_goes_on_with_its_own(pool: GlooPool, checkpoint: Any) -> None:
    path, before = checkpoint
    assert pool.run(loaded, 4, path, BOTH) == before
    assert before[0]["at"] != before[2]["at"] and before[0]["torch"] != before[2]["torch"]


def test_another_number_of_tp_ranks_takes_over_what_data_ranks_have(pool: GlooPool, checkpoint: Any) -> None:
    path, before = checkpoint
    assert pool.run(loaded, 2, path, ParallelDims(dp_shard=2)) == [before[0], before[2]]
    assert pool.run(loaded, 2, path, ParallelDims(dp_replicate=2)) == [before[0], before[2]]


def test_stock_torch_loads_it_by_name(checkpoint: Any) -> None:
    path, before = checkpoint
    ranks = {f"rank_{rank}": None for rank in range(4)}
    state: dict[str, Any] = {"step": None, "training_state": {"epoch": None, "numbers": None, "data": dict(ranks)}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert (state["step"], state["training_state"]["epoch"]) == (7, 3)
    assert torch.equal(state["training_state"]["numbers"][7], torch.arange(5, dtype=torch.int16))
    for rank in range(4):
        found = state["training_state"]["data"][f"rank_{rank}"]
        assert found["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 2}
        assert found["value"]["at"] == before[rank]["at"]


def test_it_travels_through_reshard(pool: GlooPool, checkpoint: Any, tmp_path: Path) -> None:
    path, before = checkpoint
    ckptx.reshard(path, tmp_path / "tp4", tp=4)
    assert pool.run(loaded, 4, tmp_path / "tp4", BOTH) == before


# ------------------------------------------------------------------------------------------------ other meshes


def asked(rank: int, world_size: int, path: Path, dims: ParallelDims | None, names: list[str]) -> Any:
    mesh = mesh_of(dims, "cpu") if dims is not None else None
    try:
        found = load_training_state(path, dict.fromkeys(names), mesh=mesh)
    except CkptxError as error:
        return f"{type(error).__name__}: {error}"
    return sorted(found)


def test_what_nobody_can_say_whose_it_is_is_refused(pool: GlooPool, checkpoint: Any) -> None:
    path = checkpoint[0]
    (said,) = set(pool.run(asked, 4, path, ParallelDims(dp_shard=4), ["epoch", "rng"]))
    assert said.startswith("UnsupportedError: ")
    expected = (
        'training state "rng" was saved with 2 data-parallel ranks and 1 stages, this run has 4 and 1; resume with the '
        "same"
    )
    assert expected in said
    (said, *_) = pool.run(asked, 2, path, ParallelDims(pp=2), ["data"])
    assert "with 2 data-parallel ranks and 1 stages, this run has 1 and 2" in said
    (found, *_) = pool.run(asked, 4, path, ParallelDims(dp_shard=4), ["epoch"])
    assert "epoch" in found and "rng" not in found, "not asked for, so left out"
    (found,) = pool.run(asked, 1, path, None, [])
    assert {"epoch", "step", "sequence"} <= set(found) and "data" not in found
    (said,) = pool.run(asked, 1, path, None, ["rng"])
    assert said == 'UsageError: training_state: "rng" is stored per rank, which requires the mesh; pass mesh='
    (said,) = pool.run(asked, 1, path, None, ["ema"])
    assert 'has no training state "ema" (available: ' in said and said.startswith("InputError: ")


# ------------------------------------------------------------------------------------------------ refusals


def refused(rank: int, world_size: int, hf: Path, path: Path, how: str) -> str:
    """What `save` says to this rank."""
    states: dict[str, Any] = {
        "array": {"a": {"b": np.zeros(2)}}, "number": {"a": [1 << 63]}, "set": {"a": {1}}, "bytes": {"a": b"x"},
        "key": {"a": {(1, 2): 3}}, "code": {"a": print}, "apart": {"a": rank}, "name": {"a.b": 1},
        "mesh": {"a": PerRank(1)},
        "one": {"a": np.zeros(1) if rank else 1}, "missing": {"a": 1} if rank else {},
    }  # fmt: skip
    try:
        save(from_pretrained(hf), None, path, training_state=states[how])
    except CkptxError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "array",
            "UnsupportedError: training_state.a.b: is a ndarray, expected None, a boolean, number, string or plain",
        ),
        ("number", "UnsupportedError: training_state.a.0: is the number 9223372036854775808, which exceeds 64 bits"),
        ("set", "UnsupportedError: training_state.a: is a set, expected"),
        ("bytes", "UnsupportedError: training_state.a: is a bytes, expected"),
        (
            "key",
            "UnsupportedError: training_state.a: has the key (1, 2) of type tuple; keys must be strings or integers",
        ),
        ("code", "UnsupportedError: training_state.a: is a builtin_function_or_method, expected"),
        (
            "apart",
            'UsageError: training_state: "a" must be identical on all ranks, but on ranks 0 and 1 its value differs',
        ),
        (
            "missing",
            'UsageError: training_state: "a" must be identical on all ranks, but on ranks 0 and 1 only one has it',
        ),
        ("one", "UnsupportedError: training_state.a: is a ndarray"),
        ("name", "UsageError: training_state: invalid name 'a.b', must be a string without dots"),
        ("mesh", 'UsageError: training_state: "a" is stored per rank, which requires the mesh; pass mesh='),
    ],
)
def test_a_refusal_is_that_of_every_rank_and_leaves_nothing(
    pool: GlooPool, hf: Path, tmp_path: Path, how: str, said: str
) -> None:
    answers = pool.run(refused, 2, hf, tmp_path / "saved", how)
    assert [answer[: len(said)] for answer in answers] == [said, said], answers
    assert not list(tmp_path.iterdir())


class Attack:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["metadata", "object"])
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, where: str) -> None:
    path, proof = tmp_path / "saved", tmp_path / "executed"
    value = Attack(proof) if where == "object" else 3
    state = {"training_state": {"epoch": value}, "model": {"weight": torch.zeros(1, 1)}}
    state["optim"] = {"param_groups.weight.lr": value}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    if where == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Attack(proof)))
    model = nn.Linear(1, 1, bias=False)
    with pytest.raises(InputError, match="nothing was executed"):
        load_training_state(path)
    with pytest.raises(InputError, match="nothing was executed"):
        load_optimizer(torch.optim.SGD(model.parameters()), model, path)
    assert not proof.exists()


def test_state_of_a_parameter_that_has_none_in_the_checkpoint_is_removed(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.zeros(1, 1)}, "optim": {"param_groups.weight.lr": 0.5}}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    load_optimizer(optimizer, model, tmp_path / "saved")
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_an_unsupported_dtype_is_named(tmp_path: Path) -> None:
    value = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    state = {"w": torch.zeros(1), "value": WholeObject(value)}
    dcp.save(state, checkpoint_id=tmp_path, planner=SavePlanner(), no_dist=True)
    with open_state(tmp_path) as stored, pytest.raises(UnsupportedError, match="a tensor of dtype F4, which"):
        stored.read_value("value")


def test_damaged_and_foreign_objects_are_refused(tmp_path: Path, checkpoint: Any, hf: Path) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    state = {"training_state": {"deep": deep, "column": [torch.zeros(4, 2).t()]}, "w": torch.zeros(1)}
    dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    with open_state(tmp_path / "foreign") as stored:
        names = [name for name in stored.objects if "deep" in name]
        with pytest.raises(InputError, match="nested deeper than 64 levels"):
            stored.read_value(names[0])
    with pytest.raises(UnsupportedError, match="expected a DCP"), open_state(hf):
        pass
    path = tmp_path / "damaged"
    path.mkdir()
    for file in checkpoint[0].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    with open_state(checkpoint[0]) as stored:
        entry = stored.objects["training_state.numbers"]
    content = bytearray((path / entry.file).read_bytes())
    at = content.index(torch.arange(5, dtype=torch.int16).numpy().tobytes(), entry.offset)
    content[at] ^= 1
    (path / entry.file).write_bytes(content)
    with pytest.raises(InputError, match="CRC-32"):
        load_training_state(path)
