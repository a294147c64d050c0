"""What each tensor parallel style does to the forward pass of a module whose parameters are cut.

Each function puts a forward of its own in front of the module's. It reads the parameters when it runs, so that FSDP may
exchange them; and where they are whole at that moment (gathered by a module around it), it steps aside.

Legend: B batch, S sequence, I and O input and output features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functions
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ckptx.catalog.region import Region
from ckptx.layout.placement import ceil_chunks
from ckptx.runtime.parallel.shards import local_of
from ckptx.runtime.parallel.tensor_parallel.collectives import (
    TpRanks,
    copy_in,
    gather,
    scatter_sum,
    split,
    sum_out,
    whole_parameter,
)  # fmt: skip

_TOKENS, _SEQUENCE = 0, 1  # dims of [B * S, I] and of [B, S, I]
EXPERTS = ("moe_tp_experts", "all_reduce", "local")  # styles of a module that holds fused experts


class TpSharding(NamedTuple):
    """How one parameter is cut: which rectangles each rank holds, one after the other along `dim`."""

    shape: tuple[int, ...]
    dim: int
    regions: tuple[tuple[Region, ...], ...]


class LocalParameter(NamedTuple):
    """A parameter that is cut, by its place in the model."""

    module: nn.Module
    name: str
    cut: TpSharding


def colwise(module: nn.Module, ranks: TpRanks, *, output: str = "sharded", on_sequence: bool = False) -> None:
    """A Linear with its output features cut.

    Args:
        module: Weight [O / tp, I].
        ranks: Who has the others.
        output: "sharded", "gathered", or "dtensor": sharded, and said so.
        on_sequence: The input was gathered along the sequence, which sums its gradient already.
    """
    stock = module.forward
    features = int(module.weight.shape[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if not isinstance(weight, DTensor):
            return stock(x)
        if not on_sequence:
            x = copy_in(x, ranks)
        y = functions.linear(x, local_of(weight), None if bias is None else _own_rows(bias, ranks))
        if output == "gathered":
            return gather(y, y.dim() - 1, features, ranks)
        return _as_dtensor(y, features, ranks) if output == "dtensor" else y

    module.forward = forward


def rowwise(module: nn.Module, ranks: TpRanks, *, splits_input: bool = False, on_sequence: bool = False) -> None:
    """A Linear with its input features cut: what the ranks compute is summed, then the bias is added once.

    Args:
        module: Weight [O, I / tp], bias [O].
        ranks: Who has the others.
        splits_input: The input is whole.
        on_sequence: The output is scattered along the sequence.
    """
    stock = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if not isinstance(weight, DTensor):
            return stock(x)
        if splits_input:
            x = split(x, x.dim() - 1, ranks)
        y = functions.linear(x, local_of(weight))
        if on_sequence:
            y = scatter_sum(y, _SEQUENCE, ranks).contiguous()
            return y if bias is None else y + copy_in(bias, ranks)
        y = sum_out(y, ranks)
        return y if bias is None else y + bias

    module.forward = forward


def embedding_rowwise(module: nn.Module, ranks: TpRanks) -> None:
    """An embedding with its vocabulary cut: a rank has zeros for the tokens of others, and all are summed.

    The module's forward may do anything linear with a row, such as scaling it.
    """
    stock = module.forward

    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = module._parameters["weight"]
        if not isinstance(weight, DTensor):
            return stock(ids, *args, **kwargs)
        begin, rows = ceil_chunks(weight.shape[0], ranks.size)[ranks.rank]
        local = local_of(weight)
        if not rows:  # still a part of the graph: every rank must run the same collectives in the backward pass
            local = local.sum(0, keepdim=True)
        is_foreign = (ids < begin) | (ids >= begin + rows)
        own_ids = (ids - begin).masked_fill(is_foreign, 0)
        padding = module.padding_idx
        is_padding_here = padding is not None and begin <= padding < begin + rows
        with swapped([(module, "weight", local)]):
            module.padding_idx = padding - begin if is_padding_here else None
            try:
                found = stock(own_ids, *args, **kwargs)
            finally:
                module.padding_idx = padding
        return sum_out(found.masked_fill(is_foreign[..., None], 0), ranks)

    module.forward = forward


def embedding_colwise(module: nn.Module, ranks: TpRanks) -> None:
    """An embedding with its vectors cut: the slices are gathered."""
    stock = module.forward

    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = module._parameters["weight"]
        if not isinstance(weight, DTensor):
            return stock(ids, *args, **kwargs)
        with swapped([(module, "weight", local_of(weight))]):
            found = stock(ids, *args, **kwargs)
        return gather(found, found.dim() - 1, weight.shape[1], ranks)

    module.forward = forward


def experts(module: nn.Module, ranks: TpRanks, *, on_sequence: bool = False) -> None:
    """Fused experts [E, O, I] with the features inside each expert cut: what the ranks compute is summed.

    Everything that enters, the routing weights too, gets partial gradients, which are summed.

    Args:
        module: With the shards of all experts.
        ranks: Who has the others.
        on_sequence: What enters was gathered along the tokens, which sums its gradients; the output is scattered.
    """
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        sharded = _sharded(module)
        if not sharded:
            return stock(*args, **kwargs)
        if not on_sequence:
            args = tuple(_entering(each, ranks) for each in args)
            kwargs = {key: _entering(each, ranks) for key, each in kwargs.items()}
        with swapped((module, name, local_of(tensor)) for name, tensor in sharded):
            found = stock(*args, **kwargs)
        return scatter_sum(found, _TOKENS, ranks) if on_sequence else sum_out(found, ranks)

    module.forward = forward


def local_params(module: nn.Module, ranks: TpRanks) -> None:
    """A module that uses its own parameters as shards, such as one number for each head."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with swapped((module, name, local_of(tensor)) for name, tensor in _sharded(module)):
            return stock(*args, **kwargs)

    module.forward = forward


