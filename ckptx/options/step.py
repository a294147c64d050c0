"""Mixins for commands that run a model: training step, device, memory per GPU, recipe."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Sequence
from typing import Annotated, Literal

from ckptx.options.option import MEMORY_LIMITS, MODEL_RUN, RECIPE, TRAINING_STEP, Option, Options, Requirement
from ckptx.options.sizes import GPU_GIB, parse_gpu_memory

MICROBATCHES = Option(
    "Microbatches per step and data-parallel rank.",
    TRAINING_STEP,
    minimum=1,
    maximum=2**16,
    default="one per pipeline stage",
    replaces=("num_microbatches", "gradient_accumulation_steps"),
)
ActivationCheckpointingMode = Literal["none", "full", "submodule", "selective"]
ACTIVATION_CHECKPOINTING = Option(
    "Activation checkpointing: full (recompute whole layers), submodule (attention, MLP and norms separately) or "
    "selective (save attention and every second matmul).",
    TRAINING_STEP,
    default="none",
    replaces=("ac", "gradient_checkpointing", "recompute"),
)
GpuName = Literal[
    "h100", "h200", "b200", "a100-80gb", "a100-40gb", "l40s", "l4", "a10g", "v100-32gb", "t4", "rtx4090", "mi300x"
]
GPU_MEMORY = Option(
    "Memory per GPU; if the run cannot fit, exit 6 before it starts.",
    MEMORY_LIMITS,
    parse=parse_gpu_memory,
    default="no check",
    excludes=("gpu",),
)


class MicrobatchOptions(Options):
    """Option for microbatches."""

    microbatches: Annotated[int | None, MICROBATCHES] = None


class ActivationCheckpointingOptions(Options):
    """Option for the activation checkpointing mode."""

    activation_checkpointing: Annotated[ActivationCheckpointingMode | None, ACTIVATION_CHECKPOINTING] = None

    @property
    def checkpointing_mode(self) -> str:
        """Return the activation checkpointing mode; "none" if the option is not set."""
        return self.activation_checkpointing or "none"


class ActivationCheckpointingScopeOptions(ActivationCheckpointingOptions):
    """Options for activation checkpointing of the whole model or of a part of it."""

    ac_scope: Annotated[
        Literal["all", "language", "vision", "audio"],
        Option(
            "Part of the model to apply activation checkpointing to.",
            TRAINING_STEP,
            requires=[Requirement("activation_checkpointing")],
        ),
    ] = "all"


class DeviceOptions(Options):
    """Options for the device and the communication backend."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Option("Device to run on.", MODEL_RUN)] = "auto"
    backend: Annotated[Literal["auto", "gloo", "nccl"], Option("Communication backend.", MODEL_RUN)] = "auto"


class GpuMemoryOptions(Options):
    """Options for the memory per GPU."""

    gpu_memory: Annotated[int | str | None, GPU_MEMORY] = None
    gpu: Annotated[
        GpuName | None,
        Option(
            f"GPU model whose usable memory is the limit, instead of --gpu-memory: {', '.join(GPU_GIB)}.",
            MEMORY_LIMITS,
            metavar="NAME",
            default="no check",
        ),
    ] = None

    @property
    def gpu_bytes(self) -> int | None:
        """Return the memory per GPU in bytes; None means no check."""
        if self.gpu is not None:
            return int(GPU_GIB[self.gpu] * 2**30)
        return None if self.gpu_memory is None else parse_gpu_memory(self.gpu_memory, "--gpu-memory")


class RecipeOptions(Options):
    """Option for overriding keys of a recipe."""

    overrides: Annotated[
        Sequence[str],
        Option(
            "Override a key of the recipe, e.g. layout.tp=2 (repeatable).",
            RECIPE,
            flags=("--set",),
            metavar="KEY=VALUE",
            default="not set",
        ),
    ] = ()
