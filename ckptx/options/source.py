"""Mixins for commands that open a checkpoint or model: log, Hub ids, prefixes, custom code."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ckptx.errors import UsageError
from ckptx.options.option import BOTH_CHECKPOINTS, SOURCE, Hook, Option, Options
from ckptx.report.number_formats import checkpoint_format_name
from ckptx.report.report import Log

if TYPE_CHECKING:  # not imported for a help page
    from ckptx.catalog.format_traits import FormatTraits


class LogOptions(Options):
    """Parameter for the log of a run."""

    log: Annotated[Log | None, Hook("Log that collects the notes of the run, even if the run fails.")] = None


REVISION = Option("Branch, tag or commit of a Hub repository.", SOURCE, metavar="REV", default="main")
SOURCE_PREFIX = Option(
    'Prefix of the model\'s tensor names in a training checkpoint, e.g. "model." if "model.norm.weight" is stored as '
    '"model.model.norm.weight". If it has several models, such as EMA weights, the prefix selects one ("": the one '
    "without a prefix).",
    SOURCE,
    metavar="auto|TEXT",
    keywords=("auto",),
    replaces=("prefix",),
)
DEQUANTIZE = Option(
    "Dequantize weights (fp8, mxfp4, nvfp4, and int4 and int8 in the format pack-quantized of compressed-tensors) to "
    "bf16, or to the dtype of --dtype. GPTQ, AWQ and bitsandbytes are rejected.",
    SOURCE,
)
Weights = Literal["auto", "masters"]
WEIGHTS = Option(
    "Weights to read: auto (those of the model) or masters (the fp32 master weights in the optimizer state, for the "
    "tensors that have one).",
    SOURCE,
)
REMOTE_CODE = Option("Allow custom model code from the checkpoint.", SOURCE)
REMOTE_CODE_OF_BOTH = REMOTE_CODE._replace(help="Allow custom model code from the checkpoints.")


class HubOptions(Options):
    """Options for checkpoints on the Hub."""

    revision: Annotated[str | None, REVISION] = None
    token: Annotated[
        str | None,
        Option(
            "Hugging Face access token.",
            SOURCE,
            metavar="TOKEN",
            default="HF_TOKEN, else the token of hf auth login",
            is_secret=True,
        ),
    ] = None
    cache_dir: Annotated[
        str | Path | None,
        Option("Cache directory for Hub downloads.", SOURCE, metavar="DIR", default="HF_HUB_CACHE, else HF_HOME/hub"),
    ] = None


class SourcePrefixOptions(Options):
    """Option for the tensor names of a training checkpoint: a DCP, per-rank files or a file of `torch.save`."""

    source_prefix: Annotated[str, SOURCE_PREFIX] = "auto"

    @property
    def source_prefix_or_none(self) -> str | None:
        """Return `source_prefix`; None instead of "auto", which means that the prefix is detected."""
        return None if self.source_prefix == "auto" else self.source_prefix

    def check_source_prefix(self, source: "FormatTraits", subject: object) -> None:
        """Check that `source_prefix` is set only for a training checkpoint.

        Args:
            source: Format of the source.
            subject: Path or other subject of the error message.

        Raises:
            UsageError: It is set, and the source is not a training checkpoint.
        """
        if self.source_prefix_or_none is not None and not source.is_training_format:
            raise UsageError(
                "--source-prefix requires a training checkpoint (a DCP, per-rank FSDP files, DeepSpeed, "
                f"torch_checkpointing or a file of torch.save); {subject} is not one (format: "
                f"{checkpoint_format_name(source.name)}); leave out --source-prefix"
            )


class RemoteCodeOptions(Options):
    """Option for custom model code."""

    trust_remote_code: Annotated[bool, REMOTE_CODE] = False


class TwoCheckpointOptions(RemoteCodeOptions, HubOptions, SourcePrefixOptions):
    """Options for the Hub, tensor names and code of commands that compare two checkpoints; each applies to both."""

    headings: ClassVar[Mapping[str, str]] = {SOURCE: BOTH_CHECKPOINTS}

    revision: Annotated[
        str | None,
        REVISION._replace(
            help="Branch, tag or commit of each checkpoint that is a Hub repository; to compare two revisions, "
            "download one first."
        ),
    ] = None
    source_prefix: Annotated[
        str,
        SOURCE_PREFIX._replace(
            help='Prefix of the model\'s tensor names in each training checkpoint that has it, e.g. "model." if '
            '"model.norm.weight" is stored as "model.model.norm.weight". If a checkpoint has several models, such as '
            'EMA weights, the prefix selects one ("": the one without a prefix).'
        ),
    ] = "auto"
    trust_remote_code: Annotated[bool, REMOTE_CODE_OF_BOTH] = False


class DequantizeOptions(Options):
    """Option for quantized checkpoints."""

    dequantize: Annotated[bool, DEQUANTIZE] = False


class WeightsOptions(Options):
    """Option for checkpoints with master weights."""

    weights: Annotated[Weights, WEIGHTS] = "auto"
