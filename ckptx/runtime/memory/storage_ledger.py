"""Records every storage of a training step: its operation, its module, and when it was made and freed.

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

from ckptx.runtime.memory.shape_tensors import tensors_in
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.torch_private import (
    FakeTensor,
    backward_pass,
    local_tensor,
    next_node_number,
    running_node_number,
    schema_of,
    storage_key,
)

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered", "gradients", "optimizer"
ACTIVATIONS, CARRIED, TEMPORARIES = "activations", "carried", "temporaries"
KINDS = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, CARRIED, TEMPORARIES)

BUILD, FORWARD, BACKWARD = "build", "forward", "backward"
_META = torch.device("meta")


class StepPhase(NamedTuple):
    """A part of a step.

    Attributes:
        part: forward, backward, or the name that `StorageLedger.during` got (clipping, optimizer).
        turn: Index of the forward or backward pass in the step, from 0.
        is_again: True if something is recomputed in a backward pass.
        module: Name of the module that is running; "" for none.
    """

    part: str
    turn: int
    is_again: bool
    module: str


@dataclass(slots=True)
class StorageLifetime:
    """The lifetime of one storage, from one resize to the next.

    Attributes:
        nbytes: Size in bytes.
        op: torch's name of the operation that made it.
        shape: Shape of the first tensor on it.
        dtype: Dtype of that tensor.
        born: Phase in which it was made.
        died: Phase in which it was freed; None while it is alive.
        label: Kind of the storage, if it is certain; else None.
    """

    nbytes: int
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    born: StepPhase
    died: StepPhase | None = None
    label: str | None = None


class Event(NamedTuple):
    """The birth or death of a storage."""

    life: StorageLifetime
    is_birth: bool


class StorageLedger:
    """Records the storages of the operations that `ShapeTensors` runs.

        ledger = StorageLedger()
        with ShapeTensors(ledger.see), ledger.watching([model]):
            ...

    Attributes:
        events: All events in order.
        nbytes: Bytes that are alive now.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.nbytes = 0
        self._lives: dict[int, tuple[StorageLifetime, weakref.ref[Any]]] = {}  # by storage
        self._names: dict[int, str] = {}  # names of modules, by id
        self._shapes: dict[str, set[tuple[int, ...]]] = {}  # shapes of parameters, by module
        self._stack: list[str] = []
        self._numbers: list[int] = []  # first autograd node of each call, parallel to `_modules`
        self._modules: list[str] = []
        self._part = BUILD
        self._turns = {FORWARD: -1, BACKWARD: -1}
        self._task: int | None = None
        self._forced: str | None = None

    # ------------------------------------------------------------------------------------------------------ when, where

    @contextmanager
    def watch(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Record calls of modules of these models, and storages that are resized, within the block."""
        roots = set()
        for model in models:
            roots.add(id(model))
            for name, module in model.named_modules():
                self._names.setdefault(id(module), canonical_name(name))
                shapes = self._shapes.setdefault(canonical_name(name), set())
                for parameter in module.parameters(recurse=False):
                    shapes |= {tuple(parameter.shape), tuple(local_tensor(parameter).shape)}

        def enter(module: nn.Module, args: Any) -> None:
            name = self._names.get(id(module))
            if name is None:
                return
            if id(module) in roots and backward_pass() is None:
                self._turns[FORWARD] += 1
                self._part = FORWARD
            self._stack.append(name)
            self._record_module()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in self._names and self._stack:
                self._stack.pop()
                self._record_module()

        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            self._record_resize(storage)
            return found

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        torch.UntypedStorage.resize_ = resized
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """Count passes from 0 again."""
        self._turns = {FORWARD: -1, BACKWARD: -1}

    @contextmanager
    def phase(self, part: str) -> Iterator[None]:
        """Name the part of the step that the block runs, other than a forward or backward pass."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def _record_module(self) -> None:
        self._numbers.append(next_node_number())
        self._modules.append(self._stack[-1] if self._stack else "")

    def current_phase(self) -> StepPhase:
        """Return the current phase of the step."""
        task = backward_pass()
        if task is None:
            turn = self._turns[BACKWARD if self._part == BACKWARD else FORWARD]
            return StepPhase(self._part, max(0, turn), False, self._stack[-1] if self._stack else "")
        if task != self._task:
            self._task = task
            self._turns[BACKWARD] += 1
            self._part = BACKWARD  # includes later work of FSDP2 and a pipeline, until the next forward pass begins
        turn = self._turns[BACKWARD]
        if self._stack:
            return StepPhase(BACKWARD, turn, True, self._stack[-1])
        node = running_node_number()
        at = bisect.bisect_right(self._numbers, node) - 1 if node is not None else -1
        return StepPhase(BACKWARD, turn, False, self._modules[at] if at >= 0 else "")

    # ------------------------------------------------------------------------------------------------------------- what

    def record_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record an operation and its result."""
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in((out,), {}):
            if tensor.layout is torch.strided and (isinstance(tensor, FakeTensor) or tensor.device != _META):
                storage = tensor.untyped_storage()
                if storage_key(storage) not in self._lives:
                    self._add(storage, tensor, schema_of(func).name)
        if func.namespace == "fsdp":
            self._record_fsdp(func, args, kwargs)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Record tensors that existed before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage_key(storage) not in self._lives:
                self._add(storage, tensor, "before")

    def label(self, tensors: Iterable[Tensor], label: str) -> None:
        """Set the label of tensors that are alive."""
        for tensor in tensors:
            local = local_tensor(tensor)
            known = self._lives.get(storage_key(local.untyped_storage()))
            if known is not None:
                known[0].label = label

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Treat tensors that are alive as if they did not exist: from their birth on they take no bytes."""
        for tensor in tensors:
            local = local_tensor(tensor)
            known = self._lives.get(storage_key(local.untyped_storage()))
            if known is not None:
                self.nbytes -= known[0].nbytes
                known[0].nbytes = 0

    @contextmanager
    def label_all(self, label: str) -> Iterator[None]:
        """Label all storages that are made within the block."""
        before, self._forced = self._forced, label
        try:
            yield
        finally:
            self._forced = before

    def _record_fsdp(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Label the tensors that operations of FSDP2 read and write."""
        name = schema_of(func).name
        if name in ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"):
            self.label(tensors_in(args[1:] if name.endswith("in") else (), kwargs), GATHERED)
        elif name == "fsdp::chunk_cat":
            self.label(tensors_in(args, {}), GRADIENTS)

    def _add(self, storage: Any, tensor: Tensor, op: str) -> None:
        born, shape, key = self.current_phase(), tuple(tensor.shape), storage_key(storage)
        life = StorageLifetime(storage.nbytes(), op, shape, tensor.dtype, born, label=self._forced)
        if born.part == BACKWARD and not born.is_again and self._is_of_parameter(born.module, shape):
            life.label = GRADIENTS
        self._lives[key] = life, weakref.ref(storage, lambda _: self._record_death(self._lives.pop(key)[0]))
        self._record_birth(life)

    def _is_of_parameter(self, module: str, shape: tuple[int, ...]) -> bool:
        shapes = self._shapes.get(module, ())
        return shape in shapes or shape[::-1] in shapes

    def _record_resize(self, storage: Any) -> None:
        known = self._lives.get(storage_key(storage))
        if known is None or known[0].nbytes == storage.nbytes():
            return
        old, reference = known
        self._record_death(old)
        life = StorageLifetime(storage.nbytes(), old.op, old.shape, old.dtype, self.current_phase(), label=old.label)
        self._lives[storage_key(storage)] = life, reference
        self._record_birth(life)

    def _record_birth(self, life: StorageLifetime) -> None:
        self.nbytes += life.nbytes
        self.events.append(Event(life, True))

    def _record_death(self, life: StorageLifetime) -> None:
        life.died = self.current_phase()
        self.nbytes -= life.nbytes
        self.events.append(Event(life, False))
