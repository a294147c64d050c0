"""Mixins for commands that run a model: the training step, and the machine."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Sequence
from typing import Annotated, Literal

from ckptx.options.option import LIMITS, RECIPE, RUN, STEP, Option, Options
from ckptx.options.sizes import parse_size


class MicrobatchOptions(Options):
    """Options for dividing a step."""

    microbatches: Annotated[
        int | None,
        Option(
            "Microbatches per step and data-parallel rank; without PP, more than 1 means gradient accumulation.",
            STEP,
            minimum=1,
            maximum=2**16,
            default="one per stage",
        ),
    ] = None


class CheckpointingOptions(Options):
    """Options for activation checkpointing."""

    activation_checkpointing: Annotated[
        Literal["none", "full", "submodule", "selective"] | None,
        Option("Activation checkpointing: what layers recompute.", STEP, default="none"),
    ] = None

    @property
    def recomputed(self) -> str:
        """Return the activation checkpointing mode."""
        return self.activation_checkpointing or "none"


class CheckpointedLayersOptions(CheckpointingOptions):
    """Options for activation checkpointing of some layers."""

    ac_scope: Annotated[
        Literal["all", "language", "vision", "audio"],
        Option("Layers that activation checkpointing applies to.", STEP, requires=("activation_checkpointing",)),
    ] = "all"


class DeviceOptions(Options):
    """Options for the device and the communication of a run."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Option("Device to run on.", RUN)] = "auto"
    backend: Annotated[Literal["auto", "gloo", "nccl"], Option("Communication backend.", RUN)] = "auto"


class GpuMemoryOptions(Options):
    """Options for the memory of GPUs."""

    gpu_memory: Annotated[
        int | str | None,
        Option("Memory per GPU; fail if the run would not fit.", LIMITS, is_size=True, default="no check"),
    ] = None

    @property
    def gpu_bytes(self) -> int | None:
        """Return the memory of each GPU in bytes; None for no check."""
        return None if self.gpu_memory is None else parse_size(self.gpu_memory, "--gpu-memory")


class RecipeOptions(Options):
    """Options for changing a recipe."""

    settings: Annotated[
        Sequence[str],
        Option(
            "Override a recipe key, e.g. layout.tp=2 (repeatable).",
            RECIPE,
            flags=("--set",),
            metavar="KEY=VALUE",
            default="the recipe's value",
        ),
    ] = ()
