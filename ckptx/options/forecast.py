"""Options of `forecast`: for one layout, or with `--search` for a search of layouts."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ckptx.errors import UsageError
from ckptx.options.buffers import DTYPE_SPELLINGS, Dtype
from ckptx.options.mesh import PipelineOptions, ReplicaOptions, TpPlanOptions
from ckptx.options.option import (
    LAYOUT_SEARCH,
    RECIPE,
    REPORT,
    TRAINING_STEP,
    Argument,
    Option,
    Requirement,
    settings_of,
)
from ckptx.options.output import ReportOutput
from ckptx.options.source import HubOptions, LogOptions, RemoteCodeOptions
from ckptx.options.step import (
    ACTIVATION_CHECKPOINTING,
    GPU_MEMORY,
    MICROBATCHES,
    ActivationCheckpointingMode,
    ActivationCheckpointingOptions,
    ActivationCheckpointingScopeOptions,
    GpuMemoryOptions,
    MicrobatchOptions,
    RecipeOptions,
)
from ckptx.untrusted.limits import MAX_RANKS

Loss = Literal["sharded", "full", "none"]
OptimizerName = Literal["adamw", "adam", "sgd", "none"]
FloatDtype = Literal["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"]
# Fields of the options that may be combined with `--recipe`; the recipe has values for all others.
_ALLOWED_WITH_RECIPE = ("recipe", "overrides", "gpu_memory", "gpu", "search", "gpus")
_MODEL_HELP = "A config.json (or a JSON file of another name), a directory that contains one, or a Hub id."
_SEARCH_HELP = (
    "Find layouts for --gpus GPUs that fit --gpu-memory or --gpu, each with the least activation checkpointing that "
    "fits. They are sorted by the time lost to recomputation and pipeline bubbles, then by the bytes sent per rank. "
    "--tp, --pp, --dp-shard and --dp-replicate fix a size. One of --gpu-memory and --gpu is required."
)


class StepOptions(
    LogOptions,
    GpuMemoryOptions,
    RecipeOptions,
    RemoteCodeOptions,
    HubOptions,
    ActivationCheckpointingOptions,
    MicrobatchOptions,
    ReplicaOptions,
):
    """Options of `forecast`, with and without `--search`."""

    requirements: ClassVar[Mapping[str, Sequence[Requirement]]] = {"overrides": [Requirement("recipe")]}

    recipe: Annotated[
        str | Path | None,
        Option(
            "Recipe to forecast instead of MODEL: a YAML file, or a built-in recipe such as llama_tiny. Options of "
            "model, layout and training step are rejected with it; override its keys instead.",
            RECIPE,
            metavar="RECIPE",
            default="not set",
        ),
    ] = None
    activation_checkpointing: Annotated[
        ActivationCheckpointingMode | None,
        ACTIVATION_CHECKPOINTING._replace(default="none; with --search, the least that fits"),
    ] = None
    microbatches: Annotated[
        int | None,
        MICROBATCHES._replace(
            help="Microbatches per step and data-parallel rank. Without PP, values above 1 mean gradient accumulation.",
            default="one per pipeline stage; with --search, chosen for each layout",
        ),
    ] = None
    gpu_memory: Annotated[
        int | str | None,
        GPU_MEMORY._replace(help="Memory per GPU; exit 1 if the step does not fit, reserve included."),
    ] = None
    batch: Annotated[
        int | None,
        Option(
            "Sequences per step and data-parallel rank; with --search, per GPU, so that every layout has the same "
            "global batch.",
            TRAINING_STEP,
            minimum=1,
            maximum=2**16,
            default="one per microbatch; with --search, one per GPU",
            replaces=("batch_size", "local_batch_size"),
        ),
    ] = None
    seq: Annotated[
        int,
        Option(
            "Sequence length in tokens.",
            TRAINING_STEP,
            minimum=2,
            maximum=2**24,
            replaces=("seq_len", "seq_length", "sequence_length", "max_seq_len", "max_model_len"),
        ),
    ] = 4096
    images: Annotated[
        int, Option("Images per sequence (vision-language models).", TRAINING_STEP, minimum=0, maximum=2**16)
    ] = 0
    dtype: Annotated[
        Dtype, Option("Dtype of the parameters (auto: dtype of the config).", TRAINING_STEP, spellings=DTYPE_SPELLINGS)
    ] = "auto"
    param_dtype: Annotated[
        FloatDtype | None,
        Option(
            "FSDP2 param_dtype, for all-gather and compute.",
            TRAINING_STEP,
            spellings=DTYPE_SPELLINGS,
            default="that of --dtype",
        ),
    ] = None
    reduce_dtype: Annotated[
        FloatDtype | None,
        Option(
            "FSDP2 reduce_dtype, for gradient reduction.",
            TRAINING_STEP,
            spellings=DTYPE_SPELLINGS,
            default="that of --param-dtype",
        ),
    ] = None
    optimizer: Annotated[OptimizerName, Option("Optimizer (sgd without momentum).", TRAINING_STEP)] = "adamw"
    loss: Annotated[
        Loss,
        Option(
            "Loss: sharded (cross-entropy in fp32, on logits that TP shards over the vocabulary), full (the same on "
            "full logits, as in transformers) or none (no cross-entropy: the backward pass starts from the sum of the "
            "logits).",
            TRAINING_STEP,
            shorthands={"--no-loss": "none"},
        ),
    ] = "sharded"

    @classmethod
    def conflict(cls, name: str, values: Mapping[str, Any]) -> str:
        if values.get("recipe") is not None and name not in _ALLOWED_WITH_RECIPE:
            flag = settings_of(cls)[name].flag
            return f"{flag} cannot be combined with --recipe; change the recipe with --set KEY=VALUE"
        return super().conflict(name, values)

    def check_model(self, model: str | Path | None) -> None:
        """Check that either a model or a recipe is given.

        Raises:
            UsageError: Neither a model nor a recipe is given, or both are.
        """
        if model is None and self.recipe is None:
            raise UsageError(
                "forecast requires a model: a config.json, a directory that contains one, a Hub id, or --recipe NAME"
            )
        if model is not None and self.recipe is not None:
            raise UsageError(f"{model} and --recipe both name a model; leave out one of them")


class ForecastOptions(ActivationCheckpointingScopeOptions, TpPlanOptions, PipelineOptions, StepOptions, kw_only=False):
    """Options of `forecast`."""

    command: ClassVar[str] = "forecast"

    model: Annotated[str | Path | None, Argument(_MODEL_HELP, "MODEL")] = None
    _: KW_ONLY
    search: Annotated[Literal[False], Option(_SEARCH_HELP, LAYOUT_SEARCH)] = False

    def check(self) -> None:
        super().check()
        self.check_model(self.model)


class SearchOptions(StepOptions, kw_only=False):
    """Options of `forecast --search`."""

    command: ClassVar[str] = "forecast --search"

    model: Annotated[str | Path | None, Argument(_MODEL_HELP, "MODEL")] = None
    _: KW_ONLY
    search: Annotated[Literal[True], Option(_SEARCH_HELP, LAYOUT_SEARCH, requires=[Requirement("gpus")])]
    gpus: Annotated[
        int | None,
        Option(
            "Number of GPUs to search layouts for (--gpu is the name of their model).",
            LAYOUT_SEARCH,
            minimum=1,
            maximum=MAX_RANKS,
            default="not set",
            replaces=("num_gpus", "world_size"),
        ),
    ] = None

    def check(self) -> None:
        super().check()
        self.check_model(self.model)
        if self.gpu_bytes is None:
            raise UsageError("--search requires --gpu-memory or --gpu")


class ForecastOutput(ReportOutput):
    """Options for the output of `ckptx forecast`."""

    html: Annotated[
        str | Path | None,
        Option(
            "Write a self-contained HTML page that plots memory over one training step.",
            REPORT,
            metavar="FILE",
            default="not set",
        ),
    ] = None
