"""Compare what each rank computed with the reference, and name every difference beyond its tolerance.

Tolerances are measured, see `ckptx.runtime.parity.noise`. A tolerance larger than the compared values themselves could
not reveal any defect: such a tensor is reported as inconclusive, never as equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptx.catalog.region import Region
from ckptx.runtime.parallel.distributed import RankContext, all_gather_object, broadcast, broadcast_object
from ckptx.runtime.parallel.shards import local_shards_of
from ckptx.runtime.parity import distances, noise
from ckptx.runtime.parity.execution import ForwardResult

_NONE_HERE = "no gradient"


class Reference(NamedTuple):
    """Forward results of the reference, and how much its own rounding changes them.

    Attributes:
        outcome: Result with the original embeddings.
        logits: Largest absolute difference of logits over all draws of noise.
        loss: Largest absolute difference of losses over all draws of noise.
        is_repeatable: True if a second run on this device gives the same bits.
    """

    outcome: ForwardResult
    logits: float
    loss: float
    is_repeatable: bool = True


class Gradient(NamedTuple):
    """A gradient of the reference.

    Attributes:
        name: Name of the parameter in the whole model.
        tensor: Gradient of the whole parameter.
        moved: Largest absolute difference that the noise of the reference causes, over all draws.
    """

    name: str
    tensor: torch.Tensor
    moved: float


class RankParameter(NamedTuple):
    """A parameter, or this rank's shard of it.

    Attributes:
        name: Name in the whole model; copies of a tied parameter on several stages have one name.
        parameter: The local parameter: a plain tensor or a DTensor.
        regions: Regions of the whole parameter that TP assigned to this rank; None if its DTensor tells them.
    """

    name: str
    parameter: nn.Parameter
    regions: Sequence[Region] | None

    def distance(self, whole: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the local part of its gradient, and its largest absolute difference from a whole gradient."""
        assert self.parameter.grad is not None
        local = _local(self.parameter.grad)
        pieces = local_shards_of(self.name, self.parameter, self.regions)
        return local, max(
            (distances.furthest(_at(whole, each.region), _at(local, each.local)) for each in pieces), default=0.0
        )


class _GradientDistances(NamedTuple):
    """Comparison of a gradient of this rank with the gradient of the reference.

    Attributes:
        name: Name of the parameter.
        distance: Largest absolute difference.
        limit: Tolerance of that difference.
        size: Largest absolute value in the gradient of the reference.
        ours: Largest absolute value in the gradient of this rank.
        dtype: Dtype of both gradients.
        is_exact: True if both must be equal bit for bit.
        what: Another defect, such as values that are not finite; empty for none.
    """

    name: str
    distance: float
    limit: float
    size: float
    ours: float
    dtype: torch.dtype
    is_exact: bool
    what: str = ""


