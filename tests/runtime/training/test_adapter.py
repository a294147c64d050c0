"""A LoRA of a recipe computes what PEFT computes, starts equally on every mesh, and is all that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptx.adapters.state_dicts import is_lora_name
from ckptx.errors import UnsupportedError, UsageError
from ckptx.runtime.training.adapter import attach_adapter, initialize_adapter
from ckptx.runtime.training.recipe import AdapterBlock, Recipe
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.runtime.training.source import prepare_source
from tests.support.models import RECIPES, build, outputs
from tests.support.pool import GlooPool
from tests.support.slow import slow_but
from tests.support.training_ranks import train_and_compare

BLOCK = AdapterBlock(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))
MESHES = {
    "one rank": (),
    "fsdp": ("layout.dp_shard=2",),
    "pp": ("layout.pp=2",),
    "both": ("layout.pp=2", "layout.dp_shard=2"),
}


def recipe(*sets: str) -> Recipe:
    common = ("data.samples=8", "training.global_batch=4", "checks.layouts=[]", "layout.dp_shard=1")
    return read_recipe("llama_lora_tiny", (*common, *sets))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_source(recipe(), tmp_path_factory.mktemp("adapter") / "source")


@pytest.mark.parametrize("model", ["llama-fp32", "llama-untied", "qwen3"])
def test_outputs_are_those_of_peft(model: str) -> None:
    peft = pytest.importorskip("peft")
    ours, theirs = build(RECIPES[model]), build(RECIPES[model])
    attach_adapter(ours, BLOCK)
    config = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=list(BLOCK.targets), init_lora_weights=False)
    theirs = peft.get_peft_model(theirs, config, autocast_adapter_dtype=False)
    values = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): each
        for name, each in theirs.state_dict().items()
    }
    assert ours.load_state_dict(values, strict=False).unexpected_keys == []
    assert sum(map(is_lora_name, values)) == 8
    inputs = RECIPES[model].inputs()
    unchanged = outputs(build(RECIPES[model]), inputs)
    for a, b, c in zip(outputs(ours, inputs), outputs(theirs.base_model.model, inputs), unchanged, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_only_the_factors_are_trained() -> None:
    model = build(RECIPES["llama-tied"])
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert attach_adapter(model, BLOCK) == names
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_lora_name(name)} and len(trained) == 8
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained} == {"q_proj", "down_proj"}


def test_the_first_values_depend_on_seed_and_name_alone() -> None:
    found = []
    for seed, order in ((1, 1), (1, -1), (2, 1)):
        model = build(RECIPES["llama-untied"])
        attach_adapter(model, BLOCK)
        initialize_adapter(list(model.named_parameters())[::order], seed)
        found.append({name: each.detach() for name, each in model.named_parameters() if is_lora_name(name)})
    first, reordered, reseeded = found
    for name, each in first.items():
        assert torch.equal(each, reordered[name])
        is_b = ".lora_B." in name
        assert torch.equal(each, reseeded[name]) == is_b and bool((each == 0).all()) == is_b
        assert each.abs().max() <= each.shape[1] ** -0.5
    assert len({float(each.sum()) for name, each in first.items() if ".lora_A." in name}) == 4


@pytest.mark.parametrize("mesh", slow_but(MESHES, ["fsdp"]))
def test_frozen_weights_keep_their_bytes(pool: GlooPool, source: Path, mesh: str) -> None:
    made = recipe(*MESHES[mesh], "training.local_batch=2")
    ranks = pool.run(train_and_compare, made.layout.dims.world_size, made, source, 2)
    for rank in ranks:
        assert rank.frozen and not rank.changed & rank.frozen and not rank.trained & rank.frozen
    trained = frozenset().union(*(rank.trained for rank in ranks))
    assert trained == frozenset().union(*(rank.changed for rank in ranks))
    assert len(trained) == 24 and all(map(is_lora_name, trained))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_proj", "w_proj"), 'no module is called "w_proj", which adapter.targets names'),
        (("proj",), 'no module is called "proj"'),
        (("self_attn",), '"model.layers.0.self_attn" is LlamaAttention'),
        (("embed_tokens",), '"model.embed_tokens" is Embedding, but adapter.targets must name modules of type Linear'),
    ],
)
def test_targets_that_are_no_linear_layers_are_refused(targets: tuple[str, ...], said: str) -> None:
    model: nn.Module = build(RECIPES["llama-untied"])
    with pytest.raises(UnsupportedError, match=said):
        attach_adapter(model, AdapterBlock(targets=targets))
    assert all(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("layout.tp=2", UnsupportedError, "layout.tp is 2, but ckptx's trainer does not shard the factors"),
        ("checks.layouts=[{tp: 2}]", UnsupportedError, r"checks.layouts\[0\].tp is 2"),
        ("adapter.rank=0", UsageError, "adapter.rank is 0 and must be 1"),
        ("adapter.alpha=0", UsageError, "adapter.alpha is 0"),
        ("adapter.targets=[]", UsageError, "adapter.targets is empty"),
        ("adapter.r=4", UsageError, "adapter.r"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: str, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        recipe(change)
