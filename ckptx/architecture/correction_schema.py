"""Decode the JSON of a corrections file; the error for an invalid entry names file, section and entry.

This is written by hand although recipes are decoded with msgspec: `inspect` reads a file of corrections in 0.5 ms, and
importing msgspec takes 15 ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckptx.architecture.correction_types import (
    AbsentCorrection,
    Corrections,
    DefaultsCorrection,
    ForwardCorrection,
    InputCorrection,
    LayerPartsCorrection,
    LayersCorrection,
    NoStacksCorrection,
    NoStagesCorrection,
    PlanCorrection,
    SequenceParallelModules,
    TowerCorrection,
    TrainerNamingCorrection,
    expand_braces,
)
from ckptx.architecture.expressions import Scope, try_evaluate
from ckptx.layout.styles import STYLES

INPUT_KINDS = ("images", "audio", "encoder_audio")  # kinds of `InputCorrection`

ValueReader = Callable[[Any], Any]  # JSON value -> value of the attribute; raises `_InvalidValueError`


class InvalidCorrectionError(ValueError):
    """A file of corrections is invalid; the message names file, section and entry."""


class _InvalidValueError(Exception):
    """The value of a key is invalid; the message describes the values that are allowed, such as "a string"."""


class _KeySpec(NamedTuple):
    """A key of an entry in JSON.

    Attributes:
        attribute: Attribute of the correction (`correction_types`) that gets the value of the key.
        read: Function that checks and converts the value of the key.
        is_required: True if every entry must have the key.
    """

    attribute: str
    read: ValueReader
    is_required: bool = False


def decode_corrections(text: bytes | str, file: str) -> Corrections:
    """Return the corrections in a file.

    Args:
        text: Contents of the file.
        file: Name of the file, for messages.

    Raises:
        InvalidCorrectionError: The file is not JSON, has an unknown section or key, lacks a required key, has an
            invalid value, or sets a value twice.
    """
    try:
        document = json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
    except ValueError as error:
        raise InvalidCorrectionError(f"{file}: {error}") from error
    if not isinstance(document, dict) or not all(
        isinstance(entries, list) and entries for entries in document.values()
    ):
        raise InvalidCorrectionError(f"{file}: expected an object of sections, each a list of at least one entry")
    for section in sorted(document.keys() - _SECTIONS.keys()):
        raise InvalidCorrectionError(f'{file}: section "{section}" is unknown; use one of {", ".join(_SECTIONS)}')
    sections: dict[str, Any] = {}
    for section, entries in document.items():
        correction_type, keys = _SECTIONS[section]
        sections[section] = tuple(
            _decode_entry(entry, correction_type, keys, f"{file}: {section}, entry {number}")
            for number, entry in enumerate(entries, 1)
        )
    _refuse_conflicts(sections, file)
    return Corrections(**sections)


def _decode_entry(entry: Any, correction_type: Callable[..., Any], keys: Mapping[str, _KeySpec], location: str) -> Any:
    """Return the correction for an entry, or the named tuple for an object nested in an entry.

    Args:
        entry: JSON value.
        correction_type: Type of the named tuple.
        keys: Keys that the entry may have.
        location: Location of the entry, for messages.

    Raises:
        InvalidCorrectionError: The entry is not an object, lacks a required key, or has an unknown key or an invalid
            value.
    """
    if not isinstance(entry, dict):
        raise InvalidCorrectionError(f"{location}: expected an object, found {json.dumps(entry)}")
    for key in sorted(entry.keys() - keys.keys()):
        raise InvalidCorrectionError(f'{location}: key "{key}" is unknown; use one of {", ".join(keys)}')
    for key, key_spec in keys.items():
        if key_spec.is_required and key not in entry:
            raise InvalidCorrectionError(f'{location}: has no "{key}"; add it')
    values = {}
    for key, value in entry.items():
        try:
            values[keys[key].attribute] = keys[key].read(value)
        except _InvalidValueError as error:
            raise InvalidCorrectionError(f"{location}: {key} is {json.dumps(value)} and must be {error}") from None
    return correction_type(**values)


def _refuse_conflicts(sections: Mapping[str, Any], file: str) -> None:
    """Refuse corrections that set the same value: the second would have no effect."""
    seen: set[tuple[str, ...]] = set()
    for section, entries in sections.items():
        for number, entry in enumerate(entries, 1):
            for identity in _exclusive_values(section, entry):
                if (section, *identity) in seen:
                    value = " of ".join(filter(None, identity))
                    raise InvalidCorrectionError(
                        f"{file}: {section}, entry {number}: an earlier entry sets {value} already"
                    )
                seen.add((section, *identity))


def _exclusive_values(section: str, entry: Any) -> list[tuple[str, ...]]:
    """Return a key for each value that an entry sets and no other entry of its section may set.

    A key is the name of the value, and the class for which it is set, if any. There is none for entries of `plan`,
    which may overlap: the last one applies.
    """
    if isinstance(entry, ForwardCorrection):
        names = [name for name in entry._fields if name not in ("class_name", "reason") and getattr(entry, name)]
        return [(name, entry.class_name) for name in names]
    if isinstance(entry, InputCorrection):
        return [(entry.kind, entry.class_name)]
    if isinstance(entry, LayersCorrection | TrainerNamingCorrection):
        return [(section, entry.class_name)]
    return [(section,)] if isinstance(entry, TowerCorrection | NoStacksCorrection) else []


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'key "{key}" appears twice in one object')
        found[key] = value
    return found


# ------------------------------------------------------------------------------------------------------ values of keys


def _read_string(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _InvalidValueError("a string")
    return value


def _read_boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _InvalidValueError("true or false")
    return value


def _read_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _InvalidValueError("an object")
    return value


def _choice_reader(*choices: str) -> ValueReader:
    def read(value: Any) -> str:
        if value not in choices:
            raise _InvalidValueError(f"one of {', '.join(choices)}")
        return str(value)

    return read


def _read_expression(value: Any) -> str:
    try:
        try_evaluate(_read_string(value), Scope({}))
    except ValueError as error:
        raise _InvalidValueError(f"an expression ({error})") from error
    return str(value)


def _list_reader(read: ValueReader) -> ValueReader:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise _InvalidValueError("a list")
        return tuple(map(read, value))

    return read_all


def _read_pair(value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise _InvalidValueError("pairs of a number of heads and their size")
    return _read_expression(value[0]), _read_expression(value[1])


def _read_patterns(value: Any) -> tuple[str, ...]:
    """Return the FQNs (dotted module paths) in a list; one string may have several, as alternatives in braces."""
    return tuple(each for text in _list_reader(_read_string)(value) for each in expand_braces(text))


def _mapping_reader(read: ValueReader) -> ValueReader:
    """Return a reader of a mapping from FQNs to values; a key may have several FQNs, as alternatives in braces."""
    return lambda value: {
        name: read(each) for text, each in _read_object(value).items() for name in expand_braces(text)
    }


def _read_sequence_parallel(value: Any) -> SequenceParallelModules:
    keys = {
        name: _KeySpec(name, _read_string if name == "layers" else _list_reader(_read_string), name == "layers")
        for name in SequenceParallelModules._fields
    }
    try:
        found = _decode_entry(value, SequenceParallelModules, keys, "sequence")
    except InvalidCorrectionError as error:
        raise _InvalidValueError(f"a valid object ({error})") from None
    assert isinstance(found, SequenceParallelModules)
    return found


# ------------------------------------------------------------------------------------------------------------- sections

_read_style = _choice_reader(*STYLES)
_REASON_KEY = {"reason": _KeySpec("reason", _read_string, True)}
_CLASS_KEY = {"class": _KeySpec("class_name", _read_string, True)}
_NAMING_KEYS = {**_CLASS_KEY, "form": _KeySpec("form", _read_string, True), **_REASON_KEY}

_SECTIONS: Mapping[str, tuple[Callable[..., Any], Mapping[str, _KeySpec]]] = {
    "plan": (
        PlanCorrection,
        {
            "modules": _KeySpec("patterns", _read_string, True),
            "style": _KeySpec("style", _read_style, True),
            "groups": _KeySpec("groups", _list_reader(_read_expression)),
            "heads": _KeySpec("heads", _list_reader(_read_pair)),
            "when": _KeySpec("when", _read_expression),
            "note": _KeySpec("note", _read_string),
            **_REASON_KEY,
        },
    ),
    "absent": (
        AbsentCorrection,
        {
            "modules": _KeySpec("patterns", _read_string, True),
            "from_layer": _KeySpec("first_layer", _read_expression, True),
            **_REASON_KEY,
        },
    ),
    "no_stacks": (NoStacksCorrection, _REASON_KEY),
    "defaults": (DefaultsCorrection, {"config": _KeySpec("config", _read_object, True), **_REASON_KEY}),
    "no_stages": (NoStagesCorrection, {**_CLASS_KEY, **_REASON_KEY}),
    "forward": (
        ForwardCorrection,
        {
            **_CLASS_KEY,
            "head": _KeySpec("head", _read_string),
            "sequence": _KeySpec("sequence", _read_sequence_parallel),
            "runs": _KeySpec("runs", _read_patterns),
            "styles": _KeySpec("styles", _mapping_reader(_read_style)),
            "reads_weight": _KeySpec("reads_weight", _mapping_reader(_read_string)),
            "reads_when": _KeySpec("reads_when", _read_string),
            **_REASON_KEY,
        },
    ),
    "layers": (
        LayersCorrection,
        {
            **_CLASS_KEY,
            "language": _KeySpec("language", _list_reader(_read_string), True),
            "vision": _KeySpec("vision", _list_reader(_read_string)),
            "audio": _KeySpec("audio", _list_reader(_read_string)),
            **_REASON_KEY,
        },
    ),
    "layer_parts": (
        LayerPartsCorrection,
        {**{name: _KeySpec(name, _list_reader(_read_string)) for name in ("attention", "mlp", "norms")}, **_REASON_KEY},
    ),
    "inputs": (
        InputCorrection,
        {
            "kind": _KeySpec("kind", _choice_reader(*INPUT_KINDS), True),
            "form": _KeySpec("form", _read_string, True),
            "settings": _KeySpec("settings", _read_object),
            "class": _KeySpec("class_name", _read_string),
            **_REASON_KEY,
        },
    ),
    "as_tower": (
        TowerCorrection,
        {
            "any_size": _KeySpec("any_size", _read_boolean),
            "class_token": _KeySpec("class_token", _read_boolean),
            **_REASON_KEY,
        },
    ),
    "torchtitan": (TrainerNamingCorrection, _NAMING_KEYS),
    "megatron": (TrainerNamingCorrection, _NAMING_KEYS),
}