@dataclass(slots=True)
class Comparison:
    """Differences that this rank finds; the first rank has the reference and broadcasts it.

    Attributes:
        process: Context of this rank.
        stored: Names on disk by name in the model.
        is_exact: True if the same operations ran in the same order on both sides; broadcast by the first rank.
        copied: Names of parameters with a copy on several stages: their gradients are summed in another order.
        rows: Differences beyond the tolerance.
        inconclusive: Tensors within a tolerance that is too large to reveal a defect.
        numbers: Values of the report, by key.
        gradients: Largest difference and tolerance of each gradient, by name in the model.
    """

    process: RankContext
    stored: dict[str, tuple[str, ...]]
    is_exact: bool
    copied: Collection[str] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    inconclusive: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict)
    _pending: dict[str, list[RankParameter]] = field(default_factory=dict)
    _sizes: dict[str, float] = field(default_factory=dict)
    _measured: list[_GradientDistances] = field(default_factory=list)

    def forward(self, expected: Reference | None, found: ForwardResult, index: int) -> None:
        """Compare the logits of this rank's batches, and the loss over all batches.

        A rank without the last stage of a pipeline has no logits, and compares the loss alone.

        Args:
            expected: Results of the reference; None on every rank but the first.
            found: Results of this rank.
            index: Index of this rank's first batch among all batches.
        """
        known = None
        if expected is not None:
            shapes = [(tuple(each.shape), each.dtype) for each in expected.outcome.logits]
            known = self.is_exact, expected.outcome.loss, expected.logits, expected.loss, shapes
        self.is_exact, loss, noise_of_logits, noise_of_loss, shapes = broadcast_object(known)
        whole = [
            broadcast(None if expected is None else expected.outcome.logits[i], shape, dtype, self.process)
            for i, (shape, dtype) in enumerate(shapes)
        ]
        losses = [each for each, is_last in all_gather_object((found.loss, bool(found.logits))) if is_last]
        ours_loss = sum(losses) / len(losses)
        limit = 0.0 if self.is_exact else noise.ALLOWED * noise_of_logits
        # A mean can be equal in all draws by chance; its tolerance is at least the rounding of its last place.
        rounding = noise.rounding(torch.float32, abs(loss))
        limit_of_loss = 0.0 if self.is_exact else max(noise.ALLOWED * noise_of_loss, rounding)
        self.numbers |= {
            "max_abs": 0.0,
            "max_abs_tolerance": limit,
            "logits_std": distances.deviation(whole[index]),
            "kl": 0.0,
            "cosine": 1.0,
            "loss": ours_loss,
            "loss_reference": loss,
            "loss_tolerance": limit_of_loss,
        }
        for ours, theirs in zip(found.logits, whole[index:], strict=False):
            self._compare_logits(ours, theirs, limit)
        if not abs(ours_loss - loss) <= limit_of_loss and not self.rows:
            self._add("forward", "loss", max_abs=abs(ours_loss - loss), tolerance=limit_of_loss)

    def _compare_logits(self, ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
        distance, deviation = distances.furthest(theirs, ours), distances.deviation(theirs)
        worst = self.numbers
        worst["max_abs"] = max(worst["max_abs"], distance)
        worst["kl"] = max(worst["kl"], distances.divergence(theirs, ours), key=distances.badness)
        worst["cosine"] = max(
            worst["cosine"], distances.cosine(theirs, ours), key=lambda found: distances.badness(-found)
        )
        for side, logits in (("reference", theirs), ("checkpoint", ours)):
            bad = int((~torch.isfinite(logits)).sum())
            if bad:
                self._add("forward", "logits", max_abs=float("nan"), tolerance=limit, what=f"{bad} not finite, {side}")
        if not distance <= limit and not self.rows:
            self._add("forward", "logits", max_abs=distance, tolerance=limit)
        elif not limit <= deviation and not self.rows:
            self._add_inconclusive("forward", "logits", tolerance=limit, magnitude=deviation)

    def backward(self, expected: Sequence[Gradient] | None, parameters: Iterable[RankParameter]) -> None:
        """Compare some gradients with this rank's shards of them, and release those shards.

        Every rank calls it once for each portion of gradients that the reference has; `finish_gradients` ends it.

        Args:
            expected: Gradients of the reference; None on every rank but the first.
            parameters: Parameters of this rank whose gradients are new since the last call.
        """
        for each in parameters:
            self._pending.setdefault(each.name, []).append(each)
        anywhere = frozenset().union(*all_gather_object(set(self._pending)))
        known = None
        if expected is not None:
            known = [
                (each.name, tuple(each.tensor.shape), each.tensor.dtype, each.moved, distances.largest(each.tensor))
                for each in expected
            ]
        for number, (name, shape, dtype, moved, size) in enumerate(broadcast_object(known)):
            theirs = broadcast(None if expected is None else expected[number].tensor, shape, dtype, self.process)
            is_exact = self.is_exact and name not in self.copied
            limit = 0.0 if is_exact else max(noise.ALLOWED * moved, noise.rounding(dtype, size))
            self._sizes[name] = size
            here = self._pending.pop(name, ())  # empty for a parameter of another stage
            if name not in anywhere or any(each.parameter.grad is None for each in here):
                self._measured.append(_GradientDistances(name, size, limit, size, 0.0, dtype, is_exact, _NONE_HERE))
                continue
            for each in here:
                self._measured.append(
                    _measure(each, theirs, _GradientDistances(name, 0.0, limit, size, 0.0, dtype, is_exact))
                )
                each.parameter.grad = None

    def report_missing_gradients(self) -> None:
        """Report gradients of this rank for which the reference has none."""
        for name, found in self._pending.items():
            for each in found:
                gradient = each.parameter.grad
                if gradient is not None and bool(_local(gradient).any()):
                    self._add("gradients", name, max_abs=distances.largest(_local(gradient)), tolerance=0.0,
                              what="the reference has no gradient")  # fmt: skip
        self._pending.clear()

    def finish_gradients(self) -> None:
        """Judge all gradients, now that their sizes are known."""
        module_sizes = _largest_by_module(self._sizes)
        worst, largest = ("", 0.0), 0.0
        for each in self._measured:
            name, distance, limit = each.name, each.distance, each.limit
            if each.what:
                self._add("gradients", name, max_abs=distance, tolerance=limit, what=each.what)
            if each.what == _NONE_HERE:
                continue
            largest = max(largest, distance)
            if distance >= self.gradients.get(name, (0.0, 0.0))[0]:
                self.gradients[name] = distance, limit
            if not each.what:
                if not each.is_exact and max(each.size, each.ours) <= noise.rounding(each.dtype, module_sizes[name]):
                    continue  # zero up to rounding, as the gradients of key biases, which softmax cancels
                if not distance <= limit:
                    self._add("gradients", name, max_abs=distance, tolerance=limit)
                elif limit > each.size:
                    self._add_inconclusive("gradients", name, tolerance=limit, magnitude=each.size)
            if limit and distance / limit > worst[1]:
                worst = name, distance / limit
        self.numbers |= {
            "gradients": len(self._sizes),
            "grad_max_abs": largest,
            "grad_closest_to_tolerance": list(worst),
        }
        self._measured.clear()

    def _add(self, level: str, name: str, **values: Any) -> None:
        self.rows.append({**difference(level, self.process.rank, name, self.stored), **values})

    def _add_inconclusive(self, level: str, name: str, **values: Any) -> None:
        self.inconclusive.append({**difference(level, self.process.rank, name, self.stored), **values})


def _measure(parameter: RankParameter, whole: torch.Tensor, known: _GradientDistances) -> _GradientDistances:
    local, distance = parameter.distance(whole)
    known = known._replace(distance=distance, ours=distances.largest(local))
    bad = [side for side, part in (("reference", whole), ("checkpoint", local)) if not distances.is_finite(part)]
    if bad:
        return known._replace(distance=math.inf, what=f"not finite, {' and '.join(bad)}")
    return known


def difference(level: str, rank: int, name: str, stored: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the row of a difference: its name on disk, and its name in the model if that is another."""
    on_disk = stored.get(name, (name,))
    row: dict[str, Any] = {"level": level, "rank": rank, "name": on_disk[0]}
    if len(on_disk) > 1:
        row["names"] = len(on_disk)
    if on_disk[0] != name:
        row["model_name"] = name
    return row


def _largest_by_module(sizes: dict[str, float]) -> dict[str, float]:
    """Return, for each parameter, the largest gradient value in its module and the sibling modules.

    All projections of one attention, for example, share one value.
    """
    scopes = {name: ".".join(name.split(".")[:-2]) for name in sizes}
    found: dict[str, float] = {}
    for name, scope in scopes.items():
        found[scope] = max(sizes[name], found.get(scope, 0.0))
    return {name: found[scope] for name, scope in scopes.items()}


def _at(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
