"""Every registered class that sees: all layers of towers and decoder are checkpointed, to the same bits."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from support.checkpointed import assert_same, wrappers
from support.vision_models import TINY, tiny
from torch import nn

from ckptx.runtime.activation_checkpointing import KVSharingFallback, canonical_name, checkpoint_activations
from ckptx.runtime.inputs import inputs_for
from ckptx.runtime.layers import layer_groups

FEW = ("mllama", "idefics2")  # two stacks in a tower; a resampler


def trained(model_type: str, mode: str) -> tuple[nn.Module, int, tuple[list[float], dict[str, Any]]]:
    """A model, the number of its checkpointed layers, loss and gradients."""
    torch.manual_seed(0)
    model: Any = tiny(model_type).float().train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product takes rows of 16 bytes alone
    batch = inputs_for(json.loads(model.config.to_json_string()), rows=2, seed=0).batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVSharingFallback)
        count = checkpoint_activations(model, mode)
    torch.manual_seed(7)
    loss = model(**batch, use_cache=False)[0].float().square().mean()
    loss.backward()
    return model, count, ([loss.item()], {canonical_name(name): each.grad for name, each in model.named_parameters()})


@pytest.mark.parametrize(
    "model_type", [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in TINY]
)
def test_layers_of_every_tower_are_checkpointed_to_the_same_bits(model_type: str) -> None:
    _, _, wanted = trained(model_type, "none")
    for mode in ("full", "submodule", "selective"):
        model, count, found = trained(model_type, mode)
        layers = [layer.name for group in layer_groups(model).values() for layer in group]
        assert (
            count == len(layers) > model.config.get_text_config().num_hidden_layers - (model_type == "gemma4_unified")
        )
        assert mode == "submodule" or sorted(wrappers(model)) == sorted(layers)
        assert_same(found, wanted)
