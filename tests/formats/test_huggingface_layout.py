"""Shards: how tensors are dealt out, and how the very same files are written again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import UnsupportedError
from ckptx.formats.hf.layout import HuggingFaceLayout, allocate, natural_key
from ckptx.formats.hf.reader import SINGLE_FILE


def entries(**shapes: tuple[int, ...]) -> list[TensorEntry]:
    return [TensorEntry(name, DTYPES_BY_NAME["U8"], shape, ()) for name, shape in shapes.items()]


def dealt(layout: HuggingFaceLayout) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for entry in layout.catalog.tensors.values():
        files.setdefault(entry.chunks[0].file, []).append(entry.name)
    return files


def test_one_file_without_an_index() -> None:
    layout = allocate(Path("x"), entries(b=(4,), a=(4,)), 8)
    assert dealt(layout) == {SINGLE_FILE: ["a", "b"]}
    assert layout.index_text is None
    assert layout.catalog.files[SINGLE_FILE] == len(layout.prologues[SINGLE_FILE]) + 8


def test_a_shard_is_filled_to_the_brim_and_not_over_it() -> None:
    layout = allocate(Path("x"), entries(a=(4,), b=(4,), c=(1,), d=(9,), e=(1,)), 8)
    names = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert dealt(layout) == dict(zip(names, [["a", "b"], ["c"], ["d"], ["e"]], strict=True))
    assert layout.index_text is not None
    index = json.loads(layout.index_text)
    assert index["weight_map"] == {n: file for file, inside in dealt(layout).items() for n in inside}
    assert index["metadata"] == {"total_parameters": 19, "total_size": 19}


def test_wide_dtypes_come_first_in_a_shard() -> None:
    mixed = [
        TensorEntry(name, DTYPES_BY_NAME[dtype], (3,), ())
        for name, dtype in (("a", "U8"), ("b", "BF16"), ("c", "I64"), ("d", "F32"))
    ]
    layout = allocate(Path("x"), mixed, 1000)
    assert list(layout.catalog.tensors) == ["c", "d", "b", "a"]
    for entry in layout.catalog.tensors.values():
        assert entry.chunks[0].offset % entry.dtype.itemsize == 0


def test_layer_ten_comes_after_layer_two() -> None:
    names = ["layers.10.w", "layers.2.w", "layers.a", "layers", "embed"]
    assert sorted(names, key=natural_key) == ["embed", "layers", "layers.2.w", "layers.10.w", "layers.a"]


def test_names_of_digits_that_are_not_decimal_are_sorted_too() -> None:
    assert sorted(["2²", "w10", "w٣", "w2"], key=natural_key) == ["2²", "w2", "w٣", "w10"]


def test_a_dtype_that_safetensors_lacks() -> None:
    with pytest.raises(UnsupportedError, match='tensor "a" has dtype C128'):
        allocate(Path("x"), [TensorEntry("a", DTYPES_BY_NAME["C128"], (1,), ())], 100)
