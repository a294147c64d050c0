"""Gradients of a step: summed up over microbatches, averaged over data ranks, clipped by their norm over all ranks.

    plain                      whole on every rank, counted once
    DTensor on tp              shards: their powers are summed over tp
    DTensor on dp_shard        shards of FSDP2: over dp_shard
    DTensor on dp_shard, tp    over both; over a mesh dim that has replicas, never
    of another pipeline stage  the sum of each stage is added up over pp

torch's `clip_grad_norm_` takes gradients of one mesh. Here each mesh dim is reduced once, for all of them together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf, prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ckptx.errors import CkptxError, UsageError
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.distributed import DATA_DIMS
from ckptx.runtime.torch_private import local_tensor, norms_of, scale_all

_EPSILON = 1e-6  # as in torch's `clip_grads_with_norm_`

_Groups = tuple[dist.ProcessGroup, ...]


class NonFiniteGradients(CkptxError, RuntimeError):
    """The norm of all gradients is NaN or infinite; a RuntimeError as torch raises, too."""


class PipelineStages(NamedTuple):
    """Where the rest is of a model that is cut into pipeline stages; `Pipeline.clip_grad_norm` knows it.

    Attributes:
        group: The ranks of the pipeline.
        device: What they talk over.
        copies: Parameters of this rank that are copies of one on an earlier stage: clipped, and not counted again.
    """

    group: dist.ProcessGroup
    device: torch.device
    copies: Collection[Tensor] = ()


def clip_grad_norm(
    parameters: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    stages: PipelineStages | None = None,
) -> Tensor:
    """Scales all gradients in place by one factor, so that their norm is at most `max_norm`.

    Every rank calls it with the parameters that it holds. The norm is that of the whole gradients, as one process
    would have it: shards are added up over the ranks that have them, what ranks have whole counts once, and so does a
    parameter with several names. The same bits on every rank, if gradients that ranks have whole are the same.

    Args:
        parameters: A model cut by TP, sharded by FSDP2 or HSDP, or plain; the stages of one; or parameters.
        max_norm: Of all gradients as one vector; `inf` to measure alone.
        norm_type: Above 0; `inf` for the largest absolute value.
        error_if_nonfinite: Refuse a norm that is NaN or infinite. Without it, gradients become NaN or 0, as in torch.
        stages: Where the other stages are, of a model that has several.

    Returns:
        The norm before clipping: a plain tensor without dims, in float32, or float64 if a gradient is.

    Raises:
        NonFiniteGradients: Asked for; nothing was scaled, and the message names gradients of this rank.
        UsageError: `norm_type` is not above 0.
    """
    if not norm_type > 0:
        raise UsageError(f"clip_grad_norm: norm_type is {norm_type}, needed a number above 0, or inf; give 2.0")
    named = _named(parameters)
    copies = {id(each) for each in stages.copies} if stages is not None else set()
    power = _total_power([each for _, each in named if id(each) not in copies], float(norm_type))
    if stages is not None:
        power = _over_stages(power, float(norm_type), stages)
    total = power if norm_type == inf else power ** (1 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise NonFiniteGradients(_said(named, total, norm_type))
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    for gradients in _by_kind([_local(each.grad) for _, each in named if each.grad is not None]):
        scale_all(gradients, factor.to(gradients[0].device))
    return total


def sync_gradients(model: nn.Module, is_last: bool) -> None:
    """Says before a backward pass whether it is the last of its step, so that FSDP2 reduces gradients once a step.

    Without it they are reduced in each backward pass, and summed up as shards: right as well, with less memory (what is
    not reduced is whole on each rank) and more communication. Nothing happens to a model that FSDP2 does not manage.

    Args:
        model: As `parallelize` left it.
        is_last: Reduce in the next backward pass what was summed up.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_is_last_backward(is_last)


def labels_per_rank(labels: Iterable[Tensor], mesh: DeviceMesh, ignore_index: int = -100) -> Tensor:
    """What the loss of each microbatch is divided by, so that every label of a step counts the same.

    FSDP2 averages gradients over data ranks. A mean of the means of microbatches would give those of few labels more
    weight; so each sum is divided by all labels of the step over the number of data ranks:

        items = labels_per_rank([each["labels"] for each in batches], mesh)
        for each in batches:
            model(**each, num_items_in_batch=items).loss.backward()

    Args:
        labels: Of the microbatches that this rank has in the step, [B, S] each. A label at the first position is not
            compared with anything, and does not count.
        mesh: As `mesh_of` made it; every rank of its data dims calls this.
        ignore_index: A label that does not count.

    Returns:
        A float32 tensor without dims: labels of the step over data ranks, at least one over them.
    """
    count = sum((each[..., 1:] != ignore_index).sum() for each in labels)
    total = torch.as_tensor(count, dtype=torch.float32, device=mesh.device_type).clone()
    dims = [name for name in DATA_DIMS if name in (mesh.mesh_dim_names or ())]
    for name in dims:
        dist.all_reduce(total, group=mesh.get_group(name))
    return total.clamp(min=1) / prod(mesh[name].size() for name in dims)


