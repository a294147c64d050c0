"""Reports of `forecast` and `forecast --search`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptx.report.report import Report


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ForecastReport(Report):
    """Report of `forecast`. Bytes are those of tensors on the first rank of a stage, which has the most.

    Attributes:
        architecture: Name of the model class.
        parameters: Number of parameters of the whole model.
        layout: Sizes of the mesh: `tp`, `pp`, `dp_shard`, `dp_replicate`.
        settings: Settings of a step: `batch` (sequences per data-parallel rank), `seq`, `images`, `microbatches`,
            `schedule` (null without a pipeline), `activation_checkpointing`, `ac_scope`, `dtype`, `param_dtype`,
            `reduce_dtype`, `optimizer`, `loss`, `has_sharded_logits`.
        by_pipeline_rank: One entry per rank of the pipeline, or a single entry without a pipeline: `stages`, `peak` and
            `between_steps` (bytes), `by_kind` (bytes at the peak), `between_steps_by_kind`, `peak_tensor` (tensor whose
            allocation is the peak), `largest_tensors` (at the peak), `flops`, `recomputed_flops`, `sent_bytes` (by
            collective), `checkpointed_layers`, `fits`, `timeline` (parts of the step in order, each with the bytes by
            kind at its own peak).
        memory_kinds: Kinds of memory, in the order of the numbers in each entry of `timeline`.
        gpu_memory: Memory of a GPU in bytes; null if it was not given.
        reserved: Bytes of GPU memory needed in addition to the largest peak: CUDA context, NCCL and fragmentation.
        fits: True if every stage fits in `gpu_memory`; null if it was not given.
        other_precision: The same step in the other common precision, if none was chosen: `dtype`, `param_dtype`,
            `reduce_dtype`, `peak` (largest, in bytes), `reserved` (bytes) and `fits`; null if one was chosen.
        flops: FLOPs of a step, summed over ranks.
        recomputed_flops: FLOPs of activations that are recomputed; part of `flops`.
        assumptions: Assumptions and limits of the forecast.
    """

    commands: ClassVar[Sequence[str]] = ("forecast",)

    architecture: str
    parameters: int
    layout: Mapping[str, int]
    settings: Mapping[str, Any]
    by_pipeline_rank: Sequence[dict[str, Any]]
    memory_kinds: Sequence[str]
    gpu_memory: int | None
    reserved: int
    fits: bool | None
    other_precision: Mapping[str, Any] | None
    flops: int
    recomputed_flops: int
    assumptions: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchReport(Report):
    """Report of `forecast --search`. Bytes are those of tensors on one rank.

    Attributes:
        architecture: Name of the model class.
        parameters: Number of parameters of the whole model.
        gpus: Number of GPUs.
        gpu_memory: Memory of a GPU in bytes.
        settings: Settings that all layouts share: `sequences_per_step` (over all GPUs), `seq`, `images`, `dtype`,
            `param_dtype`, `reduce_dtype`, `optimizer`, `loss`.
        layouts: Layouts that fit, the best first: `layout`, `activation_checkpointing`, `microbatches` (per
            data-parallel rank), `sequences_per_microbatch`, `peak`, `between_steps` and `reserved` (bytes), `flops`
            and `recomputed_flops` (of the rank that computes most), `bubble_fraction` (fraction of a step in which a
            pipeline rank is idle), `sent_bytes` (by collective, of the rank that sends most), `is_fully_evaluated`
            (true if every stage was forecast, and the extrapolation over layers was checked).
        layouts_too_large: Layouts that fit with no activation checkpointing mode and number of microbatches: `layout`,
            and the smallest `peak` evaluated, in bytes.
        unsupported_layouts: Layouts that are not supported: `layout` and `reason`.
        other_precision: The best layout in the other common precision (the layout with the smallest peak if none fits),
            if none was chosen: as in `ForecastReport`; null if one was chosen, or no layout is supported.
        evaluated_steps: Number of steps that the search evaluated.
        assumptions: Assumptions and limits of the forecast.
    """

    commands: ClassVar[Sequence[str]] = ("forecast",)

    architecture: str
    parameters: int
    gpus: int
    gpu_memory: int
    settings: Mapping[str, Any]
    layouts: Sequence[dict[str, Any]]
    layouts_too_large: Sequence[dict[str, Any]]
    unsupported_layouts: Sequence[dict[str, Any]]
    other_precision: Mapping[str, Any] | None
    evaluated_steps: int
    assumptions: Sequence[str]
