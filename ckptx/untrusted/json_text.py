"""Parse untrusted JSON, and refuse what parsers could interpret differently or fail on.

NaN and Infinity are accepted, although they are not JSON, because Python writes them: configs with an infinite limit
exist.
"""

from __future__ import annotations

import json
from typing import Any

from ckptx.errors import InputError
from ckptx.untrusted.limits import MAX_JSON_DEPTH, MAX_JSON_NUMBER_BITS
from ckptx.untrusted.printable import one_line

_MAX_SHOWN = 120  # characters of a string in an error message


def parse_json(text: str, subject: object, noun: str = "file") -> Any:
    """Parse a JSON string.

    Args:
        text: JSON string.
        subject: Path or other subject of error messages.
        noun: Noun that error messages use for the JSON string, as in "correct the file"; empty for messages without a
            next step, to which the caller adds its own.

    Raises:
        InputError: It is not JSON, apart from NaN and Infinity, has a duplicate key or a lone surrogate, is nested
            deeper than `MAX_JSON_DEPTH`, or has a number of more than `MAX_JSON_NUMBER_BITS` bits.
    """
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _reject_duplicate_keys(pairs, subject))
    except RecursionError as error:
        raise nesting_error(subject, noun) from error
    except json.JSONDecodeError as error:
        raise InputError(f"{subject}: not JSON ({error}){_next_step(noun)}") from error
    except ValueError as error:  # Python refuses numbers of more than 4,300 digits
        raise number_error(subject, noun) from error
    _check_values(value, subject, noun)
    refuse_lone_surrogates(text, subject)
    return value


def refuse_malformed_json(text: str, subject: object) -> None:
    """Check the syntax of a JSON file that is only copied; keys and numbers that `parse_json` refuses are allowed.

    Objects are not kept, which takes half the memory and time of `parse_json`.

    Raises:
        InputError: It is not JSON, for example because it is truncated, or is nested too deeply to be read.
    """
    try:
        json.loads(text, object_pairs_hook=lambda pairs: None)
    except RecursionError as error:
        raise nesting_error(subject, "file") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{subject}: not JSON ({error}); the file is corrupt, download it again or remove it"
        ) from error
    except ValueError:  # a number with more digits than Python converts, which other parsers may accept
        return


def refuse_lone_surrogates(text: str, subject: object) -> None:
    r"""Refuse JSON with an escaped lone surrogate, such as `"\ud800"`, which is invalid in UTF-8.

    Args:
        text: Valid JSON.
        subject: Path or other subject of the error message.

    Raises:
        InputError: A key or value has a lone surrogate; the message quotes the first such string.
    """
    if "\\u" not in text:
        return
    value = json.loads(text)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown = one_line(json.dumps(_first_invalid_string(value)), _MAX_SHOWN)
        raise InputError(
            f"{subject}: the string {shown} has a lone surrogate, which is invalid Unicode; correct that string"
        ) from error


def _first_invalid_string(value: Any) -> str:
    """Return the first key or value that cannot be encoded as UTF-8; there must be one."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                return item
        elif isinstance(item, dict):
            pending += [each for pair in reversed(item.items()) for each in reversed(pair)]
        elif isinstance(item, list):
            pending += reversed(item)
    raise AssertionError("every string can be encoded")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]], subject: object) -> dict[str, Any]:
    keys: dict[str, Any] = dict(pairs)
    if len(keys) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # it is None
        raise InputError(f'{subject}: key "{duplicate}" appears twice; remove one')
    return keys


def _check_values(value: Any, subject: object, noun: str) -> None:
    """Check depth and numbers level by level, without recursion."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        next_level: list[Any] = []
        for each in level:
            children = each.values() if isinstance(each, dict) else each if isinstance(each, list) else (each,)
            for item in children:
                kind = type(item)
                if kind is dict or kind is list:
                    next_level.append(item)
                elif kind is int and item.bit_length() > MAX_JSON_NUMBER_BITS:
                    raise number_error(subject, noun)
        if not next_level:
            return
        level = next_level
    raise nesting_error(subject, noun)


def nesting_error(subject: object, noun: str) -> InputError:
    """Return the error for JSON that is nested too deep; `subject` and `noun` as in `parse_json`."""
    return InputError(f"{subject}: JSON is nested deeper than {MAX_JSON_DEPTH} levels{_next_step(noun)}")


def number_error(subject: object, noun: str) -> InputError:
    """Return the error for JSON with a number of too many bits; `subject` and `noun` as in `parse_json`."""
    return InputError(f"{subject}: JSON has a number of more than {MAX_JSON_NUMBER_BITS} bits{_next_step(noun)}")


def _next_step(noun: str) -> str:
    return f"; correct the {noun}, or restore it from a copy" if noun else ""
