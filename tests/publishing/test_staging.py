"""The staging directory: claimed under a lock, published by one rename, removed or kept by how a run ended."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptx.errors import OutputError, SpaceError
from ckptx.publishing import staging as staging_module
from ckptx.publishing.output_checks import free_space, refuse_existing, refuse_overlap
from ckptx.publishing.staging import Staging
from ckptx.storage.directory_handle import DirectoryHandle
from ckptx.storage.staging_paths import is_in_staging_directory
from tests.support.checkpoint_writers import names_in, tree_bytes


def fill(staging: Staging, text: bytes = b"new") -> None:
    """What a run does between claiming and publishing."""
    staging.begin(b"plan", resume=False)
    (staging.tree_path / "file").write_bytes(text)


def old(target: Path) -> Path:
    target.mkdir()
    (target / "old").write_bytes(b"old")
    return target


@pytest.mark.parametrize("before", ["absent", "empty", "parents absent"])
def test_a_free_place_is_published_to(tmp_path: Path, before: str) -> None:
    target = tmp_path / ("a/b/out" if before == "parents absent" else "out")
    if before == "empty":
        target.mkdir()
    with Staging(target) as staging:
        fill(staging)
        staging.publish()
    assert tree_bytes(target) == {"file": b"new"}
    assert names_in(target.parent) == ["out"]


def test_an_existing_target_is_refused_and_left_alone(tmp_path: Path) -> None:
    target = old(tmp_path / "out")
    with pytest.raises(OutputError, match=r"exists and is not empty.*--overwrite"):
        Staging(target)
    assert tree_bytes(target) == {"old": b"old"}
    assert names_in(tmp_path) == ["out"]


def test_a_file_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="not a directory; choose another DST"):
            Staging(tmp_path / "out", overwrite=overwrite)
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("place", ["/proc", "a directory that was removed"])
def test_a_directory_that_cannot_be_created(tmp_path: Path, place: str) -> None:
    is_there = place == "/proc"
    path = Path(place) if is_there else tmp_path / "parent"
    if not is_there:
        path.mkdir()
    with DirectoryHandle.open_path(path) as parent:
        if not is_there:
            path.rmdir()
        advice = "created: .*; choose another DST" if is_there else "opened: .*; its directory was removed"
        with pytest.raises(OutputError, match=f"ckptx-test: cannot be {advice}"):
            parent.open_directory("ckptx-test", create=True)


@pytest.mark.parametrize(
    ("name", "fault"), [("tree", "its 'tree' is not a directory"), ("other", "it contains 'other'")]
)
def test_a_staging_directory_that_is_not_of_ckptx(tmp_path: Path, name: str, fault: str) -> None:
    (tmp_path / ".out.ckptx-partial").mkdir()
    (tmp_path / ".out.ckptx-partial" / name).write_text("mine")
    with pytest.raises(OutputError, match=f"not a staging directory of ckptx, {fault}; move it elsewhere"):
        Staging(tmp_path / "out")
    assert names_in(tmp_path) == [".out.ckptx-partial"]


def test_a_dangling_link_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("gone")
    with pytest.raises(OutputError, match="not a directory; choose another DST"):
        refuse_existing(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("exchange", ["renameat2", "without renameat2"])
def test_overwrite_replaces_the_whole_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    if exchange != "renameat2":
        monkeypatch.setattr(staging_module, "_exchange_names", lambda *names: False)
    target = old(tmp_path / "out")
    with Staging(target, overwrite=True) as staging:
        fill(staging)
        assert tree_bytes(target) == {"old": b"old"}
        staging.publish()
    assert tree_bytes(target) == {"file": b"new"}
    assert names_in(tmp_path) == ["out"]


def test_a_swap_cut_in_the_middle_is_repaired_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between two renames: the old directory has another name, nothing has its own."""
    target = old(tmp_path / "out")
    real = os.rename

    def killed(a: str, b: str, **directories: int) -> None:
        if b == target.name:
            raise KeyboardInterrupt
        real(a, b, **directories)

    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "_exchange_names", lambda *names: False)
        patch.setattr(staging_module.os, "rename", killed)
        with pytest.raises(KeyboardInterrupt), Staging(target, overwrite=True) as staging:
            fill(staging)
            staging.publish()
    assert names_in(tmp_path) == [".out.ckptx-old", ".out.ckptx-partial"]
    with pytest.raises(OutputError, match="exists and is not empty"):
        Staging(target)
    assert tree_bytes(target) == {"old": b"old"}
    with Staging(target, overwrite=True) as staging:
        fill(staging)
        staging.publish()
    assert tree_bytes(target) == {"file": b"new"}
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("moved", ["tree", "parent"])
def test_what_is_renamed_by_mistake_is_not_called_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    """Another process replaces the tree or the parent of DST between the last check and the rename."""
    parent = tmp_path / "parent"
    parent.mkdir()
    rename = os.rename

    def rename_another(name: str, new_name: str, **directories: int) -> None:
        if new_name == "out":
            path = parent / ".out.ckptx-partial" / "tree" if moved == "tree" else parent
            rename(path, tmp_path / "taken")
            path.mkdir()
            (path / "theirs").touch()
        rename(name, new_name, **directories)

    with Staging(parent / "out") as staging:
        fill(staging)
        monkeypatch.setattr(staging_module.os, "rename", rename_another)
        with pytest.raises(OutputError, match="not the directory that was written"):
            staging.publish()
        monkeypatch.undo()
    if moved == "tree":
        assert tree_bytes(parent / "out") == {"theirs": b""}
        assert tree_bytes(tmp_path / "taken") == {"file": b"new"}
    else:
        assert tree_bytes(parent) == {"theirs": b""}
        assert "out" not in names_in(tmp_path / "taken")


