"""Options of the commands of `convert`, and of `reshard`."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Mapping
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from ckptx.errors import UsageError
from ckptx.options.adapter import AdapterSettings
from ckptx.options.buffers import DTYPE_SPELLINGS, BufferOptions
from ckptx.options.mesh import OutputShardingOptions
from ckptx.options.option import EXECUTION, OUTPUT_CHECKPOINT, SOURCE, Argument, Hook, Option, Requirement, settings_of
from ckptx.options.sizes import parse_size
from ckptx.options.source import (
    REVISION,
    DequantizeOptions,
    HubOptions,
    LogOptions,
    RemoteCodeOptions,
    SourcePrefixOptions,
    WeightsOptions,
)
from ckptx.processes.rendezvous import START_TIMEOUT
from ckptx.report.number_formats import checkpoint_format_name
from ckptx.untrusted.limits import MAX_RANKS
from ckptx.wording import counted

if TYPE_CHECKING:  # not imported for a help page
    from ckptx.catalog.format_traits import FormatTraits

Names = Literal["hf", "model", "torchtitan", "disk"]
TiedMode = Literal["auto", "alias", "copy", "drop"]
OptimizerMode = Literal["keep", "drop"]
NAMES = Option(
    "Naming scheme: hf (as published on the Hub), model (module names in transformers, which differ from hf if "
    "transformers renames or fuses weights on loading, such as experts) or torchtitan. If this changes names of a "
    "training checkpoint, their prefix is removed.",
    OUTPUT_CHECKPOINT,
    default="hf; names are kept if SRC is a training checkpoint (a DCP, per-rank FSDP files, DeepSpeed, "
    "torch_checkpointing or torch.save), except Megatron's, which become hf",
    spellings={"disk": "hf"},
)
TIED = Option(
    "Tied weights: alias (two names for one stored tensor; a copy if they are on two pipeline stages), copy (stored "
    "under both names), drop (stored under one name), or auto (as alias).",
    OUTPUT_CHECKPOINT,
)
OPTIMIZER = Option("Keep or drop optimizer and other training state.", OUTPUT_CHECKPOINT, default="keep")
PREFIX = Option(
    "Prefix to add to every tensor name. Rejected if SRC is a training checkpoint, even with --names.",
    OUTPUT_CHECKPOINT,
    default="not set",
)
FILES = Option(
    "Number of .distcp files (per rank if sharded).",
    OUTPUT_CHECKPOINT,
    minimum=1,
    maximum=MAX_RANKS,
    default="one per 256 MiB, at most 64",
)
BASE = Option(
    "HF checkpoint (a directory or Hub id) to take config.json and tokenizer files from; none writes tensors only. "
    "Required if SRC has no config.json.",
    SOURCE,
    metavar="PATH|none",
    default="config and tokenizer of SRC, if any",
    keywords=("none",),
)
SHARD_SIZE = "5GB"  # default of `--max-shard-size` for a source without a record of its original files
DIRECTION_HELP = "to-dcp, to-hf, to-megatron or to-peft; hf2dcp and dcp2hf are aliases of the first two."
_SRC_HELP = (
    "Source checkpoint: a directory, file, index or Hub id. Formats: HF safetensors, pytorch_model.bin, a dict saved "
    "with torch.save, DCP (also Megatron torch_dist), per-rank FSDP files (verl), DeepSpeed, torch_checkpointing (of "
    "meta-pytorch), or sharded safetensors (each file has the shards of one rank, as reshard writes). A directory can "
    "have the checkpoint up to two levels below it. If it has those of several steps, pass the directory of one step; "
    "DeepSpeed's file latest selects one."
)
DST_HELP = "Directory to write."


class AdapterPath(NamedTuple):
    """An adapter to merge.

    Attributes:
        path: Path or Hub id.
        factor: Factor of its change.
    """

    path: str
    factor: float


class ConversionOptions(
    LogOptions,
    HubOptions,
    BufferOptions,
    RemoteCodeOptions,
    DequantizeOptions,
    WeightsOptions,
    SourcePrefixOptions,
):
    """Options that every conversion has."""

    dtype: Annotated[
        Literal["auto", "base", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"],
        Option(
            "Dtype of floating-point tensors (auto: unchanged; base: as in --base, which must have weights, or in the "
            ".hf_metadata of NeMo AutoModel). Not cast: integers, optimizer "
            "state, tensors that the model class in transformers keeps in fp32, and, if you pass a --base with several "
            "dtypes, tensors that are fp32 in it.",
            OUTPUT_CHECKPOINT,
            spellings=DTYPE_SPELLINGS,
        ),
    ] = "auto"
    names: Annotated[Names | None, NAMES] = None
    tied: Annotated[TiedMode, TIED] = "auto"
    tie_missing: Annotated[
        bool,
        Option(
            "Tie a missing output head to the embedding even if the config does not. HF files then have both names, "
            "and config.json is unchanged.",
            SOURCE,
        ),
    ] = False
    allow_config_mismatch: Annotated[
        bool,
        Option(
            "Allow missing, extra and differently shaped tensors, such as those of a partial model. If the vocabulary "
            "of SRC is padded, vocab_size in the written config.json becomes its number of rows.",
            SOURCE,
            aliases=("--allow-misfit",),
        ),
    ] = False
    allow_overflow: Annotated[
        bool,
        Option(
            "Write infinity for values that are out of range for --dtype, instead of failing.",
            OUTPUT_CHECKPOINT,
            requires=[Requirement("dtype")],
        ),
    ] = False
    optimizer: Annotated[OptimizerMode | None, OPTIMIZER] = None
    revision: Annotated[
        str | None,
        REVISION._replace(
            help="Branch, tag or commit of SRC and --base on the Hub; for two different ones, download one first."
        ),
    ] = None
    base: Annotated[
        str | Path | None,
        BASE,
    ] = None
    dry_run: Annotated[
        bool,
        Option(
            "Print what would be written, without writing anything; exit 6 if the disk space does not suffice.",
            EXECUTION,
        ),
    ] = False
    overwrite: Annotated[
        bool, Option("Replace an existing checkpoint at DST atomically.", EXECUTION, replaces=("force",))
    ] = False
    resume: Annotated[bool, Option("Continue an interrupted conversion to DST.", EXECUTION)] = False
    timeout: Annotated[
        int,
        Option(
            "Under torchrun, seconds to wait until all ranks have joined. It does not limit the run itself.",
            EXECUTION,
            minimum=1,
            maximum=86_400,
        ),
    ] = START_TIMEOUT
    report_file: Annotated[
        str | Path | None,
        Hook("File that the caller will write the report to; checked before the conversion starts."),
    ] = None

    def check(self) -> None:
        super().check()
        if self.buffer_bytes < (2 << 20) * self.threads:
            raise UsageError(
                f"--max-memory: {counted(self.buffer_bytes, 'byte')} for {counted(self.threads, 'worker')} must be at "
                "least 2 MiB per worker; raise it or use fewer --workers"
            )

    @property
    def accepts_adapter(self) -> bool:
        """Return True if the source may be an adapter."""
        return False

    def adapter_settings(self, base_name: str | None = None) -> AdapterSettings:
        """Return what a training checkpoint does not record about its adapter; nothing for most commands.

        Args:
            base_name: Name or path of the base model, to record; None for none.
        """
        return AdapterSettings(None, None, base_name)

    @property
    def adapters(self) -> tuple[AdapterPath, ...]:
        """Return the adapters to merge; empty for other commands than `merge`."""
        return ()

    @classmethod
    def conflict(cls, name: str, values: Mapping[str, Any]) -> str:
        if name in ("tied", "tie_missing") and values.get("base") == "none":
            return f"{settings_of(cls)[name].flag} requires a config; pass a checkpoint as --base instead of none"
        return super().conflict(name, values)

    def check_safetensors(self) -> None:
        """Check the options against an output in safetensors.

        Raises:
            UsageError: An option requires DCP output.
        """
        if self.tied == "alias":
            raise UsageError(
                "--tied alias requires DCP output; in safetensors two names cannot share bytes; use auto, copy or drop"
            )
        if self.optimizer == "keep":
            raise UsageError("--optimizer keep requires DCP output; safetensors hold the model only")

    def check_source(self, source: "FormatTraits") -> None:
        """Check the options against the format of the source.

        Raises:
            UsageError: An option requires a training checkpoint, or one whose optimizer state can be kept.
        """
        if source.is_training_format:
            if self.optimizer == "keep" and not source.can_keep_state:
                raise UsageError(
                    "--optimizer keep requires a DCP, per-rank FSDP files, DeepSpeed or torch_checkpointing; SRC is a "
                    "file of torch.save, of which only the model is converted; leave out --optimizer"
                )
            return
        if self.optimizer is not None:
            raise UsageError(
                "--optimizer requires a training checkpoint; SRC is not one (format: "
                f"{checkpoint_format_name(source.name)}) and has no optimizer state; leave out --optimizer"
            )
        self.check_source_prefix(source, "SRC")

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that, together with the copy plan, determine the bytes of the output: name -> value.

        A run resumes an interrupted one only if both have the same plan and the same values of these options.
        """
        return {
            "dtype": self.dtype,
            "tied": self.tied,
            "source_prefix": self.source_prefix_or_none,
            "names": self.names,
            "dequantize": self.dequantize,
            "weights": self.weights,
        }


