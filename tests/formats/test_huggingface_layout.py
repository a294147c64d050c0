"""Shards: how tensors are dealt out, and how the very same files are written again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptx.catalog.dtype import BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import UnsupportedError
from ckptx.formats.huggingface import INDEX, SINGLE, open_huggingface
from ckptx.formats.huggingface_layout import HuggingFaceLayout, allocate, natural_key, remember, restore
from tests.writers import framed, header, llama, value, write_hf, write_safetensors


def entries(**shapes: tuple[int, ...]) -> list[TensorEntry]:
    return [TensorEntry(name, BY_NAME["U8"], shape, ()) for name, shape in shapes.items()]


def dealt(layout: HuggingFaceLayout) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for entry in layout.catalog.tensors.values():
        files.setdefault(entry.chunks[0].file, []).append(entry.name)
    return files


def test_one_file_without_an_index() -> None:
    layout = allocate(Path("x"), entries(b=(4,), a=(4,)), 8)
    assert dealt(layout) == {SINGLE: ["a", "b"]}
    assert layout.index_text is None
    assert layout.catalog.files[SINGLE] == len(layout.prologues[SINGLE]) + 8


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
        TensorEntry(name, BY_NAME[dtype], (3,), ())
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
        allocate(Path("x"), [TensorEntry("a", BY_NAME["C128"], (1,), ())], 100)


def rewritten(root: Path, weights: str) -> dict[str, bytes]:
    """Headers and index as `restore` gives them from what `remember` kept, through JSON as a manifest is."""
    source = open_huggingface(root, weights)
    origin = json.loads(json.dumps(remember(source)))
    files = list(source.files)
    tensors = {name: (entry, files.index(entry.chunks[0].file)) for name, entry in source.tensors.items()}
    layout = restore(root, origin, tensors)
    assert layout.catalog.files == source.files
    assert {n: e.chunks for n, e in layout.catalog.tensors.items()} == {n: e.chunks for n, e in source.tensors.items()}
    texts = dict(layout.prologues)
    if layout.index_text is not None:
        texts[layout.index_name] = layout.index_text.encode()
    return texts


def check_restored(root: Path, weights: str) -> None:
    for name, data in rewritten(root, weights).items():
        assert (root / name).read_bytes().startswith(data), name


def test_usual_files_are_restored_without_keeping_their_headers(tmp_path: Path) -> None:
    write_hf(tmp_path, llama(), shards=2)
    check_restored(tmp_path, INDEX)
    origin = remember(open_huggingface(tmp_path, INDEX))
    assert all(set(file) == {"name", "metadata"} for file in origin["files"])
    assert set(origin["index"]) == {"name", "metadata"}


@pytest.mark.parametrize("metadata", [{}, {"format": "pt", "x": 'é " \\'}, {"b": "1", "a": "2"}])
def test_metadata_of_any_kind(tmp_path: Path, metadata: dict[str, str]) -> None:
    write_safetensors(tmp_path / SINGLE, llama(), metadata)
    check_restored(tmp_path, SINGLE)


@pytest.mark.parametrize("how", ["spaces", "order of keys", "unpadded", "metadata last", "escapes"])
def test_unusual_headers_are_kept_as_they_are(tmp_path: Path, how: str) -> None:
    tensors = {"a": value("F32", 2), "é": value("F32", 3)}
    rows = header(tensors, {"format": "pt"})
    text = {
        "spaces": json.dumps(rows, indent=1, ensure_ascii=False),
        "order of keys": json.dumps({k: dict(reversed(v.items())) for k, v in rows.items()}, ensure_ascii=False),
        "unpadded": json.dumps(rows, separators=(",", ":"), ensure_ascii=False),
        "metadata last": json.dumps(dict(reversed(rows.items())), ensure_ascii=False),
        "escapes": json.dumps(rows, separators=(",", ":")),
    }[how]
    (tmp_path / SINGLE).write_bytes(framed(text, b"".join(data for _, _, data in tensors.values())))
    check_restored(tmp_path, SINGLE)


@pytest.mark.parametrize("newline", ["\n", "\r\n", ""])
@pytest.mark.parametrize("indent", [None, 2, 4])
def test_an_index_of_any_style(tmp_path: Path, indent: int | None, newline: str) -> None:
    write_hf(tmp_path, llama(), shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_bytes((json.dumps(index, indent=indent) + newline).encode())
    check_restored(tmp_path, INDEX)


def test_the_comparison_would_notice(tmp_path: Path) -> None:
    """A planted defect: another index than the one remembered."""
    write_hf(tmp_path, llama(), shards=2)
    texts = rewritten(tmp_path, INDEX)
    assert texts[INDEX] == (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).write_text((tmp_path / INDEX).read_text() + " ")
    assert texts[INDEX] != (tmp_path / INDEX).read_bytes()
