"""Claims that fail: another run creates or removes the staging directory meanwhile, or a system call fails.

No outcome leaves a staging directory without its run, an open descriptor, or a change to the files of another run.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import CkptxError, EnvironmentProblem, OutputError
from ckptx.publishing import staging as staging_module
from ckptx.publishing.staging import Staging, open_staging
from ckptx.storage.directory_handle import DirectoryHandle
from tests.support.checkpoint_writers import names_in, tree_bytes

STAGING = ".out.ckptx-partial"


def open_descriptors() -> set[str]:
    """Return the open descriptors of this process, without that of the listing itself."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


@pytest.fixture(autouse=True)
def no_leaked_descriptors() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "parent").mkdir()
    return tmp_path / "parent" / "out"


def publish_file(target: Path, text: bytes = b"new", **options: Any) -> None:
    """Claim, write one file and publish."""
    with Staging(target, **options) as staging:
        staging.begin(b"plan", resume=False)
        staging.output.write("file", [text])
        staging.publish()


def run_after(
    patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[], object], *, times: int, before: bool = False
) -> list[None]:
    """Call `change` after (or `before`) each of the first calls of a method; return a list with an item per call."""
    real, calls = getattr(owner, name), list[None]()

    def called(*arguments: Any, **named: Any) -> Any:
        is_changed = len(calls) < times
        if is_changed:
            calls.append(None)
        if is_changed and before:
            change()
        result = real(*arguments, **named)
        if is_changed and not before:
            change()
        return result

    patch.setattr(owner, name, called)
    return calls


