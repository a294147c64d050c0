"""Discovers which values pipeline stages must send each other, by running a small model of the same class.

No table lists what the layers of a class need from earlier layers, so it is measured. The unsplit model runs once, and
the inputs and outputs of the layers and of the modules around them are recorded. Then each stage runs; wherever one of
these modules gets another input (NaN, None, another value) than in the unsplit model, that place is a *required slot*,
and the recorded value is injected there. A slot without which the whole stage still computes the right outputs is
dropped. The remaining slots are what a stage needs from the previous stage; values that the previous stage does not
have either must be sent to that stage, too.

State that passes between layers other than as an argument, such as an attribute that one layer writes and another
reads, is refused. `dry_run.dry_run_stages` then checks that the stages work with the values that they send each other.
"""

from __future__ import annotations

import copy
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptx.errors import UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.runtime.parallel.pipeline.boundary_slots import (
    Arguments,
    BoundarySlot,
    get_value,
    is_identical,
    iter_leaves,
    set_value,
)
from ckptx.runtime.parallel.pipeline.call_hooks import AfterCall, BeforeCall, Call, CallHooks, find_hooked_modules
from ckptx.runtime.parallel.pipeline.stage import (
    OutputStructure,
    Stub,
    describe_output,
    make_stage,
    modules_on_layer_path,
)

Batch = Mapping[str, Tensor]
BatchKind = frozenset[str]  # argument names of a batch
_CONTAINERS = (OrderedDict, dict, set, list)  # types of attributes that `_shared_copy` copies itself if they are empty


@dataclass(frozen=True, slots=True)
class StageBoundaries:
    """The values that cross each boundary between the stages of a model.

    Attributes:
        slots: For each stage, the slots whose values it receives from the previous stage; empty for the first.
        output_structures: For each layer and each module after the last layer, by name: the structure of its output.
        slots_by_kind: The slots of each stage for each kind of batch, if kinds take different paths through the layers,
            as text skips a layer that attends to images. Empty if `slots` applies to all batches.
    """

    slots: tuple[tuple[BoundarySlot, ...], ...]
    output_structures: Mapping[str, OutputStructure]
    slots_by_kind: Mapping[BatchKind, tuple[tuple[BoundarySlot, ...], ...]] = field(default_factory=dict)

    def slots_for(self, batch: Batch) -> tuple[tuple[BoundarySlot, ...], ...]:
        """Return the slots of each stage for a batch.

        Raises:
            UnsupportedError: No batch of this kind was recorded.
        """
        if not self.slots_by_kind:
            return self.slots
        slots = self.slots_by_kind.get(frozenset(batch))
        if slots is None:
            kinds = " or ".join(", ".join(sorted(each)) for each in self.slots_by_kind)
            raise UnsupportedError(
                f"pipeline stages: stage boundaries are unknown for a microbatch of {', '.join(sorted(batch))}, known "
                f"for {kinds}; let make_batches of plan_pipeline return a batch of each kind"
            )
        return slots


class BatchTrace(NamedTuple):
    """The calls and the output of the unsplit model for one batch.

    Attributes:
        call_inputs: For each call of a hooked module (see `find_hooked_modules`), every input value by its path in the
            arguments.
        call_outputs: For each call of a layer, or of a module right before or after the layers, every output value by
            its path in the output. The modules around the layers are left out: a stage that lacks their last layers
            returns NaN from them.
        output: Result of `get_output` for the output of the model.
    """

    call_inputs: dict[Call, dict[Any, Any]]
    call_outputs: dict[Call, dict[Any, Any]]
    output: Tensor


