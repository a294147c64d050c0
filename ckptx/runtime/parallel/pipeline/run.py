"""Runs a stage: its model's own forward, with what came from the stage before put where it is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries, stage_arguments
from ckptx.runtime.parallel.pipeline.boundary_slots import Arguments, BoundarySlot, get, put
from ckptx.runtime.parallel.pipeline.call_hooks import Call, CallHooks


class StageRun:
    """The forward of a stage.

    Attributes:
        model: The stage, as `make_stage` made it; wrapped and sharded by now, or not.
        number: Of the stage.
        received: The places of what it is given by the stage before.
        sent: Of what it gives to the next.
    """

    def __init__(self, model: nn.Module, stages: StageMap, number: int, boundaries: StageBoundaries) -> None:
        self.model, self.number, self._boundaries = model, number, boundaries
        self.input_slots = boundaries.slots[number]
        self.output_slots = boundaries.slots[number + 1] if number + 1 < stages.pp else ()
        self._hooks = CallHooks(model, stages)
        self._into, self._out_of = _by_call(self.input_slots), _by_call(self.output_slots)

    def __call__(
        self, forward: Callable[..., Any], batch: Mapping[str, Tensor], values: Sequence[Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Runs one microbatch.

        Args:
            forward: The model, or its own forward where `model.forward` is another.
            batch: What the unsplit model would be given.
            values: What the stage before sent, in the order of `received`.

        Returns:
            What the model gave (NaN but on the last stage), and what is to be sent, in the order of `sent`.
        """
        slots = self._boundaries.slots_for(batch)
        mine, theirs = set(slots[self.number]), set(slots[self.number + 1] if self.output_slots else ())
        given = dict(zip(self.input_slots, values, strict=True))
        found: dict[BoundarySlot, Any] = {}

        def before(call: Call, arguments: Arguments) -> None:
            for slot in self._into.get(call, ()):
                if slot in mine:
                    put(arguments, slot.steps, given[slot])
            for slot in self._out_of.get(call, ()):
                found[slot] = get(arguments, slot.steps)

        with self._hooks.active(before):
            output = forward(**stage_arguments(self.number, batch))
        return output, tuple(found.get(slot) if slot in theirs else None for slot in self.output_slots)


def clone_outputs(values: Sequence[Any]) -> tuple[Any, ...]:
    """What is sent, which must be no view."""
    return tuple(each.clone() if isinstance(each, Tensor) else each for each in values)


def as_stage_inputs(values: Sequence[Any]) -> tuple[Any, ...]:
    """What a stage is given, as the leaves of a graph of its own, whose gradients are for the stage before."""
    return tuple(
        each.detach().clone().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
        for each in values
    )


def backward_roots(sent: Sequence[Any], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Where the backward pass of a stage begins, and with what: of all that it sent, what has a gradient.

    Args:
        sent: By the stage.
        gradients: Of what the next one made of it with `received`; None counts as zeros.
    """
    pairs = [
        (value, gradient if gradient is not None else torch.zeros_like(value))
        for value, gradient in zip(sent, gradients, strict=True)
        if isinstance(value, Tensor) and value.requires_grad
    ]
    return [value for value, _ in pairs], [gradient for _, gradient in pairs]


def input_grads(given: Sequence[Any]) -> list[Tensor | None]:
    """Those that the backward pass left at `received` values."""
    return [each.grad if isinstance(each, Tensor) else None for each in given]


def _by_call(slots: Sequence[BoundarySlot]) -> dict[Call, list[BoundarySlot]]:
    found: dict[Call, list[BoundarySlot]] = defaultdict(list)
    for slot in slots:
        found[slot.point, slot.call].append(slot)
    return dict(found)
