"""Read archives of `torch.save` before torch 1.6; torch still writes them for storages in a plain pickle.

    5 pickles   magic number, format version (1001), machine (byte order, ...), value, keys of its storages
    storages    for each key: number of elements in 8 bytes, then the bytes

as in `_legacy_save` of torch/serialization.py.
"""

from __future__ import annotations

from typing import Any

from ckptx.catalog.entry import Record
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.torch_archive.pickle_graph import read_graph
from ckptx.formats.torch_archive.pickle_machine import CallResult, PersistentObject, PickledDict, PickledSet
from ckptx.robustness_suite.pickle_normalizer import parse_storage_id
from ckptx.untrusted.limits import MAX_TENSORS

_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_VERSION = 1001
_COUNT_BYTES = 8  # size of the number of elements before each storage


def is_legacy(head: bytes) -> bool:
    """Return True if the first bytes of a file, at least 4, are those of a legacy archive."""
    return head.startswith(_MAGIC[:4])


def read_legacy(data: bytes, length: int, subject: str, offset: int) -> tuple[Any, dict[str, Record]]:
    """Parse the value of an archive and locate its storages.

    Args:
        data: The archive, or at least its pickles.
        length: Length of the whole archive in bytes.
        subject: Subject of error messages.
        offset: Position of the archive in the file, in bytes.

    Returns:
        The value, with storages as persistent ids; and key -> position of each storage.

    Raises:
        InputError: The archive is damaged.
        UnsupportedError: The archive is big-endian, or has storages that are views of others.
    """
    values, position = [], 0
    for _ in range(5):
        graph = read_graph(data, subject, position)
        values.append(graph.value)
        position = graph.end
    magic, version, machine, value, keys = values
    if data[: len(_MAGIC)] != _MAGIC or magic is None or version != _VERSION or type(keys) is not list:
        raise InputError(f"{subject}: is not a legacy torch.save file of format version 1001; copy it again")
    if len(keys) > MAX_TENSORS:
        raise InputError(f"{subject}: has {len(keys):,} storages; the file is damaged, copy it again")
    if isinstance(machine, PickledDict) and ("little_endian", False) in machine.items:
        raise UnsupportedError(f"{subject}: is big-endian, which is not supported; save it on a little-endian machine")
    storage_sizes = _find_storage_sizes(value, subject)
    records = {}
    for key in keys:
        if type(key) is not str or key not in storage_sizes:
            raise InputError(f"{subject}: has a storage that no tensor refers to; the file is damaged, copy it again")
        nbytes = storage_sizes[key]
        if position + _COUNT_BYTES + nbytes > length:
            raise InputError(f"{subject}: ends before the end of a storage; the file is truncated, copy it again")
        records[key] = Record(offset + position + _COUNT_BYTES, nbytes, None)
        position += _COUNT_BYTES + nbytes
    return value, records


def _find_storage_sizes(value: Any, subject: str) -> dict[str, int]:
    """Return the size in bytes of each storage that a value refers to, by key."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if type(node) not in (list, tuple, CallResult, PickledDict, PickledSet, PersistentObject) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, PersistentObject):
            storage = parse_storage_id(node.persistent_id)
            if storage is None or storage[1].numel < 0:
                raise UnsupportedError(
                    f"{subject}: has a storage of an unknown dtype, or one that is a view; save it with a newer torch"
                )
            sizes[storage[1].key] = storage[1].nbytes
        elif isinstance(node, PickledSet):
            pending.extend(node.items)
        elif isinstance(node, PickledDict):
            pending.extend(each for item in node.items for each in item)
        elif isinstance(node, CallResult):
            pending.extend((node.function, node.keywords, *node.arguments, *node.items, *node.states))
            pending.extend(each for pair in node.pairs for each in pair)
            pending.extend(each for setter in node.setters for each in setter)
        else:
            pending.extend(node)
    return sizes