def discover_boundaries(
    model: nn.Module, stages: StageMap, batches: Sequence[Batch], get_output: Callable[[Any], Tensor]
) -> StageBoundaries:
    """Return the values that the stages of a model must send each other.

    Args:
        model: Small model of the class, with the real number of layers, storage and random values. It must not have run
            before.
        stages: Assignment of layers to stages.
        batches: Arguments for the forward, one batch per kind; inputs that no batch has (an image, a mask) are not
            covered.
        get_output: Returns the tensor that the last stage must compute as well, given the output of the model.

    Raises:
        UnsupportedError: The stages cannot compute what the model computes.
    """
    batches_by_kind: dict[BatchKind, list[Batch]] = {}
    for batch in batches:
        batches_by_kind.setdefault(frozenset(batch), []).append(batch)
    unused_copy = _shared_copy(model)  # a run may leave results in attributes, which a stage must not see
    try:
        return _discover_common_boundaries(model, unused_copy, stages, batches, get_output)
    except UnsupportedError:
        if len(batches_by_kind) == 1:
            raise
    boundaries_by_kind = {
        kind: _discover_common_boundaries(_shared_copy(unused_copy), unused_copy, stages, batches_of_kind, get_output)
        for kind, batches_of_kind in batches_by_kind.items()
    }
    slots_by_kind = {kind: each.slots for kind, each in boundaries_by_kind.items()}
    slots = tuple(
        tuple(dict.fromkeys(chain(*slots_of_stage))) for slots_of_stage in zip(*slots_by_kind.values(), strict=True)
    )
    return StageBoundaries(
        slots, dict(ChainMap(*(dict(each.output_structures) for each in boundaries_by_kind.values()))), slots_by_kind
    )


def _discover_common_boundaries(
    model: nn.Module,
    unused_copy: nn.Module,
    stages: StageMap,
    batches: Sequence[Batch],
    get_output: Callable[[Any], Tensor],
) -> StageBoundaries:
    """Return boundaries with one set of slots that works for all batches.

    Args:
        model: Model to run, which has not run before.
        unused_copy: Copy of the model to make the stages of, which never runs.
        stages: See `discover_boundaries`.
        batches: See `discover_boundaries`.
        get_output: See `discover_boundaries`.

    Raises:
        UnsupportedError: No set of slots makes the stages compute what the model computes for all batches.
    """
    name = type(model).__name__
    with torch.no_grad():
        output_structures: dict[str, OutputStructure] = {}
        traces = [_record_trace(model, stages, batch, get_output, output_structures) for batch in batches]
        stage_models = [
            make_shared_stage(unused_copy, stages, number, output_structures) for number in range(stages.count)
        ]
        slots: list[tuple[BoundarySlot, ...]] = [()] * stages.count
        for number in range(stages.count - 1, -1, -1):
            probe = _StageProbe(
                stage_models[number], stages, number, get_output, CallHooks(stage_models[number], stages)
            )
            required_slots = probe.find_required_slots(batches, traces)
            missing_slots = probe.find_missing_slots(
                batches, traces, required_slots, slots[number + 1] if number + 1 < stages.count else ()
            )
            slots[number] = (*required_slots, *missing_slots)
            if number == 0 and slots[0]:
                raise UnsupportedError(
                    f"{name}: the first pipeline stage lacks {_slot_names(slots[0])}, which later stages need; "
                    "leave out --pp, or choose another split with --pp-split"
                )
    return StageBoundaries(tuple(slots), output_structures)


def make_shared_stage(
    model: nn.Module, stages: StageMap, number: int, output_structures: Mapping[str, OutputStructure]
) -> nn.Module:
    """Return a stage that shares the tensors of a whole model."""
    stage = _shared_copy(model)
    make_stage(stage, stages, number, output_structures)
    return stage


