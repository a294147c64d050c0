"""The report of `verify --run`: what all ranks found, as one document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from ckptx.mapping.names import pattern_of
from ckptx.options.verify import RunOptions
from ckptx.report.documents.verify_run import RunReport
from ckptx.report.number_formats import peak_of_processes
from ckptx.runtime.checkpointing.load_report import NOT_IN_MODEL, UNKNOWN_TO_CLASS
from ckptx.runtime.parallel.pipeline.plan import PipelinePlan
from ckptx.runtime.parity.comparison import make_difference
from ckptx.runtime.parity.distances import nan_is_worst
from ckptx.runtime.parity.inputs.batch import Inputs


def build_run_report(
    options: RunOptions,
    rank_results: list[dict[str, Any]],
    inputs: Inputs,
    small_windows: Mapping[str, Sequence[int]],
    gradient_differences: list[dict[str, Any]],
    plan: PipelinePlan | None = None,
) -> RunReport:
    """Combine the results of all ranks into one report.

    Args:
        options: Options of the run.
        rank_results: Result of each rank, from `verify_run`.
        inputs: Inputs of the first microbatch.
        small_windows: Config key of an attention window -> its size in the config and in the run.
        gradient_differences: Result of `find_largest_gradient_differences`.
        plan: Plan of the pipeline; None without one.
    """
    dims = options.dims
    tensors = len({name for rank_result in rank_results for name in rank_result["loaded_names"]})
    stages = plan.stages.count if plan is not None else 1
    microbatches = plan.microbatches if plan is not None else 1
    bubble = plan.schedule.bubble_fraction(dims.pp, microbatches) if plan is not None else 0.0
    one_result_per_stage = rank_results[:: dims.ranks_per_stage]  # ranks of one pipeline stage are consecutive
    wrapped_layers = sum(rank_result["wrapped_layers"] for rank_result in one_result_per_stage)
    differences = [each for rank_result in rank_results for each in rank_result["differences"]]
    inconclusive = _drop_repeated_names(each for rank_result in rank_results for each in rank_result["inconclusive"])
    first = rank_results[0]
    ranks = [
        {
            "rank": rank,
            "bytes_read": rank_result["bytes_read"],
            "bytes": rank_result["nbytes"],
            "differing": len(rank_result["differences"]),
            "peak_rss": rank_result["peak_rss"],
            **{name: _to_json_value(rank_result.get(name)) for name in ("max_abs", "kl", "cosine", "grad_max_abs")},
        }
        for rank, rank_result in enumerate(rank_results)
    ]
    gradient_values: dict[str, Any] = {"gradients": None, "grad_max_abs": None, "grad_closest_to_tolerance": None}
    if options.backward:
        gradient_values = {
            "gradients": first["gradients"],
            "grad_max_abs": max(rank_result["grad_max_abs"] for rank_result in rank_results),
            "grad_closest_to_tolerance": max(
                (rank_result["grad_closest_to_tolerance"] for rank_result in rank_results), key=lambda found: found[1]
            ),
        }
    values = {
        "differing": differences,
        "inconclusive": inconclusive,
        "max_abs": max(rank_result["max_abs"] for rank_result in rank_results),
        "max_abs_tolerance": first["max_abs_tolerance"],
        "logits_std": first["logits_std"],
        "kl": max((rank_result["kl"] for rank_result in rank_results), key=nan_is_worst),
        "cosine": max((rank_result["cosine"] for rank_result in rank_results), key=lambda found: nan_is_worst(-found)),
        "loss": first["loss"],
        "loss_reference": first["loss_reference"],
        "loss_tolerance": first["loss_tolerance"],
        "first_divergence": first.get("first_divergence"),
        "gradient_differences": gradient_differences,
        **gradient_values,
    }
    bytes_read_per_rank = [int(rank_result["bytes_read"]) for rank_result in rank_results]
    return RunReport(
        command="verify",
        exit=1 if differences or (inconclusive and options.strict) else 0,
        tensors=tensors,
        bytes_read=sum(bytes_read_per_rank),
        ranks=ranks,
        compared=tensors,
        world_size=dims.world_size,
        layout={"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate},
        stages=stages,
        bubble_fraction=bubble,
        microbatches=microbatches,
        reference_parts=first["reference_parts"],
        inputs=list(inputs.kinds),
        distinct_tokens=inputs.vocabulary_coverage[0],
        vocabulary_size=inputs.vocabulary_coverage[1],
        attention_windows=dict(small_windows),
        without_gradient=first.get("without_gradient"),
        compute_dtype=first["dtype"],
        checkpointed_layers=wrapped_layers,
        gathered_modules=list_gathered_modules(rank_result["gathered_modules"] for rank_result in rank_results),
        measured_peak=max((rank_result["measured_peak"] for rank_result in rank_results), default=None)
        if options.measures_memory
        else None,
        **peak_of_processes((rank_result["peak_rss"] for rank_result in rank_results), are_ranks=dims.world_size > 1),
        bytes_read_per_rank=bytes_read_per_rank,
        **{name: _to_json_value(value) for name, value in values.items()},
    )


def list_gathered_modules(modules_by_rank: Iterable[Mapping[str, tuple[str, bool]]]) -> list[dict[str, Any]]:
    """Return an entry of the report for each pattern of modules that did not run on their TP shards alone.

    Args:
        modules_by_rank: `LoadRecord.gathered_modules` of each rank.

    Returns:
        Entries with the `pattern` of names, the number of `modules` that it matches, `what` was gathered ("parameters"
        or "output"), and `aligned`, which is False if a shard is known to split a head or a fused part.
    """
    modules = {name: value for names in modules_by_rank for name, value in names.items()}
    counts = Counter((pattern_of(name), what, aligned) for name, (what, aligned) in modules.items())
    return [
        {"pattern": pattern, "modules": count, "what": what, "aligned": aligned}
        for (pattern, what, aligned), count in counts.items()
    ]


def list_unread_tensors(reference: Mapping[str, str], checkpoint: Mapping[str, str]) -> list[dict[str, Any]]:
    """List the stored tensors that no part of the model reads.

    Args:
        reference: Reason for each unread name of the reference.
        checkpoint: Reason for each unread name of the checkpoint.

    Returns:
        An entry for each name: `name`, `reason`, `stored_in` ("reference", "checkpoint", or both), and `is_expected`,
        which is False for a tensor that the class does not have and that no reason is known for.
    """
    unread_tensors = []
    for name in dict.fromkeys([*reference, *checkpoint]):
        sides = [side for side, reasons in (("reference", reference), ("checkpoint", checkpoint)) if name in reasons]
        reason = reference.get(name) or checkpoint[name]
        is_expected = reason not in (NOT_IN_MODEL, UNKNOWN_TO_CLASS)
        unread_tensors.append({"name": name, "reason": reason, "stored_in": sides, "is_expected": is_expected})
    return unread_tensors


def _drop_repeated_names(inconclusive: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the first entry of each level and name: a tolerance is the same on every rank."""
    entries_by_name: dict[tuple[str, str], dict[str, Any]] = {}
    for each in inconclusive:
        entries_by_name.setdefault((each["level"], each["name"]), each)
    return list(entries_by_name.values())


def find_largest_gradient_differences(
    rank_results: list[dict[str, Any]], stored_names: dict[str, tuple[str, ...]]
) -> list[dict[str, Any]]:
    """Return an entry of the report for each gradient: its largest difference over all ranks, and the tolerance.

    Args:
        rank_results: Result of each rank, from `verify_run`.
        stored_names: Names on disk by name in the model.
    """
    largest: dict[str, tuple[int, float, float]] = {}
    for rank, rank_result in enumerate(rank_results):
        for name, (distance, tolerance) in rank_result["gradient_distances"].items():
            if name not in largest or distance > largest[name][1]:
                largest[name] = rank, distance, tolerance
    return [
        {
            **make_difference("gradients", rank, name, stored_names),
            "max_abs": _to_json_value(distance),
            "tolerance": _to_json_value(tolerance),
        }
        for name, (rank, distance, tolerance) in largest.items()
    ]


def _to_json_value(value: Any) -> Any:
    """Return a value as JSON can store it: numbers that are not finite become strings."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_to_json_value(each) for each in value]
    if isinstance(value, dict):
        return {key: _to_json_value(each) for key, each in value.items()}
    return value
