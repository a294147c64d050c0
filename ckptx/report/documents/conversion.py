"""Report of `convert` and `reshard`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConversionReport(Report):
    """Report of `convert` and `reshard`.

    Attributes:
        parameters: Number of parameters: elements of the model's tensors, each tensor counted once.
        output_bytes: Bytes of all files of the output, including those of an earlier, interrupted run.
        architecture: `class` and `known_from` (source of the model metadata); null if the class is unknown.
        ledger: Number of source tensors by outcome (`written`, `aliases`, `dropped`), and of target tensors by storage.
        config_check: Comparison of names and shapes with the config: `checked` (what was compared), `unchecked`
            (number of tensors whose expected shape is unknown), `note` (null if everything was checked), `mismatches`,
            `is_truncated` (true if there are more), `extra_tensors` (allowed tensors that the class does not have).
        prefix: Prefix of the model's names in the source.
        output_prefix: Prefix of the model's names in the output: that of the source, or one that was added.
        unknown_tensors: Names that the class does not have.
        dtype_unchanged: Names of tensors whose dtype `--dtype` did not change.
        base_dtypes: Dtypes that `--dtype base` restored from the base checkpoint.
        overflows: `name` and `count` of each tensor in which the cast turned finite numbers into infinity.
        underflows: `name` and `count` of each tensor in which the cast turned nonzero numbers into zero.
        dropped_optimizer: Number of `tensors` and `bytes` of optimizer state that was dropped.
        objects: Pickled objects: their `count`, and `bytes` if they were dropped, or `is_copied`.
        state_without_parameter: Names of optimizer tensors that belong to no known parameter.
        state_replicated: Names of optimizer tensors whose shape differs from that of their parameter.
        layout: Sizes of the mesh, and the layers of each stage.
        chunks: Number of shards that tensors were split into.
        rules: One entry per pattern of names, with the rule that determined its sharding and the number of names.
        unaligned_tensors: Names of tensors whose shards do not align with heads or groups of every fused part.
        replicated: Tensors of the model that TP does not shard: their number, their bytes and their share of the bytes
            of the model, each tensor counted once; only with TP.
        other_tensors: Names of tensors that do not belong to the model; they were copied unchanged.
        dry_run: True if nothing was written.
        files: For a dry run, `name`, `bytes` and `tensors` of each file.
        buffer_bytes: For a dry run, bytes of I/O buffers.
        free_space: For a dry run, bytes free at the target.
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
    config_check: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    prefix: str | None = field(default=None, metadata=OPTIONAL)
    output_prefix: str | None = field(default=None, metadata=OPTIONAL)
    unknown_tensors: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    dtype_unchanged: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    base_dtypes: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    overflows: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    underflows: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    dropped_optimizer: dict[str, int] | None = field(default=None, metadata=OPTIONAL)
    objects: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    state_without_parameter: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    state_replicated: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    layout: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    chunks: int | None = field(default=None, metadata=OPTIONAL)
    rules: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    unaligned_tensors: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    replicated: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    other_tensors: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    dry_run: bool | None = field(default=None, metadata=OPTIONAL)
    files: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    buffer_bytes: int | None = field(default=None, metadata=OPTIONAL)
    free_space: int | None = field(default=None, metadata=OPTIONAL)
