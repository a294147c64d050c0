"""`--resume` where the plan is damaged, the output cannot be read, or space is short; and what all ranks report."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.errors import CkptxError, InputError, OutputError, OutputFailure, PeerFailure, SpaceError
from ckptx.formats.registry import open_checkpoint
from ckptx.publishing.publish import Job, publish
from ckptx.transfer.digest import bytes_digest_hex
from ckptx.transfer.executor import CopyResult
from tests.publishing.test_ranks import Messages, Peers, run_in_threads
from tests.storage.test_outputs_in_memory import job_of
from tests.support.checkpoint_writers import array, flip, llama, names_in, tree_bytes, write_hf

STAGING = ".dcp.ckptx-partial"


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = write_hf(tmp_path / "in" / "hf", llama(hidden=32), shards=2)
    (root / "tokenizer.json").write_bytes(b"{}")
    return root


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "dcp"


def interrupt_run(source: Path, target: Path, **options: Any) -> None:
    """Convert, and stop as Ctrl-C would after the first bytes."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptx.convert("hf2dcp", source, target, on_progress=interrupt, **options)


def write(source: Path, target: Path, change: Callable[[Job], Job] = lambda job: job, **settings: Any) -> Any:
    checkpoint = open_checkpoint(source)
    job = change(job_of(checkpoint, target, lambda tree, result: None)[0])
    settings = {"overwrite": False, "resume": False, "on_progress": lambda nbytes: None, **settings}
    with checkpoint.source.open(checkpoint.identities) as files:
        return publish(job, target, files, workers=1, max_memory=1 << 24, **settings)


# ------------------------------------------------------------------------------------------------- plans

DAMAGED = "its plan is damaged"
PLANS: dict[bytes, str] = {
    b"": DAMAGED,
    b"\0": DAMAGED,
    b"one line": DAMAGED,
    b"one\ntwo": DAMAGED,
    b"\n\n": DAMAGED,
    b"one\ntwo\nx=1": "the source has changed since",
    b"\xff\xfe\n\xff\nx=\xff": "the source has changed since",
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_damaged_plan_is_not_resumed(source: Path, target: Path, tmp_path: Path, plan: bytes) -> None:
    interrupt_run(source, target)
    (target.parent / STAGING / "plan").write_bytes(plan)
    notes = ckptx.convert("hf2dcp", source, target, resume=True).notes
    assert [note for note in notes if "--resume" in note] == [
        f"--resume: discarded the output of an interrupted run, because {PLANS[plan]}"
    ]
    ckptx.convert("hf2dcp", source, tmp_path / "fresh")
    assert tree_bytes(target) == tree_bytes(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "fp16", "max_size": 1}, None),
        ({"dtype": "bf16", "max_size": 1}, "it had another value of --dtype"),
        ({"dtype": "bf16", "max_size": 2}, "it had another value of --dtype, --max-size"),
        ({"dtype": "fp16", "max_size": 1, "new_one": "a=b\nc"}, "it had another value of --new-one"),
        (
            {"dtype": "fp16"},
            "it was to write other tensors or files: the options, the config or the version of ckptx differ",
        ),
    ],
)
def test_options_that_changed_since_are_named(
    source: Path, target: Path, settings: dict[str, Any], reason: str | None
) -> None:
    def stop(nbytes: int) -> None:
        raise KeyboardInterrupt

    def with_settings(settings: dict[str, Any]) -> Callable[[Job], Job]:
        return lambda job: replace(job, settings=settings)

    with pytest.raises(KeyboardInterrupt):
        write(source, target, with_settings({"max_size": 1, "dtype": "fp16"}), on_progress=stop)
    result = write(source, target, with_settings(settings), resume=True)
    assert result.restart_reason == (reason or "")


# ------------------------------------------------------------------------------------------------- complete outputs


