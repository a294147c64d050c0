"""A forecast is what real tensors take in the same step: torch's profiler is asked.

What is left is what the generator of a CPU saves for each layer that computes again (5,056 bytes), of which a GPU has
sixteen. `benchmarks/forecast.py` has the table of every model.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.parallel.pipeline.schedules import SCHEDULES, can_split_backward
from tests.support.measured_steps import (
    CONFIGS,
    DEEP_CONFIGS,
    LAYOUTS,
    MODES,
    PIPELINE_LAYOUTS,
    MeasuredMemory,
    forecast_in_this_process,
    measure_in_this_process,
    measure_stages,
    task_of,
    write_config,
)
from tests.support.pool import GlooPool
from tests.support.slow import slow_but

_CLOSE = 1e-3
_CLOSE_CUT = 0.01  # the less a rank has, the more it is that kernels take for themselves
_CLOSE_MIXED = 0.03


def peak_of(forecast: RankForecast) -> int:
    """The most bytes of a forecast."""
    return sum(forecast.timeline.peak_segment.peak_by_kind)


def hold(forecast: RankForecast, measured: MeasuredMemory, close: float = _CLOSE) -> None:
    """A forecast and what was measured say the same of the peak, and of what lives between steps."""
    assert peak_of(forecast) == pytest.approx(measured.peak, rel=close)
    assert sum(forecast.timeline.between_steps_by_kind) == pytest.approx(measured.before, rel=close)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of configs."""
    directory = tmp_path_factory.mktemp("configs")
    return {model: write_config(model, directory) for model in (*CONFIGS, *DEEP_CONFIGS)}


@pytest.mark.parametrize("mode", slow_but(MODES, ("none", "full")))
def test_a_model_in_one_piece(mode: str, sources: dict[str, Path]) -> None:
    task = task_of(sources["llama"], "dp1", mode)
    hold(forecast_in_this_process(task)[0], measure_in_this_process(task))


def test_what_is_measured_tells_modes_apart(sources: dict[str, Path]) -> None:
    """Else forecasts that say the same of all of them would be held to be right."""
    none, full = (
        peak_of(forecast_in_this_process(task_of(sources["llama"], "dp1", mode))[0]) for mode in ("none", "full")
    )
    assert full < 0.95 * none


@pytest.mark.parametrize(("model", "layout", "mode"), slow_but(
    [(model, layout, mode) for model in CONFIGS for layout in ("tp2", *LAYOUTS) for mode in MODES],
    [("llama", "tp2", "none")],
))  # fmt: skip
def test_ranks(model: str, layout: str, mode: str, sources: dict[str, Path], pool: GlooPool) -> None:
    task = task_of(sources[model], layout, mode)
    for forecast, measured in zip(forecast_in_this_process(task), measure_stages(pool, task), strict=True):
        hold(forecast, measured, _CLOSE_CUT)


@pytest.mark.parametrize(("model", "layout", "schedule", "microbatches", "mode"), slow_but(
    [
        (model, layout, schedule, microbatches, mode)
        for model in DEEP_CONFIGS
        for layout in PIPELINE_LAYOUTS
        for schedule in SCHEDULES
        for microbatches in (4, 8)
        for mode in ("none", "full")
        if (layout, schedule, microbatches) != ("pp4", "dualpipev", 4)  # which requires 8 microbatches
    ],
    [
        ("llama-8-layers", "pp2", "interleaved1f1b", 4, "none"),
        ("llama-8-layers", "pp2", "zbvzerobubble", 4, "none"),
    ],
))  # fmt: skip
def test_schedules(
    model: str, layout: str, schedule: str, microbatches: int, mode: str, sources: dict[str, Path], pool: GlooPool
) -> None:
    """A schedule keeps what it sends: each of these tensors is more than the tolerance."""
    if SCHEDULES[schedule].splits_backward and not can_split_backward():
        pytest.skip("this torch cannot run schedules that split the backward pass")
    task = task_of(sources[model], layout, mode, schedule=schedule, microbatches=microbatches)
    for forecast, measured in zip(forecast_in_this_process(task), measure_stages(pool, task), strict=True):
        hold(forecast, measured, _CLOSE if mode == "none" else _CLOSE_CUT)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("layout", ["dp4", "tp2 x dp2"])
def test_mixed_precision(layout: str, mode: str, sources: dict[str, Path], pool: GlooPool) -> None:
    task = task_of(sources["llama"], layout, mode, param_dtype="bf16")
    hold(forecast_in_this_process(task)[0], measure_stages(pool, task)[0], _CLOSE_MIXED)
