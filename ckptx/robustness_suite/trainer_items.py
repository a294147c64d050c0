"""Snapshot of the state of this rank as items with digests: model, optimizer, RNG state and data position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.torch_private import local_tensor
from ckptx.runtime.training.trainer import Trainer

_ADAM_STEP = "step"


def collect_items(trainer: Trainer, *, with_batch: bool = True) -> dict[tuple[str, str], str]:
    """Return (oracle, item) -> digest or value of this rank, without changing the state of the run.

    Args:
        trainer: Trainer between two steps.
        with_batch: True to include the samples of the next step.
    """
    items: dict[tuple[str, str], str] = {}
    for name, value in _model_state(trainer):
        items["model", name] = tensor_digest(value)
        items["finite", name] = finite_text(value, may_be_infinite=not isinstance(value, torch.nn.Parameter))
        items["names", name] = "present"
    names = {id(parameter): name for name, parameter in trainer.rank_model.parameters()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in trainer.optimizer.state.get(parameter, {}).items():
                if key == _ADAM_STEP:
                    items["adam step", name] = repr(float(value))
                else:
                    items["moments", f"{name}.{key}"] = tensor_digest(value)
                    items["finite", f"{name}.{key}"] = finite_text(value)
            for key, value in group.items():
                if key not in ("params", "lr"):
                    items["param groups", f"{name}.{key}"] = _value_text(value)
    # One item for all groups, as a rank with other parameters has the same groups.
    items["learning rate", "lr"] = ", ".join(repr(float(group["lr"])) for group in trainer.optimizer.param_groups)
    for key, value in trainer.scheduler.state_dict().items():
        items["scheduler", key] = _value_text(value)
    items["step", "step"] = str(trainer.completed_steps)
    for key, value in trainer.sampler.state_dict().items():
        items["samples", key] = _value_text(value)
    items["samples", "of the next step"] = str(trainer.next_indices())
    for kind, value in trainer.random_state.state_dict().items():
        items["rng", kind] = _value_text(value)
    if with_batch:
        for index, batch in enumerate(trainer.next_batches()):
            for name, value in batch.items():
                items["batch", f"microbatch {index}: {name}"] = tensor_digest(value)
    return items


def shard_digests(trainer: Trainer) -> dict[tuple[str, str], str]:
    """Return digests of the model's local shards by name and shard; ranks with the same shard must agree."""
    layout = trainer.rank_model.layout
    digests = {}
    for name, value in _model_state(trainer):
        regions = layout.local_regions(name) if layout is not None else None
        region_text = "whole" if regions is None else "; ".join(f"{each.offsets}+{each.sizes}" for each in regions)
        digests[trainer.rank_model.full_name(name), f"{region_text}{_shard_text(value)}"] = tensor_digest(value)
    return digests


def tensor_digest(value: Any) -> str:
    """Return a digest of bytes, dtype and shape of the local shard of a tensor; another value as a string."""
    if not isinstance(value, Tensor):
        return _value_text(value)
    local = local_tensor(value).detach().contiguous()
    hasher = xxhash.xxh3_128(f"{local.dtype} {tuple(local.shape)}".encode())
    if local.numel():
        hasher.update(memoryview(local.reshape(-1).view(torch.uint8).cpu().numpy()))
    return hasher.hexdigest()


def finite_text(value: Any, *, may_be_infinite: bool = False) -> str:
    """Return "finite", or the number of NaN and infinite elements in words; `may_be_infinite` allows infinity."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return "finite"
    local = local_tensor(value).detach()
    num_nan = int(local.isnan().sum())
    num_infinite = 0 if may_be_infinite else int(local.isinf().sum())
    texts = [f"{number} {word}" for number, word in ((num_nan, "NaN"), (num_infinite, "infinite")) if number]
    return ", ".join(texts) or "finite"


def _model_state(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    for model in trainer.rank_model.models:
        for name, value in model.state_dict(keep_vars=True).items():
            yield canonical_name(name), value


def _shard_text(value: Any) -> str:
    """Return the placements of a DTensor and the position of this rank in each, as text; "" if it is not sharded."""
    if not isinstance(value, DTensor):
        return ""
    coordinate = value.device_mesh.get_coordinate() or ()
    parts = [
        f"{placement} at {index}"
        for placement, index in zip(value.placements, coordinate, strict=True)
        if not placement.is_replicate()
    ]
    return f" {parts}" if parts else ""


def _value_text(value: Any) -> str:
    """Return a plain value as a string, with digests for tensors."""
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_value_text(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value_text, value)) + "]"
    return repr(value)
