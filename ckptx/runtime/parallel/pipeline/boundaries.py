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
from ckptx.runtime.parallel.pipeline.boundary_slots import Arguments, BoundarySlot, get, is_same, leaves, put
from ckptx.runtime.parallel.pipeline.call_hooks import AfterCall, BeforeCall, Call, CallHooks, hook_points
from ckptx.runtime.parallel.pipeline.stage import Form, Stub, form_of, make_stage, modules_on_the_path

Batch = Mapping[str, Tensor]
Kind = frozenset[str]  # the names of the arguments of a batch


@dataclass(frozen=True, slots=True)
class StageBoundaries:
    """What is known of a class that is cut into stages.

    Attributes:
        slots: Of each stage, what it gets from the one before it; nothing for the first.
        forms: What its layers, and modules after the last of them, answer.
        slots_by_kind: The slots of each kind of batch, where kinds take other ways through the layers, as text
            goes by one that looks at images. Empty where all slots are for all.
    """

    slots: tuple[tuple[BoundarySlot, ...], ...]
    forms: Mapping[str, Form]
    slots_by_kind: Mapping[Kind, tuple[tuple[BoundarySlot, ...], ...]] = field(default_factory=dict)

    def slots_for(self, batch: Batch) -> tuple[tuple[BoundarySlot, ...], ...]:
        """The slots of each stage for a batch.

        Raises:
            UnsupportedError: Nothing is known of its kind.
        """
        if not self.slots_by_kind:
            return self.slots
        found = self.slots_by_kind.get(frozenset(batch))
        if found is None:
            kinds = " or ".join(", ".join(sorted(each)) for each in self.slots_by_kind)
            raise UnsupportedError(
                f"pipeline stages: found a microbatch of {', '.join(sorted(batch))}, needed one of {kinds}, of which "
                "it is known what travels; show discover_boundaries one of each kind"
            )
        return found


class BatchTrace(NamedTuple):
    """What the unsplit model did with one batch.

    Attributes:
        given: Of each call, every value it is given.
        gave: Of each call of a layer and of what is around them, every value it gives.
        output: Of the model.
    """

    call_inputs: dict[Call, dict[Any, Any]]
    call_outputs: dict[Call, dict[Any, Any]]
    output: Tensor


def discover_boundaries(
    model: nn.Module, stages: StageMap, batches: Sequence[Batch], output: Callable[[Any], Tensor]
) -> StageBoundaries:
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
    slots_by_kind = {kind: each.slots for kind, each in found.items()}
    slots = tuple(tuple(dict.fromkeys(chain(*those))) for those in zip(*slots_by_kind.values(), strict=True))
    return StageBoundaries(slots, dict(ChainMap(*(dict(each.forms) for each in found.values()))), slots_by_kind)


def _find(
    model: nn.Module, stages: StageMap, batches: Sequence[Batch], output: Callable[[Any], Tensor]
) -> StageBoundaries:
    """One set of slots for all batches."""
    name = type(model).__name__
    with torch.no_grad():
        forms: dict[str, Form] = {}
        fresh = _shared_copy(model)  # the model may keep what it computed in attributes, which a stage must not find
        recorded = [_record(model, stages, batch, output, forms) for batch in batches]
        parts = [stage_of(fresh, stages, number, forms) for number in range(stages.pp)]
        carried: list[tuple[BoundarySlot, ...]] = [()] * stages.pp
        for number in range(stages.pp - 1, -1, -1):
            part = _StageProbe(parts[number], stages, number, output, CallHooks(parts[number], stages))
            needed = part.required_slots(batches, recorded)
            passed = part.missing_slots(
                batches, recorded, needed, carried[number + 1] if number + 1 < stages.pp else ()
            )
            carried[number] = (*needed, *passed)
            if number == 0 and carried[0]:
                raise UnsupportedError(
                    f"{name}: its first pipeline stage has not {_named(carried[0])}, which later ones need; leave out "
                    "--pp, or cut it elsewhere with --pp-split"
                )
    return StageBoundaries(tuple(carried), forms)


def stage_of(model: nn.Module, stages: StageMap, number: int, forms: Mapping[str, Form]) -> nn.Module:
    """A stage that shares the tensors of a whole model."""
    part = _shared_copy(model)
    make_stage(part, stages, number, forms)
    return part


