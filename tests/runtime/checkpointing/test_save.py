"""What the ranks save is, bit for bit, what they hold put together; stock torch and ckptx both say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptx
from tests.support import save_ranks, torch_dcp
from tests.support.load_ranks import load_with_transformers as from_pretrained
from tests.support.models import EVERY
from tests.support.pool import GlooPool
from tests.support.save_ranks import MARKS, TP, Shape

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """HF checkpoints by recipe, written when first asked for."""
    made: dict[str, Path] = {}

    def written(name: str) -> Path:
        if name not in made:
            made[name] = save_ranks.write(name, tmp_path_factory.mktemp(name))
        return made[name]

    return written


def expected(hf: Path) -> Tensors:
    """What a checkpoint of a marked model holds, tied names included."""
    model = from_pretrained(hf)
    held: Tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for key, function in MARKS.items():
            held[f"optim.state.{name}.{key}"] = function(parameter.detach())
        held[f"optim.state.{name}.step"] = torch.tensor(3.0)
    return held


def wrong(path: Path, hf: Path) -> list[str]:
    """Names that stock torch loads with other bytes than they should have, or that are not there, or too many."""
    found, wanted = torch_dcp.load(path), expected(hf)
    same = [name for name in found.keys() & wanted.keys() if torch_dcp.raw(found[name]) == torch_dcp.raw(wanted[name])]
    return sorted((found.keys() | wanted.keys()) - set(same))


FSDP, BOTH = Shape(dp=2), Shape(dp=2, tp=2)
WRAPPED = Shape(dp=2, checkpointing="full", compiled=True)
CASES = [
    ("llama-tied", BOTH), ("gpt2", BOTH), ("multi-query", TP), ("phi3", TP), ("mixtral", TP), ("t5", FSDP),
    ("llama-untied", WRAPPED),
]  # fmt: skip
WIDE = [
    *((name, shape) for name in EVERY for shape in (TP, FSDP, BOTH) if (name, shape) not in CASES),
    *((name, Shape(dp=2, replicate=2)) for name in ("llama-tied", "multi-query")),
    *(
        (name, BOTH._replace(checkpointing=mode))
        for name in ("llama-tied", "gpt2")
        for mode in ("submodule", "selective")
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(pytest.param(*case, id=f"{case[0]}-dp{case[1].dp}-tp{case[1].tp}") for case in CASES),
        *(pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.slow) for case in WIDE),
    ],
)
def test_parameters_and_moments_are_whole(
    pool: GlooPool, checkpoints: Any, tmp_path: Path, name: str, shape: Shape
) -> None:
    hf, path = checkpoints(name), tmp_path / "saved"
    pool.run(save_ranks.save_with_known_state, shape.dp * shape.tp * shape.replicate, hf, path, shape)
    assert wrong(path, hf) == []
    assert ckptx.verify(hf, path).exit == 0
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [Shape(replicate=2), Shape(tp=2, replicate=2), Shape(dp=2, replicate=2)])
def test_replicas_store_each_tensor_once(pool: GlooPool, checkpoints: Any, tmp_path: Path, shape: Shape) -> None:
    hf, path = checkpoints("llama-tied"), tmp_path / "saved"
    pool.run(save_ranks.save_with_known_state, shape.dp * shape.tp * shape.replicate, hf, path, shape)
    assert wrong(path, hf) == []
    places = {
        (each.relative_path, each.offset): each.length
        for each in dcp.FileSystemReader(path).read_metadata().storage_data.values()
    }
    assert sum(places.values()) == torch_dcp.payload_bytes(path), "bytes that no name leads to"
    pool.run(save_ranks.reshard_through_load, 2, path, tmp_path / "again", Shape(dp=2))
    torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "again"), torch_dcp.load(path))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "by"), [("gpt2", "stock"), ("multi-query", "stock"), ("multi-query", "save")])
def test_placements_alone_would_put_fused_groups_out_of_order(
    pool: GlooPool, checkpoints: Any, tmp_path: Path, name: str, by: str
) -> None:
    """The injected defect: it is refused, or seen to be wrong."""
    said = pool.run(save_ranks.save_without_layout, 2, checkpoints(name), tmp_path / "saved", by)
    if not all(said):
        assert [each for each in wrong(tmp_path / "saved", checkpoints(name)) if "c_attn" in each]


# ------------------------------------------------------------------------------------ training goes on


@pytest.fixture(scope="module", params=["llama-tied", pytest.param("multi-query", marks=pytest.mark.slow)])
def run(
    request: pytest.FixtureRequest, pool: GlooPool, checkpoints: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Two steps on TP of 2: the HF checkpoint, where they are saved, and what torch gathered."""
    path, hf = tmp_path_factory.mktemp("run"), checkpoints(request.param)
    return hf, path, pool.run(save_ranks.save_two_steps, 2, hf, path, TP)


