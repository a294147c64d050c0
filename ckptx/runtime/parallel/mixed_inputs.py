"""Supports data ranks with inputs of different kinds: images or audio on some of them, only text on others.

FSDP2 gathers a layer when it is called, and reduces its gradients when they are ready. All data ranks have to do both
in the same order; but a rank without images does not call the vision tower, and its next collective would be matched
with another one.

    before      data ranks compare the names of their inputs; if these are equal, nothing else is done
                modules that text alone does not call are gathered on every rank, and stay gathered
    during      no rank gathers these modules or reduces their gradients, whichever of them it calls, and how often
    after       zeros are added to their gradients, so that every rank has some; all ranks reduce them in one order

No rank runs a tower on dummy inputs; adding zeros is exact, and so are the gradients. Modules that every rank calls may
have parameters that only image tokens reach, such as experts for images; from 2.13 on, torch fills in zeros for their
gradients on the other ranks.
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
from ckptx.runtime.model.tiny_model import make_text_batch
from ckptx.runtime.parallel.distributed import DATA_DIMS
from ckptx.runtime.parallel.gradients import sync_gradients

Batch = Mapping[str, Tensor | None]  # argument of the model's forward -> value; None counts as not passed


class MixedInputs:
    """Lets data ranks have different kinds of inputs in the same microbatch.

        mixed = MixedInputs(model)
        for index, batch in enumerate(batches):
            with mixed.microbatch(batch, is_last=index == len(batches) - 1):
                model(**batch).loss.backward()

    A model without FSDP2 is left unchanged. A `Pipeline` does this for its stages.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the data-parallel groups of a model.

        Args:
            model: Model from `parallelize`; it must have storage and values when the first microbatch runs.
        """
        self._model = model
        self._groups = _data_parallel_groups(model)
        self._optional_units: list[FSDPModule] | None = None  # units that text alone does not call; set by `prepare`

    @contextmanager
    def microbatch(self, batch: Batch, *, is_last: bool = True) -> Iterator[None]:
        """Wrap the forward and backward of one microbatch, or its forward alone; every data rank enters it.

        If inputs differ between ranks, gradients that only some ranks may reach are reduced at the end of the block,
        in every microbatch of a step; such a parameter that no rank reaches gets a gradient of zeros.

        Args:
            batch: Arguments of the model's forward on this rank.
            is_last: Passed to `sync_gradients`, which this calls.

        Raises:
            UnsupportedError: The model cannot run on text alone, which is how the modules that text does not call are
                found.
        """
        sync_gradients(self._model, is_last)
        if self.inputs_differ([batch]):
            if not self.is_prepared:
                with self.prepare():
                    self._model(**make_text_batch(self._model))
            self.gather()
            self.set_zero_fill(True)
            with self._keep_gathered():
                yield
            if torch.is_grad_enabled():
                self.add_zeros(reduces_gradients=True)
            for unit in self._root_and_optional_units():
                unit.reshard()
        else:
            yield
        if is_last:
            self.set_zero_fill(False)

    def inputs_differ(self, batches: Sequence[Batch]) -> bool:
        """Return True if the data ranks have different arguments; every data rank calls it.

        The names of the arguments that are not None are compared, not their values. The result is False for a model
        without FSDP2, or with one data rank.

        Args:
            batches: Microbatches of this rank, in their order.
        """
        if not self._groups:
            return False
        names = [sorted(name for name, value in each.items() if value is not None) for each in batches]
        checksum = zlib.crc32(repr(names).encode())
        bounds = torch.tensor([checksum, -checksum], device=next(self._model.parameters()).device)
        for group in self._groups:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        return bool(bounds[0] != -bounds[1])

    @property
    def is_prepared(self) -> bool:
        """True if the modules that text alone does not call are known."""
        return self._optional_units is not None

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Find the modules that text alone does not call: those that are not called within the block.

        The block runs the forward of the model on text, the same on all data ranks.

        Raises:
            UnsupportedError: The forward fails.
        """
        units = [each for each in self._model.modules() if isinstance(each, FSDPModule)]
        called_unit_keys: set[int] = set()
        handles = [
            each.register_forward_pre_hook(lambda unit, _: called_unit_keys.add(_unit_key(unit))) for each in units
        ]
        training_flags = [(each, each.training) for each in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                yield
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise UnsupportedError(
                f"{type(self._model).__name__}: cannot run on text alone ({reason}), which data-parallel ranks with "
                "different kinds of inputs require; give every data-parallel rank the same kinds of inputs"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
            for each, is_training in training_flags:
                each.training = is_training
        self._optional_units = [each for each in units if _unit_key(each) not in called_unit_keys]

    def gather(self) -> None:
        """Gather the modules that only some data ranks may call."""
        for unit in self._optional_units or ():
            unit.unshard()

    def add_zeros(self, *, reduces_gradients: bool) -> None:
        """Add zeros to the gradients of modules that only some data ranks may call, and of the root.

        Args:
            reduces_gradients: Reduce the gradients now; if False, a later backward pass does.
        """
        root = self._model
        assert isinstance(root, FSDPModule)
        for unit in self._root_and_optional_units():
            unit.set_requires_gradient_sync(reduces_gradients, recurse=False)
            unit.set_reshard_after_backward(reduces_gradients, recurse=False)
        root.set_is_last_backward(reduces_gradients)

        def forward_zero() -> Tensor:  # the forward of the root, during which its parameters are gathered
            parameters_by_id = {
                id(each): each
                for unit in self._root_and_optional_units()
                for each in _own_parameters(unit)
                if each.requires_grad
            }
            return _ZeroFunction.apply(*parameters_by_id.values()) if parameters_by_id else torch.zeros(())

        with _replace_forward(root, forward_zero), torch.enable_grad():
            output = root()
            if output.requires_grad:
                output.backward()

    @contextmanager
    def _keep_gathered(self) -> Iterator[None]:
        """Keep modules that only some data ranks may call gathered, and their gradients unreduced."""
        root, optional_units = self._model, self._optional_units or []
        assert isinstance(root, FSDPModule)
        for unit in self._root_and_optional_units():
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
        for unit in optional_units:
            unit.set_reshard_after_forward(False, recurse=False)
        common_units = self._common_units()
        for unit in common_units:  # instead of the previous unit, which may differ between ranks
            unit.set_modules_to_backward_prefetch([root])
        try:
            yield
        finally:
            for unit in common_units:
                unit.set_modules_to_backward_prefetch([])
            for unit in optional_units:
                unit.set_reshard_after_forward(True, recurse=False)
            for unit in self._root_and_optional_units():
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)

    def set_zero_fill(self, is_enabled: bool) -> None:
        """Set whether unused parameters of modules that all data ranks call get zeros for gradients."""
        for unit in self._common_units() if self.is_prepared else ():
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
                unit.set_reduce_scatter_unused_params(is_enabled, recurse=False)

    def _root_and_optional_units(self) -> list[FSDPModule]:
        """Return the FSDP2 units with parameters that only some ranks may reach: the root and the optional units."""
        return [self._model, *(self._optional_units or ())]

    def _common_units(self) -> list[FSDPModule]:
        """Return the FSDP2 units that every data rank calls, other than the root."""
        units = self._root_and_optional_units()
        return [each for each in self._model.modules() if isinstance(each, FSDPModule) and each not in units]


class _ZeroFunction(torch.autograd.Function):  # type: ignore[misc]
    """A function that returns zero; the gradient of every parameter is zeros, even if the incoming one is infinite."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.zeros_like, ctx.parameters))


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module within the block; the module's hooks still run."""
    original = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a module that do not belong to an FSDP2 unit inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _unit_key(unit: nn.Module) -> int:
    """Return a key that is equal for modules of the same FSDP2 unit."""
    return id(fully_shard.state(unit))


def _data_parallel_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups of the data dims over which FSDP2 sharded a model; empty without FSDP2."""
    if not isinstance(model, FSDPModule):
        return []
    meshes = (each.device_mesh for each in model.parameters() if isinstance(each, DTensor))
    mesh = next((each for each in meshes if set(DATA_DIMS) & set(each.mesh_dim_names or ())), None)
    if mesh is None:
        return []
    return [mesh.get_group(each) for each in DATA_DIMS if each in mesh.mesh_dim_names and mesh[each].size() > 1]
