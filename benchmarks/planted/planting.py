"""How a defect comes into the parallel model: finding modules, and putting other forward passes in front of theirs."""

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
    """The checkpoint's side of `verify_run` is built with the defect; the reference is not."""
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


# --------------------------------------------------------------------------------------------------- finding, replacing


def module_of(built: Built, end: str) -> nn.Module:
    """The first module whose name ends like this; what is wrapped has the name of its wrapper."""
    return next(module for name, module in built.model.named_modules() if canonical_name(name).endswith(end))


def modules_of(built: Built, *ends: str) -> list[nn.Module]:
    """All modules whose names end like one of these.

    Raises:
        KeyError: There is none.
    """
    found = [module for name, module in built.model.named_modules() if name.endswith(ends)]
    if not found:
        raise KeyError(ends)
    return found


def cut_linears(built: Built, dim: int, index: int | None) -> list[nn.Module]:
    """Linears in layers whose weight is cut along a dim: 0 is column-parallel, 1 is row-parallel."""
    assert built.layout is not None
    found = []
    for name, module in built.model.named_modules():
        placement = built.layout.placements.get(f"{name}.weight")
        if isinstance(module, nn.Linear) and ".layers." in name and placement is not None and placement.dim == dim:
            found.append(module)
    return found if index is None else [found[index]]


def norms_of(built: Built, index: int | None) -> list[nn.Module]:
    """Norms in layers, those of queries and keys left out."""
    found = [
        module
        for name, module in built.model.named_modules()
        if ".layers." in name and name.endswith("layernorm") and "Norm" in type(module).__name__
    ]
    return found if index is None else [found[index]]


def around(module: nn.Module, make: Callable[[Forward], Forward]) -> None:
    """Another forward pass, made from the one that the module has."""
    module.forward = make(module.forward)


def entering(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The first tensor that a module takes is another one."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if args:
                return stock(change(args[0]), *args[1:], **kwargs)
            first, *_ = kwargs
            return stock(**{**kwargs, first: change(kwargs[first])})

        return replaced

    around(module, make)


def leaving(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The first tensor that a module gives is another one."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            found = stock(*args, **kwargs)
            return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

        return replaced

    around(module, make)


def called_with(module: nn.Module, change: Any) -> None:
    """A module is called with other named arguments; `change` makes them from those there are."""
    around(module, lambda stock: lambda *args, **kwargs: stock(*args, **change(kwargs)))


def given(module: nn.Module, **changes: Any) -> None:
    """A module is called with other named arguments: each is made from the one there is."""
    called_with(module, lambda named: {**named, **{key: change(named[key]) for key, change in changes.items()}})


class _WithGradient(torch.autograd.Function):
    """A tensor whose gradient is multiplied on its way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def with_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """The same tensor; its gradient is multiplied."""
    found: torch.Tensor = _WithGradient.apply(x, factor)
    return found