def test_what_torch_gathers_is_what_is_saved(run: Any) -> None:
    _, path, gathered = run
    found = torch_dcp.load(path / "one")
    # Groups of unequal width, which torch cannot gather.
    moved = {name: content for name, content in gathered[0].items() if "c_attn" not in name}
    assert len(moved) > 20 and all(any(content) for content in moved.values())
    for name, content in moved.items():
        full = f"optim.state.{name}" if name.endswith(".exp_avg") else f"model.{name}"
        assert torch_dcp.raw(found[full]) == content, name
    steps = [tensor for name, tensor in found.items() if name.endswith(".step")]
    assert steps and all(each == 1 for each in steps)


def test_the_same_mesh_goes_on_as_if_it_had_not_stopped(pool: GlooPool, run: Any, tmp_path: Path) -> None:
    path = run[1]
    pool.run(save_ranks.resume_and_save, 2, path, tmp_path, TP, "ckptx")
    for each in ("one", "two"):
        torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / each), torch_dcp.load(path / each))
    steps = [torch_dcp.raw(torch_dcp.load(path / each)["model.lm_head.weight"]) for each in ("one", "two")]
    assert steps[0] != steps[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["ckptx", "torch"])
def test_another_mesh_takes_over(pool: GlooPool, run: Any, tmp_path: Path, by: str) -> None:
    path = run[1]
    pool.run(save_ranks.resume_and_save, 2, path, tmp_path, FSDP, by)
    torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "one"), torch_dcp.load(path / "one"))
    assert objects(tmp_path / "one") == objects(path / "one")


