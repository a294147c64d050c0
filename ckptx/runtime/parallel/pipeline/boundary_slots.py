"""Slots: places among the arguments of a module call where a pipeline stage needs a value of an earlier stage.

The functions read and write the value of a slot, such as this one:

    decoder layer 3, its first call, argument "shared_kv_states", key "full_attention", the second of 2

Arguments are one dict: positional arguments by index, keyword arguments by name.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = dict[Any, Any]  # index or name of an argument -> value


class PathStep(NamedTuple):
    """One step of a path into a nested container.

    Attributes:
        key: Key of a dict, or index into a tuple or list.
        length: Number of items of the tuple or list that `key` is an index into; -1 if `key` is a key of a dict.
    """

    key: Any
    length: int = -1


class BoundarySlot(NamedTuple):
    """A place among the arguments of a call, for a value that crosses the boundary between two pipeline stages.

    Attributes:
        module: Name of the module that is called, without wrappers (see `layers.canonical_name`).
        call: Number of earlier calls of this module in the same forward pass.
        path: Path from the arguments to the value; its first key is the index or name of an argument.
    """

    module: str
    call: int
    path: tuple[PathStep, ...]

    def __str__(self) -> str:
        inner = "".join(f"[{step.key!r}]" for step in self.path[1:])
        number = f", call {self.call + 1}" if self.call else ""
        return f"{self.module}({self.path[0].key}{inner}){number}"


def iter_leaves(value: Any, path: tuple[PathStep, ...] = ()) -> Iterator[tuple[tuple[PathStep, ...], Any]]:
    """Yield every value in nested dicts, tuples and lists that is not a container itself, with its path."""
    if isinstance(value, (dict, UserDict)):
        for key, item in value.items():
            yield from iter_leaves(item, (*path, PathStep(key)))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from iter_leaves(item, (*path, PathStep(index, len(value))))
    else:
        yield path, value


def get_value(value: Any, path: tuple[PathStep, ...]) -> Any:
    """Return the value at a path; None if the path does not exist."""
    for key, length in path:
        if isinstance(value, (dict, UserDict)) if length < 0 else isinstance(value, (tuple, list)):
            value = value.get(key) if length < 0 else value[key] if key < len(value) else None
        else:
            return None
    return value


def set_value(container: Any, path: tuple[PathStep, ...], value: Any) -> None:
    """Set the value at a path; containers on the path that are None or missing are created.

    Dicts are changed in place, as layers share them; tuples and lists are replaced by copies.
    """
    (key, _), *rest = path
    if not rest:
        container[key] = value
        return
    inner = container.get(key) if isinstance(container, MutableMapping) else container[key]
    length = rest[0].length
    if length < 0:
        if inner is None:
            inner = container[key] = {}
        set_value(inner, tuple(rest), value)
        return
    items = list(inner) if inner is not None else [None] * length
    set_value(items, tuple(rest), value)
    container[key] = items if isinstance(inner, list) else tuple(items)


def is_identical(a: Any, b: Any) -> bool:
    """Return True if two values are equal without a tolerance; NaN equals nothing.

    Objects that are neither tensors nor plain values are equal if their types are.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    if type(a) is not type(b):
        return False
    return bool(a == b) if isinstance(a, (bool, int, float, str)) else True
