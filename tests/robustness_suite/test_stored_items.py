"""What checkpoints of trainers hold, as items: every format, and what must not be left out, mixed up, or run."""

from __future__ import annotations

import enum
import json
import os
import pickle
import random
import time
import tracemalloc
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptx.errors import CkptxError, InputError
from ckptx.robustness_suite.item_names import oracles_of, prefix_of_file
from ckptx.robustness_suite.oracles import Items, compare
from ckptx.robustness_suite.stored_items import detect_sharding, read_items


class Mode(enum.Enum):
    """Something of a trainer's own."""

    FAST = 1


class Thing:
    """An object with attributes, as a trainer may pickle."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def names(items: Items, oracle: str) -> list[str]:
    """The items of one oracle."""
    return [name for each, name in items if each == oracle]


def differing(first: Path, second: Path) -> dict[str, list[str]]:
    """What differs, by oracle."""
    verdicts = compare([read_items(first)], [read_items(second)])
    return {each.oracle: [d.item for d in each.differences] for each in verdicts if each.differences}


def stepped(named: bool = False) -> tuple[Any, Any, Any]:
    """A model after one step, its optimizer and its schedule."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def trainer_checkpoint(root: Path) -> Path:
    """A directory as transformers' Trainer leaves it."""
    root.mkdir()
    model, optimizer, scheduler = stepped()
    save_file(model.state_dict(), root / "model.safetensors")
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    torch.save(scheduler.state_dict(), root / "scheduler.pt")
    for rank in range(2):
        random.seed(rank)
        state = {
            "python": random.getstate(),
            "numpy": np.random.RandomState(rank).get_state(),
            "cpu": torch.get_rng_state(),
        }
        torch.save(state, root / f"rng_state_{rank}.pth")
    torch.save(Thing(output_dir="/somewhere"), root / "training_args.bin")
    trainer = {
        "global_step": 1,
        "epoch": 0.5,
        "max_steps": 4,
        "log_history": [{"step": 1, "loss": 2.0}],
        "total_flos": 3.0,
    }
    (root / "trainer_state.json").write_text(json.dumps(trainer), encoding="utf-8")
    (root / "config.json").write_text("{}", encoding="utf-8")
    return root


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "oracles"),
    [
        ("model.layers.0.weight", ("model",)),
        ("app.model.model.norm.weight", ("model",)),
        ("layers.0.attention.wq.weight", ("model",)),  # torchtitan's have no prefix
        ("tok_embeddings.weight", ("model",)),
        ("optimizer.state.layers.0.weight.exp_avg", ("moments",)),
        ("app.optim.state.model.norm.weight.exp_avg_sq", ("moments",)),
        ("optim.state.0.step", ("adam step",)),
        ("optim.state.0.momentum_buffer", ("moments",)),
        ("optimizer.param_groups.0.lr", ("param groups", "learning rate")),
        ("optim.param_groups.model.norm.weight.betas", ("param groups",)),
        ("optimizer.param_groups.0.params", ("param groups",)),
        ("lr_scheduler.last_epoch", ("scheduler",)),
        ("training_state.scheduler._last_lr", ("scheduler",)),
        ("dataloader.dp_rank_0", ("batch",)),
        ("app.sampler.seen", ("batch",)),
        ("train_state.step", ("step",)),
        ("train_state.ntokens_seen", ("samples",)),
        ("training_state.rng.rank_1.value.torch", ("rng",)),
        ("rng.rank 0.torch_manual_seed", ("rng",)),
        ("rng.rank 0.step", ("step",)),
        ("step", ("step",)),
        ("consumed_train_samples", ("samples",)),
        ("trainer_state.global_step", ("step",)),
        ("trainer_state.best_metric", ("other",)),
        ("custom_checkpoint_0.position", ("other",)),
    ],
)
def test_the_oracle_of_a_name(name: str, oracles: tuple[str, ...]) -> None:
    is_parameter_by_default = name.endswith(("weight", "exp_avg", "exp_avg_sq"))
    assert oracles_of(name, is_parameter_by_default) == oracles


@pytest.mark.parametrize(
    ("stem", "word"),
    [
        ("model", "model"),
        ("model-00001-of-00002", "model"),
        ("pytorch_model_fsdp_0", "model"),
        ("optimizer", "optimizer"),
        ("optimizer_0", "optimizer"),
        ("optimizer_1", "optimizer.1"),
        ("rng_state_1", "rng.rank 1"),
        ("random_states_0", "rng.rank 0"),
        ("scheduler", "scheduler"),
        ("dl_state_dict", "dataloader"),
        ("custom_checkpoint_0", None),
        ("weird", None),
    ],
)
def test_the_word_of_a_file(stem: str, word: str | None) -> None:
    assert prefix_of_file(stem) == word


