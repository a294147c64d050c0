"""Differences between two tensors as numbers that reveal a NaN; computed in float64, in bands of elements."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn.functional import log_softmax

BAND = 1 << 16  # elements: the float64 intermediates of a band fit in the cache


def badness(value: float) -> tuple[bool, float]:
    """Return a sort key by which NaN is the worst value; plain `max` ignores NaN unless it comes first."""
    return math.isnan(value), value


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; infinite if one value is not finite and the other differs."""
    return max((_furthest(*pair) for pair in zip(_bands(a), _bands(b), strict=True)), default=0.0)


def _furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    distance = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(distance.masked_fill(same, 0.0).max())


def _bands(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a tensor into bands of elements, so that float64 copies take little memory."""
    yield from () if not tensor.numel() else tensor.reshape(-1).split(BAND)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no element is NaN or infinite."""
    return all(bool(band.isfinite().all()) for band in _bands(tensor))


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; 0 for an empty tensor."""
    return max((float(band.abs().max()) for band in _bands(tensor)), default=0.0)


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean KL divergence of the distributions over the last dim, in nats."""
    width = reference.shape[-1]
    rows = max(1, BAND // width)
    bands = zip(reference.reshape(-1, width).split(rows), other.reshape(-1, width).split(rows), strict=True)
    return float(sum(_total_divergence(*band) for band in bands) / (reference.numel() // width))


def _total_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = (log_softmax(each.double(), -1) for each in (reference, other))
    return float((p.exp() * (p - q)).sum())


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine of the angle between two flattened tensors; 1 if both are all zeros."""
    ab, aa, bb = (_product(*pair) for pair in ((a, b), (a, a), (b, b)))
    return float(ab / (aa * bb) ** 0.5) if aa and bb else float(aa == bb)


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    return sum(float(x.double() @ y.double()) for x, y in zip(_bands(a), _bands(b), strict=True))


def deviation(tensor: torch.Tensor) -> float:
    """Return the standard deviation of all elements."""
    mean = sum(float(band.double().sum()) for band in _bands(tensor)) / tensor.numel()
    return float((sum(float((band.double() - mean).square().sum()) for band in _bands(tensor)) / tensor.numel()) ** 0.5)
