"""Expressions of a checkpoint match as those of Python do, and in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.formats.deepspeed.name_patterns import NamePattern, NamePatterns, UnsupportedPattern


@given(st.text("ab.1", max_size=12))
@settings(max_examples=100, deadline=None)
def test_patterns_match_as_those_of_python(name: str) -> None:
    expressions = (
        r"^a\.b$", "a.b", r"\d+.a", "[ab]+1?$", "(a|b.)b", "(?:a|)1", ".*1.*b", "^$", "", "a|b$", r"[^a]\w", "^ab*",
    )  # fmt: skip
    for expression in expressions:
        assert NamePattern(expression).matches(name) == bool(re.match(expression, name)), expression
    assert NamePatterns(expressions).matching(name) == sorted(
        (each for each in expressions if re.match(each, name)), key=lambda each: each != r"^a\.b$"
    )


def test_patterns_take_bounded_time() -> None:
    begin = time.monotonic()
    assert not NamePattern(".*" * 500 + "b").matches("a" * 512)
    assert NamePattern("(a?|.*)" * 100 + "$").matches("a" * 512)
    assert time.monotonic() - begin < 20
    for expression in ("(a+)+b", "a{2}", r"(a)\1", "(?=a)", "(", "a)", "*", "[z-a]", "a" * 2000, "(" * 9 + ")" * 9):
        with pytest.raises(UnsupportedPattern):
            NamePattern(expression)
