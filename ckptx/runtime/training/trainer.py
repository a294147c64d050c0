"""Trains the model of a recipe, step by step, and saves all that is needed to go on as if it had never stopped.

    Trainer(recipe, source, dataset, place)   built and loaded with what `source` holds
    .step()                                   one step of the optimizer
    .state(), save.save(...)                  everything in one publish
    .resume(checkpoint)                       and back, on the same mesh or another

What is drawn at random in a step comes from the generators of the process alone, and which samples it sees from one
global count; both are saved, and nothing else draws in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from ckptx.errors import UnsupportedError
from ckptx.processes.peak_memory import peak_memory
from ckptx.runtime.checkpointing.async_save import Saver
from ckptx.runtime.checkpointing.save import load_optimizer, save
from ckptx.runtime.checkpointing.training_state import PerRank, load_training_state
from ckptx.runtime.model.model_errors import running
from ckptx.runtime.parallel.distributed import RankContext, all_gather_object, data_index
from ckptx.runtime.parallel.gradients import clip_grad_norm, labels_per_rank
from ckptx.runtime.parallel.randomness import RandomState, seed
from ckptx.runtime.parallel.tensor_parallel.loss import causal_lm_loss, token_losses
from ckptx.runtime.training.assembly import AssembledModel, assemble, connect, mixed_inputs
from ckptx.runtime.training.checkpoints import StepDirectories
from ckptx.runtime.training.data import Dataset, collate
from ckptx.runtime.training.optimization import make_optimizer, make_scheduler
from ckptx.runtime.training.recipe import LayoutBlock, Recipe
from ckptx.runtime.training.sampler import Sampler, part

_LABELS = "labels"
_GIB = 2**30

Event = Callable[["Trainer"], None]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step prints, and writes as a line of JSON.

    Attributes:
        step: Its number, from 1.
        epoch: Of its first sample, from 0.
        loss: Mean over the labels of the step, on all ranks.
        grad_norm: Of all gradients, before clipping.
        lr: The rate of this step.
        mem: Most bytes that this rank took, in GiB; of its device, or of the process on a CPU.
        tps: Tokens a second, of all ranks; padding does not count.
        tps_per_gpu: Of each.
        num_label_tokens: Labels of the step, on all ranks.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    mem: float
    tps: float
    tps_per_gpu: float
    num_label_tokens: int

    def line(self) -> str:
        """For a person."""
        return (
            f"step {self.step} | epoch {self.epoch} | loss {self.loss:.4f} | grad_norm {self.grad_norm:.4f} | "
            f"lr {self.lr:.2e} | mem {self.mem:.2f} GiB | tps {self.tps:.2f}({self.tps_per_gpu:.2f}/gpu) | "
            f"num_label_tokens {self.num_label_tokens}"
        )


class Trainer:
    """A run on this rank.

    Attributes:
        recipe: What is trained.
        source: The checkpoint it began with.
        resumed_from: The checkpoint it went on from, or None.
        dataset: What it is trained on.
        data_rank: Which of the ranks that see other data this one is.
        assembled: The model, or the stages of it that are here.
        optimizer: Of what is trained.
        scheduler: Of its rate.
        sampler: Which samples come next.
        random: The generators of this process.
        done: Steps of the optimizer so far.
        notes: What the user should know.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Path,
        dataset: Dataset,
        place: RankContext,
        *,
        layout: LayoutBlock | None = None,
        events: Mapping[str, Event] | None = None,
    ) -> None:
        """Builds the model and loads what `source` holds; every rank calls it.

        Args:
            recipe: What is trained.
            source: The checkpoint it begins with.
            dataset: What it is trained on.
            place: This rank, in its process group.
            layout: The mesh, in place of the recipe's.
            events: Called at moments of the run, by name: "loaded", "resumed", "gradients" (before the optimizer's
                step), "stepped".

        Raises:
            UnsupportedError: The class cannot run like that.
            InputError: The checkpoint is damaged.
        """
        self.recipe = recipe if layout is None else structs.replace(recipe, layout=layout)
        self.assembled: AssembledModel = assemble(self.recipe, source, place)
        self.assembled.load(source)
        self.place, self.done, self.notes = place, 0, list[str]()
        self.source, self.dataset, self._events = source, dataset, dict(events or {})
        self.resumed_from: Path | None = None
        training, mesh = recipe.training, self.assembled.mesh
        self.data_rank = data_index(mesh)
        self.optimizer = make_optimizer(recipe.optimizer, [each for _, each in self.assembled.parameters()])
        total = training.total_steps or training.steps
        self.scheduler = make_scheduler(recipe.schedule, self.optimizer, total, recipe.optimizer.lr)
        self.sampler = Sampler(len(dataset), seed=training.seed, global_batch=training.global_batch)
        self.random = RandomState(place.device)
        seed(training.seed, mesh)
        self._mixed = mixed_inputs(self.assembled)
        self._saver: Saver | None = None
        self._at("loaded")

    def step(self) -> StepRecord:
        """One step of the optimizer; every rank calls it.

        Raises:
            UnsupportedError: The code of the model fails.
            SpaceError: The memory of a GPU is not enough.
        """
        begin = time.perf_counter()
        connect(self.assembled)
        self.done += 1
        epoch = self.sampler.epoch
        batches = self.microbatches(self.sampler.next_step())
        labels = [each[_LABELS] for each in batches]
        mesh, pipeline = self.assembled.mesh, self.assembled.pipeline
        items = labels_per_rank(labels, mesh)
        with running(self.assembled.models[0]):
            losses = self._backward(batches, items) if pipeline is None else self._schedules(batches, items)
        self._at("gradients")
        most = self.recipe.training.clip if self.recipe.training.clip is not None else float("inf")
        norm = clip_grad_norm(self.assembled.models, most) if pipeline is None else pipeline.clip_grad_norm(most)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self._at("stepped")
        tokens = sum(int(each.get("attention_mask", each["input_ids"] >= 0).sum()) for each in batches)
        found = all_gather_object((losses, tokens, self._is_counted()))
        told = [loss for loss, _, is_counted in found if is_counted]
        seconds = time.perf_counter() - begin
        tps = sum(each for _, each, is_counted in found if is_counted) / seconds
        return StepRecord(
            self.done, epoch, sum(told) / len(told), float(norm), rate, _memory(self.place.device), tps,
            tps / self.place.world_size, round(float(items) * self._data_ranks()),
        )  # fmt: skip

    def microbatches(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """What this data rank sees of the samples of a step: arguments of the model, and labels."""
        training = self.recipe.training
        own = part(indices, self.data_rank, self._data_ranks())
        size = training.microbatch if self.assembled.pipeline_plan is not None else training.local_batch
        portions = [own[begin : begin + size] for begin in range(0, len(own), size)]
        made = [collate([self.dataset[index] for index in each]) for each in portions]
        return [{name: self._placed(value) for name, value in each.items()} for each in made]

    def state(self) -> dict[str, Any]:
        """What is saved besides model and optimizer, for `save(training_state=...)`."""
        return {"scheduler": self.scheduler, "sampler": self.sampler, "rng": PerRank(self.random)}

    def save(self, path: Path) -> None:
        """Publishes everything as one checkpoint, and moves `latest` to it then; every rank calls it.

        An asynchronous one is written while the next steps run; `settle` waits for it. A step that is there already,
        as a run that was killed before it moved `latest` leaves one, is replaced at once.

        Args:
            path: `StepDirectories(root).path(step)` of this step.
        """
        steps, step, keep = StepDirectories(path.parent), self.done, self.recipe.checkpoint.keep

        def then() -> None:
            steps.mark_latest(step)
            if keep is not None:
                steps.retain(keep)

        given: dict[str, Any] = {
            "layout": self.assembled.layout, "step": step, "beside": self.source, "training_state": self.state(),
            "mesh": self.assembled.mesh, "overwrite": True, "then": then,
        }  # fmt: skip
        if self.recipe.checkpoint.asynchronous:
            self._saver = self._saver or Saver()
            self._saver.save(self.assembled.models, self.optimizer, path, **given)
        else:
            save(self.assembled.models, self.optimizer, path, **given)

    def wait_for_save(self) -> None:
        """Waits for what is being saved; every rank calls it.

        Raises:
            Exception: What went wrong with it.
        """
        if self._saver is not None:
            saver, self._saver = self._saver, None
            saver.close()

    def resume(self, path: Path) -> None:
        """Becomes what was saved; every rank calls it, before the first step.

        With another number of data ranks or stages nobody can say whose random numbers were whose: they follow from
        the seed, the step and the data rank then, and a note says so.
        """
        self.resumed_from = path
        self.assembled.load(path)
        load_optimizer(self.optimizer, self.assembled.models, path, layout=self.assembled.layout)
        mesh = self.assembled.mesh
        state = {"scheduler": self.scheduler, "sampler": self.sampler}
        self.done = int(load_training_state(path, state, mesh=mesh)["step"])
        try:  # last, for nothing may draw from them before the next step
            load_training_state(path, {"rng": PerRank(self.random)}, mesh=mesh)
        except UnsupportedError:
            seed(_derived(self.recipe.training.seed, self.done), mesh)
            self.notes.append(
                f"{path.name}: was saved on another number of data ranks or stages; random numbers follow from the "
                "seed, the step and the data rank"
            )
        self._at("resumed")

    def next_indices(self) -> list[int]:
        """The samples of the next step, on all data ranks; nothing moves on."""
        training = self.recipe.training
        ahead = Sampler(len(self.dataset), seed=training.seed, global_batch=training.global_batch)
        ahead.load_state_dict(self.sampler.state_dict())
        return ahead.next_step()

    def next_batches(self) -> list[dict[str, Tensor]]:
        """What the next step will see on this rank; nothing moves on."""
        return self.microbatches(self.next_indices())

    def logits(self, batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor] | None:
        """What the model gives without dropout, whole, in float32 on the CPU; None on ranks that have no head."""
        connect(self.assembled)
        models, pipeline = self.assembled.models, self.assembled.pipeline
        found: list[Tensor] = []
        for model in models:
            model.eval()
        given = [{name: value for name, value in each.items() if name != _LABELS} for each in batches]

        def take(output: Any, _: int) -> Tensor:
            logits = output.logits.full_tensor() if hasattr(output.logits, "full_tensor") else output.logits
            found.append(logits.detach().float().cpu())
            return logits.float().mean()

        with running(models[0]):
            if pipeline is not None:
                pipeline.forward(given, take)
            else:
                with torch.no_grad():
                    for each in given:
                        take(models[0](**each), 0)
        for model in models:
            model.train()
        return found or None

    def release(self) -> None:
        """Gives back what model and optimizer take, in place: whoever still has one of them holds nothing."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.data = value.new_empty(0)
            state.clear()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()
        self.assembled.release()
        self._mixed, self._events = None, {}

    def _backward(self, batches: Sequence[Mapping[str, Tensor]], items: Tensor) -> float:
        """Forward and backward of each microbatch; the loss of this data rank's part of the step."""
        model, total = self.assembled.models[0], 0.0
        assert self._mixed is not None
        for index, batch in enumerate(batches):
            given = {name: value for name, value in batch.items() if name != _LABELS}
            with self._mixed.microbatch(given, is_last=index == len(batches) - 1):
                loss = causal_lm_loss(model(**given).logits, batch[_LABELS], num_items_in_batch=items)
                loss.backward()
            total += float(loss.detach())
        return total

    def _schedules(self, batches: Sequence[Mapping[str, Tensor]], items: Tensor) -> float:
        """The same through the stages: as many microbatches at a time as the recipe puts into one schedule."""
        assert self.assembled.pipeline is not None
        count = self.recipe.training.local_batch // self.recipe.training.microbatch
        total = 0.0
        for begin in range(0, len(batches), count):
            part = batches[begin : begin + count]
            given = [{name: value for name, value in each.items() if name != _LABELS} for each in part]
            losses = self.assembled.pipeline.step(given, token_losses([each[_LABELS] for each in part], items))
            total += sum(map(float, losses))
        return total

    def _is_counted(self) -> bool:
        """Whether this rank speaks for its data rank: the first that has the loss."""
        mesh, cut = self.assembled.mesh, self.assembled.pipeline_plan
        has_loss = cut is None or cut.stages.pp - 1 in self.assembled.stages
        return has_loss and mesh["tp"].get_local_rank() == 0

    def _data_ranks(self) -> int:
        return self.recipe.layout.dims.dp

    def _placed(self, value: Tensor) -> Tensor:
        dtype = getattr(torch, self.recipe.model.dtype) if value.is_floating_point() else value.dtype
        return value.to(self.place.device, dtype)

    def _at(self, event: str) -> None:
        if event in self._events:
            self._events[event](self)


def _derived(number: int, step: int) -> int:
    return int.from_bytes(blake2b(f"{number} {step}".encode(), digest_size=8).digest(), "little") >> 1


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / _GIB
    return peak_memory() / _GIB
