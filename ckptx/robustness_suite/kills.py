"""Kill a rank at a named file operation, not at a time: before a rename, or in the middle of a write.

    with rehearse(root) as names:            what a save does below `root` on this rank, in order:
        save(...)                            "open __0_0.distcp", "write __0_0.distcp", "write __0_0.distcp #2", ...
    points = kill_points(names, 5)           some of each kind
    with killing(root, points[0]):           the next save of this rank ends there
        save(...)

Names say nothing of the number of a step, so that one save is rehearsed and a later one killed. What is in the staging
directory of a step has its bare name; `step-N` is where a step is published, `root` the directory of all steps.

Functions of `os` and `open` are replaced in this process, as long as the block lasts: torch's writer and ours are what
they are.
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from threading import RLock
from typing import Any
from unittest.mock import patch

from ckptx.publishing import staging

# What operations are for, those first that a few points should be of.
KINDS = ("data", "metadata", "publish", "latest", "fsync", "retention", "directory fsync", "other")

_STEP = re.compile(r"\bstep-[0-9]+\b")
_IN_TREE = ".step-N.ckptx-partial/tree/"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_BY_PATH = ("mkdir", "rmdir", "unlink", "remove", "truncate")
_BY_DESCRIPTOR = ("fsync", "fdatasync", "ftruncate")
_OF_TWO = ("rename", "replace", "link")
_OF_DATA = ("write", "pwrite", "writev", "pwritev")

Act = Callable[[str], bool]  # told the name before the operation; True where a write must stop half way


@contextmanager
def record_operations(root: Path) -> Iterator[list[str]]:
    """Record all file operations of this process below a directory, in order; repeated names are numbered.

    Args:
        root: Directory of all steps.

    Yields:
        The names so far.
    """
    names: list[str] = []

    def note(name: str) -> bool:
        names.append(name)
        return False

    with _watched(root, note):
        yield names


@contextmanager
def killing(root: Path, at: str, also: Collection[int] = ()) -> Iterator[None]:
    """End this process by SIGKILL just before an operation, or in the middle of a write.

    Args:
        root: Directory of all steps, as in the rehearsal.
        at: Name of the operation.
        also: Further processes to kill: the other ranks.
    """

    def end(name: str) -> bool:
        if name == at and not name.startswith("write "):
            kill()
        return name == at

    def kill() -> None:
        for pid in (*also, os.getpid()):
            os.kill(pid, signal.SIGKILL)
        time.sleep(60)  # a signal takes a moment

    with _watched(root, end, kill):
        yield


def kill_points(names: Sequence[str], count: int) -> list[str]:
    """Select operations of a save: the last of each kind, the first of each kind, then those between.

    Args:
        names: Names of all operations, as `record_operations` recorded them.
        count: Number to select; fewer if there are not enough.
    """
    queues = [_from_the_ends([each for each in names if kind_of(each) == kind]) for kind in KINDS]
    chosen: set[str] = set()
    while len(chosen) < min(count, len(names)):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.add(queue.pop(0))
    return [each for each in names if each in chosen]


def _from_the_ends(names: list[str]) -> list[str]:
    """Sort names: the last, the first, the middle one, then the others."""
    order = [-1, 0, len(names) // 2] if names else []
    return list(dict.fromkeys([*(names[index] for index in order), *names]))


def kind_of(name: str) -> str:
    """Return the kind of an operation, one of `KINDS`."""
    verb, _, what = name.partition(" ")
    if ".removed." in what:
        return "retention"
    if "latest" in what:
        return "latest"
    if verb == "exchange" or what.endswith("-> step-N"):
        return "publish"
    if verb == "fsync":
        return "directory fsync" if what.startswith(("root", ".step-N")) else "fsync"
    if ".metadata" in what:
        return "metadata"
    return "data" if ".distcp" in what else "other"


# ------------------------------------------------------------------------------------------ watching


@contextmanager
def _watched(root: Path, act: Act, half_way: Callable[[], None] = lambda: None) -> Iterator[None]:
    watch = _PatchedFunctions(Path(os.path.realpath(root)), act, half_way)
    with ExitStack() as stack:
        for name, function in watch.replacements():
            stack.enter_context(patch.object(os, name, function))
        for holder in (io, builtins):
            stack.enter_context(patch.object(holder, "open", watch.opened(open)))
        stack.enter_context(patch.object(staging, "_exchange_names", watch.exchanging(staging._exchange_names)))
        accessor = getattr(pathlib, "_NormalAccessor", None)  # where Python 3.10 keeps the functions of `os`
        for name in ("open", *_BY_PATH, *_OF_TWO):
            if hasattr(accessor, name):
                replaced = io.open if name == "open" else getattr(os, name)
                stack.enter_context(patch.object(accessor, name, staticmethod(replaced)))
        yield


class _PatchedFunctions:
    """Replacements for functions that change files below a directory."""

    def __init__(self, root: Path, act: Act, half_way: Callable[[], None]) -> None:
        self._root, self._act, self._half_way = str(root), act, half_way
        self._seen: dict[str, int] = {}
        self._lock = RLock()  # a save may be in another thread
        self._readlink = os.readlink

    def replacements(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield replacements by their name in `os`."""
        for name in _BY_PATH:
            yield name, self._naming(name, getattr(os, name), self._by_path)
        for name in _BY_DESCRIPTOR:
            yield name, self._naming(name, getattr(os, name), self._by_path)
        for name in _OF_TWO:
            yield name, self._naming(name, getattr(os, name), self._by_two)
        for name in _OF_DATA:
            yield name, self._writing(getattr(os, name))
        yield "open", self._naming("open", os.open, self._by_flags)

    def opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `open` whose files report each write that reaches the system."""

        @wraps(function)
        def replacement(
            file: Any, mode: str = "r", buffering: int = -1, *args: Any, closefd: bool = True, **settings: Any
        ) -> Any:
            role = self._role(file) if set(mode) & set("wax+") else None
            if role is None or "b" not in mode or buffering != -1 or settings.get("opener"):
                return function(file, mode, buffering, *args, closefd=closefd, **settings)
            if not isinstance(file, int):
                self._tell(f"open {role}")
            raw = _Raw(file, mode.replace("b", ""), closefd=closefd)
            raw.watch = self
            return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

        return replacement

    def exchanging(self, function: Callable[[int, str, int, str], bool]) -> Callable[[int, str, int, str], bool]:
        """Return a replacement for the exchange of two names, which is a call into the C library."""

        @wraps(function)
        def replacement(a: int, name: str, b: int, other: str) -> bool:
            roles = self._role(name, a), self._role(other, b)
            if None not in roles:
                self._tell(f"exchange {roles[0]} <-> {roles[1]}")
            return function(a, name, b, other)

        return replacement

    def cut(self, descriptor: int) -> bool:
        """Report a write; return True if only half of it must be written."""
        role = self._role(descriptor)
        return role is not None and self._tell(f"write {role}")

    def end(self) -> None:
        """End this process after half a write."""
        self._half_way()

    def _naming(self, verb: str, function: Callable[..., Any], what: Callable[..., str | None]) -> Callable[..., Any]:
        @wraps(function)
        def replacement(*args: Any, **settings: Any) -> Any:
            named = what(*args, **settings)
            if named is not None:
                self._tell(f"{verb} {named}")
            return function(*args, **settings)

        return replacement

    def _writing(self, function: Callable[..., int]) -> Callable[..., int]:
        @wraps(function)
        def replacement(descriptor: int, data: Any, *args: Any) -> int:
            if self.cut(descriptor):
                vectors = isinstance(data, (list, tuple))
                whole = memoryview(b"".join(data)) if vectors else memoryview(data).cast("B")
                half = whole[: len(whole) // 2]
                function(descriptor, [half] if vectors else half, *args)
                self.end()
            return function(descriptor, data, *args)

        return replacement

    def _by_path(self, path: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> str | None:
        return self._role(path, dir_fd)

    def _by_flags(self, path: Any, flags: int, *_: Any, dir_fd: int | None = None, **__: Any) -> str | None:
        return self._role(path, dir_fd) if flags & _WRITES else None

    def _by_two(
        self, a: Any, b: Any, *_: Any, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **__: Any
    ) -> str | None:
        roles = self._role(a, src_dir_fd), self._role(b, dst_dir_fd)
        return None if roles == (None, None) else f"{roles[0] or 'elsewhere'} -> {roles[1] or 'elsewhere'}"

    def _role(self, path: Any, directory: int | None = None) -> str | None:
        """Return the role of a file or directory by its path below the root; None if it is outside."""
        try:
            if isinstance(path, int):
                full = self._path_of(path)
            else:
                name = os.fsdecode(path)
                above = self._path_of(directory) if directory is not None else ""
                head, tail = os.path.split(os.path.join(above, name))
                full = os.path.join(os.path.realpath(head), tail)
        except (OSError, TypeError, ValueError):  # who calls the real function is told
            return None
        if full == self._root:
            return "root"
        if not full.startswith(self._root + os.sep):
            return None
        return _STEP.sub("step-N", full[len(self._root) + 1 :]).removeprefix(_IN_TREE)

    def _path_of(self, descriptor: int) -> str:
        return str(self._readlink(f"/proc/self/fd/{descriptor}")).removesuffix(" (deleted)")

    def _tell(self, name: str) -> bool:
        with self._lock:
            self._seen[name] = count = self._seen.get(name, 0) + 1
            return self._act(name if count == 1 else f"{name} #{count}")


class _Raw(io.FileIO):
    """Unbuffered file that reports each write."""

    watch: _PatchedFunctions

    def write(self, data: Any, /) -> int:
        if self.watch.cut(self.fileno()):
            whole = memoryview(data).cast("B")
            super().write(whole[: len(whole) // 2])
            self.watch.end()
        return super().write(data)