def _shared_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model that shares its parameters and buffers."""
    copies: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    # A module has a dozen dicts for hooks, most of them empty. `deepcopy` would spend most of its time on these.
    for module in model.modules():
        for value in vars(module).values():
            if type(value) in _CONTAINERS and not value:
                copies[id(value)] = type(value)()
    return copy.deepcopy(model, copies)


def stage_arguments(stage: int, batch: Batch) -> dict[str, Tensor]:
    """Return the arguments of a stage, given those of the unsplit model.

    Stages after the first get no floating-point arguments, because they lack the towers that take images and audio. A
    batch without `input_ids`, as of an encoder-decoder for audio, is passed to every stage unchanged.
    """
    if stage == 0 or "input_ids" not in batch:
        return dict(batch)
    return {name: value for name, value in batch.items() if not value.is_floating_point()}


def _record_trace(
    model: nn.Module,
    stages: StageMap,
    batch: Batch,
    get_output: Callable[[Any], Tensor],
    output_structures: dict[str, OutputStructure],
) -> BatchTrace:
    """Run the unsplit model on a batch; add the output structures of its modules to `output_structures`."""
    call_inputs: dict[Call, dict[Any, Any]] = {}
    call_outputs: dict[Call, dict[Any, Any]] = {}
    path_modules = set(modules_on_layer_path(stages))
    modules_before = {name for stack in stages.stacks for name in stack.before}

    def before_call(call: Call, arguments: Arguments) -> None:
        call_inputs[call] = _copy_leaves(arguments)

    def after_call(call: Call, output: Any) -> None:
        if call[0] not in path_modules:
            call_outputs[call] = _copy_leaves(output)
        if call[0] not in path_modules | modules_before:
            output_structures.setdefault(call[0], describe_output(output))

    hooks = CallHooks(model, stages)
    try:
        with hooks.activate(before_call, after_call):
            return BatchTrace(call_inputs, call_outputs, get_output(model(**batch)).clone())
    finally:
        hooks.remove()


def _copy_leaves(values: Any) -> dict[Any, Any]:
    """Return copies of all values in a nested container, by path."""
    return {path: value.detach().clone() if isinstance(value, Tensor) else value for path, value in iter_leaves(values)}


@dataclass(frozen=True, slots=True)
class _StageProbe:
    """A stage that is run repeatedly to find the slots that it requires.

    Attributes:
        model: The stage, from `make_shared_stage`.
        stages: Assignment of layers to stages.
        number: Number of the stage.
        get_output: See `discover_boundaries`.
        hooks: Hooks on `model`.
    """

    model: nn.Module
    stages: StageMap
    number: int
    get_output: Callable[[Any], Tensor]
    hooks: CallHooks

    def find_required_slots(self, batches: Sequence[Batch], traces: Sequence[BatchTrace]) -> tuple[BoundarySlot, ...]:
        """Return a minimal set of slots that make the stage compute what the unsplit model does.

        Args:
            batches: Batches that the unsplit model ran.
            traces: Traces of the unsplit model, one per batch.

        Raises:
            UnsupportedError: The stage computes something else, whichever slots it gets.
        """
        required_slots: dict[BoundarySlot, None] = {}  # an ordered set
        for batch, trace in zip(batches, traces, strict=True):
            self._add_required_slots(batch, trace, required_slots)
        previous_count = None
        while previous_count != len(required_slots):  # a slot may become redundant once another is dropped
            previous_count = len(required_slots)
            for slot in list(required_slots):
                remaining_slots = required_slots.keys() - {slot}
                if all(self._matches_trace(*each, remaining_slots) for each in zip(batches, traces, strict=True)):
                    del required_slots[slot]
        for each in zip(batches, traces, strict=True):
            if not self._matches_trace(*each, required_slots.keys()):
                raise UnsupportedError(
                    f"{type(self.model).__name__}: pipeline stage {self.number} differs from the whole model even when "
                    "its layers get the same arguments; state passes between layers other than as an argument; leave "
                    "out --pp"
                )
        return tuple(required_slots)

    def find_missing_slots(
        self,
        batches: Sequence[Batch],
        traces: Sequence[BatchTrace],
        required_slots: Sequence[BoundarySlot],
        next_slots: Sequence[BoundarySlot],
    ) -> list[BoundarySlot]:
        """Return the slots of the next stage whose values this stage does not have either, and must receive as well.

        Args:
            batches: Batches that the unsplit model ran.
            traces: Traces of the unsplit model, one per batch.
            required_slots: Slots that this stage requires for its own layers.
            next_slots: Slots of the next stage; empty for the last stage.

        Returns:
            The slots, without those that are required anyway.
        """
        missing_slots: dict[BoundarySlot, None] = {}  # an ordered set
        for batch, trace in zip(batches, traces, strict=True):

            def before_call(call: Call, arguments: Arguments, trace: BatchTrace = trace) -> None:
                _inject(call, arguments, required_slots, trace.call_inputs)
                for slot in next_slots:
                    expected = trace.call_inputs[call].get(slot.path) if call == slot[:2] else None
                    if expected is not None and not is_identical(get_value(arguments, slot.path), expected):
                        missing_slots[slot] = None

            self._run(batch, before_call)
        return [slot for slot in missing_slots if slot not in required_slots]

    def _add_required_slots(self, batch: Batch, trace: BatchTrace, required_slots: dict[BoundarySlot, None]) -> None:
        """Run the stage, and add each slot whose value differs from the trace to `required_slots`.

        The value of the trace is injected there, so that later calls get the right inputs. Inputs of stubs are not
        compared, nor are arguments of the model that only the first stage gets. A recorded value that is not a tensor
        is required only if the stage passes another value in its place, not if it passes none.
        """
        own_arguments = stage_arguments(self.number, batch)
        withheld_values = [value for name, value in batch.items() if name not in own_arguments]

        def before_call(call: Call, arguments: Arguments) -> None:
            if call not in trace.call_inputs:
                return
            values_by_path = dict(iter_leaves(arguments))
            for path, expected in trace.call_inputs[call].items():
                if any(is_identical(expected, each) for each in withheld_values):
                    continue
                is_equal = is_identical(values_by_path.get(path), expected)
                if not is_equal and (isinstance(expected, Tensor) or path in values_by_path):
                    required_slots[BoundarySlot(*call, path)] = None
                    set_value(arguments, path, expected)

        stubs = {
            name for name, module in find_hooked_modules(self.model, self.stages).items() if isinstance(module, Stub)
        }
        self._run(batch, lambda call, arguments: before_call(call, arguments) if call[0] not in stubs else None)

    def _matches_trace(self, batch: Batch, trace: BatchTrace, slots: Any) -> bool:
        """Return True if the stage computes what the unsplit model does, given the recorded values of these slots.

        The outputs of all calls of its own modules must be identical, and on the last stage the output of the model.

        Args:
            batch: Batch that the unsplit model ran.
            trace: Trace of the unsplit model for this batch.
            slots: Slots to fill, a collection of `BoundarySlot`.

        Raises:
            UnsupportedError: A stub cannot replace its module.
        """
        own_modules = {
            name
            for name, module in find_hooked_modules(self.model, self.stages).items()
            if not isinstance(module, Stub)
        }
        pending_calls = {call for call in trace.call_outputs if call[0] in own_modules}  # no identical output yet

        def after_call(call: Call, call_output: Any) -> None:
            values_by_path = dict(iter_leaves(call_output))
            expected_values = trace.call_outputs.get(call, {})
            if all(is_identical(values_by_path.get(path), expected) for path, expected in expected_values.items()):
                pending_calls.discard(call)

        try:
            output = self._run(
                batch, lambda call, arguments: _inject(call, arguments, slots, trace.call_inputs), after_call
            )
        except UnsupportedError:
            raise
        except Exception:  # a layer may raise anything on NaN or None
            return False
        return not pending_calls and (self.number < self.stages.count - 1 or is_identical(output, trace.output))

    def _run(self, batch: Batch, before_call: BeforeCall, after_call: AfterCall | None = None) -> Tensor:
        with self.hooks.activate(before_call, after_call):
            return self.get_output(self.model(**stage_arguments(self.number, batch)))


def _inject(call: Call, arguments: Arguments, slots: Any, values: Mapping[Call, Mapping[Any, Any]]) -> None:
    """Set the slots of a call in its arguments to the values that `BatchTrace.call_inputs` recorded for them."""
    for slot in slots:
        if slot[:2] == call:
            set_value(arguments, slot.path, values[call].get(slot.path))


def _slot_names(slots: Sequence[BoundarySlot]) -> str:
    more = f" and {len(slots) - 3} more" if len(slots) > 3 else ""
    return f"{', '.join(map(str, slots[:3]))}{more}"
