"""`forecast`: what a training step takes on each rank, from config.json alone."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptx.errors import UsageError
from ckptx.forecasting.ledger import KINDS, Life
from ckptx.forecasting.model_config import config_of_model, config_of_recipe
from ckptx.forecasting.ranks import ranks_of, stages_of
from ckptx.forecasting.reserve import CONTEXT, FRAGMENTATION, reserved
from ckptx.forecasting.run import RankForecast
from ckptx.forecasting.task import Task, task_of_options, task_of_recipe
from ckptx.forecasting.timeline import kind_of
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.options import parse_size
from ckptx.report.documents.forecast import ForecastReport
from ckptx.report.report import Log, Stopwatch
from ckptx.training.recipe_file import read_recipe

_GIB = 2**30


def forecast(
    model: str | Path | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    pp_split: str = "even",
    dp_shard: int = 1,
    dp_replicate: int = 1,
    batch: int | None = None,
    seq: int = 4096,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    activation_checkpointing: str = "none",
    ac_scope: str = "all",
    dtype: str = "auto",
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    optimizer: str = "adamw",
    loss: str = "sharded",
    images: int = 0,
    gpu_memory: int | str | None = None,
    recipe: str | Path | None = None,
    settings: Sequence[str] = (),
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    log: Log | None = None,
) -> ForecastReport:
    """Counts the bytes of a training step on each rank, without weights, GPUs or other ranks.

    The runtime itself runs: the model with its plan, checkpointing and FSDP2, the stages of a pipeline under their
    schedule, the loss and the optimizer, on tensors that have shapes and no storage.

    Args:
        model: A config.json, a directory with one, or a Hub id; None with `recipe`.
        tp: Ranks that share each tensor.
        pp: Ranks of the pipeline.
        pp_split: Layers of each stage: even, vllm, titan, hf, or the counts with commas between them.
        dp_shard: FSDP2 ranks.
        dp_replicate: Groups of dp_shard ranks that each hold all of it (HSDP).
        batch: Rows of each data rank in a step; one for each microbatch when left out.
        seq: Tokens of a row.
        microbatches: Portions of a step; as many as there are stages, or one without a pipeline, when left out.
        schedule: Of the pipeline.
        activation_checkpointing: none, full, submodule or selective.
        ac_scope: Which layers: all, language, vision or audio.
        dtype: What parameters are stored in: bf16, fp16, fp32, or auto, as the config says.
        param_dtype: What FSDP2 gathers them in, and computes in; as stored when left out.
        reduce_dtype: What it sums gradients in; that of param_dtype when left out.
        optimizer: adamw, adam, sgd or none.
        loss: sharded, whole or none; see `Step`.
        images: In each row, where the model looks at images.
        gpu_memory: Of each GPU, as 80GB or in bytes; what does not fit makes `exit` 1.
        recipe: A name or a file, in place of all of the above but gpu_memory.
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
    with tempfile.TemporaryDirectory(prefix="ckptx-forecast-") as directory:
        if recipe is not None:
            _refuse_beside(recipe, given)
            read = read_recipe(recipe, settings)
            if read.train is not None:
                raise UsageError(
                    f"{read.name}: trains with a command of its own, needed a recipe that ckptx trains; name another, "
                    "or give a config.json"
                )
            source, notes = config_of_recipe(read.model, Path(directory))
            log.note(*read.notes, *notes)
            task = task_of_recipe(read, source)
        else:
            if model is None:
                raise UsageError("forecast: found no model, needed a config.json, a directory, a Hub id, or --recipe")
            source = config_of_model(str(model), revision=revision, token=token, cache_dir=cache_dir)
            dims = ParallelDims(tp=tp, pp=pp, dp_shard=dp_shard, dp_replicate=dp_replicate)
            task = task_of_options(
                source, dims=dims, pp_split=pp_split, batch=batch, seq=seq, microbatches=microbatches,
                schedule=schedule, stages=stages_of(pp, schedule), activation_checkpointing=activation_checkpointing,
                ac_scope=ac_scope, dtype=dtype, param_dtype=param_dtype, reduce_dtype=reduce_dtype,
                optimizer=optimizer, loss=loss, images=images, trust_remote_code=trust_remote_code,
            )  # fmt: skip
        found = ranks_of(task)
        return stopwatch.stop(replace(report_of(task, found, memory), warnings=list(log.notes)))


