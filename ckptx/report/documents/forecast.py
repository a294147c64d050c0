"""What `forecast` reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptx.report.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastReport(Report):
    """Of `forecast`. All bytes are of tensors on one rank; each stage's are those of its first rank, which has most.

    Attributes:
        architecture: The class of the model.
        parameters: Of the whole model.
        layout: The mesh.
        settings: What a step does: batch, seq, microbatches, dtypes, optimizer, loss, ...
        by_stage: A row for each rank of the pipeline, one without a pipeline: `stages`, `peak`, `between_steps`,
            `by_kind` (bytes at the peak), `between_by_kind`, `at` (where the peak is), `largest` (tensors that live
            then), `flops`, `recomputed`, `sent` (bytes by collective), `wrapped_layers`, `fits`, `course` (the parts of
            the step in their order, with the bytes of each kind when they are most).
        kinds: Names of the numbers in each row of `course`.
        gpu_memory: Of each GPU, in bytes; None where it was not given.
        reserved: What is kept of it for what is no tensor, for the largest peak.
        fits: Whether every stage fits; None without `gpu_memory`.
        flops: Of a step, on all ranks.
        recomputed: Those of them that are computed a second time.
        assumptions: What the numbers do and do not say.
    """

    commands: ClassVar[Sequence[str]] = ("forecast",)

    architecture: str
    parameters: int
    layout: Mapping[str, int]
    settings: Mapping[str, Any]
    by_stage: Sequence[dict[str, Any]]
    kinds: Sequence[str]
    gpu_memory: int | None
    reserved: int
    fits: bool | None
    flops: int
    recomputed: int
    assumptions: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport(Report):
    """Of `forecast --search`. Bytes are of tensors on one rank.

    Attributes:
        architecture: The class of the model.
        parameters: Of the whole model.
        gpus: How many.
        gpu_memory: Of each, in bytes.
        settings: What a step does, on all GPUs: rows, seq, images, dtypes, optimizer, loss.
        found: What fits, the best first: `layout`, `activation_checkpointing`, `microbatches` (of each data rank),
            `rows` (of each of them), `peak`, `between_steps`, `reserved`, `flops`, `recomputed` (of the rank that
            computes most), `idle` (the part of a step in which ranks of a pipeline wait), `sent` (by collective, of the
            rank that sends most), `is_whole` (whether every stage and layer was counted, or held against others).
        too_large: What does not fit in any mode: `layout`, and the `peak` of the least that was looked at.
        refused: What cannot be: `layout` and `reason`.
        tried: Steps that were looked at.
        assumptions: What the numbers do and do not say.
    """

    commands: ClassVar[Sequence[str]] = ("forecast",)

    architecture: str
    parameters: int
    gpus: int
    gpu_memory: int
    settings: Mapping[str, Any]
    found: Sequence[dict[str, Any]]
    too_large: Sequence[dict[str, Any]]
    refused: Sequence[dict[str, Any]]
    tried: int
    assumptions: Sequence[str]
