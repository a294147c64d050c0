"""Plain values become the blocks of a recipe: what each key may hold is what the type of its field says.

The dataclasses of `recipe` are the schema; nothing is written down twice. An error names the key with its path, what
was found and what was needed, and for an unknown key the one that is nearest.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ckptx.errors import UsageError
from ckptx.untrusted.printable import one_line

T = TypeVar("T")
Subject = Callable[..., str]  # of the paths of keys: the option that sets one of them, or the file

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}


def block_of(cls: Callable[..., T], values: Any, subject: Subject, path: str = "", **given: Any) -> T:
    """A block from a mapping.

    Args:
        cls: A dataclass.
        values: What YAML says.
        subject: Of errors, by the path of the key.
        path: Of the block, "" for the whole.
        **given: Fields that are no keys, with their values.

    Raises:
        UsageError: A key is unknown or missing, or its value is of another type than its field.
    """
    if not isinstance(values, Mapping):
        raise _wrong(values, "a mapping", subject, path)
    hints = _hints(cls)
    found = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        if key not in hints or key in given:
            raise unknown(key, [each for each in hints if each not in given], f"{subject(where)}: {_shown(where)}")
        found[key] = _value(hints[key], value, subject, where)
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]  # a dataclass
        has_default = each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING
        if each.name not in found and each.name not in given and not has_default:
            where = f"{path}.{each.name}" if path else each.name
            raise UsageError(
                f"{subject(where, path)}: {where}: found nothing, needed {described(hints[each.name])}; add it"
            )
    return cls(**found, **given)


def unknown(name: str, known: Collection[str], where: str, else_needed: str = "") -> UsageError:
    """The refusal of a name that nobody knows, with the one that is nearest, or what is needed: else all there are."""
    near = difflib.get_close_matches(str(name), known, 1, 0.6)
    needed = else_needed or f"needed one of {', '.join(known)}"
    offered = f'did you mean "{near[0]}"?' if near else needed
    return UsageError(f"{where}: is unknown; {offered}")


def described(hint: Any) -> str:
    """What a type asks for, in words."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(described(each) for each in get_args(hint))
    if origin is Literal:
        return ", ".join(map(str, get_args(hint)))
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    if _is_a(origin, Mapping):
        return "a mapping"
    if _is_a(origin, Sequence):
        return f"a list of {described(get_args(hint)[0])}" if not _is_plural(get_args(hint)[0]) else "a list"
    return _WORDS.get(hint, "a value")


@lru_cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls)


def _is_a(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_plural(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _value(hint: Any, value: Any, subject: Subject, path: str) -> Any:
    """A value of a type.

    Raises:
        UsageError: It is of another one.
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _one_of(hint, value, subject, path)
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            raise _no_choice(hint, value, subject, path)
        return value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return block_of(hint, value, subject, path)
    if _is_a(origin, Mapping):
        return _mapping(get_args(hint)[1], value, subject, path, hint)
    if _is_a(origin, Sequence):
        if not isinstance(value, list):
            raise _wrong(value, described(hint), subject, path)
        return tuple(_value(get_args(hint)[0], each, subject, f"{path}[{at}]") for at, each in enumerate(value))
    if hint is Any:
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if type(value) is not hint:  # a bool is an int for `isinstance`
        raise _wrong(value, described(hint), subject, path)
    return value


def _one_of(hint: Any, value: Any, subject: Subject, path: str) -> Any:
    """A value of a union with None, the only ones that there are."""
    (inner,) = (each for each in get_args(hint) if each is not type(None))
    if value is None:
        return None
    if dataclasses.is_dataclass(inner) or get_origin(inner) is not None:
        return _value(inner, value, subject, path)
    try:
        return _value(inner, value, subject, path)
    except UsageError:
        raise _wrong(value, described(hint), subject, path) from None


def _mapping(hint: Any, value: Any, subject: Subject, path: str, whole: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(value, described(whole), subject, path)
    return {key: _value(hint, each, subject, f"{path}.{key}") for key, each in value.items()}


def _no_choice(hint: Any, value: Any, subject: Subject, path: str) -> UsageError:
    choices = [str(each) for each in get_args(hint)]
    near = difflib.get_close_matches(str(value), choices, 1, 0.6) if isinstance(value, str) else []
    offered = f'; did you mean "{near[0]}"?' if near else "; give one of them"
    return UsageError(f"{subject(path)}: {_shown(path)}: found {found_as(value)}, needed {', '.join(choices)}{offered}")


def _wrong(value: Any, needed: str, subject: Subject, path: str) -> UsageError:
    where = f"{_shown(path)}: " if path else ""
    return UsageError(f"{subject(path)}: {where}found {found_as(value)}, needed {needed}; correct it")


def found_as(value: Any) -> str:
    """A value for an error: a text in quotes, what is large by its kind."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'the text "{one_line(value, 80)}"' if isinstance(value, str) else one_line(str(value), 80)


def _shown(path: str) -> str:
    return one_line(path, 200)
