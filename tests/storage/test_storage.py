"""Files on disk: paths that stay inside, descriptors that are shared, failures that are named."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptx.errors import CkptxError, EnvironmentProblem, InputError, OutputError, OutputFailure, SpaceError
from ckptx.storage import files as storage
from ckptx.storage.directory_handle import DirectoryHandle
from ckptx.storage.files import FilePool, read_error, resolve_inside, write_at, write_error


@pytest.mark.parametrize("name", ["a", "a/b.safetensors", "./a", "a..b", "..a", "a/...", " "])
def test_names_inside(tmp_path: Path, name: str) -> None:
    assert tmp_path in resolve_inside(tmp_path, name).parents


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(
            (name, "leads out of the checkpoint directory")
            for name in ("/etc/passwd", "..", "../a", "a/../../b", "a/..")
        ),
        ("", "is empty"),
        ("a\\b", "contains a backslash"),
        ("a\0b", "contains a null character"),
    ],
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        resolve_inside(tmp_path, name)


def test_a_pool_opens_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with FilePool(tmp_path) as files:
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(files.open_descriptor("a"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
        assert files.size("a") == 10
        assert files.read("a", 2, 3) == b"234"
        assert files.read("a", 10, 0) == b""
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(found[0])


def test_a_read_past_the_end_says_how_far(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    said = r"a: ends at byte 10, expected at least 12;.*truncated"
    with FilePool(tmp_path) as files, pytest.raises(InputError, match=said):
        files.read("a", 8, 4)


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    real = os.pread
    monkeypatch.setattr(storage.os, "pread", lambda fd, n, at: real(fd, min(n, 3), at))
    with FilePool(tmp_path) as files:
        assert files.read("a", 1, 8) == b"12345678"


@pytest.mark.parametrize(
    "read",
    [
        lambda files: files.read("a", 0, 1),
        lambda files: files.read_up_to("a", 0, 1),
        lambda files: files.read_into("a", 0, [bytearray(1)]),
    ],
)
def test_a_disk_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[FilePool], object]
) -> None:
    def failing(*given: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "a").write_bytes(b"0123456789")
    for verb in ("pread", "preadv"):
        monkeypatch.setattr(storage.os, verb, failing)
    with FilePool(tmp_path) as files, pytest.raises(InputError, match="a: cannot be read: Input/output error"):
        read(files)


def test_missing_dangling_and_forbidden_files_read_differently(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "directory").mkdir()
    with FilePool(tmp_path) as files:
        with pytest.raises(InputError, match="missing: no such file"):
            files.open_descriptor("missing")
        with pytest.raises(InputError, match="link: symbolic link to gone, which does not exist"):
            files.open_descriptor("link")
        with pytest.raises(InputError, match="loop: symbolic link to loop, which leads back to it"):
            files.open_descriptor("loop")
        with pytest.raises(InputError, match="out of the checkpoint"):
            files.open_descriptor("../x")
    error = PermissionError(errno.EACCES, "Permission denied")
    assert "cannot be read: Permission denied" in str(read_error(tmp_path / "directory", error))


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(storage.os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    with DirectoryHandle.open_path(tmp_path) as held:
        descriptor = held.create_descriptor("deep/a")
    write_at(descriptor, b"0123456789", 2, tmp_path / "deep" / "a")
    os.close(descriptor)
    assert (tmp_path / "deep" / "a").read_bytes() == b"\0\x000123456789"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, SpaceError),
        (errno.EDQUOT, SpaceError),
        (errno.EIO, OutputFailure),
        (errno.EROFS, OutputFailure),
        (errno.EFBIG, OutputFailure),
        (errno.EACCES, OutputError),
        (errno.EMFILE, EnvironmentProblem),
    ],
)
def test_failed_writes_by_cause(number: int, kind: type[CkptxError]) -> None:
    refusal = write_error(Path("x"), OSError(number, os.strerror(number)))
    assert type(refusal) is kind
    assert os.strerror(number) in str(refusal)


def test_a_full_device_is_said_to_be_full() -> None:
    descriptor = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(SpaceError, match="No space left"):
            write_at(descriptor, b"x", 0, Path("/dev/full"))
    finally:
        os.close(descriptor)


def test_a_file_below_a_file_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with (
        DirectoryHandle.open_path(tmp_path) as held,
        pytest.raises(OutputError, match="cannot be opened: Not a directory"),
    ):
        held.create_descriptor("a/b")


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with DirectoryHandle.open_path(tmp_path) as held:
            held.write("a", [])
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (Path.mkdir, "directory"), (os.mkfifo, "pipe"), (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "socket"),
        (lambda path: path.symlink_to("/dev/zero"), "device"),
    ],
)  # fmt: skip
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], kind: str) -> None:
    make(tmp_path / "shard")
    with FilePool(tmp_path) as files, pytest.raises(InputError, match=f"expected a regular file, found a {kind}; repl"):
        files.open_descriptor("shard")
