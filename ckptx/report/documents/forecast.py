"""Reports of `forecast` and `forecast --search`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptx.report.report import Report


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ForecastReport(Report):
    """Report of `forecast`. Bytes are those of tensors on the first global rank with these stages, which has the most.

    Attributes:
        architecture: Name of the model class.
        parameters: Number of parameters of the whole model.
        layout: Sizes of the mesh only: `tp`, `pp`, `dp_shard`, `dp_replicate`. `settings` has the rest of the layout.
        settings: Settings of a step: `batch` (sequences per data-parallel rank), `seq` (tokens per sequence), `images`
            (per sequence), `microbatches` (per data-parallel rank), `schedule` (null without a pipeline),
            `activation_checkpointing`, `ac_scope` (part of the model that it applies to: `all`, `language`, `vision` or
            `audio`), `dtype`, `param_dtype`, `reduce_dtype`, `optimizer`, `loss`, and `has_sharded_logits` (true if the
            output head keeps its logits sharded over the vocabulary).
        by_pipeline_rank: One entry per rank of the pipeline, or a single entry without a pipeline: `stages` (their
            numbers), `peak` and `between_steps` (bytes), `by_kind` (at the peak) and `between_steps_by_kind` (bytes of
            each of `memory_kinds`), `peak_tensor` (tensor whose allocation is the peak; null if the peak is at the
            start of its part of the step), `largest_tensors` (at the peak, descending; empty if `peak_tensor` is null),
            `flops`, `recomputed_flops`, `sent_bytes` (by collective), `checkpointed_layers` (their number), `fits` (as
            below, with the peak of this rank; null without `gpu_memory`), and `timeline`: parts of the step in order,
            each a list of phase, index of the pass, layer ("" outside layers), and the bytes of each kind at its own
            peak. A tensor has `bytes`, `kind`, `op` (operation that allocated it), `module`, `parameter` (null: none or
            unknown), `phase`, `microbatch` (index of the pass), `is_recomputed`, `shape` and `dtype`.
        memory_kinds: Kinds of memory, in the order of the numbers in each entry of `timeline`: `parameters`, `gathered`
            (by FSDP), `gradients`, `optimizer`, `activations`, `pipeline_p2p` (sent and received), `temporaries`.
        gpu_memory: Memory of a GPU in bytes; null if it was not given.
        reserved: Bytes of GPU memory needed in addition to the largest peak: CUDA context, NCCL and fragmentation.
        fits: True if on every pipeline rank the peak and its reserve (see `reserved`) fit in `gpu_memory`; null if it
            was not given.
        other_precision: The same step in mixed precision (float32 parameters that are gathered in bfloat16 or in the
            step's float16, gradients reduced in float32), if no precision was chosen: `dtype`, `param_dtype`,
            `reduce_dtype`, `peak` (largest of all ranks, in bytes), `reserved` (bytes), and `fits` (null without
            `gpu_memory`). Null if one was chosen, or if the schedule cannot be combined with FSDP.
        flops: FLOPs of a step, summed over all ranks.
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

    Every layout has the schedule 1F1B, unless a recipe sets another one.

    Attributes:
        architecture: Name of the model class.
        parameters: Number of parameters of the whole model.
        gpus: Number of GPUs.
        gpu_memory: Memory of a GPU in bytes.
        settings: Settings that all layouts share: `sequences_per_step` (over all GPUs), `seq` (tokens per sequence),
            `images` (per sequence), `dtype`, `param_dtype`, `reduce_dtype`, `optimizer`, `loss`.
        layouts: Layouts that fit, the best first: `layout` (sizes of the mesh, as in `ForecastReport`),
            `activation_checkpointing`, `microbatches` (per data-parallel rank), `sequences_per_microbatch`, `peak` and
            `between_steps` (bytes, each of the rank with the most), `reserved` (bytes), `flops` and `recomputed_flops`
            (of the rank that computes most), `bubble_fraction` (fraction of a step in which a pipeline rank is idle, if
            all stages take the same time; an upper bound for zero-bubble schedules), `sent_bytes` (by collective, of
            the rank that sends most), `is_fully_evaluated` (true if every stage was forecast, and the extrapolation
            over layers was checked; otherwise these numbers are of the pipeline ranks that can have the peak).
        layouts_too_large: Layouts that do not fit, whatever the activation checkpointing mode and the number of
            microbatches: `layout`, and the smallest `peak` in bytes, without the reserve: of the rank with the most, or
            a lower bound if parameters and training state alone are too large.
        unsupported_layouts: Layouts that are not supported: `layout` and `reason`.
        other_precision: The best layout in mixed precision (the layout with the smallest peak if none fits), if no
            precision was chosen: as in `ForecastReport`, with a lower bound as `peak` if no step was evaluated. Null if
            one was chosen, or no layout is supported.
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
