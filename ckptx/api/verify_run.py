"""`verify --run` as a command: the options, and who starts the ranks.

Under torchrun this process is one of the ranks. Alone it is rank 0 of one, or it starts as many as the mesh needs and
reads what they found.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ckptx.api.memory_check import peak_that_fits
from ckptx.comparison.headers import seen_together
from ckptx.errors import PeerFailure, UsageError, missing_package
from ckptx.formats.registry import open_checkpoint
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.model_view.sharder import read_plan
from ckptx.options import parse_size
from ckptx.processes.launch import is_launched, is_launched_by_us, launch
from ckptx.report.documents.running import RunReport
from ckptx.report.numbers import peak_of_processes
from ckptx.report.report import Log, Stopwatch
from ckptx.runtime.parity.arguments import CHOICES

_MOST_MICROBATCHES = 1024


def verify_running(
    reference: Path,
    checkpoint: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    pp_split: str = "even",
    dp_shard: int = 1,
    dp_replicate: int = 1,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    reference_memory: int | str | None = None,
    gpu_memory: int | str | None = None,
    tp_plan: str | Path | None = None,
    device: str = "auto",
    backend: str = "auto",
    compute_dtype: str = "fp32",
    activation_checkpointing: str = "none",
    ac_scope: str = "all",
    compile: bool = False,
    backward: bool = True,
    prefix: str | None = None,
    trust_remote_code: bool = False,
    strict: bool = False,
    log: Log | None = None,
) -> RunReport:
    """Builds both models, loads the checkpoint under a mesh, and compares what they compute.

    Args:
        reference: What the other should compute.
        checkpoint: What to check.
        tp: Ranks that share each tensor.
        pp: Ranks of the pipeline; with the schedules that give each rank two stages, half as many as stages.
        pp_split: Layers of each stage: even, vllm, titan, hf, or the counts with commas between them.
        dp_shard: FSDP ranks inside each TP rank.
        dp_replicate: Groups of dp_shard ranks that each hold all of it (HSDP).
        schedule: Of the pipeline: gpipe, 1f1b, interleaved1f1b, interleavedzerobubble, zbvzerobubble or dualpipev.
        microbatches: Of a step, on each data-parallel rank; as many as there are stages when left out.
        reference_memory: What the reference may take, as `8GB` or in bytes, beside what any process takes; on one rank
            both sides together. It runs in pieces where it takes more as a whole. What is free when left out.
        gpu_memory: Of each GPU, as `80GB` or in bytes: a run that cannot fit is refused before it begins.
        tp_plan: JSON file {"pattern": "style"}, on top of the plan of the model.
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl.
        compute_dtype: Of the parameters of both sides; auto takes that of each config, as they are stored.
        activation_checkpointing: none, full, submodule or selective.
        ac_scope: Which layers: all, language, vision or audio.
        compile: Compile each layer.
        backward: Compare the gradients of one step, too.
        prefix: Prefix of the model's names, in each of the two that holds a model under it; None finds it.
        trust_remote_code: Run code from the checkpoints for an unknown class.
        strict: What could not be decided makes `exit` 1, too.
        log: Has what the user should know, when an error is raised, too.

    Raises:
        UsageError: An option has a value it cannot have.
        UnsupportedError: The class cannot run like that.
        EnvironmentProblem: torch or transformers are missing, or there is no such device.
        SpaceError: A run does not fit `gpu_memory`; or the reference takes more memory than it may in any number of
            pieces, and the message names the least.
        InputError: A checkpoint is damaged or incomplete.
    """
    stopwatch = Stopwatch()
    given: dict[str, Any] = {
        "device": device,
        "backend": backend,
        "compute_dtype": compute_dtype,
        "activation_checkpointing": activation_checkpointing,
        "ac_scope": ac_scope,
        "schedule": schedule,
    }
    for name, value in given.items():
        if value not in CHOICES[name]:
            raise UsageError(f'--{name.replace("_", "-")}: "{value}", needed one of {", ".join(CHOICES[name])}')
    if ac_scope != "all" and activation_checkpointing == "none":
        raise UsageError("--ac-scope: says which layers recompute, needed --activation-checkpointing with it")
    if tp_plan is not None and tp == 1:
        raise UsageError("--tp-plan: says how TP cuts tensors, needed --tp 2 or more with it")
    for name, is_given in {
        "pp-split": pp_split != "even",
        "schedule": schedule != "1f1b",
        "microbatches": microbatches is not None,
    }.items():
        if is_given and pp == 1:
            raise UsageError(f"--{name}: says how pipeline stages run, needed --pp 2 or more with it")
    if microbatches is not None and not 1 <= microbatches <= _MOST_MICROBATCHES:
        raise UsageError(f"--microbatches: {microbatches}, needed 1 to {_MOST_MICROBATCHES:,}; logits of each are kept")
    memory = None if reference_memory is None else parse_size(reference_memory, "--reference-memory")
    dims = ParallelDims(tp=tp, pp=pp, dp_shard=dp_shard, dp_replicate=dp_replicate)
    user = dict(read_plan(str(tp_plan))) if tp_plan is not None else None
    log = log or Log()
    if prefix is not None:
        seen_together(open_checkpoint(reference), open_checkpoint(checkpoint), prefix=prefix)
    peak = None
    room = None if gpu_memory is None else parse_size(gpu_memory, "--gpu-memory")
    if room is not None and not is_launched_by_us() and os.environ.get("RANK", "0") == "0":  # others wait for this rank
        peak = peak_that_fits(
            reference, checkpoint, dims, room, pp_split=pp_split,
            microbatches=microbatches, schedule=schedule, activation_checkpointing=activation_checkpointing,
            ac_scope=ac_scope, dtype=compute_dtype, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if dims.world_size > 1 and not is_launched():
        arguments = ["verify", str(reference), str(checkpoint), "--run", "--tp", str(tp), "--dp-shard", str(dp_shard)]
        arguments += ["--pp", str(pp), "--pp-split", pp_split, "--dp-replicate", str(dp_replicate)]
        arguments += [] if microbatches is None else ["--microbatches", str(microbatches)]
        arguments += [] if memory is None else ["--reference-memory", str(memory)]
        for name, value in given.items():
            arguments += [f"--{name.replace('_', '-')}", value]
        arguments += [] if room is None else ["--gpu-memory", str(room)]
        arguments += [] if tp_plan is None else ["--tp-plan", str(tp_plan)]
        arguments += ["--compile"] if compile else []
        arguments += [] if backward else ["--no-backward"]
        arguments += [] if prefix is None else ["--prefix", prefix]
        arguments += ["--trust-remote-code"] if trust_remote_code else []
        arguments += ["--strict"] if strict else []
        return replace(_adopted(launch(arguments, dims.world_size), log, stopwatch), forecast_peak=peak)
    try:
        from ckptx.runtime.parity.forward import verify_run
        from ckptx.runtime.parity.side import RunOptions
    except ImportError as error:
        raise missing_package("--run", error) from error
    options = RunOptions(
        dims,
        user,
        device,
        backend,
        compute_dtype,
        activation_checkpointing,
        ac_scope,
        compile,
        backward,
        trust_remote_code,
        strict,
        pp_split,
        schedule,
        microbatches,
        memory,
        room is not None,
        prefix,
    )
    return replace(verify_run(reference, checkpoint, options, log), forecast_peak=peak)


def _adopted(document: dict[str, Any], log: Log, stopwatch: Stopwatch) -> RunReport:
    """Adopt the report of rank 0, with the time of this process and the memory of the largest rank.

    Raises:
        PeerFailure: It reports an error.
    """
    log.note(*document["warnings"])
    if document["error"] is not None:
        raise PeerFailure(document["error"], document["exit"], is_said=False)
    ours = {each.name for each in fields(RunReport)}
    report = RunReport(**{name: value for name, value in document.items() if name in ours})
    first = report.ranks[0].get("peak_rss", report.peak_rss) if report.ranks else report.peak_rss
    largest = peak_of_processes([report.peak_rss], are_ranks=True)
    return stopwatch.stop(replace(report, peak_rss_rank_0=first, **largest))
