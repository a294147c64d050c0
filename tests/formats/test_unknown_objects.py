"""Objects of unknown classes in files of `torch.save`: inert, reported, and no tensor in them is lost in silence."""

from __future__ import annotations

import argparse
import datetime as dt
import io
import os
import pathlib
import zipfile
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.torch_bin import open_bin
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.torch_archive.unknown_objects import UnknownNames, UnknownObject, count_tensors
from ckptx.formats.torch_archive.unpickle import load_torch
from ckptx.storage.local import LocalSource
from tests.formats.stock_goldens import values
from tests.support.forged_fsdp import Archive, FunctionCall, Name, Object, pickle_value

SAVE_TENSORS = r"save only tensors: torch\.save\(model\.state_dict\(\), \.\.\.\)"
TENSOR_NAMES = {"model.w", "model.v"}


@dataclass
class Settings:
    """A config of a training loop."""

    rate: float = 1.0


class Average:
    """An object with tensors, as those that average weights."""

    def __init__(self, state: Any) -> None:
        self.state = state


class Slotted(dict[str, Any]):
    """A dict of a class of its own, which pickles as an object with items."""


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0), "v": torch.ones(2, dtype=torch.bfloat16)}


def saved(root: Path, tree: Any, **options: Any) -> Path:
    torch.save(tree, root / "step.pt", **options)
    return root / "step.pt"


ORDINARY: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace(lr=1, nested=argparse.Namespace(path=pathlib.PurePosixPath("a"))),
    "pathlib.": pathlib.PurePosixPath("runs/a"),
    "numpy.float": np.float64(2.0),
    "numpy.array": np.arange(4),
    "datetime.datetime": dt.datetime(2025, 1, 1, tzinfo=dt.timezone.utc),
    "Settings": Settings(),
    "Average": Average({"decay": 0.9}),
    "torch.optim.adamw.AdamW": torch.optim.AdamW,
    "builtins.set": {1, 2},
    "Slotted": Slotted(a=1),
    "collections.Counter": Counter("ab"),
    "slice": slice(1, 2),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", ORDINARY)
def test_objects_are_ignored_with_a_note(kind: str, protocol: int, tmp_path: Path) -> None:
    if protocol == 4 and kind == "builtins.set":
        pytest.skip("protocol 4 writes sets as sets")
    path = saved(tmp_path, {"model": state(), "args": ORDINARY[kind]}, pickle_protocol=protocol)
    catalog = open_checkpoint(path)
    assert (catalog.format, set(catalog.tensors)) == ("torch-save", TENSOR_NAMES)
    (note,) = catalog.notes
    assert note.startswith("step.pt: 1 value other than tensors ignored, in 'args' (")
    assert kind.rpartition(".")[2].removeprefix("float").removeprefix("array") in note


def test_random_states_and_rates_of_any_type(tmp_path: Path) -> None:
    tree = {
        "model": state(),
        "rng": np.random.RandomState(0).get_state(),
        "log": {"by_rate": {0.5: 1.0, None: 2}, 3: [np.int64(1)]},
        "moments": defaultdict(dict, {"w": {"exp_avg": torch.ones(6)}}),
    }
    catalog = open_checkpoint(saved(tmp_path, tree))
    assert set(catalog.tensors) == {*TENSOR_NAMES, "moments.w.exp_avg"}
    (note,) = catalog.notes
    assert note.startswith("step.pt: 7 values other than tensors ignored, in 'rng.0', 'rng.1' (numpy.")


def test_values_of_the_tensors_are_those_that_torch_loads(tmp_path: Path) -> None:
    path = saved(tmp_path, {"args": Settings(), "model": OrderedDict(state()), "rng": np.random.RandomState(0)})
    expected = torch.load(path, weights_only=False)["model"]
    found = values(open_checkpoint(path))
    assert found.keys() == TENSOR_NAMES
    for name, tensor in expected.items():
        assert found[f"model.{name}"][2] == tensor.view(torch.uint8).numpy().tobytes()


WITH_TENSORS: dict[str, Any] = {
    "attribute": Average(state()),
    "list": Average([torch.ones(1), (torch.zeros(2),)]),
    "nested object": Average({"a": Average(Average(torch.ones(1))), "b": torch.ones(2)}),
    "items of a dict class": Slotted(state()),
}


@pytest.mark.parametrize("kind", WITH_TENSORS)
def test_tensors_in_objects_are_reported(kind: str, tmp_path: Path) -> None:
    catalog = open_checkpoint(saved(tmp_path, {"model": state(), "ema": WITH_TENSORS[kind]}))
    assert set(catalog.tensors) == TENSOR_NAMES
    ignored, tensors = catalog.notes
    class_name = f"{__name__}.{type(WITH_TENSORS[kind]).__name__}"
    assert ignored == f"step.pt: 1 value other than tensors ignored, in 'ema' ({class_name})"
    assert tensors == (
        f"step.pt: 2 tensors in objects not converted, in 'ema' ({class_name}); to convert them, save the state_dict() "
        "of the objects"
    )


