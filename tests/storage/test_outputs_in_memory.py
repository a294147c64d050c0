"""Outputs that are written and published in memory: nothing of a copy or of `publish` needs a local disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptx.catalog.catalog import Catalog
from ckptx.conversion.outputs.dcp_parts import DcpOutput
from ckptx.conversion.steps.dcp_check import check_dcp
from ckptx.conversion.steps.manifest import manifest_of
from ckptx.errors import InputError, InternalError, OutputError, SpaceError
from ckptx.formats.dcp import layout as dcp_layout
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.publishing.publish import Job, publish
from ckptx.publishing.staging import Staging
from ckptx.storage.interface import Source, StoredFile
from ckptx.storage.local import LocalSource
from ckptx.transfer import plan as plan_module
from ckptx.transfer.executor import CopyResult
from ckptx.transfer.planner import plan_copy
from tests.support.checkpoint_writers import LLAMA, llama, tree_bytes, write_hf
from tests.support.memory_storage import MemoryFile, MemoryPath, MemoryPublisher, Store

TENSORS = llama()
MARKER = ".metadata"


def job_of(source: Catalog, root: Any, check: Callable[[Source, CopyResult], None]) -> tuple[Job, Catalog]:
    """HF -> DCP of two files, with the sidecars of the source."""
    target = dcp_layout.allocate(root, source.tensors.values(), 2)
    plan = plan_copy(source, target, {name: name for name in target.tensors}, build_frame=archive_frame)

    job = Job(
        plan=plan,
        source=source,
        sidecars={sidecar.name: StoredFile(source.source, sidecar.name) for sidecar in source.sidecars},
        settings={},
        build_manifest=lambda outcome: manifest_of("dcp", target, outcome.digests),
        opened_catalog=source,
        are_source_decisions_unchanged=lambda: True,
        validate_result=lambda outcome: None,
        check_staged_files=check,
        markers=[(MARKER, dcp_layout.metadata_bytes(target, {name: name for name in target.tensors}))],
    )
    return job, target


def made(
    place: Any, target: Any, claim: Any, check: Callable[[Source, CopyResult], None] | None = None, **settings: bool
) -> CopyResult | None:
    """Publish a DCP of the checkpoint at `place`."""
    source = open_checkpoint(place)

    def checked(tree: Source, outcome: CopyResult) -> None:
        check_dcp(tree, DcpOutput(catalog, [], [], {}, {}))

    job, catalog = job_of(source, target, check or checked)
    settings = {"overwrite": False, "resume": False, **settings}
    with source.source.open(source.identities) as files:
        return publish(
            job, target, files, workers=2, max_memory=1 << 24, on_progress=lambda nbytes: None, claim=claim, **settings
        )


def files_at(place: MemoryPath) -> dict[str, bytes]:
    """Every file below, by relative name."""
    files = place.store.files.items()
    return {str(path.relative_to(place.path)): bytes(file.data) for path, file in files if place.path in path.parents}


@pytest.fixture
def source(place: MemoryPath) -> MemoryPath:
    write_hf(place / "hf", TENSORS, shards=3)
    (place / "hf" / "tokenizer.json").write_text("{}")
    return place / "hf"


def test_the_output_is_that_of_a_local_disk(source: MemoryPath, place: MemoryPath, tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", TENSORS, shards=3)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    here = made(LocalSource(tmp_path / "hf"), tmp_path / "out", Staging)
    there = made(source, place / "out", MemoryPublisher)
    written = files_at(place / "out")
    assert written == tree_bytes(tmp_path / "out")
    assert sorted(written) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "ckptx.json",
        "config.json",
        "tokenizer.json",
    ]
    assert here is not None and there is not None
    assert (here.digests, here.file_digests) == (there.digests, there.file_digests)
    again = open_checkpoint(place / "out")
    assert (again.format, again.config, set(again.tensors)) == ("dcp", LLAMA, set(TENSORS))
    assert [path.name for path in place.iterdir()] == ["hf", "out"], "the claim is gone"


def test_a_source_that_changes_is_noticed_by_its_version(source: MemoryPath, place: MemoryPath) -> None:
    def change(tree: Source, outcome: CopyResult) -> None:
        (source / "tokenizer.json").write_text("{ }")

    with pytest.raises(InputError, match=r"memory:/run/here/hf/tokenizer\.json: changed while it was being read"):
        made(source, place / "out", MemoryPublisher, change)
    assert [path.name for path in place.iterdir()] == ["hf"]


def test_what_is_written_twice_or_removed_is_not_published(
    source: MemoryPath, place: MemoryPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shorten(tree: Source, outcome: CopyResult) -> None:
        file = tree.location / "__0_0.distcp"
        file.write_bytes(file.read_bytes())

    with pytest.raises(OutputError, match=r"__0_0\.distcp: was replaced; no output was created"):
        made(source, place / "out", MemoryPublisher, shorten)
    assert not (place / "out").exists()


def test_a_defect_of_a_writer_is_found_before_it_is_published(
    source: MemoryPath, place: MemoryPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MemoryFile.write

    def spoiled(file: MemoryFile, data: memoryview | bytes, offset: int) -> None:
        is_head = file.path.name == "__1_0.distcp" and not offset
        real(file, b"\0" + bytes(data)[1:] if is_head else data, offset)

    monkeypatch.setattr(MemoryFile, "write", spoiled)
    with pytest.raises(InternalError, match=r"__1_0\.distcp: contains no archive of"):
        made(source, place / "out", MemoryPublisher)
    assert not (place / "out").exists()


def test_only_one_run_has_the_claim_and_a_target_is_not_replaced_unasked(source: MemoryPath, place: MemoryPath) -> None:
    def second(tree: Source, outcome: CopyResult) -> None:
        with pytest.raises(OutputError, match="another ckptx is writing it"):
            made(source, place / "out", MemoryPublisher)

    made(source, place / "out", MemoryPublisher, second)
    first = files_at(place / "out")
    with pytest.raises(OutputError, match="exists and is not empty"):
        made(source, place / "out", MemoryPublisher)
    (place / "out" / "stray").write_bytes(b"")
    made(source, place / "out", MemoryPublisher, overwrite=True)
    assert files_at(place / "out") == first


def test_a_store_that_is_full(source: MemoryPath, place: MemoryPath) -> None:
    place.store.room = 100
    with pytest.raises(SpaceError, match=r"requires .* bytes, but the store has 100 free"):
        made(source, place / "out", MemoryPublisher)


@pytest.mark.parametrize("after", [0, 3, 11])
def test_an_interrupted_run_is_continued(
    source: MemoryPath, place: MemoryPath, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Notes of finished tensors are found again, and what they name is compared and not written once more."""
    monkeypatch.setattr(plan_module, "STEP_RANGE_NBYTES", 1)
    count, real = 0, MemoryFile.write

    def failing(file: MemoryFile, data: memoryview | bytes, offset: int) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        real(file, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFile, "write", failing)
        with pytest.raises(KeyboardInterrupt):
            made(source, place / "out", MemoryPublisher)
    assert not (place / "out").exists()
    outcome = made(source, place / "out", MemoryPublisher, resume=True)
    assert outcome is not None and outcome.bytes_read >= sum(len(data) for _, _, data in TENSORS.values())
    made(source, place / "fresh", MemoryPublisher)
    assert files_at(place / "out") == files_at(place / "fresh")


def test_the_stores_of_tests_are_apart() -> None:
    assert MemoryPath("/a") != MemoryPath("/a") and MemoryPath("/a", store := Store()) == MemoryPath("/a", store)
