"""What must travel between pipeline stages, found by running a small model of the same class.

Nobody wrote down what the layers of a class need from those before them. So the class is asked: its unsplit self runs
once, and what every call is given and gives is kept. Then each stage runs, and wherever a call of it is given something
else (NaN, None, another value) than the unsplit model gives, that place is a *want*, and the right value is put there.
A want without which all the stage computes still comes out right is dropped. What remains is what a stage needs from
those before it; what the one right before it does not have either, that one has to be sent, too.

State that travels by another way than arguments, as an attribute that one layer writes and another reads, is refused.
What the stages then do with what they send each other is tried by `rehearsal`.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptx.errors import UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.runtime.parallel.pipeline.slots import Arguments, Slot, get, is_same, leaves, put
from ckptx.runtime.parallel.pipeline.stage import Form, Stub, form_of, make_stage, ways
from ckptx.runtime.parallel.pipeline.taps import Call, See, Taps, Visit, points

Batch = Mapping[str, Tensor]
Kind = frozenset[str]  # the names of the arguments of a batch


@dataclass(frozen=True, slots=True)
class Carry:
    """What is known of a class that is cut into stages.

    Attributes:
        slots: Of each stage, what it gets from the one before it; nothing for the first.
        forms: What its layers, and modules after the last of them, answer.
        of_kind: Which of the slots are for a kind of batch, where kinds take other ways through the layers, as text
            goes by one that looks at images. Empty where all slots are for all.
    """

    slots: tuple[tuple[Slot, ...], ...]
    forms: Mapping[str, Form]
    of_kind: Mapping[Kind, tuple[tuple[Slot, ...], ...]] = field(default_factory=dict)

    def slots_for(self, batch: Batch) -> tuple[tuple[Slot, ...], ...]:
        """The slots of each stage for a batch.

        Raises:
            UnsupportedError: Nothing is known of its kind.
        """
        if not self.of_kind:
            return self.slots
        found = self.of_kind.get(frozenset(batch))
        if found is None:
            kinds = " or ".join(", ".join(sorted(each)) for each in self.of_kind)
            raise UnsupportedError(
                f"pipeline stages: found a microbatch of {', '.join(sorted(batch))}, needed one of {kinds}, of which "
                "it is known what travels; show find_carry one of each kind"
            )
        return found


class Recorded(NamedTuple):
    """What the unsplit model did with one batch.

    Attributes:
        given: Of each call, every value it is given.
        gave: Of each call of a layer and of what is around them, every value it gives.
        output: Of the model.
    """

    given: dict[Call, dict[Any, Any]]
    gave: dict[Call, dict[Any, Any]]
    output: Tensor


def find_carry(model: nn.Module, stages: StageMap, batches: Sequence[Batch], output: Callable[[Any], Tensor]) -> Carry:
    """Finds what must travel between the stages of a model.

    Args:
        model: With storage and random values, small, of the class and with the layers of the one that is meant. It has
            not run before.
        stages: How it is cut.
        batches: Arguments for its forward; what is in none of them (an image, a mask) is not looked at.
        output: Takes from what the model returns what counts.

    Raises:
        UnsupportedError: The stages cannot be made to compute what the model does.
    """
    kinds: dict[Kind, list[Batch]] = {}
    for batch in batches:
        kinds.setdefault(frozenset(batch), []).append(batch)
    apart = [_shared_copy(model) for _ in kinds]  # as for `fresh` in `_find`
    try:
        return _find(model, stages, batches, output)
    except UnsupportedError:
        if len(kinds) == 1:
            raise
    found = {kind: _find(each, stages, those, output) for each, (kind, those) in zip(apart, kinds.items(), strict=True)}
    of_kind = {kind: each.slots for kind, each in found.items()}
    slots = tuple(tuple(dict.fromkeys(chain(*those))) for those in zip(*of_kind.values(), strict=True))
    return Carry(slots, dict(ChainMap(*(dict(each.forms) for each in found.values()))), of_kind)


def _find(model: nn.Module, stages: StageMap, batches: Sequence[Batch], output: Callable[[Any], Tensor]) -> Carry:
    """One set of slots for all batches."""
    name = type(model).__name__
    with torch.no_grad():
        forms: dict[str, Form] = {}
        fresh = _shared_copy(model)  # the model may keep what it computed in attributes, which a stage must not find
        recorded = [_record(model, stages, batch, output, forms) for batch in batches]
        parts = [stage_of(fresh, stages, number, forms) for number in range(stages.pp)]
        carried: list[tuple[Slot, ...]] = [()] * stages.pp
        for number in range(stages.pp - 1, -1, -1):
            part = _StagePart(parts[number], stages, number, output, Taps(parts[number], stages))
            needed = part.needed(batches, recorded)
            passed = part.lacking(batches, recorded, needed, carried[number + 1] if number + 1 < stages.pp else ())
            carried[number] = (*needed, *passed)
            if number == 0 and carried[0]:
                raise UnsupportedError(
                    f"{name}: its first pipeline stage has not {_named(carried[0])}, which later ones need; leave out "
                    "--pp, or cut it elsewhere with --pp-split"
                )
    return Carry(tuple(carried), forms)


def stage_of(model: nn.Module, stages: StageMap, number: int, forms: Mapping[str, Form]) -> nn.Module:
    """A stage that shares the tensors of a whole model."""
    part = _shared_copy(model)
    make_stage(part, stages, number, forms)
    return part


def _shared_copy(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


def given_to(stage: int, batch: Batch) -> dict[str, Tensor]:
    """The arguments of a stage: what images and sounds are made of goes to the first, where the towers are."""
    if stage == 0 or "input_ids" not in batch:
        return dict(batch)
    return {name: value for name, value in batch.items() if not value.is_floating_point()}


def _record(
    model: nn.Module, stages: StageMap, batch: Batch, output: Callable[[Any], Tensor], forms: dict[str, Form]
) -> Recorded:
    given: dict[Call, dict[Any, Any]] = {}
    gave: dict[Call, dict[Any, Any]] = {}
    on_the_way = set(ways(stages))
    first = {name for stack in stages.stacks for name in stack.before}

    def visit(call: Call, arguments: Arguments) -> None:
        given[call] = _kept(arguments)

    def see(call: Call, found: Any) -> None:
        if call[0] not in on_the_way:
            gave[call] = _kept(found)
        if call[0] not in on_the_way | first:
            forms.setdefault(call[0], form_of(found))

    taps = Taps(model, stages)
    try:
        with taps.watching(visit, see):
            return Recorded(given, gave, output(model(**batch)).clone())
    finally:
        taps.remove()


def _kept(values: Any) -> dict[Any, Any]:
    return {steps: value.detach().clone() if isinstance(value, Tensor) else value for steps, value in leaves(values)}


@dataclass(frozen=True, slots=True)
class _StagePart:
    """A stage while it is looked at."""

    model: nn.Module
    stages: StageMap
    number: int
    output: Callable[[Any], Tensor]
    taps: Taps

    def needed(self, batches: Sequence[Batch], recorded: Sequence[Recorded]) -> tuple[Slot, ...]:
        """The places where it must be given something, and it is enough."""
        wants: dict[Slot, None] = {}
        for batch, known in zip(batches, recorded, strict=True):
            self._put_right(batch, known, wants)
        before = None
        while before != len(wants):  # one may be needed only beside another
            before = len(wants)
            for slot in list(wants):
                without = wants.keys() - {slot}
                if all(self._is_right(*each, without) for each in zip(batches, recorded, strict=True)):
                    del wants[slot]
        for each in zip(batches, recorded, strict=True):
            if not self._is_right(*each, wants.keys()):
                raise UnsupportedError(
                    f"{type(self.model).__name__}: its pipeline stage {self.number} computes something else than the "
                    "whole model even when all its layers are given the same; something travels by another way than "
                    "arguments; leave out --pp"
                )
        return tuple(wants)

    def lacking(
        self, batches: Sequence[Batch], recorded: Sequence[Recorded], needed: Sequence[Slot], later: Sequence[Slot]
    ) -> list[Slot]:
        """Of what the next stage gets, what this one has not either."""
        found: dict[Slot, None] = {}
        for batch, known in zip(batches, recorded, strict=True):

            def visit(call: Call, arguments: Arguments, known: Recorded = known) -> None:
                _inject(call, arguments, needed, known.given)
                for slot in later:
                    right = known.given[call].get(slot.steps) if call == slot[:2] else None
                    if right is not None and not is_same(get(arguments, slot.steps), right):
                        found[slot] = None

            self._run(batch, visit)
        return [slot for slot in found if slot not in needed]

    def _put_right(self, batch: Batch, known: Recorded, wants: dict[Slot, None]) -> None:
        """Adds what is not right where it is needed, and puts it right."""

        own = given_to(self.number, batch)
        withheld = [value for name, value in batch.items() if name not in own]

        def visit(call: Call, arguments: Arguments) -> None:
            if call not in known.given:
                return
            found = dict(leaves(arguments))
            for steps, right in known.given[call].items():
                if any(is_same(right, each) for each in withheld):
                    continue
                if not is_same(found.get(steps), right) and (isinstance(right, Tensor) or steps in found):
                    wants[Slot(*call, steps)] = None
                    put(arguments, steps, right)

        stubs = {name for name, module in points(self.model, self.stages).items() if isinstance(module, Stub)}
        self._run(batch, lambda call, arguments: visit(call, arguments) if call[0] not in stubs else None)

    def _is_right(self, batch: Batch, known: Recorded, slots: Any) -> bool:
        """Whether it computes what the unsplit model does, given these."""
        mine = {name for name, module in points(self.model, self.stages).items() if not isinstance(module, Stub)}
        left = {call for call in known.gave if call[0] in mine}

        def see(call: Call, found: Any) -> None:
            given = dict(leaves(found))
            if all(is_same(given.get(steps), each) for steps, each in known.gave.get(call, {}).items()):
                left.discard(call)

        try:
            output = self._run(batch, lambda call, arguments: _inject(call, arguments, slots, known.given), see)
        except UnsupportedError:
            raise
        except Exception:  # of a layer that is given NaN or None
            return False
        return not left and (self.number < self.stages.pp - 1 or is_same(output, known.output))

    def _run(self, batch: Batch, visit: Visit, see: See | None = None) -> Tensor:
        with self.taps.watching(visit, see):
            return self.output(self.model(**given_to(self.number, batch)))


def _inject(call: Call, arguments: Arguments, slots: Any, values: Mapping[Call, Mapping[Any, Any]]) -> None:
    for slot in slots:
        if slot[:2] == call:
            put(arguments, slot.steps, values[call].get(slot.steps))


def _named(slots: Sequence[Slot]) -> str:
    more = f" and {len(slots) - 3} more" if len(slots) > 3 else ""
    return f"{', '.join(map(str, slots[:3]))}{more}"