def test_an_object_with_tensors_in_a_state_dict_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": {**state(), "q.weight": 1, "packed": Average(torch.ones(3))}})
    with pytest.raises(UnsupportedError, match=rf"Average that contains tensors at 'model\.packed'; {SAVE_TENSORS}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "tree",
    [
        {"w": torch.ones(2), "args": Settings()},
        {"args": Settings(), "step": 1},
        {"model": Average(state())},
        Average(state()),
        {"model": {"w": Average(torch.ones(2))}},
    ],
)
def test_without_nested_tensors_objects_are_refused(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"step\.pt: refers to .*; nothing was executed; {SAVE_TENSORS}"):
        open_checkpoint(saved(tmp_path, tree))


def test_several_files_hold_no_objects(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.bin")
    torch.save({"model": {"x": torch.ones(1)}, "args": Settings()}, tmp_path / "b.bin")
    with pytest.raises(InputError, match=rf"b\.bin: refers to .*{SAVE_TENSORS}"):
        open_bin(LocalSource(tmp_path), ["a.bin", "b.bin"])


# ------------------------------------------------------------------------------------------------------------ attacks

SYSTEM, EVAL = Name("posix", "system"), Name("builtins", "eval")
GETATTR: Any = FunctionCall(Name("builtins", "getattr"), (Name("os", "path"), "os"))
ATTRGETTER: Any = FunctionCall(Name("operator", "attrgetter"), ("system",))
ATTACKS: dict[str, tuple[Any, str]] = {
    "os.system": (FunctionCall(SYSTEM, ("touch proof",)), "posix.system"),
    "eval": (FunctionCall(EVAL, ("open('proof', 'w')",)), "builtins.eval"),
    "python 2 name": (FunctionCall(Name("__builtin__", "eval"), ("open('proof', 'w')",)), "builtins.eval"),
    "function from getattr": (
        FunctionCall(GETATTR, ("touch proof",)),
        "builtins.getattr",
    ),
    "function from a function": (
        FunctionCall(ATTRGETTER, (Name("os", "x"),)),
        "operator.attrgetter",
    ),
    "call as argument": (FunctionCall(Name("builtins", "list"), (FunctionCall(SYSTEM, ("touch proof",)),)), "list"),
    "call as state": (Object(Name("argparse", "Namespace"), (), {"a": FunctionCall(SYSTEM, ("touch proof",))}), "Name"),
    "dotted name": (FunctionCall(Name("torch", "os.system"), ("touch proof",)), "torch.os.system"),
    "class of ckptx": (Object(Name("ckptx.storage.files", "LocalFiles"), ("proof",)), "ckptx.storage.files.LocalFiles"),
    "state of attributes": (Object(Name("a", "B"), (), {"class_name": "x", "contents": None}), "a.B"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_an_object_names_runs(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value, class_name = ATTACKS[attack]
    archive = Archive()
    archive.write(tmp_path / "step.pt", {"model": {"w": archive.tensor(np.ones(2))}, "x": value})
    catalog = open_checkpoint(tmp_path / "step.pt")
    assert list(catalog.tensors) == ["model.w"]
    assert "'x' (" in catalog.notes[0] and class_name in catalog.notes[0]
    assert os.listdir(tmp_path) == ["step.pt"]


@pytest.mark.parametrize("change", [b"}X\x0a\0\0\0class_nameX\x01\0\0\0asb", b"N}X\x08\0\0\0contentsNs\x86b", b"Nb"])
def test_an_unknown_class_cannot_be_changed(change: bytes) -> None:
    with pytest.raises(InputError, match="damaged pickle"):
        load_torch(b"\x80\x02ca\nB\n" + change + b".", "x", unknown=UnknownNames())


def test_names_of_one_pickle_are_limited() -> None:
    pickled = b"\x80\x02]" + b"".join(b"ca\nB%d\na" % number for number in range(10_001)) + b"."
    with pytest.raises(InputError, match="refers to more than 10,000 classes and functions; save only tensors"):
        load_torch(pickled, "x", unknown=UnknownNames())


def test_one_stand_in_does_not_affect_the_next_pickle() -> None:
    pickled = pickle_value(Object(Name("a", "B"), (1,), {"b": 2}))
    first, second = (load_torch(pickled, "x", unknown=UnknownNames()) for _ in range(2))
    assert isinstance(first, UnknownObject) and type(first) is not type(second)
    assert first.contents == second.contents == [1, {"b": 2}]


def test_objects_nested_deeply_or_in_themselves_are_counted_in_linear_time() -> None:
    deep = b"\x80\x02" + b"ca\nB\n(" * 50_000 + b"N" + b"tR" * 50_000 + b"."
    assert count_tensors(load_torch(deep, "x", unknown=UnknownNames()), set()) == 0
    shared = (
        b"\x80\x02ca\nB\nq\x00)R" + b"".join(b"q\x01h\x00h\x01h\x01\x86R" for _ in range(5000)) + b"."
    )  # each level contains the previous one twice
    assert count_tensors(load_torch(shared, "x", unknown=UnknownNames()), set()) == 0
    itself = b"\x80\x02ca\nB\n)Rq\x00}X\x01\0\0\0ah\x00sb."
    assert count_tensors(load_torch(itself, "x", unknown=UnknownNames()), set()) == 0


def test_a_dtype_is_no_unknown_object() -> None:
    torch.save({"model": {"w": torch.ones(2, dtype=torch.uint16)}, "x": Settings()}, stream := io.BytesIO())
    with zipfile.ZipFile(stream) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert load_torch(pickled, "x", unknown=UnknownNames())["model"]["w"].dtype.torch_name == "uint16"
