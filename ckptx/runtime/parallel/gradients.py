"""Gradients of a step: summed over microbatches, averaged over data ranks, clipped by their norm over all ranks.

    plain                      whole on every rank, counted once
    DTensor on tp              shards: the powers |gradient|**norm_type of their elements are summed over tp
    DTensor on dp_shard        shards of FSDP2: summed over dp_shard
    DTensor on dp_shard, tp    summed over both; never over a mesh dim with replicas
    other pipeline stages      the sums of the stages are added over pp

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
from ckptx.runtime.torch_private import compute_norms, local_tensor, scale_all

_EPSILON = 1e-6  # the value in torch's `clip_grads_with_norm_`

_Groups = tuple[dist.ProcessGroup, ...]  # over which a parameter is sharded, in the order of the mesh dims


class NonFiniteGradients(CkptxError, RuntimeError):
    """The norm of all gradients is NaN or infinite; a RuntimeError, as torch raises."""


class PipelineStages(NamedTuple):
    """The pipeline over whose stages a norm is summed; made by `Pipeline.clip_grad_norm`.

    Attributes:
        group: Ranks of the pipeline.
        device: Device of the tensors that are exchanged.
        copies: Parameters of this rank that are copies of a parameter on an earlier stage: clipped, but not counted
            again.
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
    """Scale all gradients in place by one factor, so that their norm is at most `max_norm`.

    Every rank calls it with its own parameters. The norm is that of the whole gradients, as in one process: shards are
    summed over their ranks, replicated gradients and parameters with several names count once. The result is
    bit-identical on every rank if replicated gradients are.

    Args:
        parameters: A model sharded by TP, FSDP2 or HSDP, or a plain one; several stages of a model; or parameters.
        max_norm: Maximum norm of all gradients as one vector; `inf` to measure without clipping.
        norm_type: Order of the norm, above 0; `inf` for the largest absolute value.
        error_if_nonfinite: Raise if the norm is NaN or infinite. Otherwise gradients become NaN or 0, as in torch.
        stages: Pipeline over whose stages the norm is summed; None if the model has one stage.

    Returns:
        The norm before clipping: a plain tensor without dims, in float32, or in float64 if a parameter is float64.

    Raises:
        NonFiniteGradients: `error_if_nonfinite` is set and the norm is not finite; nothing was scaled, and the message
            names gradients of this rank.
        UsageError: `norm_type` is not above 0.
    """
    if not norm_type > 0:
        raise UsageError(f"clip_grad_norm: norm_type is {norm_type}, must be above 0 or inf; use 2.0")
    named_parameters = _named_parameters(parameters)
    copies = {id(each) for each in stages.copies} if stages is not None else set()
    power = _sum_power_over_ranks([each for _, each in named_parameters if id(each) not in copies], float(norm_type))
    if stages is not None:
        power = _sum_over_stages(power, float(norm_type), stages)
    total = power if norm_type == inf else power ** (1 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise NonFiniteGradients(_nonfinite_message(named_parameters, total, norm_type))
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    for gradients in _group_by_device_and_dtype(
        [_detached_local(each.grad) for _, each in named_parameters if each.grad is not None]
    ):
        scale_all(gradients, factor.to(gradients[0].device))
    return total


def sync_gradients(model: nn.Module, is_last: bool) -> None:
    """Set whether the next backward pass is the last of its step, so that FSDP2 reduces gradients once per step.

    Without this call gradients are reduced in each backward pass, and accumulated as shards. That is correct, too, with
    less memory (unreduced gradients are whole on each rank) and more communication. A model without FSDP2 is left
    unchanged.

    Args:
        model: Model from `parallelize`.
        is_last: True if the next backward pass is the last of its step and reduces the accumulated gradients; False if
            it adds unreduced gradients.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_is_last_backward(is_last)


def loss_divisor(labels: Iterable[Tensor], mesh: DeviceMesh, ignore_index: int = -100) -> Tensor:
    """Return the divisor of each microbatch's summed loss, so that every label of a step has the same weight.

    FSDP2 averages gradients over data ranks. A mean of the means of microbatches would give labels of microbatches
    with few labels more weight; so each sum is divided by the labels of the step per data rank:

        items = loss_divisor([each["labels"] for each in batches], mesh)
        for each in batches:
            model(**each, num_items_in_batch=items).loss.backward()

    Args:
        labels: Labels of this rank's microbatches in the step, [B, S] each. A label at position 0 is never predicted,
            and does not count.
        mesh: Mesh from `mesh_of`; every rank of its data dims calls this.
        ignore_index: Label that does not count.

    Returns:
        A float32 tensor without dims: number of labels of the step (at least one) divided by the number of data ranks.
    """
    count = sum((each[..., 1:] != ignore_index).sum() for each in labels)
    total = torch.as_tensor(count, dtype=torch.float32, device=mesh.device_type).clone()
    dims = [name for name in DATA_DIMS if name in (mesh.mesh_dim_names or ())]
    for name in dims:
        dist.all_reduce(total, group=mesh.get_group(name))
    return total.clamp(min=1) / prod(mesh[name].size() for name in dims)


# ------------------------------------------------------------------------------------------------ norm


def _named_parameters(parameters: nn.Module | Iterable[nn.Module] | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Return (name for messages, parameter) for each trainable parameter; a tied one once, with its first name."""
    named_parameters: list[tuple[str, Tensor]] = []
    for index, each in enumerate([parameters] if isinstance(parameters, (nn.Module, Tensor)) else parameters):
        if isinstance(each, nn.Module):
            named_parameters += [(canonical_name(name), parameter) for name, parameter in each.named_parameters()]
        else:
            named_parameters.append((f"parameter {index} of shape {list(each.shape)}", each))
    unique = {id(each): (name, each) for name, each in reversed(named_parameters) if each.requires_grad}
    return list(reversed(unique.values()))


def _sum_power_over_ranks(parameters: list[Tensor], norm_type: float) -> Tensor:
    """Return the sum of |gradient|**norm_type over all elements on all ranks, or for `inf` the largest absolute value.

    Every rank makes the same reductions in the same order, even if it lacks gradients: the groups to sum over
    follow from the parameters alone.
    """
    local_gradients = [_detached_local(each.grad) for each in parameters if each.grad is not None]
    device = next((each.device for each in [*local_gradients, *map(_detached_local, parameters)]), torch.device("cpu"))
    dtype = torch.float64 if any(each.dtype is torch.float64 for each in parameters) else torch.float32
    gradients_by_groups: dict[_Groups, list[Tensor]] = {}
    for parameter in parameters:
        gradients = gradients_by_groups.setdefault(_sharding_groups(parameter), [])
        if parameter.grad is not None:
            gradients.append(_shard_like(parameter, parameter.grad))
    powers = {
        groups: _sum_local_power(gradients, norm_type, device, dtype)
        for groups, gradients in gradients_by_groups.items()
    }
    groups_by_name = {group.group_name: group for groups in powers for group in groups}
    for name in sorted(groups_by_name):
        groups_with_name = [groups for groups in powers if any(each.group_name == name for each in groups)]
        stacked_powers = torch.stack([powers[groups] for groups in groups_with_name])
        dist.all_reduce(
            stacked_powers, dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM, groups_by_name[name]
        )
        powers.update(zip(groups_with_name, stacked_powers.unbind(), strict=True))
    if not powers:
        return torch.zeros((), dtype=dtype, device=device)
    all_powers = torch.stack([powers[groups] for groups in sorted(powers, key=_group_names)])
    return all_powers.amax() if norm_type == inf else all_powers.sum()


def _sum_over_stages(power: Tensor, norm_type: float, stages: PipelineStages) -> Tensor:
    """Return the sum of the powers of all stages, or for `inf` their maximum; float64 if any stage has float64.

    Powers are added in the order of the ranks, so that each rank gets the same bits.
    """
    power_and_is_double = torch.tensor([0.0, power.dtype is torch.float64], dtype=torch.float64, device=stages.device)
    power_and_is_double[0] = power
    gathered = [torch.empty_like(power_and_is_double) for _ in range(dist.get_world_size(stages.group))]
    dist.all_gather(gathered, power_and_is_double, group=stages.group)
    powers, are_double = torch.stack(gathered).unbind(1)
    total = powers.amax() if norm_type == inf else powers.sum()
    return total if are_double.any() else total.float()


def _group_names(groups: _Groups) -> tuple[str, ...]:
    return tuple(group.group_name for group in groups)


def _sharding_groups(parameter: Tensor) -> _Groups:
    """Return the process groups over which a parameter is sharded; empty if it is whole on this rank."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(index)
        for index, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(index) > 1
    )


def _shard_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return this rank's shard of a gradient, which torch's own TP may leave as a partial sum on each rank."""
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return _detached_local(gradient)


def _sum_local_power(gradients: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the sum of |gradient|**norm_type over all elements of these local shards, or for `inf` the largest.

    Without elements, the result is 0.
    """
    all_norms = [torch.zeros((), dtype=dtype, device=device)]
    for tensors in _group_by_device_and_dtype([each for each in gradients if each.numel()]):
        all_norms += [each.to(device) for each in compute_norms(tensors, norm_type, dtype)]
    norms = torch.stack(all_norms)
    return norms.amax() if norm_type == inf else (norms**norm_type).sum()


def _group_by_device_and_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype, as torch's foreach functions require."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        groups.setdefault((each.device, each.dtype), []).append(each)
    return list(groups.values())


def _detached_local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _nonfinite_message(named_parameters: list[tuple[str, Tensor]], total: Tensor, norm_type: float) -> str:
    """Return the error message, without a collective: if copies of a gradient differ, some ranks do not get here."""
    names = [
        name
        for name, each in named_parameters
        if each.grad is not None and not _detached_local(each.grad).isfinite().all()
    ]
    location = (
        f"in {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else "on other ranks"
    )
    return (
        f"clip_grad_norm: the norm of order {norm_type} is {float(total)} due to gradients {location}, must be finite; "
        "skip the step with zero_grad(), or pass error_if_nonfinite=False"
    )
