"""The step to forecast: a recipe, and properties of the step that no recipe has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from ckptx.errors import UsageError
from ckptx.formats.hf.reader import read_json
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import FORMER_SPLITS, SPLIT_RULES
from ckptx.options.forecast import ForecastOptions, Loss, OptimizerName, SearchOptions
from ckptx.runtime.training.recipe import LayoutBlock, ModelBlock, OptimizerBlock, Recipe, TrainingBlock

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # value of an option -> name in torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastTask:
    """A step to forecast.

    Attributes:
        recipe: Recipe of the run. `training.local_batch` is the number of sequences that a data-parallel rank passes to
            a model or a pipeline schedule; `training.global_batch` is the number over all data-parallel ranks in a
            step.
        source: Directory of the config.json.
        seq: Sequence length in tokens.
        images: Images per sequence.
        is_padded: True if sequences come with an attention mask, as those of a recipe do.
        loss: "sharded" computes the loss on logits that stay sharded over the vocabulary; "full" computes it as
            transformers does, on full float32 logits; "none" sums the logits.
        optimizer: "adamw", "adam", "sgd" (without momentum) or "none".
    """

    recipe: Recipe
    source: Path
    seq: int
    images: int = 0
    is_padded: bool = False
    loss: Loss = "sharded"
    optimizer: OptimizerName = "adamw"

    @property
    def dims(self) -> ParallelDims:
        """Mesh dimensions."""
        return self.recipe.layout.dims

    @property
    def microbatch(self) -> int:
        """Sequences per microbatch."""
        training = self.recipe.training
        return training.microbatch if self.dims.pp > 1 else training.local_batch

    @property
    def microbatches(self) -> int:
        """Microbatches per step and data-parallel rank."""
        return max(1, self.recipe.training.global_batch // self.dims.dp // self.microbatch)


def task_from_recipe(recipe: Recipe, source: Path) -> ForecastTask:
    """Return the step of a recipe, with padded sequences of full length, and images if its dataset has them."""
    return ForecastTask(
        recipe=recipe,
        source=source,
        seq=recipe.data.sequence_length,
        images=1 if recipe.data.dataset in ("synthetic_images", "medpix") else 0,
        is_padded=True,
        optimizer=recipe.optimizer.name,
    )


def task_from_options(source: Path, options: ForecastOptions | SearchOptions, stages: int) -> ForecastTask:
    """Return the step that the options of `forecast` describe.

    With `search`, this is the smallest step; the search varies it.

    Args:
        source: Directory of the config.json.
        options: Options of the command.
        stages: Number of pipeline stages; with a pipeline, also the default number of microbatches.

    Raises:
        UsageError: An option has an invalid value.
    """
    is_search = isinstance(options, SearchOptions)
    dims = ParallelDims() if is_search else options.dims
    checkpointing_mode = "none" if is_search else options.checkpointing_mode
    schedule, pp_split, ac_scope, tp_plan = "1f1b", "even", "all", None
    if isinstance(options, ForecastOptions):
        schedule, pp_split, ac_scope = options.schedule, options.pp_split, options.ac_scope
        tp_plan = None if options.tp_plan is None else str(options.tp_plan)
    if pp_split not in (*SPLIT_RULES, *FORMER_SPLITS) and not all(
        each.strip().isdecimal() for each in pp_split.split(",")
    ):
        raise UsageError(
            f'--pp-split: "{pp_split}" must be {", ".join(SPLIT_RULES)}, or a number of layers for each stage'
        )
    microbatches = 1 if is_search else options.microbatches
    batch, dtype, param_dtype = options.batch, options.dtype, options.param_dtype
    microbatch_count = microbatches or (stages if dims.pp > 1 else 1)
    batch_size = batch if batch is not None else microbatch_count
    if batch_size % microbatch_count:
        raise UsageError(
            f"--batch: {batch_size} sequences cannot be divided into {microbatch_count} microbatches; use a multiple "
            "of "
            f"{microbatch_count}, or another --microbatches"
        )
    microbatch_size = batch_size // microbatch_count
    return ForecastTask(
        recipe=Recipe(
            name=source.name,
            model=ModelBlock(
                dtype=cast(Any, DTYPES.get(dtype) or stored_dtype(source)), trust_remote_code=options.trust_remote_code
            ),
            training=TrainingBlock(
                global_batch=batch_size * dims.dp, local_batch=batch_size if dims.pp > 1 else microbatch_size,
                microbatch=microbatch_size,
            ),
            optimizer=OptimizerBlock(),
            layout=LayoutBlock(
                tp=dims.tp, pp=dims.pp, dp_shard=dims.dp_shard, dp_replicate=dims.dp_replicate, pp_split=pp_split,
                tp_plan=tp_plan, schedule=schedule, activation_checkpointing=cast(Any, checkpointing_mode),
                ac_scope=cast(Any, ac_scope), param_dtype=cast(Any, DTYPES.get(param_dtype or "")),
                reduce_dtype=cast(Any, DTYPES.get(options.reduce_dtype or "")),
            ),
        ),
        source=source, seq=options.seq, images=options.images, loss=options.loss, optimizer=options.optimizer,
    )  # fmt: skip


def with_other_precision(task: ForecastTask) -> ForecastTask:
    """Return the same step in mixed precision, for a step that is not in mixed precision.

    It is the mixed precision with which torchtitan trains by default: float32 parameters, which are gathered in
    bfloat16 (or the low-precision dtype of the task), float32 optimizer state, and gradients that are reduced in
    float32.
    """
    low = task.recipe.model.dtype if task.recipe.model.dtype != "float32" else "bfloat16"
    recipe = task.recipe
    model = structs.replace(recipe.model, dtype="float32")
    layout = structs.replace(recipe.layout, param_dtype=low, reduce_dtype="float32")
    return replace(task, recipe=structs.replace(recipe, model=model, layout=layout))


def stored_dtype(source: Path) -> str:
    """Return the dtype that a config declares for its parameters; float32 if it declares none.

    Raises:
        UsageError: The config declares an unsupported dtype.
    """
    config = read_json(source / "config.json")
    configs = (config, *(each for each in config.values() if isinstance(each, dict)))
    dtype_names = [part[key] for part in configs for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)]
    name = str(dtype_names[0]) if dtype_names else "float32"
    if name not in DTYPES.values():
        raise UsageError(
            f"{source / 'config.json'}: dtype {name} is not supported, use one of {', '.join(DTYPES)}; pass --dtype"
        )
    return name
