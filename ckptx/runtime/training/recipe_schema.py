"""Decode plain values into the blocks of a recipe; the types of their fields are the schema.

msgspec decodes and locates errors. The error message for the user is made here from the value and the type at that
place: the path of the key, the value found and the value expected, and for an unknown key the closest known one.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from ckptx.errors import UsageError
from ckptx.untrusted.printable import one_line

B = TypeVar("B", bound=msgspec.Struct)

_TYPE_DESCRIPTIONS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}
_PLURAL_DESCRIPTIONS = {int: "integers", float: "numbers", str: "strings"}
# The end of a msgspec error: the path of the value, without keys of mappings. `decode` wraps the whole value in a list,
# so that there always is a path, and no text of the file can be mistaken for it.
_ERROR_PATH = re.compile(r" - at `\$\[0\](?P<path>[\w.\[\]]*)`\Z")
# A part of this path: a field of a block, an index in a list, or `[...]` for a key of a mapping.
_PATH_PART = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


class DescribeSubject(Protocol):
    """Function that returns the subject of an error about keys of a recipe."""

    def __call__(self, *keys: str) -> str:
        """Return the option that sets one of the keys, a parent or a child of it; else the file of the recipe.

        Args:
            keys: Paths of the keys that the error is about; the first that an option sets determines the result.
        """


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


def decode(values: Any, block: type[B], subject: DescribeSubject) -> B:
    """Decode a block of a recipe.

    Args:
        values: The content of the YAML file.
        block: The class of the block.
        subject: Returns the subject of an error about keys.

    Raises:
        UsageError: A key is unknown or missing, or its value is of another type than its field.
    """
    try:
        return msgspec.convert([values], tuple[block])[0]  # type: ignore[valid-type]  # a class at run time
    except msgspec.ValidationError as error:
        location = _ERROR_PATH.search(str(error))
        if location is None:
            raise UsageError(f"{subject('')}: {one_line(str(error), 400)}; correct it") from error
        raise _invalid_value_error(_locate_invalid_value(location["path"], values, block), subject) from error


def unknown_name_error(name: str, known: Collection[str], subject: str, advice: str = "") -> UsageError:
    """Return the error for an unknown name.

    Args:
        name: The unknown name.
        known: All valid names.
        subject: Beginning of the message, which includes the name.
        advice: Next step if no valid name is similar; empty to list all valid names.
    """
    close_names = difflib.get_close_matches(str(name), known, 1, 0.6)
    if close_names:
        next_step = f'did you mean "{close_names[0]}"?'
    else:
        next_step = advice or f"use one of {', '.join(known)}"
    return UsageError(f"{subject}: is unknown; {next_step}")


def describe_type(hint: Any) -> str:
    """Return the values of a type in words, for an error: "an integer or null", or the values of a Literal."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_type, arguments))
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        return (
            "a list"
            if is_block(arguments[0])
            else f"a list of {_PLURAL_DESCRIPTIONS.get(arguments[0]) or describe_type(arguments[0])}"
        )
    if is_block(hint) or _is_mapping(hint):
        return "a mapping"
    return _TYPE_DESCRIPTIONS[hint]


def is_block(hint: Any) -> bool:
    """Return True if a type is a block of a recipe."""
    return isinstance(hint, type) and get_origin(hint) is None and issubclass(hint, msgspec.Struct)


def describe_value(value: Any) -> str:
    """Show a value in an error: strings in quotes, mappings and lists by their kind."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'the string "{one_line(value, 80)}"' if isinstance(value, str) else one_line(str(value), 80)


def _locate_invalid_value(path: str, value: Any, hint: Any) -> _InvalidValue:
    """Return the value that msgspec refused.

    Args:
        path: Path from the error of msgspec, with `[...]` for keys of mappings.
        value: The decoded content of the file.
        hint: The type to which msgspec converts the content.
    """
    key_path = ""
    for part in _PATH_PART.finditer(path):
        hint = _without_null(hint)
        if part["key"]:
            hint, value = get_type_hints(hint)[part["key"]], value[part["key"]]
            key_path = f"{key_path}.{part['key']}".removeprefix(".")
        elif part["index"]:
            hint, value = get_args(hint)[0], value[int(part["index"])]
            key_path = f"{key_path}[{part['index']}]"
        else:
            hint = get_args(hint)[1]  # the type of the mapping's values
            key = next(key for key, each in value.items() if not _is_valid(each, hint))
            value, key_path = value[key], f"{key_path}.{key}"
    return _InvalidValue(key_path, hint, value)


def _is_valid(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


def _invalid_value_error(invalid: _InvalidValue, subject: DescribeSubject) -> UsageError:
    """Return the error for an invalid value."""
    non_null_hint = _without_null(invalid.hint)
    if is_block(non_null_hint) and isinstance(invalid.value, Mapping):
        fields = {each.name: each for each in msgspec.structs.fields(non_null_hint)}
        prefix = f"{invalid.path}." if invalid.path else ""
        for key in invalid.value:
            if key not in fields:
                where = f"{prefix}{key}"
                return unknown_name_error(key, fields, f"{subject(where)}: {one_line(where, 200)}")
        key = next(name for name, each in fields.items() if each.required and name not in invalid.value)
        where = f"{prefix}{key}"
        return UsageError(
            f"{subject(where, invalid.path)}: {where} is missing, expected {describe_type(fields[key].type)}; add it"
        )
    where = f"{one_line(invalid.path, 200)}: " if invalid.path else ""
    advice = "correct it"
    if get_origin(non_null_hint) is Literal:
        close_values = difflib.get_close_matches(str(invalid.value), get_args(non_null_hint), 1, 0.6)
        advice = f'did you mean "{close_values[0]}"?' if close_values else "use one of them"
    expected = describe_type(non_null_hint if get_origin(non_null_hint) is Literal else invalid.hint)
    return UsageError(
        f"{subject(invalid.path)}: {where}expected {expected}, found {describe_value(invalid.value)}; {advice}"
    )


def _without_null(hint: Any) -> Any:
    """Return the type without None if it is a union; other types unchanged."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    (inner_type,) = (each for each in get_args(hint) if each is not type(None))
    return inner_type


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)
