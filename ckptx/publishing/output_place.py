"""Whether a directory may become the output: free, apart from the input, no mount point, large enough."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ckptx.errors import OutputError


def refuse_unreachable(target: Path) -> None:
    """A place that the system cannot even name or look at is none to write to.

    Raises:
        OutputError: The name is too long, or a directory above is closed or a loop of links.
    """
    try:
        os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}; choose another DST") from error


def refuse_existing(target: Path, overwrite: bool) -> None:
    """An output directory must be absent or empty, and such that a rename can put another in its place.

    Raises:
        OutputError: It is a file, a mount point, the current directory, or it holds something and `overwrite` is not
            set.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise OutputError(f"{target}: is not a directory; choose another DST")
    try:
        is_empty = not any(target.iterdir())
    except OSError as error:
        raise OutputError(f"{target}: cannot be listed: {error.strerror}; choose another DST") from error
    if not overwrite and not is_empty:
        raise OutputError(f"{target}: exists and is not empty; choose another DST or pass --overwrite")
    resolved = Path(os.path.realpath(target))
    mounted = next((mount for mount in (*_mount_points(), resolved) if _is_mount_in(mount, resolved)), None)
    if mounted is not None:
        holds = "is a mount point" if mounted == resolved else f"holds a mount point, {mounted}"
        raise OutputError(f"{target}: {holds}, and cannot be replaced in one step; choose a directory inside of it")
    here = Path(os.path.realpath("."))
    if resolved == here or resolved in here.parents:
        raise OutputError(
            f"{target}: is the current directory or holds it, and would be gone under it when it is replaced; choose a "
            "directory inside of it, or start from elsewhere"
        )


def _is_mount_in(mount: Path, target: Path) -> bool:
    """True for a mount point at `target` or below it."""
    if mount == target:
        return mount in _mount_points() or os.path.ismount(mount)
    return target in mount.parents


def _mount_points() -> frozenset[Path]:
    """Every mount point that the kernel lists, those of directories of the same file system, too."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return frozenset()
    points = (line.split(b" ")[4] for line in lines if line.count(b" ") > 4)
    return frozenset(Path(os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), point))) for point in points)


_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")  # how mountinfo writes a space


def refuse_overlap(source: Path, target: Path) -> None:
    """Source and target must not contain each other, under whatever names.

    Raises:
        OutputError: They do.
    """
    a, b = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if a == b or _is_same_as_one_of(a, b.parents) or _is_same_as_one_of(b, (a, *a.parents)):
        raise OutputError(f"{target}: overlaps the input {source}; choose a DST outside of it")


def refuse_files_inside(files: Iterable[Path], target: Path) -> None:
    """No file of the input may lie in the target, wherever links lead; nor the target in the cache they lead to.

    A snapshot of the Hub's cache holds links into `blobs` beside it: replacing `blobs` would delete the weights.

    Raises:
        OutputError: One does.
    """
    resolved = Path(os.path.realpath(target))
    seen: set[Path] = set()
    for file in files:
        real = Path(os.path.realpath(file)).parent
        if real in seen:
            continue
        seen.add(real)
        cache = real.parent if real.name == "blobs" and (real.parent / "snapshots").is_dir() else None
        homes = [real] if cache is None else [real, cache]
        if any(_is_same_as_one_of(resolved, (home, *home.parents)) for home in homes) or (
            cache is not None and _is_same_as_one_of(cache, (resolved, *resolved.parents))
        ):
            raise OutputError(f"{target}: overlaps the input, whose {file} lies in {real}; choose a DST outside of it")


def _is_same_as_one_of(path: Path, others: Iterable[Path]) -> bool:
    """True when `path` is one of `others`, by its name or, mounted twice, by device and inode."""
    try:
        found = os.stat(path)
    except OSError:
        return path in others
    for other in others:
        try:
            if other == path or os.path.samestat(found, os.stat(other)):
                return True
        except OSError:
            continue
    return False


def free_space(target: Path) -> int:
    """Bytes free where `target` will be."""
    place = Path(os.path.realpath(target)).parent
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