# ---------------------------------------------------------------------------------------------------------- formats


def test_a_directory_of_the_trainer(tmp_path: Path) -> None:
    items = read_items(trainer_checkpoint(tmp_path / "a"))
    assert names(items, "model") == [f"model.{i}.{kind}" for i in range(2) for kind in ("bias", "weight")]
    assert names(items, "moments") == [
        f"optimizer.state.{i}.{kind}" for i in range(4) for kind in ("exp_avg", "exp_avg_sq")
    ]
    assert items["adam step", "optimizer.state.3.step"] == "F32 [] 1.0"
    assert items["param groups", "optimizer.param_groups.0.lr"] == items["learning rate", "optimizer.param_groups.0.lr"]
    assert items["param groups", "optimizer.param_groups.0.betas"] == "(0.9, 0.999)"
    assert items["scheduler", "scheduler.last_epoch"] == "1"
    assert names(items, "rng") == [
        f"rng.rank {rank}.{kind}" for rank in range(2) for kind in ("python", "numpy", "cpu")
    ]
    assert items["step", "trainer_state.global_step"] == "1"
    assert items["other", "trainer_state.max_steps"] == "4"
    assert not [name for _, name in items if "log_history" in name or "output_dir" in name]
    assert items["finite", "model.0.weight"] == "finite"


def test_two_alike_have_the_same_items(tmp_path: Path) -> None:
    assert differing(trainer_checkpoint(tmp_path / "a"), trainer_checkpoint(tmp_path / "b")) == {}


@pytest.mark.parametrize(
    ("file", "change", "oracles"),
    [
        ("optimizer.pt", lambda s: s["state"][1]["exp_avg"].view(-1)[0].add_(1e-7), {"moments"}),
        ("optimizer.pt", lambda s: s["state"][2].update(step=torch.tensor(0.0)), {"adam step"}),
        ("optimizer.pt", lambda s: s["param_groups"][0].update(weight_decay=0.0), {"param groups"}),
        ("optimizer.pt", lambda s: s["param_groups"][0].update(lr=1.0), {"param groups", "learning rate"}),
        ("scheduler.pt", lambda s: s.update(last_epoch=0), {"scheduler"}),
        ("rng_state_1.pth", lambda s: s.update(numpy=np.random.RandomState(7).get_state()), {"rng"}),
        ("rng_state_0.pth", lambda s: s["python"][1].__class__ and s.update(python=(3, (1,) * 625, None)), {"rng"}),
        ("optimizer.pt", lambda s: s.update(new=Thing(a=1)), {"other"}),
    ],
)
def test_a_change_of_state_is_named(tmp_path: Path, file: str, change: Any, oracles: set[str]) -> None:
    first, second = (trainer_checkpoint(tmp_path / name) for name in "ab")
    state = torch.load(second / file, weights_only=False)
    change(state)
    torch.save(state, second / file)
    assert set(differing(first, second)) == oracles


