"""Report of `convert`, `reshard` and `merge`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import OPTIONAL, Report


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConversionReport(Report):
    """Report of `convert`, `reshard` and `merge`.

    Attributes:
        parameters: Number of parameters: elements of the model's tensors, each tensor counted once.
        format: Format of the output: `huggingface`, `dcp` or `sharded`.
        output_bytes: Bytes of all files of the output, including those of an earlier, interrupted run.
        architecture: `class` and `known_from` (source of the model metadata); null if the class is unknown.
        ledger: Counts of tensors: all of the source (`source`), and of these by outcome: `written`, `tied`, `decoded`
            (parts of quantized weights), `dropped`. `target` has the number of target tensors (`tensors`), and by
            storage: `stored`, `copies` (stored again under another name), `aliases` (names for the bytes of another
            tensor).
        config_check: Comparison of names and shapes with the config: `checked` (what was compared), `unchecked`
            (number of tensors whose expected shape is unknown), `note` (null if everything was checked), `mismatches`,
            `is_truncated` (true if `mismatches` is not the complete list), `extra_tensors` (tensors that the class does
            not define and that are allowed, parts of quantized weights included: for each `reason`, their number
            `tensors` and the first `names`).
        names: For a change from or to torchtitan's or Megatron's names, the naming scheme `before` and `after`
            (`hf`: as on the Hub; `model`: state dict of transformers; `torchtitan`; `megatron`), and `permuted`: the
            `name` of each kind of tensor whose rows were reordered within heads, and the number of `heads` in the
            config.
        megatron: For `convert to-megatron`: `layers` (`stacked`: one tensor for all layers; `separate`: one for each),
            `vocabulary_rows` (rows of the embedding), `padded_rows` (with the rows of zeros that pad them), and
            `is_head_separate` (true if the output head is stored, so that Megatron has to load it untied).
        prefix: Prefix of the model's names in the source; empty if they have none.
        output_prefix: Prefix of the model's names in the output: that of the source, or one that was added; null if
            names have another scheme there.
        unknown_tensors: Names of all model tensors that the class does not define, allowed or not, except parts of
            quantized weights.
        dequantized: With `--dequantize`, `schemes` (for each: `scheme`, `tensors`, `parameters`, and `bytes` on disk)
            and `decoded` (name of each scale or other part, and the dequantized weight that it is decoded into).
        quantized: With `--quantize base`, `schemes` as in `dequantized`; `unchanged`, the number of weights that are
            equal to the dequantized base, whose bytes were copied; and `encoded`, the names of the weights that were
            quantized again. Weights that an earlier, interrupted run or another process wrote are in `schemes` only.
        adapters: For `merge` each adapter in order, and for `convert to-peft` the one that is written: `path`,
            `factor`, `ranks`, `alphas` and `scalings` of its layers (each value once), `rslora`, `dora`, `modules`
            (last components of their names), `layers` (number), `replaced` (names of the tensors of the model that it
            replaces), `has_config` (false if it is in a training checkpoint, which does not record alpha),
            `base` (model that it was trained on; null if not recorded) and `bytes` of its tensors.
        merged_weights: For `merge`, number of tensors to which modules of adapters were added.
        dtype_unchanged: Names of floating-point tensors that kept a dtype other than that of `--dtype`, or that
            `--dtype base` did not cast (see `base_dtypes`).
        base_dtypes: Result of `--dtype base`: number of tensors that are `matching` the dtype of the base, and names of
            those `not_in_base` and `quantized_in_base`, whose dtype did not change.
        overflows: `name` and `count` of each tensor in which the cast turned finite numbers into infinity.
        underflows: `name` and `count` of each tensor in which the cast turned nonzero numbers into zero.
        dropped_optimizer: Number of `tensors` and `bytes` of optimizer state that was dropped.
        objects: Pickled objects: their `count`, and `bytes` if they were dropped, or `is_copied: true`.
        state_without_parameter: Names of optimizer-state tensors that belong to no known parameter; stored on rank 0.
        state_replicated: Names of optimizer-state tensors of more than one element that are replicated because their
            shape differs from that of their parameter.
        layout: Sizes of the mesh (`tp`, `pp`, `dp_shard`), and `stages`: for each stage, the path of each list of
            layers, and the first index and the one after the last. With expert parallelism also `ep` and `ep_inner`,
            and with several stages per pipeline rank `virtual_stages` (number per rank) and `schedule_style`.
        chunks: Number of chunks that the tensors of the model are stored in, over all ranks.
        rules: Sharding of the tensors by TP: one entry for each name pattern and decision, with `pattern`, `tensors`
            (number of names), `rule` (origin of the decision; `default` if no TP rule matches), `reason`, `dim` that TP
            shards (null: none), `groups` (sizes of the parts that are fused along it; null: one), and whether the
            shards are `aligned` (null: not known).
        unaligned_tensors: Names of tensors whose shards do not hold whole heads, or whole key/value groups, of every
            fused part.
        replicated: Tensors of the model that TP does not shard: `tensors` (number of names), `bytes`, and `share` of
            the bytes of the model (0 to 1), in both of which each tensor counts once; only with TP.
        other_tensors: Names of the model tensors of a sharded output that TP does not shard because the class does not
            define them (see `unknown_tensors`) or does not use them.
        dry_run: True if nothing was written.
        files: For a dry run, `name`, `bytes` and `tensors` (number of stored tensors or parts of tensors) of each file.
        buffer_bytes: For a dry run, limit in bytes of the buffers that `--max-memory` limits.
        free_space: For a dry run, bytes free at the target. If `output_bytes` is larger, `exit` is 6, except with
            `--resume`.
    """

    commands: ClassVar[Sequence[str]] = (
        "convert to-dcp",
        "convert hf2dcp",
        "convert to-hf",
        "convert dcp2hf",
        "convert to-megatron",
        "convert to-peft",
        "reshard",
        "merge",
    )

    format: str = ""
    parameters: int
    output_bytes: int
    architecture: dict[str, str] | None
    ledger: dict[str, Any]
    config_check: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    names: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    megatron: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    prefix: str | None = field(default=None, metadata=OPTIONAL)
    output_prefix: str | None = field(default=None, metadata=OPTIONAL)
    unknown_tensors: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    dequantized: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    quantized: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    adapters: Sequence[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    merged_weights: int | None = field(default=None, metadata=OPTIONAL)
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
