"""What no input reached, from the gradients of a backward step."""

from __future__ import annotations

from typing import Any

import torch

from ckptx.runtime.parity.model_loaders import ModelFacts
from ckptx.runtime.parity.routing import Routing
from ckptx.runtime.parity.unreached_parameters import UnreachedParameters


def seen(*names: str, experts: int = 3) -> ModelFacts:
    routing = Routing({"mlp.experts": experts}, {})
    return ModelFacts({}, frozenset(), {}, {}, frozenset(names), routing, True, frozenset(names), 0, 0)


def unreached(gradients: dict[str, torch.Tensor], known: ModelFacts) -> list[dict[str, Any]]:
    """Of gradients that come one by one."""
    found = UnreachedParameters(known)
    for name, each in gradients.items():
        found.record({name: each})
    return found.list_parameters()


def test_a_parameter_without_a_gradient_or_with_zeros_was_not_reached() -> None:
    gradients = {"a": torch.tensor([0.0, 1e-30]), "b": torch.zeros(2)}
    assert unreached(gradients, seen("a", "b", "c")) == [{"name": "b"}, {"name": "c"}]


def test_experts_are_named_by_number() -> None:
    up, bias = torch.ones(3, 2, 2), torch.ones(3, 2)
    up[1] = 0
    bias[0] = bias[2] = 0
    gradients = {"mlp.experts.up": up, "mlp.experts.bias": bias, "other": torch.tensor([[0.0], [1.0], [1.0]])}
    assert unreached(gradients, seen(*gradients)) == [
        {"name": "mlp.experts.bias", "experts": [0, 2]},
        {"name": "mlp.experts.up", "experts": [1]},
    ]


def test_what_is_not_trained_is_not_missed() -> None:
    assert unreached({}, seen()) == []
