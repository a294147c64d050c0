"""Attach a LoRA adapter to linear layers of a model, which computes what PEFT computes, and freeze everything else.

    model.layers.0.self_attn.q_proj.weight                  the frozen weight W, [out, in]
    model.layers.0.self_attn.q_proj.lora_A.default.weight   A, [rank, in]
    model.layers.0.self_attn.q_proj.lora_B.default.weight   B, [out, rank]

The layer returns `W x + alpha / rank * B (A x)`. The names are those of PEFT, but for its `base_layer`, so that frozen
weights keep their names in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ckptx.adapters.state_dicts import is_lora_name
from ckptx.errors import UnsupportedError
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.shards import find_local_shards
from ckptx.runtime.torch_private import local_tensor
from ckptx.runtime.training.recipe import AdapterBlock

_ADAPTER_NAME = "default"  # of PEFT, for an adapter that was given no name


def attach_adapter(model: nn.Module, block: AdapterBlock) -> frozenset[str]:
    """Add a LoRA to every target module, in place, and exclude all other parameters from training.

    Args:
        model: Whole model, before it is parallelized.
        block: Settings of the adapter.

    Returns:
        Canonical names of the frozen parameters; all names of a tied one.

    Raises:
        UnsupportedError: A target matches no module, or one that is not an `nn.Linear`.
    """
    targets: dict[str, nn.Module] = {}
    for target in block.targets:
        found = {
            name: module for name, module in model.named_modules() if name == target or name.endswith(f".{target}")
        }
        if not found:
            raise UnsupportedError(
                f'{type(model).__name__}: no module is called "{target}", which adapter.targets names; use the ends of '
                "module names, such as q_proj"
            )
        targets |= found
    for name, module in targets.items():
        if type(module) is not nn.Linear:
            raise UnsupportedError(
                f'{type(model).__name__}: "{name}" is {type(module).__name__}, but adapter.targets must name modules '
                "of type Linear"
            )
    frozen = frozenset(canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in targets.values():
        assert isinstance(module, nn.Linear)
        like: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype, "bias": False}
        module.lora_A = nn.ModuleDict({_ADAPTER_NAME: nn.Linear(module.in_features, block.rank, **like)})
        module.lora_B = nn.ModuleDict({_ADAPTER_NAME: nn.Linear(block.rank, module.out_features, **like)})
        module.lora_scaling = block.alpha / block.rank
        module.register_forward_hook(_add_change)
    return frozen


def initialize_adapter(named_parameters: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Set the factors of an adapter as PEFT does: A uniform in +-1 / sqrt(in), B zero.

    The values depend on seed and name alone, so that they are the same on every mesh.

    Args:
        named_parameters: Parameters of this rank by their names in the whole model; others than factors are ignored.
        seed: Seed of the run.
    """
    for name, parameter in named_parameters:
        if not is_lora_name(name):
            continue
        whole = torch.zeros(tuple(parameter.shape))
        if ".lora_A." in name:
            digest = blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
            bound = parameter.shape[1] ** -0.5
            whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
        local = local_tensor(parameter).detach()
        for shard in find_local_shards(name, parameter):
            source, target = (
                tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True)) for region in shard
            )
            local[target].copy_(whole[source])


def _add_change(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return the output of a linear layer with the change of its adapter (a forward hook)."""
    layer: Any = module
    change: Tensor = layer.lora_B[_ADAPTER_NAME](layer.lora_A[_ADAPTER_NAME](inputs[0]))
    return output + change * layer.lora_scaling
