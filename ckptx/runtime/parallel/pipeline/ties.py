"""Tied parameters on several stages: each stage has a copy, and every copy gets the sum of all gradients.

The copies start bit-identical, get bit-identical gradients, and so stay equal under any optimizer that updates
parameters independently of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ckptx.errors import InputError, UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.torch_private import local_tensor

_CHUNK_NUMEL = 1 << 22  # elements that `_checksum` converts to int64 at a time (32 MiB)
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per element -> dtype


class Tie(NamedTuple):
    """A parameter that several stages share.

    Attributes:
        name: First name of the parameter in the whole model.
        copies: Stage -> first name of the parameter on that stage, for each stage that has it, in ascending order.
    """

    name: str
    copies: Mapping[int, str]


def find_ties_across_stages(model: nn.Module, stages: StageMap) -> list[Tie]:
    """Return the parameters of a whole model that several stages share.

    Args:
        model: The whole model, on any device.
        stages: Assignment of layers to stages.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name))
    ties = []
    for each in names.values():
        copies: dict[int, str] = {}
        for name in each:
            copies.setdefault(stages.stage_of(name), name)
        if len(copies) > 1:
            ties.append(Tie(each[0], dict(sorted(copies.items()))))
    return ties


def find_later_copies(ties: Sequence[Tie], models: Mapping[int, nn.Module]) -> list[Tensor]:
    """Return the copies on this rank except those on the first stage of their tie, which represent all copies."""
    return [
        find_parameter(models[stage], name)
        for tie in ties
        for stage, name in list(tie.copies.items())[1:]
        if stage in models
    ]


