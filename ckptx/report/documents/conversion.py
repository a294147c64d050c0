"""What `convert` and `reshard` report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport(Report):
    """Of `convert` and `reshard`.

    Attributes:
        parameters: Elements of the model's tensors, each tensor once.
        output_bytes: Bytes of all files of the output, whichever run wrote them.
        architecture: `class` and `known_from`, or None.
        ledger: How many names of the source ended how, and what the target is made of.
        fit: Names and shapes held against the config.
        prefix: What was removed from names.
        unknown: Names that the class does not have.
        kept_dtype: Names that `--dtype` left as they were.
        base_dtypes: What `--dtype base` did.
        overflows: `name` and `count` of each tensor in which the cast made finite numbers infinite.
        underflows: `name` and `count` of each tensor in which the cast made numbers other than zero zero.
        optimizer: Tensors and bytes of optimizer state that was dropped.
        objects: Pickled objects that were dropped or carried.
        state_without_parameter: Optimizer tensors of no known parameter.
        state_replicated: Optimizer tensors whose shape differs from their parameter's.
        layout: The mesh, and the layers of each stage.
        chunks: Pieces that tensors were cut into.
        rules: Which rule decided, for each pattern of names.
        unaligned: Names of tensors whose shards do not hold whole heads or groups of every fused part.
        replicated: Tensors of the model that TP does not shard: their number, their bytes and their share of the bytes
            of the model, each tensor counted once; only with TP.
        passed_through: Names that the model does not have.
        dry_run: True when nothing was written.
        files: Of a dry run: `name`, `bytes` and `tensors` of each file.
        memory: Of a dry run: bytes of buffers.
        free_space: Of a dry run: bytes free at the target.
    """

    commands: ClassVar[Sequence[str]] = (
        "convert to-dcp",
        "convert hf2dcp",
        "convert to-hf",
        "convert dcp2hf",
        "reshard",
    )

    parameters: int
    output_bytes: int
    architecture: dict[str, str] | None
    ledger: dict[str, Any]
    fit: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    prefix: str | None = field(default=None, metadata=OPTIONAL)
    unknown: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    kept_dtype: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    base_dtypes: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    overflows: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    underflows: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    optimizer: dict[str, int] | None = field(default=None, metadata=OPTIONAL)
    objects: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    state_without_parameter: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    state_replicated: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    layout: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    chunks: int | None = field(default=None, metadata=OPTIONAL)
    rules: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    unaligned: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    replicated: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    passed_through: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    dry_run: bool | None = field(default=None, metadata=OPTIONAL)
    files: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    memory: int | None = field(default=None, metadata=OPTIONAL)
    free_space: int | None = field(default=None, metadata=OPTIONAL)
