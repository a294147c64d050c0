"""Stand in for objects of unknown classes in a pickle, and find the tensors that they contain.

A training loop saves more than tensors: its arguments as an `argparse.Namespace`, a config, paths, random states. Each
class or function in such a pickle becomes a stand-in class of its own. Nothing is imported or called; a stand-in keeps
what the pickle passes to it, so that tensors in it can be reported.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from ckptx.errors import InputError
from ckptx.formats.torch_archive.unpickle import ReadOnlyClass, StorageRef, TensorRef, UnsupportedObject

_MAX_NAMES = 10_000  # classes and functions of a pickle; each takes a kilobyte
_MAX_NAME_LENGTH = 80  # characters of a module or name that are kept for messages


class UnknownObject(metaclass=ReadOnlyClass):
    """Stand-in for an object of an unknown class, or for what an unknown function returns.

    Attributes:
        class_name: Dotted name of the class or function.
        contents: The arguments, state and items that the pickle passes to it.
    """

    __slots__ = ("contents",)
    class_name = ""
    contents: list[object]

    def __new__(cls, *arguments: object) -> UnknownObject:
        """Keep the arguments without calling anything."""
        result = super().__new__(cls)
        result.contents = list(arguments)
        return result

    def __call__(self, *arguments: object) -> UnknownObject:
        self.contents.extend(arguments)
        return self

    def __setstate__(self, state: object) -> None:
        self.contents.append(state)

    def __setitem__(self, key: object, value: object) -> None:
        self.contents += (key, value)

    def append(self, item: object) -> None:
        """Keep an item."""
        self.contents.append(item)

    def extend(self, items: object) -> None:
        """Keep items."""
        self.contents.append(items)

    def add(self, item: object) -> None:
        """Keep an item."""
        self.contents.append(item)


class UnknownNames:
    """The stand-in classes of one pickle.

    Attributes:
        classes: (module, name) -> stand-in, in the order of first use.
    """

    __slots__ = ("classes",)

    def __init__(self) -> None:
        self.classes: dict[tuple[str, str], ReadOnlyClass] = {}

    def __call__(self, module: str, name: str) -> ReadOnlyClass:
        """Return the stand-in for a class or function.

        Raises:
            InputError: The pickle names too many.
        """
        found = self.classes.get((module, name))
        if found is None:
            if len(self.classes) == _MAX_NAMES:
                raise InputError(
                    f"refers to more than {_MAX_NAMES:,} classes and functions; save only tensors: "
                    "torch.save(model.state_dict(), ...)"
                )
            in_python_3 = NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)
            dotted = ".".join(each[:_MAX_NAME_LENGTH] for each in in_python_3)
            found = ReadOnlyClass("UnknownObject", (UnknownObject,), {"__slots__": (), "class_name": dotted})
            self.classes[module, name] = found
        return found

    def first(self) -> str | None:
        """Return the dotted name of the first unknown class or function; None if the pickle refers to none."""
        return next((each.__dict__["class_name"] for each in self.classes.values()), None)


def class_of_unknown(value: object) -> str | None:
    """Return the dotted name of the class of an unknown object, or of an unknown class; None for other values."""
    if isinstance(value, UnknownObject):
        return type(value).class_name
    if isinstance(value, type) and issubclass(value, UnknownObject):
        return value.class_name
    return None


def count_tensors(value: object, visited: set[int]) -> int:
    """Return the number of tensors and storages in a value, at any depth.

    Args:
        value: The value.
        visited: Ids of containers and tensors that were counted before, and are skipped; extended by those of `value`.
    """
    pending: list[Any] = [value]
    count = 0
    while pending:
        item = pending.pop()
        if not isinstance(item, dict | list | tuple | UnknownObject) or id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, TensorRef | StorageRef | UnsupportedObject):
            count += 1
        elif isinstance(item, UnknownObject):
            pending.extend(item.contents)
        else:
            pending.extend(item)
            if isinstance(item, dict):
                pending.extend(item.values())
    return count
