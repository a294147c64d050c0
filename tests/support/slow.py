"""Which of many cases `make test` runs, and which wait for `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Parameters of a test: `fast` ones as they are, the others marked slow; a tuple is one value for each argument.

    Raises:
        ValueError: One of `fast` is no case, so that a case that is renamed does not leave the fast set in silence.
    """
    cases = list(cases)
    lost = [each for each in fast if each not in cases]
    if lost:
        raise ValueError(f"no such case: {lost[0]!r}")
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        case if case in fast else pytest.param(*each, marks=pytest.mark.slow)
        for case, each in zip(cases, values, strict=True)
    ]