def fail(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# ------------------------------------------------------------------------------------------------- removed by a run


def remove(path: Path) -> None:
    """Remove a staging directory in the order of `Staging.discard`, the lock before the directory."""
    (path / "lock").unlink(missing_ok=True)
    path.rmdir()


REMOVALS: dict[str, tuple[Any, str, bool]] = {
    "after it was created": (DirectoryHandle, "_create_directory", False),
    "after it was opened": (staging_module, "_refuse_foreign_directory", True),
    "before the lock was created": (DirectoryHandle, "create_descriptor", True),
    "before the lock was locked": (staging_module, "lock_file", True),
    "after the lock was locked": (staging_module, "lock_file", False),
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", REMOVALS)
def test_a_claim_is_tried_again_if_another_run_removes_the_directory(
    target: Path, monkeypatch: pytest.MonkeyPatch, moment: str, times: int
) -> None:
    owner, name, before = REMOVALS[moment]
    with monkeypatch.context() as patch:
        calls = run_after(patch, owner, name, lambda: remove(target.parent / STAGING), times=times, before=before)
        staging = Staging(target)
    assert len(calls) == times
    with staging:
        with pytest.raises(OutputError, match="another ckptx is writing it"):
            Staging(target)
        staging.begin(b"plan", resume=False)
        staging.output.write("file", [b"new"])
        staging.publish()
    assert tree_bytes(target) == {"file": b"new"}
    assert names_in(target.parent) == ["out"]


@pytest.mark.parametrize("moment", REMOVALS)
def test_a_claim_is_given_up_if_the_directory_is_removed_every_time(
    target: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner, name, before = REMOVALS[moment]
    with monkeypatch.context() as patch:
        change = lambda: remove(target.parent / STAGING)  # noqa: E731 (used once)
        calls = run_after(patch, owner, name, change, times=1000, before=before)
        with pytest.raises(OutputError) as refused:
            Staging(target)
    assert len(calls) == 100
    message = str(refused.value)
    if moment == "after it was created":
        assert message == (
            f"{target.parent / STAGING}: cannot be opened: No such file or directory; its directory was removed, no "
            "output was created, run again"
        )
    else:
        assert message == (
            f"{target.parent / STAGING}: was removed by another process 100 times; wait for it and run again"
        )
    assert names_in(target.parent) == []


@pytest.mark.parametrize("moment", ["after it was created", "before the lock was created"])
def test_a_directory_that_another_run_claims_first_is_left_to_it(
    target: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """This run created the directory, and another one locked it before."""
    owner, name, before = REMOVALS[moment]
    others: list[Staging] = []
    with monkeypatch.context() as patch:
        calls = run_after(patch, owner, name, lambda: others.append(Staging(target)), times=1, before=before)
        with pytest.raises(OutputError) as refused:
            Staging(target)
    assert len(calls) == 1
    lock = target.parent / STAGING / "lock"
    assert str(refused.value) == (f"{target}: another ckptx is writing it (lock {lock}); wait for it or stop it")
    with others[0] as other:
        other.begin(b"plan", resume=False)
        other.output.write("file", [b"theirs"])
        other.publish()
    assert tree_bytes(target) == {"file": b"theirs"}
    assert names_in(target.parent) == ["out"]


# ------------------------------------------------------------------------------------------------- failing calls


@contextmanager
def descriptor_limit(free: int) -> Iterator[None]:
    """Allow this process to open so many more descriptors."""
    used = {int(name) for name in open_descriptors()}
    unused = (number for number in count() if number not in used)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = [next(unused) for _ in range(free + 1)][-1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_may_not_open_more_files_leaves_nothing(target: Path, overwrite: bool) -> None:
    """The limit is reached at every moment: from the first descriptor of a claim to the last of the publication."""
    if overwrite:
        target.mkdir()
        (target / "old").write_bytes(b"old")
    before = names_in(target.parent)
    for free in range(64):
        try:
            with descriptor_limit(free):
                publish_file(target, overwrite=overwrite)
        except CkptxError as error:
            assert isinstance(error, EnvironmentProblem if not overwrite else (EnvironmentProblem, OutputError))
            assert "Too many open files" in str(error)
            assert names_in(target.parent) == before, free
            assert not overwrite or tree_bytes(target) == {"old": b"old"}
        else:
            break
    assert free > 8
    assert tree_bytes(target) == {"file": b"new"}
    if overwrite:  # the next run removes what was left of the old directory
        assert set(names_in(target.parent)) <= {STAGING, "out"}
        publish_file(target, b"newer", overwrite=True)
    assert names_in(target.parent) == ["out"]


FAILURES: dict[str, tuple[str, Callable[..., bool]]] = {
    "status of a lock": ("stat", lambda path, **_: path == "lock"),
    "status of an existing lock": ("stat", lambda path, dir_fd=None, **_: path == "lock" in os.listdir(dir_fd)),
    "opening the directory": ("open", lambda path, *_, **__: path == STAGING),
    "creating the lock": ("open", lambda path, *_, **__: path == "lock"),
    "listing the directory": ("listdir", lambda path, **_: type(path) is int and _is_staging(path)),
}


def _is_staging(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}").endswith(STAGING)


@pytest.mark.parametrize("is_left_over", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_claim_whose_system_call_fails_leaves_no_new_directory(
    target: Path, monkeypatch: pytest.MonkeyPatch, failure: str, is_left_over: bool
) -> None:
    if is_left_over:
        with pytest.raises(KeyboardInterrupt), Staging(target) as staging:
            staging.begin(b"plan", resume=False)
            staging.output.write("half", [b"half"])
            raise KeyboardInterrupt
    before = tree_bytes(target.parent)
    name, is_failing = FAILURES[failure]
    real, left = getattr(os, name), [1]

    def called(*arguments: Any, **named: Any) -> Any:
        if left and is_failing(*arguments, **named):
            left.clear()
            raise fail(errno.EIO)
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, called)
        with pytest.raises(OutputError, match=r"ckptx-partial.*Input/output error"):
            Staging(target)
    assert not left
    assert tree_bytes(target.parent) == before
    assert names_in(target.parent) == ([STAGING] if is_left_over else [])
    publish_file(target)
    assert names_in(target.parent) == ["out"]


@pytest.mark.parametrize("is_left_over", [False, True])
def test_a_lock_that_cannot_be_tried_is_removed_only_with_a_new_directory(
    target: Path, monkeypatch: pytest.MonkeyPatch, is_left_over: bool
) -> None:
    root = target.parent / STAGING
    if is_left_over:
        (root / "tree").mkdir(parents=True)
        (root / "tree" / "half").write_bytes(b"half")
        (root / "lock").touch()

    def flock(descriptor: int, operation: int) -> None:
        raise fail(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", flock)
        with pytest.raises(OutputError) as refused:
            Staging(target)
    assert str(refused.value) == (f"{root / 'lock'}: cannot be locked: Input/output error; check that file system")
    assert names_in(target.parent) == ([STAGING] if is_left_over else [])
    if is_left_over:
        assert tree_bytes(root) == {"lock": b"", "tree/half": b"half"}


def test_an_old_directory_that_cannot_be_moved_back_is_an_error_of_the_output(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run was killed between both renames of an overwrite, and the next one cannot undo the first."""
    target.mkdir()
    (target / "old").write_bytes(b"old")
    root = target.parent / STAGING
    root.mkdir()
    (root / "lock").touch()
    (root / "aside").write_text(f"{target.stat().st_ino}\n")
    target.rename(target.parent / ".out.ckptx-old")

    def rename(*_: Any, **__: Any) -> None:
        raise fail(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(OutputError) as refused:
            Staging(target, overwrite=True)
    assert str(refused.value) == f"{root}: cannot be written: Input/output error"
    assert tree_bytes(target.parent / ".out.ckptx-old") == {"old": b"old"}
    with pytest.raises(OutputError, match="exists and is not empty"):
        Staging(target)
    assert tree_bytes(target) == {"old": b"old"}
    assert names_in(target.parent) == ["out"]


def test_a_published_directory_that_cannot_be_synced_is_reported_as_complete(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(target.parent):
            raise fail(errno.EIO)
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OutputError) as failed:
            publish_file(target)
    assert str(failed.value) == (
        f"{target}: is complete, but its directory could not be checked and synced to disk: Input/output error; check "
        "that it still exists after a power failure"
    )
    assert tree_bytes(target) == {"file": b"new"}
    assert names_in(target.parent) == ["out"]


# ------------------------------------------------------------------------------------------------- moved or replaced


@pytest.mark.parametrize("replacement", ["nothing", "a file", "an empty directory", "a copy"])
def test_a_parent_that_was_moved_is_not_published_to(target: Path, tmp_path: Path, replacement: str) -> None:
    parent, moved = target.parent, tmp_path / "moved"
    with Staging(target) as staging:
        staging.begin(b"plan", resume=False)
        staging.output.write("file", [b"new"])
        parent.rename(moved)
        if replacement == "a file":
            parent.write_bytes(b"theirs")
        elif replacement == "an empty directory":
            parent.mkdir()
        elif replacement == "a copy":
            shutil.copytree(moved, parent)
        before = tree_bytes(parent) if parent.is_dir() else None
        with pytest.raises(OutputError) as refused:
            staging.publish()
        assert str(refused.value) == (
            f"{parent}: was moved or replaced by another process; no output was created, run again"
        )
        staging.discard()
        assert (tree_bytes(parent) if parent.is_dir() else None) == before
    assert names_in(moved) == []


def test_a_parent_that_became_a_loop_of_links_is_not_published_to(target: Path, tmp_path: Path) -> None:
    parent = target.parent
    with Staging(target) as staging:
        staging.begin(b"plan", resume=False)
        staging.output.write("file", [b"new"])
        parent.rename(tmp_path / "moved")
        parent.symlink_to(parent)
        with pytest.raises(OutputError) as refused:
            staging.publish()
        assert str(refused.value) == (f"{parent / STAGING}: cannot be accessed: Too many levels of symbolic links")
        staging.discard()
    assert names_in(tmp_path / "moved") == []


@pytest.mark.parametrize("name", ["tree", "journal"])
def test_a_directory_that_replaced_one_of_the_run_is_kept(target: Path, tmp_path: Path, name: str) -> None:
    """It may belong to another user; the rest of the staging directory is removed."""
    root = target.parent / STAGING
    with Staging(target) as staging:
        staging.begin(b"plan", resume=False)
        staging.output.write("file", [b"new"])
        (root / name).rename(tmp_path / "moved")
        (root / name).mkdir()
        (root / name / "theirs").write_bytes(b"theirs")
        staging.discard()
        assert staging.leftover == root
    assert names_in(root) == sorted(["lock", name])
    assert tree_bytes(root / name) == {"theirs": b"theirs"}


def test_a_staging_directory_that_was_replaced_is_kept(target: Path, tmp_path: Path) -> None:
    root = target.parent / STAGING
    with Staging(target) as staging:
        staging.begin(b"plan", resume=False)
        root.rename(tmp_path / "moved")
        root.mkdir()
        with pytest.raises(OutputError) as refused:
            staging.verify_claim()
        assert str(refused.value) == (
            f"{root}: was removed or replaced by another process; no output was created, run again"
        )
        staging.discard()
        assert staging.leftover == root
    assert names_in(root) == []
    assert names_in(tmp_path / "moved") == []


def test_nothing_is_left_over_after_a_successful_run(target: Path) -> None:
    with Staging(target) as staging:
        staging.begin(b"plan", resume=False)
        staging.output.write("file", [b"new"])
        staging.verify_claim()
        assert staging.leftover is None
        staging.publish()
    assert staging.leftover is None


# ------------------------------------------------------------------------------------------------- foreign contents

KINDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    **dict.fromkeys(("lock", "plan", "aside", "probe"), ("regular file", Path.mkdir)),
    **dict.fromkeys(("tree", "journal"), ("directory", Path.touch)),
}


@pytest.mark.parametrize("with_lock", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_an_entry_of_another_kind_is_not_taken_over(target: Path, name: str, with_lock: bool) -> None:
    kind, create = KINDS[name]
    root = target.parent / STAGING
    root.mkdir()
    if with_lock and name != "lock":
        (root / "lock").touch()
    create(root / name)
    before = {path.name: path.lstat().st_mode for path in root.iterdir()}
    with pytest.raises(OutputError) as refused:
        Staging(target)
    assert str(refused.value) == (
        f"{root}: not a staging directory of ckptx, its '{name}' is not a {kind}; move it elsewhere"
    )
    assert {path.name: path.lstat().st_mode for path in root.iterdir()} == before


@pytest.mark.parametrize("name", ["plan", "aside", "tree", "journal"])
def test_a_directory_without_a_lock_is_not_taken_over(target: Path, name: str) -> None:
    root = target.parent / STAGING
    root.mkdir()
    (root / name).touch() if KINDS[name][0] == "regular file" else (root / name).mkdir()
    with pytest.raises(OutputError) as refused:
        Staging(target)
    assert str(refused.value) == f"{root}: not a staging directory of ckptx, it has no lock; move it elsewhere"
    assert names_in(root) == [name]


@pytest.mark.parametrize("contents", [[], ["lock"], ["aside", "journal/", "lock", "plan", "tree/"]])
def test_what_a_killed_run_can_leave_is_taken_over(target: Path, contents: list[str]) -> None:
    root = target.parent / STAGING
    root.mkdir()
    for name in contents:
        (root / name).mkdir() if name.endswith("/") else (root / name).touch()
    publish_file(target)
    assert tree_bytes(target) == {"file": b"new"}
    assert names_in(target.parent) == ["out"]


def test_a_probe_of_a_killed_run_does_not_block_the_next_one(target: Path) -> None:
    (target.parent / STAGING).mkdir()
    (target.parent / STAGING / "probe").touch()
    publish_file(target)
    assert tree_bytes(target) == {"file": b"new"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_staging_directory_of_another_user_is_refused(target: Path) -> None:
    root = target.parent / STAGING
    root.mkdir()
    os.chown(root, 12345, -1)
    with pytest.raises(OutputError) as refused:
        Staging(target)
    assert str(refused.value) == f"{root}: belongs to another user; remove it, or choose another DST"
    assert names_in(root) == []


# ------------------------------------------------------------------------------------------------- other processes


def test_another_process_opens_the_tree_and_the_journal_of_a_run(target: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(target.parent)
    with Staging(target) as staging:
        staging.begin(b"plan", resume=False)
        with open_staging(tmp_path / "link" / "out") as (tree, journal):
            tree.write("file", [b"theirs"])
            journal.write("note", [b"note"])
        assert tree_bytes(staging.tree_path) == {"file": b"theirs"}
        assert tree_bytes(staging.journal_path) == {"note": b"note"}
        staging.publish()
    assert tree_bytes(target) == {"file": b"theirs"}


@pytest.mark.parametrize("missing", ["the staging directory", "tree", "journal"])
def test_a_run_that_has_ended_cannot_be_opened_by_another_process(target: Path, missing: str) -> None:
    root = target.parent / STAGING
    if missing != "the staging directory":
        root.mkdir()
        (root / ("journal" if missing == "tree" else "tree")).mkdir()
    path = root if missing == "the staging directory" else root / missing
    with pytest.raises(OutputError) as refused, open_staging(target):
        pass
    assert str(refused.value).startswith(f"{path}: cannot be opened: No such file or directory")


# ------------------------------------------------------------------------------------------------- interrupted runs


def test_a_discarded_plan_is_reported_to_the_resumed_run_only(target: Path) -> None:
    long_plan = b"x" * (3 << 20)
    for plan, resume, resumed, replaced in (
        (long_plan, True, False, None),
        (long_plan, True, True, None),
        (b"other", True, False, long_plan[: 1 << 20]),
        (b"third", False, False, None),
        (b"fourth", True, False, b"third"),
    ):
        with pytest.raises(KeyboardInterrupt), Staging(target, resume=resume) as staging:
            assert staging.begin(plan, resume) is resumed
            assert staging.replaced_plan == replaced
            assert (staging.root / "plan").read_bytes() == plan
            for path in (staging.tree_path, staging.journal_path):
                assert names_in(path) == (["half"] if resumed else [])
                (path / "half").write_bytes(b"")
            raise KeyboardInterrupt


@pytest.mark.parametrize("nbytes", [-1, 0, 1])
def test_a_run_requires_exactly_the_space_of_its_files(
    target: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 4096))  # type: ignore[attr-defined]
    with Staging(target) as staging:
        if nbytes <= 0:
            staging.require_space(4096 + nbytes)
        else:
            with pytest.raises(CkptxError) as refused:
                staging.require_space(4096 + nbytes)
            assert refused.value.exit_code == 6
            assert str(refused.value) == (
                f"{target}: requires 4.00 KiB, but the file system has 4.00 KiB free; free some space"
            )


def test_files_of_the_target_are_digested_without_following_links(target: Path) -> None:
    target.mkdir()
    for name in ("a", "b"):
        (target / name).write_bytes(b"same")
    (target / "c").write_bytes(b"other")
    (target / "link").symlink_to("a")
    with Staging(target, resume=True) as staging:
        assert staging.digest_target_file("a") == staging.digest_target_file("b") != staging.digest_target_file("c")
        with pytest.raises(OutputError, match="link: cannot be opened"):
            staging.digest_target_file("link")
        with pytest.raises(OSError, match="No such file"):
            staging.digest_target_file("missing")
