"""Layers are found one by one: every decoder layer the config counts, and never the list that holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ckptx.errors import UnsupportedError
from ckptx.runtime.model.layers import (
    canonical_name,
    find_layers_row,
    find_submodule,
    is_layer_list,
    is_stage,
    is_stub,
    layer_groups,
)  # fmt: skip
from tests.support.models import EVERY, build

VLM = "gemma3-vlm"


class Stub(nn.Module):
    """As a pipeline stage puts in the place of a layer."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


Stub.__module__ = "ckptx.runtime.parallel.pipeline"


class Block(nn.Module):
    """A layer with a list of experts in it."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(experts))


class Plain(nn.Module):
    """A model that no table knows."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def counted(model: nn.Module) -> dict[str, int]:
    return {group: len(layers) for group, layers in layer_groups(model).items()}


def expected(config: Any) -> dict[str, int]:
    """The layers that a config asks for, by the keys that transformers reads."""
    vision = getattr(config, "vision_config", None)
    towers = (getattr(vision, "num_hidden_layers", None) or getattr(vision, "depth", 0)) if vision else 0
    if config.is_encoder_decoder:
        encoder = getattr(config, "encoder_layers", config.num_hidden_layers)
        decoder = getattr(config, "decoder_layers", getattr(config, "num_decoder_layers", None))
        return {"language": encoder + decoder, "vision": 0, "audio": 0}
    audio = getattr(config, "audio_config", None)
    ears = getattr(audio, "num_hidden_layers", 0) if audio else 0
    return {"language": config.get_text_config().num_hidden_layers, "vision": towers, "audio": ears}


def as_dict(layers: nn.ModuleList, kept: range | None = None) -> nn.ModuleDict:
    """What a split makes of a list: the layers of a stage under their indices."""
    return nn.ModuleDict({str(index): layers[index] for index in kept or range(len(layers))})


def replace(model: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, key = path.rpartition(".")
    model.get_submodule(parent).register_module(key, new)


def decoder_path(model: nn.Module) -> str:
    return layer_groups(model)["language"][-1].name.rpartition(".")[0]


@pytest.mark.parametrize("name", EVERY)
def test_every_layer_of_the_config_is_found_in_a_list_and_in_a_dict(name: str) -> None:
    model = build(EVERY[name])
    groups = layer_groups(model)
    assert counted(model) == expected(model.config)
    everything = dict(model.named_modules())
    for layer in [layer for layers in groups.values() for layer in layers]:
        assert everything[layer.name] is layer.module
        assert not is_layer_list(layer.module)
    path = decoder_path(model)
    replace(model, path, as_dict(model.get_submodule(path)))
    assert layer_groups(model) == groups


def test_layers_of_other_stages_are_left_out() -> None:
    model = build(EVERY[VLM])
    for stub in (Stub(), nn.Identity()):
        model.model.language_model.layers[0] = stub
        assert [layer.name for layer in layer_groups(model)["language"]] == ["model.language_model.layers.1"]
        assert is_stage(model)
    replace(model, "model.language_model.layers", as_dict(model.model.language_model.layers, range(1, 2)))
    assert [layer.name for layer in layer_groups(model)["language"]] == ["model.language_model.layers.1"]
    model.model.vision_tower = None  # on a stage that is not the first
    assert counted(model) == {"language": 1, "vision": 0, "audio": 0}


def test_a_module_dict_without_layers_is_a_stage_that_owns_none() -> None:
    model = build(EVERY["llama-fp32"])
    assert not is_stage(model)
    model.model.layers = nn.ModuleDict()
    assert is_stage(model)
    assert counted(model)["language"] == 0


@pytest.mark.parametrize(
    ("module", "stub"),
    [(None, True), (nn.Identity(), True), (Stub(), True), (nn.Dropout(), False), (nn.Linear(1, 1), False)],
)
def test_what_is_a_stub(module: nn.Module | None, stub: bool) -> None:
    assert is_stub(module) is stub


def test_a_class_of_ours_with_parameters_is_no_stub() -> None:
    mine = Stub()
    mine.weight = nn.Parameter(torch.zeros(1))
    assert not is_stub(mine)


def test_a_mixin_and_a_derived_class_keep_their_row() -> None:
    cls = transformers.Gemma3ForConditionalGeneration
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}

    class Mixin:
        pass

    model = build(EVERY[VLM])
    before = counted(model)
    for other in (type(cls.__name__, (Mixin, cls), names), type("FSDPGemma3", (cls,), {})):
        model.__class__ = other
        assert counted(model) == before == {"language": 2, "vision": 1, "audio": 0}


