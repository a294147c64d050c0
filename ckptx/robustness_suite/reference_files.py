"""Detect a run that changes the files of the run that it is compared with.

A comparison with files that the other side can write proves nothing: a resumed run that writes its own state over the
checkpoint it began with is equal to it. So the files of the reference run are digested before another run starts, and
again when it is over; what is compared was read before.

A change is another content, a name that is gone, new or moved, a link that leads elsewhere. Times are no content.
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

_PIECE = 1 << 20
_MOST = 1_000_000  # names in one folder of a run
_UNCHANGED = "unchanged"


class _FileState(NamedTuple):
    """A file, folder or link.

    Attributes:
        content: Its kind, with the digest of a file or the target of a link.
        state: Result of `stat` when the content of a file was read; None for folders and links.
    """

    content: str
    state: tuple[int, ...] | None = None


class RunFiles(NamedTuple):
    """The files of a run.

    Attributes:
        root: The folder of the run.
        seen: The entry under each name below it, with "/" between folders. What a link leads to out of the folder has a
            name that begins with that of the link.
    """

    root: Path
    seen: Mapping[str, _FileState]


def snapshot(root: Path, followed: Iterable[Path] = (), known: RunFiles | None = None) -> RunFiles:
    """Digest everything below a folder.

    Args:
        root: The folder of a run.
        followed: Places in it whose links are followed as readers of checkpoints follow them: a checkpoint may be a
            link to a folder elsewhere. Other links are compared by where they lead, and nothing is read there.
        known: An earlier snapshot: a file with the same identity, size and times as then is not read again. Leave it
            out where a program that nobody knows has run: what writes through shared memory can leave the times alone.

    Raises:
        InputError: There are too many files.
    """
    seen: dict[str, _FileState] = {}
    places = [os.fspath(each) for each in followed]
    waiting = [("", os.fspath(root), frozenset({_real(os.fspath(root))}))]
    while waiting:
        name, path, above = waiting.pop()
        for below, found in _entries(path):
            label = f"{name}/{below}" if name else below
            seen[label] = _look(found, known.seen.get(label) if known is not None else None)
            real = _real(found)
            is_followed = any(found == each or found.startswith(f"{each}/") for each in places)
            if os.path.islink(found) and is_followed and os.path.isfile(found):
                seen[f"{label}/."] = _look(real, None)
            if os.path.isdir(found) and (is_followed or not os.path.islink(found)) and real not in above:
                waiting.append((label, found, above | {real}))
        if len(seen) > _MOST:
            raise InputError(f"{root}: more than {_MOST:,} files; the folder of a run must hold what that run writes")
    return RunFiles(root, seen)


def changes(before: RunFiles, after: RunFiles) -> Verdict:
    """Return the verdict of the oracle `reference` on all names below a folder: changed, deleted or renamed."""
    gone = {name: before.seen[name].content for name in before.seen if name not in after.seen}
    new = {name: after.seen[name].content for name in after.seen if name not in before.seen}
    differences = []
    for name in sorted(before.seen.keys() | after.seen.keys()):
        if name in gone:
            moved = next(
                (each for each, content in new.items() if content == gone[name] and content.startswith("file ")), None
            )
            differences.append(_changed(name, "was deleted" if moved is None else f"was renamed to {moved}"))
        elif name in new:
            differences.append(Difference("reference", name, None, None, "was added"))
        elif before.seen[name].content != after.seen[name].content:
            differences.append(_changed(name, _became(before.seen[name].content, after.seen[name].content)))
    return Verdict("reference", len(before.seen.keys() | after.seen.keys()), differences)


def _changed(name: str, how: str) -> Difference:
    return Difference("reference", name, None, _UNCHANGED, how)


def _became(before: str, after: str) -> str:
    kind = after.partition(" ")[0]
    if kind != before.partition(" ")[0]:
        return f"became a {kind}"
    return f"leads to {after.partition(' ')[2]}" if kind == "link" else "has other contents"


def _entries(folder: str) -> Iterator[tuple[str, str]]:
    with suppress(OSError), os.scandir(folder) as entries:  # who reads a checkpoint says what cannot be read
        yield from sorted((each.name, each.path) for each in entries)


def _real(path: str) -> str:
    return os.path.realpath(path)


def _look(path: str, known: _FileState | None) -> _FileState:
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            return _FileState(f"link {os.readlink(path)}")
        if stat.S_ISDIR(found.st_mode):
            return _FileState("folder")
        if not stat.S_ISREG(found.st_mode):
            return _FileState("special file")
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if known is not None and known.state == state:
            return known
        return _FileState(f"file sha256 {_digest(path)}", state)
    except (OSError, CkptxError) as error:  # gone since its folder was listed, or not for this user
        return _FileState(f"unreadable {type(error).__name__}")


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    descriptor = open_regular(Path(path))
    try:
        while piece := os.read(descriptor, _PIECE):
            digest.update(piece)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
