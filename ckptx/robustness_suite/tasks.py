"""Tasks of ranks in a phase: each function runs on all ranks, and returns the gathered result.

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
from torch import Tensor

from ckptx.robustness_suite.kills import killing, record_operations
from ckptx.robustness_suite.runs import KillPoint, Logits, Run, RunResult, max_difference
from ckptx.robustness_suite.state_snapshot import items_of, shard_digests
from ckptx.robustness_suite.surviving_steps import SurvivingSteps, survivors
from ckptx.runtime.memory.measured_memory import MeasuredMemory, measure_step
from ckptx.runtime.model.build import read_config
from ckptx.runtime.parallel.distributed import RankContext, all_gather_object, broadcast_object, raise_on_all_ranks
from ckptx.runtime.parity.noise import perturb_copy
from ckptx.runtime.torch_private import local_tensor
from ckptx.runtime.training.checkpoints import StepDirectories
from ckptx.runtime.training.data import Dataset, collate, open_dataset
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.source import prepare_source
from ckptx.runtime.training.trainer import StepMetrics, Trainer

_PROBED = 2  # samples that logits are compared on
LABELS = "labels"


def prepared(place: RankContext, recipe: Recipe, directory: Path) -> tuple[Path, int | None]:
    """Return the initial checkpoint of a recipe, which rank 0 writes if there is none, and the number of GPUs.

    The number is None on a CPU.
    """
    found: Path | None = None
    with raise_on_all_ranks():
        if place.rank == 0:
            found = prepare_source(recipe, directory)
    source: Path = broadcast_object(found)
    return source, None if place.device.type == "cpu" else torch.cuda.device_count()


def agreed(place: RankContext, value: Any) -> Any:
    """Return the value of the parent process of rank 0 to all ranks."""
    return broadcast_object(value)


def gathered(place: RankContext, value: Any) -> list[Any]:
    """Return the values of the parent processes of all ranks."""
    return all_gather_object(value)


def called(place: RankContext, call: Callable[[], object]) -> Any:
    """Call a function on rank 0, and return its result on all ranks."""
    found: object = None
    with raise_on_all_ranks():
        if place.rank == 0:
            found = call()
    return broadcast_object(found)


def train(place: RankContext, run: Run) -> RunResult:
    """Run the trainer, from the initial checkpoint or resumed."""
    dataset = open_dataset_on_all_ranks(run.recipe, run.source)
    trainer = Trainer(run.recipe, run.source, dataset, place, layout=run.layout, callbacks=run.events)
    try:
        return _trained(place, run, trainer, dataset)
    finally:
        trainer.release()


def _trained(place: RankContext, run: Run, trainer: Trainer, dataset: Dataset) -> RunResult:
    if run.resumed is not None:
        with raise_on_all_ranks():
            trainer.resume(run.resumed)
    if run.moved is not None:
        perturb_embedding(trainer, run.moved)
    looks: dict[int, list[Any]] = {}
    losses: dict[int, float] = {}
    said: list[str] = []

    def pause() -> None:
        """Save and collect items between two steps, if the run requests it for this step."""
        if trainer.completed_steps in run.saves:
            trainer.save(run.saves[trainer.completed_steps])
        if trainer.completed_steps in run.looks:
            looks[trainer.completed_steps] = all_gather_object((items_of(trainer), shard_digests(trainer)))

    start = all_gather_object(items_of(trainer)) if run.looks else []
    pause()
    records: list[StepMetrics] = []
    taken: MeasuredMemory | None = None

    def step() -> None:
        records.append(trainer.step())

    while trainer.completed_steps < run.until:
        if run.measures and trainer.completed_steps == run.until - 1:
            taken = measure_step(step, trainer.rank_model.models, place.device)
        else:
            step()
        record = records[-1]
        losses[record.step] = record.loss
        said.append(record.line())
        if place.rank == 0 and run.lines is not None:
            with run.lines.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(record)) + "\n")
        pause()
    trainer.wait_for_save()
    sharded = all_gather_object(_sharded(trainer))
    logits = probe_logits(trainer, dataset) if run.probes else None
    return RunResult(
        losses=losses,
        said=said,
        start=start,
        items={step: [items for items, _ in found] for step, found in looks.items()},
        held={step: [held for _, held in found] for step, found in looks.items()},
        logits=logits,
        sharded=(max(parts for parts, _ in sharded), max(count for _, count in sharded)),
        wrapped_layers=max(all_gather_object(trainer.rank_model.wrapped_layers)),
        notes=list(dict.fromkeys(note for each in all_gather_object(trainer.notes) for note in each)),
        taken=_most_of(all_gather_object(taken)) if run.measures else None,
    )


def _most_of(taken: Sequence[MeasuredMemory | None]) -> tuple[int, int]:
    found = [each for each in taken if each is not None]
    return max(each.peak for each in found), max(each.between_steps for each in found)


def saved_under_watch(place: RankContext, run: Run, watch: KillPoint) -> list[list[str]]:
    """Resume for one step and save it; return the file operations of the save by rank.

    A rank is killed at the operation that `watch` names, if any.
    """
    dataset = open_dataset_on_all_ranks(run.recipe, run.source)
    trainer = Trainer(run.recipe, run.source, dataset, place, layout=run.layout, callbacks=run.events)
    try:
        assert run.resumed is not None
        trainer.resume(run.resumed)
        trainer.step()
        pids = [pid for machine, pid in all_gather_object((_machine(), os.getpid())) if machine == _machine()]
        names: list[str] = []
        with ExitStack() as stack:
            if watch.at is None:
                names = stack.enter_context(record_operations(watch.root))
            elif place.rank == watch.rank:
                others = [pid for pid in pids if pid != os.getpid()] if watch.everyone else []
                stack.enter_context(killing(watch.root, watch.at, others))
            trainer.save(StepDirectories(watch.root).path(trainer.completed_steps))
            trainer.wait_for_save()
        return all_gather_object(list(names))
    finally:
        trainer.release()


def _machine() -> tuple[str, str]:
    """Return the machine and the PID namespace in which the number of a process is unique."""
    return socket.gethostname(), os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""


def left_over(place: RankContext, root: Path, good: int, known: Mapping[int, str]) -> SurvivingSteps:
    """Check a directory of steps after a kill, on rank 0; see `survivors`."""
    found: SurvivingSteps | None = None
    with raise_on_all_ranks():
        if place.rank == 0:
            found = survivors(root, good=good, known=known)
    answer: SurvivingSteps = broadcast_object(found)
    return answer


def source_logits(place: RankContext, recipe: Recipe, path: Path, draws: int) -> tuple[Logits, float]:
    """Return the logits of stock transformers on rank 0, and their noise: the difference after perturbing the embedding
    by 1 ULP.
    """
    found: tuple[Logits, float] | None = None
    with raise_on_all_ranks():
        if place.rank == 0:
            found = _stock(recipe, path, place, draws)
    answer: tuple[Logits, float] = broadcast_object(found)
    return answer


def _stock(recipe: Recipe, path: Path, place: RankContext, draws: int) -> tuple[Logits, float]:
    _, cls, _ = read_config(path, trust_remote_code=recipe.model.trust_remote_code)
    model: Any = cls.from_pretrained(
        path,
        dtype=getattr(torch, recipe.model.dtype),
        attn_implementation=recipe.model.attn_implementation or "sdpa",
        local_files_only=True,
    )
    model = model.to(place.device).eval()
    batches = probe(recipe, open_dataset(recipe, path), place)  # on this rank alone

    def logits() -> Logits:
        with torch.no_grad():
            return [model(**each).logits.float().cpu().numpy() for each in batches]

    reference = logits()
    noise = 0.0
    table = model.get_input_embeddings().weight
    kept = table.detach().clone()
    for draw in range(draws):
        with torch.no_grad():
            table.copy_(perturb_copy(kept, _generator(draw)))
        noise = max(noise, max_difference(reference, logits()))
    return reference, noise


def runtime_logits(place: RankContext, run: Run) -> Logits | None:
    """Return the logits of the runtime on the mesh, for the source or a checkpoint."""
    dataset = open_dataset_on_all_ranks(run.recipe, run.source)
    trainer = Trainer(run.recipe, run.source, dataset, place, layout=run.layout, callbacks=run.events)
    try:
        if run.resumed is not None:
            trainer.resume(run.resumed)
        return probe_logits(trainer, dataset)
    finally:
        trainer.release()


def open_dataset_on_all_ranks(recipe: Recipe, source: Path) -> Dataset:
    """Open the data; if one rank fails, all do."""
    with raise_on_all_ranks():
        return open_dataset(recipe, source)


def probe(recipe: Recipe, dataset: Dataset, place: RankContext) -> list[dict[str, Tensor]]:
    """Return the first samples as batches of one without labels, the same on every rank."""
    dtype = getattr(torch, recipe.model.dtype)
    found = []
    for index in range(min(_PROBED, len(dataset))):
        batch = {name: value for name, value in collate([dataset[index]]).items() if name != LABELS}
        found.append(
            {
                name: value.to(place.device, dtype if value.is_floating_point() else value.dtype)
                for name, value in batch.items()
            }
        )
    return found


def probe_logits(trainer: Trainer, dataset: Dataset) -> Logits | None:
    """Return the logits of the probe, from the first rank that has them."""
    given = trainer.logits(probe(trainer.recipe, dataset, trainer.rank_context))
    own = None if given is None else [each.numpy() for each in given]
    return next((each for each in all_gather_object(own) if each is not None), None)


def perturb_embedding(trainer: Trainer, draw: int) -> None:
    """Perturb the token embedding by 1 ULP, up or down at random, on each rank that has a shard of it."""
    table = _token_table(trainer)
    for name, parameter in trainer.rank_model.parameters():
        if name in table:
            local = local_tensor(parameter)
            with torch.no_grad():
                local.copy_(perturb_copy(local, _generator(draw)))


def _token_table(trainer: Trainer) -> set[str]:
    """Return the name of the token embedding, gathered from the ranks that have it."""
    own: set[str] = set()
    for model in trainer.rank_model.models:
        table = getattr(model.get_input_embeddings(), "weight", None)
        own |= {trainer.rank_model.full_name(name) for name, each in model.named_parameters() if each is table}
    return {name for each in all_gather_object(own) for name in each}


def _generator(draw: int) -> torch.Generator:
    """Return the generator for the perturbation of one draw."""
    return torch.Generator().manual_seed(draw)


def _sharded(trainer: Trainer) -> tuple[int, int]:
    """Return the number of sharded parameters, and of all parameters."""
    layout = trainer.rank_model.layout
    parts = every = 0
    for name, parameter in trainer.rank_model.parameters():
        regions = layout.local_regions(name) if layout is not None else None
        mesh = getattr(parameter, "device_mesh", None)
        is_cut = mesh is not None and any(
            not placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(parameter.placements)
        )
        parts, every = parts + int(is_cut or regions is not None), every + 1
    return parts, every
