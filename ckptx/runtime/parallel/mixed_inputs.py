"""Data ranks with inputs of different kinds: images or sounds on some of them, text alone on others.

FSDP2 gathers a layer when it is called, and reduces its gradients when they are there. All data ranks have to do both,
in one order; but a rank without images calls no tower, and would take the next thing that it calls for it.

    before      all data ranks say what they have; where that is the same, nothing else is done
                what text alone does not call is gathered on every rank, and stays
    meanwhile   no rank gathers any of it, or reduces gradients of it, whatever it calls, and how often
    after       zeros are added to its gradients, so that every rank has them; all ranks reduce them, in one order

No rank computes anything for it: the zeros are exact, and so are the gradients. What is called everywhere may have
parameters that only images reach (experts of their own): torch fills in their gradients, from 2.13 on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ckptx.errors import UnsupportedError
from ckptx.runtime.model.tiny_model import text_for
from ckptx.runtime.parallel.distributed import DATA_DIMS
from ckptx.runtime.parallel.gradients import sync_gradients

Batch = Mapping[str, Tensor | None]


class MixedInputs:
    """Lets data ranks have other kinds of inputs in the same microbatch.

        mixed = MixedInputs(model)
        for index, batch in enumerate(batches):
            with mixed.microbatch(batch, is_last=index == len(batches) - 1):
                model(**batch).loss.backward()

    Nothing happens to a model that FSDP2 does not manage. Stages of a `Pipeline` need it not: that uses it by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        """Args:
        model: As `parallelize` left it; with storage and values when the first microbatch comes.
        """
        self._model = model
        self._groups = _data_groups(model)
        self._apart: list[FSDPModule] | None = None

    @contextmanager
    def microbatch(self, batch: Batch, *, is_last: bool = True) -> Iterator[None]:
        """Around the forward and backward of one microbatch, or its forward alone; every data rank enters it.

        Where ranks differ, gradients that only some of them reach are reduced at the end of the block, in the last
        microbatch of a step and in any other. A parameter of these that no rank reaches has zeros for a gradient then.

        Args:
            batch: The arguments of the model's forward on this rank.
            is_last: As `sync_gradients` takes it, which this calls.

        Raises:
            UnsupportedError: The model does not run on text alone, by which is found what text does not call.
        """
        sync_gradients(self._model, is_last)
        if self.differ([batch]):
            if not self.is_prepared:
                with self.preparing():
                    self._model(**text_for(self._model))
            self.gather()
            self.fill(True)
            with self._held():
                yield
            if torch.is_grad_enabled():
                self.add_zeros(is_reduced=True)
            for unit in self._units():
                unit.reshard()
        else:
            yield
        if is_last:
            self.fill(False)

    def differ(self, batches: Sequence[Batch]) -> bool:
        """Whether data ranks have arguments of different names in these microbatches; each of them asks."""
        if not self._groups:
            return False
        names = [sorted(name for name, value in each.items() if value is not None) for each in batches]
        number = zlib.crc32(repr(names).encode())
        ends = torch.tensor([number, -number], device=next(self._model.parameters()).device)
        for group in self._groups:
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        return bool(ends[0] != -ends[1])

    @property
    def is_prepared(self) -> bool:
        """Whether it is known what text alone does not call."""
        return self._apart is not None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around a forward on text alone, the same on all data ranks: what it does not call may be called by some."""
        units = [each for each in self._model.modules() if isinstance(each, FSDPModule)]
        called: set[int] = set()
        handles = [each.register_forward_pre_hook(lambda unit, _: called.add(_key(unit))) for each in units]
        modes = [(each, each.training) for each in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                yield
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise UnsupportedError(
                f"{type(self._model).__name__}: fails on text alone ({said}), by which is found what data ranks "
                "without images and sounds leave out; give every data rank the same kinds of inputs"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
            for each, is_training in modes:
                each.training = is_training
        self._apart = [each for each in units if _key(each) not in called]

    def gather(self) -> None:
        """Gathers what not all data ranks may call."""
        for unit in self._apart or ():
            unit.unshard()

    def add_zeros(self, *, is_reduced: bool) -> None:
        """Adds zeros to the gradients of what not all data ranks may call, and of what is in no layer.

        Args:
            is_reduced: Reduce them now; without, they wait for a backward pass that is.
        """
        root = self._model
        assert isinstance(root, FSDPModule)
        for unit in self._units():
            unit.set_requires_gradient_sync(is_reduced, recurse=False)
            unit.set_reshard_after_backward(is_reduced, recurse=False)
        root.set_is_last_backward(is_reduced)

        def zero() -> Tensor:  # in the forward of the root, where its parameters are gathered
            own = {id(each): each for unit in self._units() for each in _own_parameters(unit) if each.requires_grad}
            return _Zero.apply(*own.values()) if own else torch.zeros(())

        with _forward_of(root, zero), torch.enable_grad():
            found = root()
            if found.requires_grad:
                found.backward()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """What not all data ranks may call stays gathered, and its gradients whole."""
        root, apart = self._model, self._apart or []
        assert isinstance(root, FSDPModule)
        for unit in self._units():
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
        for unit in apart:
            unit.set_reshard_after_forward(False, recurse=False)
        called = self._called()
        for unit in called:  # the one before it in the forward pass may be another on each rank; the root is there
            unit.set_modules_to_backward_prefetch([root])
        yield
        for unit in called:
            unit.set_modules_to_backward_prefetch([])
        for unit in apart:
            unit.set_reshard_after_forward(True, recurse=False)
        for unit in self._units():
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)

    def fill(self, is_filled: bool) -> None:
        """Whether what all data ranks call has zeros for gradients that some of them do not reach."""
        for unit in self._called() if self.is_prepared else ():
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
                unit.set_reduce_scatter_unused_params(is_filled, recurse=False)

    def _units(self) -> list[FSDPModule]:
        """What not all data ranks may call, and the root, of which they may reach other parameters."""
        return [self._model, *(self._apart or ())]

    def _called(self) -> list[FSDPModule]:
        """The other units."""
        units = self._units()
        return [each for each in self._model.modules() if isinstance(each, FSDPModule) and each not in units]


class _Zero(torch.autograd.Function):  # type: ignore[misc]
    """Zero; the gradient of every parameter is zeros, even where that is infinite."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.zeros_like, ctx.parameters))


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for a module, hooks and all."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Those that no unit inside of it has."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _key(unit: nn.Module) -> int:
    """The same for modules that are one unit."""
    return id(fully_shard.state(unit))


def _data_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of the data dims that FSDP2 has cut a model over; none for another model."""
    if not isinstance(model, FSDPModule):
        return []
    meshes = (each.device_mesh for each in model.parameters() if isinstance(each, DTensor))
    mesh = next((each for each in meshes if set(DATA_DIMS) & set(each.mesh_dim_names or ())), None)
    if mesh is None:
        return []
    return [mesh.get_group(each) for each in DATA_DIMS if each in mesh.mesh_dim_names and mesh[each].size() > 1]