def test_names_in_the_place_of_numbers_where_the_groups_have_them(tmp_path: Path) -> None:
    _, optimizer, _ = stepped(named=True)
    torch.save({"optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "state.pt")
    items = read_items(tmp_path / "state.pt")
    assert "optimizer.state.1.weight.exp_avg" in names(items, "moments")
    assert items["step", "step"] == "3"


def test_a_dcp_of_a_script_with_one_object_around_all(tmp_path: Path) -> None:
    _, optimizer, scheduler = stepped()
    state = {
        "model": {"norm.weight": torch.ones(3)},
        "optim": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {
            "rank0": torch.get_rng_state(),
            "numpy": np.random.RandomState(0).get_state(),
            "python": random.getstate(),
        },
        "loader": {"generator": np.random.default_rng(0).bit_generator.state, "seen": 8},
        "step": 3,
    }
    dcp.save({"app": state}, checkpoint_id=tmp_path / "a", no_dist=True)
    state["loader"]["generator"] = np.random.default_rng(1).bit_generator.state  # 128 bits
    dcp.save({"app": state}, checkpoint_id=tmp_path / "b", no_dist=True)
    items = read_items(tmp_path / "a")
    assert names(items, "model") == ["app.model.norm.weight"]
    assert items["step", "app.step"] == "3"
    assert {"app.rng.rank0"} < set(names(items, "rng"))
    assert set(names(items, "scheduler")) >= {"app.scheduler.last_epoch", "app.scheduler.T_max"}
    found = differing(tmp_path / "a", tmp_path / "b")
    assert set(found) == {"batch"} and all(name.startswith("app.loader.generator") for name in found["batch"])


def test_a_dcp_of_torchtitan(tmp_path: Path) -> None:
    state = {
        "layers.0.attention.wq.weight": torch.ones(4, 4),
        "optimizer": {"state.layers.0.attention.wq.weight.exp_avg": torch.ones(4, 4)},
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": pickle.dumps({"_sample_idx": 12}), "world_size": 1},
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(96, dtype=torch.int64)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    items = read_items(tmp_path / "a")
    assert {oracle for oracle, _ in items} == {"finite", "model", "moments", "scheduler", "batch", "step", "samples"}
    assert items["samples", "train_state.ntokens_seen"] == "I64 [] 96"


def test_a_dcp_for_the_model_and_one_for_the_optimizer(tmp_path: Path) -> None:
    dcp.save({"model": {"a.weight": torch.ones(2)}}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save(
        {"optimizer": {"state": {"a.weight": {"exp_avg": torch.ones(2)}}}},
        checkpoint_id=tmp_path / "optimizer_0",
        no_dist=True,
    )
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.bin")
    items = read_items(tmp_path)
    assert names(items, "model") == ["model.a.weight"]
    assert names(items, "moments") == ["optimizer.state.a.weight.exp_avg"]
    assert names(items, "scheduler") == ["scheduler.last_epoch"]


def test_a_directory_of_accelerate(tmp_path: Path) -> None:
    model, optimizer, scheduler = stepped()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.bin")
    torch.save(
        {"step": 0, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state()},
        tmp_path / "random_states_0.pkl",
    )
    torch.save({"step": 4, "anything": [1, 2]}, tmp_path / "custom_checkpoint_0.pkl")
    torch.save(Thing(epoch=2), tmp_path / "sampler.bin")
    items = read_items(tmp_path)
    assert items["step", "step"] == "4"
    assert items["other", "anything"] == "[1, 2]"
    assert names(items, "batch") == ["dataloader.sampler"]
    assert names(items, "rng") == ["rng.rank 0.random_state", "rng.rank 0.numpy_random_seed"]


def test_a_name_in_two_files_hides_nothing(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"thing": rank}, tmp_path / f"custom_checkpoint_{rank}.pkl")
    items = read_items(tmp_path)
    assert items["other", "thing"] == "0" and items["other", "custom_checkpoint_1: thing"] == "1"


def test_times_and_names_of_runs_are_no_items(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(
        json.dumps({"step": 3, "wandb_run_id": "x", "train_runtime": 3.2, "note": "y"})
    )
    assert dict(read_items(tmp_path)) == {("step", "step"): "3", ("other", "note"): "'y'"}


def test_a_parameter_that_is_called_like_a_time_is_one(tmp_path: Path) -> None:
    save_file({"time": torch.ones(2)}, tmp_path / "model.safetensors")
    assert names(read_items(tmp_path), "model") == ["model.time"]


# ----------------------------------------------------------------------------------------------------------- values


def saved(tmp_path: Path, value: Any, name: str) -> Path:
    """A file of torch.save."""
    torch.save(value, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
        ({"s": {"alpha", "beta", "gamma"}}, {"s": {"gamma", "alpha", "beta"}}),
        ({"o": OrderedDict(a=1, b=2)}, {"o": OrderedDict(b=2, a=1)}),
        ({"f": Thing(a=1, b=2)}, {"f": Thing(b=2, a=1)}),
        ({"d": defaultdict(int, {1: 2, 3: 4})}, {"d": defaultdict(int, {3: 4, 1: 2})}),
    ],
)
def test_order_and_sharing_do_not_matter(tmp_path: Path, first: Any, second: Any) -> None:
    shared = [1.5, "x"]
    first["l"], second["l"] = [Thing(s=shared), Thing(s=shared)], [Thing(s=shared), Thing(s=[1.5, "x"])]
    assert differing(saved(tmp_path, first, "a.pt"), saved(tmp_path, second, "b.pt")) == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], (1, 2)),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        (None, 0),
        (1 << 100, (1 << 100) + 1),
        (b"ab", "ab"),
        (Thing(a=1), Thing(a=2)),
        (np.arange(3), np.arange(3, dtype=np.int32)),
        (np.arange(3), np.array([0, 2, 1])),
        (np.float64(1.5), np.float64(2.5)),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ([torch.ones(2)], [torch.zeros(2)]),
        ({"x": [Thing(t=torch.ones(2))]}, {"x": [Thing(t=torch.zeros(2))]}),
        (Mode.FAST, 1),
        (Mode, Thing),
        ({1}, {2}),
        ({1: "a"}, {2: "a"}),
        ("a" * 100, "a" * 99 + "b"),
    ],
)
def test_other_values_have_other_digests(tmp_path: Path, first: Any, second: Any) -> None:
    assert differing(saved(tmp_path, {"v": first}, "a.pt"), saved(tmp_path, {"v": second}, "b.pt"))