@pytest.mark.parametrize(("name", "other", "is_done"), [("a", "b", True), ("a", "missing", False)])
def test_names_are_exchanged(tmp_path: Path, name: str, other: str, is_done: bool) -> None:
    for each in ("a", "b"):
        (tmp_path / each).write_text(each)
    with DirectoryHandle.open_path(tmp_path) as directory:
        assert staging_module._exchange_names(directory.descriptor, name, directory.descriptor, other) is is_done
    assert (tmp_path / "a").read_text() == ("b" if is_done else "a")


def test_a_system_without_an_exchange_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    target = old(tmp_path / "out")
    with Staging(target, overwrite=True) as staging:
        fill(staging)
        staging.publish()
    assert tree_bytes(target) == {"file": b"new"}
    assert names_in(tmp_path) == ["out"]


def test_a_swap_that_fails_in_the_middle_puts_the_old_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = old(tmp_path / "out")
    real = os.rename

    def failing(a: str, b: str, **directories: int) -> None:
        if b == target.name and a == "tree":
            raise OSError(5, "Input/output error")
        real(a, b, **directories)

    monkeypatch.setattr(staging_module, "_exchange_names", lambda *names: False)
    monkeypatch.setattr(staging_module.os, "rename", failing)
    with pytest.raises(OutputError, match="Input/output error"), Staging(target, overwrite=True) as staging:
        fill(staging)
        staging.publish()
    assert tree_bytes(target) == {"old": b"old"}
    assert names_in(tmp_path) == ["out"]


def test_the_old_directory_is_removed_when_the_swap_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after both renames of a swap: the new one is in place, the old one is rubbish."""
    target = old(tmp_path / "out")

    def killed(self: DirectoryHandle, name: str) -> None:
        if name == ".out.ckptx-old":
            raise KeyboardInterrupt
        real(self, name)

    real = DirectoryHandle.remove
    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "_exchange_names", lambda *names: False)
        patch.setattr(DirectoryHandle, "remove", killed)
        with pytest.raises(KeyboardInterrupt), Staging(target, overwrite=True) as staging:
            fill(staging)
            staging.publish()
    assert names_in(tmp_path) == [".out.ckptx-old", ".out.ckptx-partial", "out"]
    assert tree_bytes(target) == {"file": b"new"}
    with Staging(target, overwrite=True) as staging:
        assert names_in(tmp_path) == [".out.ckptx-partial", "out"]
        fill(staging, b"newer")
        staging.publish()
    assert tree_bytes(target) == {"file": b"newer"}
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("error", "kept"), [(ValueError, False), (SpaceError, False), (KeyboardInterrupt, True), (SystemExit, True)]
)
def test_a_failed_run_removes_its_directory_an_interrupted_one_leaves_it(
    tmp_path: Path, error: type[BaseException], kept: bool
) -> None:
    with pytest.raises(error), Staging(tmp_path / "out") as staging:
        fill(staging)
        raise error
    assert names_in(tmp_path) == ([".out.ckptx-partial"] if kept else [])


def test_the_same_plan_is_resumed_another_starts_afresh(tmp_path: Path) -> None:
    for plan, resume, resumed in ((b"a", True, False), (b"a", True, True), (b"b", True, False), (b"b", False, False)):
        with pytest.raises(KeyboardInterrupt), Staging(tmp_path / "out", resume=resume) as staging:
            assert staging.begin(plan, resume) is resumed
            assert (staging.tree_path / "half").exists() is resumed
            (staging.tree_path / "half").write_bytes(b"")
            raise KeyboardInterrupt


def test_what_an_interrupted_run_left_does_not_block_a_fresh_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Staging(tmp_path / "out") as staging:
        fill(staging, b"half")
        (staging.journal_path / "note").write_bytes(b"")
        raise KeyboardInterrupt
    with Staging(tmp_path / "out") as staging:
        fill(staging)
        assert names_in(staging.journal_path) == []
        staging.publish()
    assert tree_bytes(tmp_path / "out") == {"file": b"new"}


def test_somebody_else_creates_the_target_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(OutputError, match="created by another process during the run"), Staging(target) as staging:
        fill(staging)
        old(target)
        staging.publish()
    assert tree_bytes(target) == {"old": b"old"}
    assert names_in(tmp_path) == ["out"]


_HOLD = """
import sys
from pathlib import Path
from ckptx.publishing.staging import Staging
with Staging(Path(sys.argv[1])) as staging:
    staging.begin(b"plan", False)
    print("held", flush=True)
    sys.stdin.read()
    (staging.tree_path / "file").write_bytes(b"theirs")
    staging.publish()
