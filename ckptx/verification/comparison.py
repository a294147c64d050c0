"""Holds what each rank computed against what the reference computed, and names what is further away than it may be.

How far something may be away is measured, see `ckptx.verification.noise`. Where that is more than the thing itself is
large, nothing could have been found: then it is named as undecided, and never as equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import log_softmax

from ckptx.catalog.region import Region
from ckptx.runtime.distributed import Process, broadcast, everywhere, told
from ckptx.runtime.shards import pieces_of
from ckptx.verification import noise
from ckptx.verification.execution import Outcome

_BAND = 1 << 22  # elements


class Reference(NamedTuple):
    """What the reference computed, and how much its own rounding moves that.

    Attributes:
        outcome: Of the unmoved model.
        logits: Largest difference of logits over all draws.
        loss: Of losses.
        gradients: Of each gradient.
        is_repeatable: Whether the device gives the same, bit for bit, when it is asked again.
    """

    outcome: Outcome
    logits: float
    loss: float
    gradients: dict[str, float]
    is_repeatable: bool = True


class Held(NamedTuple):
    """A parameter of this rank.

    Attributes:
        name: In the whole model; copies of a tied one on several stages have one name.
        parameter: What this rank has of it.
        regions: What TP left of it, where its DTensor does not say it.
    """

    name: str
    parameter: nn.Parameter
    regions: Sequence[Region] | None

    def distance(self, whole: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The local part of its gradient, and how far that is from a whole one."""
        assert self.parameter.grad is not None
        local = _local(self.parameter.grad)
        pieces = pieces_of(self.name, self.parameter, self.regions)
        return local, max((furthest(_at(whole, each.region), _at(local, each.local)) for each in pieces), default=0.0)


