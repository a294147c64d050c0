"""Errors about untrusted JSON: each names its subject and the kind of text."""

from __future__ import annotations

import pytest

from ckptx.errors import InputError
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import MAX_JSON_DEPTH, MAX_JSON_NUMBER_BITS

CORRUPT = {
    "no JSON": "{",
    "too deep": "[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1),
    "too deep for the parser": "[" * 100_000 + "]" * 100_000,
    "a long number": f"[{1 << MAX_JSON_NUMBER_BITS}]",
    "a number too long for Python": f"[{'9' * 5000}]",
}


@pytest.mark.parametrize("noun", ["file", "line", "index"])
@pytest.mark.parametrize("text", CORRUPT.values(), ids=CORRUPT)
def test_errors_name_the_kind_of_text(text: str, noun: str) -> None:
    with pytest.raises(InputError, match=rf"^somewhere: .*; correct the {noun}, or restore it from a copy$"):
        parse_json(text, "somewhere", noun)


def test_a_caller_may_add_the_next_step() -> None:
    with pytest.raises(InputError, match=r"^somewhere: not JSON \([^;]*\)$"):
        parse_json("{", "somewhere", noun="")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r'{"a": {"x": [1, "ok\u00e9"]}, "b": ["one\ud800two"]}', r'"one\ud800two"'),
        (r'{"a": 1, "k\udfff": 1}', r'"k\udfff"'),
        (r'["%s\ud800"]' % ("x" * 500), "characters omitted"),
    ],
)
def test_the_string_with_a_lone_surrogate_is_quoted(text: str, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(text, "somewhere")
    message = str(caught.value)
    assert message.startswith("somewhere: the string ") and shown in message and len(message) < 300


def test_what_python_writes_for_infinite_numbers_is_accepted() -> None:
    assert parse_json("[Infinity, -Infinity]", "somewhere") == [float("inf"), float("-inf")]
    (number,) = parse_json("[NaN]", "somewhere")
    assert number != number
