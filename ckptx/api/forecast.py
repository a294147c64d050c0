"""`forecast`: what a training step takes on each rank, from config.json alone."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.options import parse_size
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.report.report import Log, Stopwatch
from ckptx.runtime.forecasting.model_config import config_of_model, config_of_recipe
from ckptx.runtime.forecasting.ranks import ranks_of, stages_of
from ckptx.runtime.forecasting.reporting import report_of, search_report_of
from ckptx.runtime.forecasting.search import MODES, Pins, SearchSpace, with_microbatches
from ckptx.runtime.forecasting.search import search as find_layouts
from ckptx.runtime.forecasting.task import Task, task_of_options, task_of_recipe
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.untrusted.limits import RANKS


@overload
def forecast(model: str | Path | None = None, *, search: Literal[True], **options: Any) -> SearchReport: ...


@overload
def forecast(model: str | Path | None = None, *, search: Literal[False] = False, **options: Any) -> ForecastReport: ...


def forecast(  # type: ignore[misc]  # which options there are is said here alone
    model: str | Path | None = None,
    *,
    tp: int | None = None,
    pp: int | None = None,
    pp_split: str = "even",
    dp_shard: int | None = None,
    dp_replicate: int | None = None,
    batch: int | None = None,
    seq: int = 4096,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    activation_checkpointing: str | None = None,
    ac_scope: str = "all",
    dtype: str = "auto",
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    optimizer: str = "adamw",
    loss: str = "sharded",
    images: int = 0,
    gpu_memory: int | str | None = None,
    search: bool = False,
    gpus: int | None = None,
    recipe: str | Path | None = None,
    settings: Sequence[str] = (),
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    log: Log | None = None,
) -> ForecastReport | SearchReport:
    """Counts the bytes of a training step on each rank, without weights, GPUs or other ranks; or finds what would fit.

    The runtime itself runs: the model with its plan, checkpointing and FSDP2, the stages of a pipeline under their
    schedule, the loss and the optimizer, on tensors that have shapes and no storage.

    Args:
        model: A config.json, a directory with one, or a Hub id; None with `recipe`.
        tp: Ranks that share each tensor; 1 when left out, as the next three. With `search`, what is left out of these,
            of `microbatches` and of `activation_checkpointing` is searched.
        pp: Ranks of the pipeline.
        pp_split: Layers of each stage: even, vllm, titan, hf, or the counts with commas between them.
        dp_shard: FSDP2 ranks.
        dp_replicate: Groups of dp_shard ranks that each hold all of it (HSDP).
        batch: Rows of each data rank in a step; one for each microbatch when left out. With `search`, rows of a step
            for each GPU, so that every layout does the same.
        seq: Tokens of a row.
        microbatches: Portions of a step; as many as there are stages, or one without a pipeline, when left out.
        schedule: Of the pipeline.
        activation_checkpointing: none, full, submodule or selective; none when left out.
        ac_scope: Which layers: all, language, vision or audio.
        dtype: What parameters are stored in: bf16, fp16, fp32, or auto, as the config says.
        param_dtype: What FSDP2 gathers them in, and computes in; as stored when left out.
        reduce_dtype: What it sums gradients in; that of param_dtype when left out.
        optimizer: adamw, adam, sgd or none.
        loss: sharded, whole or none; see `Step`.
        images: In each row, where the model looks at images.
        gpu_memory: Of each GPU, as 80GB or in bytes; what does not fit makes `exit` 1.
        search: Find the layouts of `gpus` GPUs that fit `gpu_memory`, in place of one forecast.
        gpus: How many GPUs.
        recipe: A name or a file, in place of all of the above but the last three.
        settings: Changes to the recipe, as layout.tp=2.
        revision: Of the Hub id.
        token: For the Hub.
        cache_dir: Of the Hub.
        trust_remote_code: Run code from the checkpoint for an unknown class.
        log: Has what the user should know, when an error is raised, too.

    Raises:
        UsageError: An option has a value it cannot have.
        InputError: There is no config.json, or it cannot be read.
        UnsupportedError: The class cannot run like that, or computes by values that nobody knows before it runs.
        EnvironmentProblem: A package is missing.
    """
    given = dict(locals())
    stopwatch, log = Stopwatch(), log or Log()
    memory = None if gpu_memory is None else parse_size(gpu_memory, "--gpu-memory")
    _refuse_half_a_search(given)
    with tempfile.TemporaryDirectory(prefix="ckptx-forecast-") as directory:
        if recipe is not None:
            _refuse_beside(recipe, given)
            task = _task_of_recipe(recipe, settings, Path(directory), log)
        else:
            if model is None:
                raise UsageError("forecast: found no model, needed a config.json, a directory, a Hub id, or --recipe")
            source = config_of_model(str(model), revision=revision, token=token, cache_dir=cache_dir)
            sizes = {"tp": tp, "pp": pp, "dp_shard": dp_shard, "dp_replicate": dp_replicate}
            dims = ParallelDims(**{axis: 1 if search or size is None else size for axis, size in sizes.items()})
            task = task_of_options(
                source, dims=dims, pp_split=pp_split, batch=batch, seq=seq,
                microbatches=1 if search else microbatches, schedule=schedule, stages=stages_of(dims.pp, schedule),
                activation_checkpointing="none" if search else activation_checkpointing or "none",
                ac_scope="all" if search else ac_scope, dtype=dtype, param_dtype=param_dtype,
                reduce_dtype=reduce_dtype, optimizer=optimizer, loss=loss, images=images,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        if search:
            assert gpus is not None and memory is not None
            pins = Pins(
                tp=tp, pp=pp, dp_shard=dp_shard, dp_replicate=dp_replicate or 1, microbatches=microbatches,
                mode=activation_checkpointing,
            )  # fmt: skip
            task = task if recipe is not None else with_microbatches(task, task.microbatches * gpus)
            question = SearchSpace(task, gpus, memory, pins, Path(directory))
            return stopwatch.stop(replace(search_report_of(question, find_layouts(question)), warnings=list(log.notes)))
        return stopwatch.stop(replace(report_of(task, ranks_of(task), memory), warnings=list(log.notes)))


def _task_of_recipe(recipe: str | Path, settings: Sequence[str], directory: Path, log: Log) -> Task:
    read = read_recipe(recipe, settings)
    if read.train is not None:
        raise UsageError(
            f"{read.name}: trains with a command of its own, needed a recipe that ckptx trains; name another, or give "
            "a config.json"
        )
    source, notes = config_of_recipe(read.model, directory)
    log.note(*read.notes, *notes)
    return task_of_recipe(read, source)


def _refuse_half_a_search(given: Mapping[str, Any]) -> None:
    """Refuses what only a search takes, and what it does not.

    Raises:
        UsageError: As above, or a number is none.
    """
    gpus = given["gpus"]
    if not given["search"]:
        if gpus is not None:
            raise UsageError("--gpus: says how many GPUs are searched for, needed --search with it")
        return
    if gpus is None or given["gpu_memory"] is None:
        lacking = "--gpus" if gpus is None else "--gpu-memory"
        raise UsageError(f"--search: looks for what fits, needed {lacking} with it")
    if not 1 <= gpus <= RANKS:
        raise UsageError(f"--gpus: {gpus}, needed 1 to {RANKS}")
    for name, usual in (("schedule", "1f1b"), ("pp_split", "even"), ("ac_scope", "all")):
        if given[name] != usual:
            raise UsageError(f"--{name.replace('_', '-')}: is not searched, needed {usual}; leave it out")
    mode = given["activation_checkpointing"]
    if mode is not None and mode not in MODES:
        raise UsageError(f'--activation-checkpointing: "{mode}", needed one of {", ".join(MODES)}')


def _refuse_beside(recipe: str | Path, given: Mapping[str, Any]) -> None:
    """Refuses what a recipe says by itself."""
    own = ("recipe", "settings", "gpu_memory", "search", "gpus", "log")
    for name, each in inspect.signature(forecast).parameters.items():
        if name not in own and given[name] != each.default:
            raise UsageError(
                f"{name}: {recipe} says what is trained, needed nothing beside it; change it by settings, or leave out "
                "recipe"
            )
