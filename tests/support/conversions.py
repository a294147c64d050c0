"""Conversions of every kind, with their equivalents in transformers, whose loader is the reference."""

from __future__ import annotations

from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import core_model_loading as loader

from ckptx.mapping.ops import Conversion, Op
from tests.support.transformers_version import INSTALLED

GATE, UP, ONE = "e.*.gate", "e.*.up", "x"
CONFIG = SimpleNamespace(num_attention_heads=4)

# Name -> conversion, its equivalent in transformers, and the shapes of its inputs by source.
CASES: dict[str, tuple[Conversion, list[Any], list[list[tuple[int, ...]]]]] = {
    "experts of one projection": (
        Conversion((GATE,), ("y",), (Op("merge"),)),
        [loader.MergeModulelist(0)],
        [[(4, 6)] * 3],
    ),
    "experts stacked in the middle": (
        Conversion((GATE,), ("y",), (Op("merge", 1),)),
        [loader.MergeModulelist(1)],
        [[(4, 6)] * 3],
    ),
    "gate and up of experts": (
        Conversion((GATE, UP), ("y",), (Op("merge"), Op("concat", 1))),
        [loader.MergeModulelist(0), loader.Concatenate(1)],
        [[(4, 6)] * 3, [(4, 6)] * 3],
    ),
    "convolutions of q, k and v": (
        Conversion(("q", "k", "v"), ("y",), (Op("concat"),)),
        [loader.Concatenate(0)],
        [[(4, 3, 2)], [(4, 3, 2)], [(4, 3, 2)]],
    ),
    "columns side by side": (
        Conversion(("q", "k"), ("y",), (Op("concat", 1),)),
        [loader.Concatenate(1)],
        [[(4, 6)], [(4, 6)]],
    ),
    "fused qkv": (
        Conversion((ONE,), ("q", "k", "v"), (Op("chunk"),)),
        [loader.Chunk(0)],
        [[(12, 5)]],
    ),
    "fused biases": (
        Conversion((ONE,), ("q", "k", "v"), (Op("chunk"),)),
        [loader.Chunk(0)],
        [[(12,)]],
    ),
    "uneven halves of columns": (
        Conversion((ONE,), ("q", "k"), (Op("chunk", 1),)),
        [loader.Chunk(1)],
        [[(4, 7)]],
    ),
    "a transposed matrix": (
        Conversion((ONE,), ("y",), (Op("transpose", 0, 1),)),
        [loader.Transpose(0, 1)],
        [[(4, 6)]],
    ),
    "transposed experts": (
        Conversion((ONE,), ("y",), (Op("transpose", 1, 2),)),
        [loader.Transpose(1, 2)],
        [[(3, 4, 6)]],
    ),
    "interleaved rows": (
        Conversion((ONE,), ("y",), (Op("interleave"),)),
        [loader.Interleave(0)],
        [[(8, 5)]],
    ),
    "interleaved rows of experts": (
        Conversion((ONE,), ("y",), (Op("interleave", 1),)),
        [loader.Interleave(1)],
        [[(3, 8, 5)]],
    ),
    "interleaved gate and up": (
        Conversion((ONE,), ("gate", "up"), (Op("interleave"), Op("chunk"))),
        [loader.Interleave(0), loader.Chunk(0)],
        [[(8, 5)]],
    ),
    "rotary rows": (
        Conversion((ONE,), ("y",), (Op("permute_rope", args=(4, 0)),)),
        [loader.PermuteForRope()],
        [[(24, 5)]],
    ),
    "rotary biases": (
        Conversion((ONE,), ("y",), (Op("permute_rope", args=(4, 0)),)),
        [loader.PermuteForRope()],
        [[(24,)]],
    ),
    "rotary rows of a fused qkv": (
        Conversion((ONE,), ("q_proj", "k_proj", "v_proj"), (Op("chunk"), Op("permute_rope", args=(4, 0, 0, 1)))),
        [loader.Chunk(0), loader.PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
        [[(48, 5)]],
    ),
}  # fmt: skip


def run_by_loader(
    conversion: Conversion, ops: list[Any], columns: list[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Convert the tensors with transformers; return them by target name."""
    held: dict[str, Any] = {pattern: list(column) for pattern, column in zip(conversion.sources, columns, strict=True)}
    sources, targets = list(conversion.sources), list(conversion.targets)
    for op in ops:
        is_whole = isinstance(op, loader.PermuteForRope) and op.permute_layer_names is None
        if is_whole and not hasattr(op, "get_target_pattern"):
            pytest.skip(f"transformers {INSTALLED} permutes only parts of a fused tensor")
        held = op.convert(held, source_patterns=sources, target_patterns=targets, config=CONFIG)
    return [[held[name] for name in held if fnmatch(name, target)] for target in targets]
