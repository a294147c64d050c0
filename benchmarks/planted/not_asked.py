"""Defects of the parallel model that the inputs or the single step of a run may not exercise.

Each function injects one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functions

from benchmarks.planted.defect import Built
from benchmarks.planted.planting import Forward, around, called_with, given, leaving, module_of


def padding_ignored(built: Built) -> None:
    """Drop the attention mask, so that padding tokens are not masked."""
    called_with(built.model, lambda named: {key: each for key, each in named.items() if key != "attention_mask"})


def positions_wrap_around(built: Built) -> None:
    """Take positions modulo 64 in the rotary embedding."""
    given(module_of(built, "rotary_emb"), position_ids=lambda ids: ids % 64)


def second_pass_otherwise(built: Built) -> None:
    """Scale the output of one projection from the second forward pass on."""
    calls = 0

    def change(found: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return found * (1.0 if calls == 1 else 1.1)

    leaving(module_of(built, "layers.3.self_attn.o_proj"), change)


def experts_of_a_capacity(built: Built) -> None:
    """Give the experts of one layer a capacity of 16 tokens; they drop the others."""
    module = module_of(built, "layers.3.mlp.experts")

    def make(stock: Forward) -> Forward:
        def replaced(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
            chosen = functions.one_hot(index.flatten())
            place = (chosen.cumsum(0) * chosen).sum(-1).reshape(index.shape)
            return stock(hidden, index, weights * (place <= 16))

        return replaced

    around(module, make)


def height_is_width(built: Built) -> None:
    """Exchange the height and the width of images."""
    called_with(built.model, lambda named: {**named, "image_grid_thw": named["image_grid_thw"][:, [0, 2, 1]]})


def norm_in_the_dtype_of_its_input(built: Built) -> None:
    """Compute the mean of the last norm in the dtype of its input instead of float32."""
    module: Any = module_of(built, "model.norm")

    def normalized(x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return module._parameters["weight"] * (x * scale)

    module.forward = normalized
