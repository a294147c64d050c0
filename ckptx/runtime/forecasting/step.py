"""Run one step as `ckptx.runtime.training.trainer.Trainer` does, on synthetic sequences and with any loss.

A forecast runs it without storage, and tests of forecasts with real tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptx.options.forecast import Loss
from ckptx.runtime.forecasting.task import ForecastTask
from ckptx.runtime.memory.storage_ledger import ACTIVATIONS, GRADIENTS, StorageLedger
from ckptx.runtime.model.model_errors import translate_runtime_errors
from ckptx.runtime.parallel.gradients import clip_grad_norm, loss_divisor
from ckptx.runtime.parallel.mixed_inputs import MixedInputs
from ckptx.runtime.parallel.tensor_parallel.loss import causal_lm_loss
from ckptx.runtime.parity.execution import full_tensor, logits_or_hidden_states
from ckptx.runtime.parity.inputs.batch import Inputs, make_inputs
from ckptx.runtime.training.optimizer import make_optimizer
from ckptx.runtime.training.rank_model import RankModel


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A training step on one rank.

    Attributes:
        rank_model: Model, or its connected pipeline stages, with storage.
        task: Task of the step.
        inputs: Inputs of one microbatch; all microbatches have equal inputs.
        optimizer: Optimizer, or None if the task has none.
    """

    rank_model: RankModel
    task: ForecastTask
    inputs: Inputs
    optimizer: torch.optim.Optimizer | None

    def run(self, ledger: StorageLedger) -> None:
        """Run forward and backward for every microbatch, gradient clipping, and the optimizer.

        Args:
            ledger: Ledger in which tensors and phases are labeled; one without recorded operations has no effect.

        Raises:
            UnsupportedError: The code of the model fails.
        """
        rank_model, max_norm = self.rank_model, self.task.recipe.training.clip
        with translate_runtime_errors(rank_model.models[0]):
            self._run_passes(ledger)
        ledger.label((each.grad for _, each in rank_model.parameters() if each.grad is not None), GRADIENTS)
        if max_norm is not None:
            with ledger.phase("clipping"):
                if rank_model.pipeline is not None:
                    rank_model.pipeline.clip_grad_norm(max_norm)
                else:
                    clip_grad_norm(rank_model.models, max_norm)
        with ledger.phase("optimizer"):
            if self.optimizer is not None:
                self.optimizer.step()
            for model in rank_model.models:
                model.zero_grad()

    def _run_passes(self, ledger: StorageLedger) -> None:
        rank_model = self.rank_model
        with ledger.label_all(ACTIVATIONS):
            batches = make_step_batches(self.task, self.inputs)
            labels = [self.inputs.labels.clone() for _ in batches]
        num_items = loss_divisor(labels, rank_model.mesh)

        def loss(output: Any, index: int) -> Tensor:
            with ledger.loss():
                return _compute_step_loss(
                    logits_or_hidden_states(rank_model.models[-1], output), labels[index], num_items, self.task.loss
                )

        if rank_model.pipeline is not None and rank_model.pipeline_plan is not None:
            count = rank_model.pipeline_plan.microbatches
            for begin in range(0, len(batches), count):
                rank_model.pipeline.step(batches[begin : begin + count], loss)
            return
        model = rank_model.models[0]
        mixed_inputs = MixedInputs(model)
        for index, batch in enumerate(batches):
            with mixed_inputs.microbatch(batch, is_last=index == len(batches) - 1):
                loss(model(**batch), index).backward()


def make_step_inputs(task: ForecastTask, config: Mapping[str, Any]) -> Inputs:
    """Return the inputs of one microbatch, for a model with this config."""
    return make_inputs(config, batch_size=task.microbatch, min_tokens=task.seq, inserts_per_sequence=task.images)


def make_step_batches(task: ForecastTask, inputs: Inputs) -> list[dict[str, Tensor]]:
    """Return the arguments of the model for each microbatch of a step, each with storage of its own."""
    dtype = getattr(torch, task.recipe.model.dtype)
    batch = dict(inputs.batch)
    if task.is_padded and "input_ids" in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, -1] = 0  # one token of padding, because a mask without padding may be ignored
    return [
        {name: each.to(dtype if each.is_floating_point() else each.dtype, copy=True) for name, each in given.items()}
        for given in [batch] * task.microbatches
    ]


def make_step_optimizer(task: ForecastTask, parameters: Sequence[Tensor]) -> torch.optim.Optimizer | None:
    """Return the optimizer of a task over the parameters that require gradients; None if the task has none."""
    block = task.recipe.optimizer
    trained = [each for each in parameters if each.requires_grad]
    if task.optimizer == "none":
        return None
    if task.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=block.lr, foreach=False)
    return make_optimizer(structs.replace(block, name=task.optimizer), trained)


def _compute_step_loss(logits: Tensor, labels: Tensor, num_items: Tensor, kind: Loss) -> Tensor:
    """Return the loss of a microbatch.

    Args:
        logits: Logits of the last stage, or hidden states of a class without an output head.
        labels: Labels, (batch size, sequence length).
        num_items: Divisor from `loss_divisor`.
        kind: See `ForecastTask.loss`.
    """
    if kind == "none":
        return (logits.to_local() if isinstance(logits, DTensor) else logits).sum()
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:  # hidden states of a class without a head
        return full_tensor(logits).float().pow(2).mean()
    if kind == "full":
        logits = full_tensor(logits).float()
    return causal_lm_loss(logits, labels, num_items_in_batch=num_items)
