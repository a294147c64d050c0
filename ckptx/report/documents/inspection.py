"""What `inspect` reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


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
        format: Name of the format, as in docs/formats.md.
        bytes: Bytes of tensor data, shared bytes once.
        parameters: Elements of the model's tensors, each tensor once.
        architecture: Name of the class, or None.
        prefix: What names of the model begin with.
        files: Bytes of each file that holds tensor data.
        sidecars: Files that travel with the weights.
        chunks: Chunks that tensors are stored in; those that names share count once.
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

    commands: ClassVar[Sequence[str]] = ("inspect",)

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
