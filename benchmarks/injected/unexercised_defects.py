"""Defects of the parallel model that the inputs or the single step of a run may not exercise.

Each function injects one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functions

from benchmarks.injected.defect import InjectionTarget
from benchmarks.injected.inject import (
    Forward,
    change_arguments,
    change_kwargs,
    change_output,
    find_module,
    wrap_forward,
)


def drop_attention_mask(target: InjectionTarget) -> None:
    """Drop the attention mask, so that padding tokens are not masked."""
    change_kwargs(target.model, lambda kwargs: {key: each for key, each in kwargs.items() if key != "attention_mask"})


def wrap_positions(target: InjectionTarget) -> None:
    """Take positions modulo 64 in the rotary embedding."""
    change_arguments(find_module(target, "rotary_emb"), position_ids=lambda ids: ids % 64)


def scale_later_passes(target: InjectionTarget) -> None:
    """Scale the output of one projection from the second forward pass on."""
    calls = 0

    def change(found: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return found * (1.0 if calls == 1 else 1.1)

    change_output(find_module(target, "layers.3.self_attn.o_proj"), change)


def limit_expert_capacity(target: InjectionTarget) -> None:
    """Give the experts of one layer a capacity of 16 tokens; they drop the others."""
    module = find_module(target, "layers.3.mlp.experts")

    def make(stock: Forward) -> Forward:
        def replaced(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
            choices = functions.one_hot(index.flatten())
            position = (choices.cumsum(0) * choices).sum(-1).reshape(index.shape)
            return stock(hidden, index, weights * (position <= 16))

        return replaced

    wrap_forward(module, make)


def exchange_image_height_and_width(target: InjectionTarget) -> None:
    """Exchange the height and the width of images."""
    change_kwargs(target.model, lambda kwargs: {**kwargs, "image_grid_thw": kwargs["image_grid_thw"][:, [0, 2, 1]]})


def compute_norm_in_input_dtype(target: InjectionTarget) -> None:
    """Compute the mean of the last norm in the dtype of its input instead of float32."""
    module: Any = find_module(target, "model.norm")

    def normalized(x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return module._parameters["weight"] * (x * scale)

    module.forward = normalized
