"""What each command reports beside what every report has; docs/report.md defines the words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport(Report):
    """Of `convert` and `reshard`.

    Attributes:
        parameters: Elements of the model's tensors, each tensor once.
        architecture: `class` and `known_from`, or None.
        ledger: How many names of the source ended how, and what the target is made of.
        fit: Names and shapes held against the config.
        prefix: What was removed from names.
        unknown: Names that the class does not have.
        kept_dtype: Names that `--dtype` left as they were.
        base_dtypes: What `--dtype base` did.
        optimizer: Tensors and bytes of optimizer state that was dropped.
        objects: Pickled objects that were dropped or carried.
        state_without_parameter: Optimizer tensors of no known parameter.
        state_replicated: Optimizer tensors whose shape differs from their parameter's.
        layout: The mesh, and the layers of each stage.
        chunks: Pieces that tensors were cut into.
        rules: Which rule decided, for each pattern of names.
        unaligned: Names cut without regard to heads.
        passed_through: Names that the model does not have.
        dry_run: True when nothing was written.
        files: Of a dry run: `name`, `bytes` and `tensors` of each file.
        memory: Of a dry run: bytes of buffers.
        free_space: Of a dry run: bytes free at the target.
    """

    parameters: int
    architecture: dict[str, str] | None
    ledger: dict[str, Any]
    fit: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    prefix: str | None = field(default=None, metadata=OPTIONAL)
    unknown: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    kept_dtype: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    base_dtypes: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    optimizer: dict[str, int] | None = field(default=None, metadata=OPTIONAL)
    objects: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    state_without_parameter: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    state_replicated: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    layout: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    chunks: int | None = field(default=None, metadata=OPTIONAL)
    rules: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    unaligned: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    passed_through: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    dry_run: bool | None = field(default=None, metadata=OPTIONAL)
    files: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    memory: int | None = field(default=None, metadata=OPTIONAL)
    free_space: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOfInspection:
    """What `inspect --ranks` adds.

    Attributes:
        layout: The mesh and the layers of each stage, or None where it is unknown.
        cut_tensors: Tensors in more than one piece.
        balance: Mean and extremes of the bytes of ranks, or None.
        by_file: Where no file names a rank: a row for each file.
    """

    layout: dict[str, Any] | None
    cut_tensors: int
    balance: dict[str, Any] | None
    by_file: Sequence[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionReport(Report):
    """Of `inspect`.

    Attributes:
        path: Where the checkpoint lies.
        format: "huggingface", "bin", "dcp" or "sharded".
        bytes: Bytes of tensor data, shared bytes once.
        parameters: Elements of the model's tensors, each tensor once.
        architecture: Name of the class, or None.
        prefix: What names of the model begin with.
        files: Bytes of each file that holds tensor data.
        sidecars: Files that travel with the weights.
        chunks: Pieces that tensors lie in.
        shared: Groups of names that share bytes.
        tied: Groups of names that are stored apart and count once.
        optimizer: Tensors and bytes of optimizer state.
        other: Names that are neither model nor optimizer.
        objects: Number of pickled objects.
        unknown: Names that the class does not have.
        fit: Names and shapes held against the config.
        groups: Tensors and bytes by pattern.
        listed: A row for each tensor that was asked for.
        by_rank: Of `--ranks`; in the document its fields stand beside the others.
        html: Where the page is.
    """

    path: str
    format: str
    bytes: int
    parameters: int
    architecture: str | None
    prefix: str
    files: Mapping[str, int]
    sidecars: Sequence[str]
    chunks: int
    shared: Sequence[Sequence[str]]
    tied: Sequence[Sequence[str]]
    optimizer: dict[str, int]
    other: Sequence[str]
    objects: int
    unknown: Sequence[str]
    fit: dict[str, Any] | None
    groups: Sequence[dict[str, Any]]
    listed: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    by_rank: RanksOfInspection | None = field(default=None, metadata=OPTIONAL)
    html: str | None = field(default=None, metadata=OPTIONAL)

    def to_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        document = Report.to_dict(self)
        by_rank = document.pop("by_rank", None)
        if by_rank is not None:
            document |= {"layout": by_rank.layout, "cut_tensors": by_rank.cut_tensors, "balance": by_rank.balance}
            if by_rank.by_file is not None:
                document["by_file"] = by_rank.by_file
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Report):
    """Of `diff`.

    Attributes:
        parameters: Of the first checkpoint.
        compared: Names that both have.
        differing: A row for each difference.
        tied: Names that one side leaves out, because they are tied to one that both have.
    """

    parameters: int
    compared: int
    differing: Sequence[dict[str, Any]]
    tied: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Report):
    """Of `verify`.

    Attributes:
        parameters: Of the reference.
        compared: Pairs of tensors that were compared.
        differing: A row for each difference.
    """

    parameters: int
    compared: int
    differing: Sequence[dict[str, Any]]


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
        stages: Pipeline stages.
        inputs: What the model was given: "text", "image", ...
        compute_dtype: Of the parameters, on both sides.
        wrapped_layers: Layers that recompute their activations.
        bytes_read_per_rank: By rank.
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
        peak_rss_rank_0: Of the process that ran as rank 0, where this one started the ranks.
    """

    run: bool = True
    compared: int
    differing: Sequence[dict[str, Any]]
    undecided: Sequence[dict[str, Any]]
    world_size: int
    layout: dict[str, int]
    stages: int
    inputs: Sequence[str]
    compute_dtype: str
    wrapped_layers: int
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
    peak_rss_rank_0: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReport(Report):
    """Of `env`.

    Attributes:
        ckptx: Its version.
        python: Version of Python.
        platform: Name of the platform.
        cores: That this process may use.
        packages: Version of each package, or None.
        tested_with: Versions that the tests run with.
    """

    ckptx: str
    python: str
    platform: str
    cores: int
    packages: Mapping[str, str | None]
    tested_with: Mapping[str, str]
