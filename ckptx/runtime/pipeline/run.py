"""Runs a stage: its model's own forward, with what came from the stage before put where it is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.pipeline.carry import Carry, given_to
from ckptx.runtime.pipeline.slots import Arguments, Slot, get, put
from ckptx.runtime.pipeline.taps import Call, Taps


class StageRun:
    """The forward of a stage.

    Attributes:
        model: The stage, as `make_stage` made it; wrapped and sharded by now, or not.
        number: Of the stage.
        received: The places of what it is given by the stage before.
        sent: Of what it gives to the next.
    """

    def __init__(self, model: nn.Module, stages: StageMap, number: int, carry: Carry) -> None:
        self.model, self.number = model, number
        self.received = carry.slots[number]
        self.sent = carry.slots[number + 1] if number + 1 < stages.pp else ()
        self._taps = Taps(model, stages)
        self._into, self._out_of = _by_call(self.received), _by_call(self.sent)

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
        given = dict(zip(self.received, values, strict=True))
        found: dict[Slot, Any] = {}

        def visit(call: Call, arguments: Arguments) -> None:
            for slot in self._into.get(call, ()):
                put(arguments, slot.steps, given[slot])
            for slot in self._out_of.get(call, ()):
                found[slot] = get(arguments, slot.steps)

        with self._taps.watching(visit):
            output = forward(**given_to(self.number, batch))
        return output, tuple(found.get(slot) for slot in self.sent)


def _by_call(slots: Sequence[Slot]) -> dict[Call, list[Slot]]:
    found: dict[Call, list[Slot]] = defaultdict(list)
    for slot in slots:
        found[slot.point, slot.call].append(slot)
    return dict(found)
