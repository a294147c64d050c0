"""Text for a person: nothing that a name holds can move the cursor, start a line, or turn the text around.

A name in a checkpoint is anybody's. On a terminal an escape sequence rewrites what was said before, and a mark of
direction shows letters in another order than they are in; so both are shown as what they are. Documents in JSON keep
the names, as JSON has escapes of its own.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Category Cc; U+061C, U+200E/F, U+202A-E, U+2066-9 (direction); U+200B-D, U+2060, U+FEFF (no width); U+2028/9 (lines);
# U+00AD (soft hyphen); tags, which are invisible; half surrogates, which have no bytes in UTF-8.
_ACTIVE = (
    "\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_IN_LINE = re.compile(f"[\x00-\x1f\x7f-\x9f{_ACTIVE}]")
_IN_TEXT = re.compile(f"[\x00-\x09\x0b-\x1f\x7f-\x9f{_ACTIVE}]")

_LONGEST_LINE = 4000  # a header of 100 MB can be all one name


def one_line(text: str, longest: int = _LONGEST_LINE) -> str:
    r"""`text` as one line: every active character as `\n`, `\x1b`, `\u202e`; a long one is cut (not at 0)."""
    line = _IN_LINE.sub(_escaped, text)
    if not longest or len(line) <= longest:
        return line
    half = longest // 2
    return f"{line[:half]} [{len(line) - 2 * half:,} characters left out] {line[-half:]}"


def lines(text: str) -> str:
    """The same for a text whose newlines are ours: use it on what was put together from `one_line` names."""
    return _IN_TEXT.sub(_escaped, text)


def shown(value: T, longest: int = _LONGEST_LINE) -> T:
    """A value with every text in it as one line: texts, lists, tuples, dicts, dataclasses; what needs no change as is.

    What puts lines together from a report can then not be told from names where a line ends.
    """
    made: Any = value
    if isinstance(value, str):
        made = one_line(value, longest)
    elif isinstance(value, dict):
        changed = {shown(key, longest): shown(below, longest) for key, below in value.items()}
        made = changed if len(changed) == len(value) else value | changed
    elif isinstance(value, list):
        made = [shown(each, longest) for each in value]
    elif isinstance(value, tuple):
        parts = [shown(each, longest) for each in value]
        made = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: shown(getattr(value, field.name), longest) for field in dataclasses.fields(value)}
        made = dataclasses.replace(value, **fields)
    return cast(T, made)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "backslashreplace").decode("ascii")
