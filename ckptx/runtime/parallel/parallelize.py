"""Applies TP, activation checkpointing, compile and FSDP2 to a model. The order of the steps matters:

    TP                          first: it changes what a layer computes, and the other steps must see the shards
    activation checkpointing    second: the recomputation includes the collectives of TP
    compile                     third: the graph of a layer includes its recomputation where torch allows it
    FSDP2                       last: its hooks gather parameters before, and free them after, all of the above

The model is on the meta device meanwhile, so that no rank ever holds another rank's shards.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ckptx.errors import UnsupportedError, UsageError
from ckptx.runtime.model.layers import layer_groups, unwrap
from ckptx.runtime.parallel.activation_checkpointing.wrap import checkpoint_activations
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout, apply_tensor_parallel
from ckptx.runtime.parallel.tensor_parallel.plans import TpPlan
from ckptx.runtime.torch_private import CheckpointWrapper, local_tensor

_logger = logging.getLogger(__name__)


class ParallelizedModel(NamedTuple):
    """The result of `parallelize`.

    Attributes:
        layout: Sharding of the parameters by TP, see `TensorParallelLayout`; None without TP.
        checkpointed_layer_count: Number of layers with activation checkpointing.
        fsdp_unit_count: Number of FSDP2 units, the root included; 0 without FSDP2.
    """

    layout: TensorParallelLayout | None
    checkpointed_layer_count: int
    fsdp_unit_count: int


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: TpPlan | None,
    *,
    activation_checkpointing: str = "none",
    scope: str = "all",
    compile: bool = False,
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> ParallelizedModel:
    """Apply TP, activation checkpointing, compile and FSDP2 to a model, in place and in this order.

    Args:
        model: Model on the meta device; a pipeline stage is a model that has some of the layers.
        mesh: Mesh with the dims "tp" and "dp_shard", also "dp_replicate" for HSDP, and "pp" for a pipeline stage, whose
            layers are not resharded after forward.
        plan: TP plan from `find_plan`; required if "tp" has more than one rank, else ignored.
        activation_checkpointing: none, full, submodule or selective, see `activation_checkpointing.wrap`.
        scope: Layers with activation checkpointing: all, or only those of the language model, or of the vision or audio
            towers (language, vision, audio).
        compile: Compile each layer separately.
        mixed_precision: Mixed-precision policy of FSDP2; None computes in the dtype of the parameters.

    Raises:
        UnsupportedError: The model cannot be made parallel in this way.
        UsageError: `plan` is missing, `activation_checkpointing` or `scope` is unknown, or gradient checkpointing of
            transformers is enabled as well.
    """
    layout = None
    if mesh["tp"].size() > 1:
        if plan is None:
            raise UsageError(
                f"parallelize: plan is None, but the mesh has {mesh['tp'].size()} TP ranks; pass find_plan(model, "
                "config)"
            )
        layout = apply_tensor_parallel(model, mesh["tp"], plan)
    layer_count = checkpoint_activations(model, activation_checkpointing, scope, compile=compile)
    if compile:
        _compile_layers(model, wrapped_only=layout is not None and activation_checkpointing in ("full", "submodule"))
    unit_count = apply_fsdp(model, mesh, mixed_precision)
    _logger.info(
        "%s: TP %s, activation checkpointing in %d layers, %d FSDP2 units",
        type(model).__name__, "applied" if layout else "not applied", layer_count, unit_count,
    )  # fmt: skip
    return ParallelizedModel(layout, layer_count, unit_count)


def _compile_layers(model: nn.Module, *, wrapped_only: bool) -> None:
    """Compile each layer including its checkpoint wrapper, or with `wrapped_only` the modules inside the wrappers.

    `wrapped_only` is for layers with TP: to recompute one, a compiled graph would have to save the mesh of its
    DTensors, and torch 2.13 asserts that it saves only tensors. A layer without a wrapper is compiled as a whole.
    """
    for layer in _find_layers(model):
        wrappers = [each for each in layer.modules() if isinstance(each, CheckpointWrapper)] if wrapped_only else []
        for each in wrappers or [layer]:
            (unwrap(each) if wrapped_only else each).compile()


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, mixed_precision: MixedPrecisionPolicy | None = None) -> int:
    """Apply FSDP2 with each layer as a unit, and the rest in the root unit.

    The root is not resharded after forward, as its backward would gather it again immediately. Parameters outside of
    layers (embeddings, norms, heads, towers without layers) are in the root. A module in another dtype than the rest
    (routers and gates in float32) is a unit of its own, as FSDP2 gathers a unit as one tensor; layers that share
    parameters (those of Zamba share a transformer) are one unit, as a parameter can be in only one. On a pipeline stage
    nothing is resharded after forward, or every microbatch would gather every layer again.

    Returns:
        The number of units, the root included. 0 if FSDP2 is not applied: with one data-parallel rank, it is needed
        only for `mixed_precision`.

    Raises:
        UnsupportedError: FSDP2 cannot shard the model, or a module has parameters in several dtypes.
    """
    names = mesh.mesh_dim_names or ()
    reshard_after_forward = "pp" not in names or mesh["pp"].size() == 1
    replicas = mesh["dp_replicate"].size() if "dp_replicate" in names else 1
    if mesh["dp_shard"].size() * replicas == 1 and mixed_precision is None:
        return 0
    data_mesh = mesh["dp_replicate", "dp_shard"] if replicas > 1 else mesh["dp_shard"]
    policy = mixed_precision or MixedPrecisionPolicy()
    layer_units, other_dtype_units = (
        _join_modules_with_shared_parameters(_find_layers(model)),
        _join_modules_with_shared_parameters(_find_other_dtype_modules(model)),
    )
    own_dtype_policy = dataclasses.replace(policy, param_dtype=None, cast_forward_inputs=False)
    try:
        for unit in other_dtype_units:
            fully_shard(unit, mesh=data_mesh, mp_policy=own_dtype_policy, reshard_after_forward=reshard_after_forward)
        for unit in layer_units:
            fully_shard(unit, mesh=data_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedError(
            f"{type(model).__name__}: FSDP2 cannot shard it: {error}; use another dp_shard, or dp_shard 1"
        ) from error
    return len(other_dtype_units) + len(layer_units) + 1


def _join_modules_with_shared_parameters(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Return FSDP2 units: modules that have parameters in common are in one unit, every other module is its own."""
    units: list[tuple[list[nn.Module], set[int]]] = []
    for module in modules:
        parameter_ids = {id(parameter) for parameter in module.parameters()}
        overlapping_units = [unit for unit in units if unit[1] & parameter_ids]
        if not overlapping_units:
            units.append(([module], parameter_ids))
            continue
        for other in overlapping_units[1:]:
            overlapping_units[0][0].extend(other[0])
            overlapping_units[0][1].update(other[1])
            units.remove(other)
        overlapping_units[0][0].append(module)
        overlapping_units[0][1].update(parameter_ids)
    return [unit for unit, _ in units]


