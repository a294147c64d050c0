"""How much a model's own rounding moves what it computes: the yardstick for differences that come from reordered sums.

Every embedding is moved by one unit in the last place, up or down at random. What that does to logits, loss and
gradients is what any computation with these weights must be allowed to differ by; no one has to pick a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

DRAWS = 3
ALLOWED = 8  # times the noise

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def moved_embeddings(model: nn.Module, seed: int) -> Iterator[None]:
    """Moves every `nn.Embedding` by one unit in the last place; afterwards they are what they were, bit for bit."""
    weights = {id(each.weight): each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    kept = [(weight, weight.detach().clone()) for weight in weights.values()]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight, before in kept:
            weight.copy_(moved(before, generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(before)


def rounding(dtype: torch.dtype, size: float) -> float:
    """What the last place of numbers of `size` may come to: the least that anything summed from them may differ by."""
    return float(ALLOWED * torch.finfo(dtype).eps * size)


def moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`tensor` with each finite element that is not zero replaced by the next one, away from zero or towards it."""
    bits = tensor.contiguous().view(_BITS[tensor.element_size()])
    step = torch.randint(0, 2, tensor.shape, generator=generator).to(bits) * 2 - 1
    usual = tensor.isfinite() & (tensor.abs() >= torch.finfo(tensor.dtype).tiny) & (tensor.abs() < _largest(tensor))
    return torch.where(usual.to(bits.device), bits + step.to(bits.device), bits).view(tensor.dtype)


def _largest(tensor: torch.Tensor) -> float:
    return float(torch.finfo(tensor.dtype).max)
