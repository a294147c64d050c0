"""Each value of the report of `verify --run`, from results of ranks that differ in every value."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ckptx.layout.stages import Stack, StageMap
from ckptx.options.verify import RunOptions
from ckptx.runtime.checkpointing.load_report import NOT_IN_MODEL, UNKNOWN_TO_CLASS
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.plan import PipelinePlan
from ckptx.runtime.parallel.pipeline.schedules import find_schedule
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.run_report import (
    build_run_report,
    find_largest_gradient_differences,
    list_gathered_modules,
    list_unread_tensors,
)

INF, NAN = float("inf"), float("nan")
INPUTS = Inputs({}, torch.zeros(0), ("text", "images"), (), (17, 32))
# Values that differ in both ranks. Those of `max_abs` and `cosine` are worse on rank 1, others on rank 0.
RANK_0: dict[str, Any] = {
    "differences": [{"level": "bytes", "rank": 0, "name": "a"}], "inconclusive": [], "dtype": "bfloat16",
    "bytes_read": 10, "nbytes": 8, "max_abs": 0.25, "max_abs_tolerance": 1.5, "logits_std": 3.0, "kl": 0.5,
    "cosine": 0.75, "loss": 2.0, "loss_reference": 2.25, "loss_tolerance": 0.5, "gradients": 3, "grad_max_abs": 4.0,
    "grad_closest_to_tolerance": ["z", 0.125], "loaded_names": ["a", "b"], "wrapped_layers": 5, "reference_parts": 6,
    "gathered_modules": {"layers.0.x": ("parameters", True)}, "peak_rss": 300, "measured_peak": 100,
    "without_gradient": [{"name": "b"}], "first_divergence": {"module": "m", "max_abs": INF, "tolerance": 0.5},
}  # fmt: skip
RANK_1: dict[str, Any] = {
    "differences": [{"level": "bytes", "rank": 1, "name": "b"}, {"level": "forward", "rank": 1, "name": "logits"}],
    "inconclusive": [{"level": "gradients", "rank": 1, "name": "c", "tolerance": 2.0, "magnitude": 1.0}],
    "dtype": "float16", "bytes_read": 20, "nbytes": 7, "max_abs": 0.75, "max_abs_tolerance": 11.5, "logits_std": 13.0,
    "kl": 0.25, "cosine": 0.5, "loss": 12.0, "loss_reference": 12.25, "loss_tolerance": 10.5, "gradients": 13,
    "grad_max_abs": 2.0, "grad_closest_to_tolerance": ["a", 0.5], "loaded_names": ["b", "c", "d"],
    "wrapped_layers": 15, "reference_parts": 16, "gathered_modules": {"layers.1.x": ("parameters", True)},
    "peak_rss": 200, "measured_peak": 400, "without_gradient": None, "first_divergence": None,
}  # fmt: skip
GRADIENT_DIFFERENCES = [{"level": "gradients", "rank": 0, "name": "a", "max_abs": 0.5, "tolerance": 1.0}]
EXPECTED: dict[str, Any] = {
    "command": "verify", "exit": 1, "ok": False, "run": True, "tensors": 4, "compared": 4, "bytes_read": 30,
    "bytes_read_per_rank": [10, 20], "world_size": 2, "stages": 1, "bubble_fraction": 0.0, "microbatches": 1,
    "layout": {"tp": 2, "pp": 1, "dp_shard": 1, "dp_replicate": 1}, "reference_parts": 6,
    "inputs": ["text", "images"], "distinct_tokens": 17, "vocabulary_size": 32,
    "attention_windows": {"sliding_window": [512, 5]}, "without_gradient": [{"name": "b"}],
    "compute_dtype": "bfloat16", "checkpointed_layers": 5, "peak_rss": 300, "peak_rss_of": "largest rank",
    "gathered_modules": [{"pattern": "layers.*.x", "modules": 2, "what": "parameters", "aligned": True}],
    "differing": [*RANK_0["differences"], *RANK_1["differences"]], "inconclusive": RANK_1["inconclusive"],
    "max_abs": 0.75, "max_abs_tolerance": 1.5, "logits_std": 3.0, "kl": 0.5, "cosine": 0.5, "loss": 2.0,
    "loss_reference": 2.25, "loss_tolerance": 0.5, "gradients": 3, "grad_max_abs": 4.0,
    "grad_closest_to_tolerance": ["a", 0.5],
    "first_divergence": {"module": "m", "max_abs": "inf", "tolerance": 0.5},
    "gradient_differences": GRADIENT_DIFFERENCES, "unread_tensors": [], "dtype_differences": [],
    "ranks": [
        {"rank": 0, "bytes_read": 10, "bytes": 8, "differing": 1, "peak_rss": 300, "max_abs": 0.25, "kl": 0.5,
         "cosine": 0.75, "grad_max_abs": 4.0},
        {"rank": 1, "bytes_read": 20, "bytes": 7, "differing": 2, "peak_rss": 200, "max_abs": 0.75, "kl": 0.25,
         "cosine": 0.5, "grad_max_abs": 2.0},
    ],
}  # fmt: skip


def report_of(
    *rank_results: dict[str, Any], plan: PipelinePlan | None = None, tp: int = 2, **options: Any
) -> dict[str, Any]:
    report: dict[str, Any] = build_run_report(
        RunOptions(tp=tp, **options), list(rank_results), INPUTS, {"sliding_window": [512, 5]}, GRADIENT_DIFFERENCES,
        plan,
    ).to_dict()  # fmt: skip
    json.dumps(report, allow_nan=False)
    return report


def test_each_value_of_the_report_comes_from_the_ranks_or_the_inputs() -> None:
    report = report_of(RANK_0, RANK_1)
    assert {name: report[name] for name in EXPECTED} == EXPECTED
    others = {name for name in report if name not in EXPECTED}
    assert others.isdisjoint(RANK_0)
    assert "measured_peak" not in report or report["measured_peak"] is None


def test_memory_is_reported_if_it_was_measured() -> None:
    assert report_of(RANK_0, RANK_1, gpu_memory="80GiB")["measured_peak"] == 400
    assert report_of(RANK_1, RANK_0, gpu_memory="80GiB")["measured_peak"] == 400


def test_a_report_of_one_rank_is_that_of_this_process() -> None:
    report = report_of({**RANK_0, "differences": []}, tp=1)
    assert (report["exit"], report["ok"], report["world_size"]) == (0, True, 1)
    assert (report["peak_rss"], report["peak_rss_of"]) == (300, "this process")
    assert report["gathered_modules"][0]["modules"] == 1


@pytest.mark.parametrize("strict", [False, True])
def test_inconclusive_results_alone_fail_only_with_strict(strict: bool) -> None:
    report = report_of({**RANK_0, "differences": []}, {**RANK_1, "differences": []}, strict=strict)
    assert report["exit"] == (1 if strict else 0)


def test_without_a_backward_step_gradients_are_null() -> None:
    names = ("gradients", "grad_max_abs", "grad_closest_to_tolerance", "without_gradient", "first_divergence")
    results = [{name: value for name, value in each.items() if name not in names} for each in (RANK_0, RANK_1)]
    report = report_of(*results, backward=False)
    assert [report[name] for name in names] == [None] * 5
    assert [each["grad_max_abs"] for each in report["ranks"]] == [None, None]
    assert report["max_abs"] == 0.75


@pytest.mark.parametrize(("microbatches", "bubble"), [(1, 0.5), (3, 0.25)])
def test_ranks_of_a_pipeline(microbatches: int, bubble: float) -> None:
    """Rank 2 is the first of the second stage; (pp - 1) / (microbatches + pp - 1) of a step is idle."""
    stages = StageMap([Stack("layers", 5)], 2)
    plan = PipelinePlan(find_schedule("1f1b"), stages, StageBoundaries(((), ()), {}), (), microbatches)
    results = [{**RANK_0, "wrapped_layers": count} for count in (3, 100, 2, 1000)]
    report = report_of(*results, plan=plan, pp=2)
    assert (report["stages"], report["microbatches"], report["bubble_fraction"]) == (2, microbatches, bubble)
    assert (report["world_size"], report["checkpointed_layers"]) == (4, 5)
    assert [each["rank"] for each in report["ranks"]] == [0, 1, 2, 3]
    assert report["layout"] == {"tp": 2, "pp": 2, "dp_shard": 1, "dp_replicate": 1}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_numbers_that_are_not_finite_are_strings_at_any_depth(value: float) -> None:
    numbers = dict.fromkeys(("max_abs", "max_abs_tolerance", "logits_std", "loss", "loss_tolerance"), value)
    divergence = {"module": "m", "nested": [(value, 1.0), {"a": value}]}
    report = report_of({**RANK_0, **numbers, "first_divergence": divergence, "grad_closest_to_tolerance": ["a", value]})
    assert {name: report[name] for name in numbers} == dict.fromkeys(numbers, str(value))
    assert report["first_divergence"] == {"module": "m", "nested": [[str(value), 1.0], {"a": str(value)}]}
    assert report["grad_closest_to_tolerance"] == ["a", str(value)]
    assert report["ranks"][0]["max_abs"] == str(value)
    assert report["kl"] == 0.5


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_nan_of_any_rank_is_the_worst(order: tuple[int, int]) -> None:
    results = [{**RANK_0, "kl": NAN, "cosine": NAN}, {**RANK_1, "kl": 100.0, "cosine": -1.0}]
    report = report_of(*(results[index] for index in order))
    assert (report["kl"], report["cosine"]) == ("nan", "nan")


def test_the_same_inconclusive_tensor_of_several_ranks_is_listed_once() -> None:
    def entry(level: str, rank: int, name: str) -> dict[str, Any]:
        return {"level": level, "rank": rank, "name": name, "tolerance": 2.0, "magnitude": 1.0}

    first = [entry("gradients", 0, "x"), entry("gradients", 0, "y")]
    second = [entry("gradients", 1, "x"), entry("forward", 1, "x"), entry("gradients", 1, "z")]
    report = report_of({**RANK_0, "inconclusive": first}, {**RANK_1, "inconclusive": second})
    assert report["inconclusive"] == [*first, *second[1:]]


def test_gathered_modules_are_counted_by_pattern_kind_and_alignment() -> None:
    assert list_gathered_modules([]) == []
    found = list_gathered_modules([
        {"h.0.a": ("parameters", True), "h.1.a": ("parameters", True), "h.2.a": ("output", True)},
        {"h.0.a": ("parameters", True), "h.3.a": ("parameters", False), "b": ("output", False)},
    ])  # fmt: skip
    assert found == [
        {"pattern": "h.*.a", "modules": 2, "what": "parameters", "aligned": True},
        {"pattern": "h.*.a", "modules": 1, "what": "output", "aligned": True},
        {"pattern": "h.*.a", "modules": 1, "what": "parameters", "aligned": False},
        {"pattern": "b", "modules": 1, "what": "output", "aligned": False},
    ]


def test_unread_tensors_are_listed_with_their_side_and_reason() -> None:
    reference = {"a": NOT_IN_MODEL, "both": "of the reference", "c": ""}
    checkpoint = {"d": UNKNOWN_TO_CLASS, "both": "of the checkpoint", "c": "known", "e": "known"}
    assert list_unread_tensors(reference, checkpoint) == [
        {"name": "a", "reason": NOT_IN_MODEL, "stored_in": ["reference"], "is_expected": False},
        {"name": "both", "reason": "of the reference", "stored_in": ["reference", "checkpoint"], "is_expected": True},
        {"name": "c", "reason": "known", "stored_in": ["reference", "checkpoint"], "is_expected": True},
        {"name": "d", "reason": UNKNOWN_TO_CLASS, "stored_in": ["checkpoint"], "is_expected": False},
        {"name": "e", "reason": "known", "stored_in": ["checkpoint"], "is_expected": True},
    ]
    assert list_unread_tensors({}, {}) == []


def test_the_largest_difference_of_a_gradient_is_that_of_the_first_rank_with_it() -> None:
    results = [
        {"gradient_distances": {"a": (0.5, 1.0), "b": (0.25, INF)}},
        {"gradient_distances": {"a": (0.5, 2.0), "b": (0.75, NAN), "c": (0.0, 0.0)}},
    ]
    assert find_largest_gradient_differences(results, {"a": ("disk.a", "disk.b")}) == [
        {"level": "gradients", "rank": 0, "name": "disk.a", "names": 2, "model_name": "a", "max_abs": 0.5,
         "tolerance": 1.0},
        {"level": "gradients", "rank": 1, "name": "b", "max_abs": 0.75, "tolerance": "nan"},
        {"level": "gradients", "rank": 1, "name": "c", "max_abs": 0.0, "tolerance": 0.0},
    ]  # fmt: skip
    assert find_largest_gradient_differences([{"gradient_distances": {}}], {}) == []