def _find_other_dtype_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose own trainable parameters have another dtype than most trainable elements of the model.

    Raises:
        UnsupportedError: A module has parameters of its own in several dtypes.
    """
    numel_by_dtype: Counter[torch.dtype] = Counter()
    for parameter in filter(_is_trainable, model.parameters()):
        numel_by_dtype[parameter.dtype] += parameter.numel()
    modules = []
    for name, module in model.named_modules():
        dtypes = {each.dtype for each in filter(_is_trainable, module.parameters(recurse=False))}
        if len(dtypes) > 1:
            raise UnsupportedError(
                f"{type(model).__name__}: FSDP2 cannot shard {name or 'the root'}, which has parameters of "
                f"{' and '.join(sorted(map(str, dtypes)))}; use dp_shard 1, or one dtype for all (--compute-dtype fp32)"
            )
        if dtypes and dtypes != {numel_by_dtype.most_common(1)[0][0]}:
            modules.append(module)
    return modules


def _is_trainable(parameter: nn.Parameter) -> bool:
    return bool(parameter.requires_grad)


def _find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of language model and towers, each once; for a wrapped layer, its wrapper."""
    layers_by_id: dict[int, nn.Module] = {}
    for layers in layer_groups(model).values():
        layers_by_id.update((id(layer.module), layer.module) for layer in layers)
    return list(layers_by_id.values())


def local_bytes(model: nn.Module) -> Mapping[torch.device, int]:
    """Return device -> bytes of this rank's parameters and buffers on it; a tensor with several names counts once."""
    local_by_id: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        local = local_tensor(tensor)
        local_by_id[id(local)] = local
    bytes_by_device: dict[torch.device, int] = {}
    for local in local_by_id.values():
        bytes_by_device[local.device] = bytes_by_device.get(local.device, 0) + local.numel() * local.element_size()
    return bytes_by_device
