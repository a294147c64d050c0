"""How far two tensors are apart, in numbers that a NaN cannot hide in; computed in float64, some elements at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn.functional import log_softmax

BAND = 1 << 16  # elements: what is made of them stays in the cache


def badness(value: float) -> tuple[bool, float]:
    """What to order numbers by: one that is none is the worst; `max` takes what comes first."""
    return math.isnan(value), value


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; infinite where one is not finite and the other differs."""
    return max((_furthest(*pair) for pair in zip(_bands(a), _bands(b), strict=True)), default=0.0)


def _furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    distance = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(distance.masked_fill(same, 0.0).max())


def _bands(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its elements, some at a time: what is done with them in float64 takes little memory then."""
    yield from () if not tensor.numel() else tensor.reshape(-1).split(BAND)


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no element is NaN or infinite."""
    return all(bool(band.isfinite().all()) for band in _bands(tensor))


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; 0 of nothing."""
    return max((float(band.abs().max()) for band in _bands(tensor)), default=0.0)


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence of the distributions over the last dim, in nats."""
    width = reference.shape[-1]
    rows = max(1, BAND // width)
    bands = zip(reference.reshape(-1, width).split(rows), other.reshape(-1, width).split(rows), strict=True)
    return float(sum(_total_divergence(*band) for band in bands) / (reference.numel() // width))


def _total_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = (log_softmax(each.double(), -1) for each in (reference, other))
    return float((p.exp() * (p - q)).sum())


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the angle between all elements of the two as vectors; 1 of two that are nothing but zeros."""
    ab, aa, bb = (_product(*pair) for pair in ((a, b), (a, a), (b, b)))
    return float(ab / (aa * bb) ** 0.5) if aa and bb else float(aa == bb)


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    return sum(float(x.double() @ y.double()) for x, y in zip(_bands(a), _bands(b), strict=True))


def deviation(tensor: torch.Tensor) -> float:
    """Standard deviation of all elements."""
    mean = sum(float(band.double().sum()) for band in _bands(tensor)) / tensor.numel()
    return float((sum(float((band.double() - mean).square().sum()) for band in _bands(tensor)) / tensor.numel()) ** 0.5)
