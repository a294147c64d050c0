"""List the files of a checkpoint at any depth, and how each is compared.

The suffix of a file determines its kind; without a known suffix, its contents do: such a file may be an archive of
`torch.save`. Links are followed, except links to a parent folder. Files that are not compared are listed with the
reason.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.errors import InputError
from ckptx.formats.dcp.reader import open_dcp
from ckptx.robustness_suite.item_names import prefix_of_file
from ckptx.robustness_suite.legacy_archive import is_legacy
from ckptx.storage.files import FilePool, read_error, read_head
from ckptx.storage.local import LocalSource
from ckptx.untrusted.limits import MAX_CONFIG_BYTES, MAX_PICKLE_BYTES

METADATA = ".metadata"
DCP, SAFETENSORS, JSON, PICKLE, ARRAY, ZIP, TAR, BYTES, MARKER, NOT_COMPARED = (
    "dcp", "safetensors", "json", "pickle", "array", "zip", "tar", "bytes", "marker", "not compared"
)  # fmt: skip
_PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_POSSIBLE_PICKLE_SUFFIXES = (".bin", ".tar", ".p")  # also used for files that are not pickles
_SETTINGS = re.compile(
    r"training_args\.(json|bin|pt)|((generation|adapter|quantize|(video_)?(pre)?processor)_)?config\.json"
)
_TOKENIZER = re.compile(
    r"tokenizer.*\.(json|model)|spiece\.model|vocab\.(json|txt)|merges\.txt|added_tokens\.json"
    r"|special_tokens_map\.json|chat_template\..*"
)
_INDEX = re.compile(r".*\.index\.json|ckptx\.json")
_EVENTS = re.compile(r"events\.out\.tfevents\..*")
_NOT_COMPARED_PATTERNS = (
    (_SETTINGS, "settings"),
    (_TOKENIZER, "tokenizer"),
    (_INDEX, "index of files"),
    (_EVENTS, "log with times"),
)
_HEAD_BYTES = 512  # bytes that are read to detect the kind of a file; the magic of a tar is at 257
_SPECIAL_FILE_TYPES = (
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


class ComparedFile(NamedTuple):
    """A file, the folder of a DCP, or an entry without contents, such as a socket.

    Attributes:
        path: Path of the file or folder.
        label: Path relative to the checkpoint, without the suffix of a file; "" for a DCP that is the checkpoint.
        name_prefix: Prefix for the names of its items, such as "optimizer"; None if the file name implies none.
        kind: Kind of comparison: DCP, SAFETENSORS, JSON, PICKLE (also archives of `torch.save`), ARRAY (`.npy`), ZIP,
            TAR, BYTES (one digest of the file), MARKER (only `note`, for an entry without contents) or NOT_COMPARED.
        note: Text to compare for a MARKER, or the reason for NOT_COMPARED; "" for other kinds.
        relative_path: Printable path relative to the checkpoint, with the suffix; "" for a DCP.
        catalog: Catalog of a DCP; None for other kinds.
    """

    path: Path
    label: str
    name_prefix: str | None
    kind: str
    note: str = ""
    relative_path: str = ""
    catalog: Catalog | None = None

    def full_name(self, inner_name: str) -> str:
        """Return the name of an item with the prefix of its file; in a DCP, names that begin with it are kept."""
        if self.name_prefix is None:
            return inner_name
        first = self.name_prefix.partition(".")[0]
        has_prefix = self.kind == DCP and inner_name.partition(".")[0] == first
        return inner_name if has_prefix else ".".join(filter(None, (self.name_prefix, inner_name)))

    def may_contain(self, state_kind: str) -> bool:
        """Return False if the file name implies another kind of state, such as "optimizer", than `state_kind`."""
        return self.name_prefix is None or self.name_prefix.partition(".")[0] == state_kind


def list_files(path: Path) -> list[ComparedFile]:
    """Return all files of a checkpoint, sorted by label.

    Args:
        path: Folder or file of the checkpoint.

    Raises:
        InputError: The checkpoint is missing, or a file in it cannot be read.
    """
    if path.is_file():
        return [_classify_file(path, (), path.name, must_be_read=True)]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or directory; a checkpoint is required")
    return sorted(_walk_folder(path, (), frozenset()), key=lambda each: (each.label, each.relative_path))


def _walk_folder(folder: Path, parents: tuple[str, ...], visited: frozenset[tuple[int, int]]) -> Iterator[ComparedFile]:
    """Yield the files of a folder at any depth.

    Args:
        folder: Path of the folder.
        parents: Names of the folders from the checkpoint to this one.
        visited: Device and inode of each parent folder.
    """
    pending = [(folder, parents, visited)]
    while pending:
        folder, parents, visited = pending.pop()
        try:
            folder_stat = os.stat(folder)
            entries = sorted(os.scandir(folder), key=lambda each: each.name)
        except OSError as error:
            raise read_error(folder, error) from error
        visited |= {(folder_stat.st_dev, folder_stat.st_ino)}
        dcp_files: set[str] = set()
        if any(each.name == METADATA and each.is_file() for each in entries):
            catalog, name_prefix = open_dcp(LocalSource(folder)), prefix_of_file(parents[-1]) if parents else None
            yield ComparedFile(folder, "/".join(parents), name_prefix, DCP, catalog=catalog)
            dcp_files = {METADATA, *catalog.files}
        if not entries and parents:
            yield _marker(folder, parents, "empty folder")
        for entry in entries:
            parts, path = (*parents, printable_name(entry.name)), Path(entry.path)
            if not entry.is_dir():
                if entry.name not in dcp_files:
                    yield _classify_file(path, parents, entry.name)
                continue
            entry_stat = os.stat(path)
            if (entry_stat.st_dev, entry_stat.st_ino) in visited:
                yield _marker(path, parts, "link to a parent folder")
            else:
                pending.append((path, parts, visited))


def _marker(path: Path, parts: tuple[str, ...], note: str) -> ComparedFile:
    return ComparedFile(path, "/".join(parts), None, MARKER, note, "/".join(parts))


def _classify_file(path: Path, parents: tuple[str, ...], name: str, must_be_read: bool = False) -> ComparedFile:
    """Return how a file is compared.

    Args:
        path: Path of the file.
        parents: Names of its folders, relative to the checkpoint.
        name: Name of the file.
        must_be_read: True for a file that is the checkpoint itself; its name implies nothing about its contents.
    """
    stem, suffix = os.path.splitext(name)
    stem, shown_name = printable_name(stem), printable_name(name)
    label, relative_path = "/".join((*parents, stem)), "/".join((*parents, shown_name))
    try:
        file_stat = os.stat(path)
    except OSError as error:
        if not os.path.islink(path) or suffix in (".safetensors", ".json", *_PICKLE_SUFFIXES):
            raise read_error(path, error) from error
        note = f"link to {printable_name(os.readlink(path))}, which does not exist"
        return ComparedFile(path, label, None, MARKER, note, relative_path)
    for matches, type_name in _SPECIAL_FILE_TYPES:
        if matches(file_stat.st_mode):
            return ComparedFile(path, label, None, MARKER, type_name, relative_path)
    for pattern, reason in _NOT_COMPARED_PATTERNS:
        if pattern.fullmatch(name) and not must_be_read:
            return ComparedFile(path, label, None, NOT_COMPARED, reason, relative_path)
    name_prefix = None if must_be_read else prefix_of_file(stem)
    kind = _kind_of_file(path, suffix, file_stat.st_size, must_be_read)
    return ComparedFile(path, label, name_prefix, kind, "", relative_path)


def _kind_of_file(path: Path, suffix: str, size: int, must_be_read: bool) -> str:
    if suffix == ".safetensors":
        return SAFETENSORS
    if suffix == ".json":
        return JSON if size <= MAX_CONFIG_BYTES else BYTES
    head = read_head(path, _HEAD_BYTES)
    is_small = size <= MAX_PICKLE_BYTES or is_legacy(head)
    if head.startswith(b"PK\3\4"):
        # With such a suffix, it may be an archive of torch.save.
        return PICKLE if suffix in (*_PICKLE_SUFFIXES, *_POSSIBLE_PICKLE_SUFFIXES) else ZIP
    if head.startswith(b"\x93NUMPY"):
        return ARRAY
    if head[257:262] == b"ustar":
        return TAR
    may_be_pickle = (
        must_be_read
        or _looks_like_pickle(path, head, size)
        or suffix in (*_PICKLE_SUFFIXES, *_POSSIBLE_PICKLE_SUFFIXES)
    )
    return PICKLE if may_be_pickle and is_small else BYTES


def _looks_like_pickle(path: Path, head: bytes, size: int) -> bool:
    """Return True for a file with the first and last byte of a pickle, or for a legacy archive of torch."""
    return head.startswith(b"\x80") and (is_legacy(head) or _last_byte(path, size) == b".")


def is_declared_pickle(path: Path) -> bool:
    """Return True for a file whose suffix or first bytes declare a pickle or archive: it must be readable as one."""
    return path.suffix in _PICKLE_SUFFIXES or read_head(path, 4) == b"PK\3\4"


def _last_byte(path: Path, size: int) -> bytes:
    with FilePool(path.parent) as files:
        return files.read_up_to(path.name, max(size - 1, 0), 1)


def printable_name(name: str) -> str:
    """Return a file name with bytes that are not UTF-8 as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