def take_gradients(ties: Sequence[Tie], models: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """Remove the gradients of earlier steps from all copies on this rank, and return them: name of the tie -> gradient.

    They are already summed over stages, so those of all copies are equal, and one per tie is returned. A tie without
    a copy on this rank, or without a gradient, is missing. The gradient of a DTensor is its local shard.
    """
    gradients = {}
    for tie in ties:
        for stage, name in tie.copies.items():
            if stage in models:
                parameter = find_parameter(models[stage], name)
                if parameter.grad is not None:
                    gradients[tie.name] = _detached_local(parameter.grad)
                    parameter.grad = None
    return gradients


def sum_gradients(
    ties: Sequence[Tie],
    models: Mapping[int, nn.Module],
    ranks_by_stage: Mapping[int, int],
    group: dist.ProcessGroup,
    earlier_gradients: Mapping[str, Tensor],
) -> None:
    """Set the gradient of every copy to the sum of the gradients of all copies, added in the order of the stages.

    Args:
        ties: From `find_ties_across_stages`; the same on every rank.
        models: The stages of this rank, by number.
        ranks_by_stage: Stage -> global rank of the process of this pipeline that has it.
        group: Ranks of the pipeline; each calls this after its step, when FSDP2 has reduced the gradients.
        earlier_gradients: Gradients from `take_gradients` before the step, which are added to the sum.
    """
    own_rank = dist.get_rank()
    for tie in ties:
        ranks = [ranks_by_stage[stage] for stage in tie.copies]
        if own_rank not in ranks:
            continue
        own_copies = {
            stage: find_parameter(models[stage], name) for stage, name in tie.copies.items() if stage in models
        }
        first_copy = next(iter(own_copies.values()))
        if not first_copy.requires_grad:
            continue
        first_rank, total = ranks[0], None
        for stage, rank in zip(tie.copies, ranks, strict=True):
            gradient = _local_gradient(own_copies[stage]) if rank == own_rank else None
            if rank != first_rank and rank == own_rank:
                assert gradient is not None
                dist.send(gradient, dst=first_rank, group=group)
            elif first_rank == own_rank:
                if gradient is None:
                    gradient = torch.empty_like(_detached_local(first_copy))
                    dist.recv(gradient, src=rank, group=group)
                total = gradient.clone() if total is None else total.add_(gradient)
        if first_rank != own_rank:
            total = torch.empty_like(_detached_local(first_copy))
            dist.recv(total, src=first_rank, group=group)
        else:
            assert total is not None
            for rank in dict.fromkeys(ranks[1:]):
                if rank != own_rank:
                    dist.send(total, dst=rank, group=group)
        assert total is not None
        if tie.name in earlier_gradients:
            total = earlier_gradients[tie.name] + total
        for parameter in own_copies.values():
            _set_gradient(parameter, total.clone())


def _checksum(tensor: Tensor) -> str:
    """Return a checksum of the bits of a tensor: a sum over all elements, and one weighted by their positions."""
    sums = [0, 0]
    bits = tensor.contiguous().reshape(-1).view(_INTEGER_DTYPES[tensor.element_size()])
    for index, chunk in enumerate(bits.split(_CHUNK_NUMEL)):
        wide = chunk.to(torch.int64)
        first = index * _CHUNK_NUMEL + 1
        positions = torch.arange(first, first + len(wide), device=wide.device)
        sums = [sums[0] + int(wide.sum()), sums[1] + int((wide * positions).sum())]
    return f"{sums[0]:x}.{sums[1]:x}"


def check_copies_are_equal(ties: Sequence[Tie], models: Mapping[int, nn.Module], group: dist.ProcessGroup) -> None:
    """Refuse copies of a tied parameter that are sharded differently, or have different values; every rank calls it.

    Gradients of copies with different shards could not be added shard by shard.

    Args:
        ties: From `find_ties_across_stages`; the same on every rank.
        models: The stages of this rank, by number.
        group: Ranks of the pipeline.

    Raises:
        InputError: Copies have different values; raised on every rank of the pipeline.
        UnsupportedError: Copies are sharded differently; raised on every rank of the pipeline.
    """
    own_shardings = {
        tie.name: [
            _describe_sharding(find_parameter(models[stage], name))
            for stage, name in tie.copies.items()
            if stage in models
        ]
        for tie in ties
    }
    own_checksums = {
        tie.name: [
            _checksum(_detached_local(find_parameter(models[stage], name)))
            for stage, name in tie.copies.items()
            if stage in models
        ]
        for tie in ties
    }
    shardings_and_checksums: list[tuple[dict[str, list[str]], dict[str, list[str]]]] = [
        ({}, {}) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather_object(shardings_and_checksums, (own_shardings, own_checksums), group=group)
    for tie in ties:
        shardings = sorted({sharding for each, _ in shardings_and_checksums for sharding in each[tie.name]})
        if len(shardings) > 1:
            raise UnsupportedError(
                f"{tie.name}: its copies {', '.join(tie.copies.values())} on several pipeline stages are sharded "
                f"differently ({' and '.join(shardings)}); set one style for both with --tp-plan, or leave out --pp"
            )
        if len({each for _, checksums in shardings_and_checksums for each in checksums[tie.name]}) > 1:
            raise InputError(
                f"{tie.name}: the config ties {' and '.join(tie.copies.values())}, but their values differ; set "
                "tie_word_embeddings to false, or use a checkpoint where they are equal"
            )


def _describe_sharding(parameter: Tensor) -> str:
    placements = f", {parameter.placements}" if isinstance(parameter, DTensor) else ""
    return f"{tuple(_detached_local(parameter).shape)}{placements}"


def find_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter of a stage with this canonical name, which must exist."""
    return next(each for other, each in model.named_parameters(remove_duplicate=False) if canonical_name(other) == name)


def _detached_local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _local_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(_detached_local(parameter))
    return _detached_local(parameter.grad).contiguous()


def _set_gradient(parameter: Tensor, local: Tensor) -> None:
    if isinstance(parameter, DTensor):
        like = parameter.grad if isinstance(parameter.grad, DTensor) else parameter
        parameter.grad = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    else:
        parameter.grad = local
