"""Selection of the cases that `make test` runs; `make test-all` runs the others, too."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return the parameters of a test, all marked slow except `fast`; a tuple has one value per argument.

    Raises:
        ValueError: If one of `fast` is not a case, so that a renamed case is not dropped silently.
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
