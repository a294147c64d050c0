"""Files of a checkpoint: every file and folder below it, at any depth, with the way in which it is compared.

The contents decide, where the name does not: a file without an ending may be an archive of `torch.save`. A link is
followed, unless it leads to a folder that is being looked through. What is not compared is listed with the reason.
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
from ckptx.robustness_suite.item_names import word_of_file
from ckptx.storage.files import FilePool, read_error, read_head
from ckptx.storage.local import LocalSource
from ckptx.untrusted.limits import CONFIG_BYTES, PICKLE_BYTES

METADATA = ".metadata"
DCP, SAFETENSORS, JSON, PICKLE, ARRAY, ZIP, TAR, BYTES, MARK, LEFT_OUT = (
    "dcp", "safetensors", "json", "pickle", "array", "zip", "tar", "bytes", "mark", "left out"
)  # fmt: skip
_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_OFTEN_PICKLES = (".bin", ".tar", ".p")  # other programs use these endings, too
_SETTINGS = re.compile(
    r"training_args\.(json|bin|pt)|((generation|adapter|quantize|(video_)?(pre)?processor)_)?config\.json"
)
_TOKENIZER = re.compile(
    r"tokenizer.*\.(json|model)|spiece\.model|vocab\.(json|txt)|merges\.txt|added_tokens\.json"
    r"|special_tokens_map\.json|chat_template\..*"
)
_INDEX = re.compile(r".*\.index\.json|ckptx\.json")
_EVENTS = re.compile(r"events\.out\.tfevents\..*")
_LEFT_OUT = (
    (_SETTINGS, "settings"),
    (_TOKENIZER, "tokenizer"),
    (_INDEX, "index of files"),
    (_EVENTS, "log with times"),
)
_HEAD = 512
_KINDS_OF_FILES = (
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


class ComparedFile(NamedTuple):
    """A file, the folder of a DCP, or something that has no contents.

    Attributes:
        path: Its path.
        label: Its path below the checkpoint, without ending.
        word: Prefix of the names in it, if its own name gives one; else None.
        kind: The way it is compared: one of the words above.
        note: Text that is compared for something without contents, or the reason why it is not compared.
        file: Its path below the checkpoint, as it can be printed.
        catalog: Catalog of a DCP, else None.
    """

    path: Path
    label: str
    word: str | None
    kind: str
    note: str = ""
    file: str = ""
    catalog: Catalog | None = None

    def name(self, inside: str) -> str:
        """The whole name of something in it."""
        if self.word is None:
            return inside
        first = self.word.partition(".")[0]
        begins = self.kind == DCP and inside.partition(".")[0] == first
        return inside if begins else ".".join(filter(None, (self.word, inside)))

    def is_of(self, word: str) -> bool:
        """False where its name says that it holds something else."""
        return self.word is None or self.word.partition(".")[0] == word


def places(path: Path) -> list[ComparedFile]:
    """Everything in a checkpoint, in the order of labels.

    Args:
        path: A folder or a file.

    Raises:
        InputError: It is missing, or something in it cannot be read.
    """
    if path.is_file():
        return [_of_file(path, (), path.name, must_be_read=True)]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or directory; a checkpoint is required")
    return sorted(_places_in(path, (), frozenset()), key=lambda each: (each.label, each.file))


def _places_in(
    folder: Path, above: tuple[str, ...], looked_through: frozenset[tuple[int, int]]
) -> Iterator[ComparedFile]:
    waiting = [(folder, above, looked_through)]
    while waiting:
        folder, above, looked_through = waiting.pop()
        try:
            state = os.stat(folder)
            entries = sorted(os.scandir(folder), key=lambda each: each.name)
        except OSError as error:
            raise read_error(folder, error) from error
        looked_through |= {(state.st_dev, state.st_ino)}
        of_dcp: set[str] = set()
        if any(each.name == METADATA and each.is_file() for each in entries):
            catalog, word = open_dcp(LocalSource(folder)), word_of_file(above[-1]) if above else None
            yield ComparedFile(folder, "/".join(above), word, DCP, catalog=catalog)
            of_dcp = {METADATA, *catalog.files}
        if not entries and above:
            yield _mark(folder, above, "empty folder")
        for entry in entries:
            within, path = (*above, printable(entry.name)), Path(entry.path)
            if not entry.is_dir():
                if entry.name not in of_dcp:
                    yield _of_file(path, above, entry.name)
                continue
            found = os.stat(path)
            if (found.st_dev, found.st_ino) in looked_through:
                yield _mark(path, within, "link to a folder that holds it")
            else:
                waiting.append((path, within, looked_through))


def _mark(path: Path, within: tuple[str, ...], note: str) -> ComparedFile:
    return ComparedFile(path, "/".join(within), None, MARK, note, "/".join(within))


def _of_file(path: Path, above: tuple[str, ...], name: str, must_be_read: bool = False) -> ComparedFile:
    stem, ending = os.path.splitext(name)
    stem, shown = printable(stem), printable(name)
    label, file = "/".join((*above, stem)), "/".join((*above, shown))
    try:
        state = os.stat(path)
    except OSError as error:
        if not os.path.islink(path) or ending in (".safetensors", ".json", *_PICKLES):
            raise read_error(path, error) from error
        return ComparedFile(
            path, label, None, MARK, f"link to {printable(os.readlink(path))}, which is not there", file
        )
    for is_such, kind in _KINDS_OF_FILES:
        if is_such(state.st_mode):
            return ComparedFile(path, label, None, MARK, kind, file)
    for pattern, reason in _LEFT_OUT:
        if pattern.fullmatch(name) and not must_be_read:
            return ComparedFile(path, label, None, LEFT_OUT, reason, file)
    word = None if must_be_read else word_of_file(stem)
    return ComparedFile(path, label, word, _kind(path, ending, state.st_size, must_be_read), "", file)


def _kind(path: Path, ending: str, size: int, must_be_read: bool) -> str:
    if ending == ".safetensors":
        return SAFETENSORS
    if ending == ".json":
        return JSON if size <= CONFIG_BYTES else BYTES
    head = read_head(path, _HEAD)
    is_small = size <= PICKLE_BYTES or _is_legacy(head)
    if head.startswith(b"PK\3\4"):
        return PICKLE if ending in (*_PICKLES, *_OFTEN_PICKLES) else ZIP  # which may hold what torch.save wrote
    if head.startswith(b"\x93NUMPY"):
        return ARRAY
    if head[257:262] == b"ustar":
        return TAR
    may_be_pickle = must_be_read or _looks_like_pickle(path, head, size) or ending in (*_PICKLES, *_OFTEN_PICKLES)
    return PICKLE if may_be_pickle and is_small else BYTES


def _looks_like_pickle(path: Path, head: bytes, size: int) -> bool:
    """True of a file that has the first and the last byte of a pickle, or is a legacy archive of torch."""
    return head.startswith(b"\x80") and (_is_legacy(head) or _last_byte(path, size) == b".")


def is_surely_pickle(path: Path) -> bool:
    """True of a file that its ending or its first bytes call a pickle or archive: one that is none is refused."""
    return path.suffix in _PICKLES or read_head(path, 4) == b"PK\3\4"


def _last_byte(path: Path, size: int) -> bytes:
    with FilePool(path.parent) as files:
        return files.read_up_to(path.name, max(size - 1, 0), 1)


def _is_legacy(head: bytes) -> bool:
    return head.startswith(b"\x80\x02\x8a\x0a")


def printable(name: str) -> str:
    """A name of a file with its bytes that are no UTF-8 written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
