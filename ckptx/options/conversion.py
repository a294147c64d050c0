"""Options of `convert to-dcp`, `convert to-hf` and `reshard`."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Mapping
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ckptx.errors import UsageError
from ckptx.options.buffers import DTYPE_SPELLINGS, BufferOptions
from ckptx.options.mesh import ShardingOptions
from ckptx.options.option import EXECUTION, OUTPUT_CHECKPOINT, SOURCE, Argument, Hook, Option, settings_of
from ckptx.options.sizes import parse_size
from ckptx.options.source import HubOptions, LogOptions, RemoteCodeOptions, SourcePrefixOptions
from ckptx.processes.rendezvous import START_TIMEOUT
from ckptx.untrusted.limits import MAX_RANKS
from ckptx.wording import counted

if TYPE_CHECKING:  # not imported for a help page
    from ckptx.catalog.format_traits import FormatTraits

Names = Literal["hf", "model", "torchtitan", "disk"]
TiedMode = Literal["auto", "alias", "copy", "drop"]
OptimizerMode = Literal["keep", "drop"]
NAMES = Option(
    "Naming scheme: hf (as published on the Hub), model (transformers module names) or torchtitan.",
    OUTPUT_CHECKPOINT,
    default="hf; a DCP made from a DCP keeps its names",
    spellings={"disk": "hf"},
)
TIED = Option(
    "Tied weights: alias (two names for one stored tensor, DCP only), copy (stored twice), drop (one name), or auto "
    "(by output format).",
    OUTPUT_CHECKPOINT,
)
OPTIMIZER = Option("Keep or drop optimizer state (DCP output only).", OUTPUT_CHECKPOINT, default="keep")
SHARD_SIZE = "5GB"
_DIRECTION_HELP = "to-dcp or to-hf; hf2dcp and dcp2hf are aliases."
_SRC_HELP = "Source checkpoint: a directory, file, index or Hub id."
_DST_HELP = "Directory to write."


class ConversionOptions(LogOptions, HubOptions, BufferOptions, RemoteCodeOptions, SourcePrefixOptions):
    """Options that every conversion has."""

    dtype: Annotated[
        Literal["auto", "base", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"],
        Option(
            "Dtype of floating-point tensors (auto: unchanged; base: as in --base). Integers, quantization scales and "
            "tensors that the model keeps in fp32 are not cast.",
            OUTPUT_CHECKPOINT,
            spellings=DTYPE_SPELLINGS,
        ),
    ] = "auto"
    names: Annotated[Names | None, NAMES] = None
    tied: Annotated[TiedMode, TIED] = "auto"
    tie_missing: Annotated[
        bool, Option("Tie a missing output head to the embedding even if the config does not.", SOURCE)
    ] = False
    allow_config_mismatch: Annotated[
        bool,
        Option(
            "Allow tensors that do not match the config (partial models, padded vocabularies).",
            SOURCE,
            aliases=("--allow-misfit",),
        ),
    ] = False
    allow_overflow: Annotated[
        bool,
        Option(
            "Write infinity for values that are out of range for --dtype, instead of failing.",
            OUTPUT_CHECKPOINT,
            requires=("dtype",),
        ),
    ] = False
    optimizer: Annotated[OptimizerMode | None, OPTIMIZER] = None
    base: Annotated[
        str | Path | None,
        Option(
            "HF checkpoint to take config.json and tokenizer files from; none writes tensors only.",
            SOURCE,
            metavar="PATH|none",
            default="SRC",
            keywords=("none",),
        ),
    ] = None
    dry_run: Annotated[bool, Option("Print what would be written, without writing anything.", EXECUTION)] = False
    overwrite: Annotated[bool, Option("Replace an existing checkpoint at DST atomically.", EXECUTION)] = False
    resume: Annotated[bool, Option("Resume an interrupted run.", EXECUTION)] = False
    timeout: Annotated[
        int,
        Option(
            "Seconds to wait until all ranks that torchrun starts have joined.", EXECUTION, minimum=1, maximum=86_400
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
            UsageError: An option requires a DCP source.
        """
        if source.is_training_format:
            if self.optimizer == "keep" and not source.can_keep_state:
                raise UsageError(
                    "--optimizer keep requires a DCP source; SRC is a file of torch.save, of which only the model is "
                    "converted"
                )
            return
        if self.optimizer is not None:
            raise UsageError("--optimizer requires a DCP source; SRC is not a DCP and has no optimizer state")
        if self.model_prefix is not None:
            raise UsageError("--source-prefix requires a DCP source; SRC is not a DCP")

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that determine the output bytes, except those of the layout."""
        return {"dtype": self.dtype, "tied": self.tied, "source_prefix": self.model_prefix, "names": self.names}


class DcpOptions(ConversionOptions):
    """Options of DCP output."""

    prefix: Annotated[
        str, Option("Prefix to add to every tensor name (DCP output only).", OUTPUT_CHECKPOINT, default="none")
    ] = ""
    files: Annotated[
        int | None,
        Option(
            "Number of .distcp files (per rank if sharded).",
            OUTPUT_CHECKPOINT,
            minimum=1,
            maximum=MAX_RANKS,
            default="by size",
        ),
    ] = None

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "prefix": self.prefix}

    def check_prefix(self, source: "FormatTraits") -> None:
        """Check that `prefix` is not set for a DCP source.

        Raises:
            UsageError: The source is a DCP, whose names are kept.
        """
        if self.prefix and source.is_training_format:
            raise UsageError(
                "--prefix requires an HF source; SRC is a DCP, whose names are kept; use --source-prefix to select the "
                "model in it"
            )


class ToDcpOptions(DcpOptions, ShardingOptions, kw_only=False):
    """Options of `convert to-dcp`."""

    command: ClassVar[str] = "convert to-dcp"

    direction: Annotated[Literal["to-dcp", "hf2dcp"], Argument(_DIRECTION_HELP)]
    src: Annotated[str | Path, Argument(_SRC_HELP, "SRC")]
    dst: Annotated[str | Path, Argument(_DST_HELP, "DST")]


class ToHfOptions(ConversionOptions, kw_only=False):
    """Options of `convert to-hf`."""

    command: ClassVar[str] = "convert to-hf"

    direction: Annotated[Literal["to-hf", "dcp2hf"], Argument(_DIRECTION_HELP)]
    src: Annotated[str | Path, Argument(_SRC_HELP, "SRC")]
    dst: Annotated[str | Path, Argument(_DST_HELP, "DST")]
    _: KW_ONLY
    names: Annotated[Names | None, NAMES._replace(default="hf")] = None
    tied: Annotated[
        TiedMode,
        TIED._replace(
            help="Tied weights: copy (stored under both names), drop (stored under one name), or auto (as in the "
            "original files if they are recorded, else one name).",
            metavar="auto|copy|drop",
        ),
    ] = "auto"
    optimizer: Annotated[
        OptimizerMode | None,
        OPTIMIZER._replace(
            help="Optimizer state; always dropped, because safetensors cannot hold it.",
            metavar="drop",
            default="drop",
            is_hidden=True,
        ),
    ] = None
    max_shard_size: Annotated[
        int | str | None,
        Option(
            "Maximum size of a safetensors shard.",
            OUTPUT_CHECKPOINT,
            parse=parse_size,
            default=f"the original shards if recorded, else {SHARD_SIZE}",
        ),
    ] = None
    index: Annotated[
        Literal["auto", "always"],
        Option("Index file: auto writes it for several files, always also for a single one.", OUTPUT_CHECKPOINT),
    ] = "auto"

    @property
    def shard_bytes(self) -> int:
        """Return the maximum bytes of tensors in a safetensors shard."""
        return parse_size(self.max_shard_size or SHARD_SIZE, "--max-shard-size")

    def check(self) -> None:
        super().check()
        self.check_safetensors()

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "index": self.index}


class ReshardOptions(DcpOptions, ShardingOptions, kw_only=False):
    """Options of `reshard`."""

    command: ClassVar[str] = "reshard"

    src: Annotated[str | Path, Argument(_SRC_HELP, "SRC")]
    dst: Annotated[str | Path, Argument(_DST_HELP, "DST")]
    _: KW_ONLY
    names: Annotated[
        Names | None,
        NAMES._replace(default="hf, or model for sharded safetensors; a DCP made from a DCP keeps its names"),
    ] = None
    optimizer: Annotated[
        OptimizerMode | None, OPTIMIZER._replace(default="keep in a DCP, drop in sharded safetensors")
    ] = None
    to: Annotated[
        Literal["dcp", "safetensors"] | None,
        Option("Output format: a DCP, or sharded safetensors.", OUTPUT_CHECKPOINT, default="that of SRC"),
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
