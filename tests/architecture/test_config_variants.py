"""Which configs the table's builder tries: on a class made for it, whose names depend on its config in every way.

No `from __future__ import annotations` here: the builder reads the annotations of config classes, as types.
"""

from types import ModuleType
from typing import Any, Literal

import pytest
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ckptx.architecture.introspection import meta_model
from ckptx.architecture.introspection.meta_model import MetaModelNames
from tests.support.import_tool import tool


class TowerConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "tower-for-tests"
    tower_bias: bool = False


class SwitchConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "switches-for-tests"
    sub_configs = {"tower_config": TowerConfig}  # noqa: RUF012 (as transformers has it)
    tower_config: TowerConfig | dict[str, Any] | None = None
    num_hidden_layers: int = 40
    bias: bool = False
    rank: int | None = 16
    experts: int = 0
    dense_layers: list[int] | None = None
    kind: Literal["plain", "gated", "impossible"] = "plain"
    feed_forward_proj: str = "relu"
    unread: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.tower_config, dict):
            self.tower_config = TowerConfig(**self.tower_config)
        self.dense_layers = self.dense_layers or []
        self.is_gated_act = self.feed_forward_proj.startswith("gated")
        super().__post_init__(**kwargs)


built: list[SwitchConfig] = []


class Switches(PreTrainedModel):  # type: ignore[misc]
    config_class = SwitchConfig
    base_model_prefix = "model"

    def __init__(self, config: SwitchConfig) -> None:
        super().__init__(config)
        built.append(config)
        if config.kind == "impossible":
            raise ValueError("no such kind")
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=config.bias) for _ in range(config.num_hidden_layers))
        parts = {
            "down": config.rank is not None,
            "straight": config.rank is None,
            "gate": config.kind == "gated",
            "wi_1": config.is_gated_act,
            "dense": 0 in config.dense_layers,
        }
        for name, there in parts.items():
            if there:
                self.add_module(name, nn.Linear(2, 2, bias=False))
        if config.experts:
            self.experts = nn.Linear(2, 2, bias=config.bias)
        if config.tower_config is not None:
            self.tower = nn.Linear(2, 2, bias=config.tower_config.tower_bias)
        self.post_init()


@pytest.fixture(scope="module")
def variants() -> ModuleType:
    return tool("config_variants")


@pytest.fixture(scope="module")
def default() -> MetaModelNames:
    known = meta_model.derive_architecture(Switches, meta_model.default_config_builder(Switches), {})
    return MetaModelNames.from_architecture(known)


@pytest.fixture(scope="module")
def found(variants: ModuleType, default: MetaModelNames) -> frozenset[str]:
    built.clear()
    names = variants.names_of_variants(Switches, meta_model.default_config_builder(Switches), {}, default)
    assert isinstance(names.patterns, frozenset)
    return names.patterns


def test_the_default_has_the_names_of_one_config(default: MetaModelNames) -> None:
    assert default.patterns == {"layers.*.weight", "down.weight"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("layers.*.bias", id="a flag"),
        pytest.param("straight.weight", id="a number that may be None"),
        pytest.param("experts.weight", id="a count that is zero"),
        pytest.param("dense.weight", id="a list that is empty"),
        pytest.param("gate.weight", id="a word of a Literal"),
        pytest.param("wi_1.weight", id="a word that the config class turns into another key"),
        pytest.param("tower.weight", id="a config that is None"),
        pytest.param("tower.bias", id="a flag in a config that was None"),
        pytest.param("experts.bias", id="two keys at once"),
    ],
)
def test_names_that_a_config_switches_on_are_found(name: str, found: frozenset[str]) -> None:
    assert name in found


def test_nothing_else_is_found(found: frozenset[str], default: MetaModelNames) -> None:
    assert len(found) == len(default.patterns) + 9


def test_keys_that_the_model_does_not_read_are_left_alone_and_layers_are_few(found: frozenset[str]) -> None:
    assert found and built
    assert not any(config.unread for config in built)
    assert sum(config.num_hidden_layers > 8 for config in built) == 1, "only to see which names the default has"


def test_transformers_is_left_as_it_was(variants: ModuleType, default: MetaModelNames) -> None:
    before = PreTrainedConfig.__getattribute__
    variants.names_of_variants(Switches, meta_model.default_config_builder(Switches), {}, default)
    assert PreTrainedConfig.__getattribute__ is before
