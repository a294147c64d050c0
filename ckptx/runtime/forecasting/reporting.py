"""Build the reports of `forecast`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.search import GPUS_PER_NODE, Candidate, SearchResult, SearchSpace
from ckptx.runtime.forecasting.task import ForecastTask
from ckptx.runtime.forecasting.timeline import classify_storage
from ckptx.runtime.memory.reserve import CONTEXT_BYTES, FRAGMENTATION_FRACTION, reserve_bytes
from ckptx.runtime.memory.storage_ledger import KINDS, StorageLifetime
from ckptx.wording import first_of

_GIB = 2**30


def build_report(
    task: ForecastTask,
    ranks: Sequence[RankForecast],
    memory: int | None,
    other: tuple[ForecastTask, int] | None = None,
) -> ForecastReport:
    """Return the report of a forecast.

    Args:
        task: Step that was forecast.
        ranks: Forecast of each pipeline rank.
        memory: Memory of a GPU in bytes; None for no check.
        other: The same step in the precision of `with_other_precision`, and its peak in bytes; None for none.
    """
    dims, training = task.dims, task.recipe.training
    rows = [_rank_row(rank, memory) for rank in ranks]
    peak = max(row["peak"] for row in rows)
    fits = None if memory is None else all(row["fits"] for row in rows)
    layout = task.recipe.layout
    return ForecastReport(
        command="forecast",
        exit=0 if fits is not False else 1,
        architecture=ranks[0].architecture,
        parameters=ranks[0].parameter_count,
        layout=_mesh_row(dims),
        settings={
            "batch": training.global_batch // dims.dp,
            "microbatches": task.microbatches,
            "schedule": layout.schedule if dims.pp > 1 else None,
            "activation_checkpointing": layout.activation_checkpointing,
            "ac_scope": layout.ac_scope,
            "has_sharded_logits": any(each.has_sharded_logits for each in ranks),
            **_settings(task),
        },
        by_pipeline_rank=rows,
        memory_kinds=KINDS,
        gpu_memory=memory,
        reserved=reserve_bytes(peak),
        fits=fits,
        other_precision=None if other is None else _other_precision_row(*other, memory),
        flops=sum(each.op_counts.flops for each in ranks) * dims.ranks_per_stage,
        recomputed_flops=sum(each.op_counts.recomputed_flops for each in ranks) * dims.ranks_per_stage,
        assumptions=list_assumptions(
            task,
            task.dims.tp,
            ranks[0].missing_inputs,
            any(each.omitted_layers for each in ranks),
            has_sharded_logits=any(each.has_sharded_logits for each in ranks),
            keeps_gathered=_keeps_gathered(task.dims),
        ),
    )


def _other_precision_row(task: ForecastTask, peak: int, memory: int | None) -> dict[str, Any]:
    layout = task.recipe.layout
    return {
        "dtype": task.recipe.model.dtype,
        "param_dtype": layout.param_dtype,
        "reduce_dtype": layout.reduction_dtype,
        "peak": peak,
        "reserved": reserve_bytes(peak),
        "fits": None if memory is None else peak + reserve_bytes(peak) <= memory,
    }


def _rank_row(rank: RankForecast, memory: int | None) -> dict[str, Any]:
    timeline = rank.timeline
    worst, op_counts, peak = timeline.peak_segment, rank.op_counts, rank.peak
    return {
        "stages": list(rank.stages),
        "peak": peak,
        "between_steps": sum(timeline.between_steps_by_kind),
        "by_kind": dict(zip(KINDS, worst.peak_by_kind, strict=True)),
        "between_steps_by_kind": dict(zip(KINDS, timeline.between_steps_by_kind, strict=True)),
        "peak_tensor": _storage_row(worst.peak_storage) if worst.peak_storage is not None else None,
        "largest_tensors": [_storage_row(each) for each in worst.largest_storages],
        "flops": op_counts.flops,
        "recomputed_flops": op_counts.recomputed_flops,
        "sent_bytes": dict(op_counts.sent_bytes),
        "checkpointed_layers": rank.checkpointed_layers,
        "fits": None if memory is None else peak + reserve_bytes(peak) <= memory,
        "timeline": [
            [
                each.phase,
                each.pass_index,
                f"{each.layer.stack}.{each.layer.index}" if each.layer.stack else "",
                *each.peak_by_kind,
            ]
            for each in timeline.segments
        ],
    }


def _storage_row(lifetime: StorageLifetime) -> dict[str, Any]:
    return {
        "bytes": lifetime.nbytes,
        "kind": classify_storage(lifetime),
        "op": lifetime.operation,
        "module": lifetime.alloc_phase.module,
        "parameter": lifetime.parameter or None,
        "phase": lifetime.alloc_phase.name,
        "microbatch": lifetime.alloc_phase.pass_index,
        "is_recomputed": lifetime.alloc_phase.is_recompute,
        "shape": list(lifetime.shape),
        "dtype": str(lifetime.dtype).removeprefix("torch."),
    }


def build_search_report(
    space: SearchSpace, result: SearchResult, other: tuple[ForecastTask, int] | None = None
) -> SearchReport:
    """Return the report of a layout search.

    Args:
        space: Search that was run.
        result: Its result.
        other: A step in the precision of `with_other_precision`, and its peak in bytes; None for none.
    """
    task, mesh_results = space.task, result.mesh_results
    best = [each.best for each in mesh_results if each.best is not None]
    missing = best[0].missing_inputs if best else ()
    tp_sizes = {each.dims.tp for each in mesh_results if not each.refusal_reason}
    assumptions = list_assumptions(
        task,
        tp_sizes.pop() if len(tp_sizes) == 1 else None,
        missing,
        is_extrapolated=False,
        keeps_gathered=any(_keeps_gathered(each.dims) for each in mesh_results if not each.refusal_reason),
    )
    assumptions.append(
        "every layout runs the same step; its numbers are extrapolated from few layers, microbatches and pipeline "
        "ranks; for the row marked fully evaluated, every stage was forecast, and extrapolation over layers was checked"
    )
    if space.fixed.dp_replicate == 1:
        assumptions.append("layouts with replicas (HSDP) are not searched; --dp-replicate sets the number of replicas")
    if space.fixed.tp is None and space.gpus > GPUS_PER_NODE:
        assumptions.append(
            f"tensor parallelism is limited to the {GPUS_PER_NODE} GPUs of a node; --tp sets another size"
        )
    return SearchReport(
        command="forecast",
        exit=0 if best else 1,
        architecture=result.architecture,
        parameters=result.parameter_count,
        gpus=space.gpus,
        gpu_memory=space.memory,
        settings={"sequences_per_step": task.recipe.training.global_batch, **_settings(task)},
        layouts=[_candidate_row(each) for each in best],
        layouts_too_large=[
            {"layout": _mesh_row(each.dims), "peak": each.min_peak}
            for each in mesh_results
            if each.best is None and not each.refusal_reason
        ],
        unsupported_layouts=[
            {"layout": _mesh_row(each.dims), "reason": each.refusal_reason}
            for each in mesh_results
            if each.refusal_reason
        ],
        other_precision=None if other is None else _other_precision_row(*other, space.memory),
        # A candidate is a layout with its microbatches and activation checkpointing, for which one step is forecast.
        evaluated_steps=sum(each.candidate_count for each in mesh_results),
        assumptions=assumptions,
    )


def _candidate_row(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": _mesh_row(candidate.task.dims),
        "activation_checkpointing": candidate.task.recipe.layout.activation_checkpointing,
        "microbatches": candidate.task.microbatches,
        "sequences_per_microbatch": candidate.task.microbatch,
        "peak": candidate.peak,
        "between_steps": candidate.between_steps,
        "reserved": reserve_bytes(candidate.peak),
        "flops": candidate.flops,
        "recomputed_flops": candidate.recomputed_flops,
        "bubble_fraction": candidate.bubble_fraction,
        "sent_bytes": dict(candidate.sent_bytes),
        "is_fully_evaluated": candidate.is_fully_evaluated,
    }


def _mesh_row(dims: ParallelDims) -> dict[str, int]:
    return {"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate}


def _settings(task: ForecastTask) -> dict[str, Any]:
    """Return the settings that do not depend on the layout."""
    layout = task.recipe.layout
    return {
        "seq": task.seq,
        "images": task.images,
        "dtype": task.recipe.model.dtype,
        "param_dtype": layout.param_dtype,
        "reduce_dtype": layout.reduction_dtype,
        "optimizer": task.optimizer,
        "loss": task.loss,
    }


def gathered_notes(ranks: Sequence[RankForecast]) -> list[str]:
    """Return a note on the modules that do not run on their TP shards; empty if there are none."""
    patterns = list(dict.fromkeys(pattern for rank in ranks for pattern in rank.gathered_modules))
    if not patterns:
        return []
    note = (
        f"modules run with gathered parameters: {first_of(patterns)}; their activations and communication are forecast "
        "for whole weights, and a trainer that runs them on their shards takes less memory"
    )
    return [note]


def unsharded_notes(task: ForecastTask, ranks: Sequence[RankForecast]) -> list[str]:
    """Return a note if TP shards no parameter, so that every TP rank was forecast with the whole model."""
    if task.dims.tp == 1 or any(each.has_sharded_parameters for each in ranks):
        return []
    note = (
        f"--tp {task.dims.tp} shards no parameter of {ranks[0].architecture}: every TP rank is forecast with whole "
        "weights; pass --tp-plan FILE with rules for it, or leave out --tp (reshard may shard its embedding and head, "
        "which does not need a forward pass)"
    )
    return [note]


def _keeps_gathered(dims: ParallelDims) -> bool:
    """Return True if FSDP2 keeps gathered parameters after a forward pass, as in a pipeline."""
    return dims.pp > 1 and dims.dp_shard > 1


def list_assumptions(
    task: ForecastTask,
    tp: int | None,
    missing: Sequence[str],
    is_extrapolated: bool,
    *,
    has_sharded_logits: bool = True,
    keeps_gathered: bool = False,
) -> list[str]:
    """Return the assumptions behind the numbers of a task.

    Args:
        task: Step that was forecast.
        tp: Number of TP ranks; None for a search of several.
        missing: Kinds of input ("images", ...) that the model has a tower for, but the step lacks.
        is_extrapolated: True if repeated layers were extrapolated.
        has_sharded_logits: True if the output head keeps its logits sharded over the vocabulary under TP.
        keeps_gathered: True if a mesh has more than one pipeline rank and more than one FSDP2 rank.
    """
    loss = {
        "sharded": "the loss is computed in float32"
        + (
            ""
            if tp == 1
            else ", under TP on sharded logits: each rank has its part of the vocabulary"
            if has_sharded_logits
            else ", under TP on full logits, because the head is not sharded or gathers its output"
        ),
        "full": "the loss is computed as in transformers: on full logits, in float32",
        "none": "no loss: the logits are summed",
    }[task.loss]
    assumptions = [
        "the forecast counts the bytes of tensors on the first rank of each stage, which has the largest shards",
        loss,
        (
            "assumes fused SDPA (no attention-score matrix) wherever transformers selects sdpa; CUDA kernels that fall "
            "back to a score matrix take more"
        ),
        (
            "not counted: kernel workspaces, NCCL, CUDA context, fragmentation; the reserve covers them: "
            f"{CONTEXT_BYTES / _GIB:.1f} GiB + {FRAGMENTATION_FRACTION:.0%} of the peak"
        ),
    ]
    if task.optimizer in ("adam", "adamw"):
        assumptions.append(
            "the optimizer updates one tensor at a time (foreach=False); foreach=True needs more memory for temporaries"
        )
    if task.recipe.training.clip is not None:
        assumptions.append(
            f"gradients are clipped to a norm of {task.recipe.training.clip:g} before the optimizer step"
        )
    if keeps_gathered:
        assumptions.append(
            "with PP, FSDP2 keeps gathered parameters between forward and backward passes (reshard_after_forward=False)"
        )
    if task.dims.pp > 1:
        assumptions.append(
            "with PP, stages keep a receive buffer for each microbatch between steps, and exchange the gradients of "
            "weights that are tied across stages"
        )
    if tp is not None and task.microbatches > 1 and task.dims.dp_shard > 1:
        assumptions.append(
            "FSDP2 reduces gradients after the last microbatch; until then they are not sharded over the FSDP ranks"
        )
    if is_extrapolated:
        assumptions.append("repeated layers were extrapolated from models with fewer layers that agree")
    absent = [kind for kind in missing if kind != "images" or not task.images]
    if absent:
        advice = "; see --images" if "images" in absent else ""
        assumptions.append(f"no {' and '.join(absent)} in the input, so that their towers are not called{advice}")
    return assumptions
