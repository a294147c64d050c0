"""The forward pass of a module under each tensor parallel style, on sharded parameters.

Each function replaces the module's forward. The new one reads the parameters when it runs, so that FSDP may swap them;
if they are whole at that moment (gathered by an outer module), it calls the stock forward.

Legend: B batch, S sequence, I and O input and output features, E experts.
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
from ckptx.runtime.parallel.shards import to_local_shard
from ckptx.runtime.parallel.tensor_parallel.collectives import (
    TpRanks,
    copy_to_ranks,
    gather,
    gather_parameter,
    scatter_sum,
    split,
    sum_over_ranks,
)  # fmt: skip

_TOKENS, _SEQUENCE = 0, 1  # dims of [B * S, I] and of [B, S, I]
EXPERT_STYLES = ("moe_tp_experts", "all_reduce", "local")  # styles of a module with fused experts


class TpSharding(NamedTuple):
    """The sharding of one parameter over the TP ranks.

    Attributes:
        shape: Shape of the whole parameter.
        dim: Sharded dim.
        regions: For each rank, its regions of the whole parameter, concatenated along `dim`.
    """

    shape: tuple[int, ...]
    dim: int
    regions: tuple[tuple[Region, ...], ...]


class ShardedParameter(NamedTuple):
    """A sharded parameter and its place in the model.

    It is looked up by name whenever it is used, as FSDP2 replaces parameters.

    Attributes:
        module: Module that holds the parameter.
        name: Name of the parameter in the module.
        sharding: Sharding of the parameter.
    """

    module: nn.Module
    name: str
    sharding: TpSharding


def install_colwise(
    module: nn.Module, ranks: TpRanks, *, output: str = "sharded", is_sequence_parallel: bool = False
) -> None:
    """Shard the output features of a Linear.

    Args:
        module: Linear whose local weight is [O / tp, I].
        ranks: TP ranks.
        output: Form of the output: "sharded", "gathered", or "dtensor" (sharded, as a DTensor).
        is_sequence_parallel: True if the input was gathered along the sequence, which already sums its gradient.
    """
    original_forward = module.forward
    out_features = int(module.weight.shape[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if not isinstance(weight, DTensor):
            return original_forward(x)
        if not is_sequence_parallel:
            x = copy_to_ranks(x, ranks)
        y = functions.linear(x, to_local_shard(weight), None if bias is None else _own_bias(bias, ranks))
        if output == "gathered":
            return gather(y, y.dim() - 1, out_features, ranks)
        return _as_dtensor(y, out_features, ranks) if output == "dtensor" else y

    module.forward = forward


def install_rowwise(
    module: nn.Module, ranks: TpRanks, *, splits_input: bool = False, is_sequence_parallel: bool = False
) -> None:
    """Shard the input features of a Linear: partial results are summed, then the bias is added once.

    Args:
        module: Linear whose local weight is [O, I / tp] and whose bias, if any, is whole.
        ranks: TP ranks.
        splits_input: True if the input is whole [.., I] and must be split; False if it is the slice [.., I / tp].
        is_sequence_parallel: True if the sum is scattered along the sequence, so that the output is [B, S / tp, O].
    """
    original_forward = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if not isinstance(weight, DTensor):
            return original_forward(x)
        if splits_input:
            x = split(x, x.dim() - 1, ranks)
        y = functions.linear(x, to_local_shard(weight))
        if is_sequence_parallel:
            y = scatter_sum(y, _SEQUENCE, ranks).contiguous()
            return y if bias is None else y + copy_to_ranks(bias, ranks)
        y = sum_over_ranks(y, ranks)
        return y if bias is None else y + bias

    module.forward = forward


def install_embedding_rowwise(module: nn.Module, ranks: TpRanks) -> None:
    """Shard the vocabulary of an embedding: a rank has zeros for the tokens of other ranks, and the results are summed.

    The module's forward may apply any linear function to a row, such as scaling.
    """
    original_forward = module.forward

    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = module._parameters["weight"]
        if not isinstance(weight, DTensor):
            return original_forward(ids, *args, **kwargs)
        begin, rows = ceil_chunks(weight.shape[0], ranks.size)[ranks.rank]
        local = to_local_shard(weight)
        if not rows:  # still a part of the graph: every rank must run the same collectives in the backward pass
            local = local.sum(0, keepdim=True)
        is_on_other_rank = (ids < begin) | (ids >= begin + rows)
        local_ids = (ids - begin).masked_fill(is_on_other_rank, 0)
        padding = module.padding_idx
        is_padding_here = padding is not None and begin <= padding < begin + rows
        with swap_parameters([(module, "weight", local)]):
            module.padding_idx = padding - begin if is_padding_here else None
            try:
                embeddings = original_forward(local_ids, *args, **kwargs)
            finally:
                module.padding_idx = padding
        return sum_over_ranks(embeddings.masked_fill(is_on_other_rank[..., None], 0), ranks)

    module.forward = forward


def install_embedding_colwise(module: nn.Module, ranks: TpRanks) -> None:
    """Shard the vectors of an embedding: the slices are gathered."""
    original_forward = module.forward

    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = module._parameters["weight"]
        if not isinstance(weight, DTensor):
            return original_forward(ids, *args, **kwargs)
        with swap_parameters([(module, "weight", to_local_shard(weight))]):
            embeddings = original_forward(ids, *args, **kwargs)
        return gather(embeddings, embeddings.dim() - 1, weight.shape[1], ranks)

    module.forward = forward


def install_experts(module: nn.Module, ranks: TpRanks, *, is_sequence_parallel: bool = False) -> None:
    """Shard the features inside each fused expert [E, O, I]: partial results are summed.

    All inputs, including the routing weights, get partial gradients, which are summed.

    Args:
        module: Module whose parameters are the shards of all experts.
        ranks: TP ranks.
        is_sequence_parallel: True if inputs were gathered along the tokens, which sums their gradients; the output is
            scattered along the tokens.
    """
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        sharded = _sharded_parameters(module)
        if not sharded:
            return original_forward(*args, **kwargs)
        if not is_sequence_parallel:
            args = tuple(_copy_floats_to_ranks(each, ranks) for each in args)
            kwargs = {key: _copy_floats_to_ranks(each, ranks) for key, each in kwargs.items()}
        with swap_parameters((module, name, to_local_shard(tensor)) for name, tensor in sharded):
            output = original_forward(*args, **kwargs)
        return scatter_sum(output, _TOKENS, ranks) if is_sequence_parallel else sum_over_ranks(output, ranks)

    module.forward = forward


def install_local_params(module: nn.Module, ranks: TpRanks) -> None:
    """Make a module use the local shards of its own parameters in the stock forward."""
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with swap_parameters((module, name, to_local_shard(tensor)) for name, tensor in _sharded_parameters(module)):
            return original_forward(*args, **kwargs)

    module.forward = forward


def sum_partial_gradients(module: nn.Module, ranks: TpRanks) -> None:
    """Sum the gradients of whole parameters in a module that gets a part of the heads or of the sequence.

    They are summed in the graph, not afterwards: a hook on the gradient would sum the already accumulated gradient
    again, and would miss the parameters that FSDP swaps in.
    """
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        copied_parameters = [
            (module, name, copy_to_ranks(tensor, ranks))
            for name, tensor in module._parameters.items()
            if tensor is not None and not isinstance(tensor, DTensor)
        ]
        with swap_parameters(copied_parameters):
            return original_forward(*args, **kwargs)

    module.forward = forward


def install_mla_kv_a_proj(module: nn.Module, ranks: TpRanks, rope_dim: int) -> None:
    """Sum the gradient of the rotary part of a latent projection [.., latent + rope].

    The heads of each rank use that part without a further projection that would sum it.
    """
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        latent, rope = torch.split(y := original_forward(*args, **kwargs), [y.shape[-1] - rope_dim, rope_dim], dim=-1)
        return torch.cat([latent, copy_to_ranks(rope, ranks)], dim=-1)

    module.forward = forward


def install_identity_expert(module: nn.Module, ranks: TpRanks) -> None:
    """Divide the input of an identity expert by the TP size, as its output is summed over ranks."""
    original_forward = module.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original_forward(x / ranks.size, *args, **kwargs)

    module.forward = forward


def gather_parameters(module: nn.Module, parameters: Sequence[ShardedParameter], ranks: TpRanks) -> None:
    """Gather parameters around a module that holds or reads them, which is correct for every module.

    All ranks then compute the same, and a rank's gradient is its shard of a gradient that is whole on every rank.
    """
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with swap_parameters(_gather_sharded(parameters, ranks)):
            return original_forward(*args, **kwargs)

    module.forward = forward


@contextmanager
def swap_parameters(tensors: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> Iterator[None]:
    """Replace parameters by other tensors within the block."""
    originals = []
    try:
        for module, name, tensor in tensors:
            originals.append((module, name, module._parameters[name]))
            module._parameters[name] = tensor  # need not be an nn.Parameter
        yield
    finally:
        for module, name, parameter in reversed(originals):
            module._parameters[name] = parameter


def _gather_sharded(
    parameters: Sequence[ShardedParameter], ranks: TpRanks
) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield (module, name, whole tensor) for each parameter that is sharded at this moment; ties are gathered once."""
    gathered_by_id: dict[int, torch.Tensor] = {}
    for module, name, sharding in parameters:
        tensor = module._parameters.get(name)
        if not isinstance(tensor, DTensor):
            continue
        if id(tensor) not in gathered_by_id:
            gathered_by_id[id(tensor)] = gather_parameter(
                to_local_shard(tensor), sharding.shape, sharding.dim, sharding.regions, ranks
            )
        yield module, name, gathered_by_id[id(tensor)]


def _sharded_parameters(module: nn.Module) -> list[tuple[str, DTensor]]:
    return [(name, tensor) for name, tensor in module._parameters.items() if isinstance(tensor, DTensor)]


def _own_bias(bias: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
    """Return this rank's slice of a bias; a bias that TP did not shard is split."""
    return to_local_shard(bias) if isinstance(bias, DTensor) else split(bias, 0, ranks)


def _copy_floats_to_ranks(value: Any, ranks: TpRanks) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return copy_to_ranks(value, ranks) if is_float else value


def _as_dtensor(y: torch.Tensor, out_features: int, ranks: TpRanks) -> torch.Tensor:
    """Return this rank's slice of a tensor [.., out_features] as a DTensor sharded along its last dim."""
    shape = torch.Size((*y.shape[:-1], out_features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, ranks.mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)