def test_a_foreign_class_of_the_same_bare_name_does_not() -> None:
    foreign = type("Gemma3ForConditionalGeneration", (Plain,), {})
    model = foreign(body=Plain(blocks=nn.ModuleList([Block()])))
    assert find_layers_row(model) is None
    assert [layer.name for layer in layer_groups(model)["language"]] == ["body.blocks.0"]


def test_a_registered_class_without_its_decoder_is_refused_by_name() -> None:
    model = build(EVERY[VLM])
    model.model.language_model.strata = model.model.language_model.layers
    del model.model.language_model.layers
    with pytest.raises(UnsupportedError, match=r"^Gemma3ForConditionalGeneration: .*model\.language_model\.layers"):
        layer_groups(model)


def test_a_model_without_a_list_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"^Plain: cannot find a list of layers"):
        layer_groups(Plain(one=nn.Linear(2, 2), convolutions=nn.ModuleList([nn.Linear(2, 2)])))


def test_the_list_of_layers_is_not_a_longer_list_of_experts_projections_or_adapters() -> None:
    model = Plain(
        adapters=nn.ModuleDict({"first": Block(9), "second": Block(9)}),
        projections=nn.ModuleList(nn.Linear(8, 8) for _ in range(9)),
        head=nn.ModuleList([Block()]),
        body=Plain(stack=nn.ModuleList([Block(experts=7), Block(experts=7)])),
    )
    assert [layer.name for layer in layer_groups(model)["language"]] == ["body.stack.0", "body.stack.1"]


def test_lists_in_a_list_are_flattened() -> None:
    model = Plain(stages=nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])]))
    assert [layer.name for layer in layer_groups(model)["language"]] == ["stages.0.0", "stages.0.1", "stages.1.0"]


@pytest.mark.parametrize(
    ("config", "model", "group", "convolutions"),
    # transformers checkpoints the seven convolutions before the encoder of Wav2Vec2, too
    [("ViTConfig", "ViTModel", "vision", 0), ("Wav2Vec2Config", "Wav2Vec2Model", "audio", 7)],
)
def test_a_tower_by_itself_is_in_its_group(config: str, model: str, group: str, convolutions: int) -> None:
    settings = getattr(transformers, config)(num_hidden_layers=3)
    with torch.device("meta"):
        built = getattr(transformers, model)(settings)
    assert counted(built) == {"language": 0, "vision": 0, "audio": 0, group: 3 + convolutions}


def test_a_property_is_no_second_name() -> None:
    class Alias(Plain):
        @property
        def layers(self) -> nn.Module:
            return self.stack

    model = Alias(stack=nn.ModuleList([Block()]))
    assert find_submodule(model, "layers") is None
    assert find_submodule(model, "stack") is model.stack


def test_wrappers_are_seen_through_and_not_in_names() -> None:
    model = build(EVERY["llama-fp32"])
    before = [layer.name for layer in layer_groups(model)["language"]]
    compiled = torch.compile(model)
    assert [layer.name for layer in layer_groups(compiled)["language"]] == before
    assert canonical_name("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp._orig_mod.weight") == (
        "model.layers.0.mlp.weight"
    )
