"""Every fault is named by its oracle in its phase, and a run without one by none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import open_session, run_with_fault
from ckptx.errors import UsageError
from ckptx.robustness_suite.faults import FAULTS, find_fault
from ckptx.robustness_suite.oracles import ORACLE_ORDER
from ckptx.robustness_suite.phases import PHASES
from ckptx.robustness_suite.ranks import RetainedMemory
from ckptx.robustness_suite.session import Session
from ckptx.runtime.training.recipe_file import read_recipe

OTHER_LAYOUTS, RESUME = 5, 6
OF_RESUME = [name for name, each in FAULTS.items() if each.phase == RESUME]
OTHERS = [name for name, each in FAULTS.items() if each.phase != RESUME]
# Two runs that go on, from steps 2 and 3; past the end of an epoch, as the recipe itself.
SHORT = ("training.steps=4", "training.save_at=[2]")
SHALLOW = "model.config.num_hidden_layers=2"
Opened = tuple[Session, RetainedMemory]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with open_session(tmp_path_factory.mktemp("resumed") / "out", {}, settings=(*SHORT, SHALLOW)) as found:
        yield found


def test_each_is_meant_for_a_phase_and_an_oracle_that_there_is() -> None:
    for name, each in FAULTS.items():
        assert each.oracle in ORACLE_ORDER and each.phase in {phase.number for phase in PHASES}, name
        kinds = (each.injection.events, each.injection.request_changes, each.injection.file_changes)
        assert sum(map(bool, kinds)) == 1, name


@pytest.mark.parametrize("number", [3, RESUME])
def test_without_a_fault_nothing_is_named(session: Opened, number: int) -> None:
    row = run_with_fault(*session, None, number)
    assert row["failed"] == [], row["differing"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OF_RESUME)
def test_a_fault_of_a_resumed_run_is_named(session: Opened, name: str) -> None:
    row = run_with_fault(*session, name, RESUME)
    assert row["expected_check"] in row["failed"], row["differing"]
    first = min((each for each in row["failed"]), key=ORACLE_ORDER.index)
    assert first in (row["expected_check"], "finite"), "nothing that comes before is blamed"


@pytest.mark.slow  # `test_robustness_run.py` injects one of them by the command
@pytest.mark.parametrize("name", OTHERS)
def test_a_fault_of_another_phase_is_named(tmp_path: Path, name: str) -> None:
    settings = SHORT if FAULTS[name].phase == OTHER_LAYOUTS else (*SHORT, SHALLOW)  # one of them cuts four layers
    with open_session(tmp_path / "out", FAULTS[name].min_mesh, settings=settings) as (session, baseline):
        row = run_with_fault(session, baseline, name, FAULTS[name].phase)
        assert row["expected_check"] in row["failed"], row["differing"]


def test_a_fault_that_is_none_and_one_without_a_place() -> None:
    recipe = read_recipe("llama_tiny")
    with pytest.raises(UsageError, match="--inject rng_stal: no such fault; did you mean rng_stale"):
        find_fault("rng_stal", recipe)
    with pytest.raises(UsageError, match=r"tp 1 must be at least 2; use --set layout\.tp=2"):
        find_fault("replicas_drifted", recipe)
