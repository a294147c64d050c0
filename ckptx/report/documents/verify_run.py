"""Report of `verify --run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunReport(Report):
    """Report of `verify --run`. NaN and infinity are the strings "nan" and "inf".

    Of values that ranks compute, `max_abs`, `grad_max_abs` and `kl` are the largest over all ranks, `cosine` the
    smallest; other numbers of logits and losses, and `first_divergence`, are those of rank 0.

    Attributes:
        run: Always true; distinguishes this report from that of `verify` without `--run`.
        compared: Number of tensors that the checkpoint's model loads, over all ranks; a sharded one counts once.
        differing: One entry per difference: `level` ("config", "bytes", "forward" or "gradients"), `rank`, `name`, with
            `--pp` a `stage`, and values that depend on the level.
        inconclusive: One entry per inconclusive result: it is within its `tolerance`, but the tolerance exceeds
            `magnitude`, the standard deviation of the logits or the largest value of a gradient, so that no error could
            be detected.
        world_size: Number of ranks.
        layout: Sizes of the mesh only: `tp`, `pp`, `dp_shard`, `dp_replicate`.
        stages: Number of pipeline stages.
        bubble_fraction: Fraction of a step in which a pipeline rank is idle, if all stages take the same time and
            sending takes none; an upper bound for zero-bubble schedules; 0 without a pipeline.
        microbatches: Number of microbatches per step and data-parallel rank.
        reference_parts: Number of consecutive parts in which the reference ran; 1 means as a whole.
        inputs: Kinds of model inputs: "text", "image", ...
        distinct_tokens: Number of distinct tokens in the input text.
        vocabulary_size: Number of tokens in the vocabulary.
        attention_windows: Attention windows that `verify --run` shortened so that the sequence exceeds them: config key
            -> size in the config, size in the run, in tokens.
        without_gradient: Parameters without a gradient: `name`, and `experts` if only some of them have none; null
            without a backward step.
        compute_dtype: Dtype of the parameters in the run, on both sides.
        checkpointed_layers: Number of layers with activation checkpointing.
        gathered_modules: One entry per pattern of modules that did not run on their TP shards alone: `pattern`, the
            number of `modules`, `what` was gathered ("parameters" around the forward pass, or its "output"), and
            whether the shards are `aligned` with heads and fused parts. Empty without TP.
        bytes_read_per_rank: Bytes of the checkpoint that each rank read to load its part; `bytes_read` is their sum.
            Reads of the reference are not counted.
        max_abs: Largest absolute difference of logits.
        max_abs_tolerance: Tolerance of `max_abs`, from the measured noise.
        logits_std: Standard deviation of the logits of the reference.
        kl: KL divergence of the logits, mean over the tokens of a microbatch; the largest of all microbatches.
        cosine: Cosine similarity of all logits of a microbatch; the smallest of all microbatches.
        loss: Loss of the checkpoint.
        loss_reference: Loss of the reference.
        loss_tolerance: Tolerance of the difference of both losses.
        gradients: Number of gradients that were compared; null without a backward step.
        grad_max_abs: Largest absolute difference of gradients; null without a backward step.
        grad_closest_to_tolerance: Name of the gradient that is closest to its tolerance, and its difference divided by
            the tolerance; null without a backward step.
        first_divergence: First module whose output differs, with its `max_abs` and `tolerance`; null if none does.
        gradient_differences: One entry per gradient, with `max_abs` (its difference from the reference) and
            `tolerance`.
        forecast_peak: Forecast of the peak bytes of tensors of the checkpoint's model, maximum over ranks; only with
            `--gpu-memory`.
        measured_peak: Measured peak bytes of the same tensors, maximum over ranks.
        unread_tensors: One entry per stored tensor that no part of the model reads: `name`, `reason`, `stored_in`
            (reference, checkpoint), and `is_expected`, false for a tensor that the class does not have for no known
            reason.
        dtype_differences: One entry per pair of dtypes that differ: `against` (reference or config), `stored`,
            `expected`, `tensors` (their number), the first `names`, and `reference_config` (path of the config of the
            reference, if the checkpoint has none).
        peak_rss_rank_0: Peak resident set size of rank 0 in bytes, if this process started the ranks.
    """

    commands: ClassVar[Sequence[str]] = ("verify",)

    run: bool = True
    compared: int
    differing: Sequence[dict[str, Any]]
    inconclusive: Sequence[dict[str, Any]]
    world_size: int
    layout: dict[str, int]
    stages: int
    bubble_fraction: float
    microbatches: int
    reference_parts: int
    inputs: Sequence[str]
    distinct_tokens: int
    vocabulary_size: int
    attention_windows: dict[str, Sequence[int]]
    without_gradient: Sequence[dict[str, Any]] | None
    compute_dtype: str
    checkpointed_layers: int
    gathered_modules: Sequence[dict[str, Any]]
    bytes_read_per_rank: Sequence[int]
    max_abs: float | str
    max_abs_tolerance: float | str
    logits_std: float | str
    kl: float | str
    cosine: float | str
    loss: float | str
    loss_reference: float | str
    loss_tolerance: float | str
    gradients: int | None
    grad_max_abs: float | str | None
    grad_closest_to_tolerance: Sequence[Any] | None
    first_divergence: Any
    gradient_differences: Sequence[dict[str, Any]]
    unread_tensors: Sequence[dict[str, Any]] = field(default_factory=list)
    dtype_differences: Sequence[dict[str, Any]] = field(default_factory=list)
    forecast_peak: int | None = field(default=None, metadata=OPTIONAL)
    measured_peak: int | None = field(default=None, metadata=OPTIONAL)
    peak_rss_rank_0: int | None = field(default=None, metadata=OPTIONAL)
