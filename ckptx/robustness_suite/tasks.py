"""Tasks of ranks in a phase: each function runs on all ranks, and returns the same result on all of them.

A rank builds model and data for a task, and releases them before it returns.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ckptx.robustness_suite.kills import kill_at, record_operations
from ckptx.robustness_suite.oracles import largest_value
from ckptx.robustness_suite.run_requests import KillPoint, Logits, RunRequest, RunResult, RunSetup, max_difference
from ckptx.robustness_suite.surviving_steps import SurvivingSteps, check_steps
from ckptx.robustness_suite.trainer_items import collect_items, shard_digests
from ckptx.runtime.memory.measured_memory import MeasuredMemory, measure_step
from ckptx.runtime.model.build import read_config
from ckptx.runtime.parallel.distributed import (
    RankContext,
    all_gather_object,
    broadcast_object,
    count_local_ranks,
    raise_on_all_ranks,
    unused_gpus_note,
)
from ckptx.runtime.parity.noise import perturb_copy
from ckptx.runtime.torch_private import local_tensor
from ckptx.runtime.training.checkpoints import StepDirectories
from ckptx.runtime.training.data import Dataset, collate, open_dataset
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.source import prepare_source
from ckptx.runtime.training.trainer import StepMetrics, Trainer

_NUM_PROBE_SAMPLES = 2  # samples whose logits are compared
LABELS = "labels"


def prepare(rank_context: RankContext, recipe: Recipe, directory: Path, requested_device: str) -> RunSetup:
    """Write the initial checkpoint of a recipe on rank 0 if there is none, and return what the runs start from.

    Args:
        rank_context: Rank of this process.
        recipe: Recipe of the run.
        directory: Folder of a checkpoint that is written.
        requested_device: Value of `--device`.
    """
    checkpoint: Path | None = None
    with raise_on_all_ranks():
        if rank_context.rank == 0:
            checkpoint = prepare_source(recipe, directory)
    source: Path = broadcast_object(checkpoint)
    devices = None if rank_context.device.type == "cpu" else torch.cuda.device_count()
    note = unused_gpus_note(requested_device, rank_context.device, count_local_ranks())
    return RunSetup(source, devices, dist.get_backend(), note)


def broadcast(rank_context: RankContext, value: Any) -> Any:
    """Return the value that the parent process of rank 0 passed, on all ranks."""
    return broadcast_object(value)


def all_gather(rank_context: RankContext, value: Any) -> list[Any]:
    """Return the values that the parent processes of all ranks passed, by rank."""
    return all_gather_object(value)


def call_on_rank_0(rank_context: RankContext, call: Callable[[], object]) -> Any:
    """Call a function on rank 0, and return its result on all ranks."""
    result: object = None
    with raise_on_all_ranks():
        if rank_context.rank == 0:
            result = call()
    return broadcast_object(result)


def train(rank_context: RankContext, request: RunRequest) -> RunResult:
    """Run the trainer, from the initial checkpoint or resumed."""
    dataset = open_dataset_on_all_ranks(request.recipe, request.source)
    trainer = Trainer(
        request.recipe, request.source, dataset, rank_context, layout=request.layout, callbacks=request.events
    )
    try:
        return _train(rank_context, request, trainer, dataset)
    finally:
        trainer.release()


def _train(rank_context: RankContext, request: RunRequest, trainer: Trainer, dataset: Dataset) -> RunResult:
    if request.resume_from is not None:
        with raise_on_all_ranks():
            trainer.resume(request.resume_from)
    if request.perturbation_seed is not None:
        perturb_embedding(trainer, request.perturbation_seed)
    snapshots: dict[int, list[Any]] = {}
    losses: dict[int, float] = {}
    log_lines: list[str] = []

    def save_and_collect() -> None:
        """Save and collect items between two steps, if the run requests it for this step."""
        if trainer.completed_steps in request.saves:
            trainer.save(request.saves[trainer.completed_steps])
        if trainer.completed_steps in request.snapshot_steps:
            snapshots[trainer.completed_steps] = all_gather_object((collect_items(trainer), shard_digests(trainer)))

    start_items = all_gather_object(collect_items(trainer)) if request.snapshot_steps else []
    save_and_collect()
    records: list[StepMetrics] = []
    measured: MeasuredMemory | None = None

    def step() -> None:
        records.append(trainer.step())

    while trainer.completed_steps < request.last_step:
        if request.measures_memory and trainer.completed_steps == request.last_step - 1:
            measured = measure_step(step, trainer.rank_model.models, rank_context.device)
        else:
            step()
        record = records[-1]
        losses[record.step] = record.loss
        log_lines.append(record.line())
        if rank_context.rank == 0 and request.log_file is not None:
            with request.log_file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(record)) + "\n")
        save_and_collect()
    trainer.wait_for_save()
    sharded = all_gather_object(_count_sharded(trainer))
    logits = compute_probe_logits(trainer, dataset) if request.computes_logits else None
    return RunResult(
        losses=losses,
        log_lines=log_lines,
        start_items=start_items,
        items={step: [items for items, _ in by_rank] for step, by_rank in snapshots.items()},
        shard_digests={step: [digests for _, digests in by_rank] for step, by_rank in snapshots.items()},
        logits=logits,
        sharded_counts=(max(num_sharded for num_sharded, _ in sharded), max(count for _, count in sharded)),
        notes=list(dict.fromkeys(note for each in all_gather_object(trainer.notes) for note in each)),
        measured_memory=_max_measured(all_gather_object(measured)) if request.measures_memory else None,
    )


def _max_measured(measured: Sequence[MeasuredMemory | None]) -> tuple[int, int]:
    """Return the bytes of tensors at the peak of a step and between steps, each the maximum over ranks."""
    samples = [each for each in measured if each is not None]
    return max(each.peak for each in samples), max(each.between_steps for each in samples)


def save_and_record(rank_context: RankContext, request: RunRequest, kill_point: KillPoint) -> list[list[str]]:
    """Resume for one step and save it; return the names of the file operations of the save, by rank.

    If `kill_point` names an operation, its rank, or all ranks, are killed there, and nothing is recorded.
    """
    dataset = open_dataset_on_all_ranks(request.recipe, request.source)
    trainer = Trainer(
        request.recipe, request.source, dataset, rank_context, layout=request.layout, callbacks=request.events
    )
    try:
        assert request.resume_from is not None
        trainer.resume(request.resume_from)
        trainer.step()
        pids = [pid for machine, pid in all_gather_object((_machine(), os.getpid())) if machine == _machine()]
        names: list[str] = []
        with ExitStack() as stack:
            if kill_point.operation is None:
                names = stack.enter_context(record_operations(kill_point.root))
            elif rank_context.rank == kill_point.rank:
                others = [pid for pid in pids if pid != os.getpid()] if kill_point.kills_all_ranks else []
                stack.enter_context(kill_at(kill_point.root, kill_point.operation, others))
            trainer.save(StepDirectories(kill_point.root).path(trainer.completed_steps))
            trainer.wait_for_save()
        return all_gather_object(list(names))
    finally:
        trainer.release()


def _machine() -> tuple[str, str]:
    """Return the machine and PID namespace within which a process id is unique."""
    return socket.gethostname(), os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""


def check_surviving_steps(
    rank_context: RankContext, root: Path, good_step: int, expected_digests: Mapping[int, str]
) -> SurvivingSteps:
    """Check a directory of steps after a kill, on rank 0; see `check_steps`."""
    surviving: SurvivingSteps | None = None
    with raise_on_all_ranks():
        if rank_context.rank == 0:
            surviving = check_steps(root, good_step=good_step, expected_digests=expected_digests)
    answer: SurvivingSteps = broadcast_object(surviving)
    return answer


def compute_source_logits(
    rank_context: RankContext, recipe: Recipe, path: Path, num_perturbations: int
) -> tuple[Logits, float]:
    """Return the logits of stock transformers, computed on rank 0 in one process, and their noise.

    The noise is the largest difference of the logits after perturbing the embedding by 1 ULP, over all perturbations.
    """
    result: tuple[Logits, float] | None = None
    with raise_on_all_ranks():
        if rank_context.rank == 0:
            result = _compute_stock_logits(recipe, path, rank_context, num_perturbations)
    answer: tuple[Logits, float] = broadcast_object(result)
    return answer


def _compute_stock_logits(
    recipe: Recipe, path: Path, rank_context: RankContext, num_perturbations: int
) -> tuple[Logits, float]:
    _, cls, _ = read_config(path, trust_remote_code=recipe.model.trust_remote_code)
    model: Any = cls.from_pretrained(
        path,
        dtype=getattr(torch, recipe.model.dtype),
        attn_implementation=recipe.model.attn_implementation or "sdpa",
        local_files_only=True,
    )
    model = model.to(rank_context.device).eval()
    batches = probe_batches(recipe, open_dataset(recipe, path), rank_context)  # on this rank only

    def logits() -> Logits:
        with torch.no_grad():
            return [model(**each).logits.float().cpu().numpy() for each in batches]

    reference = logits()
    differences = []
    table = model.get_input_embeddings().weight
    original = table.detach().clone()
    for seed in range(num_perturbations):
        with torch.no_grad():
            table.copy_(perturb_copy(original, _make_generator(seed)))
        differences.append(max_difference(reference, logits()))
    return reference, largest_value(differences)


def compute_runtime_logits(rank_context: RankContext, request: RunRequest) -> Logits | None:
    """Return the logits of the sharded model, with the weights of the source or of the checkpoint to resume from.

    None if no rank has them.
    """
    dataset = open_dataset_on_all_ranks(request.recipe, request.source)
    trainer = Trainer(
        request.recipe, request.source, dataset, rank_context, layout=request.layout, callbacks=request.events
    )
    try:
        if request.resume_from is not None:
            trainer.resume(request.resume_from)
        return compute_probe_logits(trainer, dataset)
    finally:
        trainer.release()


def open_dataset_on_all_ranks(recipe: Recipe, source: Path) -> Dataset:
    """Open the data; an error on one rank is raised on all ranks."""
    with raise_on_all_ranks():
        return open_dataset(recipe, source)


def probe_batches(recipe: Recipe, dataset: Dataset, rank_context: RankContext) -> list[dict[str, Tensor]]:
    """Return the first samples as batches of one without labels, the same on every rank."""
    dtype = getattr(torch, recipe.model.dtype)
    batches = []
    for index in range(min(_NUM_PROBE_SAMPLES, len(dataset))):
        batch = {name: value for name, value in collate([dataset[index]]).items() if name != LABELS}
        batches.append(
            {
                name: value.to(rank_context.device, dtype if value.is_floating_point() else value.dtype)
                for name, value in batch.items()
            }
        )
    return batches


def compute_probe_logits(trainer: Trainer, dataset: Dataset) -> Logits | None:
    """Return the logits of the probe samples on all ranks, from the first rank that has them; None if no rank does."""
    outputs = trainer.logits(probe_batches(trainer.recipe, dataset, trainer.rank_context))
    local_logits = None if outputs is None else [each.numpy() for each in outputs]
    return next((each for each in all_gather_object(local_logits) if each is not None), None)


def perturb_embedding(trainer: Trainer, seed: int) -> None:
    """Perturb the token embedding by 1 ULP, up or down at random, on each rank that has a shard of it."""
    embedding_names = _token_embedding_names(trainer)
    for name, parameter in trainer.rank_model.parameters():
        if name in embedding_names:
            local = local_tensor(parameter)
            with torch.no_grad():
                local.copy_(perturb_copy(local, _make_generator(seed)))


def _token_embedding_names(trainer: Trainer) -> set[str]:
    """Return the names of the token embedding, normally one, gathered from the ranks that have it."""
    names: set[str] = set()
    for model in trainer.rank_model.models:
        table = getattr(model.get_input_embeddings(), "weight", None)
        names |= {trainer.rank_model.full_name(name) for name, each in model.named_parameters() if each is table}
    return {name for each in all_gather_object(names) for name in each}


def _make_generator(seed: int) -> torch.Generator:
    """Return the generator for one perturbation."""
    return torch.Generator().manual_seed(seed)


def _count_sharded(trainer: Trainer) -> tuple[int, int]:
    """Return the number of sharded parameters and of all parameters of this rank."""
    layout = trainer.rank_model.layout
    num_sharded = num_parameters = 0
    for name, parameter in trainer.rank_model.parameters():
        regions = layout.local_regions(name) if layout is not None else None
        mesh = getattr(parameter, "device_mesh", None)
        is_sharded = mesh is not None and any(
            not placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(parameter.placements)
        )
        num_sharded, num_parameters = num_sharded + int(is_sharded or regions is not None), num_parameters + 1
    return num_sharded, num_parameters
