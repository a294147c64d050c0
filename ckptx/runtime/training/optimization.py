"""The optimizer and the learning rate of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ckptx.runtime.training.recipe import OptimizerBlock, ScheduleBlock


def make_optimizer(block: OptimizerBlock, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Adam or AdamW of torch, over what is trained; one tensor at a time, for lists cannot mix DTensors with others."""
    cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[block.name]
    trained = [each for each in parameters if each.requires_grad]
    beta1, beta2 = block.betas
    return cls(
        trained, lr=block.lr, betas=(beta1, beta2), eps=block.eps, weight_decay=block.weight_decay, foreach=False
    )


def make_scheduler(block: ScheduleBlock, optimizer: torch.optim.Optimizer, total_steps: int, lr: float) -> LambdaLR:
    """The rate as a function of the step alone: what goes on after a step has the rate of what never stopped.

    Args:
        block: Its form.
        optimizer: Whose rate.
        total_steps: Where it ends, however far this run goes.
        lr: The largest rate.
    """
    return LambdaLR(optimizer, lambda step: factor(block, step, total_steps, lr))


def factor(block: ScheduleBlock, step: int, total_steps: int, lr: float) -> float:
    """What the largest rate is multiplied by in the step after `step` steps."""
    if step < block.warmup_steps:
        return (step + 1) / (block.warmup_steps + 1)
    if block.decay == "constant":
        return 1.0
    least = block.min_lr / lr if lr else 0.0
    through = min(1.0, (step - block.warmup_steps) / max(1, total_steps - block.warmup_steps))
    return least + (1 - least) * (1 + math.cos(math.pi * through)) / 2
