"""Every registered class that sees: all layers of towers and decoder are checkpointed, to the same bits."""

from __future__ import annotations

import json
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from ckptx.runtime.model.layers import layer_groups
from ckptx.runtime.parallel.activation_checkpointing.wrap import (
    KVSharingFallback,
    canonical_name,
    checkpoint_activations,
)
from ckptx.runtime.parity.inputs.batch import make_inputs
from tests.support.activation_checkpointing import LiveBytes, assert_equal_results, wrapped_names
from tests.support.audio_models import AUDIO_MODELS
from tests.support.corrections import all_corrections
from tests.support.slow import slow_but
from tests.support.vision_models import TINY, tiny

CANNOT = {"gemma3n"}  # its tower is a model of timm, which is no dependency
# Those that are registered and only listen, by the name of their model.
LISTENING = tuple(
    name
    for name in AUDIO_MODELS
    if name not in {*TINY, *CANNOT} and name in all_corrections() and all_corrections()[name].layers
)
FEW = ("mllama", "idefics2")  # two stacks in a tower; a resampler


def listener(name: str) -> nn.Module:
    """A model of a class that listens, as the class initializes it."""
    config, cls = (getattr(transformers, each) for each in AUDIO_MODELS[name].classes)
    model: nn.Module = cls(config(**AUDIO_MODELS[name].settings))
    return model


class Trained(NamedTuple):
    """What became of one step.

    Attributes:
        model: Checkpointed.
        count: Of its checkpointed layers.
        outcome: Loss and gradients.
        held: Bytes held between forward and backward.
    """

    model: nn.Module
    count: int
    outcome: tuple[list[float], dict[str, Any]]
    held: int


def trained(model_type: str, mode: str) -> Trained:
    torch.manual_seed(0)
    model: Any = (tiny(model_type) if model_type in TINY else listener(model_type)).float().train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product takes rows of 16 bytes alone
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    batch = make_inputs(config, batch_size=2, seed=0).batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVSharingFallback)
        count = checkpoint_activations(model, mode)
    torch.manual_seed(7)
    with LiveBytes() as live:
        loss = model(**batch, use_cache=False)[0].float().square().mean()
        held = live.total()
    loss.backward()
    gradients = {canonical_name(name): each.grad for name, each in model.named_parameters()}
    return Trained(model, count, ([loss.item()], gradients), held)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", slow_but((*TINY, *LISTENING), FEW))
def test_layers_of_every_tower_are_checkpointed_to_the_same_bits(model_type: str) -> None:
    wanted = trained(model_type, "none")
    held = {"none": wanted.held}
    for mode in ("full", "submodule", "selective"):
        model, count, found, held[mode] = trained(model_type, mode)
        layers = [layer.name for group in layer_groups(model).values() for layer in group]
        assert (
            count == len(layers) > model.config.get_text_config().num_hidden_layers - (model_type == "gemma4_unified")
        )
        assert mode == "submodule" or sorted(wrapped_names(model)) == sorted(layers)
        assert_equal_results(found, wanted.outcome)
    assert held["none"] > held["selective"] > held["full"]
    assert held["none"] > held["submodule"] > held["full"]
