"""Check that a directory may become the output: new, empty or to be overwritten, not a mount point, outside the input.

Messages call the output DST, as the help of the command line does.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ckptx.errors import OutputError
from ckptx.storage.files import output_errors


def refuse_unreachable(target: Path) -> None:
    """Refuse a target whose path the system cannot access.

    Raises:
        OutputError: The name is too long, or a parent directory is not accessible or a loop of links.
    """
    try:
        os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}; choose another DST") from error


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Refuse an existing target that is not a directory, is not empty unless `overwrite` is set, or cannot be renamed.

    Raises:
        OutputError: It is not a directory, cannot be listed, is or contains a mount point or the current directory, or
            is not empty and `overwrite` is not set.
    """
    if not os.path.lexists(target):
        return
    try:
        is_empty = not os.listdir(target)
    except (NotADirectoryError, FileNotFoundError) as error:
        raise OutputError(f"{target}: not a directory; choose another DST") from error
    except OSError as error:
        raise OutputError(f"{target}: cannot be listed: {error.strerror}; choose another DST") from error
    if not overwrite and not is_empty:
        raise OutputError(f"{target}: exists and is not empty; choose another DST or pass --overwrite")
    resolved = Path(os.path.realpath(target))
    mount_point = next((mount for mount in (*_mount_points(), resolved) if _is_mount_in(mount, resolved)), None)
    if mount_point is not None:
        problem = "is a mount point" if mount_point == resolved else f"contains a mount point, {mount_point}"
        raise OutputError(f"{target}: {problem}, and cannot be replaced atomically; choose a directory inside it")
    current_directory = Path(os.path.realpath("."))
    if resolved == current_directory or resolved in current_directory.parents:
        raise OutputError(
            f"{target}: is or contains the current directory, which would be replaced; choose a directory inside it, "
            "or run ckptx from another directory"
        )


def _is_mount_in(mount: Path, target: Path) -> bool:
    """Return True if `mount` is a mount point at or inside `target`.

    `mount` is a path that the kernel lists as a mount point, or `target` itself.
    """
    if mount == target:
        return mount in _mount_points() or os.path.ismount(mount)
    return target in mount.parents


def _mount_points() -> frozenset[Path]:
    """Return every mount point that the kernel lists, including bind mounts of the same file system."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return frozenset()
    points = (line.split(b" ")[4] for line in lines if line.count(b" ") > 4)
    return frozenset(
        Path(os.fsdecode(_OCTAL_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), point))) for point in points
    )


_OCTAL_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")  # mountinfo escapes spaces in octal


def refuse_overlap(source: Path, target: Path) -> None:
    """Refuse a source and a target of which one contains the other, with links and mounts resolved.

    Raises:
        OutputError: One contains the other.
    """
    a, b = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if a == b or _is_any_of(a, b.parents) or _is_any_of(b, (a, *a.parents)):
        raise OutputError(f"{target}: overlaps the input {source}; choose a DST outside it")


def refuse_files_inside(files: Iterable[Path], target: Path) -> None:
    """Refuse a target that contains the directory of an input file, links resolved, or overlaps its Hub cache.

    A snapshot in the Hub cache contains links into the sibling `blobs`: replacing `blobs` would delete the weights. So
    a target inside the cache directory of a model with such a file is refused, too.

    Args:
        files: Paths of files of the input.
        target: Directory of the output.

    Raises:
        OutputError: Target and input overlap.
    """
    resolved = Path(os.path.realpath(target))
    checked_directories: set[Path] = set()
    for file in files:
        directory = Path(os.path.realpath(file)).parent
        if directory in checked_directories:
            continue
        checked_directories.add(directory)
        is_in_cache = directory.name == "blobs" and os.path.isdir(directory.parent / "snapshots")
        cache = directory.parent if is_in_cache else None
        input_directories = [directory] if cache is None else [directory, cache]
        if any(_is_any_of(resolved, (each, *each.parents)) for each in input_directories) or (
            cache is not None and _is_any_of(cache, (resolved, *resolved.parents))
        ):
            raise OutputError(
                f"{target}: overlaps the input, because {file} is in {directory}; choose a DST outside it"
            )


def _is_any_of(path: Path, others: Iterable[Path]) -> bool:
    """Return True if `path` is one of `others`, by name or, for a directory mounted twice, by device and inode."""
    try:
        status = os.stat(path)
    except OSError:
        return path in others
    for other in others:
        try:
            if other == path or os.path.samestat(status, os.stat(other)):
                return True
        except OSError:
            continue
    return False


def free_space(target: Path) -> int:
    """Return the free space of the file system of `target`, in bytes.

    Raises:
        OutputError: It cannot be accessed.
    """
    directory = Path(os.path.realpath(target)).parent
    while not os.path.exists(directory):
        directory = directory.parent
    with output_errors(directory):
        return shutil.disk_usage(directory).free