# ------------------------------------------------------------------------------------------------ norm


def _named(parameters: nn.Module | Iterable[nn.Module] | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Those that are trained, each once."""
    pairs: list[tuple[str, Tensor]] = []
    for index, each in enumerate([parameters] if isinstance(parameters, (nn.Module, Tensor)) else parameters):
        if isinstance(each, nn.Module):
            pairs += [(canonical_name(name), parameter) for name, parameter in each.named_parameters()]
        else:
            pairs.append((f"parameter {index} of shape {list(each.shape)}", each))
    unique = {id(each): (name, each) for name, each in reversed(pairs) if each.requires_grad}
    return list(reversed(unique.values()))


def _total_power(parameters: list[Tensor], norm_type: float) -> Tensor:
    """The sum of powers of all elements, over all ranks of the mesh, or the largest absolute value.

    Every rank makes the same reductions in the same order, whatever gradients it lacks: what is summed over which
    groups follows from the parameters alone.
    """
    like = [_local(each.grad) for each in parameters if each.grad is not None]
    device = next((each.device for each in [*like, *map(_local, parameters)]), torch.device("cpu"))
    dtype = torch.float64 if any(each.dtype is torch.float64 for each in parameters) else torch.float32
    split: dict[_Groups, list[Tensor]] = {}
    for parameter in parameters:
        gradients = split.setdefault(_groups_of(parameter), [])
        if parameter.grad is not None:
            gradients.append(_cut_as(parameter, parameter.grad))
    powers = {groups: _power(gradients, norm_type, device, dtype) for groups, gradients in split.items()}
    order = {group.group_name: group for groups in powers for group in groups}
    for name in sorted(order):
        concerned = [groups for groups in powers if any(each.group_name == name for each in groups)]
        together = torch.stack([powers[groups] for groups in concerned])
        dist.all_reduce(together, dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM, order[name])
        powers.update(zip(concerned, together.unbind(), strict=True))
    if not powers:
        return torch.zeros((), dtype=dtype, device=device)
    every = torch.stack([powers[groups] for groups in sorted(powers, key=_names_of)])
    return every.amax() if norm_type == inf else every.sum()


def _over_stages(power: Tensor, norm_type: float, stages: PipelineStages) -> Tensor:
    """Of all stages: added in the order of the ranks, for each rank must get the same bits."""
    own = torch.tensor([0.0, power.dtype is torch.float64], dtype=torch.float64, device=stages.device)
    own[0] = power
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(stages.group))]
    dist.all_gather(found, own, group=stages.group)
    powers, are_double = torch.stack(found).unbind(1)
    total = powers.amax() if norm_type == inf else powers.sum()
    return total if are_double.any() else total.float()


def _names_of(groups: _Groups) -> tuple[str, ...]:
    return tuple(group.group_name for group in groups)


def _groups_of(parameter: Tensor) -> _Groups:
    """The groups of ranks over which a parameter is cut."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(index)
        for index, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(index) > 1
    )


def _cut_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """What this rank has of a gradient, which torch's own TP may leave as a summand on each rank."""
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return _local(gradient)


def _power(gradients: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The largest absolute value, or the sum of powers of all elements on this rank."""
    found = [torch.zeros((), dtype=dtype, device=device)]
    for kind in _by_kind([each for each in gradients if each.numel()]):
        found += [each.to(device) for each in norms_of(kind, norm_type, dtype)]
    norms = torch.stack(found)
    return norms.amax() if norm_type == inf else (norms**norm_type).sum()


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """By device and dtype, as torch's functions for lists want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        kinds.setdefault((each.device, each.dtype), []).append(each)
    return list(kinds.values())


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _said(named: list[tuple[str, Tensor]], total: Tensor, norm_type: float) -> str:
    """Without a collective: ranks whose copies of a gradient differ would not all get here."""
    names = [name for name, each in named if each.grad is not None and not _local(each.grad).isfinite().all()]
    where = f"in {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else "on other ranks"
    return (
        f"clip_grad_norm: the norm of order {norm_type} is {float(total)}, by gradients {where}, needed a finite one; "
        "skip the step with zero_grad(), or pass error_if_nonfinite=False"
    )
