"""What `verify --run` reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport(Report):
    """Of `verify --run`. Numbers that are not finite are texts in it: "nan", "inf".

    Attributes:
        run: True.
        compared: Tensors that each rank loads.
        differing: A row for each difference: `level` is config, bytes, forward or gradients.
        undecided: A row for each result that is not away further than its limit, where that is more than `size`, the
            deviation of the logits or the largest number of a gradient: nothing could have been found there.
        world_size: Number of ranks.
        layout: The mesh.
        stages: Number of pipeline stages.
        bubble_fraction: The part of a step in which a rank of the pipeline waits, at best; 0 without a pipeline.
        microbatches: Of a step, on each data-parallel rank.
        reference_pieces: In how many the reference ran, one after another; 1 is as a whole.
        inputs: What the model was given: "text", "image", ...
        tokens: How many different tokens of text, and how many the vocabulary has.
        windows: Windows of attention that were run smaller than the configs say, so that the text crosses them: key ->
            what the config says, and what was run.
        unreached: Parameters that got no gradient: `name`, and `experts` where it is only some of them; None without a
            backward step.
        compute_dtype: Of the parameters, on both sides.
        wrapped_layers: Layers that recompute their activations.
        gathered: A row for each pattern of modules that did not run on their TP shards alone: `pattern`, the number of
            `modules`, `what` was gathered ("parameters" around the forward pass, or its "output"), and whether the
            shards are `aligned` with heads and fused parts. Empty without TP.
        bytes_read_per_rank: Bytes of the checkpoint that each rank read to load its part; `bytes_read` is their sum.
            What is read of the reference is not counted.
        max_abs: Largest distance of logits; `max_abs_limit` is what noise allows.
        max_abs_limit: See `max_abs`.
        logits_deviation: Standard deviation of the logits of the reference.
        kl: Largest KL divergence of logits.
        cosine: Smallest cosine of logits.
        loss: Of the checkpoint.
        loss_reference: Of the reference.
        loss_limit: How far the two may be apart.
        gradients: How many were compared; None without a backward step.
        grad_max_abs: Largest distance of gradients.
        grad_of_limit: The gradient nearest to its limit, and what part of it that is.
        first_divergence: The first module whose output differs.
        gradient_differences: How far each gradient is away.
        forecast_peak: Bytes of tensors of the checkpoint's side at the peak of the run, on the rank with the most, as
            they were forecast; where `--gpu-memory` asked.
        measured_peak: What they were.
        unread: A row for each stored tensor that no part of the model reads: `name`, `reason`, `stored_in` (reference,
            checkpoint), and `may_be_there`, False for one that the class does not have for no known reason.
        dtype_differences: A row for each pair of dtypes: `against` (reference or config), `stored`, `expected`,
            `tensors` and the first `names`.
        peak_rss_rank_0: Peak resident set size of rank 0, where this process started the ranks.
    """

    commands: ClassVar[Sequence[str]] = ("verify",)

    run: bool = True
    compared: int
    differing: Sequence[dict[str, Any]]
    undecided: Sequence[dict[str, Any]]
    world_size: int
    layout: dict[str, int]
    stages: int
    bubble_fraction: float
    microbatches: int
    reference_pieces: int
    inputs: Sequence[str]
    tokens: Sequence[int]
    windows: dict[str, Sequence[int]]
    unreached: Sequence[dict[str, Any]] | None
    compute_dtype: str
    wrapped_layers: int
    gathered: Sequence[dict[str, Any]]
    bytes_read_per_rank: Sequence[int]
    max_abs: float | str
    max_abs_limit: float | str
    logits_deviation: float | str
    kl: float | str
    cosine: float | str
    loss: float | str
    loss_reference: float | str
    loss_limit: float | str
    gradients: int | None
    grad_max_abs: float | str | None
    grad_of_limit: Sequence[Any] | None
    first_divergence: Any
    gradient_differences: Sequence[dict[str, Any]]
    unread: Sequence[dict[str, Any]] = field(default_factory=list)
    dtype_differences: Sequence[dict[str, Any]] = field(default_factory=list)
    forecast_peak: int | None = field(default=None, metadata=OPTIONAL)
    measured_peak: int | None = field(default=None, metadata=OPTIONAL)
    peak_rss_rank_0: int | None = field(default=None, metadata=OPTIONAL)
