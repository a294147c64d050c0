"""Optimizer and learning-rate schedule of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ckptx.runtime.training.recipe import OptimizerBlock, ScheduleBlock


def make_optimizer(block: OptimizerBlock, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return Adam or AdamW over the parameters that require gradients.

    It has `foreach=False`, because foreach cannot mix DTensors with plain tensors.
    """
    cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[block.name]
    trained = [each for each in parameters if each.requires_grad]
    beta1, beta2 = block.betas
    return cls(
        trained, lr=block.lr, betas=(beta1, beta2), eps=block.eps, weight_decay=block.weight_decay, foreach=False
    )


def make_scheduler(block: ScheduleBlock, optimizer: torch.optim.Optimizer, total_steps: int, lr: float) -> LambdaLR:
    """Return a schedule that depends on the step alone, so that a resumed run repeats the learning rates.

    Args:
        block: Schedule of the recipe.
        optimizer: Optimizer whose learning rate is scheduled.
        total_steps: Step at which the schedule ends, whether or not this run reaches it.
        lr: Maximum learning rate.
    """
    return LambdaLR(optimizer, lambda step: compute_lr_factor(block, step, total_steps, lr))


def compute_lr_factor(block: ScheduleBlock, step: int, total_steps: int, lr: float) -> float:
    """Return the learning rate of the step after `step` completed steps, divided by the maximum learning rate `lr`."""
    if step < block.warmup_steps:
        return (step + 1) / (block.warmup_steps + 1)
    if block.decay == "constant":
        return 1.0
    min_factor = block.min_lr / lr if lr else 0.0
    progress = min(1.0, (step - block.warmup_steps) / max(1, total_steps - block.warmup_steps))
    return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * progress)) / 2
