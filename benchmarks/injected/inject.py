"""Inject defects into the parallel model: find modules and wrap their forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.injected.defect import Defect, InjectionTarget
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks
from ckptx.runtime.parity import model_loaders

Forward = Callable[..., Any]


@contextmanager
def inject_defect(defect: Defect) -> Iterator[None]:
    """Build the checkpoint's model in `verify_run` with a defect in this block; the reference is built without it."""
    if defect.runtime_injection is None:
        yield
        return
    stock, inject = model_loaders.parallelize, defect.runtime_injection

    def parallelize(model: nn.Module, mesh: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(model, mesh, *args, **kwargs)
        inject(InjectionTarget(model, result.layout, TpRanks.from_mesh(mesh["tp"])))
        return result

    model_loaders.parallelize = parallelize
    try:
        yield
    finally:
        model_loaders.parallelize = stock


# ----------------------------------------------------------------------------------------------- find and wrap modules


def find_module(target: InjectionTarget, end: str) -> nn.Module:
    """Return the first module whose name ends with `end`; a wrapped module has the name of its wrapper.

    Raises:
        StopIteration: If there is none.
    """
    return next(module for name, module in target.model.named_modules() if canonical_name(name).endswith(end))


def find_modules(target: InjectionTarget, *ends: str) -> list[nn.Module]:
    """Return all modules whose names end with one of `ends`.

    Raises:
        KeyError: If there is none.
    """
    found = [module for name, module in target.model.named_modules() if name.endswith(ends)]
    if not found:
        raise KeyError(ends)
    return found


def sharded_linears(target: InjectionTarget, dim: int, index: int | None) -> list[nn.Module]:
    """Return linear modules of layers with weights sharded along `dim`: 0 is column-parallel, 1 is row-parallel.

    Args:
        target: The parallel model.
        dim: Sharded dimension.
        index: Index of the module to return; None for all.
    """
    assert target.layout is not None
    found = []
    for name, module in target.model.named_modules():
        placement = target.layout.placements.get(f"{name}.weight")
        if isinstance(module, nn.Linear) and ".layers." in name and placement is not None and placement.dim == dim:
            found.append(module)
    return found if index is None else [found[index]]


def find_norms(target: InjectionTarget, index: int | None) -> list[nn.Module]:
    """Return the norms of layers, except query and key norms; only the one at `index` unless it is None."""
    found = [
        module
        for name, module in target.model.named_modules()
        if ".layers." in name and name.endswith("layernorm") and "Norm" in type(module).__name__
    ]
    return found if index is None else [found[index]]


def wrap_forward(module: nn.Module, make: Callable[[Forward], Forward]) -> None:
    """Replace the forward pass of a module by `make(forward)`."""
    module.forward = make(module.forward)


def change_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first input of a module."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if args:
                return stock(change(args[0]), *args[1:], **kwargs)
            first, *_ = kwargs
            return stock(**{**kwargs, first: change(kwargs[first])})

        return replaced

    wrap_forward(module, make)


def change_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first output of a module."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            found = stock(*args, **kwargs)
            return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

        return replaced

    wrap_forward(module, make)


def change_kwargs(module: nn.Module, change: Any) -> None:
    """Replace the keyword arguments of a module by `change(kwargs)`."""
    wrap_forward(module, lambda stock: lambda *args, **kwargs: stock(*args, **change(kwargs)))


def change_arguments(module: nn.Module, **changes: Any) -> None:
    """Change single keyword arguments of a module, each with its own function."""
    change_kwargs(module, lambda kwargs: {**kwargs, **{key: change(kwargs[key]) for key, change in changes.items()}})


class _ScaledGradient(torch.autograd.Function):
    """An identity that multiplies the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor unchanged, and multiply its gradient by `factor`."""
    found: torch.Tensor = _ScaledGradient.apply(x, factor)
    return found
