"""Find a checkpoint of torch_checkpointing: by `metadata.pkl`, or by the DTensors in `ITEM_RANK.pt`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckptx.errors import CkptxError, InputError, StorageFailure, UnsupportedError
from ckptx.formats.hf.reader import INDEX_FILE, SINGLE_FILE
from ckptx.formats.located_checkpoint import LocatedCheckpoint
from ckptx.formats.rank_files import ShapeReader
from ckptx.formats.torch_checkpointing.file_names import (
    METADATA_FILE,
    MODEL,
    UNFINISHED_PREFIX,
    group_item_files,
    parse_item_file,
)
from ckptx.storage.interface import Source

if TYPE_CHECKING:  # imported for directories that have such files only
    from ckptx.formats.torch_checkpointing.metadata import Metadata

_MAX_PEEKED = 8  # items whose first file is searched for DTensors
_DTENSOR = b"torch.distributed.tensor"


def detect(source: Source, read_shapes: ShapeReader) -> LocatedCheckpoint | None:
    """Find the items of a directory; None if it has none, or if HF weights next to them take precedence.

    An item is an object of a save, such as the model or the optimizer. HF weights are an index, or a model.safetensors
    that `metadata.pkl` does not list.

    Args:
        source: Files of the directory.
        read_shapes: Unused; part of the interface of all detectors.

    Raises:
        InputError: `metadata.pkl` is damaged.
        UnsupportedError: The save was not finished, or `metadata.pkl` has another version.
    """
    listing = source.listing()
    if listing.has(INDEX_FILE):
        return None
    located = _locate(source)
    return None if located is None or (listing.has(SINGLE_FILE) and SINGLE_FILE not in located.weights) else located


def locate_by_file(source: Source, name: str) -> LocatedCheckpoint | None:
    """Find the checkpoint of `metadata.pkl`, of a file of an item or of one that it lists; None for any other file."""
    listing = source.listing()
    if not listing.has(METADATA_FILE) and parse_item_file(name) is None:
        return None
    located = _locate(source)
    return located if located is not None and name in located.weights else None


def _locate(source: Source) -> LocatedCheckpoint | None:
    """Return the files of all items, and `metadata.pkl` with the files that it lists.

    Returns:
        None if there is no `metadata.pkl` of the library, and no DTensor in the first file of an item.

    Raises:
        InputError, UnsupportedError: See `detect`.
    """
    items = group_item_files(source.listing())
    metadata = find_metadata(source)
    if metadata is None and not any(has_dtensors(source, files[min(files)]) for files in _first_items(items)):
        return None
    if source.absolute_locations()[-1].name.startswith(UNFINISHED_PREFIX):
        raise UnsupportedError(
            f"{source.location}: an unfinished save of torch_checkpointing, which renames {UNFINISHED_PREFIX}NAME to "
            "NAME when it is complete; use another checkpoint (rename the directory if you gave it this name)"
        )
    names = {name for files in items.values() for name in files.values()}
    if metadata is not None:
        names |= {METADATA_FILE, *metadata.files}
    return LocatedCheckpoint(source, "torch-checkpointing", tuple(sorted(names)))


def _first_items(items: dict[str, dict[int, str]]) -> list[dict[int, str]]:
    """Return rank -> file name for each of the items that are searched for DTensors, the model first."""
    names = sorted(items, key=lambda name: (name != MODEL, name))
    return [items[name] for name in names[:_MAX_PEEKED]]


def find_metadata(source: Source) -> Metadata | None:
    """Return the contents of `metadata.pkl`; None without one, and for a pickle of another program.

    A file that cannot be read counts as one of another program if HF weights and no file of an item are next to it.

    Raises:
        InputError, UnsupportedError: See `read_metadata`.
    """
    listing = source.listing()
    if not listing.has(METADATA_FILE):
        return None
    from ckptx.formats.torch_checkpointing.metadata import read_metadata

    try:
        return read_metadata(source)
    except InputError:
        # Other programs pickle other things under this name.
        has_items = any(parse_item_file(name) is not None for name in listing)
        if has_items or not (listing.has(INDEX_FILE) or listing.has(SINGLE_FILE)):
            raise
        return None


def has_dtensors(source: Source, name: str) -> bool:
    """Return True if the pickle of a torch archive mentions DTensor; False for a file that is not an archive."""
    from ckptx.formats.torch_archive.archive import open_archive

    try:
        with source.open() as files:
            archive = open_archive(
                partial(files.read, name), 0, files.size(name), name, lambda data, _: _DTENSOR in data
            )
    except StorageFailure:
        raise
    except CkptxError:
        return False
    return bool(archive.tree)