class DcpOptions(ConversionOptions):
    """Options of DCP output."""

    prefix: Annotated[str, PREFIX] = ""
    files: Annotated[int | None, FILES] = None

    @property
    def drop_reason(self) -> str:
        """Return the end of the reason for which training state is dropped, after "optimizer state"."""
        return "dropped because of --optimizer drop"

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "prefix": self.prefix}

    def check_prefix(self, source: "FormatTraits") -> None:
        """Check that `prefix` is not set for a training checkpoint.

        Raises:
            UsageError: The source is a training checkpoint, whose names are kept.
        """
        if self.prefix and source.is_training_format:
            raise UsageError(
                "--prefix requires HF or sharded safetensors files; SRC is a training checkpoint (format: "
                f"{checkpoint_format_name(source.name)}), whose names are kept; use --source-prefix to select the "
                "model in it"
            )


class ToDcpOptions(DcpOptions, OutputShardingOptions, kw_only=False):
    """Options of `convert to-dcp`."""

    command: ClassVar[str] = "convert to-dcp"

    direction: Annotated[Literal["to-dcp", "hf2dcp"], Argument(DIRECTION_HELP)]
    src: Annotated[str | Path, Argument(_SRC_HELP, "SRC")]
    dst: Annotated[str | Path, Argument(DST_HELP, "DST")]
    _: KW_ONLY
    base: Annotated[
        str | Path | None,
        BASE._replace(
            help="HF checkpoint (a directory or Hub id) to take config.json and tokenizer files from; none writes "
            "tensors only. Required if SRC has no config.json (to-dcp: only if it is a training checkpoint)."
        ),
    ] = None

    @property
    def accepts_adapter(self) -> bool:
        return self.dims.world_size == 1


