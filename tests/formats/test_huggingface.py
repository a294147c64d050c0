"""HF directories: the index decides which files count, and both must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.reader import (
    INDEX_FILE,
    format_index,
    open_huggingface,
    parse_index,
    read_json_object,
    refuse_adapters,
)
from tests.support.checkpoint_writers import llama, value, write_hf, write_index, write_safetensors
from tests.support.memory_storage import MemoryPath


def test_shards_in_the_order_of_the_index(place: MemoryPath) -> None:
    tensors = llama()
    write_hf(place, tensors, shards=3)
    catalog = open_huggingface(place, INDEX_FILE)
    assert set(catalog.tensors) == set(tensors)
    assert sorted(catalog.files) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert catalog.nbytes == sum(len(data) for _, _, data in tensors.values())
    assert catalog.verbatim[INDEX_FILE] == (place / INDEX_FILE).read_text()


def test_strays_are_named_and_ignored(place: MemoryPath) -> None:
    write_hf(place, llama(), shards=2)
    write_safetensors(place / "consolidated.safetensors", {"norm.weight": value("F32", 4)})
    catalog = open_huggingface(place, INDEX_FILE)
    assert "norm.weight" not in catalog.tensors
    assert catalog.notes == ["consolidated.safetensors ignored: it is not part of the checkpoint"]


def test_many_strays_have_one_note(place: MemoryPath) -> None:
    write_hf(place, llama())
    for number in range(7):
        write_safetensors(place / f"v{number}.safetensors", {"norm.weight": value("F32", 4)})
    catalog = open_huggingface(place, "model.safetensors")
    (note,) = catalog.notes
    assert note == (
        "7 weight files ignored, not part of the checkpoint: v0.safetensors, v1.safetensors, v2.safetensors, "
        "v3.safetensors, v4.safetensors, and 2 more"
    )


@pytest.fixture
def two(place: MemoryPath) -> MemoryPath:
    """Two shards: x and y in the first, z in the second."""
    write_safetensors(place / "a.safetensors", {"x": value("F32", 2), "y": value("F32", 2)})
    write_safetensors(place / "b.safetensors", {"z": value("F32", 2)})
    return place


ALL = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}


def test_an_index_that_agrees(two: MemoryPath) -> None:
    write_index(two, ALL)
    assert list(open_huggingface(two, INDEX_FILE).tensors) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        pytest.param(ALL | {"w": "b.safetensors"}, '"w" in b.safetensors, but no file contains it', id="lost"),
        pytest.param(ALL | {"z": "a.safetensors", "x": "b.safetensors"}, "but it is in", id="in another file"),
        pytest.param({"x": "a.safetensors", "z": "b.safetensors"}, 'does not list tensor "y"', id="not listed"),
        pytest.param(ALL | {"w": "c.safetensors"}, "c.safetensors: no such file", id="missing shard"),
        pytest.param({"x": "../a.safetensors"}, "leads out of the checkpoint", id="climbs out"),
        pytest.param({"x": "/a.safetensors"}, "leads out of the checkpoint", id="absolute"),
        pytest.param(
            {"x": "config.json"}, r'index\.json: lists the file "config\.json", .*correct the index', id="config"
        ),
        pytest.param({"x": "."}, r'index\.json: lists the file "\.", .*; correct the index', id="directory"),
        pytest.param({}, "weight_map is empty", id="empty"),
    ],
)
def test_an_index_that_does_not_agree(two: MemoryPath, weight_map: dict[str, str], said: str) -> None:
    write_index(two, weight_map)
    with pytest.raises(InputError, match=said):
        open_huggingface(two, INDEX_FILE)


def test_a_tensor_in_two_files(two: MemoryPath) -> None:
    write_safetensors(two / "b.safetensors", {"z": value("F32", 2), "x": value("F32", 2)})
    write_index(two, ALL)
    with pytest.raises(InputError, match=r'"x" is in both a\.safetensors and b\.safetensors; remove one'):
        open_huggingface(two, INDEX_FILE)


def test_one_file_under_two_spellings(two: MemoryPath) -> None:
    write_index(two, ALL | {"x": "./a.safetensors"})
    with pytest.raises(InputError, match=r"the index names one file twice, as \S+ and \S+; correct the index"):
        open_huggingface(two, INDEX_FILE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param('{"weight_map": {"x": "a", "x": "b"}}', 'key "x" appears twice', id="a tensor twice"),
        pytest.param('{"weight_map": {}, "weight_map": {"x": "a"}}', "appears twice", id="the map twice"),
        pytest.param('{"weight_map": {"x": 1}}', "no weight_map", id="a number for a file"),
        pytest.param('{"weight_map": ["x"]}', "no weight_map", id="a list"),
        pytest.param("{}", "no weight_map", id="no map"),
        pytest.param("[]", "no weight_map", id="no object"),
        pytest.param("{", "not JSON", id="half"),
        pytest.param("[" * 100_000, "nested deeper", id="deep"),
        pytest.param("", "not JSON", id="empty"),
    ],
)
def test_a_spoiled_index(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_index(text, Path("index.json"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": 1, "a": 2}', 'key "a" appears twice'),
        (b"[1]", "expected a JSON object, found a list"),
        (b"{'a': 1}", "not JSON"),
    ],
)
def test_a_spoiled_config(place: MemoryPath, data: bytes, said: str) -> None:
    (place / "config.json").write_bytes(data)
    with pytest.raises(InputError, match=rf"config\.json: .*{said}"):
        read_json_object(place, "config.json")


def test_the_text_of_an_index_is_that_of_transformers() -> None:
    text = format_index({"b": "2", "a": "1"}, {"total_size": 3})
    assert text == json.dumps({"metadata": {"total_size": 3}, "weight_map": {"a": "1", "b": "2"}}, indent=2) + "\n"


@pytest.mark.parametrize(
    "name", ["base.lora_A.weight", "a.lora_embedding_B", "q_proj.base_layer.weight", "x.modules_to_save.default.weight"]
)
def test_adapters_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="belongs to an adapter"):
        refuse_adapters(["model.norm.weight", name], Path("x"))


def test_names_that_look_like_adapters_pass() -> None:
    refuse_adapters(["model.flora.weight", "explora_A.weight", "base_layers.0.weight"], Path("x"))
