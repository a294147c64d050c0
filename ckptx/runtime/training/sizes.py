"""Check whether the sizes in a recipe are valid together, and note what a user should know about them.

global_batch = accumulation steps x local_batch x data-parallel ranks        dp = dp_replicate x dp_shard
local_batch = microbatches x microbatch
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ckptx.errors import CkptxError, UnsupportedError, UsageError
from ckptx.layout.stages import FORMER_SPLITS, SPLIT_RULES
from ckptx.runtime.training.recipe import LayoutBlock, Recipe, TrainingBlock
from ckptx.runtime.training.recipe_schema import DescribeSubject
from ckptx.untrusted.limits import MAX_RANKS
from ckptx.wording import counted

_SEED_BITS = 32  # size of a seed


def fill_dp_shard(
    layout: LayoutBlock, world_size: int | None, subject: DescribeSubject, path: str = "layout"
) -> LayoutBlock:
    """Return a layout with its `dp_shard` filled in, after checking its sizes.

    Args:
        layout: Layout of a recipe.
        world_size: Number of ranks; None if unknown, in which case a missing `dp_shard` becomes 1.
        subject: Returns the subject of an error about keys.
        path: Path of the layout in the recipe.

    Raises:
        UsageError: The layout is impossible with this number of ranks.
    """
    for key in ("tp", "pp", "dp_shard", "dp_replicate"):
        size = getattr(layout, key)
        if size is not None and not 1 <= size <= MAX_RANKS:
            raise UsageError(
                f"{subject(f'{path}.{key}')}: {path}.{key} is {size} and must be 1 to {MAX_RANKS}; correct it"
            )
    others = layout.tp * layout.pp * layout.dp_replicate
    if layout.dp_shard is None:
        if world_size is not None and world_size % others:
            raise UsageError(
                f"{subject(path)}: {path}: tp x pp x dp_replicate is {others}, which does not divide "
                f"{counted(world_size, 'rank')}; start a multiple of {others} ranks, or set another layout"
            )
        return replace(layout, dp_shard=(world_size or others) // others)
    needed = others * layout.dp_shard
    if world_size is not None and needed != world_size:
        raise UsageError(
            f"{subject(path)}: {path}: tp x pp x dp_shard x dp_replicate is {needed}, but there are "
            f"{counted(world_size, 'rank')}; start {needed}, or set another layout"
        )
    return layout


def check_sizes(recipe: Recipe, subject: DescribeSubject) -> tuple[str, ...]:
    """Refuse invalid sizes and combinations of sizes; for a custom trainer, batches and stages are not checked.

    Args:
        recipe: Recipe with a known number of data-parallel ranks.
        subject: Returns the subject of an error about keys.

    Returns:
        Notes for the user about a valid recipe.

    Raises:
        UsageError: A size breaks a rule, which the message names.
        UnsupportedError: The schedule is not supported with this layout.
    """
    for path, value, bound in _find_out_of_bounds(recipe):
        raise UsageError(f"{subject(path)}: {path} is {value} and must be {bound}; correct it")
    _check_steps(recipe, subject)
    if recipe.trainer is not None:
        return ()
    notes: list[str] = []
    layouts = [("layout", recipe.layout)]
    layouts += [(f"checks.layouts[{index}]", each) for index, each in enumerate(recipe.checks.layouts)]
    for path, layout in layouts:
        _check_batches(recipe.training, layout, path, subject)
        if recipe.adapter is not None and layout.tp > 1:
            raise UnsupportedError(
                f"{subject(f'{path}.tp', 'adapter')}: {path}.tp is {layout.tp}, but ckptx's trainer does not shard the "
                "factors of an adapter by TP; use dp_shard or pp"
            )
        notes += _check_stages(recipe.training, layout, path, subject)
    return tuple(notes)


def _find_out_of_bounds(recipe: Recipe) -> Iterator[tuple[str, object, str]]:
    """Yield (path of the key, value, description of the bounds) for each value out of its bounds."""
    training, optimizer, schedule, adapter = recipe.training, recipe.optimizer, recipe.schedule, recipe.adapter
    betas = [(f"optimizer.betas[{index}]", each) for index, each in enumerate(optimizer.betas)]
    # path of the key, value, minimum, maximum (None: no maximum)
    bounded_values: list[tuple[str, float | None, float, float | None]] = [
        ("data.samples", recipe.data.samples, 1, None),
        ("data.sequence_length", recipe.data.sequence_length, 2, None),
        ("adapter.rank", None if adapter is None else adapter.rank, 1, 1 << 20),
        ("training.steps", training.steps, 1, None),
        ("training.total_steps", training.total_steps, training.steps, None),
        ("training.global_batch", training.global_batch, 1, None),
        ("training.local_batch", training.local_batch, 1, None),
        ("training.microbatch", training.microbatch, 1, None),
        ("training.seed", training.seed, 0, 2**_SEED_BITS - 1),
        ("training.dropout", training.dropout, 0, 0.99),
        ("optimizer.lr", optimizer.lr, 0, None),
        ("optimizer.eps", optimizer.eps, 0, None),
        ("optimizer.weight_decay", optimizer.weight_decay, 0, None),
        *((path, each, 0, 0.999999) for path, each in betas),
        ("schedule.warmup_steps", schedule.warmup_steps, 0, training.total_steps or training.steps),
        ("schedule.min_lr", schedule.min_lr, 0, optimizer.lr),
        ("checkpoint.keep", recipe.checkpoint.keep, 1, None),
        ("checks.loss_noise_factor", recipe.checks.loss_noise_factor, 1, None),
        ("checks.logits_noise_factor", recipe.checks.logits_noise_factor, 1, None),
    ]
    for path, value, minimum, maximum in bounded_values:
        if value is not None and not (minimum <= value and (maximum is None or value <= maximum)):
            yield path, value, f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
    if adapter is not None and not adapter.alpha > 0:
        yield "adapter.alpha", adapter.alpha, "a number above 0"
    if adapter is not None and not adapter.targets:
        yield "adapter.targets", "empty", "a list of one or more names"
    if training.clip is not None and training.clip <= 0:
        yield "training.clip", training.clip, "a number above 0, or null"
    if len(optimizer.betas) != 2:
        yield "optimizer.betas", f"a list of {counted(len(optimizer.betas), 'number')}", "a list of two"


def _check_steps(recipe: Recipe, subject: DescribeSubject) -> None:
    training = recipe.training
    for index, step in enumerate(training.save_at):
        if not 1 <= step <= training.steps:
            where = f"training.save_at[{index}]"
            raise UsageError(
                f"{subject(where)}: {where} is step {step} and must be 1 to training.steps, which is {training.steps}; "
                "correct one of them"
            )
    if list(training.save_at) != sorted(set(training.save_at)):
        raise UsageError(
            f"{subject('training.save_at')}: training.save_at is {list(training.save_at)} and must have distinct "
            "steps in ascending order; sort them"
        )


def _check_batches(training: TrainingBlock, layout: LayoutBlock, path: str, subject: DescribeSubject) -> None:
    """Check that a step can be split evenly into passes of data-parallel ranks, and these into microbatches."""
    dp = layout.dims.dp
    needed = training.local_batch * dp
    if training.global_batch % needed:
        raise UsageError(
            f"{subject('training.global_batch', 'training.local_batch', path)}: training.global_batch is "
            f"{training.global_batch} and must be a multiple of {needed}, which is training.local_batch "
            f"({training.local_batch}) x data-parallel ranks of {path} ({dp}); change one of them"
        )
    if training.local_batch % training.microbatch:
        raise UsageError(
            f"{subject('training.local_batch', 'training.microbatch')}: training.local_batch is "
            f"{training.local_batch} and must be a multiple of training.microbatch, which is {training.microbatch}; "
            "change one of them"
        )


def _check_stages(training: TrainingBlock, layout: LayoutBlock, path: str, subject: DescribeSubject) -> Iterator[str]:
    """Check that the split into stages and the schedule are valid, and yield notes about them."""
    split = layout.pp_split
    counts = split.split(",")
    if split not in (*SPLIT_RULES, *FORMER_SPLITS) and not (
        len(counts) == layout.pp and all(each.strip().isdecimal() for each in counts)
    ):
        raise UsageError(
            f'{subject(f"{path}.pp_split")}: {path}.pp_split is "{split}" and must be {", ".join(SPLIT_RULES)}, or '
            f"comma-separated numbers of layers for {counted(layout.pp, 'stage')}; correct it"
        )
    if layout.pp == 1 and layout.schedule == LayoutBlock().schedule:
        return
    from ckptx.runtime.parallel.pipeline.schedules import check_schedule, find_schedule  # torch takes seconds

    where = f"{path}.schedule"
    microbatches = training.local_batch // training.microbatch
    try:
        schedule = find_schedule(layout.schedule)
        if layout.pp == 1:
            return
        check_schedule(
            schedule, pp=layout.pp, microbatches=microbatches, data_parallel=layout.dims.dp,
            activation_checkpointing=layout.activation_checkpointing, sequence_parallel=False,
        )  # fmt: skip
    except CkptxError as error:
        reason = str(error).removeprefix(f"--schedule {layout.schedule.lower()}: ").removeprefix("--schedule ")
        raise type(error)(
            f"{subject(where, path, 'training.local_batch', 'training.microbatch')}: {where} {layout.schedule}, with "
            f"training.local_batch / training.microbatch = {microbatches}: {reason}"
        ) from error
    stages = layout.pp * schedule.stages_per_rank
    if microbatches < stages:
        yield (
            f"{path}: {counted(microbatches, 'microbatch')} for {counted(stages, 'stage')}, so that some stages are "
            "always idle; training.local_batch / training.microbatch is the number of microbatches"
        )