class ToHfOptions(ConversionOptions, kw_only=False):
    """Options of `convert to-hf`."""

    command: ClassVar[str] = "convert to-hf"

    direction: Annotated[Literal["to-hf", "dcp2hf"], Argument(DIRECTION_HELP)]
    src: Annotated[str | Path, Argument(_SRC_HELP, "SRC")]
    dst: Annotated[str | Path, Argument(DST_HELP, "DST")]
    _: KW_ONLY
    names: Annotated[Names | None, NAMES._replace(default="hf")] = None
    tied: Annotated[
        TiedMode,
        TIED._replace(
            help="Tied weights: copy (stored under both names), drop (stored under one name), or auto (as in the HF "
            "files that SRC was converted from, if its ckptx.json records them, else one name).",
            metavar="auto|copy|drop",
        ),
    ] = "auto"
    optimizer: Annotated[
        OptimizerMode | None,
        OPTIMIZER._replace(
            help="Optimizer and other training state; always dropped, because HF checkpoints have no place for it.",
            metavar="drop",
            default="drop",
            is_hidden=True,
        ),
    ] = None
    max_shard_size: Annotated[
        int | str | None,
        Option(
            "Maximum size of the tensors in each safetensors file, without its header; a larger tensor gets a file of "
            "its own.",
            OUTPUT_CHECKPOINT,
            parse=parse_size,
            replaces=("shard_size", "max_file_size"),
            default=f"as the HF files that SRC was converted from, if its ckptx.json records them, else {SHARD_SIZE}",
        ),
    ] = None
    index: Annotated[
        Literal["auto", "always"],
        Option("Write an index file: auto (only for several files) or always.", OUTPUT_CHECKPOINT),
    ] = "auto"
    quantize: Annotated[
        Literal["base"] | None,
        Option(
            "Quantize the weights that are quantized in --base, in the same scheme. Those that still equal the "
            "dequantized base in bf16 are copied from the base. Tensors that the base does not quantize are cast to "
            "their dtypes in the base.",
            OUTPUT_CHECKPOINT,
            requires=[Requirement("base")],
            excludes=("dequantize", "dtype"),
            default="not set",
        ),
    ] = None

    group_experts: Annotated[
        int | None,
        Option(
            "Write the experts of each of N expert-parallel ranks to separate files, so that an engine that skips the "
            "experts of other ranks skips whole files. N divides the number of experts; rank 0 has the first ones.",
            OUTPUT_CHECKPOINT,
            minimum=2,
            maximum=MAX_RANKS,
            default="not set",
        ),
    ] = None

    @property
    def sets_files(self) -> bool:
        """Return True if options determine which tensors share a file."""
        return self.max_shard_size is not None or self.group_experts is not None

    @property
    def shard_bytes(self) -> int:
        """Return the maximum bytes of tensors in a safetensors shard."""
        return parse_size(self.max_shard_size or SHARD_SIZE, "--max-shard-size")

    def check(self) -> None:
        super().check()
        self.check_safetensors()
        if self.quantize is not None and (self.base == "none" or self.names not in (None, "hf", "disk")):
            raise UsageError(
                "--quantize base requires --base PATH and the names of the base; leave out --names, and pass the "
                "quantized checkpoint as --base"
            )

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "index": self.index, "quantize": self.quantize}