def _refuse_beside(recipe: str | Path, given: Mapping[str, Any]) -> None:
    """Refuses what a recipe says by itself."""
    own = ("recipe", "settings", "gpu_memory", "log")
    for name, each in inspect.signature(forecast).parameters.items():
        if name not in own and given[name] != each.default:
            raise UsageError(
                f"{name}: {recipe} says what is trained, needed nothing beside it; change it by settings, or leave out "
                "recipe"
            )


def report_of(task: Task, ranks: Sequence[RankForecast], memory: int | None) -> ForecastReport:
    """The report of what was found."""
    dims, training = task.dims, task.recipe.training
    rows = [_row(rank, memory) for rank in ranks]
    peak = max(row["peak"] for row in rows)
    fits = None if memory is None else all(row["fits"] for row in rows)
    layout = task.recipe.layout
    return ForecastReport(
        command="forecast",
        exit=0 if fits is not False else 1,
        architecture=ranks[0].architecture,
        parameters=ranks[0].parameters,
        layout={"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate},
        settings={
            "batch": training.global_batch // dims.dp,
            "seq": task.seq,
            "images": task.images,
            "microbatches": task.microbatches,
            "schedule": layout.schedule if dims.pp > 1 else None,
            "activation_checkpointing": layout.activation_checkpointing,
            "ac_scope": layout.ac_scope,
            "dtype": task.recipe.model.dtype,
            "param_dtype": layout.param_dtype,
            "reduce_dtype": layout.reduce_dtype,
            "optimizer": task.optimizer,
            "loss": task.loss,
        },
        by_stage=rows,
        kinds=KINDS,
        gpu_memory=memory,
        reserved=reserved(peak),
        fits=fits,
        flops=sum(each.work.flops for each in ranks) * dims.per_stage,
        recomputed=sum(each.work.recomputed for each in ranks) * dims.per_stage,
        assumptions=assumptions_of(task, ranks),
    )


def _row(rank: RankForecast, memory: int | None) -> dict[str, Any]:
    course = rank.course
    worst, work, peak = course.worst, rank.work, rank.peak
    return {
        "stages": list(rank.stages),
        "peak": peak,
        "between_steps": sum(course.between),
        "by_kind": dict(zip(KINDS, worst.most, strict=True)),
        "between_by_kind": dict(zip(KINDS, course.between, strict=True)),
        "at": _told(worst.peak) if worst.peak is not None else None,
        "largest": [_told(each) for each in worst.largest],
        "flops": work.flops,
        "recomputed": work.recomputed,
        "sent": dict(work.sent),
        "wrapped_layers": rank.wrapped_layers,
        "fits": None if memory is None else peak + reserved(peak) <= memory,
        "course": [
            [each.part, each.turn, f"{each.unit.stack}.{each.unit.index}" if each.unit.stack else "", *each.most]
            for each in course.segments
        ],
    }


def _told(life: Life) -> dict[str, Any]:
    return {
        "nbytes": life.nbytes,
        "kind": kind_of(life),
        "op": life.op,
        "module": life.born.module,
        "part": life.born.part,
        "microbatch": life.born.turn,
        "recomputed": life.born.is_again,
        "shape": list(life.shape),
        "dtype": str(life.dtype).removeprefix("torch."),
    }


def assumptions_of(task: Task, ranks: Sequence[RankForecast]) -> list[str]:
    """What the numbers of a task do and do not say."""
    loss = {
        "sharded": "the loss is computed in float32, on logits that stay cut over the vocabulary under TP",
        "whole": "the loss is computed as transformers does it: on whole logits, in float32",
        "none": "no loss: logits are summed up",
    }[task.loss]
    said = [
        "bytes of tensors, on the first rank of each stage, which has the largest part of what is cut",
        loss,
        (
            "attention as on a CPU: fused, without whole scores wherever transformers chooses sdpa; kernels of CUDA "
            "that fall back to whole scores take more"
        ),
        (
            "not counted: workspaces of kernels, NCCL, the context of CUDA, fragmentation; kept free for them are "
            f"{CONTEXT / _GIB:.1f} GiB and {FRAGMENTATION:.0%} of the peak"
        ),
    ]
    if task.optimizer in ("adam", "adamw"):
        said.append("the optimizer goes one tensor at a time (foreach=False), as TP needs it")
    if any(each.left_out for each in ranks):
        said.append(
            "of layers that are alike a few ran: steps of three models, each with some more of them, agree on what "
            "each part of a step takes for one"
        )
    if ranks[0].missing and not task.images:
        said.append(f"text alone: nothing for its {' and '.join(ranks[0].missing)} tower to do; see --images")
    return said