def test_a_pickle_in_bytes_is_compared_by_its_values(tmp_path: Path) -> None:
    """torchtitan's loaders have their state so; what was read again has other bytes."""
    text = "".join(["a", "b"])
    alike = [pickle.dumps({"x": [text, other]}) for other in (text, "".join(["a", "b"]))]
    assert alike[0] != alike[1]
    first, second = (saved(tmp_path, {"dp_rank_0": data}, f"{i}.pt") for i, data in enumerate(alike))
    assert differing(first, second) == {}
    other = saved(tmp_path, {"dp_rank_0": pickle.dumps({"x": ["ab", "b"]})}, "other.pt")
    assert differing(first, other) == {"other": ["dp_rank_0.x"]}
    for index, data in enumerate((b"\x80\x04 no pickle.", b"\x80\x04 none either.")):
        saved(tmp_path, {"v": data}, f"raw{index}.pt")
    assert differing(tmp_path / "raw0.pt", tmp_path / "raw1.pt") == {"other": ["v"]}


def test_a_pickle_that_is_no_archive_is_read_too(tmp_path: Path) -> None:
    for protocol in (2, 4, 5):
        value = {"step": 2, "array": np.arange(4), "text": bytearray(b"xy"), "big": 1 << 90}
        (tmp_path / f"{protocol}.pkl").write_bytes(pickle.dumps(value, protocol))
        assert read_items(tmp_path / f"{protocol}.pkl")["step", "step"] == "2"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_that_are_not_plain_are_told_apart(tmp_path: Path) -> None:
    first, second = (torch.sparse_coo_tensor([[0, 1]], [1.0, last], check_invariants=True) for last in (2.0, 3.0))
    assert differing(saved(tmp_path, {"v": first}, "a.pt"), saved(tmp_path, {"v": second}, "b.pt"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_counted(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    tensor = torch.ones(3, 5, dtype=dtype)
    tensor[1, 2] = tensor[2, 4] = value
    save_file({"w": tensor, "fine": torch.full((2,), 3e4, dtype=dtype)}, tmp_path / "model.safetensors")
    items = read_items(tmp_path)
    assert items["finite", "model.w"] == "2 elements not finite" and items["finite", "model.fine"] == "finite"


def test_a_large_tensor_takes_little_memory(tmp_path: Path) -> None:
    save_file({"w": torch.ones(8_000_000)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    try:
        read_items(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------------------------- hostile


class Runs:
    """What a pickle could do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("name", ["optimizer.pt", "bomb.pkl", "custom_checkpoint_0.pkl"])
def test_nothing_is_run(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    if name == "bomb.pkl":
        (tmp_path / name).write_bytes(pickle.dumps({"step": 1, "x": Runs(mark)}))
    else:
        torch.save({"step": 1, "x": Runs(mark)}, tmp_path / name)
    assert len(read_items(tmp_path)) >= 2
    assert not mark.exists()


def test_a_call_is_told_from_another(tmp_path: Path) -> None:
    torch.save({"x": Runs(Path("a"))}, tmp_path / "a.pt")
    torch.save({"x": Runs(Path("b"))}, tmp_path / "b.pt")
    assert differing(tmp_path / "a.pt", tmp_path / "b.pt") == {"other": ["x"]}


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = [1]
    for _ in range(depth):
        value = [value]
    return value


def doubled(times: int) -> dict[str, Any]:
    """A dict that would have 2 ** times leaves."""
    value: dict[str, Any] = {"x": 1}
    for _ in range(times):
        value = {"a": value, "b": value}
    return value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps({"a": list(range(1000))})[:-40], "ends before its end mark|damaged"),
        (b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x0f.", "ends before its end mark"),
        (b"\x80\x04r\xff\xff\xff\x7f.", "damaged|ends before"),
        (pickle.dumps({"a": doubled(40)}), "values"),
        (b"\x80\x04" + b"]" * 3_000_000 + b".", "containers"),
        (b"\x80\x04\x97.", "a buffer that is not in the file"),
        (b"\x80\x04", "ends before"),
        (b"", "not a torch archive"),
        (b"PK\3\4" + b"\0" * 40, "damaged torch archive"),
    ],
)
def test_a_hostile_pickle_is_refused_in_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "optimizer.pt").write_bytes(data)
    with pytest.raises(InputError, match=said) as caught:
        read_items(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path / "optimizer.pt") in str(caught.value)


def test_what_is_referred_to_often_is_looked_through_once(tmp_path: Path) -> None:
    """Each time, it would take an hour."""
    shared = list(range(1 << 17))
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({str(number): shared for number in range(1 << 15)}))
    began = time.process_time()
    assert len(read_items(tmp_path / "a.pkl")) == (1 << 15) + 1  # the keys that look like numbers are one
    assert time.process_time() - began < 10


@pytest.mark.parametrize("depth", [200, 50_000])
@pytest.mark.parametrize(("begin", "end"), [(b"]", b"a"), (b"", b"\x85"), (b"](", b"K\x01e")])
def test_depth_does_not_matter(tmp_path: Path, depth: int, begin: bytes, end: bytes) -> None:
    """A list in a list, a tuple in a tuple; the innermost value counts."""
    for name, number in (("a", b"K\x01"), ("b", b"K\x01"), ("c", b"K\x02")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.pkl").write_bytes(b"\x80\x04" + begin * depth + number + end * depth + b".")
    assert differing(tmp_path / "a", tmp_path / "b") == {}
    assert differing(tmp_path / "a", tmp_path / "c")


def circle(length: int, last: Any = 0) -> Any:
    """A list of lists, each of which holds the next, and the last the first."""
    made: list[Any] = [[number] for number in range(length)]
    for each, following in zip(made, [*made[1:], made[0]], strict=True):
        each.append({"next": following})
    made[-1][0] = last
    return made[0]


@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_a_value_that_holds_itself_is_compared(tmp_path: Path, length: int) -> None:
    same = [saved(tmp_path, {"v": circle(length)}, f"{name}.pt") for name in "ab"]
    assert differing(*same) == {}
    other = saved(tmp_path, {"v": circle(length, last="x")}, "c.pt")
    longer = saved(tmp_path, {"v": circle(length + 1)}, "d.pt")
    assert differing(same[0], other) and differing(same[0], longer)


def test_circles_that_are_too_long_are_refused(tmp_path: Path) -> None:
    """Each of these rounds splits one color, so that there are as many rounds as values."""
    lists = b"]q\x00" + b"]" * 20_000
    (tmp_path / "a.pkl").write_bytes(b"\x80\x02" + lists + b"h\x00aK\x01a" + b"a" * 20_000 + b".")
    began = time.process_time()
    with pytest.raises(InputError, match="reference cycles that are too large"):
        read_items(tmp_path / "a.pkl")
    assert time.process_time() - began < 60


def test_a_name_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    torch.save({"x" * (1 << 20): {str(number): number for number in range(2000)}}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="a name of 1,048,576 characters"):
        read_items(tmp_path / "a.pt")


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(1000)}, "optimizer.pt")
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CkptxError, match="optimizer"):
        read_items(tmp_path)


def test_a_name_with_control_characters_is_kept(tmp_path: Path) -> None:
    torch.save({"a\x1b[31m\nb": 1}, tmp_path / "state.pt")
    assert names(read_items(tmp_path), "other") == ["a\x1b[31m\nb"]


def test_a_folder_without_a_checkpoint_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"no checkpoint found, the folder has notes\.txt"):
        read_items(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_items(tmp_path / "absent")


def test_json_of_hostile_depth(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(InputError, match="nested"):
        read_items(tmp_path)


# ---------------------------------------------------------------------------------------------------------- sharded


def test_whole_files_are_not_sharded(tmp_path: Path) -> None:
    found = detect_sharding(trainer_checkpoint(tmp_path / "a"))
    assert not found.is_sharded and "model.safetensors has whole parameters" in found.evidence and found.world_size == 2


def test_a_dcp_of_one_rank_is_not_sharded(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=tmp_path, no_dist=True)
    found = detect_sharding(tmp_path)
    assert (found.is_sharded, found.world_size) == (False, 1) and "0 of 1 parameters" in found.evidence


def test_a_model_that_fsdp_gathered_was_sharded(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "pytorch_model_fsdp.bin")
    assert detect_sharding(tmp_path).is_sharded
