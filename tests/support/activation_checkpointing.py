"""Train tiny models with activation checkpointing, and compare the results bit for bit."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckptx.runtime.parallel.activation_checkpointing.wrap import (
    KVSharingFallback,
    canonical_name,
    checkpoint_activations,
)
from tests.support.models import EVERY, VOCAB, Recipe, build

Gradients = dict[str, torch.Tensor | None]


def microbatch(recipe: Recipe, index: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a recipe; text-only inputs have different tokens in each microbatch."""
    inputs = recipe.inputs()
    if set(inputs) == {"input_ids"}:
        inputs["input_ids"] = (inputs["input_ids"] + index) % VOCAB
    return inputs


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean square of the first output of a model."""
    found: torch.Tensor = model(**inputs)[0]
    return found.float().square().mean()


def train(model: nn.Module, recipe: Recipe, microbatches: int = 1) -> tuple[list[float], Gradients]:
    """Return losses and gradients; each forward pass runs before the previous backward pass, as in 1F1B."""
    torch.manual_seed(7)
    pending: list[torch.Tensor] = []
    losses = []
    for index in range(microbatches):
        pending.append(loss_of(model, microbatch(recipe, index)))
        losses.append(pending[-1].item())
        if len(pending) == 2:
            pending.pop(0).backward()
    for loss in pending:
        loss.backward()
    return losses, {canonical_name(name): parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_results(found: tuple[list[float], Gradients], expected: tuple[list[float], Gradients]) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        other = found[1][name]
        assert (other is None) == (gradient is None), name
        assert gradient is None or (other is not None and torch.equal(other, gradient)), name
    assert any(gradient is not None and gradient.any() for gradient in expected[1].values())


def build_checkpointed(name: str, mode: str, scope: str = "all") -> nn.Module:
    """Build the model of a recipe with activation checkpointing."""
    model: nn.Module = build(EVERY[name]).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVSharingFallback)
        checkpoint_activations(model, mode, scope)
    return model


def wrapped_names(model: nn.Module) -> list[str]:
    """Return the names of the checkpointed modules."""
    return [canonical_name(name) for name, each in model.named_modules() if isinstance(each, CheckpointWrapper)]


class OperationCounter(TorchDispatchMode):
    """Mode that counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[Any] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[op] += 1
        return op(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of tensors that were created and are still alive.

    `saved_tensors_hooks` cannot be used: a checkpointed region has its own hooks, and outer hooks see no tensors in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._storages.add(leaf.untyped_storage())
        return result

    def total(self) -> int:
        """Return the bytes of all storages that are still alive."""
        gc.collect()  # free tensors in reference cycles
        return sum(storage.nbytes() for storage in self._storages)