@dataclass(slots=True)
class Comparison:
    """What this rank finds; the first rank has the reference and tells it to the others.

    Attributes:
        place: Of this rank.
        stored: Names on disk by name in the model.
        is_exact: Whether the same operations ran in the same order on both sides.
        rows: Differences beyond the limit.
        undecided: What is not further away than its limit, where the limit could not have refused anything.
        numbers: For the report.
        gradients: How far each gradient is away and may be, by name in the model.
    """

    process: Process
    stored: dict[str, tuple[str, ...]]
    is_exact: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    undecided: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict)

    def forward(self, expected: Reference | None, found: Outcome, index: int) -> None:
        """Logits of this rank's batches, which begin at `index` of all, and the loss of all.

        A rank without the last stage of a pipeline has none.
        """
        known = None
        if expected is not None:
            shapes = [(tuple(each.shape), each.dtype) for each in expected.outcome.logits]
            known = expected.outcome.loss, expected.logits, expected.loss, shapes
        loss, noise_of_logits, noise_of_loss, shapes = told(known)
        whole = [
            broadcast(None if expected is None else expected.outcome.logits[i], shape, dtype, self.process)
            for i, (shape, dtype) in enumerate(shapes)
        ]
        losses = [each for each, is_last in everywhere((found.loss, bool(found.logits))) if is_last]
        ours_loss = sum(losses) / len(losses)
        limit = 0.0 if self.is_exact else noise.ALLOWED * noise_of_logits
        # A mean can come out the same three times by chance; it is no more exact than its last place for that.
        rounding = noise.rounding(torch.float32, abs(loss))
        limit_of_loss = 0.0 if self.is_exact else max(noise.ALLOWED * noise_of_loss, rounding)
        self.numbers |= {
            "max_abs": 0.0,
            "max_abs_limit": limit,
            "logits_deviation": _deviation(whole[index]),
            "kl": 0.0,
            "cosine": 1.0,
            "loss": ours_loss,
            "loss_reference": loss,
            "loss_limit": limit_of_loss,
        }
        for ours, theirs in zip(found.logits, whole[index:], strict=False):
            self._compare_logits(ours, theirs, limit)
        if not abs(ours_loss - loss) <= limit_of_loss and not self.rows:
            self._add("forward", "loss", max_abs=abs(ours_loss - loss), limit=limit_of_loss)

    def _compare_logits(self, ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
        distance, deviation = furthest(theirs, ours), _deviation(theirs)
        worst = self.numbers
        worst["max_abs"] = max(worst["max_abs"], distance)
        worst["kl"] = max(worst["kl"], _divergence(theirs, ours), key=badness)
        worst["cosine"] = max(worst["cosine"], _cosine(theirs, ours), key=lambda found: badness(-found))
        for side, logits in (("reference", theirs), ("checkpoint", ours)):
            bad = int((~torch.isfinite(logits)).sum())
            if bad:
                self._add("forward", "logits", max_abs=float("nan"), limit=limit, what=f"{bad} not finite, {side}")
        if not distance <= limit and not self.rows:
            self._add("forward", "logits", max_abs=distance, limit=limit)
        elif not limit <= deviation and not self.rows:
            self._doubt("forward", "logits", limit=limit, size=deviation)

    def backward(self, expected: Reference | None, held: Iterable[Held], copied: Collection[str] = ()) -> None:
        """The part of every gradient that this rank holds.

        Args:
            expected: On the first rank.
            held: The parameters of this rank.
            copied: Names of those that several stages have: their gradients are summed in another order.
        """
        known = None
        if expected is not None:
            sizes = {name: _largest(each) for name, each in expected.outcome.gradients.items()}
            beside = _largest_beside(sizes)
            known = {
                name: (tuple(each.shape), each.dtype, expected.gradients[name], sizes[name], beside[name])
                for name, each in expected.outcome.gradients.items()
            }
        rows: dict[str, tuple[tuple[int, ...], torch.dtype, float, float, float]] = told(known)
        ours: dict[str, list[Held]] = {}
        for each in held:
            ours.setdefault(each.name, []).append(each)
        anywhere = frozenset().union(*everywhere(set(ours)))
        largest, worst = 0.0, ("", 0.0)
        for name, (shape, dtype, moved, size, beside_it) in rows.items():
            theirs = broadcast(
                None if expected is None else expected.outcome.gradients[name], shape, dtype, self.process
            )
            is_exact = self.is_exact and name not in copied
            limit = 0.0 if is_exact else max(noise.ALLOWED * moved, noise.rounding(dtype, size))
            here = ours.get(name, ())
            if name not in anywhere or any(each.parameter.grad is None for each in here):
                self._add("gradients", name, max_abs=size, limit=limit, what="no gradient")
                ours.pop(name, None)
                continue
            for each in ours.pop(name, ()):  # none for a parameter of another stage
                local, distance = each.distance(theirs)
                largest = max(largest, distance)
                if distance >= self.gradients.get(name, (0.0, 0.0))[0]:
                    self.gradients[name] = distance, limit
                if bad := [
                    side for side, part in (("reference", theirs), ("checkpoint", local)) if not _is_finite(part)
                ]:
                    self._add(
                        "gradients", name, max_abs=float("inf"), limit=limit, what=f"not finite, {' and '.join(bad)}"
                    )
                elif not is_exact and max(size, _largest(local)) <= noise.rounding(dtype, beside_it):
                    continue  # zero but for rounding, as those of key biases are, which softmax does not see
                elif not distance <= limit:
                    self._add("gradients", name, max_abs=distance, limit=limit)
                elif limit > size:
                    self._doubt("gradients", name, limit=limit, size=size)
                if limit and distance / limit > worst[1]:
                    worst = name, distance / limit
        for name, found in ours.items():
            for each in found:
                gradient = each.parameter.grad
                if gradient is not None and bool(_local(gradient).any()):
                    self._add("gradients", name, max_abs=_largest(_local(gradient)), limit=0.0,
                              what="the reference has no gradient")  # fmt: skip
        self.numbers |= {"gradients": len(rows), "grad_max_abs": largest, "grad_of_limit": list(worst)}

    def _add(self, level: str, name: str, **values: Any) -> None:
        self.rows.append({**difference(level, self.process.rank, name, self.stored), **values})

    def _doubt(self, level: str, name: str, **values: Any) -> None:
        self.undecided.append({**difference(level, self.process.rank, name, self.stored), **values})


def difference(level: str, rank: int, name: str, stored: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """A difference: by its name on disk, and by that in the model where it is another."""
    on_disk = stored.get(name, (name,))
    row: dict[str, Any] = {"level": level, "rank": rank, "name": on_disk[0]}
    if len(on_disk) > 1:
        row["names"] = len(on_disk)
    if on_disk[0] != name:
        row["model_name"] = name
    return row


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
    yield from () if not tensor.numel() else tensor.reshape(-1).split(_BAND)


def _largest_beside(sizes: dict[str, float]) -> dict[str, float]:
    """The largest number among the gradients of a module and of those beside it, as of all that an attention has."""
    scopes = {name: ".".join(name.split(".")[:-2]) for name in sizes}
    found: dict[str, float] = {}
    for name, scope in scopes.items():
        found[scope] = max(sizes[name], found.get(scope, 0.0))
    return {name: found[scope] for name, scope in scopes.items()}


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(bool(band.isfinite().all()) for band in _bands(tensor))


def _largest(tensor: torch.Tensor) -> float:
    return max((float(band.abs().max()) for band in _bands(tensor)), default=0.0)


def _at(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence of the distributions over the last dim, in nats."""
    width = reference.shape[-1]
    rows = max(1, _BAND // width)
    bands = zip(reference.reshape(-1, width).split(rows), other.reshape(-1, width).split(rows), strict=True)
    return float(sum(_total_divergence(*band) for band in bands) / (reference.numel() // width))


def _total_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = (log_softmax(each.double(), -1) for each in (reference, other))
    return float((p.exp() * (p - q)).sum())


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    ab, aa, bb = (_product(*pair) for pair in ((a, b), (a, a), (b, b)))
    return float(ab / (aa * bb) ** 0.5) if aa and bb else float(aa == bb)


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    return sum(float(x.double() @ y.double()) for x, y in zip(_bands(a), _bands(b), strict=True))


def _deviation(tensor: torch.Tensor) -> float:
    """Standard deviation of all elements."""
    mean = sum(float(band.double().sum()) for band in _bands(tensor)) / tensor.numel()
    return float((sum(float((band.double() - mean).square().sum()) for band in _bands(tensor)) / tensor.numel()) ** 0.5)
