"""What the numbers of a recipe say together: whether they can be run, and what a person should know of them.

global_batch = steps of accumulation x local_batch x data ranks          data ranks = dp_replicate x dp_shard
local_batch = microbatches x microbatch
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ckptx.errors import CkptxError, UsageError
from ckptx.layout.stages import SPLITS
from ckptx.runtime.training.recipe import LayoutBlock, Recipe, TrainingBlock
from ckptx.runtime.training.recipe_schema import Subject
from ckptx.untrusted.limits import RANKS
from ckptx.wording import counted

_SEED_BITS = 32


def with_data_ranks(layout: LayoutBlock, world_size: int | None, subject: Subject, path: str = "layout") -> LayoutBlock:
    """A layout whose `dp_shard` is a number.

    Args:
        layout: Of a recipe.
        world_size: The ranks there are, None where that is not known: then `dp_shard` is 1 unless it is given.
        subject: Of errors, by the path of a key.
        path: Of the layout.

    Raises:
        UsageError: The ranks that there are cannot be laid out so.
    """
    for key in ("tp", "pp", "dp_shard", "dp_replicate"):
        size = getattr(layout, key)
        if size is not None and not 1 <= size <= RANKS:
            raise UsageError(f"{subject(f'{path}.{key}')}: {path}.{key}: found {size}, needed 1 to {RANKS}; correct it")
    others = layout.tp * layout.pp * layout.dp_replicate
    if layout.dp_shard is None:
        if world_size is not None and world_size % others:
            raise UsageError(
                f"{subject(path)}: {path}: tp x pp x dp_replicate is {others}, found {counted(world_size, 'rank')}, "
                f"needed a multiple of {others}; start other ranks, or set another layout"
            )
        return replace(layout, dp_shard=(world_size or others) // others)
    needed = others * layout.dp_shard
    if world_size is not None and needed != world_size:
        raise UsageError(
            f"{subject(path)}: {path}: tp x pp x dp_shard x dp_replicate is {needed}, found "
            f"{counted(world_size, 'rank')}, needed {needed}; start so many, or set another layout"
        )
    return layout


def check_sizes(recipe: Recipe, subject: Subject) -> tuple[str, ...]:
    """Refuses numbers that cannot be, each or together.

    Args:
        recipe: With known numbers of data ranks.
        subject: Of errors, by the path of a key.

    Returns:
        What a person should know, of a recipe that runs.

    Raises:
        UsageError: The message has the rule.
        UnsupportedError: A schedule that is not right with this layout.
    """
    for path, value, bound in _out_of_bounds(recipe):
        raise UsageError(f"{subject(path)}: {path}: found {value}, needed {bound}; correct it")
    _check_steps(recipe, subject)
    if recipe.train is not None:
        return ()
    notes: list[str] = []
    layouts = [("layout", recipe.layout)]
    layouts += [(f"checks.layouts[{at}]", each) for at, each in enumerate(recipe.checks.layouts)]
    for path, layout in layouts:
        _check_batches(recipe.training, layout, path, subject)
        notes += _check_stages(recipe.training, layout, path, subject)
    return tuple(notes)


def _out_of_bounds(recipe: Recipe) -> Iterator[tuple[str, object, str]]:
    """Path, value and bound of each number that means nothing by itself."""
    training, optimizer, schedule = recipe.training, recipe.optimizer, recipe.schedule
    betas = [(f"optimizer.betas[{at}]", each) for at, each in enumerate(optimizer.betas)]
    rows: list[tuple[str, float | None, float, float | None]] = [
        ("data.samples", recipe.data.samples, 1, None),
        ("data.sequence_length", recipe.data.sequence_length, 2, None),
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
        ("checks.loss_times_noise", recipe.checks.loss_times_noise, 1, None),
        ("checks.logits_times_noise", recipe.checks.logits_times_noise, 1, None),
    ]
    for path, value, least, most in rows:
        if value is not None and not (least <= value and (most is None or value <= most)):
            yield path, value, f"{least} or more" if most is None else f"{least} to {most}"
    if training.clip is not None and training.clip <= 0:
        yield "training.clip", training.clip, "a number above 0, or null"
    if len(optimizer.betas) != 2:
        yield "optimizer.betas", counted(len(optimizer.betas), "number"), "two"


def _check_steps(recipe: Recipe, subject: Subject) -> None:
    training = recipe.training
    for at, step in enumerate(training.save_at):
        if not 1 <= step <= training.steps:
            where = f"training.save_at[{at}]"
            raise UsageError(
                f"{subject(where)}: {where}: found step {step}, needed 1 to training.steps, which is {training.steps}; "
                "correct one of them"
            )
    if list(training.save_at) != sorted(set(training.save_at)):
        raise UsageError(
            f"{subject('training.save_at')}: training.save_at: found {list(training.save_at)}, needed steps in "
            "ascending order, each once; sort them"
        )


def _check_batches(training: TrainingBlock, layout: LayoutBlock, path: str, subject: Subject) -> None:
    """Samples are dealt out evenly."""
    dp = layout.dims.dp
    needed = training.local_batch * dp
    if training.global_batch % needed:
        raise UsageError(
            f"{subject('training.global_batch', 'training.local_batch', path)}: training.global_batch: found "
            f"{training.global_batch}, needed a multiple of {needed}, which is training.local_batch "
            f"({training.local_batch}) x data ranks of {path} ({dp}); change one of them"
        )
    if training.local_batch % training.microbatch:
        raise UsageError(
            f"{subject('training.local_batch', 'training.microbatch')}: training.local_batch: found "
            f"{training.local_batch}, needed a multiple of training.microbatch, which is {training.microbatch}; change "
            "one of them"
        )


def _check_stages(training: TrainingBlock, layout: LayoutBlock, path: str, subject: Subject) -> Iterator[str]:
    """A pipeline that can be run."""
    split = layout.pp_split
    counts = split.split(",")
    if split not in SPLITS and not (len(counts) == layout.pp and all(each.strip().isdecimal() for each in counts)):
        raise UsageError(
            f'{subject(f"{path}.pp_split")}: {path}.pp_split: found "{split}", needed {", ".join(SPLITS)}, or a count '
            f"for each of {counted(layout.pp, 'stage')} with commas between them; correct it"
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
        said = str(error).removeprefix(f"--schedule {layout.schedule.lower()}: ").removeprefix("--schedule ")
        raise type(error)(
            f"{subject(where, path, 'training.local_batch', 'training.microbatch')}: {where} {layout.schedule}, with "
            f"training.local_batch / training.microbatch = {microbatches}: {said}"
        ) from error
    stages = layout.pp * schedule.stages
    if microbatches < stages:
        yield (
            f"{path}: {counted(microbatches, 'microbatch')} for {counted(stages, 'stage')}, so that some stages wait "
            "throughout; training.local_batch / training.microbatch is how many there are"
        )