class ToMegatronOptions(ConversionOptions, kw_only=False):
    """Options of `convert to-megatron`.

    Attributes:
        names, tied, optimizer: Not options of this command: the names are Megatron's, which stores tied weights once
            and gets no optimizer state.
    """

    command: ClassVar[str] = "convert to-megatron"
    names: ClassVar[None] = None  # type: ignore[misc]  # a field of the base class that this command does not have
    tied: ClassVar[TiedMode] = "auto"  # type: ignore[misc]
    optimizer: ClassVar[None] = None  # type: ignore[misc]

    direction: Annotated[Literal["to-megatron"], Argument(DIRECTION_HELP)]
    src: Annotated[str | Path, Argument(_SRC_HELP, "SRC")]
    dst: Annotated[str | Path, Argument(DST_HELP, "DST")]
    _: KW_ONLY
    base: Annotated[
        str | Path | None,
        BASE._replace(
            help="HF checkpoint (a directory or Hub id) to take config.json and tokenizer files from. Required if SRC "
            "has no config.json.",
            metavar="PATH",
            keywords=(),
        ),
    ] = None
    layers: Annotated[
        Literal["stacked", "separate"] | None,
        Option(
            "Layers: stacked (one tensor for all layers; requires that all have the same tensors) or separate (one for "
            "each layer, as Megatron stores them if hetereogenous_dist_checkpoint is set or moe_layer_freq is a list).",
            OUTPUT_CHECKPOINT,
            default="stacked if all layers have the same tensors, else separate",
        ),
    ] = None
    pad_vocab_to_multiple_of: Annotated[
        int,
        Option(
            "Pad embedding and output head with rows of zeros to a multiple of this; 1 does not pad. Megatron-LM loads "
            "any size; its own checkpoints have a multiple of make_vocab_size_divisible_by (128) times the TP size.",
            OUTPUT_CHECKPOINT,
            metavar="N",
            minimum=1,
            maximum=1 << 20,
            replaces=("make_vocab_size_divisible_by", "pad_to_multiple_of", "pad_vocab_to", "padded_vocab_size"),
        ),
    ] = 128

    def check(self) -> None:
        super().check()
        if self.base == "none":
            raise UsageError(
                "--base none: convert to-megatron requires a config, which gives the class, the heads and the "
                "vocabulary; pass a checkpoint as --base, or leave it out if SRC has config.json"
            )

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "layers": self.layers, "padding": self.pad_vocab_to_multiple_of}


