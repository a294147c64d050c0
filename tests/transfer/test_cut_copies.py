"""Tensors cut for a mesh, and put together again: files as numpy slices them, digests that do not see the cut."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, Chunk, Record, ShardedChunks, TensorEntry
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import InputError, InternalError
from ckptx.formats.torch_archive import archive as torch_zip
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage
from ckptx.storage import open_file
from ckptx.transfer import block_writers
from ckptx.transfer import digest as digest_module
from ckptx.transfer import plan as plan_module
from ckptx.transfer import step_range_copier as passes_module
from ckptx.transfer.executor import CopyResult, execute
from ckptx.transfer.plan import CopyPlan
from ckptx.transfer.planner import plan_copy
from tests.support.checkpoint_writers import tree_bytes
from tests.support.memory_storage import MemoryPath, source_of, tree_of
from tests.transfer.test_digest import defined
from tests.transfer.test_stream import Array, numbers
from tests.transfer.test_stream import cut as sliced

Place = Path | MemoryPath

# name -> dtype, shape, placement: rows narrow and wide, even and uneven, fused, three-dimensional
CUTS: dict[str, tuple[str, Shape, Placement | None]] = {
    "rows": ("BF16", (101, 40), Placement(0, (101,))),
    "columns": ("BF16", (33, 97), Placement(1, (97,))),
    "wide columns": ("F32", (5, 90_001), Placement(1, (90_001,))),
    "few columns": ("U8", (70_000, 7), Placement(1, (7,))),
    "fused rows": ("BF16", (2 * 37, 50), Placement(0, (37, 37))),
    "fused columns": ("F32", (41, 60), Placement(1, (40, 10, 10))),
    "experts": ("BF16", (6, 2 * 11, 30), Placement(1, (11, 11))),
    "experts down": ("BF16", (6, 30, 11), Placement(2, (11,))),
    "wide experts": ("F32", (3, 8, 9_000), Placement(1, (4, 4))),
    "norm": ("F32", (64,), None),
    "bias": ("F32", (13,), Placement(0, (13,))),
    "scalar": ("F32", (), None),
    "empty": ("F32", (0, 8), Placement(1, (8,))),
    "one row": ("U8", (1, 3_000_000), Placement(1, (3_000_000,))),
    "large": ("U8", (3_000, 1024), Placement(0, (3_000,))),
    "large norm": ("U8", (2_500_000,), None),
}
ARRAYS: dict[str, Array] = {
    name: numbers(shape, DTYPES_BY_NAME[dtype].itemsize, seed)
    for seed, (name, (dtype, shape, _)) in enumerate(CUTS.items())
}


def data_of(name: str) -> bytes:
    return ARRAYS[name].tobytes()


def write_source(root: Place, parts: int = 1, recorded: bool = True) -> Catalog:
    """Every tensor cut on its own longest dim into `parts`, each chunk with the CRC of its bytes."""
    catalog = Catalog(root, "dcp", {})
    body = b""
    for name, (dtype, shape, _) in CUTS.items():
        regions = [full_region(shape)]
        if shape and parts > 1 and max(shape) >= parts:
            dim = shape.index(max(shape))
            edges = [shape[dim] * i // parts for i in range(parts + 1)]
            regions = [
                Region((*[0] * dim, a, *[0] * (len(shape) - dim - 1)), (*shape[:dim], b - a, *shape[dim + 1 :]))
                for a, b in pairwise(edges)
            ]
        chunks = []
        for region in regions:
            piece = sliced(ARRAYS[name], region).tobytes()
            record = Record(len(body), len(piece), zlib.crc32(piece)) if recorded else None
            chunks.append(Chunk(region, "src", len(body), len(piece), record=record))
            body += piece
        catalog.tensors[name] = TensorEntry(name, DTYPES_BY_NAME[dtype], shape, tuple(chunks))
    root.mkdir()
    (root / "src").write_bytes(body)
    catalog.files["src"] = len(body)
    return catalog


def allocate(dims: ParallelDims, framed: bool, replicate: bool = False, prologue: bytes = b"") -> Catalog:
    """One file a rank of one stage, blocks in the order of `CUTS`."""
    names = [f"rank{rank_in_stage}" for rank_in_stage in range(dims.ranks_per_stage)]
    ends = dict.fromkeys(names, len(prologue))
    catalog = Catalog(Path(), "dcp", {})
    for name, (dtype_name, shape, placement) in CUTS.items():
        dtype = DTYPES_BY_NAME[dtype_name]
        blocks = blocks_of_stage(shape, placement, dims, replicate)
        lengths, offsets = [], array("q")
        for block in blocks:
            frame = torch_zip.archive_frame(dtype, block.region.sizes) if framed else None
            nbytes = dtype.nbytes(block.region.numel) + (len(frame.head) + frame.tail_nbytes if frame else 0)
            file = names[block.rank_in_stage]
            offsets.append(ends[file])
            lengths.append(nbytes)
            ends[file] += nbytes
        files = tuple(names[block.rank_in_stage] for block in blocks)
        catalog.tensors[name] = TensorEntry(name, dtype, shape, ShardedChunks(blocks, files, offsets, tuple(lengths)))
    catalog.files = ends
    return catalog


def planned(source: Catalog, target: Catalog, framed: bool, prologue: bytes = b"") -> CopyPlan:
    return plan_copy(
        source,
        target,
        {name: name for name in target.tensors},
        build_frame=torch_zip.archive_frame if framed else None,
        prologues=dict.fromkeys(target.files, prologue),
        file_groups=[tuple(target.files)],
    )


def expected(target: Catalog, framed: bool, prologue: bytes = b"") -> dict[str, bytes]:
    """The files, block by block by numpy."""
    files = dict.fromkeys(target.files, prologue)
    for name, entry in target.tensors.items():
        assert isinstance(entry.chunks, ShardedChunks)
        for block, chunk in zip(entry.chunks.blocks, entry.chunks, strict=True):
            piece = sliced(ARRAYS[name], block.region).tobytes() if entry.shape else data_of(name)
            if framed:
                frame = torch_zip.archive_frame(entry.dtype, block.region.sizes)
                piece = frame.head + piece + frame.build_tail(zlib.crc32(piece))
            files[chunk.file] += piece
    return files


def run(plan: CopyPlan, root: Place, out: Place, workers: int = 1) -> CopyResult:
    with source_of(root).open() as files, tree_of(out / "tree") as tree, tree_of(out / "journal") as journal:
        return execute(plan, files, tree, journal, workers=workers, max_memory=64 << 20, resumed=True)


MESHES = [
    ParallelDims(tp=1),
    ParallelDims(tp=2),
    ParallelDims(tp=3),
    ParallelDims(tp=8),
    ParallelDims(2, 1, 2),
    ParallelDims(3, 1, 4),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dims", MESHES, ids=str)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("framed", [True, False])
def test_a_cut_is_what_numpy_cuts(place: MemoryPath, dims: ParallelDims, parts: int, framed: bool) -> None:
    source = write_source(place / "in", parts)
    target = allocate(dims, framed, replicate=not framed)
    plan = planned(source, target, framed)
    outcome = run(plan, source.root, place / "out")
    written = tree_bytes(place / "out" / "tree")
    assert written == expected(target, framed)
    assert outcome.digests == {name: defined(data_of(name)) for name in CUTS}
    assert outcome.file_digests == {name: defined(data) for name, data in written.items()}
    assert outcome.bytes_written == plan.bytes_written == sum(map(len, written.values()))
    assert outcome.bytes_read == plan.bytes_read == sum(len(data_of(name)) for name in CUTS)


@pytest.mark.parametrize("long", [1, 1 << 16, 1 << 30])
@pytest.mark.parametrize("framed", [True, False])
def test_pieces_that_are_passed_on_and_pieces_in_buffers_are_the_same_files(
    place: MemoryPath, monkeypatch: pytest.MonkeyPatch, framed: bool, long: int
) -> None:
    """Where a piece begins in the buffer of its file, or behind one that was written past it."""
    monkeypatch.setattr(block_writers, "_MIN_UNBUFFERED_NBYTES", long)
    passed: list[int] = []
    pass_on = block_writers.BlockWriter.write_through
    monkeypatch.setattr(
        block_writers.BlockWriter, "write_through", lambda self, view: (passed.append(len(view)), pass_on(self, view))
    )
    source = write_source(place / "in", 3)
    target = allocate(ParallelDims(tp=2), framed)
    outcome = run(planned(source, target, framed), source.root, place / "out")
    written = tree_bytes(place / "out" / "tree")
    assert written == expected(target, framed)
    assert outcome.file_digests == {name: defined(data) for name, data in written.items()}
    assert bool(passed) == (long < 1 << 30)


@pytest.mark.parametrize("leaf", [1 << 18, 1 << 20])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dims", [ParallelDims(tp=2), ParallelDims(3, 1, 2)], ids=str)
def test_workers_share_a_large_tensor(
    place: MemoryPath, monkeypatch: pytest.MonkeyPatch, dims: ParallelDims, workers: int, leaf: int
) -> None:
    """Runs of 256 KiB over tensors of up to 3 MB: several shares each, that begin in the middle of blocks."""
    monkeypatch.setattr(plan_module, "STEP_RANGE_NBYTES", 1 << 18)
    monkeypatch.setattr(digest_module, "LEAF_NBYTES", leaf)
    monkeypatch.setattr(passes_module, "BUFFER_NBYTES", 1 << 18)
    source = write_source(place / "in", 3)
    target = allocate(dims, True)
    plan = planned(source, target, True)
    assert sum(run.dim0_range is not None for run in plan.step_ranges()) >= 6
    outcome = run(plan, source.root, place / "out", workers)
    written = tree_bytes(place / "out" / "tree")
    assert written == expected(target, True)
    assert outcome.digests == {name: defined(data_of(name), leaf) for name in CUTS}
    assert outcome.file_digests == {name: defined(data, leaf) for name, data in written.items()}
    assert outcome.bytes_read == plan.bytes_read, "a checksummed record is not read twice"


def test_a_prologue_stands_before_the_blocks_of_every_rank(place: MemoryPath) -> None:
    source, prologue = write_source(place / "in"), b"header" * 20_000
    target = allocate(ParallelDims(tp=3), False, True, prologue)
    run(planned(source, target, False, prologue), source.root, place / "out")
    assert tree_bytes(place / "out" / "tree") == expected(target, False, prologue)


@pytest.mark.parametrize("small_runs", [False, True])
@pytest.mark.parametrize("after", [0, 1, 4, 9, 16, 25])
def test_a_resumed_cut_ends_as_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, small_runs: bool
) -> None:
    monkeypatch.setattr(passes_module, "BUFFER_NBYTES", 1 << 18)
    if small_runs:
        monkeypatch.setattr(plan_module, "STEP_RANGE_NBYTES", 1 << 19)
        monkeypatch.setattr(digest_module, "LEAF_NBYTES", 1 << 18)
    source = write_source(tmp_path / "in", 3)
    target = allocate(ParallelDims(2, 1, 2), True)
    plan = planned(source, target, True)
    count, real = 0, open_file.write_at

    def failing(descriptor: int, data: memoryview | bytes, offset: int, path: Path) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        real(descriptor, data, offset, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_file, "write_at", failing)
        with pytest.raises(KeyboardInterrupt):
            run(plan, source.root, tmp_path / "out")
    outcome = run(plan, source.root, tmp_path / "out", 2)
    written = tree_bytes(tmp_path / "out" / "tree")
    assert written == expected(target, True)
    assert outcome.digests == {name: defined(data_of(name), digest_module.LEAF_NBYTES) for name in CUTS}
    assert outcome.file_digests == {name: defined(data, digest_module.LEAF_NBYTES) for name, data in written.items()}
    assert after < 9 or outcome.bytes_written < plan.bytes_written


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["large", "columns", "norm", "experts"])
def test_a_flipped_bit_of_the_source_is_found_however_it_is_cut(
    place: MemoryPath, monkeypatch: pytest.MonkeyPatch, name: str, shared: bool
) -> None:
    if shared:
        monkeypatch.setattr(plan_module, "STEP_RANGE_NBYTES", 1 << 18)
        monkeypatch.setattr(digest_module, "LEAF_NBYTES", 1 << 18)
    source = write_source(place / "in", 3)
    chunk = source.tensors[name].chunks[-1]
    body = bytearray((source.root / "src").read_bytes())
    body[chunk.offset + chunk.nbytes // 2] ^= 4
    (source.root / "src").write_bytes(body)
    plan = planned(source, allocate(ParallelDims(tp=2), True), True)
    with pytest.raises(InputError, match=f'tensor "{name}": CRC-32'):
        run(plan, source.root, place / "out", 2)


@pytest.mark.parametrize("name", ["large", "columns", "wide columns", "experts"])
def test_a_finished_cut_that_rotted_is_made_again(place: MemoryPath, name: str) -> None:
    source = write_source(place / "in")
    target = allocate(ParallelDims(tp=2), True)
    plan = planned(source, target, True)
    run(plan, source.root, place / "out")
    chunk = target.tensors[name].chunks[-1]
    rotten = place / "out" / "tree" / chunk.file
    data = bytearray(rotten.read_bytes())
    at = chunk.offset + chunk.nbytes // 2
    data[at : at + 2] = b"\0\xff"
    rotten.write_bytes(data)
    run(plan, source.root, place / "out")
    assert tree_bytes(place / "out" / "tree") == expected(target, True)
    again = run(plan, source.root, place / "out")
    assert (again.bytes_read, again.bytes_written) == (plan.bytes_read, 0)


def spoiled(blocks: Sequence[Block], how: str) -> tuple[Block, ...]:
    first, *rest = blocks
    return {
        "gap": (first,),
        "twice": (first, first),
        "replica of nothing": (first, *rest, Block(1, Region((0, 0), (1, 1)), True)),
    }[how]


@pytest.mark.parametrize(("how", "said"), [("gap", "gap"), ("twice", "overlap"), ("replica of nothing", "replica")])
def test_a_wrong_cut_is_caught_before_a_byte_moves(place: MemoryPath, how: str, said: str) -> None:
    source, target = write_source(place / "in"), allocate(ParallelDims(tp=2), True)
    entry = target.tensors["rows"]
    assert isinstance(entry.chunks, ShardedChunks)
    blocks = spoiled(entry.chunks.blocks, how)
    names = tuple(f"rank{block.rank_in_stage}" for block in blocks)
    chunks = ShardedChunks(blocks, names, array("q", range(len(blocks))), (1,) * len(blocks))
    target.tensors["rows"] = entry._replace(chunks=chunks)
    with pytest.raises(InternalError, match=said):
        planned(source, target, True)


def test_two_groups_are_written_apart_and_a_rank_of_several_writes_its_own(place: MemoryPath) -> None:
    source = write_source(place / "in")
    stages = [allocate(ParallelDims(tp=2), True) for _ in range(2)]
    merged, groups = Catalog(Path(), "dcp", {}), []
    for number, stage in enumerate(stages):
        for name, entry in stage.tensors.items():
            assert isinstance(entry.chunks, ShardedChunks)
            files = tuple(f"stage{number}-{file}" for file in entry.chunks.files)
            chunks = ShardedChunks(entry.chunks.blocks, files, entry.chunks.offsets, entry.chunks.lengths)
            merged.tensors[f"{number}.{name}"] = TensorEntry(f"{number}.{name}", entry.dtype, entry.shape, chunks)
        merged.files |= {f"stage{number}-{file}": size for file, size in stage.files.items()}
        groups.append(tuple(f"stage{number}-{file}" for file in stage.files))
    origin = {name: name.partition(".")[2] for name in merged.tensors}
    plan = plan_copy(source, merged, origin, build_frame=torch_zip.archive_frame, file_groups=groups)
    digests: dict[str, str] = {}
    for group in range(2):
        tree, journal = tree_of(place / "tree"), tree_of(place / "journal")
        with source_of(source.root).open() as files:
            outcome = execute(plan, files, tree, journal, workers=2, max_memory=64 << 20, group_indices=[group])
        assert sorted(outcome.file_digests) == sorted(groups[group])
        digests |= outcome.digests
    assert digests == {name: defined(data_of(origin[name])) for name in merged.tensors}
    written = tree_bytes(place / "tree")
    for number, stage in enumerate(stages):
        assert {name: written[f"stage{number}-{name}"] for name in stage.files} == expected(stage, True)


def test_narrow_and_wide_rows_are_cut_alike() -> None:
    from ckptx.transfer import strided_copy
    from ckptx.transfer.columns import extract_columns, insert_columns

    rows = np.arange(40 * 3000, dtype=np.uint32).view(np.uint8)[: 40 * 3000]
    for column, width in ((0, 1024), (500, 2000), (2999, 1), (0, 3000), (17, 1023)):
        out, other = bytearray(40 * width), bytearray(40 * width)
        extract_columns(memoryview(out), memoryview(rows.tobytes()), 3000, column, width)
        strided_copy.extract_columns(memoryview(other), memoryview(rows.tobytes()), 3000, column, width)
        assert out == other == rows.reshape(40, 3000)[:, column : column + width].tobytes()
        woven = bytearray(40 * 3000)
        insert_columns(memoryview(woven), 3000, column, memoryview(bytes(out)), width, width)
        assert np.frombuffer(woven, np.uint8).reshape(40, 3000)[:, column : column + width].tobytes() == out