def failing_reads(patch: pytest.MonkeyPatch, target: Path, call: str) -> list[int]:
    """Let the n-th call on a file of the target fail; return a list of n and the number of calls so far."""
    real, state = getattr(os, call), [0, 0]

    def called(first: Any, *arguments: Any, **named: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if path.startswith(f"{target}/") or path == str(target):
            state[1] += 1
            if state[1] == state[0]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(first, *arguments, **named)

    patch.setattr(os, call, called)
    return state


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_an_output_that_cannot_be_read_is_not_taken_for_another_one(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    ckptx.convert("hf2dcp", source, target)
    before = tree_bytes(target)
    with monkeypatch.context() as patch:
        state = failing_reads(patch, target, call)
        assert ckptx.convert("hf2dcp", source, target, resume=True).bytes_written == 0
        count = state[1]
        assert count
        for number in range(1, count + 1):
            state[:] = [number, 0]
            with pytest.raises(OutputFailure, match="Input/output error") as failed:
                ckptx.convert("hf2dcp", source, target, resume=True)
            assert failed.value.exit_code == 5
            assert state[1] == number
            assert names_in(target.parent) == ["dcp"]
    assert tree_bytes(target) == before


def test_an_output_with_other_sidecars_than_the_source_is_another_one(source: Path, target: Path) -> None:
    ckptx.convert("hf2dcp", source, target)
    before = tree_bytes(target)
    for change in (
        lambda: (source / "vocab.txt").write_text("a\n"),
        lambda: (source / "vocab.txt").unlink(),
        lambda: (source / "tokenizer.json").unlink(),
    ):
        change()
        if sorted(path.name for path in source.iterdir() if path.suffix in (".txt", ".json")) == [
            "config.json", "model.safetensors.index.json", "tokenizer.json",
        ]:  # fmt: skip
            assert ckptx.convert("hf2dcp", source, target, resume=True).bytes_written == 0
        else:
            with pytest.raises(OutputError, match="exists and is not empty"):
                ckptx.convert("hf2dcp", source, target, resume=True)
        assert tree_bytes(target) == before
        assert names_in(target.parent) == ["dcp"]


def test_a_complete_output_reports_the_numbers_that_its_cast_changed(tmp_path: Path, target: Path) -> None:
    values = np.array([1.0, 1e30, -1e30, 1e-30, 0.0, np.inf, 65504.0, 2.0], "<f4")
    source = write_hf(tmp_path / "in", {"a": array(values), "b": array(values[3:5]), "c": array(values[:1])})
    options: dict[str, Any] = {"dtype": "fp16", "allow_overflow": True}
    first = ckptx.convert("hf2dcp", source, target, **options)
    second = ckptx.convert("hf2dcp", source, target, resume=True, **options)
    numbers = [note for note in first.notes if "fp16" in note or "infin" in note or "zero" in note]
    assert len(numbers) == 2
    assert '"a"' in numbers[0] and "2 numbers" in numbers[0]
    assert set(numbers) <= set(second.notes)
    with pytest.raises(CkptxError, match="--allow-overflow"):
        ckptx.convert("hf2dcp", source, target, resume=True, dtype="fp16")


@pytest.mark.parametrize("damage", ["head", "name"])
def test_a_damaged_archive_is_not_complete_even_if_the_manifest_has_its_digest(
    source: Path, target: Path, damage: str
) -> None:
    ckptx.convert("hf2dcp", source, target)
    flip(target / "__0_0.distcp", {"head": 0, "name": 31}[damage])
    manifest = json.loads((target / "ckptx.json").read_text())
    manifest["files"]["__0_0.distcp"]["digest"] = bytes_digest_hex((target / "__0_0.distcp").read_bytes())
    (target / "ckptx.json").write_text(json.dumps(manifest))
    before = tree_bytes(target)
    with pytest.raises(OutputError, match="exists and is not empty"):
        ckptx.convert("hf2dcp", source, target, resume=True)
    assert tree_bytes(target) == before


# ------------------------------------------------------------------------------------------------- space


def limit_space(patch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil._ntuple_diskusage(1 << 50, (1 << 50) - free, free)  # type: ignore[attr-defined]
    patch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize("files", [1, 2])
def test_a_run_requires_the_bytes_of_its_output(
    source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    ckptx.convert("hf2dcp", source, tmp_path / "fresh", files=files)
    nbytes = sum(len(data) for data in tree_bytes(tmp_path / "fresh").values())
    limit_space(monkeypatch, nbytes - 1)
    with pytest.raises(SpaceError, match="free some space"):
        ckptx.convert("hf2dcp", source, target, files=files)
    assert names_in(target.parent) == []
    limit_space(monkeypatch, nbytes)
    ckptx.convert("hf2dcp", source, target, files=files)
    assert tree_bytes(target) == tree_bytes(tmp_path / "fresh")


def test_a_resumed_run_requires_only_the_space_of_what_is_missing(
    source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that it does not take over are removed before, and do not count."""
    ckptx.convert("hf2dcp", source, tmp_path / "fresh")
    nbytes = sum(len(data) for data in tree_bytes(tmp_path / "fresh").values())
    interrupt_run(source, target)
    tree = target.parent / STAGING / "tree"
    (tree / "config.json").write_bytes(b"x" * 100_000)
    written = (tree / "__0_0.distcp").stat().st_blocks * 512
    assert 0 < written < nbytes
    limit_space(monkeypatch, nbytes - written - 1)
    shutil.copytree(target.parent, tmp_path / "copy")
    with pytest.raises(SpaceError, match="free some space"):
        ckptx.convert("hf2dcp", source, target, resume=True)
    assert names_in(target.parent) == []
    shutil.copytree(tmp_path / "copy", target.parent, dirs_exist_ok=True)
    written = (tree / "__0_0.distcp").stat().st_blocks * 512
    limit_space(monkeypatch, nbytes - written)
    ckptx.convert("hf2dcp", source, target, resume=True)
    assert tree_bytes(target) == tree_bytes(tmp_path / "fresh")


# ------------------------------------------------------------------------------------------------- what remains


def test_a_staging_directory_that_cannot_be_removed_is_named(source: Path, target: Path) -> None:
    root = target.parent / STAGING

    def add_file(done: int, total: int) -> None:
        (root / "theirs").write_bytes(b"theirs")

    report = ckptx.convert("hf2dcp", source, target, on_progress=add_file)
    assert f"{root}: could not be removed; {target} is complete, remove that directory" in report.notes
    assert tree_bytes(root) == {"lock": b"", "theirs": b"theirs"}
    (root / "theirs").unlink()
    assert not any(
        "could not be removed" in note for note in ckptx.convert("hf2dcp", source, target, resume=True).notes
    )
    assert names_in(target.parent) == ["dcp"]


# ------------------------------------------------------------------------------------------------- ranks


class ObservedPeers(Peers):
    """A rank that calls a function when it waits for the store, and another one with each check of the ranks."""

    def __init__(
        self, rank: int, messages: Messages, on_wait: Callable[[int], object], on_check: Callable[[int], None]
    ) -> None:
        super().__init__(rank, messages)
        self.on_wait, self.on_check = on_wait, on_check

    def wait_for_store(self) -> None:
        self.on_wait(self.rank)

    def check(self) -> None:
        self.on_check(self.rank)


def run_ranks(
    source: Path,
    target: Path,
    change: Callable[[int, Job], Job] = lambda rank, job: job,
    on_wait: Callable[[int], object] = lambda rank: None,
    on_check: Callable[[int], None] = lambda rank: None,
    **settings: Any,
) -> list[CopyResult | CkptxError | None]:
    """Write with both ranks in threads, and return the result or the error of each."""
    return run_in_threads(
        lambda rank, messages: ObservedPeers(rank, messages, on_wait, on_check),
        lambda peers: write(source, target, lambda job: change(peers.rank, job), processes=peers, **settings),
    )


def test_both_ranks_are_told_that_the_output_is_complete(source: Path, target: Path) -> None:
    write(source, target)
    before = tree_bytes(target)
    first, second = run_ranks(source, target, resume=True)
    assert isinstance(first, CopyResult) and first.was_complete and first.bytes_written == 0
    assert second is None
    assert tree_bytes(target) == before
    assert names_in(target.parent) == ["dcp"]


def test_rank_0_reports_what_all_ranks_wrote(source: Path, target: Path, tmp_path: Path) -> None:
    alone = write(source, tmp_path / "alone")
    first, second = run_ranks(source, target)
    assert isinstance(first, CopyResult) and isinstance(second, CopyResult)
    assert first.digests == alone.digests and first.file_digests == alone.file_digests
    assert set(second.file_digests) < set(first.file_digests) and len(second.file_digests) == 1
    assert first.bytes_written == alone.bytes_written > second.bytes_written > 0
    assert first.bytes_read == alone.bytes_read > second.bytes_read > 0
    assert alone.peak_rss == 0 < first.peak_rss
    assert not first.was_complete and first.was_locked


def test_rank_0_waits_for_the_store_before_it_claims_the_output(source: Path, target: Path) -> None:
    waits: list[tuple[int, list[str]]] = []
    run_ranks(source, target, on_wait=lambda rank: waits.append((rank, names_in(target.parent))))
    assert waits == [(0, [])]
    assert names_in(target.parent) == ["dcp"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_checks_the_others_while_it_copies(source: Path, target: Path, failing: int) -> None:
    progress: list[int] = []

    def check(rank: int) -> None:
        if rank == failing:
            raise PeerFailure("rank 7 failed", 3)

    results = run_ranks(source, target, on_check=check, on_progress=progress.append)
    assert all(isinstance(each, CkptxError) for each in results), results
    assert str(results[failing]) == "rank 7 failed"
    assert names_in(target.parent) == []


def test_progress_of_each_rank_ends_with_its_bytes(source: Path, target: Path) -> None:
    progress: list[int] = []
    results = run_ranks(source, target, on_progress=progress.append)
    written = [each.bytes_written for each in results if isinstance(each, CopyResult)]
    assert {written[1], written[0] - written[1]} <= set(progress)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_source_that_one_rank_finds_changed_is_not_published(source: Path, target: Path, rank: int) -> None:
    has_opened = threading.Event()
    ctimes = {path: path.stat().st_ctime_ns for path in source.iterdir()}

    def change(own: int, job: Job) -> Job:
        if own == 1:
            has_opened.set()
        return replace(job, are_source_decisions_unchanged=lambda: own != rank)

    def touch(own: int) -> None:
        for path, ctime in ctimes.items():
            while path.stat().st_ctime_ns == ctime:
                path.chmod(0o640)

    results = run_ranks(source, target, change, on_wait=lambda own: has_opened.wait(20), on_check=touch)
    assert all(isinstance(each, CkptxError) for each in results), results
    assert isinstance(results[rank], InputError) and "changed while it was being read" in str(results[rank])
    assert names_in(target.parent) == []


@pytest.mark.parametrize("index", [0, 1])
def test_a_file_of_any_rank_that_is_replaced_after_its_copy_is_found(source: Path, target: Path, index: int) -> None:
    def replace_file(job: Job) -> None:
        path = target.parent / STAGING / "tree" / job.plan.files[index].name
        shutil.copy2(path, path.with_name("new"))
        path.with_name("new").rename(path)

    def change(rank: int, job: Job) -> Job:
        return replace(job, check_staged_files=lambda tree, result: replace_file(job))

    results = run_ranks(source, target, change)
    assert all(isinstance(each, CkptxError) for each in results), results
    assert names_in(target.parent) == []
