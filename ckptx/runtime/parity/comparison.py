"""Compare what each rank computed with the reference, and name every difference beyond its tolerance.

Tolerances are measured, see `ckptx.runtime.parity.noise`. One that is as large as the values could not reveal a defect,
so a difference within it may be inconclusive:

    logits      inconclusive if the tolerance exceeds the standard deviation of the reference
    gradients   inconclusive if the tolerance exceeds the largest absolute value of the reference; neither different
                nor inconclusive if both sides are zero up to the rounding of the module's gradients
    loss        never inconclusive
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
from ckptx.runtime.parallel.shards import find_local_shards
from ckptx.runtime.parity import distances, noise
from ckptx.runtime.parity.execution import StepResult
from ckptx.wording import counted

_NO_GRADIENT = "no gradient"


class ReferenceResult(NamedTuple):
    """Forward results of the reference, and how much its own rounding changes them.

    Attributes:
        result: Result with the original embeddings.
        logits_noise: Largest absolute difference of logits over all draws of noise.
        loss_noise: Largest absolute difference of losses over all draws of noise.
        is_repeatable: True if a second run on this device gives the same bits.
    """

    result: StepResult
    logits_noise: float
    loss_noise: float
    is_repeatable: bool = True


class ReferenceGradient(NamedTuple):
    """A gradient of the reference.

    Attributes:
        name: Name of the parameter in the whole model.
        tensor: Gradient of the whole parameter.
        noise: Largest absolute difference that the noise of the reference causes, over all draws.
    """

    name: str
    tensor: torch.Tensor
    noise: float


class RankParameter(NamedTuple):
    """A parameter, or this rank's shard of it.

    Attributes:
        name: Name in the whole model; copies of a tied parameter on several stages have one name.
        parameter: The local parameter: a plain tensor or a DTensor.
        regions: Regions of the whole parameter that TP assigned to this rank; None if its placements show them.
    """

    name: str
    parameter: nn.Parameter
    regions: Sequence[Region] | None

    def compare_gradient(self, whole: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Compare the gradient with the reference.

        Args:
            whole: Gradient of the whole parameter.

        Returns:
            The local part of this parameter's gradient, and its largest absolute difference from the same part of
            `whole`; 0 if this rank has no element.
        """
        assert self.parameter.grad is not None
        local = _local(self.parameter.grad)
        shards = find_local_shards(self.name, self.parameter, self.regions)
        return local, max(
            (
                distances.max_abs_difference(_slice_region(whole, each.region), _slice_region(local, each.local))
                for each in shards
            ),
            default=0.0,
        )


class _GradientComparison(NamedTuple):
    """Comparison of a gradient of this rank with the gradient of the reference.

    Attributes:
        name: Name of the parameter.
        distance: Largest absolute difference.
        tolerance: Tolerance of that difference.
        reference_magnitude: Largest absolute value in the gradient of the reference.
        own_magnitude: Largest absolute value in the gradient of this rank, which may be a shard.
        dtype: Dtype of both gradients.
        is_exact: True if both gradients have to be equal bit for bit.
        defect: Another defect, such as values that are not finite; empty for none.
    """

    name: str
    distance: float
    tolerance: float
    reference_magnitude: float
    own_magnitude: float
    dtype: torch.dtype
    is_exact: bool
    defect: str = ""


