"""Kill a rank at a named file operation, not at a time: before a rename, or in the middle of a write.

    with record_operations(root) as names:   the file operations of a save below `root` on this rank, in order:
        save(...)                            "open __0_0.distcp", "write __0_0.distcp", "write __0_0.distcp #2", ...
    points = select_kill_points(names, 5)    some of each kind
    with kill_at(root, points[0]):           the next save of this rank is killed there
        save(...)

The names do not contain the number of the step, so the operations of one save can be used to kill a later one. A file
in the staging directory of a step has its bare name; `step-N` is the published step, `root` the directory of all steps.

Within the block, functions of `os` and the builtin `open` are replaced in this process; the writers of torch and ckptx
are unchanged.
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

# Kinds of operations; if only a few operations are selected, those of the first kinds come first.
OPERATION_KINDS = ("data", "metadata", "publish", "latest", "fsync", "retention", "directory fsync", "other")

_STEP_NAME = re.compile(r"\bstep-[0-9]+\b")
_STAGED_TREE_PREFIX = ".step-N.ckptx-partial/tree/"
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PATH_FUNCTIONS = ("mkdir", "rmdir", "unlink", "remove", "truncate")
_DESCRIPTOR_FUNCTIONS = ("fsync", "fdatasync", "ftruncate")
_TWO_PATH_FUNCTIONS = ("rename", "replace", "link")
_WRITE_FUNCTIONS = ("write", "pwrite", "writev", "pwritev")

OnOperation = Callable[[str], bool]  # receives the name before the operation; returns True to stop a write halfway


@contextmanager
def record_operations(root: Path) -> Iterator[list[str]]:
    """Record the names of all file operations of this process below a directory.

    Args:
        root: Directory of all steps.

    Yields:
        List that grows with each operation; repeated names are numbered.
    """
    names: list[str] = []

    def record(name: str) -> bool:
        names.append(name)
        return False

    with _patch_functions(root, record):
        yield names


@contextmanager
def kill_at(root: Path, operation: str, other_pids: Collection[int] = ()) -> Iterator[None]:
    """End this process by SIGKILL just before an operation, or in the middle of a write.

    Args:
        root: Directory of all steps.
        operation: Name of the operation, from `record_operations`.
        other_pids: Process ids of other ranks to kill.
    """

    def on_operation(name: str) -> bool:
        if name == operation and not name.startswith("write "):
            kill()
        return name == operation

    def kill() -> None:
        for pid in (*other_pids, os.getpid()):
            os.kill(pid, signal.SIGKILL)
        time.sleep(60)  # a signal takes a moment

    with _patch_functions(root, on_operation, kill):
        yield


def select_kill_points(names: Sequence[str], count: int) -> list[str]:
    """Select operations of a save: the last one of each kind, then the first of each, the middle one, and the others.

    Args:
        names: Names of all operations, from `record_operations`.
        count: Number to select; fewer if there are not enough.

    Returns:
        Names in the order of the save.
    """
    queues = [_order_from_ends([each for each in names if operation_kind(each) == kind]) for kind in OPERATION_KINDS]
    selected: set[str] = set()
    while len(selected) < min(count, len(names)):
        for queue in queues:
            if queue and len(selected) < count:
                selected.add(queue.pop(0))
    return [each for each in names if each in selected]


def _order_from_ends(names: list[str]) -> list[str]:
    """Return the names in order of selection: the last, the first, the middle one, then the others."""
    order = [-1, 0, len(names) // 2] if names else []
    return list(dict.fromkeys([*(names[index] for index in order), *names]))


def operation_kind(name: str) -> str:
    """Return the kind of an operation, one of `OPERATION_KINDS`."""
    verb, _, target = name.partition(" ")
    if ".removed." in target:
        return "retention"
    if "latest" in target:
        return "latest"
    if verb == "exchange" or target.endswith("-> step-N"):
        return "publish"
    if verb == "fsync":
        return "directory fsync" if target.startswith(("root", ".step-N")) else "fsync"
    if ".metadata" in target:
        return "metadata"
    return "data" if ".distcp" in target else "other"


# ----------------------------------------------------------------------------------------- functions of `os` and `open`


@contextmanager
def _patch_functions(
    root: Path, on_operation: OnOperation, on_half_write: Callable[[], None] = lambda: None
) -> Iterator[None]:
    patched = _PatchedFunctions(Path(os.path.realpath(root)), on_operation, on_half_write)
    with ExitStack() as stack:
        for name, function in patched.replacements():
            stack.enter_context(patch.object(os, name, function))
        for module in (io, builtins):
            stack.enter_context(patch.object(module, "open", patched.wrap_open(open)))
        stack.enter_context(patch.object(staging, "_exchange_names", patched.wrap_exchange(staging._exchange_names)))
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps the functions of `os` there
        for name in ("open", *_PATH_FUNCTIONS, *_TWO_PATH_FUNCTIONS):
            if hasattr(accessor, name):
                replaced = io.open if name == "open" else getattr(os, name)
                stack.enter_context(patch.object(accessor, name, staticmethod(replaced)))
        yield


class _PatchedFunctions:
    """Replacements for functions that change files below a directory."""

    def __init__(self, root: Path, on_operation: OnOperation, on_half_write: Callable[[], None]) -> None:
        self._root, self._on_operation, self._on_half_write = str(root), on_operation, on_half_write
        self._counts: dict[str, int] = {}
        self._lock = RLock()  # a save may be in another thread
        self._readlink = os.readlink

    def replacements(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield replacements by their name in `os`."""
        for name in _PATH_FUNCTIONS:
            yield name, self._wrap_named(name, getattr(os, name), self._name_of_path)
        for name in _DESCRIPTOR_FUNCTIONS:
            yield name, self._wrap_named(name, getattr(os, name), self._name_of_path)
        for name in _TWO_PATH_FUNCTIONS:
            yield name, self._wrap_named(name, getattr(os, name), self._name_of_two_paths)
        for name in _WRITE_FUNCTIONS:
            yield name, self._wrap_write(getattr(os, name))
        yield "open", self._wrap_named("open", os.open, self._name_of_opened_path)

    def wrap_open(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `open` whose files report each write that reaches the system."""

        @wraps(function)
        def replacement(
            file: Any, mode: str = "r", buffering: int = -1, *args: Any, closefd: bool = True, **settings: Any
        ) -> Any:
            name = self._relative_name(file) if set(mode) & set("wax+") else None
            if name is None or "b" not in mode or buffering != -1 or settings.get("opener"):
                return function(file, mode, buffering, *args, closefd=closefd, **settings)
            if not isinstance(file, int):
                self._report(f"open {name}")
            raw = _ReportingFile(file, mode.replace("b", ""), closefd=closefd)
            raw.patched_functions = self
            return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

        return replacement

    def wrap_exchange(self, function: Callable[[int, str, int, str], bool]) -> Callable[[int, str, int, str], bool]:
        """Return a replacement for the exchange of two names, which is a call into the C library."""

        @wraps(function)
        def replacement(directory: int, name: str, other_directory: int, other_name: str) -> bool:
            names = self._relative_name(name, directory), self._relative_name(other_name, other_directory)
            if None not in names:
                self._report(f"exchange {names[0]} <-> {names[1]}")
            return function(directory, name, other_directory, other_name)

        return replacement

    def report_write(self, descriptor: int) -> bool:
        """Report a write; return True if only half of it must be written."""
        name = self._relative_name(descriptor)
        return name is not None and self._report(f"write {name}")

    def end_process(self) -> None:
        """End this process after half a write."""
        self._on_half_write()

    def _wrap_named(
        self, verb: str, function: Callable[..., Any], name_of_arguments: Callable[..., str | None]
    ) -> Callable[..., Any]:
        @wraps(function)
        def replacement(*args: Any, **settings: Any) -> Any:
            name = name_of_arguments(*args, **settings)
            if name is not None:
                self._report(f"{verb} {name}")
            return function(*args, **settings)

        return replacement

    def _wrap_write(self, function: Callable[..., int]) -> Callable[..., int]:
        @wraps(function)
        def replacement(descriptor: int, data: Any, *args: Any) -> int:
            if self.report_write(descriptor):
                is_vector = isinstance(data, (list, tuple))
                whole = memoryview(b"".join(data)) if is_vector else memoryview(data).cast("B")
                half = whole[: len(whole) // 2]
                function(descriptor, [half] if is_vector else half, *args)
                self.end_process()
            return function(descriptor, data, *args)

        return replacement

    def _name_of_path(self, path: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> str | None:
        return self._relative_name(path, dir_fd)

    def _name_of_opened_path(self, path: Any, flags: int, *_: Any, dir_fd: int | None = None, **__: Any) -> str | None:
        return self._relative_name(path, dir_fd) if flags & _WRITE_FLAGS else None

    def _name_of_two_paths(
        self, source: Any, target: Any, *_: Any, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **__: Any
    ) -> str | None:
        names = self._relative_name(source, src_dir_fd), self._relative_name(target, dst_dir_fd)
        return None if names == (None, None) else f"{names[0] or 'elsewhere'} -> {names[1] or 'elsewhere'}"

    def _relative_name(self, path: Any, directory: int | None = None) -> str | None:
        """Return the path of a file below the root, with `step-N` for any step; None if it is outside the root."""
        try:
            if isinstance(path, int):
                full_path = self._descriptor_path(path)
            else:
                name = os.fsdecode(path)
                parent = self._descriptor_path(directory) if directory is not None else ""
                head, tail = os.path.split(os.path.join(parent, name))
                full_path = os.path.join(os.path.realpath(head), tail)
        except (OSError, TypeError, ValueError):  # the real function raises the error
            return None
        if full_path == self._root:
            return "root"
        if not full_path.startswith(self._root + os.sep):
            return None
        return _STEP_NAME.sub("step-N", full_path[len(self._root) + 1 :]).removeprefix(_STAGED_TREE_PREFIX)

    def _descriptor_path(self, descriptor: int) -> str:
        return str(self._readlink(f"/proc/self/fd/{descriptor}")).removesuffix(" (deleted)")

    def _report(self, name: str) -> bool:
        with self._lock:
            self._counts[name] = count = self._counts.get(name, 0) + 1
            return self._on_operation(name if count == 1 else f"{name} #{count}")


class _ReportingFile(io.FileIO):
    """Unbuffered file that reports each write."""

    patched_functions: _PatchedFunctions

    def write(self, data: Any, /) -> int:
        if self.patched_functions.report_write(self.fileno()):
            whole = memoryview(data).cast("B")
            super().write(whole[: len(whole) // 2])
            self.patched_functions.end_process()
        return super().write(data)
