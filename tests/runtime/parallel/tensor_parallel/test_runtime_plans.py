"""Which plan a model gets, who decided it, and what is refused before anything is built."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ckptx.architecture.correction_types import ForwardCorrection
from ckptx.architecture.corrections import corrections_of
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.model_files import read_index
from ckptx.architecture.run_support import check_heads
from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.styles import STYLES
from ckptx.runtime.parallel.tensor_parallel.forward_traits import ForwardTraits, find_forward_traits
from ckptx.runtime.parallel.tensor_parallel.plans import TpPlan, find_plan
from tests.support.corrections import forward_rows, patched_corrections
from tests.support.models import EVERY
from tests.support.tensor_parallel import config_of

Q = "model.layers.*.self_attn.q_proj"


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return EVERY[name].model()


def plan_for(name: str, user: dict[str, str] | None = None, sequence_parallel: bool = False) -> TpPlan:
    model = on_meta(name)
    return find_plan(model, config_of(model), user, sequence_parallel)


# Lookup


def test_rows_of_a_class_are_found_where_transformers_defines_it() -> None:
    for name, rows in forward_rows().items():
        cls = getattr(transformers, name)
        model = cls.__new__(cls)
        assert find_forward_traits(model) != ForwardTraits() and rows, name


def as_it_runs(model: Any) -> list[Any]:
    try:
        plan = find_plan(model, config_of(model), None, True)
    except UnsupportedError:
        plan = find_plan(model, config_of(model))
    return [plan.runnable_patterns, plan.sharded_head, plan.reads_weight, plan.sequence, plan.sharding.patterns()]


def unused_rows(rows: dict[str, list[ForwardCorrection]]) -> set[tuple[str, str]]:
    """Rows, by class and reason, without which every model of the tests runs as it does with them."""
    found = {(name, row.reason) for name, each in rows.items() for row in each}
    types = read_index()["classes"]
    for name in EVERY:
        model = on_meta(name)
        of_model = rows.get(type(model).__name__, [])
        before = as_it_runs(model) if of_model else []
        for row in of_model:
            model_type = types[row.class_name]
            others = tuple(each for each in corrections_of(model_type).forward if each is not row)
            with patched_corrections(model_type, forward=others):
                if as_it_runs(model) != before:
                    found.discard((row.class_name, row.reason))
    return found


def test_every_row_changes_how_a_model_runs() -> None:
    assert unused_rows(forward_rows()) == set()


def test_a_row_that_changes_nothing_is_reported() -> None:
    nothing = ForwardCorrection("LlamaForCausalLM", "for a test", runs=("model.layers.*.mlp.nowhere",))
    with patched_corrections("llama", forward=(*corrections_of("llama").forward, nothing)):
        assert unused_rows({"LlamaForCausalLM": [nothing]}) == {("LlamaForCausalLM", "for a test")}


def test_each_pattern_says_who_decided_it() -> None:
    assert plan_for("llama-tied").origins["lm_head"] == "optimized plan"
    assert plan_for("llama-tied").origins[Q].startswith("model plan (transformers ")
    assert plan_for("gpt2").origins["transformer.h.*.attn.c_attn"] == "override"
    assert plan_for("qwen3-vl").origins["model.language_model.layers.*.mlp.up_proj"] == "optimized plan"
    assert plan_for("llama-tied", {Q: "replicate"}).origins[Q] == "user plan"


def test_an_override_made_for_files_does_not_run_on_shards() -> None:
    plan = plan_for("gpt2")
    assert not plan.runs_on_shards("transformer.h.0.attn.c_attn.weight")
    assert plan.runs_on_shards("transformer.wte.weight")
    assert plan_for("gemma4").runs_on_shards("model.layers.0.self_attn.q_proj.weight")  # it repeats the model's plan


class Mixin:
    """What a trainer puts in front of a class."""


def test_a_wrapped_class_that_keeps_its_names_keeps_its_plan() -> None:
    model = on_meta("llama-untied")
    cls = type(model)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    model.__class__ = type(cls.__name__, (Mixin, cls), names)
    plan = find_plan(model, config_of(model), None, True)
    assert plan.sharded_head == "lm_head"
    assert plan.sequence is not None
    assert plan.runs_on_shards("model.layers.0.self_attn.q_proj.weight")


def test_a_class_of_the_same_bare_name_does_not_get_it() -> None:
    class LlamaForCausalLM(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.lm_head = model.model, model.lm_head

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids

    stock = on_meta("llama-untied")
    plan = find_plan(LlamaForCausalLM(stock), config_of(stock))
    assert plan.sharded_head == ""
    assert not plan.runnable_patterns
    assert plan.sharding.find_rule("lm_head.weight") is not None  # cut as `reshard` cuts it, and gathered


def test_the_users_plan_goes_on_top() -> None:
    plan = plan_for("llama-untied", {"lm_head": "replicate", "model.layers.1.mlp.up_proj": "colwise"})
    assert plan.sharded_head == ""
    assert plan.style_of("lm_head") == "replicate"
    assert not plan.runs_on_shards("lm_head.weight")
    assert plan.runs_on_shards("model.layers.1.mlp.up_proj.weight")  # it repeats the model's plan
    assert plan.style_of("model.layers.0.mlp.down_proj") == "rowwise"


def test_a_style_of_a_module_around_parameters_is_found() -> None:
    assert plan_for("qwen3-moe").style_of("model.layers.0.mlp.experts") == "moe_tp_experts"
    assert plan_for("qwen3-moe").style_of("model.layers.0.mlp.gate") == "replicate"


class Foreign(nn.Module):
    def __init__(self, tp_plan: dict[str, str]) -> None:
        super().__init__()
        self.tp_plan = tp_plan
        self.up = nn.Linear(4, 4)


@pytest.mark.parametrize("style", [style for style in STYLES if style != "replicate"])
def test_a_class_that_nobody_knows_has_its_own_plan(style: str) -> None:
    plan = find_plan(Foreign({"up": style}), {})
    assert plan.style_of("up") == style
    assert plan.origins == {"up": "plan of Foreign"}


def test_without_any_plan_everything_is_whole() -> None:
    plan = find_plan(Foreign({}), {})
    assert (plan.origins, plan.runnable_patterns) == ({}, frozenset())
    assert plan.style_of("up") == "replicate"


# Refusals


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"up": "diagonal"}, 'plan of Foreign: "up" has the unknown style "diagonal"; override it in'),
        ({"down": "colwise"}, "Foreign: none of the 1 patterns of its tensor parallel plan matches a parameter"),
    ],
)
def test_a_wrong_plan_of_a_class_is_refused(plan: dict[str, str], said: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        find_plan(Foreign(plan), {})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({Q: "diagonal"}, f"unknown style 'diagonal' for \"{Q}\"; use one of"),
        ({"layers.*.q": "colwise"}, "none of its 1 patterns matches a parameter of LlamaForCausalLM"),
    ],
)
def test_a_wrong_plan_of_the_user_is_refused(user: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        plan_for("llama-tied", user)
    assert said in str(error.value)


def test_a_plan_for_another_stage_is_none_that_matches_nothing() -> None:
    model = on_meta("llama-untied")
    names = [name for name, _ in model.named_parameters()]
    config = config_of(model)
    del model.model.layers[1]
    user = {"model.layers.1.mlp.up_proj": "replicate"}
    with pytest.raises(UsageError):
        find_plan(model, config, user)
    assert find_plan(model, config, user, names=names).style_of("model.layers.1.mlp.up_proj") == "replicate"


@pytest.mark.parametrize("name", ["qwen3-vl", "gpt2", "mamba", "t5", "falcon"])
def test_sequence_parallel_that_nobody_verified_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="sequence parallel is not verified for this class"):
        plan_for(name, sequence_parallel=True)


# Heads


def heads_of(config: dict[str, Any], tp: int) -> None:
    architecture = find_architecture(config)
    assert architecture is not None
    check_heads(config, tp, architecture)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
}  # fmt: skip
# As transformers writes it from 5.23 on.
GEMMA4_BY_LAYER = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "attention_k_eq_v": True, "per_layer_config": {"5": {"num_key_value_heads": 2, "head_dim": 16}, "11": {}},
}  # fmt: skip
GEMMA4_VLM = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": GEMMA4_BY_LAYER,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tp", "said", "sizes"),
    [
        (LLAMA, 8, "LlamaForCausalLM: tp=8 does not divide num_key_value_heads=4;", "1, 2 or 4"),
        (LLAMA, 3, "LlamaForCausalLM: tp=3 does not divide num_attention_heads=8, num_key_value_heads=4;", "1, 2 or 4"),
        ({**LLAMA, "num_key_value_heads": 1}, 2, "LlamaForCausalLM: tp=2 does not divide num_key_value_heads=1;", "1"),
        (GEMMA4, 4, "Gemma4ForCausalLM: tp=4 does not divide num_global_key_value_heads=2;", "1 or 2"),
        (
            {**GEMMA4_BY_LAYER, "architectures": ["Gemma4ForCausalLM"]}, 4,
            "Gemma4ForCausalLM: tp=4 does not divide num_key_value_heads=2;", "1 or 2",
        ),
        (GEMMA4_VLM, 4, "Gemma4ForConditionalGeneration: tp=4 does not divide num_key_value_heads=2;", "1 or 2"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {
                "model_type": "gemma3_text", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}},
            8, "Gemma3ForConditionalGeneration: tp=8 does not divide num_key_value_heads=4", "1, 2 or 4",
        ),
    ],
)  # fmt: skip
def test_heads_that_do_not_divide_are_refused(config: dict[str, Any], tp: int, said: str, sizes: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        heads_of(config, tp)
    assert str(error.value).startswith(said)
    assert str(error.value).endswith(f"choose tp {sizes}")
    for size in re.findall(r"\d+", sizes):
        heads_of(config, int(size))


@pytest.mark.parametrize(
    ("config", "tp"),
    [
        (LLAMA, 4),
        (GEMMA4, 2),
        (GEMMA4_VLM, 2),
        ({**GEMMA4, "attention_k_eq_v": False}, 4),  # then the number of global heads is not read
        ({**LLAMA, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, 8),  # gathers q, k and v
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 4}, 8),  # is gathered
    ],
)
def test_heads_that_divide_or_are_gathered_are_not(config: dict[str, Any], tp: int) -> None:
    heads_of(config, tp)
