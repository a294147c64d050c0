"""A search for layouts that fit: which are looked at, which is taken, and that what it says is what a forecast says."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import ckptx
from ckptx.api.forecast import forecast
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.options.forecast import ForecastOptions
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.runtime.forecasting import search as searching
from ckptx.runtime.forecasting.counting import OpCounts
from ckptx.runtime.forecasting.larger_mesh import find_larger_mesh
from ckptx.runtime.forecasting.ranks import _RankForecaster, forecast_ranks
from ckptx.runtime.forecasting.reporting import list_assumptions
from ckptx.runtime.forecasting.search import (
    Candidate,
    FixedDims,
    SearchSpace,
    count_distinct_microbatches,
    has_steady_passes,
    list_meshes,
    min_peak_bytes,
    possible_microbatches,
    search,
    with_layout,
)
from ckptx.runtime.forecasting.task import ForecastTask, task_from_options
from ckptx.runtime.memory.reserve import reserve_bytes
from tests.support.measured_steps import CONFIGS
from tests.support.slow import slow_but

GIB = 2**30


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search")
    (path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    return path


def step(source: Path, rows: int, seq: int = 64) -> ForecastTask:
    """A step of so many rows."""
    return task_from_options(source, ForecastOptions(source, batch=rows, seq=seq, microbatches=1, dtype="bf16"), 1)


@pytest.mark.parametrize(("tp", "is_named"), [(1, False), (2, True), (None, True)])
def test_assumptions_name_tp_only_with_tp(source: Path, tp: int | None, is_named: bool) -> None:
    text = "\n".join(list_assumptions(step(source, 8), tp, (), False))
    assert ("under TP" in text) is is_named
    assert "computed in float32" in text and "foreach=False" in text


@pytest.mark.parametrize(("dp_shard", "microbatches", "is_named"), [(1, 2, False), (2, 1, False), (2, 2, True)])
def test_assumptions_name_unreduced_gradients_only_where_they_exist(
    source: Path, dp_shard: int, microbatches: int, is_named: bool
) -> None:
    options = ForecastOptions(source, batch=4, seq=64, microbatches=microbatches, dp_shard=dp_shard)
    text = "\n".join(list_assumptions(task_from_options(source, options, 1), 1, (), False))
    assert ("after the last microbatch" in text) is is_named


@pytest.mark.parametrize(
    ("images", "missing", "line"),
    [
        (0, ("images",), "no images in the input, so that their towers are not called; see --images"),
        (0, ("audio",), "no audio in the input, so that their towers are not called"),
        (2, ("images", "audio"), "no audio in the input, so that their towers are not called"),
        (2, ("images",), None),
        (0, (), None),
    ],
)
def test_assumptions_name_the_inputs_that_are_missing(
    source: Path, images: int, missing: tuple[str, ...], line: str | None
) -> None:
    task = replace(step(source, 8), images=images)
    assert [each for each in list_assumptions(task, 1, missing, False) if "towers" in each] == [line] * (
        line is not None
    )


# ------------------------------------------------------------------------------------------------- what is looked at


@pytest.mark.parametrize("gpus", [1, 6, 8, 64])
def test_every_mesh_is_looked_at_once(gpus: int) -> None:
    found = list_meshes(gpus, FixedDims())
    assert all(each.world_size == gpus and each.tp <= 8 for each in found)
    expected = {(tp, pp) for tp in range(1, 9) for pp in range(1, gpus + 1) if gpus % tp == 0 and gpus // tp % pp == 0}
    assert Counter((each.tp, each.pp) for each in found) == Counter(expected)


def test_what_is_given_is_not_searched() -> None:
    assert {each.tp for each in list_meshes(32, FixedDims(tp=16))} == {16}
    assert list_meshes(16, FixedDims(tp=2, pp=2, dp_shard=2, dp_replicate=2)) == [ParallelDims(2, 2, 2, 2)]
    with pytest.raises(UsageError, match="--gpus 8: no mesh of this many GPUs"):
        list_meshes(8, FixedDims(tp=3))


def test_microbatches_share_the_rows_of_a_step(source: Path) -> None:
    task = step(source, 8)
    assert list(possible_microbatches(task, ParallelDims(), FixedDims())) == [8, 4, 2, 1]
    assert list(possible_microbatches(task, ParallelDims(pp=4), FixedDims())) == [8, 4]
    assert list(possible_microbatches(task, ParallelDims(dp_shard=4), FixedDims())) == [2, 1]
    assert list(possible_microbatches(task, ParallelDims(), FixedDims(microbatches=2))) == [2]
    assert list(possible_microbatches(task, ParallelDims(dp_shard=3), FixedDims())) == []


def test_every_layout_does_the_same_step(source: Path) -> None:
    task = step(source, 8)
    for dims in list_meshes(8, FixedDims()):
        for count in possible_microbatches(task, dims, FixedDims()):
            laid = with_layout(task, dims, "full", count)
            assert laid.recipe.training.global_batch == 8
            assert (laid.microbatches, laid.microbatch * count * dims.dp) == (count, 8)


@pytest.mark.slow
def test_no_rank_takes_less_than_what_is_passed_over_for(source: Path) -> None:
    for dims in (ParallelDims(), ParallelDims(tp=2), ParallelDims(dp_shard=2), ParallelDims(pp=2)):
        task = with_layout(step(source, 4), dims, "full", 4 // dims.dp)
        ranks = forecast_ranks(task)
        assert min_peak_bytes(task, ranks[0].parameter_count, dims) < max(each.peak for each in ranks)


# ------------------------------------------------------------------------------------------------- what comes of few


@pytest.mark.parametrize(
    "dims", slow_but([ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(pp=2)], [ParallelDims(pp=2)])
)
def test_few_microbatches_say_what_many_take(dims: ParallelDims, source: Path) -> None:
    """Peak, and what is computed and sent in the step."""
    task = with_layout(step(source, 16), dims, "none", 8)
    count = count_distinct_microbatches(task)
    assert count < task.microbatches
    few = forecast_ranks(searching.with_microbatches(task, count), peak_ranks_only=True)
    assert all(map(has_steady_passes, few))
    many = forecast_ranks(task)
    found = searching.make_candidate(task, few, task.microbatches - count)
    assert found.peak == pytest.approx(max(each.peak for each in many), rel=1e-4)
    assert dims.pp == 1 or found.peak > 1.001 * max(each.peak for each in few)
    assert found.flops == max(each.op_counts.flops for each in many)
    assert sum(found.sent_bytes.values()) == max(sum(each.op_counts.sent_bytes.values()) for each in many)


def test_all_microbatches_run_where_they_take_more_memory(source: Path) -> None:
    task = with_layout(step(source, 16), ParallelDims(pp=2), "none", 16)
    assert count_distinct_microbatches(task) == 5
    layout = structs.replace(task.recipe.layout, schedule="gpipe")
    assert (
        count_distinct_microbatches(dataclasses.replace(task, recipe=structs.replace(task.recipe, layout=layout))) == 16
    )


def test_turns_that_differ_are_not_steady(source: Path) -> None:
    (rank,) = forecast_ranks(with_layout(step(source, 4), ParallelDims(), "none", 4))
    assert has_steady_passes(rank)
    turns = {**rank.op_counts_by_pass, ("backward", 2): OpCounts(flops=1)}
    assert not has_steady_passes(dataclasses.replace(rank, op_counts_by_pass=turns))
    assert not has_steady_passes(dataclasses.replace(rank, op_counts_by_pass={}))


def test_the_first_is_what_wastes_least(source: Path) -> None:
    task = step(source, 8)
    plain = with_layout(task, ParallelDims(dp_shard=8), "none", 1)
    piped = with_layout(task, ParallelDims(pp=8), "none", 8)
    kept = Candidate(plain, 9 * GIB, 1, 100, 0, {"all-gather": 10})
    again = Candidate(plain, 1 * GIB, 1, 130, 30, {"all-gather": 1})
    chatty = Candidate(plain, 1 * GIB, 1, 100, 0, {"all-gather": 11})
    waiting = Candidate(piped, 1 * GIB, 1, 100, 0, {"send": 1})
    assert waiting.bubble_fraction == pytest.approx(7 / 15)
    assert sorted([waiting, again, chatty, kept], key=lambda each: each.sort_key) == [kept, chatty, again, waiting]


# ------------------------------------------------------------------------------------------------- a whole search


def test_what_is_found_is_what_a_forecast_says(source: Path) -> None:
    """Memory that not all layouts fit: those are told with what they take; the best is a forecast of its own."""
    one = forecast(source, tp=2, batch=2, microbatches=2, seq=64, dtype="bf16")
    assert isinstance(one, ForecastReport)
    peak = one.by_pipeline_rank[0]["peak"]
    memory = peak + reserve_bytes(peak)
    found = ckptx.forecast(source, search=True, gpus=2, gpu_memory=memory, seq=64, dtype="bf16")
    assert isinstance(found, SearchReport)
    assert found.ok and found.parameters == one.parameters
    best = found.layouts[0]
    assert best["is_fully_evaluated"] and best["layout"]["tp"] == 2 and best["microbatches"] == 2
    assert (best["peak"], best["flops"], best["sent_bytes"]) == (
        peak, one.by_pipeline_rank[0]["flops"], one.by_pipeline_rank[0]["sent_bytes"],
    )  # fmt: skip
    assert all(each["peak"] + each["reserved"] <= memory for each in found.layouts)
    seen = [each["layout"] for each in (*found.layouts, *found.layouts_too_large, *found.unsupported_layouts)]
    assert sorted(tuple(each.values()) for each in seen) == [(1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)]
    assert all(each["peak"] + reserve_bytes(each["peak"]) > memory for each in found.layouts_too_large)


@pytest.mark.parametrize("memory", ["80GB", "1.6GiB", "1MiB"])
def test_the_other_precision_is_a_forecast_of_the_same_layout(memory: str, source: Path) -> None:
    """80GB: all layouts fit. 1.6GiB: none fits, all are evaluated. 1MiB: all are refused by their parameters."""
    options: dict[str, Any] = {"search": True, "gpus": 2, "gpu_memory": memory, "seq": 4096, "tp": 2}
    found = ckptx.forecast(source, **options)
    assert isinstance(found, SearchReport) and found.other_precision is not None
    other = found.other_precision
    assert found.ok == (memory == "80GB")
    assert (other["dtype"], other["param_dtype"], other["reduce_dtype"]) == ("float32", "bfloat16", "float32")
    assert other["fits"] == (other["peak"] + other["reserved"] <= found.gpu_memory)
    if memory == "1MiB":
        assert other["peak"] == found.parameters // 2 * 4 * 4
    else:
        row = found.layouts[0] if found.ok else None
        mode, batch, microbatches = ("full", 2, 2)
        if row is not None:
            mode, microbatches = row["activation_checkpointing"], row["microbatches"]
            batch = microbatches * row["sequences_per_microbatch"]
        one = forecast(
            source, tp=2, batch=batch, microbatches=microbatches, activation_checkpointing=mode, seq=4096,
            dtype="fp32", param_dtype="bf16", reduce_dtype="fp32",
        )  # fmt: skip
        assert isinstance(one, ForecastReport) and other["peak"] == one.by_pipeline_rank[0]["peak"]
    for chosen in ({"dtype": "bf16"}, {"param_dtype": "bf16"}) if memory == "1MiB" else ():
        chosen_report = ckptx.forecast(source, **options, **chosen)
        assert isinstance(chosen_report, SearchReport) and chosen_report.other_precision is None


def test_no_supported_layout_has_no_other_precision(source: Path) -> None:
    found = ckptx.forecast(source, search=True, gpus=16, gpu_memory="80GB", seq=64, tp=16, pp=1)
    assert isinstance(found, SearchReport) and found.unsupported_layouts and found.other_precision is None


@pytest.mark.slow
def test_a_mode_is_taken_when_those_that_recompute_less_do_not_fit(source: Path) -> None:
    task = step(source, 1, seq=1024)
    peaks = {
        mode: forecast_ranks(with_layout(task, ParallelDims(), mode, 1))[0].peak
        for mode in ("none", "selective", "full")
    }
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    memory = peaks["selective"] + reserve_bytes(peaks["selective"])
    (outcome,) = search(SearchSpace(task, 1, memory, FixedDims())).mesh_results
    assert outcome.best is not None and outcome.candidate_count == 3  # none, selective, selective with everything
    assert outcome.best.task.recipe.layout.activation_checkpointing == "selective"
    (outcome,) = search(SearchSpace(task, 1, memory, FixedDims(mode="none"))).mesh_results
    assert outcome.best is None and outcome.min_peak == peaks["none"]


def test_what_cannot_be_cut_says_why(source: Path) -> None:
    found = search(SearchSpace(step(source, 16), 16, 80 * GIB, FixedDims(tp=16, pp=1)))
    (outcome,) = found.mesh_results
    assert outcome.best is None and "16" in outcome.refusal_reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 8}, "--gpus requires --search"),
        ({"search": True, "gpu_memory": "1GB"}, "--search requires --gpus"),
        ({"search": True, "gpus": 8}, "--search requires --gpu-memory"),
        ({"search": True, "gpus": 0, "gpu_memory": "1GB"}, "--gpus: 0"),
        (
            {"search": True, "gpus": 8, "gpu_memory": "1GB", "schedule": "gpipe"},
            "forecast --search does not take --schedule",
        ),
        (
            {"search": True, "gpus": 8, "gpu_memory": "1GB", "pp_split": "vllm"},
            "forecast --search does not take --pp-split",
        ),
        ({"search": True, "gpus": 8, "gpu_memory": "1GB", "activation_checkpointing": "some"}, "some"),
        ({"search": True, "gpus": 8, "gpu_memory": "1GB", "tp": 3}, "--gpus 8: no mesh of this many GPUs"),
    ],
)
def test_half_a_search_is_refused(options: dict[str, Any], said: str, source: Path) -> None:
    with pytest.raises(UsageError, match=said):
        forecast(source, seq=64, **options)


# ------------------------------------------------------------------------------------------------- what would fit


def test_the_smallest_mesh_that_fits_is_named(source: Path) -> None:
    task = step(source, 1, seq=1024)
    half = with_layout(task, ParallelDims(tp=2), "none", 1)
    peak = forecast_ranks(half)[0].peak
    assert find_larger_mesh(task, peak + reserve_bytes(peak)) == (ParallelDims(tp=2), peak)
    assert find_larger_mesh(task, reserve_bytes(0)) is None


@pytest.mark.slow
def test_no_stage_is_left_out_where_stages_are_given_other_values(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = with_layout(step(source, 4), ParallelDims(pp=4), "none", 4)
    few = forecast_ranks(task, peak_ranks_only=True)
    assert [each.stages for each in few] == [(0,), (3,)]
    monkeypatch.setattr(_RankForecaster, "_have_equal_input_counts", lambda _: False)
    every = forecast_ranks(task, peak_ranks_only=True)
    assert [each.stages for each in every] == [(0,), (1,), (2,), (3,)]
    assert [each.peak for each in few] == [every[0].peak, every[3].peak]
