"""Make the k-th access to files below a directory fail, as a disk or a network file system does.

Reads and writes are failed separately: an output is written, and read again to check it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

# Functions of `os` through which sources are read, all with a path or a descriptor as first argument.
READS = ("open", "stat", "lstat", "fstat", "read", "pread", "preadv", "scandir", "listdir")
# Further functions through which an output is written. Both arguments of `rename` and `replace` are paths.
WRITES = (*READS, "mkdir", "pwrite", "write", "ftruncate", "fsync", "rename", "replace", "unlink", "rmdir", "statvfs")


class FailingCalls:
    """Counts accesses below `root`, and fails one of them.

    Attributes:
        calls: Function and path of each access, in order.
    """

    def __init__(self, root: Path, position: int | None, number: int) -> None:
        """Store the arguments.

        Args:
            root: Directory whose accesses count.
            position: Index of the access that fails; None lets all succeed.
            number: The errno.
        """
        self.calls: list[tuple[str, str]] = []
        self._root, self._position, self._number = str(root), position, number
        self._lock = threading.Lock()
        self._readlink = os.readlink

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its accesses counted."""

        def call(target: Any, *args: Any, **options: Any) -> Any:
            path = self._path_of(target, options.get("dir_fd", options.get("src_dir_fd")))
            if path == self._root or path.startswith(self._root + "/"):
                with self._lock:
                    self.calls.append((name, path))
                    fails = len(self.calls) - 1 == self._position
                if fails:
                    raise OSError(self._number, os.strerror(self._number), path)
            return function(target, *args, **options)

        return call

    def _path_of(self, target: Any, directory: int | None) -> str:
        if isinstance(target, int):
            try:
                return self._readlink(f"/proc/self/fd/{target}")
            except OSError:
                return ""
        path = os.fsdecode(target)
        if directory is not None:
            return os.path.join(self._path_of(directory, None), path)
        return os.path.abspath(path)


@contextmanager
def failing_calls(
    root: Path, position: int | None = None, number: int = errno.EIO, names: Sequence[str] = READS
) -> Iterator[FailingCalls]:
    """Patch functions of `os` and, for writes, `fcntl.flock` within the context; see `FailingCalls`."""
    calls = FailingCalls(root, position, number)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, calls.wrapped(name, cast("Callable[..., Any]", getattr(os, name))))
        if "fsync" in names:
            patch.setattr(fcntl, "flock", calls.wrapped("flock", fcntl.flock))
        yield calls