class ReshardOptions(DcpOptions, OutputShardingOptions, kw_only=False):
    """Options of `reshard`."""

    command: ClassVar[str] = "reshard"

    src: Annotated[str | Path, Argument(_SRC_HELP, "SRC")]
    dst: Annotated[str | Path, Argument(DST_HELP, "DST")]
    _: KW_ONLY
    names: Annotated[
        Names | None,
        NAMES._replace(
            default="--to safetensors: model; --to dcp: hf, or the names of SRC if it is a training checkpoint (a DCP, "
            "per-rank FSDP files, DeepSpeed, torch_checkpointing or torch.save) other than Megatron's"
        ),
    ] = None
    tied: Annotated[
        TiedMode,
        TIED._replace(
            help="Tied weights: alias (two names for one stored tensor; a copy if they are on two pipeline stages; "
            "--to dcp only), copy (stored under both names), drop (stored under one name), or auto (alias in a DCP, "
            "copy in sharded safetensors)."
        ),
    ] = "auto"
    optimizer: Annotated[
        OptimizerMode | None,
        OPTIMIZER._replace(
            help="Keep (--to dcp only) or drop optimizer and other training state.",
            default="keep in a DCP, drop in sharded safetensors",
        ),
    ] = None
    prefix: Annotated[
        str,
        PREFIX._replace(
            help="Prefix to add to every tensor name (--to dcp only). Rejected if SRC is a training checkpoint, even "
            "with --names."
        ),
    ] = ""
    files: Annotated[
        int | None, FILES._replace(help="Number of .distcp files, per rank if sharded (--to dcp only).")
    ] = None
    to: Annotated[
        Literal["dcp", "safetensors"] | None,
        Option(
            "Output format: dcp, or safetensors (sharded safetensors: each file has shards of one rank, with their "
            "offsets).",
            OUTPUT_CHECKPOINT,
            default="dcp if SRC is a DCP, per-rank FSDP files, DeepSpeed or torch_checkpointing, else safetensors "
            "(without optimizer state)",
        ),
    ] = None

    def check(self) -> None:
        super().check()
        if self.to == "safetensors":
            self.check_sharded()

    def check_sharded(self) -> None:
        """Check the options against an output in sharded safetensors.

        Raises:
            UsageError: An option requires DCP output.
        """
        self.check_safetensors()
        if self.files is not None:
            raise UsageError("--files requires DCP output; the output is safetensors")
        if self.prefix:
            raise UsageError(
                "--prefix requires DCP output; the output is safetensors; use --source-prefix to select the model in "
                "the source"
            )
