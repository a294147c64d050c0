"""Derived stage boundaries equal those that are discovered by running a small model."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from ckptx.runtime.forecasting.run import find_task_boundaries
from ckptx.runtime.forecasting.short_boundaries import derive_boundaries
from ckptx.runtime.forecasting.short_models import ShorteningPlan, plan_shortening, shorten
from ckptx.runtime.forecasting.task import ForecastTask
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from tests.support.measured_steps import CONFIGS, task_of
from tests.support.slow import slow_but

_LAYERS = 40


def plan_of(model: str, directory: Path) -> tuple[ForecastTask, ShorteningPlan]:
    """Return a task with two pipeline stages and many layers, and its plan."""
    config = copy.deepcopy(CONFIGS[model])
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = _LAYERS
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][number % 2] for number in range(_LAYERS)]
    (directory / "config.json").write_text(json.dumps(config))
    task = task_of(directory, "pp2", "none")
    plan = plan_shortening(task, 3)
    assert plan is not None
    return task, plan


def discover(task: ForecastTask, plan: ShorteningPlan, extra: int, directory: Path) -> StageBoundaries:
    """Return the discovered boundaries of the model with `extra` more periods of layers."""
    short = shorten(task, plan, [extra] * len(plan.axes), directory / str(extra))
    assert short is not None
    boundaries = find_task_boundaries(short)
    assert boundaries is not None
    return boundaries


@pytest.mark.parametrize("model", slow_but(["llama", "gemma3", "qwen3-moe", "gpt2"], ["gemma3"]))
def test_derived_boundaries_equal_discovered_ones(model: str, tmp_path: Path) -> None:
    task, plan = plan_of(model, tmp_path)
    smallest, larger = (discover(task, plan, extra, tmp_path) for extra in (0, 2))
    none, two = [0] * len(plan.axes), [2] * len(plan.axes)
    assert derive_boundaries(smallest, plan, none, two) == larger
    assert derive_boundaries(larger, plan, two, none) == smallest


def test_a_slot_in_a_later_layer_is_not_derived(tmp_path: Path) -> None:
    task, plan = plan_of("llama", tmp_path)
    smallest = discover(task, plan, 0, tmp_path)
    (slot,) = smallest.slots[1]
    number = int(slot.module.rpartition(".")[2])
    later = slot._replace(module=f"model.layers.{number + 1}")
    changed = dataclasses.replace(smallest, slots=((), (slot, later)))
    assert derive_boundaries(changed, plan, [0], [1]) is None
    changed = dataclasses.replace(smallest, slots_by_kind={frozenset({"input_ids"}): ((), (later,))})
    assert derive_boundaries(changed, plan, [0], [1]) is None
