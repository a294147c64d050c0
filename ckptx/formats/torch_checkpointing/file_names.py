"""Names of the files of torch_checkpointing: `metadata.pkl`, and `ITEM_RANK.pt` unless an item has its own layout."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptx.formats.fsdp.file_names import parse_rank_file
from ckptx.formats.unsupported import kind_of_name

METADATA_FILE = "metadata.pkl"
MODEL = "model"  # name of the item with the weights
UNFINISHED_PREFIX = "tmp_"  # of the name of the directory, until the save is complete
_ITEM_FILE = re.compile(r"([A-Za-z0-9_-]+)_(0|[1-9]\d{0,4})\.pt")


def parse_item_file(name: str) -> tuple[str, int] | None:
    """Return item and rank of a file name; None for any other name, and for names of other formats."""
    match = _ITEM_FILE.fullmatch(name)
    if match is None or parse_rank_file(name) is not None or kind_of_name(name) is not None:
        return None
    return match[1], int(match[2])


def group_item_files(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return item -> rank -> file name, for names of the form `ITEM_RANK.pt`.

    Both are in the order of file names, so that rank 10 comes before rank 2.
    """
    items: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        found = parse_item_file(name)
        if found is not None:
            items.setdefault(found[0], {})[found[1]] = name
    return items
