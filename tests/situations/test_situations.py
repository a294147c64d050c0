"""Every situation of the table ends as it must."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.situations import load_all
from tests.situations.box import SITUATIONS, Runner, Situation, play

load_all()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One for all situations."""
    running = Runner()
    yield running
    running.close()


def cases() -> Iterator[Any]:
    """Every eighth is fast; `make test-all` and tools/situations.py play all."""
    for number, each in enumerate(SITUATIONS):
        marks = [pytest.mark.slow] if number % 8 else []
        yield pytest.param(each, id=f"{each.area}: {each.name}", marks=marks)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("situation", cases())
def test_it_ends_as_it_must(situation: Situation, tmp_path: Path, runner: Runner) -> None:
    outcome = play(situation, tmp_path, runner)
    assert outcome.wrong == [], outcome.line


def test_names_are_unique() -> None:
    names = [(each.area, each.name) for each in SITUATIONS]
    assert len(names) == len(set(names))
