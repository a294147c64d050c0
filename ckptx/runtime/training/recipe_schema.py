"""Decode plain values into the blocks of a recipe; the types of their fields are the schema.

msgspec decodes and locates errors. The error message for the user is made here from the value and the type at that
place: the path of the key, the value found and the value expected, and for an unknown key the closest known one.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from ckptx.errors import UsageError
from ckptx.untrusted.printable import one_line

B = TypeVar("B", bound=msgspec.Struct)
Subject = Callable[..., str]  # of the paths of keys: the option that sets one of them, or the file

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
# The end of a msgspec error: the path of the value, without keys of mappings. `decode` wraps the whole value in a list,
# so that there always is a path, and no text of the file can be mistaken for it.
_PLACE = re.compile(r" - at `\$\[0\](?P<path>[\w.\[\]]*)`\Z")
_PART = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


class _InvalidValue(NamedTuple):
    """A value that msgspec refused.

    Attributes:
        path: Path of its key; "" for the whole.
        hint: The type that is required there.
        value: Value found there.
    """

    path: str
    hint: Any
    value: Any


def decode(values: Any, block: type[B], subject: Subject) -> B:
    """Decode a block of a recipe.

    Args:
        values: The content of the YAML file.
        block: The class of the block.
        subject: The subject of an error, by the path of its key.

    Raises:
        UsageError: A key is unknown or missing, or its value is of another type than its field.
    """
    try:
        return msgspec.convert([values], tuple[block])[0]  # type: ignore[valid-type]  # a class at run time
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        if place is None:
            raise UsageError(f"{subject('')}: {one_line(str(error), 400)}; correct it") from error
        raise _refusal(_fault_at(place["path"], values, block), subject) from error


def unknown(name: str, known: Collection[str], where: str, else_needed: str = "") -> UsageError:
    """Return the error for an unknown name, with the closest known one, else with `else_needed` or all known names."""
    near = difflib.get_close_matches(str(name), known, 1, 0.6)
    needed = else_needed or f"use one of {', '.join(known)}"
    offered = f'did you mean "{near[0]}"?' if near else needed
    return UsageError(f"{where}: is unknown; {offered}")


def described(hint: Any) -> str:
    """Describe the values of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(described, arguments))
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        return (
            "a list" if is_block(arguments[0]) else f"a list of {_PLURALS.get(arguments[0]) or described(arguments[0])}"
        )
    if is_block(hint) or _is_mapping(hint):
        return "a mapping"
    return _WORDS[hint]


def is_block(hint: Any) -> bool:
    """Return True if a type is a block of a recipe."""
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def found_as(value: Any) -> str:
    """Show a value in an error: strings in quotes, mappings and lists by their kind."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'the string "{one_line(value, 80)}"' if isinstance(value, str) else one_line(str(value), 80)


def _fault_at(path: str, value: Any, hint: Any) -> _InvalidValue:
    """Follow a path of msgspec to the value it refused."""
    where = ""
    for part in _PART.finditer(path):
        hint = _without_null(hint)
        if part["key"]:
            hint, value = get_type_hints(hint)[part["key"]], value[part["key"]]
            where = f"{where}.{part['key']}".removeprefix(".")
        elif part["index"]:
            hint, value = get_args(hint)[0], value[int(part["index"])]
            where = f"{where}[{part['index']}]"
        else:
            hint = get_args(hint)[1]
            key = next(key for key, each in value.items() if not _is_valid(each, hint))
            value, where = value[key], f"{where}.{key}"
    return _InvalidValue(where, hint, value)


def _is_valid(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


def _refusal(fault: _InvalidValue, subject: Subject) -> UsageError:
    """Return the error for an invalid value."""
    block = _without_null(fault.hint)
    if is_block(block) and isinstance(fault.value, Mapping):
        fields = {each.name: each for each in msgspec.structs.fields(block)}
        prefix = f"{fault.path}." if fault.path else ""
        for key in fault.value:
            if key not in fields:
                where = f"{prefix}{key}"
                return unknown(key, fields, f"{subject(where)}: {one_line(where, 200)}")
        key = next(name for name, each in fields.items() if each.required and name not in fault.value)
        where = f"{prefix}{key}"
        return UsageError(
            f"{subject(where, fault.path)}: {where} is missing, expected {described(fields[key].type)}; add it"
        )
    where = f"{one_line(fault.path, 200)}: " if fault.path else ""
    advice = "correct it"
    if get_origin(block) is Literal:
        near = difflib.get_close_matches(str(fault.value), get_args(block), 1, 0.6)
        advice = f'did you mean "{near[0]}"?' if near else "use one of them"
    needed = described(block if get_origin(block) is Literal else fault.hint)
    return UsageError(f"{subject(fault.path)}: {where}expected {needed}, found {found_as(fault.value)}; {advice}")


def _without_null(hint: Any) -> Any:
    """Return the type without None if it is a union; other types unchanged."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    (found,) = (each for each in get_args(hint) if each is not type(None))
    return found


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)
