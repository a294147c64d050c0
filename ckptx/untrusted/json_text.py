"""Parse untrusted JSON, and refuse what parsers could interpret differently or fail on."""

from __future__ import annotations

import json
from typing import Any

from ckptx.errors import InputError
from ckptx.untrusted.limits import MAX_JSON_DEPTH, MAX_JSON_NUMBER_BITS


def parse_json(text: str, subject: object, noun: str = "file") -> Any:
    """Parse a JSON text.

    Args:
        text: The text.
        subject: Path or other subject of error messages.
        noun: Noun for the text in error messages ("the file is corrupt").

    Raises:
        InputError: It is not JSON, has a duplicate key or a lone surrogate, is nested deeper than `MAX_JSON_DEPTH`, or
            has a number of more than `MAX_JSON_NUMBER_BITS` bits.
    """
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _reject_duplicate_keys(pairs, subject))
    except RecursionError as error:
        raise _nesting_error(subject) from error
    except json.JSONDecodeError as error:
        raise InputError(f"{subject}: not JSON ({error}); the {noun} is corrupt") from error
    except ValueError as error:  # Python refuses numbers of more than 4,300 digits
        raise _number_error(subject) from error
    _check_nesting(value, subject)
    if has_lone_surrogate(text):
        raise lone_surrogate_error(subject)
    return value


def has_lone_surrogate(text: str) -> bool:
    r"""Return True if a JSON text has a lone surrogate in a string, such as `"\ud800"`, which is invalid in UTF-8."""
    if "\\u" not in text:
        return False
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def lone_surrogate_error(subject: object) -> InputError:
    """Return the error for a string that cannot be encoded as UTF-8."""
    return InputError(f"{subject}: a string has a lone surrogate, which is invalid Unicode; correct that string")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]], subject: object) -> dict[str, Any]:
    keys: dict[str, Any] = dict(pairs)
    if len(keys) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # it is None
        raise InputError(f'{subject}: key "{duplicate}" appears twice; remove one')
    return keys


def _check_nesting(value: Any, subject: object) -> None:
    """Check depth and numbers level by level, without recursion."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        next_level: list[Any] = []
        for each in level:
            inside = each.values() if isinstance(each, dict) else each if isinstance(each, list) else (each,)
            for item in inside:
                kind = type(item)
                if kind is dict or kind is list:
                    next_level.append(item)
                elif kind is int and item.bit_length() > MAX_JSON_NUMBER_BITS:
                    raise _number_error(subject)
        if not next_level:
            return
        level = next_level
    raise _nesting_error(subject)


def _nesting_error(subject: object) -> InputError:
    return InputError(f"{subject}: JSON is nested deeper than {MAX_JSON_DEPTH} levels; the file is corrupt")


def _number_error(subject: object) -> InputError:
    return InputError(f"{subject}: JSON has a number of more than {MAX_JSON_NUMBER_BITS} bits; the file is corrupt")
