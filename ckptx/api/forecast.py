"""`forecast`: memory of a training step on each rank, from config.json alone.

This module imports torch only when the options have been checked.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ckptx.errors import UsageError, missing_package
from ckptx.options.api import two_table_api
from ckptx.options.forecast import ForecastOptions, SearchOptions
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.report.report import Log, Stopwatch

if TYPE_CHECKING:
    from ckptx.runtime.forecasting.task import ForecastTask


@two_table_api(ForecastOptions, SearchOptions, (ForecastReport, SearchReport), selector="search")
def forecast(options: ForecastOptions | SearchOptions) -> ForecastReport | SearchReport:
    """Forecast the memory of a training step on each rank, or with `search` find the layouts that fit.

    The step runs on meta tensors, which have shapes and no storage: the model with its TP plan, activation
    checkpointing and FSDP2, the pipeline stages under their schedule, the loss and the optimizer. With `search`, the
    layout options that are set are fixed, and the others are searched.

    Raises:
        UsageError: An option has an invalid value.
        InputError: config.json is missing or cannot be read.
        UnsupportedError: The model class cannot run with these options, or its computation depends on tensor values.
        EnvironmentProblem: A package is missing.
    """
    stopwatch, log = Stopwatch(), options.log or Log()
    try:
        import_module("ckptx.runtime.forecasting.ranks")  # it imports torch
    except ImportError as error:
        raise missing_package("forecast", error) from error
    from ckptx.runtime.forecasting.model_config import errors_naming

    source = str(options.model) if options.recipe is None else f"{options.recipe}: model.config"
    with (
        tempfile.TemporaryDirectory(prefix="ckptx-forecast-") as directory,
        errors_naming(source, Path(directory)),
    ):
        task = _make_task(options, Path(directory), log)
        report = (
            _search_report(options, task, Path(directory))
            if isinstance(options, SearchOptions)
            else _forecast_report(options, task)
        )
        return stopwatch.stop(replace(report, notes=list(log.notes)))


def _make_task(options: ForecastOptions | SearchOptions, directory: Path, log: Log) -> ForecastTask:
    """Return the training step that a recipe or the options describe.

    Args:
        options: Options of the command.
        directory: Temporary directory for a config.json that is copied from another file, or made from a recipe.
        log: Log for the notes of the recipe.

    Raises:
        UsageError: The recipe trains with its own command.
    """
    from ckptx.runtime.forecasting.model_config import find_model_config, write_recipe_config
    from ckptx.runtime.forecasting.ranks import count_stages
    from ckptx.runtime.forecasting.task import task_from_options, task_from_recipe
    from ckptx.runtime.training.recipe_file import read_recipe

    if options.recipe is None:
        source = find_model_config(
            str(options.model), directory, revision=options.revision, token=options.token, cache_dir=options.cache_dir
        )
        schedule = options.schedule if isinstance(options, ForecastOptions) else "1f1b"
        return task_from_options(source, options, count_stages(options.dims.pp, schedule))
    recipe = read_recipe(options.recipe, options.settings)
    if recipe.trainer is not None:
        raise UsageError(
            f"{recipe.name}: trains with its own command, and forecast requires a recipe without a `trainer` block; "
            "pass another recipe, or a config.json"
        )
    source, notes = write_recipe_config(recipe.model, directory)
    log.note(*recipe.notes, *notes)
    return task_from_recipe(recipe, source)


def _forecast_report(options: ForecastOptions, task: ForecastTask) -> ForecastReport:
    from ckptx.runtime.forecasting.ranks import forecast_ranks
    from ckptx.runtime.forecasting.reporting import build_report
    from ckptx.runtime.forecasting.task import with_other_precision

    other_forecast = None
    if options.recipe is None and options.dtype == "auto" and options.param_dtype is None:
        # The user chose no precision, so the report also has the peak in the other usual one. The forecast of `task`
        # validates the extrapolation over layers, which is the same in any precision.
        other_task = with_other_precision(task)
        other_forecast = other_task, forecast_ranks(other_task, peak_ranks_only=True, validate_extrapolation=False)
    return build_report(task, forecast_ranks(task), options.gpu_bytes, other_forecast)


def _search_report(options: SearchOptions, task: ForecastTask, directory: Path) -> SearchReport:
    from ckptx.runtime.forecasting.reporting import build_search_report
    from ckptx.runtime.forecasting.search import FixedDims, SearchSpace, search, with_microbatches

    assert options.gpus is not None and options.gpu_bytes is not None
    fixed = FixedDims(
        tp=options.tp, pp=options.pp, dp_shard=options.dp_shard, dp_replicate=options.dp_replicate or 1,
        microbatches=options.microbatches, mode=options.activation_checkpointing,
    )  # fmt: skip
    if options.recipe is None:
        task = with_microbatches(task, task.microbatches * options.gpus)
    space = SearchSpace(task, options.gpus, options.gpu_bytes, fixed, directory)
    return build_search_report(space, search(space))
