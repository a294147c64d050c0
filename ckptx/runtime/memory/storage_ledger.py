"""Records every storage of a training step: its operation, its module, and when it was allocated and freed.

The kind of a storage (an activation, a gathered parameter) is often known only later: one that outlives a forward pass
is an activation, one that is freed in it was temporary. So lifetimes are recorded here, and `timeline` classifies them
at the end.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ckptx.runtime.memory.shape_tensors import iter_tensors
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.torch_private import (
    FakeTensor,
    current_backward_id,
    get_schema,
    local_tensor,
    next_node_number,
    running_node_number,
    storage_key,
)

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered", "gradients", "optimizer"
ACTIVATIONS, PIPELINE_P2P, TEMPORARIES = "activations", "pipeline_p2p", "temporaries"
KINDS = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, PIPELINE_P2P, TEMPORARIES)

BUILD, FORWARD, BACKWARD = "build", "forward", "backward"
LOSS = "loss"  # in place of the name of a module, while the loss is computed
_META = torch.device("meta")


class StepPhase(NamedTuple):
    """A part of a step.

    Attributes:
        name: build (before the first forward pass), forward, backward, or the name that `StorageLedger.phase` got
            (clipping, optimizer).
        pass_index: Index of the forward or backward pass in the step, from 0; in other phases, that of the last forward
            pass.
        is_recompute: True if a forward pass is repeated within a backward pass.
        module: Name of the module whose forward is running, or in a backward pass the one whose forward created the
            autograd node that is running; "loss" for the loss, "" for the whole model, or if it is unknown.
    """

    name: str
    pass_index: int
    is_recompute: bool
    module: str


@dataclass(slots=True)
class StorageLifetime:
    """The lifetime of one storage, from one resize to the next.

    Attributes:
        nbytes: Size in bytes.
        operation: torch's name of the operation that allocated it; "before" for one that existed before the recording.
        shape: Shape of the first tensor on it.
        dtype: Dtype of that tensor.
        alloc_phase: Phase in which it was allocated, or first recorded if it existed before.
        free_phase: Phase in which it was freed; None while it is alive.
        label: One of `KINDS` if the kind of the storage is certain; else None.
        parameter: Name of the parameter or buffer that it holds, or whose optimizer state it holds; "" for none, or if
            it is unknown.
    """

    nbytes: int
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    alloc_phase: StepPhase
    free_phase: StepPhase | None = None
    label: str | None = None
    parameter: str = ""


class StorageEvent(NamedTuple):
    """The allocation of a storage, or its release."""

    lifetime: StorageLifetime
    is_alloc: bool


class StorageLedger:
    """Records the storages that operations allocate, on fake tensors or on real ones.

        ledger = StorageLedger()
        with ShapeTensors(ledger.record_operation), ledger.watch([model]):
            ...

    Attributes:
        events: All events in order.
        nbytes: Bytes that are alive now.
    """

    def __init__(self) -> None:
        self.events: list[StorageEvent] = []
        self.nbytes = 0
        self._lifetimes: dict[int, tuple[StorageLifetime, weakref.ref[Any]]] = {}  # by `storage_key`
        self._module_names: dict[int, str] = {}  # names of modules, by id
        self._parameter_shapes: dict[str, set[tuple[int, ...]]] = {}  # shapes of parameters, by module
        self._module_stack: list[str] = []
        # _node_modules[i] is the module that creates the autograd nodes from number _node_numbers[i] on, up to the
        # next number in the list, which is ascending.
        self._node_numbers: list[int] = []
        self._node_modules: list[str] = []
        self._phase_name = BUILD
        self._pass_indices = {FORWARD: -1, BACKWARD: -1}
        self._backward_id: int | None = None
        self._forced_label: str | None = None

    # ----------------------------------------------------------------------------------------------------------- phases

    @contextmanager
    def watch(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Record calls of modules of these models, and storages that are resized, within the block."""
        roots = set()
        for model in models:
            roots.add(id(model))
            for name, module in model.named_modules():
                self._module_names.setdefault(id(module), canonical_name(name))
                shapes = self._parameter_shapes.setdefault(canonical_name(name), set())
                for parameter in module.parameters(recurse=False):
                    shapes |= {tuple(parameter.shape), tuple(local_tensor(parameter).shape)}

        def enter(module: nn.Module, args: Any) -> None:
            name = self._module_names.get(id(module))
            if name is None:
                return
            if id(module) in roots and current_backward_id() is None:
                self._pass_indices[FORWARD] += 1
                self._phase_name = FORWARD
            self._module_stack.append(name)
            self._record_module()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in self._module_names and self._module_stack:
                self._module_stack.pop()
                self._record_module()

        resize = torch.UntypedStorage.resize_

        def resize_and_record(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._record_resize(storage)
            return result

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        torch.UntypedStorage.resize_ = resize_and_record
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize
            for handle in handles:
                handle.remove()

    def reset_passes(self) -> None:
        """Count forward and backward passes from 0 again, as at the beginning of a step."""
        self._pass_indices = {FORWARD: -1, BACKWARD: -1}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the part of the step that the block runs, other than a forward or backward pass."""
        previous, self._phase_name = self._phase_name, name
        try:
            yield
        finally:
            self._phase_name = previous

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Attribute the operations of the block, and their backward passes, to the loss."""
        self._module_stack.append(LOSS)
        self._record_module()
        try:
            yield
        finally:
            self._module_stack.pop()
            self._record_module()

    def _record_module(self) -> None:
        self._node_numbers.append(next_node_number())
        self._node_modules.append(self._module_stack[-1] if self._module_stack else "")

    def current_phase(self) -> StepPhase:
        """Return the current phase of the step."""
        backward_id = current_backward_id()
        if backward_id is None:
            pass_index = self._pass_indices[BACKWARD if self._phase_name == BACKWARD else FORWARD]
            return StepPhase(
                self._phase_name, max(0, pass_index), False, self._module_stack[-1] if self._module_stack else ""
            )
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            self._pass_indices[BACKWARD] += 1
            # This phase includes later work of FSDP2 and a pipeline, until the next forward pass begins.
            self._phase_name = BACKWARD
        pass_index = self._pass_indices[BACKWARD]
        if self._module_stack:
            return StepPhase(BACKWARD, pass_index, True, self._module_stack[-1])
        node_number = running_node_number()
        index = bisect.bisect_right(self._node_numbers, node_number) - 1 if node_number is not None else -1
        return StepPhase(BACKWARD, pass_index, False, self._node_modules[index] if index >= 0 else "")

    # --------------------------------------------------------------------------------------------------------- storages

    def record_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record the storages that an operation allocated, and label those of FSDP2.

        Args:
            func: Overload that `__torch_dispatch__` received.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            out: Its result.
        """
        for tensor in (out,) if isinstance(out, Tensor) else iter_tensors((out,), {}):
            if tensor.layout is torch.strided and (isinstance(tensor, FakeTensor) or tensor.device != _META):
                storage = tensor.untyped_storage()
                if storage_key(storage) not in self._lifetimes:
                    self._add(storage, tensor, get_schema(func).name)
        if func.namespace == "fsdp":
            self._record_fsdp(func, args, kwargs)

    def add_existing(self, tensors: Iterable[Tensor]) -> None:
        """Record the storages of tensors that existed before; those already recorded are skipped."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage_key(storage) not in self._lifetimes:
                self._add(storage, tensor, "before")

    def label(self, tensors: Iterable[Tensor], label: str, parameter: str = "") -> None:
        """Set the label of the storages of tensors, and their parameter; those that are not recorded are skipped."""
        for tensor in tensors:
            local = local_tensor(tensor)
            entry = self._lifetimes.get(storage_key(local.untyped_storage()))
            if entry is not None:
                entry[0].label = label
                entry[0].parameter = parameter or entry[0].parameter

    def set_size(self, tensors: Iterable[Tensor], nbytes: int) -> None:
        """Set the size of the storage of each tensor, as if it had been allocated with it; 0 excludes the storage.

        Storages that are not recorded are skipped.
        """
        for tensor in tensors:
            local = local_tensor(tensor)
            entry = self._lifetimes.get(storage_key(local.untyped_storage()))
            if entry is not None:
                self.nbytes += nbytes - entry[0].nbytes
                entry[0].nbytes = nbytes

    @contextmanager
    def label_all(self, label: str) -> Iterator[None]:
        """Label all storages that are allocated within the block."""
        previous, self._forced_label = self._forced_label, label
        try:
            yield
        finally:
            self._forced_label = previous

    def _record_fsdp(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Label the outputs of FSDP2's all-gathers, the parameters copied from them, and gradients before reduction."""
        name = get_schema(func).name
        if name in ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"):
            self.label(iter_tensors(args[1:] if name.endswith("in") else (), kwargs), GATHERED)
        elif name == "fsdp::chunk_cat":
            self.label(iter_tensors(args, {}), GRADIENTS)

    def _add(self, storage: Any, tensor: Tensor, operation: str) -> None:
        """Record a storage, and its release when the storage object is deleted; see `StorageLifetime`."""
        phase, shape, key = self.current_phase(), tuple(tensor.shape), storage_key(storage)
        lifetime = StorageLifetime(storage.nbytes(), operation, shape, tensor.dtype, phase, label=self._forced_label)
        if phase.name == BACKWARD and not phase.is_recompute and self._has_parameter_shape(phase.module, shape):
            lifetime.label = GRADIENTS
        self._lifetimes[key] = lifetime, weakref.ref(storage, lambda _: self._record_free(self._lifetimes.pop(key)[0]))
        self._record_alloc(lifetime)

    def _has_parameter_shape(self, module: str, shape: tuple[int, ...]) -> bool:
        """Return True if a module has a parameter of this shape, whole, local, or transposed."""
        shapes = self._parameter_shapes.get(module, ())
        return shape in shapes or shape[::-1] in shapes

    def _record_resize(self, storage: Any) -> None:
        """End the lifetime of a resized storage, and begin a new one with its new size, which may be 0."""
        entry = self._lifetimes.get(storage_key(storage))
        if entry is None or entry[0].nbytes == storage.nbytes():
            return
        old, reference = entry
        self._record_free(old)
        lifetime = StorageLifetime(
            storage.nbytes(),
            old.operation,
            old.shape,
            old.dtype,
            self.current_phase(),
            label=old.label,
            parameter=old.parameter,
        )
        self._lifetimes[storage_key(storage)] = lifetime, reference
        self._record_alloc(lifetime)

    def _record_alloc(self, lifetime: StorageLifetime) -> None:
        self.nbytes += lifetime.nbytes
        self.events.append(StorageEvent(lifetime, True))

    def _record_free(self, lifetime: StorageLifetime) -> None:
        lifetime.free_phase = self.current_phase()
        self.nbytes -= lifetime.nbytes
        self.events.append(StorageEvent(lifetime, False))
