"""Options of `verify`: to compare bytes, or with `--run` the outputs of models."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ckptx.errors import UsageError
from ckptx.options.buffers import DTYPE_SPELLINGS, BufferOptions, Dtype
from ckptx.options.mesh import PP_SPLIT, TP_PLAN, PipelineOptions, ReplicaOptions, ShardingOptions
from ckptx.options.option import (
    COMPARISON,
    MEMORY_LIMITS,
    MODEL_RUN,
    TRAINING_STEP,
    Argument,
    Option,
    Options,
    Requirement,
)
from ckptx.options.sizes import parse_size
from ckptx.options.source import (
    DEQUANTIZE,
    REMOTE_CODE_OF_BOTH,
    WEIGHTS,
    DequantizeOptions,
    LogOptions,
    RemoteCodeOptions,
    SourcePrefixOptions,
    TwoCheckpointOptions,
    Weights,
    WeightsOptions,
)
from ckptx.options.step import ActivationCheckpointingScopeOptions, DeviceOptions, GpuMemoryOptions, MicrobatchOptions

_REFERENCE_HELP = "Checkpoint to compare with: a directory, file, index or Hub id."
_CHECKPOINT_HELP = "Checkpoint to check."
_ONE_CHECKPOINT = (
    "verify compares two checkpoints; to read every byte of one, pass it twice; to check its names and shapes, use "
    "`ckptx convert to-dcp CHECKPOINT unused --dry-run`"
)
_RUN_HELP = (
    "Run REFERENCE unsharded and CHECKPOINT on the mesh, in processes that the command or torchrun starts, and compare "
    "logits, loss and gradients."
)
_DEQUANTIZE = DEQUANTIZE._replace(
    help="Dequantize weights of both checkpoints (fp8, mxfp4, nvfp4, and int4 and int8 in the format pack-quantized "
    "of compressed-tensors) to bf16, or to the dtype of --dtype; with --run, to bf16 and then cast to --compute-dtype."
)
_MAX_MICROBATCHES = 1024  # the logits of every microbatch are kept


class StrictOptions(Options):
    """Option for results that are incomplete or inconclusive."""

    strict: Annotated[
        bool,
        Option(
            "Also exit 1 if optimizer state or other state could not be compared, for example because only one "
            "checkpoint has it, if config.json differs in a key that changes what the model computes, or if tensors "
            "do not match the config of their checkpoint; with --run, if the result is inconclusive.",
            COMPARISON,
        ),
    ] = False


class RunOptions(
    StrictOptions,
    LogOptions,
    GpuMemoryOptions,
    RemoteCodeOptions,
    DeviceOptions,
    ActivationCheckpointingScopeOptions,
    MicrobatchOptions,
    PipelineOptions,
    ShardingOptions,
    ReplicaOptions,
    DequantizeOptions,
    SourcePrefixOptions,
):
    """Options for running the models that are compared."""

    requirements: ClassVar[Mapping[str, Sequence[Requirement]]] = {"microbatches": [Requirement("pp", 2)]}

    tp_plan: Annotated[
        str | Path | None,
        TP_PLAN._replace(default="the rules that ckptx.json of CHECKPOINT records, else the model's plan"),
    ] = None
    pp_split: Annotated[
        str,
        PP_SPLIT._replace(
            help=f"{PP_SPLIT.help} With 1f1b and gpipe, even stands for the stages that ckptx.json of CHECKPOINT "
            "records, if there are --pp of them."
        ),
    ] = "even"
    reference_memory: Annotated[
        int | str | None,
        Option(
            "Memory limit of the reference model on its device; a larger reference runs in parts, one after another. "
            "With one rank, the limit covers both models.",
            MEMORY_LIMITS,
            parse=parse_size,
            default="free memory of the device",
        ),
    ] = None
    compute_dtype: Annotated[
        Dtype,
        Option(
            "Dtype in which both models run (auto: that of each config.json). To compare a checkpoint that was cast, "
            "pass the dtype of the cast, so that the weights of both are rounded.",
            MODEL_RUN,
            spellings=DTYPE_SPELLINGS,
            replaces=("dtype",),
        ),
    ] = "fp32"
    compile: Annotated[bool, Option("Compile each layer with torch.compile.", MODEL_RUN)] = False
    backward: Annotated[
        bool, Option("Also compare gradients of one training step.", TRAINING_STEP, off_flag="--no-backward")
    ] = True
    dequantize: Annotated[bool, _DEQUANTIZE] = False
    trust_remote_code: Annotated[bool, REMOTE_CODE_OF_BOTH] = False

    @property
    def reference_bytes(self) -> int | None:
        """Return the memory limit of the reference in bytes; None means the free memory."""
        limit = self.reference_memory
        return None if limit is None else parse_size(limit, "--reference-memory")

    @property
    def measures_memory(self) -> bool:
        """Return True if tensor memory is measured while the checkpoint runs."""
        return self.gpu_bytes is not None

    def check(self) -> None:
        super().check()
        if self.microbatches is not None and self.microbatches > _MAX_MICROBATCHES:
            raise UsageError(f"--microbatches: {self.microbatches} must be between 1 and {_MAX_MICROBATCHES:,}")


class VerifyOptions(
    StrictOptions,
    BufferOptions,
    LogOptions,
    TwoCheckpointOptions,
    DequantizeOptions,
    WeightsOptions,
    kw_only=False,
):
    """Options of `verify` without `--run`."""

    command: ClassVar[str] = "verify"

    reference: Annotated[str | Path, Argument(_REFERENCE_HELP, "REFERENCE")]
    checkpoint: Annotated[str | Path, Argument(_CHECKPOINT_HELP, "CHECKPOINT", advice=_ONE_CHECKPOINT)]
    _: KW_ONLY
    dtype: Annotated[
        Dtype,
        Option(
            "Cast the reference to this dtype before comparing, as convert does without a base (auto: compare as "
            "stored). If the base has several dtypes, see https://ckptx.github.io/ckptx/to_vllm/. The option for --run "
            "is --compute-dtype.",
            COMPARISON,
            spellings=DTYPE_SPELLINGS,
        ),
    ] = "auto"
    dequantize: Annotated[bool, _DEQUANTIZE] = False
    weights: Annotated[
        Weights,
        WEIGHTS._replace(
            help="Weights to compare: auto (those of the models) or masters (the fp32 master weights in the optimizer "
            "state of the checkpoints that have them)."
        ),
    ] = "auto"
    run: Annotated[Literal[False], Option(_RUN_HELP, MODEL_RUN)] = False


class VerifyRunOptions(RunOptions, TwoCheckpointOptions, kw_only=False):
    """Options of `verify --run`."""

    command: ClassVar[str] = "verify --run"

    reference: Annotated[str | Path, Argument(_REFERENCE_HELP, "REFERENCE")]
    checkpoint: Annotated[str | Path, Argument(_CHECKPOINT_HELP, "CHECKPOINT", advice=_ONE_CHECKPOINT)]
    _: KW_ONLY
    run: Annotated[Literal[True], Option(_RUN_HELP, MODEL_RUN)]