def _shared_copy(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


def stage_arguments(stage: int, batch: Batch) -> dict[str, Tensor]:
    """The arguments of a stage: what images and sounds are made of goes to the first, where the towers are."""
    if stage == 0 or "input_ids" not in batch:
        return dict(batch)
    return {name: value for name, value in batch.items() if not value.is_floating_point()}


def _record(
    model: nn.Module, stages: StageMap, batch: Batch, output: Callable[[Any], Tensor], forms: dict[str, Form]
) -> BatchTrace:
    given: dict[Call, dict[Any, Any]] = {}
    gave: dict[Call, dict[Any, Any]] = {}
    on_the_way = set(modules_on_the_path(stages))
    first = {name for stack in stages.stacks for name in stack.before}

    def before(call: Call, arguments: Arguments) -> None:
        given[call] = _kept(arguments)

    def after(call: Call, found: Any) -> None:
        if call[0] not in on_the_way:
            gave[call] = _kept(found)
        if call[0] not in on_the_way | first:
            forms.setdefault(call[0], form_of(found))

    hooks = CallHooks(model, stages)
    try:
        with hooks.active(before, after):
            return BatchTrace(given, gave, output(model(**batch)).clone())
    finally:
        hooks.remove()


def _kept(values: Any) -> dict[Any, Any]:
    return {steps: value.detach().clone() if isinstance(value, Tensor) else value for steps, value in leaves(values)}


@dataclass(frozen=True, slots=True)
class _StageProbe:
    """A stage while it is looked at."""

    model: nn.Module
    stages: StageMap
    number: int
    output: Callable[[Any], Tensor]
    hooks: CallHooks

    def required_slots(self, batches: Sequence[Batch], recorded: Sequence[BatchTrace]) -> tuple[BoundarySlot, ...]:
        """The places where it must be given something, and it is enough."""
        required: dict[BoundarySlot, None] = {}
        for batch, known in zip(batches, recorded, strict=True):
            self._inject_missing(batch, known, required)
        before = None
        while before != len(required):  # one may be needed only beside another
            before = len(required)
            for slot in list(required):
                without = required.keys() - {slot}
                if all(self._matches_trace(*each, without) for each in zip(batches, recorded, strict=True)):
                    del required[slot]
        for each in zip(batches, recorded, strict=True):
            if not self._matches_trace(*each, required.keys()):
                raise UnsupportedError(
                    f"{type(self.model).__name__}: its pipeline stage {self.number} computes something else than the "
                    "whole model even when all its layers are given the same; something travels by another way than "
                    "arguments; leave out --pp"
                )
        return tuple(required)

    def missing_slots(
        self,
        batches: Sequence[Batch],
        recorded: Sequence[BatchTrace],
        needed: Sequence[BoundarySlot],
        later: Sequence[BoundarySlot],
    ) -> list[BoundarySlot]:
        """Of what the next stage gets, what this one has not either."""
        found: dict[BoundarySlot, None] = {}
        for batch, known in zip(batches, recorded, strict=True):

            def before(call: Call, arguments: Arguments, known: BatchTrace = known) -> None:
                _inject(call, arguments, needed, known.call_inputs)
                for slot in later:
                    right = known.call_inputs[call].get(slot.steps) if call == slot[:2] else None
                    if right is not None and not is_same(get(arguments, slot.steps), right):
                        found[slot] = None

            self._run(batch, before)
        return [slot for slot in found if slot not in needed]

    def _inject_missing(self, batch: Batch, known: BatchTrace, required: dict[BoundarySlot, None]) -> None:
        """Adds what is not right where it is needed, and puts it right."""

        own = stage_arguments(self.number, batch)
        withheld = [value for name, value in batch.items() if name not in own]

        def before(call: Call, arguments: Arguments) -> None:
            if call not in known.call_inputs:
                return
            found = dict(leaves(arguments))
            for steps, right in known.call_inputs[call].items():
                if any(is_same(right, each) for each in withheld):
                    continue
                if not is_same(found.get(steps), right) and (isinstance(right, Tensor) or steps in found):
                    required[BoundarySlot(*call, steps)] = None
                    put(arguments, steps, right)

        stubs = {name for name, module in hook_points(self.model, self.stages).items() if isinstance(module, Stub)}
        self._run(batch, lambda call, arguments: before(call, arguments) if call[0] not in stubs else None)

    def _matches_trace(self, batch: Batch, known: BatchTrace, slots: Any) -> bool:
        """Whether it computes what the unsplit model does, given these."""
        mine = {name for name, module in hook_points(self.model, self.stages).items() if not isinstance(module, Stub)}
        left = {call for call in known.call_outputs if call[0] in mine}

        def after(call: Call, found: Any) -> None:
            given = dict(leaves(found))
            if all(is_same(given.get(steps), each) for steps, each in known.call_outputs.get(call, {}).items()):
                left.discard(call)

        try:
            output = self._run(batch, lambda call, arguments: _inject(call, arguments, slots, known.call_inputs), after)
        except UnsupportedError:
            raise
        except Exception:  # of a layer that is given NaN or None
            return False
        return not left and (self.number < self.stages.pp - 1 or is_same(output, known.output))

    def _run(self, batch: Batch, before: BeforeCall, after: AfterCall | None = None) -> Tensor:
        with self.hooks.active(before, after):
            return self.output(self.model(**stage_arguments(self.number, batch)))


def _inject(call: Call, arguments: Arguments, slots: Any, values: Mapping[Call, Mapping[Any, Any]]) -> None:
    for slot in slots:
        if slot[:2] == call:
            put(arguments, slot.steps, values[call].get(slot.steps))


def _named(slots: Sequence[BoundarySlot]) -> str:
    more = f" and {len(slots) - 3} more" if len(slots) > 3 else ""
    return f"{', '.join(map(str, slots[:3]))}{more}"
