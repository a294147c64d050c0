"""The files of an HF checkpoint, remembered and laid out again; what was remembered decides names and order alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckptx.catalog.manifest import OriginalFile, OriginalFiles, OriginalIndex, encode_manifest
from ckptx.catalog.manifest_parser import parse_manifest
from ckptx.errors import InputError
from ckptx.formats.hf.original_files import plan_recorded_files, record_files
from ckptx.formats.hf.reader import INDEX_FILE, SINGLE_FILE, open_huggingface
from tests.support.checkpoint_writers import (
    framed,
    header,
    llama,
    manifest,
    value,
    write_hf,
    write_index,
    write_safetensors,
)
from tests.support.memory_storage import MemoryPath


def rewritten(root: MemoryPath, weights: str) -> dict[str, bytes]:
    """Return headers and index as `plan_recorded_files` restores them from a manifest that was written and read."""
    source = open_huggingface(root, weights)
    original = record_files(source, [])
    assert original is not None
    found = manifest("huggingface", source.files, {}) | {"origin": original.to_json()}
    kept = parse_manifest(encode_manifest(found), "ckptx.json").original
    assert kept == original
    layout = plan_recorded_files(root, kept, source.tensors, "ckptx.json")
    assert layout.catalog.files == source.files
    assert {n: e.chunks for n, e in layout.catalog.tensors.items()} == {n: e.chunks for n, e in source.tensors.items()}
    texts = dict(layout.prologues)
    if layout.index_text is not None:
        texts[layout.index_name] = layout.index_text.encode()
    return texts


def check_restored(root: MemoryPath, weights: str) -> None:
    for name, data in rewritten(root, weights).items():
        assert (root / name).read_bytes().startswith(data), name


def test_usual_files_are_restored_without_keeping_their_headers(place: MemoryPath) -> None:
    write_hf(place, llama(), shards=2)
    check_restored(place, INDEX_FILE)
    original = record_files(open_huggingface(place, INDEX_FILE), [])
    assert original is not None and original.index is not None
    assert all(file.header is None for file in original.files)
    assert original.index.text is None


@pytest.mark.parametrize("metadata", [{}, {"format": "pt", "x": 'é " \\'}, {"b": "1", "a": "2"}])
def test_metadata_of_any_kind(place: MemoryPath, metadata: dict[str, str]) -> None:
    write_safetensors(place / SINGLE_FILE, llama(), metadata)
    check_restored(place, SINGLE_FILE)


@pytest.mark.parametrize("how", ["spaces", "order of keys", "unpadded", "metadata last", "escapes"])
def test_unusual_headers_are_kept_as_they_are(place: MemoryPath, how: str) -> None:
    tensors = {"a": value("F32", 2), "é": value("F32", 3)}
    rows = header(tensors, {"format": "pt"})
    text = {
        "spaces": json.dumps(rows, indent=1, ensure_ascii=False),
        "order of keys": json.dumps({k: dict(reversed(v.items())) for k, v in rows.items()}, ensure_ascii=False),
        "unpadded": json.dumps(rows, separators=(",", ":"), ensure_ascii=False),
        "metadata last": json.dumps(dict(reversed(rows.items())), ensure_ascii=False),
        "escapes": json.dumps(rows, separators=(",", ":")),
    }[how]
    (place / SINGLE_FILE).write_bytes(framed(text, b"".join(data for _, _, data in tensors.values())))
    check_restored(place, SINGLE_FILE)


@pytest.mark.parametrize("newline", ["\n", "\r\n", ""])
@pytest.mark.parametrize("indent", [None, 2, 4])
def test_an_index_of_any_style(place: MemoryPath, indent: int | None, newline: str) -> None:
    write_hf(place, llama(), shards=2)
    index = json.loads((place / INDEX_FILE).read_text())
    (place / INDEX_FILE).write_bytes((json.dumps(index, indent=indent) + newline).encode())
    check_restored(place, INDEX_FILE)


def test_the_comparison_would_notice(place: MemoryPath) -> None:
    """An injected defect: another index than the one remembered."""
    write_hf(place, llama(), shards=2)
    texts = rewritten(place, INDEX_FILE)
    assert texts[INDEX_FILE] == (place / INDEX_FILE).read_bytes()
    (place / INDEX_FILE).write_text((place / INDEX_FILE).read_text() + " ")
    assert texts[INDEX_FILE] != (place / INDEX_FILE).read_bytes()


@pytest.mark.parametrize("depth", [1, 31, 32, 60])
def test_an_index_that_is_nested_deeply(place: MemoryPath, depth: int) -> None:
    """A manifest may be nested no deeper than any other file, with the index inside of it."""
    write_hf(place, llama(), shards=2)
    index = json.loads((place / INDEX_FILE).read_text())
    for _ in range(depth):
        index["metadata"] = [index["metadata"]]
    (place / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    check_restored(place, INDEX_FILE)


@pytest.mark.parametrize(
    "names", [["a.st", "b.st"], ["./a.safetensors", "b.safetensors"], ["model.safetensors", "b.safetensors"]]
)
def test_names_that_are_not_given_back_are_not_remembered(place: MemoryPath, names: list[str]) -> None:
    tensors = {"a": value("F32", 2), "b": value("F32", 3)}
    for name, (tensor, data) in zip(names, tensors.items(), strict=True):
        write_safetensors(place / name, {tensor: data})
    write_index(place, dict(zip(tensors, names, strict=True)))
    notes: list[str] = []
    assert record_files(open_huggingface(place, INDEX_FILE), notes) is None
    assert "not recorded" in notes[0]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rows: rows.update(a=rows["b"], b=rows["a"]), 'tensor "a" is F32 [3] at bytes'),
        (lambda rows: rows["a"].update(dtype="I32"), 'tensor "a" is I32'),
        (lambda rows: rows["a"].update(shape=[2, 1]), 'tensor "a" is F32 [2, 1]'),
        (lambda rows: rows.update(c=rows.pop("a")), 'tensor "a" is missing'),
        (lambda rows: rows["a"].update(data_offsets=[0, 4]), 'tensor "a" has 4 bytes'),
        (lambda rows: rows["a"].update(shape=[1 << 70]), 'tensor "a"'),
        (lambda rows: rows["a"].update(dtype="F7"), "not a dtype"),
        (lambda rows: rows.pop("b"), "tensors end at byte"),
        (lambda rows: rows.update(c={"dtype": "F32", "shape": [0], "data_offsets": [20, 20]}), "lists 3 tensors"),
        (lambda rows: rows.update(__metadata__={"a": 1}), "__metadata__"),
        (lambda rows: rows.update(__metadata__=7), "__metadata__"),
    ],
)
def test_a_header_that_says_something_else_is_refused(
    place: MemoryPath, spoil: Callable[[dict[str, Any]], object], said: str
) -> None:
    tensors = {"a": value("F32", 2), "b": value("F32", 3)}
    write_safetensors(place / SINGLE_FILE, tensors)
    source = open_huggingface(place, SINGLE_FILE)
    rows = header(tensors, {"format": "pt"})

    def restored() -> None:
        original = OriginalFiles((OriginalFile(SINGLE_FILE, None, json.dumps(rows)),), None, {"a": 0, "b": 0})
        plan_recorded_files(place, original, source.tensors, "x/ckptx.json")

    restored()
    spoil(rows)
    with pytest.raises(
        InputError, match=r"^x/ckptx\.json: origin\.files\[0\]\.header: .*remove the manifest, which no loader needs"
    ) as error:
        restored()
    assert said in str(error.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.update({"model.norm.weight": "model-00001-of-00002.safetensors"}),
        lambda found: found.update({"more": "model-00001-of-00002.safetensors"}),
        lambda found: found.update({"model.norm.weight": "/etc/passwd"}),
        lambda found: found.pop("model.norm.weight"),
        lambda found: found.clear(),
    ],
)
def test_an_index_that_says_something_else_is_refused(
    place: MemoryPath, spoil: Callable[[dict[str, str]], object]
) -> None:
    write_hf(place, llama(), shards=2)
    source = open_huggingface(place, INDEX_FILE)
    index = json.loads((place / INDEX_FILE).read_text())
    original = record_files(source, [])
    assert original is not None

    def restored() -> None:
        kept = OriginalFiles(original.files, OriginalIndex(INDEX_FILE, None, json.dumps(index)), original.tensors)
        plan_recorded_files(place, kept, source.tensors, "x/ckptx.json")

    restored()
    spoil(index["weight_map"])
    with pytest.raises(
        InputError, match=r"^x/ckptx\.json: origin\.index\.text: .*remove the manifest, which no loader needs"
    ):
        restored()
