"""Holds what each rank computed against what the reference computed, and names what is further away than it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cosine_similarity, log_softmax

from ckptx.catalog.region import Region
from ckptx.runtime.distributed import Process, broadcast, everywhere, told
from ckptx.runtime.layers import canonical_name
from ckptx.runtime.load import RegionsOf
from ckptx.runtime.shards import LocalShard, pieces_of
from ckptx.verification import noise
from ckptx.verification.execution import Outcome


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


@dataclass(slots=True)
class Comparison:
    """What this rank finds; the first rank has the reference and tells it to the others.

    Attributes:
        place: Of this rank.
        stored: Names on disk by name in the model.
        is_exact: Whether the same operations ran in the same order on both sides.
        rows: Differences beyond the limit.
        numbers: For the report.
        gradients: How far each gradient is away and may be, by name in the model.
    """

    process: Process
    stored: dict[str, tuple[str, ...]]
    is_exact: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict)

    def forward(self, expected: Reference | None, found: Outcome, index: int) -> None:
        """Logits of this rank's batch, and the loss of all."""
        known = None
        if expected is not None:
            shapes = [(tuple(each.shape), each.dtype) for each in expected.outcome.logits]
            known = expected.outcome.loss, expected.logits, expected.loss, shapes
        loss, noise_of_logits, noise_of_loss, shapes = told(known)
        whole = [
            broadcast(None if expected is None else expected.outcome.logits[i], shape, dtype, self.process)
            for i, (shape, dtype) in enumerate(shapes)
        ]
        ours, theirs = found.logits[0], whole[index]
        ours_loss = sum(everywhere(found.loss)) / self.process.world_size
        limit = 0.0 if self.is_exact else noise.ALLOWED * noise_of_logits
        # A mean can come out the same three times by chance; it is no more exact than its last place for that.
        last_place = torch.finfo(torch.float32).eps * abs(loss)
        limit_of_loss = 0.0 if self.is_exact else noise.ALLOWED * max(noise_of_loss, last_place)
        distance = furthest(theirs, ours)
        self.numbers |= {
            "max_abs": distance,
            "max_abs_limit": limit,
            "kl": _divergence(theirs, ours),
            "cosine": _cosine(theirs, ours),
            "loss": ours_loss,
            "loss_reference": loss,
            "loss_limit": limit_of_loss,
        }
        for side, logits in (("reference", theirs), ("checkpoint", ours)):
            bad = int((~torch.isfinite(logits)).sum())
            if bad:
                self._add("forward", "logits", max_abs=float("nan"), limit=limit, what=f"{bad} not finite, {side}")
        if not distance <= limit and not self.rows:
            self._add("forward", "logits", max_abs=distance, limit=limit)
        if not abs(ours_loss - loss) <= limit_of_loss and not self.rows:
            self._add("forward", "loss", max_abs=abs(ours_loss - loss), limit=limit_of_loss)

    def backward(self, expected: Reference | None, model: nn.Module, regions: RegionsOf | None) -> None:
        """The part of every gradient that this rank holds."""
        known = None
        if expected is not None:
            known = {
                name: (tuple(each.shape), each.dtype, expected.gradients[name])
                for name, each in expected.outcome.gradients.items()
            }
        rows: dict[str, tuple[tuple[int, ...], torch.dtype, float]] = told(known)
        ours = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
        largest, worst = 0.0, ("", 0.0)
        for name, (shape, dtype, moved) in rows.items():
            theirs = broadcast(
                None if expected is None else expected.outcome.gradients[name], shape, dtype, self.process
            )
            limit = 0.0 if self.is_exact else noise.ALLOWED * moved
            parameter = ours.pop(name, None)
            if parameter is None or parameter.grad is None:
                self._add("gradients", name, max_abs=_largest(theirs), limit=limit, what="no gradient")
                continue
            local_regions = None if regions is None else regions(name)
            distance = _distance(theirs, parameter, pieces_of(name, parameter, local_regions))
            largest = max(largest, distance)
            self.gradients[name] = distance, limit
            if not distance <= limit:
                self._add("gradients", name, max_abs=distance, limit=limit)
            if limit and distance / limit > worst[1]:
                worst = name, distance / limit
        for name, parameter in ours.items():
            if parameter.grad is not None and bool(_local(parameter.grad).any()):
                self._add("gradients", name, max_abs=_largest(_local(parameter.grad)), limit=0.0,
                          what="the reference has no gradient")  # fmt: skip
        self.numbers |= {"gradients": len(rows), "grad_max_abs": largest, "grad_of_limit": list(worst)}

    def _add(self, level: str, name: str, **values: Any) -> None:
        self.rows.append({**difference(level, self.process.rank, name, self.stored), **values})


def difference(level: str, rank: int, name: str, stored: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """A difference: by its name on disk, and by that in the model where it is another."""
    on_disk = stored.get(name, (name,))
    row: dict[str, Any] = {"level": level, "rank": rank, "name": on_disk[0]}
    if len(on_disk) > 1:
        row["names"] = len(on_disk)
    if on_disk[0] != name:
        row["model_name"] = name
    return row


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; infinite where one is not finite and the other differs."""
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    distance = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(distance.masked_fill(same, 0.0).max())


def _distance(theirs: torch.Tensor, parameter: nn.Parameter, pieces: Sequence[LocalShard]) -> float:
    """Of the local gradient from the slices of a whole one."""
    assert parameter.grad is not None
    local = _local(parameter.grad)
    return max((furthest(_at(theirs, piece.region), _at(local, piece.local)) for piece in pieces), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _at(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence of the distributions over the last dim, in nats."""
    p, q = (log_softmax(each.double(), -1) for each in (reference, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))
