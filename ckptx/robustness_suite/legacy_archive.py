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
from ckptx.robustness_suite.pickled_kinds import described_storage
from ckptx.untrusted.limits import TENSORS

_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_VERSION = 1001
_COUNT = 8  # bytes of the number of elements


def is_legacy(head: bytes) -> bool:
    """True of the first 16 bytes of such a file."""
    return head.startswith(_MAGIC[:4])


def read_legacy(data: bytes, length: int, where: str, offset: int) -> tuple[Any, dict[str, Record]]:
    """Reads the value and finds the storages.

    Args:
        data: The file, or as much of its begin as may have pickles.
        length: Length of the whole file in bytes.
        where: Subject of error messages.
        offset: First byte of the archive in the file.

    Returns:
        The value, and its storages by key.

    Raises:
        InputError: It is damaged.
        UnsupportedError: It is big-endian, or has storages that are views of others.
    """
    values, at = [], 0
    for _ in range(5):
        graph = read_graph(data, where, at)
        values.append(graph.value)
        at = graph.end
    magic, version, machine, tree, keys = values
    if data[: len(_MAGIC)] != _MAGIC or magic is None or version != _VERSION or type(keys) is not list:
        raise InputError(f"{where}: is no file of torch.save (another magic number or version); copy it again")
    if len(keys) > TENSORS:
        raise InputError(f"{where}: has {len(keys):,} storages; the file is damaged, copy it again")
    if isinstance(machine, PickledDict) and ("little_endian", False) in machine.items:
        raise UnsupportedError(f"{where}: was written big-endian, which is not read")
    sizes = _sizes(tree, where)
    records = {}
    for key in keys:
        if type(key) is not str or key not in sizes:
            raise InputError(f"{where}: has a storage that no tensor describes; the file is damaged, copy it again")
        nbytes = sizes[key]
        if at + _COUNT + nbytes > length:
            raise InputError(f"{where}: ends before the end of a storage; the file is truncated, copy it again")
        records[key] = Record(offset + at + _COUNT, nbytes, None)
        at += _COUNT + nbytes
    return tree, records


def _sizes(tree: Any, where: str) -> dict[str, int]:
    """Bytes of each storage that a value refers to."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if type(node) not in (list, tuple, CallResult, PickledDict, PickledSet, PersistentObject) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, PersistentObject):
            described = described_storage(node.persistent_id)
            if described is None or described[1].numel < 0:
                raise UnsupportedError(
                    f"{where}: has a storage of an unknown dtype, or one that is a view; save it with a newer torch"
                )
            found[described[1].key] = described[1].nbytes
        elif isinstance(node, PickledSet):
            waiting.extend(node.items)
        elif isinstance(node, PickledDict):
            waiting.extend(each for item in node.items for each in item)
        elif isinstance(node, CallResult):
            waiting.extend((node.function, node.keywords, *node.arguments, *node.items, *node.states))
            waiting.extend(each for pair in node.pairs for each in pair)
            waiting.extend(each for setter in node.setters for each in setter)
        else:
            waiting.extend(node)
    return found
