"""Escape untrusted text for terminals: no name can move the cursor, start a line, or reverse the text.

A name in a checkpoint is untrusted. On a terminal, an escape sequence can overwrite earlier output, and a direction
mark shows letters in another order; so such active characters are printed as backslash escapes. JSON documents keep the
names, because JSON has its own escapes.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar, cast

T = TypeVar("T")

# U+061C, U+200E/F, U+202A-E, U+2066-9 (direction); U+180E, U+200B-D, U+2060, U+FEFF (no width); U+2028/9 (lines);
# U+00AD (soft hyphen); U+2061-5, U+206A-F, U+FFF9-B (invisible format characters); tags, which are invisible; lone
# surrogates, which are invalid in UTF-8. The patterns below add control characters (category Cc).
_ACTIVE_CHARACTERS = (
    "\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_ESCAPED_IN_LINE = re.compile(f"[\x00-\x1f\x7f-\x9f{_ACTIVE_CHARACTERS}]")
_ESCAPED_IN_TEXT = re.compile(f"[\x00-\x09\x0b-\x1f\x7f-\x9f{_ACTIVE_CHARACTERS}]")

_MAX_LINE_LENGTH = 4000  # a header of 100 MB can be a single name


def one_line(text: str, max_length: int = _MAX_LINE_LENGTH) -> str:
    r"""Return text as one line, with active characters escaped (`\n`, `\x1b`, `\u202e`), and shortened.

    `max_length` is the approximate length of the result in characters; 0 means no limit.
    """
    line = _ESCAPED_IN_LINE.sub(_escape_match, text)
    if not max_length or len(line) <= max_length:
        return line
    half = max_length // 2
    return f"{line[:half]} [{len(line) - 2 * half:,} characters omitted] {line[-half:]}"


def escape_lines(text: str) -> str:
    """Return a text with active characters escaped except newlines, for text in which names went through `one_line`."""
    return _ESCAPED_IN_TEXT.sub(_escape_match, text)


def escape_strings(value: T, max_length: int = _MAX_LINE_LENGTH) -> T:
    """Return a value with `one_line` applied to every string in it: in lists, tuples, dicts and dataclasses.

    Lines that are composed of the fields of a report then cannot be broken by names with newlines. If two keys of a
    dict become equal, a number is appended to the later one.
    """
    result: Any = value
    if isinstance(value, str):
        result = one_line(value, max_length)
    elif isinstance(value, dict):
        result = {}
        for key, item in value.items():
            escaped_key = unique_key = escape_strings(key, max_length)
            number = 2
            while unique_key in result:
                unique_key, number = f"{escaped_key} ({number})", number + 1
            result[unique_key] = escape_strings(item, max_length)
    elif isinstance(value, list):
        result = [escape_strings(each, max_length) for each in value]
    elif isinstance(value, tuple):
        parts = [escape_strings(each, max_length) for each in value]
        result = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: escape_strings(getattr(value, field.name), max_length) for field in dataclasses.fields(value)
        }
        result = dataclasses.replace(value, **fields)
    return cast(T, result)


def _escape_match(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "backslashreplace").decode("ascii")
