"""Decode the JSON of a corrections file to rows; invalid rows are refused with the names of file and row.

This is written by hand although recipes are decoded with msgspec: `inspect` reads a file of corrections in 0.5 ms, and
importing msgspec takes 15 ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckptx.architecture.correction_rows import (
    AbsentRow,
    Corrections,
    DefaultsRow,
    ForwardRow,
    InputRow,
    LayerPartsRow,
    LayersRow,
    NoStacksRow,
    PlanRow,
    Sequence,
    TorchtitanRow,
    TowerRow,
    expanded,
)
from ckptx.architecture.expressions import Scope, attempt
from ckptx.layout.styles import STYLES

KINDS = ("images", "audio", "heard")  # of an `InputRow`

Read = Callable[[Any], Any]


class FaultyCorrectionError(ValueError):
    """A file of corrections is invalid; the message names file, section and row."""


class _NeededError(Exception):
    """The kind of value that was expected."""


class _Key(NamedTuple):
    """A key of a row in JSON.

    Attributes:
        attribute: Attribute of the row.
        read: Function that returns the value of the attribute.
        is_required: True if every row must have the key.
    """

    attribute: str
    read: Read
    is_required: bool = False


def decode(text: bytes | str, file: str) -> Corrections:
    """Return the rows of a file.

    Args:
        text: Contents of the file.
        file: Name of the file, for messages.

    Raises:
        FaultyCorrectionError: It is not JSON, or has an unknown section or key, or an invalid value.
    """
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except ValueError as error:
        raise FaultyCorrectionError(f"{file}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(rows, list) and rows for rows in found.values()):
        raise FaultyCorrectionError(f"{file}: expected an object of sections, each a list of at least one row")
    for section in sorted(found.keys() - _SECTIONS.keys()):
        raise FaultyCorrectionError(f'{file}: section "{section}" is unknown; use one of {", ".join(_SECTIONS)}')
    sections: dict[str, Any] = {}
    for section, rows in found.items():
        kind, keys = _SECTIONS[section]
        sections[section] = tuple(
            _row(row, kind, keys, f"{file}: {section}, row {number}") for number, row in enumerate(rows, 1)
        )
    _refuse_two(sections, file)
    return Corrections(**sections)


def _row(row: Any, kind: Callable[..., Any], keys: Mapping[str, _Key], place: str) -> Any:
    """Decode a row, or an object nested in one."""
    if not isinstance(row, dict):
        raise FaultyCorrectionError(f"{place}: expected an object, found {json.dumps(row)}")
    for key in sorted(row.keys() - keys.keys()):
        raise FaultyCorrectionError(f'{place}: key "{key}" is unknown; use one of {", ".join(keys)}')
    for key, known in keys.items():
        if known.is_required and key not in row:
            raise FaultyCorrectionError(f'{place}: has no "{key}"; add it')
    values = {}
    for key, value in row.items():
        try:
            values[keys[key].attribute] = keys[key].read(value)
        except _NeededError as needed:
            raise FaultyCorrectionError(f"{place}: {key} is {json.dumps(value)} and must be {needed}") from None
    return kind(**values)


def _refuse_two(sections: Mapping[str, Any], file: str) -> None:
    """Refuse rows that set the same value: the second would have no effect."""
    seen: set[tuple[str, ...]] = set()
    for section, rows in sections.items():
        for number, row in enumerate(rows, 1):
            for identity in _identities(section, row):
                if (section, *identity) in seen:
                    what = " of ".join(filter(None, identity))
                    raise FaultyCorrectionError(f"{file}: {section}, row {number}: an earlier row sets {what} already")
                seen.add((section, *identity))


def _identities(section: str, row: Any) -> list[tuple[str, ...]]:
    """Return the values that only one row of a section may set; plan rows may overlap, and the last one applies."""
    if isinstance(row, ForwardRow):
        names = [name for name in row._fields if name not in ("class_name", "reason") and getattr(row, name)]
        return [(name, row.class_name) for name in names]
    if isinstance(row, InputRow):
        return [(row.kind, row.class_name)]
    if isinstance(row, LayersRow | TorchtitanRow):
        return [(section, row.class_name)]
    return [(section,)] if isinstance(row, TowerRow | NoStacksRow) else []


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'key "{key}" appears twice in one object')
        found[key] = value
    return found


# ------------------------------------------------------------------------------------------------------ values of keys


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _NeededError("a string")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _NeededError("true or false")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _NeededError("an object")
    return value


def _one_of(*words: str) -> Read:
    def read(value: Any) -> str:
        if value not in words:
            raise _NeededError(f"one of {', '.join(words)}")
        return str(value)

    return read


def _expression(value: Any) -> str:
    try:
        attempt(_text(value), Scope({}))
    except ValueError as error:
        raise _NeededError(f"an expression ({error})") from error
    return str(value)


def _many(read: Read) -> Read:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise _NeededError("a list")
        return tuple(map(read, value))

    return read_all


def _pair(value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise _NeededError("pairs of a number of heads and their size")
    return _expression(value[0]), _expression(value[1])


def _patterns(value: Any) -> tuple[str, ...]:
    """Return FQNs; one string may have several, as alternatives in braces."""
    return tuple(each for text in _many(_text)(value) for each in expanded(text))


def _by_pattern(read: Read) -> Read:
    """Return a reader of values by FQN, likewise."""
    return lambda value: {name: read(each) for text, each in _object(value).items() for name in expanded(text)}


def _sequence(value: Any) -> Sequence:
    keys = {
        name: _Key(name, _text if name == "layers" else _many(_text), name == "layers") for name in Sequence._fields
    }
    try:
        found = _row(value, Sequence, keys, "sequence")
    except FaultyCorrectionError as error:
        raise _NeededError(f"a valid object ({error})") from None
    assert isinstance(found, Sequence)
    return found


# ------------------------------------------------------------------------------------------------------------- sections

_style = _one_of(*STYLES)
_REASON = {"reason": _Key("reason", _text, True)}
_CLASS = {"class": _Key("class_name", _text, True)}

_SECTIONS: Mapping[str, tuple[Callable[..., Any], Mapping[str, _Key]]] = {
    "plan": (
        PlanRow,
        {
            "modules": _Key("patterns", _text, True),
            "style": _Key("style", _style, True),
            "groups": _Key("groups", _many(_expression)),
            "heads": _Key("heads", _many(_pair)),
            "when": _Key("when", _expression),
            "note": _Key("note", _text),
            **_REASON,
        },
    ),
    "absent": (
        AbsentRow,
        {"modules": _Key("patterns", _text, True), "from_layer": _Key("first", _expression, True), **_REASON},
    ),
    "no_stacks": (NoStacksRow, _REASON),
    "defaults": (DefaultsRow, {"config": _Key("config", _object, True), **_REASON}),
    "forward": (
        ForwardRow,
        {
            **_CLASS,
            "head": _Key("head", _text),
            "sequence": _Key("sequence", _sequence),
            "runs": _Key("runs", _patterns),
            "styles": _Key("styles", _by_pattern(_style)),
            "reads_weight": _Key("reads_weight", _by_pattern(_text)),
            "reads_when": _Key("reads_when", _text),
            **_REASON,
        },
    ),
    "layers": (
        LayersRow,
        {
            **_CLASS,
            "language": _Key("language", _many(_text), True),
            "vision": _Key("vision", _many(_text)),
            "audio": _Key("audio", _many(_text)),
            **_REASON,
        },
    ),
    "layer_parts": (
        LayerPartsRow,
        {**{name: _Key(name, _many(_text)) for name in ("attention", "mlp", "norms")}, **_REASON},
    ),
    "inputs": (
        InputRow,
        {
            "kind": _Key("kind", _one_of(*KINDS), True),
            "form": _Key("form", _text, True),
            "settings": _Key("settings", _object),
            "class": _Key("class_name", _text),
            **_REASON,
        },
    ),
    "as_tower": (
        TowerRow,
        {"any_size": _Key("any_size", _flag), "class_token": _Key("class_token", _flag), **_REASON},
    ),
    "torchtitan": (TorchtitanRow, {**_CLASS, "form": _Key("form", _text, True), **_REASON}),
}
