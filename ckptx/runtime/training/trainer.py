"""Train the model of a recipe step by step, and save all state so that a resumed run equals an uninterrupted one.

    Trainer(recipe, source, dataset, rank_context)   build the model and load it from `source`
    .step()                                          run one optimizer step
    .save(path)                                      save all state as one checkpoint
    .resume(path)                                    restore all state, on the same mesh or another

Random numbers of a step come only from the generators of the process, and its samples follow from one global count of
samples. Both are saved, and nothing draws random numbers between steps.
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
from ckptx.runtime.model.model_errors import translate_runtime_errors
from ckptx.runtime.parallel.distributed import RankContext, all_gather_object, data_index
from ckptx.runtime.parallel.gradients import clip_grad_norm, loss_divisor
from ckptx.runtime.parallel.randomness import RandomState, seed
from ckptx.runtime.parallel.tensor_parallel.loss import causal_lm_loss, make_loss
from ckptx.runtime.training.adapter import initialize_adapter
from ckptx.runtime.training.checkpoints import StepDirectories
from ckptx.runtime.training.data import Dataset, collate
from ckptx.runtime.training.optimizer import make_optimizer, make_scheduler
from ckptx.runtime.training.rank_model import RankModel, build_rank_model, connect_pipeline, make_mixed_inputs
from ckptx.runtime.training.recipe import LayoutBlock, Recipe
from ckptx.runtime.training.sampler import Sampler, split_over_ranks

_LABELS = "labels"
_GIB = 2**30

TrainerCallback = Callable[["Trainer"], None]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of a step, printed and written as a line of JSON.

    Attributes:
        step: Number of the step, from 1.
        epoch: Epoch of its first sample, from 0.
        loss: Mean loss over the labels of the step, of all data-parallel ranks.
        grad_norm: Norm of all gradients before clipping.
        lr: Learning rate of this step.
        mem: Peak memory of this rank so far in GiB: tensors on its GPU, or on a CPU its whole process.
        tps: Tokens per second over all ranks, without padding.
        tps_per_gpu: Tokens per second, per rank.
        num_label_tokens: Number of predicted labels of the step, over all data-parallel ranks; 1 if there are none.
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
        """Return the metrics as a line for the terminal."""
        return (
            f"step {self.step} | epoch {self.epoch} | loss {self.loss:.4f} | grad_norm {self.grad_norm:.4f} | "
            f"lr {self.lr:.2e} | mem {self.mem:.2f} GiB | tps {self.tps:.2f}({self.tps_per_gpu:.2f}/gpu) | "
            f"num_label_tokens {self.num_label_tokens}"
        )


class Trainer:
    """A training run on this rank.

    Attributes:
        recipe: Recipe of the run.
        rank_context: Rank and device of this process, and the number of ranks.
        source: Checkpoint that the run started from.
        resumed_from: Checkpoint that the run resumed from; None if it did not resume.
        dataset: Training data.
        data_rank: Index of this rank among the data-parallel ranks, from 0; TP and pipeline ranks share it.
        rank_model: Model of this rank, or its pipeline stages.
        optimizer: Optimizer of the trained parameters.
        scheduler: Learning-rate scheduler.
        sampler: Sampler of the training data.
        random_state: Random number generators of this process.
        completed_steps: Number of optimizer steps so far.
        notes: Notes for the user.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Path,
        dataset: Dataset,
        rank_context: RankContext,
        *,
        layout: LayoutBlock | None = None,
        callbacks: Mapping[str, TrainerCallback] | None = None,
    ) -> None:
        """Build the model and load it from `source`; every rank calls it.

        Args:
            recipe: Recipe of the run.
            source: Checkpoint to start from.
            dataset: Training data.
            rank_context: Rank and device of this process, and the number of ranks.
            layout: Layout to use in place of the recipe's; None for the recipe's.
            callbacks: Callbacks by event: "loaded" (at the end of this method), "resumed" (at the end of `resume`),
                "gradients" (after the backward passes of a step, before clipping), "stepped" (after the optimizer step,
                when the gradients are cleared). None for no callbacks.

        Raises:
            UnsupportedError: The class cannot run in this layout.
            InputError: The checkpoint is damaged.
        """
        self.recipe = recipe if layout is None else structs.replace(recipe, layout=layout)
        self.rank_model: RankModel = build_rank_model(self.recipe, source, rank_context)
        self.rank_model.load(source, has_adapter=recipe.adapter is None)
        if recipe.adapter is not None:
            initialize_adapter(self.rank_model.parameters(), recipe.training.seed)
        self.rank_context, self.completed_steps, self.notes = rank_context, 0, list[str]()
        self.source, self.dataset, self._callbacks = source, dataset, dict(callbacks or {})
        self.resumed_from: Path | None = None
        training, mesh = recipe.training, self.rank_model.mesh
        self.data_rank = data_index(mesh)
        self.optimizer = make_optimizer(recipe.optimizer, [each for _, each in self.rank_model.parameters()])
        total_steps = training.total_steps or training.steps
        self.scheduler = make_scheduler(recipe.schedule, self.optimizer, total_steps, recipe.optimizer.lr)
        self.sampler = Sampler(len(dataset), seed=training.seed, global_batch=training.global_batch)
        self.random_state = RandomState(rank_context.device)
        seed(training.seed, mesh)
        # Lets only some data-parallel ranks have images in a microbatch; None with a pipeline, which does this itself.
        self._mixed_inputs = make_mixed_inputs(self.rank_model)
        self._saver: Saver | None = None
        self._run_callback("loaded")

    def step(self) -> StepMetrics:
        """Run one optimizer step; every rank calls it.

        Raises:
            UnsupportedError: The code of the model fails.
            SpaceError: The GPU runs out of memory.
        """
        begin = time.perf_counter()
        connect_pipeline(self.rank_model)
        self.completed_steps += 1
        epoch = self.sampler.epoch
        batches = self.microbatches(self.sampler.next_step())
        labels = [each[_LABELS] for each in batches]
        mesh, pipeline = self.rank_model.mesh, self.rank_model.pipeline
        labels_per_data_rank = loss_divisor(labels, mesh)
        run_backward = self._backward if pipeline is None else self._backward_pipeline
        with translate_runtime_errors(self.rank_model.models[0]):
            own_loss = run_backward(batches, labels_per_data_rank)
        self._run_callback("gradients")
        max_norm = self.recipe.training.clip if self.recipe.training.clip is not None else float("inf")
        norm = (
            clip_grad_norm(self.rank_model.models, max_norm) if pipeline is None else pipeline.clip_grad_norm(max_norm)
        )
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self._run_callback("stepped")
        masks = (each.get("attention_mask", torch.ones_like(each["input_ids"])) for each in batches)
        tokens = sum(int(mask.sum()) for mask in masks)
        gathered = all_gather_object((own_loss, tokens, self._reports_metrics()))
        losses_by_rank = [loss for loss, _, is_counted in gathered if is_counted]
        seconds = time.perf_counter() - begin
        tps = sum(each for _, each, is_counted in gathered if is_counted) / seconds
        return StepMetrics(
            self.completed_steps, epoch, sum(losses_by_rank) / len(losses_by_rank), float(norm), lr,
            _read_peak_gib(self.rank_context.device),
            tps, tps / self.rank_context.world_size, round(float(labels_per_data_rank) * self._num_data_ranks()),
        )  # fmt: skip

    def microbatches(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the microbatches of this data-parallel rank on its device: model arguments and labels by name.

        A microbatch has `training.microbatch` samples in a pipeline, and `training.local_batch` without one.

        Args:
            indices: Indices of the samples of the step, of all data-parallel ranks.
        """
        training = self.recipe.training
        own_indices = split_over_ranks(indices, self.data_rank, self._num_data_ranks())
        size = training.microbatch if self.rank_model.pipeline_plan is not None else training.local_batch
        index_groups = [own_indices[begin : begin + size] for begin in range(0, len(own_indices), size)]
        microbatches = [collate([self.dataset[index] for index in each]) for each in index_groups]
        return [{name: self._to_device(value) for name, value in each.items()} for each in microbatches]

    def state(self) -> dict[str, Any]:
        """Return the state other than model and optimizer: `training_state` of `ckptx.runtime.save`."""
        return {"scheduler": self.scheduler, "sampler": self.sampler, "rng": PerRank(self.random_state)}

    def save(self, path: Path) -> None:
        """Save all state as one checkpoint, then make `latest` name it; every rank calls it.

        An asynchronous save is written while the next steps run; `wait_for_save` waits for it. An existing checkpoint
        of this step, left by a run that was killed before it updated `latest`, is replaced.

        Args:
            path: `StepDirectories(root).path(step)` of this step.
        """
        step_directories = StepDirectories(path.parent)
        step, keep = self.completed_steps, self.recipe.checkpoint.keep

        def on_published() -> None:
            step_directories.mark_latest(step)
            if keep is not None:
                step_directories.retain(keep)

        options: dict[str, Any] = {
            "layout": self.rank_model.layout, "step": step, "base": self.source, "training_state": self.state(),
            "mesh": self.rank_model.mesh, "overwrite": True, "on_published": on_published,
        }  # fmt: skip
        if self.recipe.checkpoint.asynchronous:
            self._saver = self._saver or Saver()
            self._saver.save(self.rank_model.models, self.optimizer, path, **options)
        else:
            save(self.rank_model.models, self.optimizer, path, **options)

    def wait_for_save(self) -> None:
        """Wait for a save in progress; every rank calls it.

        Raises:
            Exception: The save failed.
        """
        if self._saver is not None:
            saver, self._saver = self._saver, None
            saver.close()

    def resume(self, path: Path) -> None:
        """Restore all state from a checkpoint; every rank calls it, before the first step.

        If the checkpoint was saved with another number of data-parallel ranks or stages, its generator states cannot be
        assigned to ranks. Then generators are seeded from the seed, the step and the data-parallel rank, with a note.

        Raises:
            InputError: The checkpoint is damaged, or was saved without some of the state.
            UnsupportedError: The checkpoint is not a DCP, or does not fit the model.
            UsageError: The dataset has another length, or the recipe another seed, than in the run that saved it.
        """
        self.resumed_from = path
        self.rank_model.load(path)
        load_optimizer(self.optimizer, self.rank_model.models, path, layout=self.rank_model.layout)
        mesh = self.rank_model.mesh
        state = {"scheduler": self.scheduler, "sampler": self.sampler}
        self.completed_steps = int(load_training_state(path, state, mesh=mesh)["step"])
        try:  # last, because nothing may draw random numbers before the next step
            load_training_state(path, {"rng": PerRank(self.random_state)}, mesh=mesh)
        except UnsupportedError:
            seed(_derive_seed(self.recipe.training.seed, self.completed_steps), mesh)
            suffix = "; dropout is 0" if self.recipe.training.dropout == 0 else ""
            self.notes.append(
                "the checkpoint was saved with another number of data-parallel ranks or stages, so its RNG state is "
                f"not restored; random numbers are seeded from the seed, the step and the data-parallel rank{suffix}"
            )
        self._run_callback("resumed")

    def next_indices(self) -> list[int]:
        """Return the indices of the samples of the next step, of all data-parallel ranks, without advancing."""
        training = self.recipe.training
        copied_sampler = Sampler(len(self.dataset), seed=training.seed, global_batch=training.global_batch)
        copied_sampler.load_state_dict(self.sampler.state_dict())
        return copied_sampler.next_step()

    def next_batches(self) -> list[dict[str, Tensor]]:
        """Return the microbatches of the next step on this rank, without advancing."""
        return self.microbatches(self.next_indices())

    def logits(self, batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor] | None:
        """Return the full logits of each batch without dropout, as float32 on the CPU; every rank calls it.

        Args:
            batches: Microbatches, with or without labels.

        Returns:
            Logits (batch size, sequence length, vocabulary) of each batch; None on a pipeline rank without the last
            stage.
        """
        connect_pipeline(self.rank_model)
        models, pipeline = self.rank_model.models, self.rank_model.pipeline
        logits_list: list[Tensor] = []
        for model in models:
            model.eval()
        arguments = [{name: value for name, value in each.items() if name != _LABELS} for each in batches]

        def collect_logits(output: Any, _: int) -> Tensor:  # a loss function for `Pipeline.forward`
            logits = output.logits.full_tensor() if hasattr(output.logits, "full_tensor") else output.logits
            logits_list.append(logits.detach().float().cpu())
            return logits.float().mean()  # not used, but `Pipeline.forward` collects a loss per microbatch

        with translate_runtime_errors(models[0]):
            if pipeline is not None:
                pipeline.forward(arguments, collect_logits)
            else:
                with torch.no_grad():
                    for each in arguments:
                        collect_logits(models[0](**each), 0)
        for model in models:
            model.train()
        return logits_list or None

    def release(self) -> None:
        """Free the memory of model and optimizer, in place, even if other references to them exist."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.data = value.new_empty(0)
            state.clear()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()
        self.rank_model.release()
        self._mixed_inputs, self._callbacks = None, {}

    def _backward(self, batches: Sequence[Mapping[str, Tensor]], labels_per_data_rank: Tensor) -> float:
        """Run forward and backward of each microbatch.

        Args:
            batches: Microbatches of this data-parallel rank, with labels.
            labels_per_data_rank: Divisor of each microbatch's summed loss, from `loss_divisor`.

        Returns:
            The sum of the microbatches' losses. Its mean over data-parallel ranks is the loss of the step.
        """
        model, total = self.rank_model.models[0], 0.0
        assert self._mixed_inputs is not None
        for index, batch in enumerate(batches):
            arguments = {name: value for name, value in batch.items() if name != _LABELS}
            with self._mixed_inputs.microbatch(arguments, is_last=index == len(batches) - 1):
                loss = causal_lm_loss(
                    model(**arguments).logits, batch[_LABELS], num_items_in_batch=labels_per_data_rank
                )
                loss.backward()
            total += float(loss.detach())
        return total

    def _backward_pipeline(self, batches: Sequence[Mapping[str, Tensor]], labels_per_data_rank: Tensor) -> float:
        """Run the pipeline once for every `local_batch` samples, and accumulate the gradients of these runs.

        Arguments and result are those of `_backward`; the result is 0 on ranks without the last stage.
        """
        assert self.rank_model.pipeline is not None
        microbatches_per_run = self.recipe.training.local_batch // self.recipe.training.microbatch
        total = 0.0
        for begin in range(0, len(batches), microbatches_per_run):
            run_batches = batches[begin : begin + microbatches_per_run]
            arguments = [{name: value for name, value in each.items() if name != _LABELS} for each in run_batches]
            loss = make_loss([each[_LABELS] for each in run_batches], labels_per_data_rank)
            total += sum(map(float, self.rank_model.pipeline.step(arguments, loss)))
        return total

    def _reports_metrics(self) -> bool:
        """Return True if this rank reports for its data-parallel rank: the one with TP rank 0 and the last stage."""
        mesh, plan = self.rank_model.mesh, self.rank_model.pipeline_plan
        has_loss = plan is None or plan.stages.count - 1 in self.rank_model.stages
        return has_loss and mesh["tp"].get_local_rank() == 0

    def _num_data_ranks(self) -> int:
        return self.recipe.layout.dims.dp

    def _to_device(self, value: Tensor) -> Tensor:
        dtype = getattr(torch, self.recipe.model.dtype) if value.is_floating_point() else value.dtype
        return value.to(self.rank_context.device, dtype)

    def _run_callback(self, event: str) -> None:
        if event in self._callbacks:
            self._callbacks[event](self)


def _derive_seed(base_seed: int, step: int) -> int:
    """Return a seed of 63 bits that depends on the seed of the run and a step."""
    return int.from_bytes(blake2b(f"{base_seed} {step}".encode(), digest_size=8).digest(), "little") >> 1


def _read_peak_gib(device: torch.device) -> float:
    """Return the peak memory in GiB; see `StepMetrics.mem`."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / _GIB
    return peak_memory() / _GIB
