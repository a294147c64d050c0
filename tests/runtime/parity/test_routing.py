"""Tokens sent to every expert in turn: which modules are found, and what is changed of what they get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ckptx.runtime.parity.execution import run_step
from ckptx.runtime.parity.inputs.batch import make_inputs
from ckptx.runtime.parity.routing import Routing, find_routing, install_even_routing
from tests.support.models import EVERY, build


class Experts(nn.Module):
    """Notes where tokens go."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(count, 2, 2))
        self.seen: list[Any] = []

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        self.seen.append(top_k_index.tolist())
        return hidden


class Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = Experts(count)


@pytest.mark.parametrize("is_named", [True, False])
def test_the_second_half_of_tokens_goes_to_experts_in_turn(is_named: bool) -> None:
    model = Model(5)
    routing = find_routing(model)
    assert routing == Routing({"experts": 5}, {})
    install_even_routing(model, routing)
    indices, weights = torch.tensor([[4, 0], [4, 1], [4, 2], [4, 0], [4, 3]]), torch.ones(5, 2)
    if is_named:
        model.experts(torch.ones(5, 2), top_k_index=indices, top_k_weights=weights)
    else:
        model.experts(torch.ones(5, 2), indices, weights)
    assert model.experts.seen == [[[4, 0], [4, 1], [0, 1], [2, 3], [4, 0]]]


def test_a_module_that_is_not_told_indices_is_left_alone() -> None:
    class Projection(nn.Module):
        def forward(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return hidden

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection, self.gate = Projection(), nn.Linear(2, 4)

    assert find_routing(Plain()) == Routing({}, {})


class ScoreRouter(nn.Linear):
    """Gives a score for each expert, all but the chosen ones zero."""


def test_scores_are_rolled_so_that_each_expert_is_the_first_in_turn() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = ScoreRouter(3, 3, bias=False)
            self.router.weight = nn.Parameter(torch.eye(3))

    model = Scored()
    routing = find_routing(model)
    assert routing == Routing({}, {"router": 3})
    install_even_routing(model, routing)
    scores = torch.tensor([[0, 9, 0], [0, 0, 9], [0, 9, 1], [0, 9, 1], [8, 0, 1], [8, 0, 1.0]])
    found = model.router(scores)
    assert found[:3].tolist() == scores[:3].tolist()
    assert found[3:].argmax(-1).tolist() == [0, 1, 2]
    assert [sorted(row) for row in found.tolist()] == [sorted(row) for row in scores.tolist()]


@pytest.mark.parametrize(
    ("routing", "config", "tokens"),
    [
        (Routing({}, {}), {}, 0),
        (Routing({"a": 128}, {}), {"num_experts_per_tok": 8}, 17),
        (Routing({"a": 128, "b": 10}, {}), {"text_config": {"num_experts_per_tok": 3}}, 44),
        (Routing({"a": 16}, {}), {}, 17),
        (Routing({"a": 16}, {}), {"num_experts_per_tok": None, "moe_topk": 0}, 17),
        (Routing({}, {"router": 16}), {"num_experts_per_tok": 4}, 17),
    ],
)
def test_as_many_tokens_are_needed_as_reach_each_expert(routing: Routing, config: dict[str, Any], tokens: int) -> None:
    assert routing.min_tokens(config) == tokens


MIXTURES = [name for name in EVERY if any(word in name for word in ("moe", "deepseek", "mixtral", "gpt-oss", "llama4"))]


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_of_a_class_gets_a_gradient(name: str) -> None:
    """Also where there are more than a text has tokens, if it is made as long as needed."""
    model = build(EVERY[name]).float()
    routing = find_routing(model)
    assert routing.expert_counts or routing.score_routers
    install_even_routing(model, routing)
    config = model.config.to_dict()
    inputs = make_inputs(config, min_tokens=routing.min_tokens(config))
    gradients = run_step(model, [inputs], backward=True).gradients
    for path, count in routing.expert_counts.items():
        fused = {each: tensor for each, tensor in gradients.items() if each.rpartition(".")[0] == path}
        assert fused, path
        for each, tensor in fused.items():
            assert [bool(tensor[expert].any()) for expert in range(count)] == [True] * count, each


def test_many_experts_are_all_reached() -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=99, hidden_size=16, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, min_head_dim=8, num_experts=128, num_experts_per_tok=3,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    routing = find_routing(model)
    inputs = make_inputs(config.to_dict(), min_tokens=routing.min_tokens(config.to_dict()))
    assert inputs.batch["input_ids"].shape == (2, 44)
    before = run_step(model, [inputs], backward=True).gradients
    install_even_routing(model, routing)
    after = run_step(model, [inputs], backward=True).gradients
    name = "model.layers.1.mlp.experts.down_proj"
    assert sum(bool(before[name][expert].any()) for expert in range(128)) < 128
    assert sum(bool(after[name][expert].any()) for expert in range(128)) == 128
