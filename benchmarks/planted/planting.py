"""Inject defects into the parallel model: find modules and wrap their forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.planted.defect import Built, Defect
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks
from ckptx.runtime.parity import side

Forward = Callable[..., Any]


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    """Build the checkpoint's model in `verify_run` with a defect in this block; the reference is built without it."""
    if defect.runtime is None:
        yield
        return
    stock, plant = side.parallelize, defect.runtime

    def parallelize(model: nn.Module, mesh: Any, *args: Any, **kwargs: Any) -> Any:
        done = stock(model, mesh, *args, **kwargs)
        plant(Built(model, done.layout, TpRanks.of(mesh["tp"])))
        return done

    side.parallelize = parallelize
    try:
        yield
    finally:
        side.parallelize = stock


# ----------------------------------------------------------------------------------------------- find and wrap modules


def module_of(built: Built, end: str) -> nn.Module:
    """Return the first module whose name ends with `end`; a wrapped module has the name of its wrapper."""
    return next(module for name, module in built.model.named_modules() if canonical_name(name).endswith(end))


def modules_of(built: Built, *ends: str) -> list[nn.Module]:
    """Return all modules whose names end with one of `ends`.

    Raises:
        KeyError: If there is none.
    """
    found = [module for name, module in built.model.named_modules() if name.endswith(ends)]
    if not found:
        raise KeyError(ends)
    return found


def cut_linears(built: Built, dim: int, index: int | None) -> list[nn.Module]:
    """Return linear modules of layers with weights sharded along `dim`: 0 is column-parallel, 1 is row-parallel.

    Args:
        built: The parallel model.
        dim: Sharded dimension.
        index: Index of the module to return; None for all.
    """
    assert built.layout is not None
    found = []
    for name, module in built.model.named_modules():
        placement = built.layout.placements.get(f"{name}.weight")
        if isinstance(module, nn.Linear) and ".layers." in name and placement is not None and placement.dim == dim:
            found.append(module)
    return found if index is None else [found[index]]


def norms_of(built: Built, index: int | None) -> list[nn.Module]:
    """Return the norms of layers, except query and key norms; only the one at `index` unless it is None."""
    found = [
        module
        for name, module in built.model.named_modules()
        if ".layers." in name and name.endswith("layernorm") and "Norm" in type(module).__name__
    ]
    return found if index is None else [found[index]]


def around(module: nn.Module, make: Callable[[Forward], Forward]) -> None:
    """Replace the forward pass of a module by `make(forward)`."""
    module.forward = make(module.forward)


def entering(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first input of a module."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if args:
                return stock(change(args[0]), *args[1:], **kwargs)
            first, *_ = kwargs
            return stock(**{**kwargs, first: change(kwargs[first])})

        return replaced

    around(module, make)


def leaving(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first output of a module."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            found = stock(*args, **kwargs)
            return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

        return replaced

    around(module, make)


def called_with(module: nn.Module, change: Any) -> None:
    """Replace the keyword arguments of a module by `change(kwargs)`."""
    around(module, lambda stock: lambda *args, **kwargs: stock(*args, **change(kwargs)))


def given(module: nn.Module, **changes: Any) -> None:
    """Change single keyword arguments of a module, each with its own function."""
    called_with(module, lambda named: {**named, **{key: change(named[key]) for key, change in changes.items()}})


class _WithGradient(torch.autograd.Function):
    """An identity that multiplies the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def with_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor unchanged, and multiply its gradient by `factor`."""
    found: torch.Tensor = _WithGradient.apply(x, factor)
    return found
