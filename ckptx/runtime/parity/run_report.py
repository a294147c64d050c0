"""The report of `verify --run`: what all ranks found, as one document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from ckptx.mapping.names import pattern_of
from ckptx.options.verify import RunOptions
from ckptx.report.documents.running import RunReport
from ckptx.report.numbers import peak_of_processes
from ckptx.runtime.checkpointing.load_report import NO_PLACE, UNKNOWN
from ckptx.runtime.parallel.pipeline.plan import PipelinePlan
from ckptx.runtime.parity.comparison import difference
from ckptx.runtime.parity.distances import badness
from ckptx.runtime.parity.inputs.batch import Inputs


def report_of(
    options: RunOptions,
    everyone: list[dict[str, Any]],
    inputs: Inputs,
    small: Mapping[str, Sequence[int]],
    worst: list[dict[str, Any]],
    plan: PipelinePlan | None = None,
) -> RunReport:
    """Combine the results of all ranks into one report."""
    dims = options.dims
    tensors = len({name for share in everyone for name in share["names"]})
    stages = plan.stages.count if plan is not None else 1
    microbatches = plan.microbatches if plan is not None else 1
    bubble = plan.schedule.bubble_fraction(dims.pp, microbatches) if plan is not None else 0.0
    layers = sum(share["wrapped"] for share in everyone[:: dims.per_stage])  # one rank of each pipeline rank
    rows = [row for share in everyone for row in share["rows"]]
    inconclusive = _once(row for share in everyone for row in share["inconclusive"])
    first = everyone[0]
    ranks = [
        {
            "rank": rank,
            "bytes_read": share["read"],
            "bytes": share["nbytes"],
            "differing": len(share["rows"]),
            "peak_rss": share["peak_rss"],
            **{name: _plain(share.get(name)) for name in ("max_abs", "kl", "cosine", "grad_max_abs")},
        }
        for rank, share in enumerate(everyone)
    ]
    by_gradients: dict[str, Any] = {"gradients": None, "grad_max_abs": None, "grad_closest_to_tolerance": None}
    if options.backward:
        by_gradients = {
            "gradients": first["gradients"],
            "grad_max_abs": max(share["grad_max_abs"] for share in everyone),
            "grad_closest_to_tolerance": max(
                (share["grad_closest_to_tolerance"] for share in everyone), key=lambda found: found[1]
            ),
        }
    found = {
        "differing": rows,
        "inconclusive": inconclusive,
        "max_abs": max(share["max_abs"] for share in everyone),
        "max_abs_tolerance": first["max_abs_tolerance"],
        "logits_std": first["logits_std"],
        "kl": max((share["kl"] for share in everyone), key=badness),
        "cosine": max((share["cosine"] for share in everyone), key=lambda found: badness(-found)),
        "loss": first["loss"],
        "loss_reference": first["loss_reference"],
        "loss_tolerance": first["loss_tolerance"],
        "first_divergence": first.get("first_divergence"),
        "gradient_differences": worst,
        **by_gradients,
    }
    bytes_read_per_rank = [int(share["read"]) for share in everyone]
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
        tokens=list(inputs.words),
        attention_windows=dict(small),
        without_gradient=first.get("without_gradient"),
        compute_dtype=first["dtype"],
        checkpointed_layers=layers,
        gathered_modules=gathered_rows(share["gathered"] for share in everyone),
        measured_peak=max((share["taken"] for share in everyone), default=None) if options.measures else None,
        **peak_of_processes((share["peak_rss"] for share in everyone), are_ranks=dims.world_size > 1),
        bytes_read_per_rank=bytes_read_per_rank,
        **{name: _plain(value) for name, value in found.items()},
    )


def gathered_rows(by_rank: Iterable[Mapping[str, tuple[str, bool]]]) -> list[dict[str, Any]]:
    """Return a row for each pattern of modules that did not run on their TP shards alone, with their number."""
    modules = {name: found for names in by_rank for name, found in names.items()}
    counts = Counter((pattern_of(name), what, aligned) for name, (what, aligned) in modules.items())
    return [
        {"pattern": pattern, "modules": count, "what": what, "aligned": aligned}
        for (pattern, what, aligned), count in counts.items()
    ]


def rows_of_unread(reference: Mapping[str, str], checkpoint: Mapping[str, str]) -> list[dict[str, Any]]:
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
        is_expected = reason not in (NO_PLACE, UNKNOWN)
        rows.append({"name": name, "reason": reason, "stored_in": sides, "is_expected": is_expected})
    return rows


def _once(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the first row of each name: a tolerance is the same on every rank."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["level"], row["name"]), row)
    return list(found.values())


def worst_by_tensor(everyone: list[dict[str, Any]], stored: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """Return a row for each gradient, with the largest difference over all ranks."""
    found: dict[str, tuple[int, float, float]] = {}
    for rank, share in enumerate(everyone):
        for name, (distance, limit) in share["by_tensor"].items():
            if name not in found or distance > found[name][1]:
                found[name] = rank, distance, limit
    return [
        {**difference("gradients", rank, name, stored), "max_abs": _plain(distance), "tolerance": _plain(limit)}
        for name, (rank, distance, limit) in found.items()
    ]


def _plain(value: Any) -> Any:
    """Return a value as JSON can store it: numbers that are not finite become strings."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
