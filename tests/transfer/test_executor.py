"""Copies: the same bytes and digests whatever the workers and the size of a run; resumed where they stopped."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InputError, InternalError
from ckptx.formats.dcp import layout as dcp_layout
from ckptx.formats.hf import layout as huggingface_layout
from ckptx.formats.hf.reader import open_huggingface
from ckptx.formats.torch_archive import archive as torch_zip
from ckptx.storage import open_file
from ckptx.storage.interface import SourceFiles
from ckptx.transfer import digest as digest_module
from ckptx.transfer import plan as plan_module
from ckptx.transfer.executor import CopyResult, execute
from ckptx.transfer.plan import CopyPlan
from ckptx.transfer.planner import plan_copy
from ckptx.transfer.stream import CheckedRecords, TensorReader
from tests.support.checkpoint_writers import Value, archive, flip, tree_bytes, value, write_hf
from tests.support.memory_storage import MemoryPath, source_of, tree_of
from tests.transfer.test_digest import defined

Place = Path | MemoryPath

TENSORS: dict[str, Value] = {
    "a": value("F32", 1000, 700, seed=1),
    "b": value("BF16", 3, seed=2),
    "empty": value("F32", 0, 4),
    "c": value("I64", 12345, seed=3),
    "scalar": value("F32", seed=4),
    "d": value("U8", 3_000_000, seed=5),
    "e": value("BF16", 999, 1001, seed=6),
}


def planned(root: Place, files: int = 2) -> tuple[CopyPlan, Catalog]:
    """HF -> DCP of `TENSORS`."""
    source = open_huggingface(source_of(root), "model.safetensors")
    target = dcp_layout.allocate(root, source.tensors.values(), files)
    origin = {name: name for name in target.tensors}
    return plan_copy(source, target, origin, build_frame=torch_zip.archive_frame), target


@pytest.fixture
def hf(place: MemoryPath) -> MemoryPath:
    return write_hf(place / "hf", TENSORS)


@pytest.fixture
def hf_on_disk(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", TENSORS)


def copy(plan: CopyPlan, root: Place, out: Place, workers: int = 2, **settings: object) -> CopyResult:
    with source_of(root).open() as files, tree_of(out / "tree") as tree, tree_of(out / "journal") as journal:
        return execute(plan, files, tree, journal, workers=workers, max_memory=16 << 20, resumed=True, **settings)  # type: ignore[arg-type]


def expected(target: Catalog) -> dict[str, bytes]:
    """The target files, put together by hand."""
    bodies: dict[str, bytes] = {}
    for name, entry in target.tensors.items():
        file = entry.chunks[0].file
        assert len(bodies.get(file, b"")) == entry.chunks[0].offset
        bodies[file] = bodies.get(file, b"") + archive(TENSORS[name])
    return bodies


def small_runs(patch: pytest.MonkeyPatch) -> None:
    """Every tensor is a run of its own, and a file block is as large as a digest block is small."""
    patch.setattr(plan_module, "STEP_RANGE_NBYTES", 1)


@pytest.mark.parametrize("run", [1, 1_000_000, 512 << 20])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_bytes_and_digests_do_not_depend_on_workers_or_runs(
    hf: MemoryPath, place: MemoryPath, monkeypatch: pytest.MonkeyPatch, workers: int, run: int
) -> None:
    monkeypatch.setattr(plan_module, "STEP_RANGE_NBYTES", run)
    plan, target = planned(hf, files=3)
    assert len(plan.step_ranges()) >= (len(TENSORS) - 1 if run == 1 else 3)  # an empty tensor is no work
    outcome = copy(plan, hf, place, workers)
    written = tree_bytes(place / "tree")
    assert written == expected(target)
    assert outcome.digests == {name: defined(data) for name, (_, _, data) in TENSORS.items()}
    assert outcome.file_digests == {name: defined(data) for name, data in written.items()}
    assert outcome.bytes_read == sum(len(data) for _, _, data in TENSORS.values()) == plan.bytes_read
    assert outcome.bytes_written == sum(map(len, written.values())) == plan.bytes_written


@pytest.mark.parametrize("run", [1, 3_000_000, 512 << 20])
def test_file_digests_join_blocks_of_several_runs(
    hf: MemoryPath, place: MemoryPath, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    """With digest blocks of 1 MiB, blocks end inside runs, at their edges, and across them."""
    monkeypatch.setattr(digest_module, "LEAF_NBYTES", 1 << 20)
    monkeypatch.setattr(plan_module, "STEP_RANGE_NBYTES", run)
    plan, _ = planned(hf, files=1)
    outcome = copy(plan, hf, place)
    assert outcome.digests == {name: defined(data, 1 << 20) for name, (_, _, data) in TENSORS.items()}
    assert outcome.file_digests == {name: defined(data, 1 << 20) for name, data in tree_bytes(place / "tree").items()}


@pytest.mark.parametrize("run", [1, 1_000_000, 512 << 20])
def test_what_is_about_to_be_read_is_announced(
    hf: MemoryPath, place: MemoryPath, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    """A storage that reads ahead gets every span before it is read, in the order of the reads."""
    monkeypatch.setattr(plan_module, "STEP_RANGE_NBYTES", run)
    plan, _ = planned(hf)
    with hf.open() as files, tree_of(place / "tree") as tree, tree_of(place / "journal") as journal:
        execute(plan, files, tree, journal, workers=1, max_memory=16 << 20)
    announced = list(dict.fromkeys(span for span in files.expected if span[2]))
    assert {nbytes for _, _, nbytes in announced} == {len(data) for _, _, data in TENSORS.values() if data}
    order = [
        next(span for span in announced if span[0] == name and span[1] <= at and at + nbytes <= span[1] + span[2])
        for name, at, nbytes in files.reads
    ]
    assert list(dict.fromkeys(order)) == announced


@pytest.mark.parametrize("last", [False, True])
def test_an_empty_tensor_where_a_block_of_the_file_begins(place: MemoryPath, last: bool) -> None:
    tensors = {"a": value("U8", 0), "b": value("U8", 0, 3)} | ({} if last else {"c": value("U8", 9)})
    source = open_huggingface(write_hf(place / "hf", tensors), "model.safetensors")
    prologue = bytes(digest_module.LEAF_NBYTES)
    catalog = Catalog(place, "huggingface", {}, files={"out": len(prologue) + (0 if last else 9)})
    for name, entry in source.tensors.items():
        chunk = entry.chunks[0]._replace(file="out", offset=len(prologue))
        catalog.tensors[name] = entry._replace(chunks=(chunk,))
    plan = plan_copy(source, catalog, {name: name for name in tensors}, prologues={"out": prologue})
    outcome = copy(plan, source.root, place)
    written = prologue + b"".join(data for _, _, data in tensors.values())
    assert (place / "tree" / "out").read_bytes() == written
    assert outcome.file_digests == {"out": defined(written)}


def test_a_tensor_larger_than_a_digest_block(place: MemoryPath) -> None:
    tensors = {"big": value("U8", (16 << 20) + 12345, seed=7), "next": value("F32", 8)}
    hf = write_hf(place / "hf", tensors)
    plan, _ = planned(hf, files=1)
    outcome = copy(plan, hf, place)
    assert outcome.digests == {name: defined(data) for name, (_, _, data) in tensors.items()}
    assert outcome.file_digests == {name: defined(data) for name, data in tree_bytes(place / "tree").items()}


def test_safetensors_have_a_prologue_and_no_frames(hf: MemoryPath, place: MemoryPath) -> None:
    source = open_huggingface(hf, "model.safetensors")
    layout = huggingface_layout.allocate(place, source.tensors.values(), 3_000_000)
    origin = {name: name for name in source.tensors}
    plan = plan_copy(source, layout.catalog, origin, prologues=layout.prologues)
    copy(plan, hf, place)
    (place / "tree" / "model.safetensors.index.json").write_text(layout.index_text or "")
    back = open_huggingface(place / "tree", "model.safetensors.index.json")
    with back.source.open() as files:
        for name, (dtype, shape, data) in TENSORS.items():
            entry = back.tensors[name]
            assert (entry.dtype.name, entry.shape) == (dtype, shape)
            assert files.read(entry.chunks[0].file, entry.chunks[0].offset, entry.chunks[0].nbytes) == data


def test_a_cast_on_the_way(hf: MemoryPath, place: MemoryPath) -> None:
    source = open_huggingface(hf, "model.safetensors")
    narrow = source.tensors["a"]._replace(dtype=DTYPES_BY_NAME["BF16"])
    target = dcp_layout.allocate(place, [narrow], 1)
    outcome = copy(plan_copy(source, target, {"a": "a"}, build_frame=torch_zip.archive_frame), hf, place)
    from ckptx.transfer.cast import cast

    data = bytes(cast(memoryview(TENSORS["a"][2]), DTYPES_BY_NAME["F32"], DTYPES_BY_NAME["BF16"]))
    assert (place / "tree" / "__0_0.distcp").read_bytes() == archive(("BF16", (1000, 700), data))
    assert outcome.digests == {"a": defined(data)}


def test_progress_ends_at_the_last_byte(hf: MemoryPath, place: MemoryPath) -> None:
    plan, _ = planned(hf)
    seen: list[int] = []
    copy(plan, hf, place, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == plan.bytes_written


def interrupted(plan: CopyPlan, hf: Path, out: Path, after: int) -> int:
    """Runs until `after` blocks are written, then fails like an interrupt; gives the number of finished tensors."""
    count = 0
    real = open_file.write_at

    def failing(descriptor: int, data: memoryview | bytes, offset: int, path: Path) -> None:
        nonlocal count
        if path.parent.name == "tree":
            count += 1
            if count > after:
                raise KeyboardInterrupt
        real(descriptor, data, offset, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_file, "write_at", failing)
        with pytest.raises(KeyboardInterrupt):
            copy(plan, hf, out, workers=1)
    return sum(path.stat().st_size // 16 for path in (out / "journal").iterdir())


@pytest.mark.parametrize("run", [1, 512 << 20])
@pytest.mark.parametrize("after", (0, 1, 3, 5, 7))
def test_a_resumed_copy_writes_no_finished_tensor_again(
    hf_on_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, run: int
) -> None:
    monkeypatch.setattr(plan_module, "STEP_RANGE_NBYTES", run)
    plan, target = planned(hf_on_disk, files=1)
    finished = interrupted(plan, hf_on_disk, tmp_path, after)
    order = [step.target.name for step in plan.steps()]
    outcome = copy(plan, hf_on_disk, tmp_path)
    assert tree_bytes(tmp_path / "tree") == expected(target)
    assert outcome.bytes_read == plan.bytes_read, "what is taken over is compared with the source"
    left = [target.tensors[name].chunks[0].nbytes for name in order[finished:]]
    assert outcome.bytes_written == sum(left)
    assert outcome.digests == {name: defined(data) for name, (_, _, data) in TENSORS.items()}
    assert outcome.file_digests == {name: defined(data) for name, data in tree_bytes(tmp_path / "tree").items()}
    assert after < 5 or finished


def test_a_finished_copy_is_only_checked(hf: MemoryPath, place: MemoryPath) -> None:
    plan, _ = planned(hf)
    first = copy(plan, hf, place)
    again = copy(plan, hf, place)
    assert (again.bytes_read, again.bytes_written) == (plan.bytes_read, 0)
    assert (again.digests, again.file_digests) == (first.digests, first.file_digests)


@pytest.mark.parametrize("where", ["head", "elements", "tail"])
@pytest.mark.parametrize("name", ["a", "c", "e"])
def test_a_finished_tensor_that_rotted_is_copied_again(
    hf: MemoryPath, place: MemoryPath, name: str, where: str
) -> None:
    plan, target = planned(hf, files=1)
    copy(plan, hf, place)
    entry = target.tensors[name]
    (chunk,) = entry.chunks
    frame = torch_zip.archive_frame(entry.dtype, entry.shape)
    at = {
        "head": chunk.offset + 70,
        "elements": chunk.offset + len(frame.head) + entry.nbytes // 2,
        "tail": chunk.offset + chunk.nbytes - 30,
    }[where]
    flip(place / "tree" / "__0_0.distcp", at)
    outcome = copy(plan, hf, place)
    assert tree_bytes(place / "tree") == expected(target)
    assert outcome.bytes_read >= entry.nbytes


@pytest.mark.parametrize("damage", ["cut", "garbage", "longer", "empty"])
def test_a_journal_that_does_not_fit_is_not_believed(hf: MemoryPath, place: MemoryPath, damage: str) -> None:
    plan, target = planned(hf, files=1)
    copy(plan, hf, place)
    (journal,) = (place / "journal").iterdir()
    recorded = journal.read_bytes()
    journal.write_bytes(
        {"cut": recorded[:37], "garbage": os.urandom(len(recorded)), "longer": recorded * 2, "empty": b""}[damage]
    )
    outcome = copy(plan, hf, place)
    assert tree_bytes(place / "tree") == expected(target)
    assert outcome.digests == {name: defined(data) for name, (_, _, data) in TENSORS.items()}


def test_bytes_beyond_the_end_of_a_file_are_cut_off(hf: MemoryPath, place: MemoryPath) -> None:
    plan, target = planned(hf, files=1)
    (place / "tree" / "__0_0.distcp").write_bytes(b"x" * (plan.files[0].nbytes + 100))
    copy(plan, hf, place)
    assert tree_bytes(place / "tree") == expected(target)


def test_the_error_of_a_worker_reaches_the_caller(hf: MemoryPath, place: MemoryPath) -> None:
    plan, _ = planned(hf, files=3)
    file = hf / "model.safetensors"
    file.write_bytes(file.read_bytes()[: plan.file_groups[1].steps[-1].source.chunks[0].offset])
    with pytest.raises(InputError, match="the file is truncated"):
        copy(plan, hf, place, workers=3)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_the_memory(
    hf: MemoryPath, place: MemoryPath, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    class Reader(TensorReader):
        def __init__(self, files: SourceFiles, max_memory: int, checked_records: CheckedRecords) -> None:
            limits.append(max_memory)
            super().__init__(files, max_memory, checked_records)

    monkeypatch.setattr("ckptx.transfer.executor.TensorReader", Reader)
    copy(planned(hf)[0], hf, place, workers=workers)
    assert limits and set(limits) == {(16 << 20) // len(limits)} and len(limits) <= workers


def broken(target: Catalog, how: str) -> Mapping[str, TensorEntry]:
    entry = target.tensors["a"]
    chunk = entry.chunks[0]
    changed = {
        "hole": entry._replace(chunks=(chunk._replace(offset=chunk.offset + 64),)),
        "gap": entry._replace(chunks=(chunk._replace(region=chunk.region._replace(sizes=(999, 700))),)),
        "twice": entry._replace(chunks=(chunk, chunk)),
        "shape": entry._replace(shape=(700, 1000)),
    }[how]
    return target.tensors | {"a": changed}


@pytest.mark.parametrize("how", ["hole", "gap", "twice", "shape"])
def test_a_wrong_plan_is_caught_before_a_byte_moves(hf: MemoryPath, how: str) -> None:
    source = open_huggingface(hf, "model.safetensors")
    _, target = planned(hf)
    target.tensors = dict(broken(target, how))
    with pytest.raises(InternalError):
        plan_copy(source, target, {name: name for name in target.tensors}, build_frame=torch_zip.archive_frame)


def test_a_file_longer_than_its_blocks_is_a_wrong_plan(hf: MemoryPath) -> None:
    source = open_huggingface(hf, "model.safetensors")
    _, target = planned(hf)
    target.files["__0_0.distcp"] += 1
    with pytest.raises(InternalError, match="planned"):
        plan_copy(source, target, {name: name for name in target.tensors}, build_frame=torch_zip.archive_frame)


def test_archives_carry_the_crc_of_what_was_copied(hf: MemoryPath, place: MemoryPath) -> None:
    plan, _ = planned(hf, files=1)
    copy(plan, hf, place)
    data = (place / "tree" / "__0_0.distcp").read_bytes()
    assert zlib.crc32(TENSORS["d"][2]).to_bytes(4, "little") in data
