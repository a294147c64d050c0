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
        layout: Sizes of the mesh (`tp`, `pp`, `dp_shard`, and `ep` with expert parallelism), and `stages`: the layers
            of each pipeline rank; null if the mesh is unknown.
        sharded_tensors: Number of sharded tensors.
        stored_by_one_tp_rank: Number of tensors that TP replicates and only one TP rank stores, as in a DCP; the other
            TP ranks read them from its files.
        balance: Tensor bytes per rank, or per file if the files are not those of ranks: `mean`, `max`, `min`,
            `max_over_mean`, `max_rank` and `min_rank` (null for files); null without tensor data.
        by_file: One entry per file, if the files are not those of ranks: `file`, `layers`, `tensors` and `bytes`.
    """

    layout: dict[str, Any] | None
    sharded_tensors: int
    balance: dict[str, Any] | None
    stored_by_one_tp_rank: int = 0
    by_file: Sequence[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class InspectionReport(Report):
    """Report of `inspect`.

    Attributes:
        path: Path of the checkpoint.
        format: Name of the format, as in docs/formats.md.
        bytes: Bytes of tensor data, shared bytes counted once.
        parameters: Number of parameters: elements of the model's tensors, each tensor counted once; of a quantized
            weight, the elements after dequantization.
        architecture: Name of the model class; null if it is unknown.
        prefix: Prefix of the names of the model; empty for none.
        files: Bytes of each file that contains tensor data.
        other_files: Names of the files that belong to the checkpoint and are not weights, such as config and tokenizer.
        chunks: Number of chunks that tensors are stored in; shared chunks count once.
        alias_groups: Groups of names that share bytes.
        tied_groups: Groups of tied names that are stored separately; each counts as one parameter.
        absent_ties: Pairs of names that the config ties and of which only the second is stored.
        optimizer: Number of `tensors` and `bytes` of optimizer state.
        other_tensors: Names of tensors of neither the model nor the optimizer, such as counters and second models.
        objects: Number of pickled objects.
        unknown_tensors: Names of model tensors that the class does not define, except parts of quantized weights.
        config_check: Comparison of names and shapes with the config, as in `convert`; null without a config or for an
            unknown class.
        groups: One entry per pattern of the first three components of model names: `pattern`, `tensors` (their number)
            and `bytes`.
        quantization: Quantized weights: `schemes` (for each: `scheme`, `tensors`, `parameters`, and `bytes` with
            scales), `not_quantized` (number of all other `tensors`, and their `bytes`), `activation_scales` (number of
            scales of activations and of the KV cache), `dequantized_bytes` (bytes of all tensors after `--dequantize`,
            in bfloat16); absent for a checkpoint that is not quantized.
        adapter: Settings and contents of an adapter, as in `adapters` of `merge`, without `path` and `factor`; absent
            for a model.
        selected_tensors: One entry per tensor that `--tensors` or `--match` lists: `name`, `dtype`, `shape`, `bytes`,
            `chunks` (their number) and `files`.
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
    absent_ties: Sequence[Sequence[str]] = field(default_factory=list)
    optimizer: dict[str, int]
    other_tensors: Sequence[str]
    objects: int
    unknown_tensors: Sequence[str]
    config_check: dict[str, Any] | None
    groups: Sequence[dict[str, Any]]
    quantization: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    adapter: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
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
                "stored_by_one_tp_rank": by_rank.stored_by_one_tp_rank,
                "balance": by_rank.balance,
            }
            if by_rank.by_file is not None:
                document["by_file"] = by_rank.by_file
        return document
