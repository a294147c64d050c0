"""Report of `inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOfInspection:
    """Additional fields of `inspect --ranks`.

    Attributes:
        layout: Sizes of the mesh and the layers of each stage; null if the mesh is unknown.
        sharded_tensors: Number of sharded tensors.
        balance: Mean and extremes of the bytes of ranks; null without tensor data.
        by_file: One entry per file, if no file name has a rank.
    """

    layout: dict[str, Any] | None
    sharded_tensors: int
    balance: dict[str, Any] | None
    by_file: Sequence[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class InspectionReport(Report):
    """Report of `inspect`.

    Attributes:
        path: Path of the checkpoint.
        format: Name of the format, as in docs/formats.md.
        bytes: Bytes of tensor data, shared bytes counted once.
        parameters: Number of parameters: elements of the model's tensors, each tensor counted once.
        architecture: Name of the model class; null if it is unknown.
        prefix: Prefix of the names of the model; empty for none.
        files: Bytes of each file that contains tensor data.
        other_files: Names of the files that belong to the checkpoint besides the weights, such as config and tokenizer.
        chunks: Number of chunks that tensors are stored in; shared chunks count once.
        alias_groups: Groups of names that share bytes.
        tied_groups: Groups of tied names that are stored separately; each counts as one parameter.
        optimizer: Number of tensors and bytes of optimizer state.
        other_tensors: Names that are neither model nor optimizer state.
        objects: Number of pickled objects.
        unknown_tensors: Names that the class does not have.
        config_check: Comparison of names and shapes with the config, as in `convert`; null without a config or for an
            unknown class.
        groups: Number of tensors and bytes for each pattern of names.
        selected_tensors: One entry per tensor that was selected for listing.
        by_rank: Additional fields of `--ranks`; in the document they are on the same level as the others.
        html: Path of the HTML page.
    """

    commands: ClassVar[Sequence[str]] = ("inspect",)

    path: str
    format: str
    bytes: int
    parameters: int
    architecture: str | None
    prefix: str
    files: Mapping[str, int]
    other_files: Sequence[str]
    chunks: int
    alias_groups: Sequence[Sequence[str]]
    tied_groups: Sequence[Sequence[str]]
    optimizer: dict[str, int]
    other_tensors: Sequence[str]
    objects: int
    unknown_tensors: Sequence[str]
    config_check: dict[str, Any] | None
    groups: Sequence[dict[str, Any]]
    selected_tensors: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    by_rank: RanksOfInspection | None = field(default=None, metadata=OPTIONAL)
    html: str | None = field(default=None, metadata=OPTIONAL)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        document = Report.to_dict(self)
        by_rank = document.pop("by_rank", None)
        if by_rank is not None:
            document |= {
                "layout": by_rank.layout,
                "sharded_tensors": by_rank.sharded_tensors,
                "balance": by_rank.balance,
            }
            if by_rank.by_file is not None:
                document["by_file"] = by_rank.by_file
        return document
