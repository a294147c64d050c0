"""Targets that are refused before any work: the current directory and what contains it, inputs, and the Hub cache."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from ckptx.errors import OutputError
from ckptx.publishing.output_checks import (
    free_space,
    refuse_existing,
    refuse_files_inside,
    refuse_overlap,
    refuse_unreachable,
)

CURRENT = "is or contains the current directory"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory two levels below tmp_path."""
    directory = tmp_path / "above" / "here"
    (directory / "below").mkdir(parents=True)
    monkeypatch.chdir(directory)
    return directory


@pytest.mark.parametrize("target", [".", "..", "../..", "link"])
def test_the_current_directory_is_not_replaced(here: Path, target: str) -> None:
    (here / "link").symlink_to(here.parent)
    with pytest.raises(OutputError, match=CURRENT):
        refuse_existing(Path(target), overwrite=True)


@pytest.mark.parametrize("target", ["below", "../sibling", "missing"])
def test_directories_without_the_current_one_are_accepted(here: Path, target: str) -> None:
    (here.parent / "sibling").mkdir()
    refuse_existing(Path(target), overwrite=True)


def test_a_directory_with_files_requires_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refuse_existing(tmp_path / "out", overwrite=False)
    (tmp_path / "out" / "file").touch()
    refuse_existing(tmp_path / "out", overwrite=True)
    with pytest.raises(OutputError, match="exists and is not empty"):
        refuse_existing(tmp_path / "out", overwrite=False)
    with pytest.raises(OutputError, match="not a directory"):
        refuse_existing(tmp_path / "out" / "file", overwrite=True)


@pytest.mark.parametrize(
    ("target", "is_refused"),
    [
        ("hub/models--a", True),
        ("hub/models--a/blobs", True),
        ("hub/models--a/snapshots", True),
        ("hub/models--a/snapshots/1/out", True),
        ("hub/models--a/new", True),
        ("hub", True),
        ("hub/models--b", False),
        ("out", False),
    ],
)
def test_a_target_in_the_cache_of_an_input_is_refused(tmp_path: Path, target: str, is_refused: bool) -> None:
    repository = tmp_path / "hub" / "models--a"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / "1").mkdir(parents=True)
    (repository / "blobs" / "0").touch()
    file = repository / "snapshots" / "1" / "model.safetensors"
    file.symlink_to("../../blobs/0")
    if is_refused:
        with pytest.raises(OutputError, match="overlaps the input"):
            refuse_files_inside([file], tmp_path / target)
    else:
        refuse_files_inside([file], tmp_path / target)


@pytest.mark.parametrize(("target", "is_refused"), [("in", True), (".", True), ("in/below", False), ("other", False)])
def test_a_target_that_contains_an_input_file_is_refused(tmp_path: Path, target: str, is_refused: bool) -> None:
    """Directories named blobs are special only next to snapshots."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "file").touch()
    if is_refused:
        with pytest.raises(OutputError, match="overlaps the input"):
            refuse_files_inside([tmp_path / "in" / "file"], tmp_path / target)
    else:
        refuse_files_inside([tmp_path / "in" / "file"], tmp_path / target)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("x" * 256, "File name too long"),
        ("new/" + "x" * 256, None),
        ("loop", "Too many levels of symbolic links"),
        ("loop/out", "Too many levels of symbolic links"),
        ("x" * 255, None),
        ("directory", None),
        ("missing/out", None),
        ("file/out", None),
        ("dangling", None),
    ],
)
def test_a_target_that_the_system_cannot_access_is_refused(tmp_path: Path, target: str, reason: str | None) -> None:
    """A missing directory can be created; a file in the path and a dangling link are refused when they are opened."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    path = tmp_path / target
    if target == "loop":  # a link itself can be accessed, but not listed
        refuse_unreachable(path)
        with pytest.raises(OutputError) as refused:
            refuse_existing(path, overwrite=True)
        assert str(refused.value) == f"{path}: cannot be listed: {reason}; choose another DST"
    elif reason is None:
        refuse_unreachable(path)
    else:
        with pytest.raises(OutputError) as refused:
            refuse_unreachable(path)
        assert str(refused.value) == f"{path}: cannot be written: {reason}; choose another DST"


