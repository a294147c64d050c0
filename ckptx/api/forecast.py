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
from ckptx.model_view.sharder import read_plan
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
    from ckptx.runtime.forecasting.model_config import config_path_in_errors_as

    stopwatch, log = Stopwatch(), options.log or Log()
    source = str(options.model) if options.recipe is None else f"{options.recipe}: model.config"
    with (
        tempfile.TemporaryDirectory(prefix="ckptx-forecast-") as directory,
        config_path_in_errors_as(source, Path(directory)),
    ):
        task = _make_task(options, Path(directory), log)
        report = (
            _search_report(options, task, Path(directory), log)
            if isinstance(options, SearchOptions)
            else _forecast_report(options, task, log)
        )
        return stopwatch.stop(replace(report, notes=list(log.notes)))


def _make_task(options: ForecastOptions | SearchOptions, directory: Path, log: Log) -> ForecastTask:
    """Return the training step that a recipe or the options describe; import torch once they have been checked.

    Args:
        options: Options of the command.
        directory: Temporary directory for a config.json that is copied from another file, or made from a recipe.
        log: Log for the steps, and for the notes of the recipe and the config.

    Raises:
        CkptxError: The recipe, config.json or TP plan cannot be read or has an invalid value, or the recipe trains with
            its own command.
        EnvironmentProblem: A package is missing.
    """
    from ckptx.runtime.forecasting.model_config import (
        find_model_config,
        without_quantization_config,
        write_recipe_config,
    )
    from ckptx.runtime.forecasting.task import task_from_options, task_from_recipe
    from ckptx.runtime.parallel.pipeline.schedules import count_stages
    from ckptx.runtime.training.recipe_file import read_recipe

    if options.recipe is None:
        source = find_model_config(
            str(options.model), directory, revision=options.revision, token=options.token, cache_dir=options.cache_dir
        )
        source, note = without_quantization_config(source, directory)
        log.note(*([note] if note else []))
        schedule = options.schedule if isinstance(options, ForecastOptions) else "1f1b"
        task = task_from_options(source, options, count_stages(options.dims.pp, schedule))
        if task.recipe.layout.tp_plan is not None:
            read_plan(task.recipe.layout.tp_plan)
        _import_runtime(log)
        return task
    recipe = read_recipe(options.recipe, options.overrides)
    if recipe.trainer is not None:
        raise UsageError(
            f"{recipe.name}: trains with its own command, and forecast requires a recipe without a `trainer` block; "
            "pass another recipe, or a config.json"
        )
    _import_runtime(log)
    source, notes = write_recipe_config(recipe, directory)
    log.note(*recipe.notes, *notes)
    return task_from_recipe(recipe, source)


def _import_runtime(log: Log) -> None:
    """Import what a forecast needs, with torch.

    Args:
        log: Log that shows the steps.

    Raises:
        EnvironmentProblem: A package is missing.
    """
    try:
        log.step("importing torch")
        import_module("torch")
        log.step("importing transformers")
        import_module("transformers.models")
        import_module("ckptx.runtime.forecasting.ranks")
    except ImportError as error:
        raise missing_package("forecast", error) from error


def _forecast_report(options: ForecastOptions, task: ForecastTask, log: Log) -> ForecastReport:
    """Return the report on one layout, with the peak in mixed precision if no option or recipe sets the precision."""
    from ckptx.runtime.forecasting.ranks import ForecastRequest, forecast_requests
    from ckptx.runtime.forecasting.reporting import build_report, gathered_notes, unsharded_notes
    from ckptx.runtime.forecasting.task import with_other_precision
    from ckptx.runtime.parallel.pipeline.schedules import find_schedule

    requests = [ForecastRequest(task=task)]
    schedule = find_schedule(task.recipe.layout.schedule)
    # The report also has the peak in mixed precision. That uses FSDP2, which refuses a schedule that splits the
    # backward pass.
    supports_other_precision = not (task.dims.pp > 1 and schedule.splits_backward)
    if supports_other_precision and not _has_chosen_precision(options):
        # The forecast of `task` validates the extrapolation over layers, which is the same in any precision.
        requests.append(
            ForecastRequest(task=with_other_precision(task), peak_ranks_only=True, validate_extrapolation=False)
        )
    log.step("building the model" + (" from its own code" if options.trust_remote_code else ""))
    forecasts = forecast_requests(requests, on_step=log.step)
    log.note(*unsharded_notes(task, forecasts[0]), *gathered_notes(forecasts[0]))
    others = [
        (request.task, max(each.peak for each in ranks))
        for request, ranks in zip(requests[1:], forecasts[1:], strict=True)
    ]
    return build_report(task, forecasts[0], options.gpu_bytes, others[0] if others else None)


def _has_chosen_precision(options: ForecastOptions | SearchOptions) -> bool:
    """Return True if a recipe or an option sets the precision.

    Otherwise the report has the peak in the dtype of the config, and also that in mixed precision, which
    `with_other_precision` describes.
    """
    return options.recipe is not None or options.dtype != "auto" or options.param_dtype is not None


def _search_report(options: SearchOptions, task: ForecastTask, directory: Path, log: Log) -> SearchReport:
    """Return the report on a search.

    Args:
        options: Options of the search.
        task: Training step in any layout; the search sets the layout.
        directory: Temporary directory for configs.
        log: Log for the steps.
    """
    from ckptx.runtime.forecasting.reporting import build_search_report
    from ckptx.runtime.forecasting.search import (
        FixedDims,
        SearchSpace,
        forecast_other_precision,
        search,
        with_microbatches,
    )

    assert options.gpus is not None and options.gpu_bytes is not None
    fixed = FixedDims(
        tp=options.tp, pp=options.pp, dp_shard=options.dp_shard, dp_replicate=options.dp_replicate or 1,
        microbatches=options.microbatches, mode=options.activation_checkpointing,
    )  # fmt: skip
    if options.recipe is None:
        task = with_microbatches(task, task.microbatches * options.gpus)  # `--batch` is per GPU in a search
    space = SearchSpace(task, options.gpus, options.gpu_bytes, fixed, directory)
    result = search(space, log.step)
    other = None if _has_chosen_precision(options) else forecast_other_precision(space, result)
    return build_search_report(space, result, other)
