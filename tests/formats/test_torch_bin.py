"""`pytorch_model.bin`: strided views and shared storages kept, everything but dense tensors by name refused."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.torch_bin import open_bin
from ckptx.formats.registry import open_checkpoint
from tests.formats.stock_goldens import raw_bytes, raw_tensor, values
from tests.support.memory_storage import MemoryPath

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def save(root: MemoryPath, value: Any, name: str = SINGLE, **options: Any) -> None:
    torch.save(value, file := io.BytesIO(), **options)
    (root / name).write_bytes(file.getvalue())


def expected(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: (tuple(tensor.shape), raw_bytes(tensor)) for name, tensor in tensors.items()}


def read(root: MemoryPath, name: str = SINGLE) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: (shape, data) for name, (_, shape, data) in values(open_bin(root, [name])).items()}


@pytest.mark.parametrize("container", [dict, OrderedDict])
def test_views_of_one_storage_are_entries_with_their_own_ranges(container: type, place: MemoryPath) -> None:
    base = raw_tensor("float32", (6, 4))
    tensors = {
        "base": base,
        "tied": base,
        "transposed": base.t(),
        "rows": base[2:4],
        "columns": base[:, 1:3],
        "expanded": base[:1].expand(3, 4),
        "scalar": base[5, 3],
        "none": base[:0],
    }
    save(place, container(tensors))
    catalog = open_bin(place, [SINGLE])
    assert read(place) == expected(tensors)
    assert catalog.tensors["base"].chunks == catalog.tensors["tied"].chunks
    assert catalog.tensors["rows"].chunks[0].strides is None
    assert catalog.tensors["columns"].chunks[0].strides == (4, 1)
    records = {entry.chunks[0].record for entry in catalog.tensors.values()}
    assert len(records) == 1
    assert catalog.format == "bin"
    assert catalog.files == {SINGLE: len((place / SINGLE).read_bytes())}


def test_every_kind_of_state_dict_value_is_read(place: MemoryPath) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    save(place, module.state_dict())
    assert read(place) == expected(module.state_dict())
    parameters = dict(module.named_parameters())
    save(place, parameters)
    assert read(place) == expected(parameters)
    names = ("bfloat16", "bool", "int64", "float8_e4m3fn", "uint16", "complex64", "float4_e2m1fn_x2")
    odd = {name: raw_tensor(name, (3, 5)) for name in names}
    save(place, odd)
    read_back = values(open_bin(place, [SINGLE]))
    assert {name: data for name, (_, _, data) in read_back.items()} == {k: raw_bytes(v) for k, v in odd.items()}
    assert read_back["float4_e2m1fn_x2"][1] == (3, 10)


def shards(root: MemoryPath, **weight_map: str) -> dict[str, torch.Tensor]:
    """Two shards with tensors a, b and c, and an index that says `weight_map`."""
    tensors = {name: raw_tensor("float32", (2, 3), seed) for seed, name in enumerate("abc")}
    save(root, {"a": tensors["a"], "b": tensors["b"]}, "one.bin")
    save(root, {"c": tensors["c"]}, "two.bin")
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_an_index_names_the_files(place: MemoryPath) -> None:
    tensors = shards(place, a="one.bin", b="one.bin", c="two.bin")
    assert read(place, INDEX) == expected(tensors)
    catalog = open_bin(place, [INDEX])
    assert list(catalog.files) == ["one.bin", "two.bin"]
    assert catalog.verbatim[INDEX] == (place / INDEX).read_text()
    assert list(open_bin(place, ["one.bin", "two.bin"]).tensors) == list(catalog.tensors)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (
            {"a": "one.bin", "b": "one.bin", "c": "two.bin", "d": "two.bin"},
            'tensor "d" in two.bin, but no file',
        ),
        ({"a": "one.bin", "b": "two.bin", "c": "two.bin"}, 'tensor "b" in two.bin, but it is in one.bin'),
        ({"a": "one.bin", "c": "two.bin"}, 'does not list tensor "b" of one.bin'),
        ({"a": "one.bin", "b": "one.bin", "c": "three.bin"}, r"three\.bin: no such file"),
        ({"a": "../one.bin"}, "leads out of the checkpoint directory"),
    ],
)
def test_index_and_files_must_agree(weight_map: dict[str, str], reason: str, place: MemoryPath) -> None:
    shards(place, **weight_map)
    with pytest.raises(InputError, match=reason):
        open_bin(place, [INDEX])


def test_a_name_in_two_files_is_refused(place: MemoryPath) -> None:
    save(place, {"a": torch.zeros(2)}, "one.bin")
    save(place, {"a": torch.ones(2)}, "two.bin")
    with pytest.raises(InputError, match=r'two\.bin: tensor "a" is also in one\.bin'):
        open_bin(place, ["one.bin", "two.bin"])


class Custom:
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"state_dict": {"w": 1}}, "expected only named tensors, found a nested dict at 'state_dict'"),
        ({"state_dict": {1.5: torch.zeros(2)}}, "state_dict has a key that is a value of type float"),
        ({"model": {"w": torch.zeros(2).to_sparse(), "v": torch.zeros(2)}}, "sparse"),
        ({"w": torch.zeros(2), "epoch": 3}, "expected only named tensors, found a value of type int at 'epoch'"),
        ({"w": None}, "expected only named tensors, found None at 'w'"),
        ({0: torch.zeros(2)}, "expected only named tensors, found a tensor at '0'"),
        (torch.zeros(2), "expected a dict of named tensors, found a tensor"),
        ([torch.zeros(2)], "expected a dict of named tensors, found a value of type list"),
        ({"w": torch.zeros(2, dtype=torch.complex64).conj()}, 'tensor "w": conj view'),
        ({"w": torch.eye(2).to_sparse()}, 'tensor "w": sparse tensor'),
        (
            {"w": raw_tensor("float4_e2m1fn_x2", (4, 6)).t()},
            'tensor "w": float4_e2m1fn_x2 is not row-major',
        ),
    ],
)
def test_more_than_dense_tensors_by_name_is_refused(value: Any, reason: str, place: MemoryPath) -> None:
    save(place, value)
    with pytest.raises(UnsupportedError, match=reason):
        open_bin(place, [SINGLE])


def test_a_pickled_class_is_refused(place: MemoryPath) -> None:
    save(place, {"w": torch.zeros(2), "args": Custom()})
    with pytest.raises(InputError, match=r"test_torch_bin\.Custom, which is not allowed in a checkpoint"):
        open_bin(place, [SINGLE])


def test_a_file_from_before_torch_1_6_is_named(place: MemoryPath) -> None:
    save(place, {"w": torch.zeros(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"before 1\.6"):
        open_bin(place, [SINGLE])


def test_files_that_are_no_checkpoint_are_refused(place: MemoryPath) -> None:
    (place / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match="git lfs pull"):
        open_bin(place, [SINGLE])
    (place / SINGLE).write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(InputError, match="not a torch archive"):
        open_bin(place, [SINGLE])
    (place / SINGLE).unlink()
    with pytest.raises(InputError, match="no such file"):
        open_bin(place, [SINGLE])


def test_a_truncated_file_is_refused(place: MemoryPath) -> None:
    save(place, {"w": torch.zeros(200)})
    data = (place / SINGLE).read_bytes()
    for size in range(0, len(data), 7):
        (place / SINGLE).write_bytes(data[:size])
        with pytest.raises(InputError):
            open_bin(place, [SINGLE])


# ------------------------------------------------------------------------------------------------------ nested dicts


def state() -> dict[str, torch.Tensor]:
    return {name: raw_tensor("float32", (4, 2)) for name in ("model.norm.weight", "lm_head.weight")}


def optimizer_state() -> dict[str, Any]:
    moments = {number: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 2)} for number in range(2)}
    return {"state": moments, "param_groups": [{"lr": 1e-3, "params": [0, 1]}]}


MOMENTS = [f"state.{number}.{key}" for number in range(2) for key in ("step", "exp_avg")]


@pytest.mark.parametrize(
    ("value", "prefixes", "note"),
    [
        ({"model": state()}, ["model."], None),
        ({"state_dict": state(), "epoch": 3}, ["state_dict."], "1 value other than tensors ignored, in 'epoch'"),
        ({"a": {"b": OrderedDict(state())}}, ["a.b."], None),
        ({"models": [state(), state()]}, ["models.0.", "models.1."], None),
        (
            {"model": state(), "optimizer": optimizer_state(), "step": 5},
            ["model.", "optimizer."],
            "4 values other than tensors ignored, in 'optimizer.param_groups', 'step'",
        ),
    ],
)
def test_nested_dicts_have_dotted_names(
    value: dict[str, Any], prefixes: list[str], note: str | None, place: MemoryPath
) -> None:
    save(place, value)
    catalog = open_bin(place, [SINGLE])
    model = [prefix for prefix in prefixes if prefix != "optimizer."]
    names = {prefix + name for prefix in model for name in state()}
    names |= {f"optimizer.{name}" for name in MOMENTS if "optimizer." in prefixes}
    assert (catalog.format, set(catalog.tensors)) == ("torch-save", names)
    assert catalog.notes == ([] if note is None else [f"{SINGLE}: {note}"])
    found = values(catalog)
    assert {name: data for name, (_, _, data) in found.items() if name.startswith(model[0])} == {
        model[0] + name: raw_bytes(tensor) for name, tensor in state().items()
    }


def test_two_tensors_of_one_dotted_name(place: MemoryPath) -> None:
    save(place, {"a": {"b.c": torch.zeros(2)}, "a.b": {"c": torch.ones(2)}})
    with pytest.raises(InputError, match=r'two tensors have the dotted name "a\.b\.c"'):
        open_bin(place, [SINGLE])


def test_dicts_of_any_depth_and_dicts_in_themselves(place: MemoryPath) -> None:
    deep: dict[str, Any] = {"w": torch.zeros(2)}
    for _ in range(13):
        deep = {"a": deep}
    save(place, deep)
    assert list(open_bin(place, [SINGLE]).tensors) == ["a." * 13 + "w"]
    for _ in range(9):
        deep = {"a": deep}
    save(place, deep)
    with pytest.raises(UnsupportedError, match="save the plain state_dict"):
        open_bin(place, [SINGLE])
    endless: dict[str, Any] = {"w": {"w": torch.zeros(2)}}
    endless["again"] = endless
    save(place, endless)
    with pytest.raises(UnsupportedError, match="more than 16 levels of dicts"):
        open_bin(place, [SINGLE])


def test_several_files_hold_plain_state_dicts(place: MemoryPath) -> None:
    save(place, {"model": state()}, "a.bin")
    save(place, {"x": torch.zeros(2)}, "b.bin")
    with pytest.raises(UnsupportedError, match="found a nested dict at 'model'"):
        open_bin(place, ["a.bin", "b.bin"])


@pytest.mark.parametrize("leaf", [1, torch.ones(1)], ids=["number", "tensor"])
def test_lists_that_contain_one_list_many_times_end(leaf: Any, tmp_path: Path) -> None:
    """Fourteen levels of 100 references to one list have more values than can be visited; the file has a few KB."""
    value: Any = [leaf]
    for _ in range(14):
        value = [value] * 100
    torch.save({"deep": value, "model": {"w": torch.ones(1)}}, tmp_path / "state.pt")
    with pytest.raises(UnsupportedError, match="more than 4,194,304 values"):
        open_checkpoint(tmp_path / "state.pt")