def test_a_converted_checkpoint_loads_in_transformers(run: Any, tmp_path: Path) -> None:
    hf, path, _ = run
    ckptx.convert("dcp2hf", path / "one", tmp_path / "hf")
    model = from_pretrained(tmp_path / "hf")
    found = torch_dcp.load(path / "one")
    torch_dcp.assert_same_tensors(
        {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        {name: tensor for name, tensor in found.items() if name.startswith("model.")},
    )
    assert (tmp_path / "hf" / "config.json").read_bytes() == (hf / "config.json").read_bytes()


def objects(path: Path) -> dict[str, Any]:
    """What is no tensor, as torch loads it."""
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.keys() - torch_dcp.metadata(path).keys()
    state: dict[str, Any] = dict.fromkeys(names)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


# ------------------------------------------------------------------------------------ names


@pytest.fixture(scope="module")
def tied(pool: GlooPool, checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tied") / "saved"
    pool.run(save_ranks.save_with_known_state, 2, checkpoints("llama-tied"), path, WRAPPED)
    return path


def test_names_that_share_a_parameter_share_its_bytes_and_its_state(tied: Path) -> None:
    stored = dcp.FileSystemReader(tied).read_metadata().storage_data
    places: dict[str, set[Any]] = {}
    for index, info in stored.items():
        places.setdefault(index.fqn, set()).add((info.relative_path, info.offset))
    for name in ("model.{}", "optim.state.{}.exp_avg", "optim.param_groups.{}.lr"):
        head, embedding = (places[name.format(each)] for each in ("lm_head.weight", "model.embed_tokens.weight"))
        assert head == embedding
    apart = [place for name, each in places.items() if "lm_head" not in name for place in each]
    assert len(apart) == len(set(apart))


def test_what_is_loaded_and_saved_again_has_the_same_bytes(pool: GlooPool, tied: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    pool.run(save_ranks.reshard_through_load, 2, tied, again, WRAPPED)
    names = sorted(each.name for each in tied.iterdir() if each.suffix == ".distcp" or each.name == ".metadata")
    assert ".metadata" in names
    assert [each for each in names if (tied / each).read_bytes() != (again / each).read_bytes()] == []


def test_torch_makes_one_file_of_it(tied: Path, checkpoints: Any, tmp_path: Path) -> None:
    dcp_to_torch_save(tied, tmp_path / "all.pt")
    held = torch.load(tmp_path / "all.pt", weights_only=True)
    assert held["step"] == 3
    wanted = from_pretrained(checkpoints("llama-tied")).state_dict()
    torch_dcp.assert_same_tensors(held["model"], wanted)
    assert held["optim"]["param_groups.lm_head.weight.weight_decay"] == 0.01
    assert held["optim"]["param_groups.model.norm.weight.weight_decay"] == 0.0


def test_the_model_has_a_config_beside_it(pool: GlooPool, run: Any, tmp_path: Path) -> None:
    pool.run(save_ranks.resume_and_save, 1, run[1], tmp_path, Shape(), "ckptx")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    wanted = json.loads((run[0] / "config.json").read_text())
    assert config["architectures"] == wanted["architectures"]
    assert config["dtype"] == "float32"
    assert ckptx.verify(run[1] / "one", tmp_path / "one").exit == 0


@pytest.mark.parametrize("name", ["llama-tied", "llama-untied"])
def test_stages_add_up(pool: GlooPool, checkpoints: Any, tmp_path: Path, name: str) -> None:
    hf = checkpoints(name)
    pool.run(save_ranks.save_stage, 2, hf, tmp_path / "saved")
    assert wrong(tmp_path / "saved", hf) == []
    assert ckptx.verify(hf, tmp_path / "saved").exit == 0


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("another model", "UsageError: optimizer: a parameter of shape [3, 3] is not in the model"),
        ("plain state", "UnsupportedError: optim.state.model.embed_tokens.weight.exp_avg: is a plain tensor"),
        ("nested state", "UnsupportedError: optim.state.model.embed_tokens.weight.exp_avg: nested optimizer state"),
        ("full disk", "SpaceError: "),
    ],
)
def test_a_refusal_is_that_of_every_rank_and_leaves_nothing(
    pool: GlooPool, checkpoints: Any, tmp_path: Path, how: str, said: str
) -> None:
    answers = pool.run(save_ranks.save_and_return_error, 2, checkpoints("llama-tied"), tmp_path / "saved", how)
    assert [answer[: len(said)] for answer in answers] == [said, said], answers
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(pool: GlooPool, checkpoints: Any, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "mine").write_text("mine")
    answers = pool.run(save_ranks.save_and_return_error, 2, checkpoints("llama-tied"), tmp_path / "saved", "")
    assert all(answer.startswith("OutputError: ") and "not empty" in answer for answer in answers)
    assert [each.name for each in tmp_path.rglob("*")] == ["saved", "mine"]


def test_an_optimizer_that_is_not_in_the_checkpoint_is_missed(pool: GlooPool, checkpoints: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r'has no optimizer state for "model\.embed_tokens\.weight"'):
        pool.run(save_ranks.resume_without_optimizer, 1, checkpoints("llama-tied"), tmp_path)
