"""`--resume` over a complete output: it is complete only if every byte of every file is what a new run would write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import ShardedChunks, TensorEntry
from ckptx.errors import OutputError, OutputFailure, StorageFailure
from ckptx.formats.hf.reader import open_huggingface
from ckptx.formats.sharded import layout as sharded_layout
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage
from ckptx.publishing.existing_files import compare_existing_files
from ckptx.transfer.executor import execute
from ckptx.transfer.plan import CopyPlan
from ckptx.transfer.planner import plan_copy
from tests.storage.test_outputs_in_memory import TENSORS, files_at, made
from tests.support.checkpoint_writers import value, write_hf
from tests.support.memory_storage import MemoryFiles, MemoryPath, MemoryPublisher, tree_of

STRAYS = [
    "model.safetensors", "other.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "__9_0.distcp", "x.metadata",
]  # fmt: skip


@pytest.fixture
def source(place: MemoryPath) -> MemoryPath:
    write_hf(place / "hf", TENSORS, shards=2)
    (place / "hf" / "tokenizer.json").write_text("{}")
    return place / "hf"


def resumed(source: MemoryPath, target: MemoryPath) -> bool:
    """True if the output is complete; False if it is not, and was left alone."""
    before = files_at(target)
    try:
        result = made(source, target, MemoryPublisher, resume=True)
    except OutputError as error:
        assert "exists and is not empty" in str(error)
        assert files_at(target) == before
        return False
    assert result is not None and result.was_complete and files_at(target) == before
    return True


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp", "config.json", "tokenizer.json"])
def test_a_changed_byte_of_any_file_is_noticed(source: MemoryPath, place: MemoryPath, name: str) -> None:
    """Also where no tensor is, and where no loader looks: the end of an archive, a marker, a sidecar."""
    target = place / "out"
    made(source, target, MemoryPublisher)
    data = (target / name).read_bytes()
    for at in sorted({*range(0, len(data), -(-len(data) // 12)), len(data) - 1}):
        (target / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert not resumed(source, target), at
    for other in (data[:-1], data + b"\0", b""):
        (target / name).write_bytes(other)
        assert not resumed(source, target)
    (target / name).unlink()
    assert not resumed(source, target)
    (target / name).write_bytes(data)
    assert resumed(source, target)


@pytest.mark.parametrize("stray", [*STRAYS, "notes.txt", "sub/model.safetensors"])
def test_weights_that_a_loader_would_read_instead_are_noticed(
    source: MemoryPath, place: MemoryPath, stray: str
) -> None:
    made(source, place / "out", MemoryPublisher)
    (place / "out" / stray).write_bytes(b"{}")
    assert resumed(source, place / "out") is (stray not in STRAYS)


@pytest.mark.parametrize("key", ["digest", "dtype", "bytes", "sidecar", "tensor"])
def test_another_manifest_is_noticed(source: MemoryPath, place: MemoryPath, key: str) -> None:
    made(source, place / "out", MemoryPublisher)
    manifest = json.loads((place / "out" / "ckptx.json").read_bytes())
    name = next(iter(manifest["tensors"]))
    row = manifest["tensors"][name]
    if key == "bytes":
        manifest["files"]["__0_0.distcp"]["bytes"] += 1
    elif key == "sidecar":
        del manifest["sidecars"]["config.json"]
    elif key == "tensor":
        manifest["tensors"]["more"] = row
    else:
        row[key] = {"digest": "0" * 32, "dtype": "F16"}[key]
    (place / "out" / "ckptx.json").write_bytes(json.dumps(manifest).encode())
    assert not resumed(source, place / "out")


# Files of which several ranks have a copy

DTYPE = DTYPES_BY_NAME["F32"]
PLACED = {"w": ((6, 4), Placement(0, (6,))), "v": ((5, 4), None), "u": ((7,), None), "s": ((), None)}
MESHES = [ParallelDims(tp=2), ParallelDims(tp=3), ParallelDims(tp=2, dp_shard=2), ParallelDims(tp=4, dp_shard=2)]


@contextmanager
def written(place: MemoryPath, dims: ParallelDims) -> Iterator[tuple[CopyPlan, Catalog, Any]]:
    """Shards of all ranks, with a copy on each of what TP does not shard: the plan, the catalog, the source files."""
    values = {name: value("F32", *shape, seed=seed) for seed, (name, (shape, _)) in enumerate(PLACED.items())}
    source = open_huggingface(write_hf(place / "hf", values), "model.safetensors")
    tensors = [
        (TensorEntry(name, DTYPE, shape, ()), 0, blocks_of_stage(shape, placement, dims, True))
        for name, (shape, placement) in PLACED.items()
    ]
    layout = sharded_layout.allocate(place / "out", tensors, dims)
    names = {name: name for name in layout.catalog.tensors}
    plan = plan_copy(source, layout.catalog, names, prologues=layout.prologues, file_groups=layout.file_groups)
    with source.source.open() as files, tree_of(place / "out") as tree, tree_of(place / "journal") as journal:
        execute(plan, files, tree, journal, workers=1, max_memory=1 << 20)
        yield plan, layout.catalog, files


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_a_changed_header_or_copy_on_any_rank_is_noticed(place: MemoryPath, dims: ParallelDims) -> None:
    """A loader reads the copy of its own rank, so that each of them counts, whatever the manifest says of its file."""
    with written(place, dims) as (plan, catalog, files):
        out = place / "out"
        found = compare_existing_files(out, plan, files, 1 << 20)
        assert found is not None and found.was_complete
        for file in plan.files:
            data = (out / file.name).read_bytes()
            for at in (0, 8, len(file.prologue) - 1):
                (out / file.name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                assert compare_existing_files(out, plan, files, 1 << 20) is None, (file.name, at)
            (out / file.name).unlink()
            assert compare_existing_files(out, plan, files, 1 << 20) is None
            (out / file.name).write_bytes(data)
        replicas = 0
        for entry in catalog.tensors.values():
            assert isinstance(entry.chunks, ShardedChunks)
            for block, chunk in zip(entry.chunks.blocks, entry.chunks, strict=True):
                replicas += block.is_replica
                data = (out / chunk.file).read_bytes()
                for at in (chunk.offset, chunk.offset + chunk.nbytes - 1):
                    (out / chunk.file).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                    assert compare_existing_files(out, plan, files, 1 << 20) is None, (entry.name, chunk)
                (out / chunk.file).write_bytes(data)
        assert replicas >= 3 * (dims.tp - 1)
        assert compare_existing_files(out, plan, files, 1 << 20) == found


def test_a_storage_that_fails_is_no_difference(place: MemoryPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """If any read fails, the contents of the files are unknown, so that the output is not accepted."""
    with written(place, ParallelDims(tp=2)) as (plan, _, files):
        out, failing_read, reads = place / "out", 0, 0

        def failing(method: Any) -> Any:
            def read(opened: MemoryFiles, *arguments: Any) -> Any:
                nonlocal reads
                reads += opened.root == out
                if opened.root == out and reads == failing_read:
                    raise StorageFailure("Input/output error")
                return method(opened, *arguments)

            return read

        for name in ("read_into", "read_up_to"):
            monkeypatch.setattr(MemoryFiles, name, failing(getattr(MemoryFiles, name)))
        assert compare_existing_files(out, plan, files, 1 << 20) is not None
        for number in range(1, reads + 1):
            failing_read, reads = number, 0
            with pytest.raises(OutputFailure, match="Input/output error"):
                compare_existing_files(out, plan, files, 1 << 20)
