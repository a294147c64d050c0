"""Build the reports of `forecast`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.search import NODE, Candidate, SearchResult, SearchSpace
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.forecasting.timeline import kind_of
from ckptx.runtime.memory.reserve import CONTEXT, FRAGMENTATION, reserve_bytes
from ckptx.runtime.memory.storage_ledger import KINDS, StorageLifetime

_GIB = 2**30


def report_of(task: Task, ranks: Sequence[RankForecast], memory: int | None) -> ForecastReport:
    """Return the report of a forecast."""
    dims, training = task.dims, task.recipe.training
    rows = [_row(rank, memory) for rank in ranks]
    peak = max(row["peak"] for row in rows)
    fits = None if memory is None else all(row["fits"] for row in rows)
    layout = task.recipe.layout
    return ForecastReport(
        command="forecast",
        exit=0 if fits is not False else 1,
        architecture=ranks[0].architecture,
        parameters=ranks[0].parameters,
        layout=_mesh(dims),
        settings={
            "batch": training.global_batch // dims.dp,
            "microbatches": task.microbatches,
            "schedule": layout.schedule if dims.pp > 1 else None,
            "activation_checkpointing": layout.activation_checkpointing,
            "ac_scope": layout.ac_scope,
            **_settings(task),
        },
        by_stage=rows,
        kinds=KINDS,
        gpu_memory=memory,
        reserved=reserve_bytes(peak),
        fits=fits,
        flops=sum(each.work.flops for each in ranks) * dims.per_stage,
        recomputed_flops=sum(each.work.recomputed for each in ranks) * dims.per_stage,
        assumptions=assumptions_of(task, ranks[0].missing, any(each.left_out for each in ranks)),
    )


def _row(rank: RankForecast, memory: int | None) -> dict[str, Any]:
    timeline = rank.timeline
    worst, work, peak = timeline.worst, rank.work, rank.peak
    return {
        "stages": list(rank.stages),
        "peak": peak,
        "between_steps": sum(timeline.between),
        "by_kind": dict(zip(KINDS, worst.most, strict=True)),
        "between_steps_by_kind": dict(zip(KINDS, timeline.between, strict=True)),
        "peak_tensor": _storage_row(worst.peak) if worst.peak is not None else None,
        "largest_tensors": [_storage_row(each) for each in worst.largest],
        "flops": work.flops,
        "recomputed_flops": work.recomputed,
        "sent_bytes": dict(work.sent),
        "checkpointed_layers": rank.wrapped_layers,
        "fits": None if memory is None else peak + reserve_bytes(peak) <= memory,
        "timeline": [
            [each.part, each.turn, f"{each.unit.stack}.{each.unit.index}" if each.unit.stack else "", *each.most]
            for each in timeline.segments
        ],
    }


def _storage_row(life: StorageLifetime) -> dict[str, Any]:
    return {
        "bytes": life.nbytes,
        "kind": kind_of(life),
        "op": life.op,
        "module": life.born.module,
        "part": life.born.part,
        "microbatch": life.born.turn,
        "is_recomputed": life.born.is_again,
        "shape": list(life.shape),
        "dtype": str(life.dtype).removeprefix("torch."),
    }


def search_report_of(space: SearchSpace, found: SearchResult) -> SearchReport:
    """Return the report of a layout search."""
    task, outcomes = space.task, found.outcomes
    best = [each.best for each in outcomes if each.best is not None]
    missing = best[0].missing if best else ()
    assumptions = assumptions_of(task, missing, False)
    assumptions.append(
        "every layout runs the same step; layouts are forecast with few of the repeated layers, few microbatches and, "
        "with a pipeline, few ranks; the row marked checked was run on every rank, with its layers validated"
    )
    if space.fixed.tp is None and space.gpus > NODE:
        assumptions.append(f"tensor parallelism is limited to the {NODE} GPUs of a node; --tp sets another size")
    return SearchReport(
        command="forecast",
        exit=0 if best else 1,
        architecture=found.architecture,
        parameters=found.parameters,
        gpus=space.gpus,
        gpu_memory=space.memory,
        settings={"sequences": task.recipe.training.global_batch, **_settings(task)},
        layouts=[_candidate(each) for each in best],
        layouts_too_large=[
            {"layout": _mesh(each.dims), "peak": each.least}
            for each in outcomes
            if each.best is None and not each.refused
        ],
        unsupported_layouts=[{"layout": _mesh(each.dims), "reason": each.refused} for each in outcomes if each.refused],
        evaluated_steps=sum(each.tried for each in outcomes),
        assumptions=assumptions,
    )


def _candidate(each: Candidate) -> dict[str, Any]:
    return {
        "layout": _mesh(each.task.dims),
        "activation_checkpointing": each.task.recipe.layout.activation_checkpointing,
        "microbatches": each.task.microbatches,
        "sequences": each.task.microbatch,
        "peak": each.peak,
        "between_steps": each.between_steps,
        "reserved": reserve_bytes(each.peak),
        "flops": each.flops,
        "recomputed_flops": each.recomputed,
        "bubble_fraction": each.idle,
        "sent_bytes": dict(each.sent),
        "is_checked": each.is_checked,
    }


def _mesh(dims: ParallelDims) -> dict[str, int]:
    return {"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate}


def _settings(task: Task) -> dict[str, Any]:
    """Return the settings that do not depend on the layout."""
    layout = task.recipe.layout
    return {
        "seq": task.seq,
        "images": task.images,
        "dtype": task.recipe.model.dtype,
        "param_dtype": layout.param_dtype,
        "reduce_dtype": layout.reduce_dtype,
        "optimizer": task.optimizer,
        "loss": task.loss,
    }


def assumptions_of(task: Task, missing: Sequence[str], is_extrapolated: bool) -> list[str]:
    """Return the assumptions behind the numbers of a task.

    Args:
        task: Step that was forecast.
        missing: Kinds of input that the model has a tower for, but the step lacks.
        is_extrapolated: True if repeated layers were extrapolated.
    """
    loss = {
        "sharded": "the loss is computed in float32, on logits that stay sharded over the vocabulary under TP",
        "whole": "the loss is computed as in transformers: on full logits, in float32",
        "none": "no loss: the logits are summed",
    }[task.loss]
    assumptions = [
        "bytes of tensors, on the first rank of each stage, which has the largest shards",
        loss,
        (
            "assumes fused SDPA (no attention-score matrix) wherever transformers selects sdpa; CUDA kernels that fall "
            "back to a score matrix take more"
        ),
        (
            "not counted: kernel workspaces, NCCL, CUDA context, fragmentation; reserve for them: "
            f"{CONTEXT / _GIB:.1f} GiB + {FRAGMENTATION:.0%} of the peak"
        ),
    ]
    if task.optimizer in ("adam", "adamw"):
        assumptions.append("the optimizer updates one tensor at a time (foreach=False), as TP requires")
    if is_extrapolated:
        assumptions.append("repeated layers were extrapolated from three small models that agree")
    if missing and not task.images:
        assumptions.append(f"text only: the inputs have nothing for the {' and '.join(missing)} tower; see --images")
    return assumptions
