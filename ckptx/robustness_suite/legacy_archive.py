"""Files of `torch.save` from before torch 1.6, which torch still writes for storages in a plain pickle.

    pickles     a magic number, the version of the format, facts on the machine, the value, the keys of its storages
    storages    of each: the number of its elements in 8 bytes, and its bytes

as in `_legacy_save` of torch/serialization.py. The version is 1001.
"""

from __future__ import annotations

from typing import Any

from ckptx.catalog.entry import Record
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.torch_archive.pickle_graph import read_graph
from ckptx.formats.torch_archive.pickle_machine import CallResult, PersistentObject, PickledDict, PickledSet
from ckptx.robustness_suite.pickled_kinds import parse_storage_id
from ckptx.untrusted.limits import MAX_TENSORS

_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_VERSION = 1001
_COUNT_BYTES = 8  # bytes of the number of elements


def is_legacy(head: bytes) -> bool:
    """True of the first 16 bytes of such a file."""
    return head.startswith(_MAGIC[:4])


def read_legacy(data: bytes, length: int, subject: str, offset: int) -> tuple[Any, dict[str, Record]]:
    """Reads the value and finds the storages.

    Args:
        data: The file, or as much of its begin as may have pickles.
        length: Length of the whole file in bytes.
        subject: Subject of error messages.
        offset: First byte of the archive in the file.

    Returns:
        The value, and its storages by key.

    Raises:
        InputError: It is damaged.
        UnsupportedError: It is big-endian, or has storages that are views of others.
    """
    values, position = [], 0
    for _ in range(5):
        graph = read_graph(data, subject, position)
        values.append(graph.value)
        position = graph.end
    magic, version, machine, value, keys = values
    if data[: len(_MAGIC)] != _MAGIC or magic is None or version != _VERSION or type(keys) is not list:
        raise InputError(f"{subject}: is no file of torch.save (another magic number or version); copy it again")
    if len(keys) > MAX_TENSORS:
        raise InputError(f"{subject}: has {len(keys):,} storages; the file is damaged, copy it again")
    if isinstance(machine, PickledDict) and ("little_endian", False) in machine.items:
        raise UnsupportedError(f"{subject}: was written big-endian, which is not read")
    storage_sizes = _find_storage_sizes(value, subject)
    records = {}
    for key in keys:
        if type(key) is not str or key not in storage_sizes:
            raise InputError(f"{subject}: has a storage that no tensor describes; the file is damaged, copy it again")
        nbytes = storage_sizes[key]
        if position + _COUNT_BYTES + nbytes > length:
            raise InputError(f"{subject}: ends before the end of a storage; the file is truncated, copy it again")
        records[key] = Record(offset + position + _COUNT_BYTES, nbytes, None)
        position += _COUNT_BYTES + nbytes
    return value, records


def _find_storage_sizes(value: Any, subject: str) -> dict[str, int]:
    """Bytes of each storage that a value refers to."""
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
