"""The reports of what was counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.search import NODE, Candidate, SearchResult, SearchSpace
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.forecasting.timeline import kind_of
from ckptx.runtime.memory.reserve import CONTEXT, FRAGMENTATION, reserved
from ckptx.runtime.memory.storage_ledger import KINDS, StorageLifetime

_GIB = 2**30


def report_of(task: Task, ranks: Sequence[RankForecast], memory: int | None) -> ForecastReport:
    """The report of what was found."""
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
        reserved=reserved(peak),
        fits=fits,
        flops=sum(each.work.flops for each in ranks) * dims.per_stage,
        recomputed=sum(each.work.recomputed for each in ranks) * dims.per_stage,
        assumptions=assumptions_of(task, ranks[0].missing, any(each.left_out for each in ranks)),
    )


def _row(rank: RankForecast, memory: int | None) -> dict[str, Any]:
    course = rank.course
    worst, work, peak = course.worst, rank.work, rank.peak
    return {
        "stages": list(rank.stages),
        "peak": peak,
        "between_steps": sum(course.between),
        "by_kind": dict(zip(KINDS, worst.most, strict=True)),
        "between_by_kind": dict(zip(KINDS, course.between, strict=True)),
        "at": _told(worst.peak) if worst.peak is not None else None,
        "largest": [_told(each) for each in worst.largest],
        "flops": work.flops,
        "recomputed": work.recomputed,
        "sent": dict(work.sent),
        "wrapped_layers": rank.wrapped_layers,
        "fits": None if memory is None else peak + reserved(peak) <= memory,
        "course": [
            [each.part, each.turn, f"{each.unit.stack}.{each.unit.index}" if each.unit.stack else "", *each.most]
            for each in course.segments
        ],
    }


def _told(life: StorageLifetime) -> dict[str, Any]:
    return {
        "nbytes": life.nbytes,
        "kind": kind_of(life),
        "op": life.op,
        "module": life.born.module,
        "part": life.born.part,
        "microbatch": life.born.turn,
        "recomputed": life.born.is_again,
        "shape": list(life.shape),
        "dtype": str(life.dtype).removeprefix("torch."),
    }


def search_report_of(question: SearchSpace, found: SearchResult) -> SearchReport:
    """The report of what was searched for."""
    task, outcomes = question.task, found.outcomes
    best = [each.best for each in outcomes if each.best is not None]
    missing = best[0].missing if best else ()
    said = assumptions_of(task, missing, False)
    said.append(
        "every layout does the same step, and ran with few of the layers that are alike, few microbatches and, of a "
        "pipeline, few ranks; the row that says checked ran with every rank, and its layers were held against others"
    )
    if question.pins.tp is None and question.gpus > NODE:
        said.append(f"tensor parallelism stays within {NODE} GPUs, as a node has them; --tp takes another size")
    return SearchReport(
        command="forecast",
        exit=0 if best else 1,
        architecture=found.architecture,
        parameters=found.parameters,
        gpus=question.gpus,
        gpu_memory=question.memory,
        settings={"rows": task.recipe.training.global_batch, **_settings(task)},
        found=[_candidate(each) for each in best],
        too_large=[
            {"layout": _mesh(each.dims), "peak": each.least}
            for each in outcomes
            if each.best is None and not each.refused
        ],
        refused=[{"layout": _mesh(each.dims), "reason": each.refused} for each in outcomes if each.refused],
        tried=sum(each.tried for each in outcomes),
        assumptions=said,
    )


def _candidate(each: Candidate) -> dict[str, Any]:
    return {
        "layout": _mesh(each.task.dims),
        "activation_checkpointing": each.task.recipe.layout.activation_checkpointing,
        "microbatches": each.task.microbatches,
        "rows": each.task.microbatch,
        "peak": each.peak,
        "between_steps": each.between_steps,
        "reserved": reserved(each.peak),
        "flops": each.flops,
        "recomputed": each.recomputed,
        "idle": each.idle,
        "sent": dict(each.sent),
        "is_whole": each.is_whole,
    }


def _mesh(dims: ParallelDims) -> dict[str, int]:
    return {"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate}


def _settings(task: Task) -> dict[str, Any]:
    """What a step does in any layout."""
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
    """What the numbers of a task do and do not say.

    Args:
        task: What is done.
        missing: What the model has a tower for, and rows of the step lack.
        is_extrapolated: Whether some layers stood for others.
    """
    loss = {
        "sharded": "the loss is computed in float32, on logits that stay cut over the vocabulary under TP",
        "whole": "the loss is computed as transformers does it: on whole logits, in float32",
        "none": "no loss: logits are summed up",
    }[task.loss]
    said = [
        "bytes of tensors, on the first rank of each stage, which has the largest part of what is cut",
        loss,
        (
            "attention as on a CPU: fused, without whole scores wherever transformers chooses sdpa; kernels of CUDA "
            "that fall back to whole scores take more"
        ),
        (
            "not counted: workspaces of kernels, NCCL, the context of CUDA, fragmentation; kept free for them are "
            f"{CONTEXT / _GIB:.1f} GiB and {FRAGMENTATION:.0%} of the peak"
        ),
    ]
    if task.optimizer in ("adam", "adamw"):
        said.append("the optimizer goes one tensor at a time (foreach=False), as TP needs it")
    if is_extrapolated:
        said.append(
            "of layers that are alike a few ran: steps of three models, each with some more of them, agree on what "
            "each part of a step takes for one"
        )
    if missing and not task.images:
        said.append(f"text alone: nothing for its {' and '.join(missing)} tower to do; see --images")
    return said