def partial_gradient(module: nn.Module, ranks: TpRanks) -> None:
    """A module with whole parameters that sees the heads, or the slice of the sequence, of its rank alone.

    Its gradients are summed in the graph, not afterwards: a hook on the gradient would sum what was accumulated before
    once more, and would not see the parameters that FSDP puts in.
    """
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        whole = [
            (module, name, copy_in(tensor, ranks))
            for name, tensor in module._parameters.items()
            if tensor is not None and not isinstance(tensor, DTensor)
        ]
        with swapped(whole):
            return stock(*args, **kwargs)

    module.forward = forward


def mla_kv_a_proj(module: nn.Module, ranks: TpRanks, rope_dim: int) -> None:
    """The latent projection [.., latent + rope]: the rotary part goes to the heads of each rank without another
    projection that would sum its gradient."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        latent, rope = torch.split(y := stock(*args, **kwargs), [y.shape[-1] - rope_dim, rope_dim], dim=-1)
        return torch.cat([latent, copy_in(rope, ranks)], dim=-1)

    module.forward = forward


def identity_expert(module: nn.Module, ranks: TpRanks) -> None:
    """An expert without weights among `experts`, where the sum over ranks would count it once for each."""
    stock = module.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(x / ranks.size, *args, **kwargs)

    module.forward = forward


def gathered(scope: nn.Module, parameters: Sequence[LocalParameter], ranks: TpRanks) -> None:
    """Gathers parameters around the forward pass of a module that holds them, or reads them: always right.

    All ranks then compute the same, and a rank's gradient is its part of a gradient that is whole everywhere.
    """
    stock = scope.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with swapped(_gathered_now(parameters, ranks)):
            return stock(*args, **kwargs)

    scope.forward = forward


@contextmanager
def swapped(tensors: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> Iterator[None]:
    """Other tensors in the place of parameters, for the time of a block."""
    before = []
    try:
        for module, name, tensor in tensors:
            before.append((module, name, module._parameters[name]))
            module._parameters[name] = tensor  # a parameter's stand-in need not be one
        yield
    finally:
        for module, name, parameter in reversed(before):
            module._parameters[name] = parameter


def _gathered_now(
    parameters: Sequence[LocalParameter], ranks: TpRanks
) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Whole tensors for what is a shard at this moment; a parameter that two modules share is gathered once."""
    whole: dict[int, torch.Tensor] = {}
    for module, name, cut in parameters:
        tensor = module._parameters.get(name)
        if not isinstance(tensor, DTensor):
            continue
        if id(tensor) not in whole:
            whole[id(tensor)] = whole_parameter(local_of(tensor), cut.shape, cut.dim, cut.regions, ranks)
        yield module, name, whole[id(tensor)]


def _sharded(module: nn.Module) -> list[tuple[str, DTensor]]:
    return [(name, tensor) for name, tensor in module._parameters.items() if isinstance(tensor, DTensor)]


def _own_rows(bias: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
    """The part of a bias that goes with the rows of this rank; it is whole where another module shares it."""
    return local_of(bias) if isinstance(bias, DTensor) else split(bias, 0, ranks)


def _entering(value: Any, ranks: TpRanks) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return copy_in(value, ranks) if is_float else value


def _as_dtensor(y: torch.Tensor, features: int, ranks: TpRanks) -> torch.Tensor:
    """Says that a tensor is a slice of [.., features]."""
    shape = torch.Size((*y.shape[:-1], features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, ranks.mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)