"""


def test_a_second_run_is_refused_while_the_first_works(tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    for resume in (False, True):
        with pytest.raises(OutputError, match="another ckptx is writing it"):
            Staging(target, resume=resume)
    assert names_in(tmp_path) == [".out.ckptx-partial"]
    first.communicate("")
    assert first.returncode == 0
    assert tree_bytes(target) == {"file": b"theirs"}
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_place_stays_claimed_until_the_last_run_has_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    target = tmp_path / "out"
    refused = 0
    real = DirectoryHandle.remove

    def another_run_begins(self: DirectoryHandle, name: str) -> None:
        nonlocal refused
        for moment in range(2):
            if name != "lock" or not moment:
                with pytest.raises(OutputError, match="another ckptx is writing it"):
                    Staging(target, overwrite=True)
                refused += 1
            if not moment:
                real(self, name)

    monkeypatch.setattr(DirectoryHandle, "remove", another_run_begins)
    try:
        with Staging(target) as staging:
            fill(staging)
            if fails:
                raise ValueError
            staging.publish()
    except ValueError:
        pass
    assert refused
    assert names_in(tmp_path) == ([] if fails else ["out"])


def test_a_staging_directory_with_something_foreign_in_it_is_not_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Staging(tmp_path / "out") as staging:
        fill(staging)
        (staging.root / "foreign").write_bytes(b"")
        staging.discard()
        assert names_in(staging.root) == ["foreign", "lock"]
        raise KeyboardInterrupt


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    first.stdout.readline()
    first.kill()
    first.communicate()
    assert names_in(tmp_path) == [".out.ckptx-partial"]
    with Staging(target) as staging:
        fill(staging)
        staging.publish()
    assert names_in(tmp_path) == ["out"]


def test_a_read_only_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="file: not a directory; choose another DST"):
        Staging(tmp_path / "file" / "out")


def test_space_is_checked_before_writing(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match=r"requires .* TiB"), Staging(tmp_path / "out") as staging:
        staging.begin(b"plan", False)
        staging.require_space(1 << 60)
    assert names_in(tmp_path) == []
    assert free_space(tmp_path / "not" / "yet" / "there") > 0


@pytest.mark.parametrize(
    ("source", "target"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "link/b"), ("a", "x/../a")]
)
def test_overlaps_are_refused(tmp_path: Path, source: str, target: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(OutputError, match="overlaps the input"):
        refuse_overlap(tmp_path / source, tmp_path / target)


@pytest.mark.parametrize(("source", "target"), [("a", "ab"), ("ab", "a"), ("a/b", "a/c")])
def test_neighbours_do_not_overlap(tmp_path: Path, source: str, target: str) -> None:
    refuse_overlap(tmp_path / source, tmp_path / target)


def test_a_staging_directory_is_known_by_its_name(tmp_path: Path) -> None:
    assert is_in_staging_directory(tmp_path / ".out.ckptx-partial" / "tree")
    assert not is_in_staging_directory(tmp_path / "out.ckptx-partial")