@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a file", "pipe"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_that_is_no_directory_is_refused(tmp_path: Path, kind: str, overwrite: bool) -> None:
    target = tmp_path / "out"
    (tmp_path / "file").touch()
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "file":
        target.touch()
    else:
        target.symlink_to("gone" if kind == "dangling link" else "file")
    with pytest.raises(OutputError) as refused:
        refuse_existing(target, overwrite=overwrite)
    assert str(refused.value) == f"{target}: not a directory; choose another DST"


def write_mount_points(patch: pytest.MonkeyPatch, file: Path, points: list[Path]) -> None:
    """Replace the list of the kernel; spaces, line breaks and backslashes are octal escapes there."""
    escaped = [str(point).replace("\\", r"\134").replace(" ", r"\040").replace("\n", r"\012") for point in points]
    file.write_text("".join(f"36 1 8:1 / {point} rw - ext4 /dev/sda1 rw\n" for point in escaped) + "short line\n")
    real = Path.read_bytes
    patch.setattr(Path, "read_bytes", lambda path: real(file if str(path) == "/proc/self/mountinfo" else path))


@pytest.mark.parametrize(
    ("mount", "problem"),
    [
        ("out", "is a mount point"),
        ("out/a b", "contains a mount point, {}"),
        ("out/c\\d/e\nf", "contains a mount point, {}"),
        (".", None),
        ("out2", None),
        ("beside/out", None),
    ],
)
def test_a_mount_point_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, problem: str | None
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (tmp_path / "link").symlink_to("out")
    write_mount_points(monkeypatch, tmp_path / "mountinfo", [Path("/"), tmp_path / mount])
    for path in (target, tmp_path / "link"):
        if problem is None:
            refuse_existing(path, overwrite=True)
        else:
            with pytest.raises(OutputError) as refused:
                refuse_existing(path, overwrite=True)
            assert str(refused.value) == (
                f"{path}: {problem.format(tmp_path / mount)}, and cannot be replaced atomically; choose a directory "
                "inside it"
            )


def test_a_mount_point_is_recognized_without_the_list_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if str(path) == "/proc/self/mountinfo":
            raise FileNotFoundError(2, "No such file or directory")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    refuse_existing(tmp_path, overwrite=True)
    with pytest.raises(OutputError, match="/proc: is a mount point, and cannot be replaced atomically"):
        refuse_existing(Path("/proc"), overwrite=True)


def test_free_space_is_that_of_the_file_system_that_the_target_will_be_on(tmp_path: Path) -> None:
    """In /proc, nothing is free."""
    (tmp_path / "link").symlink_to("/proc")
    (tmp_path / "out").symlink_to("/proc/new/out")
    (tmp_path / "directory").mkdir()
    for target in ("link/new", "link/new/out", "out"):
        assert free_space(tmp_path / target) == 0, target
    for target in ("directory", "new", "new/out"):
        assert free_space(tmp_path / target) > 0, target


def test_free_space_that_cannot_be_read_is_an_error_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_usage(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with pytest.raises(OutputError) as failed:
        free_space(tmp_path / "new" / "out")
    assert str(failed.value) == f"{tmp_path}: cannot be accessed: Input/output error"


@pytest.mark.parametrize(
    ("source", "target", "is_refused"),
    [
        ("a", "a", True), ("a", "a/new/out", True), ("a/b", "a", True), ("a/b/file", "a", True), ("a", "b", False),
        ("a/b", "a/c", False), ("new", "new", True), ("new/in", "new", True), ("new", "new/out", True),
        ("new/in", "new/out", False), ("link", "a/b", True), ("a/b", "link/c", False),
    ],
)  # fmt: skip
def test_an_output_that_overlaps_an_input_is_refused(
    tmp_path: Path, source: str, target: str, is_refused: bool
) -> None:
    """Either may be missing, and is then compared by name."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "link").symlink_to("a")
    paths = tmp_path / source, tmp_path / target
    if is_refused:
        with pytest.raises(OutputError) as refused:
            refuse_overlap(*paths)
        assert str(refused.value) == f"{paths[1]}: overlaps the input {paths[0]}; choose a DST outside it"
    else:
        refuse_overlap(*paths)
