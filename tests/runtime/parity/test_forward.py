"""What a run is judged by: the measured noise, the first module that differs, and the report of all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import Stack, StageMap
from ckptx.options.verify import RunOptions
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.plan import PipelinePlan
from ckptx.runtime.parallel.pipeline.schedules import find_schedule
from ckptx.runtime.parity import divergence, execution, forward, noise, run_report
from ckptx.runtime.parity.comparison import ReferenceResult
from ckptx.runtime.parity.divergence import OutputsByCall
from ckptx.runtime.parity.reference import WholeReference
from ckptx.runtime.parity.stages import find_stage_of_difference
from tests.support.small_modules import RANK_CONTEXT, ULP, Chosen, InPlace, Looped, Scaled, inputs_of

IDS = [[0, 1], [2, 3]]


def side_of(model: nn.Module) -> Any:
    """A reference that is already built."""
    return SimpleNamespace(load_whole=lambda rank_context: model)


def first_divergence(
    reference: nn.Module, model: nn.Module, ids: Sequence[Sequence[int]] = IDS, *, is_exact: bool = True
) -> dict[str, Any] | None:
    ours: OutputsByCall = {}
    with divergence.record_outputs(model, ours):
        execution.run_step(model, [inputs_of(ids)], backward=False)
    side: Any = side_of(reference)
    found = WholeReference(side, [], RANK_CONTEXT, False).iter_module_outputs(inputs_of(ids))
    return divergence.find_first_divergence(found, iter([ours]), is_exact=is_exact)


# ------------------------------------------------------------------------------------------- the first that differs


def test_a_module_that_is_called_twice_is_compared_call_by_call() -> None:
    """Layers that share a module, and rotary embeddings that are asked for each kind of layer."""
    assert first_divergence(Looped(), Looped()) is None
    other = Looped()
    with torch.no_grad():
        other.last.weight[0, 1] += 0.5
    found = first_divergence(Looped(), other)
    assert found is not None
    assert found["module"] == "last"


def test_what_is_added_in_place_belongs_to_what_comes_after() -> None:
    other = InPlace()
    with torch.no_grad():
        other.scale += 1
    found = first_divergence(InPlace(), other)
    assert found == {"module": "last", "max_abs": 1.0, "tolerance": 0.0}


@pytest.mark.parametrize(("factor", "is_far"), [(8, False), (9, True), (-8, False), (-9, True)])
def test_a_module_may_differ_by_eight_times_its_noise(factor: int, is_far: bool) -> None:
    """Also on one rank, where compiled layers or a device with atomic additions round otherwise."""
    other = Scaled()
    with torch.no_grad():
        other.embed.weight[3] += factor * ULP
    found = first_divergence(Scaled(), other, is_exact=False)
    assert found == ({"module": "embed", "max_abs": 9 * ULP, "tolerance": 8 * ULP} if is_far else None)
    exact = first_divergence(Scaled(), other)
    assert exact == {"module": "embed", "max_abs": abs(factor) * ULP, "tolerance": 0.0}


@pytest.mark.parametrize("ids", [IDS, [[0]], [[1]], [[2]], [[3]]])
def test_experts_that_get_other_tokens_are_not_compared(ids: list[list[int]]) -> None:
    """The noise itself sends some tokens elsewhere, or all that an expert had."""
    other = Chosen()
    with torch.no_grad():
        other.last.weight += 0.5
    found = first_divergence(Chosen(), other, ids, is_exact=False)
    assert found is not None
    assert (found["module"], found["max_abs"]) == ("last", 1.0)


# ------------------------------------------------------------------------------------------- the noise of a reference


def reference_of(model: nn.Module, *, backward: bool = True) -> tuple[ReferenceResult, dict[str, float]]:
    """What it gives forward, and how much noise moves its gradients."""
    running = WholeReference(side_of(model), [inputs_of(IDS), inputs_of([[4, 5], [6, 7]])], RANK_CONTEXT, backward)
    found = running.forward()
    (portion,) = running.gradients()
    return found, {each.name: each.noise for each in portion}


def test_noise_is_how_far_the_outputs_of_moved_embeddings_are() -> None:
    """Embeddings of 3 move by one ULP, and outputs by 4; the gradient 2 * e * s^2 / 8 / 2 of an embedding by 2."""
    found, gradients = reference_of(Scaled())
    assert (found.result.loss, found.logits_noise) == (144, 4 * ULP)
    assert gradients.keys() == {"embed.weight", "scale"}
    assert gradients["embed.weight"] == 2 * ULP
    assert found.is_repeatable


def test_noise_is_the_largest_of_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "NUM_DRAWS", 9)
    model, batches = Scaled(), [inputs_of(IDS), inputs_of([[4, 5], [6, 7]])]
    expected = execution.run_step(model, batches, backward=True)
    expected.gradients = {name: each.clone() for name, each in expected.gradients.items()}
    losses, scales = [], []
    for draw in range(noise.NUM_DRAWS):
        with noise.perturb_embeddings(model, draw):
            other = execution.run_step(model, batches, backward=True)
        losses.append(abs(other.loss - expected.loss))
        scales.append(float((other.gradients["scale"] - expected.gradients["scale"]).abs().max()))
    found, gradients = reference_of(Scaled())
    assert (found.loss_noise, gradients["scale"]) == (max(losses), max(scales))
    assert len(set(losses)) > 1, "else any draw would do"


def test_without_a_backward_pass_there_are_no_gradients() -> None:
    found, gradients = reference_of(Scaled(), backward=False)
    assert (found.logits_noise, gradients, found.result.gradients) == (4 * ULP, {}, {})


def test_a_model_without_embeddings_has_no_noise() -> None:
    model = Scaled()
    weight = model.embed.weight
    del model.embed
    model.embed = lambda ids: weight[ids]  # type: ignore[assignment]  # a function is called as a module is
    found, gradients = reference_of(model)
    assert (found.logits_noise, found.loss_noise, gradients) == (0, 0, {"scale": 0})


# ------------------------------------------------------------------------------------------- the report of all ranks


def share_of(**found: Any) -> dict[str, Any]:
    """What one rank tells the others."""
    plain: dict[str, Any] = {
        "differences": [], "inconclusive": [], "dtype": "float32", "bytes_read": 10, "nbytes": 8, "max_abs": 0.0,
        "max_abs_tolerance": 1.0, "logits_std": 3.0, "kl": 0.0, "cosine": 1.0,
        "loss": 2.0, "loss_reference": 2.0, "loss_tolerance": 0.5, "gradients": 3, "grad_max_abs": 0.0,
        "grad_closest_to_tolerance": ["", 0.0], "gradient_distances": {}, "loaded_names": list("abcde"),
        "wrapped_layers": 0, "reference_parts": 1, "gathered_modules": {}, "sharded_parameters": 1,
        "peak_rss": 1 << 20,
    }  # fmt: skip
    return plain | found


def report_of(*shares: dict[str, Any], **settings: bool) -> dict[str, Any]:
    options = RunOptions(tp=2, **settings)
    found: dict[str, Any] = run_report.build_run_report(
        options, list(shares), inputs_of(IDS), {"sliding_window": [512, 5]}, []
    ).to_dict()
    json.loads(json.dumps(found, allow_nan=False))
    return found


def test_the_report_has_the_worst_of_all_ranks() -> None:
    first = share_of(
        max_abs=0.25, kl=0.5, cosine=0.75, grad_max_abs=1.0, grad_closest_to_tolerance=["a", 0.5], nbytes=6
    )
    second = share_of(
        max_abs=0.5, kl=0.25, cosine=0.5, grad_max_abs=2.0, grad_closest_to_tolerance=["b", 0.25], bytes_read=30
    )
    for shares in ((first, second), (second, first)):
        found = report_of(*shares)
        assert (found["exit"], found["bytes_read"]) == (0, 40)
        assert found["bytes_read_per_rank"] == [each["bytes_read"] for each in shares]
        numbers = [found[name] for name in ("max_abs", "kl", "cosine", "grad_max_abs", "grad_closest_to_tolerance")]
        assert numbers == [0.5, 0.5, 0.5, 2.0, ["a", 0.5]]
        assert [row["max_abs"] for row in found["ranks"]] == [each["max_abs"] for each in shares]
        assert [row["bytes"] for row in found["ranks"]] == [each["nbytes"] for each in shares]
    assert (found["compared"], found["tensors"], found["world_size"]) == (5, 5, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_number_on_one_rank_is_none_in_the_report(rank: int) -> None:
    shares = [share_of(kl=0.5, cosine=0.5), share_of(kl=0.25, cosine=0.75)]
    shares[rank] |= {"kl": float("nan"), "cosine": float("nan"), "max_abs": float("inf")}
    found = report_of(*shares)
    assert (found["kl"], found["cosine"], found["max_abs"]) == ("nan", "nan", "inf")
    assert found["ranks"][rank]["kl"] == "nan"


def test_a_row_of_any_rank_makes_the_exit_1() -> None:
    row = {"level": "bytes", "rank": 1, "name": "x", "max_abs": float("nan")}
    found = report_of(share_of(), share_of(differences=[row]))
    assert (found["exit"], found["differing"]) == (1, [row | {"max_abs": "nan"}])
    assert [each["differing"] for each in found["ranks"]] == [0, 1]


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_what_is_undecided_is_listed_once_and_strict_makes_the_exit_1(strict: bool, code: int) -> None:
    rows = [{"level": "gradients", "rank": rank, "name": "x", "tolerance": 2.0, "magnitude": 1.0} for rank in (0, 1)]
    other = {"level": "forward", "rank": 1, "name": "logits", "tolerance": 2.0, "magnitude": 1.0}
    found = report_of(share_of(inconclusive=rows[:1]), share_of(inconclusive=[*rows[1:], other]), strict=strict)
    assert (found["exit"], found["differing"], found["inconclusive"]) == (code, [], [rows[0], other])
    assert report_of(share_of(), share_of(), strict=strict)["exit"] == 0


def test_without_a_backward_pass_the_report_has_no_gradients() -> None:
    share = share_of()
    for name in ("gradients", "grad_max_abs", "grad_closest_to_tolerance"):
        del share[name]
    found = report_of(share, backward=False)
    assert [found[name] for name in ("gradients", "grad_max_abs", "grad_closest_to_tolerance")] == [None] * 3


def test_each_gradient_is_that_of_the_rank_where_it_is_furthest() -> None:
    shares = [share_of(gradient_distances=found) for found in (
        {"a": (0.5, 1.0), "b": (0.0, 4.0)}, {"a": (0.75, 2.0)}, {"a": (0.25, 3.0), "c": (float("inf"), 1.0)},
    )]  # fmt: skip
    rows = run_report.find_largest_gradient_differences(shares, {"a": ("disk.a",)})
    assert [(row["rank"], row["name"], row["max_abs"], row["tolerance"]) for row in rows] == [
        (1, "disk.a", 0.75, 2.0), (0, "b", 0.0, 4.0), (2, "c", "inf", 1.0),
    ]  # fmt: skip
    assert {row["level"] for row in rows} == {"gradients"}


def test_the_layers_of_every_stage_are_counted_once() -> None:
    """Ranks of one stage wrap the same layers."""
    dims = ParallelDims(tp=2, pp=2)
    schedule = find_schedule("1f1b")
    cut = PipelinePlan(schedule, StageMap([Stack("layers", 5)], 2), StageBoundaries(((), ()), {}), (), 3)
    shares = [
        share_of(wrapped_layers=wrapped, loaded_names=names)
        for wrapped, names in ((3, "ab"), (3, "ab"), (2, "bc"), (2, "bc"))
    ]
    options = RunOptions(tp=dims.tp, pp=dims.pp, dp_shard=dims.dp_shard, dp_replicate=dims.dp_replicate)
    found = run_report.build_run_report(options, shares, inputs_of(IDS), {}, [], cut).to_dict()
    assert (found["checkpointed_layers"], found["compared"], found["stages"], found["microbatches"]) == (5, 3, 2, 3)
    assert found["bubble_fraction"] == 0.25
    assert found["layout"] == {"tp": 2, "pp": 2, "dp_shard": 1, "dp_replicate": 1}


def test_a_difference_has_the_stage_of_its_tensor() -> None:
    stages = StageMap([Stack("model.layers", 2, (), ("model.norm", "lm_head"))], 2)
    cut = PipelinePlan(find_schedule("gpipe"), stages, StageBoundaries(((), ()), {}), (), 2)
    for name, stage in (("model.layers.0.a", 0), ("model.layers.1.a", 1), ("lm_head.weight", 1), ("model.x", 0)):
        assert find_stage_of_difference(cut, {"level": "bytes", "name": name}) == stage
        assert find_stage_of_difference(cut, {"level": "gradients", "name": "on.disk", "model_name": name}) == stage
    assert find_stage_of_difference(cut, {"level": "forward", "name": "logits"}) == 1
    assert find_stage_of_difference(cut, {"level": "config", "name": "hidden_act"}) is None


def test_modules_that_ran_gathered_are_counted_by_pattern_and_memory_is_that_of_the_largest_rank() -> None:
    layers = {f"model.layers.{layer}.self_attn": ("parameters", False) for layer in range(3)}
    shares = [
        share_of(gathered_modules=layers, peak_rss=5 << 20),
        share_of(gathered_modules={**layers, "lm_head": ("output", True)}, peak_rss=9 << 20),
    ]
    found = report_of(*shares)
    assert found["gathered_modules"] == [
        {"pattern": "model.layers.*.self_attn", "modules": 3, "what": "parameters", "aligned": False},
        {"pattern": "lm_head", "modules": 1, "what": "output", "aligned": True},
    ]
    assert (found["peak_rss"], found["peak_rss_of"]) == (9 << 20, "largest rank")
    assert [row["peak_rss"] for row in found["ranks"]] == [5 << 20, 9 << 20]


# ------------------------------------------------------------------------------------------- what has to be exact


MESHES = [(tp, pp, dp) for tp, pp, dp in product((1, 2), repeat=3)]


@pytest.mark.parametrize(("mesh", "repeatable", "compiled"), product(MESHES, (True, False), (True, False)))
def test_only_the_same_operations_in_the_same_order_are_exact(
    mesh: tuple[int, int, int], repeatable: bool, compiled: bool
) -> None:
    """Those of one rank, and of pipeline stages: TP and FSDP reorder sums, compiled code and some devices round."""
    tp, pp, dp = mesh
    options = RunOptions(tp=tp, pp=pp, dp_shard=dp, compile=compiled)
    context = RankContext(0, tp * pp * dp, torch.device("cpu"))
    result = ReferenceResult(execution.StepResult([], 1.0), 0.0, 0.0, is_repeatable=repeatable)
    assert forward._is_exact(result, context, options) is (tp == dp == 1 and repeatable and not compiled)
    assert forward._is_exact(None, context, options) is False
