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
from ckptx.runtime.parity.comparison import make_difference_row
from ckptx.runtime.parity.distances import nan_is_worst
from ckptx.runtime.parity.inputs.batch import Inputs


def build_run_report(
    options: RunOptions,
    rank_results: list[dict[str, Any]],
    inputs: Inputs,
    small_windows: Mapping[str, Sequence[int]],
    worst: list[dict[str, Any]],
    plan: PipelinePlan | None = None,
) -> RunReport:
    """Combine the results of all ranks into one report."""
    dims = options.dims
    tensors = len({name for rank_result in rank_results for name in rank_result["names"]})
    stages = plan.stages.count if plan is not None else 1
    microbatches = plan.microbatches if plan is not None else 1
    bubble = plan.schedule.bubble_fraction(dims.pp, microbatches) if plan is not None else 0.0
    layers = sum(
        rank_result["wrapped"] for rank_result in rank_results[:: dims.ranks_per_stage]
    )  # one rank of each pipeline rank
    rows = [row for rank_result in rank_results for row in rank_result["rows"]]
    inconclusive = _drop_repeated_rows(row for rank_result in rank_results for row in rank_result["inconclusive"])
    first = rank_results[0]
    ranks = [
        {
            "rank": rank,
            "bytes_read": rank_result["read"],
            "bytes": rank_result["nbytes"],
            "differing": len(rank_result["rows"]),
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
        "differing": rows,
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
        "gradient_differences": worst,
        **gradient_values,
    }
    bytes_read_per_rank = [int(rank_result["read"]) for rank_result in rank_results]
    return RunReport(
        command="verify",
        exit=1 if rows or (inconclusive and options.strict) else 0,
        tensors=tensors,
        bytes_read=sum(bytes_read_per_rank),
        ranks=ranks,
        compared=tensors,
        world_size=dims.world_size,
        layout={"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate},
        stages=stages,
        bubble_fraction=bubble,
        microbatches=microbatches,
        reference_parts=first["pieces"],
        inputs=list(inputs.kinds),
        tokens=list(inputs.vocabulary_coverage),
        attention_windows=dict(small_windows),
        without_gradient=first.get("without_gradient"),
        compute_dtype=first["dtype"],
        checkpointed_layers=layers,
        gathered_modules=make_gathered_rows(rank_result["gathered"] for rank_result in rank_results),
        measured_peak=max((rank_result["taken"] for rank_result in rank_results), default=None)
        if options.measures_memory
        else None,
        **peak_of_processes((rank_result["peak_rss"] for rank_result in rank_results), are_ranks=dims.world_size > 1),
        bytes_read_per_rank=bytes_read_per_rank,
        **{name: _to_json_value(value) for name, value in values.items()},
    )


def make_gathered_rows(modules_by_rank: Iterable[Mapping[str, tuple[str, bool]]]) -> list[dict[str, Any]]:
    """Return a row for each pattern of modules that did not run on their TP shards alone, with their number."""
    modules = {name: found for names in modules_by_rank for name, found in names.items()}
    counts = Counter((pattern_of(name), what, aligned) for name, (what, aligned) in modules.items())
    return [
        {"pattern": pattern, "modules": count, "what": what, "aligned": aligned}
        for (pattern, what, aligned), count in counts.items()
    ]


def make_unread_rows(reference: Mapping[str, str], checkpoint: Mapping[str, str]) -> list[dict[str, Any]]:
    """List the stored tensors that no part of the model reads.

    Args:
        reference: Reason for each unread name of the reference.
        checkpoint: Reason for each unread name of the checkpoint.

    Returns:
        A row for each name: `name`, `reason`, `stored_in` ("reference", "checkpoint", or both), and `is_expected`,
        which is False for a tensor that the class does not have and that no reason is known for.
    """
    rows = []
    for name in dict.fromkeys([*reference, *checkpoint]):
        sides = [side for side, found in (("reference", reference), ("checkpoint", checkpoint)) if name in found]
        reason = reference.get(name) or checkpoint[name]
        is_expected = reason not in (NOT_IN_MODEL, UNKNOWN_TO_CLASS)
        rows.append({"name": name, "reason": reason, "stored_in": sides, "is_expected": is_expected})
    return rows


def _drop_repeated_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the first row of each name: a tolerance is the same on every rank."""
    rows_by_name: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        rows_by_name.setdefault((row["level"], row["name"]), row)
    return list(rows_by_name.values())


def find_worst_by_tensor(
    rank_results: list[dict[str, Any]], stored_names: dict[str, tuple[str, ...]]
) -> list[dict[str, Any]]:
    """Return a row for each gradient, with the largest difference over all ranks."""
    worst: dict[str, tuple[int, float, float]] = {}
    for rank, rank_result in enumerate(rank_results):
        for name, (distance, limit) in rank_result["by_tensor"].items():
            if name not in worst or distance > worst[name][1]:
                worst[name] = rank, distance, limit
    return [
        {
            **make_difference_row("gradients", rank, name, stored_names),
            "max_abs": _to_json_value(distance),
            "tolerance": _to_json_value(limit),
        }
        for name, (rank, distance, limit) in worst.items()
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
