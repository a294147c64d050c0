"""Make the k-th access to files below a directory fail, as a disk or a network file system does."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

# Functions of `os` through which sources are read, all with a path or a descriptor as first argument.
READS = ("open", "stat", "lstat", "fstat", "read", "pread", "preadv", "scandir", "listdir")


class FailingReads:
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
            path = self._path_of(target, options.get("dir_fd"))
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
def failing_reads(root: Path, position: int | None = None, number: int = errno.EIO) -> Iterator[FailingReads]:
    """Patch `os` within the context; see `FailingReads`."""
    reads = FailingReads(root, position, number)
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(os, name, reads.wrapped(name, cast("Callable[..., Any]", getattr(os, name))))
        yield reads
