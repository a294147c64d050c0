"""Runs a stage: its model's own forward, in which the values from the previous stage replace arguments of calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries, stage_arguments
from ckptx.runtime.parallel.pipeline.boundary_slots import Arguments, BoundarySlot, get_value, set_value
from ckptx.runtime.parallel.pipeline.call_hooks import Call, CallHooks


class StageRunner:
    """The forward of one stage.

    Attributes:
        model: The stage, from `make_stage`; wrapped and sharded or not.
        number: Number of the stage.
        input_slots: Slots whose values the previous stage sends.
        output_slots: Slots whose values are sent to the next stage; empty for the last stage.
    """

    def __init__(self, model: nn.Module, stages: StageMap, number: int, boundaries: StageBoundaries) -> None:
        self.model, self.number, self._boundaries = model, number, boundaries
        self.input_slots = boundaries.slots[number]
        self.output_slots = boundaries.slots[number + 1] if number + 1 < stages.count else ()
        self._hooks = CallHooks(model, stages)
        self._input_slots_by_call, self._output_slots_by_call = (
            _group_by_call(self.input_slots),
            _group_by_call(self.output_slots),
        )

    def __call__(
        self, forward: Callable[..., Any], batch: Mapping[str, Tensor], values: Sequence[Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Run one microbatch.

        Args:
            forward: The model, or its original forward if `model.forward` was replaced.
            batch: Arguments of the unsplit model.
            values: Values from the previous stage, in the order of `input_slots`; values of slots that this kind of
                batch does not use are ignored.

        Returns:
            The output of the model (NaN except on the last stage), and the values to send, in the order of
            `output_slots`; None for slots that this kind of batch does not use.

        Raises:
            UnsupportedError: The boundaries for this kind of batch are unknown.
        """
        slots = self._boundaries.slots_for(batch)
        received_slots, sent_slots = set(slots[self.number]), set(slots[self.number + 1] if self.output_slots else ())
        values_by_slot = dict(zip(self.input_slots, values, strict=True))
        output_values: dict[BoundarySlot, Any] = {}

        def before_call(call: Call, arguments: Arguments) -> None:
            for slot in self._input_slots_by_call.get(call, ()):
                if slot in received_slots:
                    set_value(arguments, slot.path, values_by_slot[slot])
            for slot in self._output_slots_by_call.get(call, ()):
                output_values[slot] = get_value(arguments, slot.path)

        with self._hooks.activate(before_call):
            output = forward(**stage_arguments(self.number, batch))
        return output, tuple(output_values.get(slot) if slot in sent_slots else None for slot in self.output_slots)


def clone_outputs(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values to send, tensors as copies in the same graph.

    torch's `stage_backward_input` detaches sent tensors in place, which torch refuses for a view.
    """
    return tuple(each.clone() if isinstance(each, Tensor) else each for each in values)


def as_stage_inputs(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values, tensors as copies that are leaves of a new graph, whose gradients can be sent back."""
    return tuple(
        each.detach().clone().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
        for each in values
    )


def find_backward_roots(
    sent_values: Sequence[Any], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sent tensors that require gradients, and the gradients with which their backward pass begins.

    Args:
        sent_values: Values that the stage sent.
        gradients: For each value, its gradient from the next stage; None counts as zeros.
    """
    pairs = [
        (value, gradient if gradient is not None else torch.zeros_like(value))
        for value, gradient in zip(sent_values, gradients, strict=True)
        if isinstance(value, Tensor) and value.requires_grad
    ]
    return [value for value, _ in pairs], [gradient for _, gradient in pairs]


def get_input_grads(inputs: Sequence[Any]) -> list[Tensor | None]:
    """Return for each input of a stage the gradient that its backward pass computed; None for an input without one."""
    return [each.grad if isinstance(each, Tensor) else None for each in inputs]


def _group_by_call(slots: Sequence[BoundarySlot]) -> dict[Call, list[BoundarySlot]]:
    slots_by_call: dict[Call, list[BoundarySlot]] = defaultdict(list)
    for slot in slots:
        slots_by_call[slot.module, slot.call].append(slot)
    return dict(slots_by_call)