@dataclass(slots=True)
class Comparison:
    """Differences that this rank finds; the first rank has the reference and broadcasts it.

    Attributes:
        rank_context: Context of this rank.
        stored_names: Names on disk by name in the model.
        is_exact: True if results have to be equal bit for bit, because both sides ran the same operations in the same
            order. `compare_forward` broadcasts the value of the first rank to all.
        tied_copies: Names of parameters with a copy on several stages: their gradients are summed in another order.
        differences: Differences beyond the tolerance.
        inconclusive: Tensors within a tolerance that is too large to reveal a defect.
        metrics: Values of the report, by key.
        gradient_distances: Name in the model -> largest difference of that gradient on this rank, and its tolerance.
    """

    rank_context: RankContext
    stored_names: dict[str, tuple[str, ...]]
    is_exact: bool
    tied_copies: Collection[str] = ()
    differences: list[dict[str, Any]] = field(default_factory=list)
    inconclusive: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    gradient_distances: dict[str, tuple[float, float]] = field(default_factory=dict)
    _pending: dict[str, list[RankParameter]] = field(default_factory=dict)  # not compared yet, by name
    _reference_magnitudes: dict[str, float] = field(default_factory=dict)  # largest absolute values, by name
    _gradient_comparisons: list[_GradientComparison] = field(default_factory=list)

    def compare_forward(self, expected: ReferenceResult | None, result: StepResult, first_batch: int) -> None:
        """Compare the logits of this rank's batches, and the loss over all batches.

        A rank without the last stage of a pipeline has no logits, and compares the loss alone.

        Args:
            expected: Results of the reference; None on every rank but the first.
            result: Results of this rank.
            first_batch: Index of this rank's first batch among the batches of all ranks, which the reference ran.
        """
        summary = None
        if expected is not None:
            shapes = [(tuple(each.shape), each.dtype) for each in expected.result.logits]
            summary = self.is_exact, expected.result.loss, expected.logits_noise, expected.loss_noise, shapes
        self.is_exact, loss, logits_noise, loss_noise, shapes = broadcast_object(summary)
        reference_logits = [
            broadcast(None if expected is None else expected.result.logits[i], shape, dtype, self.rank_context)
            for i, (shape, dtype) in enumerate(shapes)
        ]
        losses = [each for each, is_last in all_gather_object((result.loss, bool(result.logits))) if is_last]
        own_loss = sum(losses) / len(losses)
        tolerance = 0.0 if self.is_exact else noise.NOISE_MULTIPLE * logits_noise
        # A mean can be equal in all draws by chance; its tolerance is at least the rounding of its last place.
        rounding = noise.rounding_tolerance(torch.float32, abs(loss))
        loss_tolerance = 0.0 if self.is_exact else max(noise.NOISE_MULTIPLE * loss_noise, rounding)
        self.metrics |= {
            "max_abs": 0.0,
            "max_abs_tolerance": tolerance,
            "logits_std": distances.standard_deviation(reference_logits[first_batch]),
            "kl": 0.0,
            "cosine": 1.0,
            "loss": own_loss,
            "loss_reference": loss,
            "loss_tolerance": loss_tolerance,
        }
        for own_logits, expected_logits in zip(result.logits, reference_logits[first_batch:], strict=False):
            self._compare_logits(own_logits, expected_logits, tolerance)
        if not abs(own_loss - loss) <= loss_tolerance and not self.differences:
            self._add_difference("forward", "loss", max_abs=abs(own_loss - loss), tolerance=loss_tolerance)

    def _compare_logits(self, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        distance, deviation = distances.max_abs_difference(expected, actual), distances.standard_deviation(expected)
        metrics = self.metrics
        metrics["max_abs"] = max(metrics["max_abs"], distance)
        metrics["kl"] = max(metrics["kl"], distances.kl_divergence(expected, actual), key=distances.nan_is_worst)
        metrics["cosine"] = max(
            metrics["cosine"],
            distances.cosine_similarity(expected, actual),
            key=lambda value: distances.nan_is_worst(-value),
        )
        for side, logits in (("reference", expected), ("checkpoint", actual)):
            nonfinite_count = int((~torch.isfinite(logits)).sum())
            if nonfinite_count:
                self._add_difference(
                    "forward",
                    "logits",
                    max_abs=float("nan"),
                    tolerance=tolerance,
                    what=f"{counted(nonfinite_count, 'element')} not finite in the {side}",
                )
        if not distance <= tolerance and not self.differences:
            self._add_difference("forward", "logits", max_abs=distance, tolerance=tolerance)
        elif not tolerance <= deviation and not self.differences:
            self._add_inconclusive("forward", "logits", tolerance=tolerance, magnitude=deviation)

    def compare_gradients(
        self, expected: Sequence[ReferenceGradient] | None, parameters: Iterable[RankParameter]
    ) -> None:
        """Compare some gradients with this rank's shards of them, and release those shards.

        Every rank calls it once for each list that `ReferenceModel.gradients` yields, then `report_extra_gradients`,
        and at last `finish_gradients`.

        Args:
            expected: Gradients of the reference; None on every rank but the first.
            parameters: Parameters of this rank whose gradients are new since the last call.
        """
        for each in parameters:
            self._pending.setdefault(each.name, []).append(each)
        names_on_any_rank = frozenset().union(*all_gather_object(set(self._pending)))
        summaries = None
        if expected is not None:
            summaries = [
                (each.name, tuple(each.tensor.shape), each.tensor.dtype, each.noise, distances.max_abs(each.tensor))
                for each in expected
            ]
        for number, (name, shape, dtype, gradient_noise, magnitude) in enumerate(broadcast_object(summaries)):
            whole = broadcast(None if expected is None else expected[number].tensor, shape, dtype, self.rank_context)
            is_exact = self.is_exact and name not in self.tied_copies
            tolerance = (
                0.0
                if is_exact
                else max(noise.NOISE_MULTIPLE * gradient_noise, noise.rounding_tolerance(dtype, magnitude))
            )
            self._reference_magnitudes[name] = magnitude
            own_parameters = self._pending.pop(name, ())  # empty for a parameter of another stage
            if name not in names_on_any_rank or any(each.parameter.grad is None for each in own_parameters):
                self._gradient_comparisons.append(
                    _GradientComparison(name, magnitude, tolerance, magnitude, 0.0, dtype, is_exact, _NO_GRADIENT)
                )
                continue
            comparison = _GradientComparison(name, 0.0, tolerance, magnitude, 0.0, dtype, is_exact)
            for each in own_parameters:
                self._gradient_comparisons.append(_compare_gradient(each, whole, comparison))
                each.parameter.grad = None

    def report_extra_gradients(self) -> None:
        """Report gradients of this rank for which the reference has none, except those that are zero everywhere.

        They are the gradients that no call of `compare_gradients` so far compared.
        """
        for name, parameters in self._pending.items():
            for each in parameters:
                gradient = each.parameter.grad
                if gradient is not None and bool(_local(gradient).any()):
                    self._add_difference("gradients", name, max_abs=distances.max_abs(_local(gradient)), tolerance=0.0,
                              what="the reference has no gradient")  # fmt: skip
        self._pending.clear()

    def finish_gradients(self) -> None:
        """Find the gradients that differ or are inconclusive, now that the magnitudes of all are known."""
        module_magnitudes = _largest_by_module(self._reference_magnitudes)
        closest_to_tolerance, largest = ("", 0.0), 0.0
        for each in self._gradient_comparisons:
            name, distance, tolerance = each.name, each.distance, each.tolerance
            if each.defect:
                self._add_difference("gradients", name, max_abs=distance, tolerance=tolerance, what=each.defect)
            if each.defect == _NO_GRADIENT:
                continue
            largest = max(largest, distance)
            if distance >= self.gradient_distances.get(name, (0.0, 0.0))[0]:
                self.gradient_distances[name] = distance, tolerance
            if not each.defect:
                if not each.is_exact and max(each.reference_magnitude, each.own_magnitude) <= noise.rounding_tolerance(
                    each.dtype, module_magnitudes[name]
                ):
                    continue  # zero up to rounding, as the gradients of key biases, which softmax cancels
                if not distance <= tolerance:
                    self._add_difference("gradients", name, max_abs=distance, tolerance=tolerance)
                elif tolerance > each.reference_magnitude:
                    self._add_inconclusive("gradients", name, tolerance=tolerance, magnitude=each.reference_magnitude)
            if tolerance and distance / tolerance > closest_to_tolerance[1]:
                closest_to_tolerance = name, distance / tolerance
        self.metrics |= {
            "gradients": len(self._reference_magnitudes),
            "grad_max_abs": largest,
            "grad_closest_to_tolerance": list(closest_to_tolerance),
        }
        self._gradient_comparisons.clear()

    def _add_difference(self, level: str, name: str, **values: Any) -> None:
        self.differences.append({**make_difference(level, self.rank_context.rank, name, self.stored_names), **values})

    def _add_inconclusive(self, level: str, name: str, **values: Any) -> None:
        self.inconclusive.append({**make_difference(level, self.rank_context.rank, name, self.stored_names), **values})


def _compare_gradient(
    parameter: RankParameter, whole: torch.Tensor, comparison: _GradientComparison
) -> _GradientComparison:
    local, distance = parameter.compare_gradient(whole)
    comparison = comparison._replace(distance=distance, own_magnitude=distances.max_abs(local))
    nonfinite_sides = [
        side for side, part in (("reference", whole), ("checkpoint", local)) if not distances.is_finite(part)
    ]
    if nonfinite_sides:
        return comparison._replace(distance=math.inf, defect=f"not finite in the {' and the '.join(nonfinite_sides)}")
    return comparison


def make_difference(level: str, rank: int, name: str, stored_names: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return a difference as in the report.

    Args:
        level: "config", "bytes", "forward" or "gradients".
        rank: Global rank that found it.
        name: Name in the model.
        stored_names: Names on disk by name in the model; a name without an entry is the same on disk.

    Returns:
        `level`, `rank`, and the first name on disk as `name`; `names`, the number of names on disk, if there are
        several; `model_name`, the name in the model, if it is another one.
    """
    on_disk = stored_names.get(name, (name,))
    difference: dict[str, Any] = {"level": level, "rank": rank, "name": on_disk[0]}
    if len(on_disk) > 1:
        difference["names"] = len(on_disk)
    if on_disk[0] != name:
        difference["model_name"] = name
    return difference


def _largest_by_module(magnitudes: dict[str, float]) -> dict[str, float]:
    """Return, for each parameter, the largest gradient magnitude in its module and the sibling modules.

    All projections of one attention, for example, share one value.
    """
    scopes = {name: ".".join(name.split(".")[:-2]) for name in magnitudes}
    largest: dict[str, float] = {}
    for name, scope in scopes.items():
        largest[scope] = max(magnitudes[name], largest.get(scope, 0.0))
    return {name: largest[scope] for name, scope in scopes.items()}


def _slice_region(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
