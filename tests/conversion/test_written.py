"""The check after writing: whatever the staged files say that was not planned is found before anything is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.conversion.outputs import dcp as to_dcp
from ckptx.conversion.outputs import huggingface as to_huggingface
from ckptx.conversion.outputs import sharded as to_sharded
from ckptx.errors import InternalError, OutputError
from ckptx.formats.dcp.metadata import DcpMetadata, StorageInfo, parse_metadata
from ckptx.formats.dcp.metadata_writer import metadata_to_bytes
from ckptx.storage.interface import Source, local_path
from tests.support.checkpoint_writers import LLAMA, framed, llama, names_in, write_dcp, write_hf

GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
Header = dict[str, Any]


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "in" / "hf", llama(), shards=2)


def rewrite(path: Path, change: Callable[[Header], object]) -> None:
    """Changes the header of a safetensors file; its bytes stay."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    rows = json.loads(data[8:end])
    change(rows)
    path.write_bytes(framed(rows, data[end:]))


def swap(rows: Header, a: str, b: str) -> None:
    rows[a], rows[b] = rows[b], rows[a]


def rename(rows: Header, name: str) -> None:
    rows[f"{name}.renamed"] = rows.pop(name)


HEADERS: dict[str, Callable[[Header], object]] = {
    "two names swapped": lambda rows: swap(rows, GATE, UP),
    "another name": lambda rows: rename(rows, GATE),
    "another dtype": lambda rows: rows[GATE].update(dtype="F16"),
    "another shape": lambda rows: rows[GATE].update(shape=rows[GATE]["shape"][::-1]),
    "one dim more": lambda rows: rows[GATE].update(shape=[1, *rows[GATE]["shape"]]),
    "one name more": lambda rows: rows.update(more={"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}),
}


def spoiled_before(monkeypatch: pytest.MonkeyPatch, module: Any, check: str, spoil: Callable[..., Any]) -> None:
    """Runs `spoil` on what a check is given, before the check."""
    real = getattr(module, check)

    def spoiled(tree: Source, planned: Any) -> None:
        changed = spoil(local_path(tree.location), planned)
        real(tree, planned if changed is None else changed)

    monkeypatch.setattr(module, check, spoiled)


def refused(convert: Callable[[Path], object], dst: Path) -> None:
    """The check refuses; where the file itself was changed, who changed it is blamed, for the reason it gave."""
    with pytest.raises((InternalError, OutputError)) as caught:
        convert(dst)
    reason = caught.value if isinstance(caught.value, InternalError) else caught.value.__context__
    assert isinstance(reason, InternalError)
    assert "differs from the plan" in str(reason)
    assert names_in(dst.parent) == []


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "dst"


@pytest.mark.parametrize("change", HEADERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["laid out anew", "as they were"])
def test_headers_of_an_hf_output(
    hf: Path, dst: Path, tmp_path: Path, change: str, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp")

    def spoil(tree: Path, layout: Any) -> None:
        rewrite(tree / layout.catalog.tensors[GATE].chunks[0].file, HEADERS[change])

    size = {"max_shard_size": "1MB"} if fresh else {}
    spoiled_before(monkeypatch, to_huggingface, "check_huggingface", spoil)
    refused(lambda dst: ckptx.convert("dcp2hf", tmp_path / "dcp", dst, **size), dst)


@pytest.mark.parametrize("change", ["moved", "more", "less", "gone"])
def test_the_index_of_an_hf_output(
    hf: Path, dst: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp")

    def spoil(tree: Path, layout: Any) -> Any:
        index = json.loads(layout.index_text)
        file = index["weight_map"].pop(GATE)
        if change == "moved":
            index["weight_map"][GATE] = next(name for name in layout.catalog.files if name != file)
        if change == "more":
            index["weight_map"] |= {GATE: file, "more": file}
        return layout._replace(index_text=None if change == "gone" else json.dumps(index))

    spoiled_before(monkeypatch, to_huggingface, "check_huggingface", spoil)
    refused(lambda dst: ckptx.convert("dcp2hf", tmp_path / "dcp", dst), dst)


def move_block(rows: Header) -> None:
    """Says that a block of a tensor lies elsewhere in it."""
    info = json.loads(rows["__metadata__"]["DCP_SHARDING_INFO"])
    info[GATE]["saved_offsets"][0] += 1
    rows["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)


@pytest.mark.parametrize("change", [*(name for name in HEADERS if name != "one name more"), "block moved"])
def test_headers_of_shards(hf: Path, dst: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(rows: Header) -> None:
        if change == "block moved":
            return move_block(rows)
        HEADERS[change](rows)
        if change == "another name":  # the same in what says where blocks lie
            info = json.loads(rows["__metadata__"]["DCP_SHARDING_INFO"])
            rename(info, GATE)
            rows["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
        if change == "one dim more":
            info = json.loads(rows["__metadata__"]["DCP_SHARDING_INFO"])
            info[GATE]["saved_offsets"].insert(0, 0)
            rows["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
        return None

    spoiled_before(
        monkeypatch,
        to_sharded,
        "check_sharded",
        lambda tree, catalog: rewrite(tree / catalog.tensors[GATE].chunks[1].file, apply),
    )
    refused(lambda dst: ckptx.reshard(hf, dst, tp=2, to="safetensors"), dst)


def swapped(metadata: DcpMetadata, a: str, b: str) -> DcpMetadata:
    """Two names of one shape, each with the bytes of the other."""
    other = {a: b, b: a}
    return replace(
        metadata,
        storage={
            (name, at): metadata.storage.get((other.get(name, name), at), place)
            for (name, at), place in metadata.storage.items()
        },
    )


def without(metadata: DcpMetadata, name: str) -> DcpMetadata:
    return replace(
        metadata,
        tensors={each: tensor for each, tensor in metadata.tensors.items() if each != name},
        storage={key: place for key, place in metadata.storage.items() if key[0] != name},
    )


def retyped(metadata: DcpMetadata, name: str) -> DcpMetadata:
    return replace(metadata, tensors={**metadata.tensors, name: metadata.tensors[name]._replace(dtype="float16")})


def shifted(metadata: DcpMetadata, name: str) -> DcpMetadata:
    storage = dict(metadata.storage)
    key = next(key for key in storage if key[0] == name)
    storage[key] = storage[key]._replace(offset=storage[key].offset + 64)
    return replace(metadata, storage=storage)


def more(metadata: DcpMetadata, name: str) -> DcpMetadata:
    key = next(key for key in metadata.storage if key[0] == name)
    return replace(
        metadata,
        tensors={**metadata.tensors, "more": metadata.tensors[name]},
        storage={
            **metadata.storage,
            **{("more", at): place for (each, at), place in metadata.storage.items() if each == key[0]},
        },
    )


MARKERS: dict[str, Callable[[DcpMetadata], DcpMetadata]] = {
    "two names swapped": lambda metadata: swapped(metadata, GATE, UP),
    "a name less": lambda metadata: without(metadata, GATE),
    "a name more": lambda metadata: more(metadata, GATE),
    "another dtype": lambda metadata: retyped(metadata, GATE),
    "another byte": lambda metadata: shifted(metadata, GATE),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("change", MARKERS)
def test_the_metadata_of_a_dcp(hf: Path, dst: Path, change: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(tree: Path, output: Any) -> Any:
        ((name, data),) = output.markers
        return replace(output, markers=[(name, metadata_to_bytes(MARKERS[change](parse_metadata(data, name))))])

    spoiled_before(monkeypatch, to_dcp, "check_dcp", spoil)
    refused(lambda dst: ckptx.reshard(hf, dst, tp=tp, to="dcp"), dst)


OBJECTS = ["optimizer.param_groups", "scheduler"]


def moved(metadata: DcpMetadata, name: str, **fields: Any) -> DcpMetadata:
    """The place of an object, with other fields."""
    return replace(
        metadata, storage={**metadata.storage, (name, None): metadata.storage[name, None]._replace(**fields)}
    )


def without_object(metadata: DcpMetadata, name: str) -> DcpMetadata:
    storage = {key: place for key, place in metadata.storage.items() if key != (name, None)}
    return replace(metadata, objects=tuple(each for each in metadata.objects if each != name), storage=storage)


PLACES: dict[str, Callable[[DcpMetadata, StorageInfo, StorageInfo], DcpMetadata]] = {
    "two objects swapped": lambda metadata, own, other: moved(
        moved(metadata, OBJECTS[0], path=other.path, offset=other.offset), OBJECTS[1], path=own.path, offset=own.offset
    ),
    "one byte further": lambda metadata, own, other: moved(metadata, OBJECTS[0], offset=own.offset + 1),
    "the bytes of another": lambda metadata, own, other: moved(metadata, OBJECTS[1], offset=own.offset),
    "one byte less": lambda metadata, own, other: moved(metadata, OBJECTS[0], length=own.length - 1),
    "one byte more": lambda metadata, own, other: moved(metadata, OBJECTS[0], length=own.length + 1),
    "another file": lambda metadata, own, other: moved(metadata, OBJECTS[0], path="__9_9.distcp"),
    "an object less": lambda metadata, own, other: without_object(metadata, OBJECTS[1]),
}


@pytest.mark.parametrize("change", PLACES)
def test_the_places_of_the_objects_of_a_dcp(
    tmp_path: Path, dst: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"model.{name}": each for name, each in llama().items()}
    made = write_dcp(tmp_path / "in" / "dcp", tensors, objects=OBJECTS, config=LLAMA)

    def spoil(tree: Path, output: Any) -> Any:
        ((name, data),) = output.markers
        metadata = parse_metadata(data, name)
        own, other = (metadata.storage[each, None] for each in OBJECTS)
        assert {*metadata.objects} == {*OBJECTS} and own != other
        changed = PLACES[change](metadata, own, other)
        return replace(output, markers=[(name, metadata_to_bytes(changed))])

    spoiled_before(monkeypatch, to_dcp, "check_dcp", spoil)
    refused(lambda dst: ckptx.reshard(made, dst, tp=2, to="dcp", optimizer="keep"), dst)


def drop_last_tensors(path: Path, count: int) -> None:
    """Shortens a safetensors file by its last tensors, so that it is valid, and other tensors stay where they are."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    rows = json.loads(data[8:end])
    names = sorted((name for name in rows if name != "__metadata__"), key=lambda name: rows[name]["data_offsets"])
    info = json.loads(rows.get("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
    body = rows[names[-count]]["data_offsets"][0]
    for name in names[-count:]:
        del rows[name]
        info.pop(name, None)
    if info:
        rows["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
    path.write_bytes(
        data[:8] + json.dumps(rows, separators=(",", ":")).encode().ljust(end - 8) + data[end : end + body]
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("to", ["hf", "shards"])
def test_a_file_with_fewer_tensors_than_planned(
    hf: Path, dst: Path, tmp_path: Path, to: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor that is left is as planned, and a file that lacks one looks like any other."""
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp")
    if to == "hf":
        spoiled_before(
            monkeypatch,
            to_huggingface,
            "check_huggingface",
            lambda tree, layout: drop_last_tensors(tree / next(iter(layout.catalog.files)), count),
        )
        refused(lambda dst: ckptx.convert("dcp2hf", tmp_path / "dcp", dst), dst)
    else:
        spoiled_before(
            monkeypatch,
            to_sharded,
            "check_sharded",
            lambda tree, catalog: drop_last_tensors(tree / next(iter(catalog.files)), count),
        )
        refused(lambda dst: ckptx.reshard(hf, dst, tp=2, to="safetensors"), dst)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("most", [1 << 12, 0], ids=["all blocks", "the outermost"])
def test_the_archives_of_a_dcp(hf: Path, dst: Path, tp: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is shifted by a few bytes, in the first and in the last place of a file."""
    monkeypatch.setattr("ckptx.conversion.steps.dcp_check._ALWAYS_CHECKED_BLOCKS", most)
    for last in (False, True):

        def spoil(tree: Path, output: Any, last: bool = last) -> None:
            file = sorted(output.catalog.files)[-1]
            chunks = [c for e in output.catalog.tensors.values() for c in e.chunks if c.file == file]
            at = (max if last else min)(chunk.offset for chunk in chunks)
            data = (tree / file).read_bytes()
            (tree / file).write_bytes(data[:at] + bytes(8) + data[at:-8])

        with monkeypatch.context() as patch:
            spoiled_before(patch, to_dcp, "check_dcp", spoil)
            refused(lambda dst: ckptx.reshard(hf, dst, tp=tp, to="dcp"), dst)


def test_nothing_is_found_where_nothing_is_wrong(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the markers written by the same emitter, and beyond the size at which only some blocks are looked at."""

    def same(tree: Path, output: Any) -> Any:
        ((name, data),) = output.markers
        return replace(output, markers=[(name, metadata_to_bytes(parse_metadata(data, name)))])

    with monkeypatch.context() as patch:
        spoiled_before(patch, to_dcp, "check_dcp", same)
        ckptx.reshard(hf, tmp_path / "dcp", tp=2, to="dcp")
    monkeypatch.setattr("ckptx.conversion.steps.dcp_check._ALWAYS_CHECKED_BLOCKS", 0)
    ckptx.reshard(hf, tmp_path / "again", tp=2, pp=2, to="dcp")
