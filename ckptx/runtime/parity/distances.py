"""Differences between two tensors as numbers that reveal a NaN; computed in float64, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn.functional import log_softmax

CHUNK_NUMEL = 1 << 16  # elements of a chunk, whose float64 intermediates fit in the cache of a CPU


def nan_is_worst(value: float) -> tuple[bool, float]:
    """Return a key for `max` by which NaN is the largest value; without a key, `max` keeps NaN only if it is first."""
    return math.isnan(value), value


def max_abs_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; infinite if one value is not finite and the other differs."""
    return max(
        (_max_abs_difference(*pair) for pair in zip(_split_chunks(a), _split_chunks(b), strict=True)), default=0.0
    )


def _max_abs_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    distance = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(distance.masked_fill(same, 0.0).max())


def _split_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a tensor into flat chunks, so that float64 copies take little memory; an empty tensor has none."""
    yield from () if not tensor.numel() else tensor.reshape(-1).split(CHUNK_NUMEL)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no element is NaN or infinite."""
    return all(bool(chunk.isfinite().all()) for chunk in _split_chunks(tensor))


def max_abs(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, NaN if an element is NaN; 0 for an empty tensor."""
    return max((float(chunk.abs().max()) for chunk in _split_chunks(tensor)), key=nan_is_worst, default=0.0)


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the KL divergence of two sets of logits over their last dim, in nats, as the mean over all positions."""
    width = reference.shape[-1]
    tokens_per_chunk = max(1, CHUNK_NUMEL // width)
    chunks = (each.reshape(-1, width).split(tokens_per_chunk) for each in (reference, other))
    return float(sum(map(_sum_kl_divergence, *chunks)) / (reference.numel() // width))


def _sum_kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = (log_softmax(each.double(), -1) for each in (reference, other))
    return float((p.exp() * (p - q)).sum())


def cosine_similarity(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine of the angle between two flattened tensors; 1 if both are all zeros, 0 if only one is."""
    ab, aa, bb = (_dot_product(*pair) for pair in ((a, b), (a, a), (b, b)))
    return float(ab / (aa * bb) ** 0.5) if aa and bb else float(aa == bb)


def _dot_product(a: torch.Tensor, b: torch.Tensor) -> float:
    return sum(float(x.double() @ y.double()) for x, y in zip(_split_chunks(a), _split_chunks(b), strict=True))


def standard_deviation(tensor: torch.Tensor) -> float:
    """Return the population standard deviation of all elements."""
    mean = sum(float(chunk.double().sum()) for chunk in _split_chunks(tensor)) / tensor.numel()
    squares = sum(float((chunk.double() - mean).square().sum()) for chunk in _split_chunks(tensor))
    return float((squares / tensor.numel()) ** 0.5)
