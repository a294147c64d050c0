"""Detect a run that changes the files of the reference run.

A resumed run that overwrites the checkpoint it started from would always equal it. So the files of the reference run
are digested before and after each other run.

A change is a file with other contents, a deleted, added or renamed file, or a link with another target. Timestamps are
ignored.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckptx.errors import CkptxError, InputError
from ckptx.robustness_suite.oracles import Difference, Verdict
from ckptx.storage.files import open_regular

_BLOCK_BYTES = 1 << 20
_MAX_FILES = 1_000_000  # files in the folder of a run
_UNCHANGED = "unchanged"


class _FileState(NamedTuple):
    """A file, folder or link.

    Attributes:
        content: Kind, with the digest of a file or the target of a link; "unreadable" with the error if it cannot be
            read.
        stat_fields: Device, inode, size, mtime and ctime when a file was read; None for folders and links.
    """

    content: str
    stat_fields: tuple[int, ...] | None = None


class RunFiles(NamedTuple):
    """The files of a run.

    Attributes:
        root: Folder of the run.
        entries: Path relative to the folder, with "/" -> its state. The contents of a followed link are listed below
            the path of the link; those of a link to a file as `LINK/.`.
    """

    root: Path
    entries: Mapping[str, _FileState]


def snapshot_files(root: Path, followed_paths: Iterable[Path] = (), previous: RunFiles | None = None) -> RunFiles:
    """Return a snapshot of all files below a folder: their digests, sizes and times.

    Args:
        root: Folder of a run.
        followed_paths: Paths below `root` whose links are followed, such as checkpoints, which may be links to other
            folders. Other links are compared by their targets, which are not read.
        previous: Earlier snapshot; files with unchanged inode, size and times are not read again. Use None after a
            run of an unknown program, as writes through shared memory may not change the times.

    Raises:
        InputError: There are too many files.
    """
    entries: dict[str, _FileState] = {}
    followed_names = [os.fspath(each) for each in followed_paths]
    pending = [("", os.fspath(root), frozenset({os.path.realpath(root)}))]
    while pending:
        name, path, ancestors = pending.pop()
        for entry_name, entry_path in _list_folder(path):
            label = f"{name}/{entry_name}" if name else entry_name
            entries[label] = _read_state(entry_path, previous.entries.get(label) if previous is not None else None)
            real_path = os.path.realpath(entry_path)
            is_followed = any(entry_path == each or entry_path.startswith(f"{each}/") for each in followed_names)
            if os.path.islink(entry_path) and is_followed and os.path.isfile(entry_path):
                entries[f"{label}/."] = _read_state(real_path, None)
            if (
                os.path.isdir(entry_path)
                and (is_followed or not os.path.islink(entry_path))
                and real_path not in ancestors
            ):
                pending.append((label, entry_path, ancestors | {real_path}))
        if len(entries) > _MAX_FILES:
            raise InputError(
                f"{root}: more than {_MAX_FILES:,} files; the folder of a run must contain only its output"
            )
    return RunFiles(root, entries)


def compare_file_snapshots(before: RunFiles, after: RunFiles) -> Verdict:
    """Return the verdict of the oracle `reference files`: files that were changed, added, deleted or renamed."""
    deleted = {name: before.entries[name].content for name in before.entries if name not in after.entries}
    added = {name: after.entries[name].content for name in after.entries if name not in before.entries}
    differences = []
    for name in sorted(before.entries.keys() | after.entries.keys()):
        if name in deleted:
            new_name = next(
                (each for each, content in added.items() if content == deleted[name] and content.startswith("file ")),
                None,
            )
            differences.append(
                _change_difference(name, "was deleted" if new_name is None else f"was renamed to {new_name}")
            )
        elif name in added:
            differences.append(Difference("reference files", name, None, None, "was added"))
        elif before.entries[name].content != after.entries[name].content:
            differences.append(
                _change_difference(name, _change_text(before.entries[name].content, after.entries[name].content))
            )
    return Verdict("reference files", len(before.entries.keys() | after.entries.keys()), differences)


def _change_difference(name: str, change: str) -> Difference:
    return Difference("reference files", name, None, _UNCHANGED, change)


def _change_text(before: str, after: str) -> str:
    kind = after.partition(" ")[0]
    if kind != before.partition(" ")[0]:
        return f"became a {kind}"
    return f"leads to {after.partition(' ')[2]}" if kind == "link" else "has other contents"


def _list_folder(folder: str) -> Iterator[tuple[str, str]]:
    with suppress(OSError), os.scandir(folder) as entries:  # the reader of the checkpoint reports the error
        yield from sorted((each.name, each.path) for each in entries)


def _read_state(path: str, previous: _FileState | None) -> _FileState:
    try:
        file_stat = os.lstat(path)
        if stat.S_ISLNK(file_stat.st_mode):
            return _FileState(f"link {os.readlink(path)}")
        if stat.S_ISDIR(file_stat.st_mode):
            return _FileState("folder")
        if not stat.S_ISREG(file_stat.st_mode):
            return _FileState("special file")
        stat_fields = (
            file_stat.st_dev,
            file_stat.st_ino,
            file_stat.st_size,
            file_stat.st_mtime_ns,
            file_stat.st_ctime_ns,
        )
        if previous is not None and previous.stat_fields == stat_fields:
            return previous
        return _FileState(f"file sha256 {_file_digest(path)}", stat_fields)
    except (OSError, CkptxError) as error:  # deleted since the folder was listed, or no permission
        return _FileState(f"unreadable {type(error).__name__}")


def _file_digest(path: str) -> str:
    digest = hashlib.sha256()
    descriptor = open_regular(Path(path))
    try:
        while block := os.read(descriptor, _BLOCK_BYTES):
            digest.update(block)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
