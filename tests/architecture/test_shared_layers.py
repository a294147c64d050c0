"""Layers that share modules: what the table says under a config is what the class says that is built under it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.architecture.class_table import find_class_record, lookup
from ckptx.architecture.introspection import meta_model
from ckptx.architecture.lookup import find_architecture

SIZES = {
    "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32,
    "mamba_headdim": 16, "n_mamba_heads": 8, "adapter_rank": 4,
}  # fmt: skip
CLASSES = ("Zamba2ForCausalLM", "Zamba2Model", "ZambaForCausalLM", "ZambaForSequenceClassification")
LISTS = st.lists(st.sampled_from(("hybrid", "mamba", "linear_attention")), min_size=2, max_size=9)


def config_of(class_name: str, kinds: list[str], **changes: Any) -> dict[str, Any]:
    model_type = "zamba2" if class_name.startswith("Zamba2") else "zamba"
    named = {"architectures": [class_name], "model_type": model_type}
    return {**named, **SIZES, "layers_block_type": kinds, "num_hidden_layers": len(kinds), **changes}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("class_name", CLASSES)
@given(
    kinds=LISTS.filter(lambda kinds: kinds.count("hybrid") > 1),
    blocks=st.sampled_from((None, 1, 2, 3, 7)),
    flags=st.dictionaries(
        st.sampled_from(("use_shared_attention_adapter", "add_bias_linear", "tie_word_embeddings", "use_mem_rope")),
        st.booleans(),
    ),
)
@settings(deadline=None, max_examples=6)
def test_the_table_and_the_built_class_agree(
    class_name: str, kinds: list[str], blocks: int | None, flags: dict[str, bool]
) -> None:
    period = {} if blocks is None or class_name.startswith("ZambaFor") else {"num_mem_blocks": blocks}
    config = config_of(class_name, kinds, **flags, **period)
    ours, built = find_architecture(config), meta_model.introspect(config)
    assert ours is not None and built is not None and ours.known_from == "table"
    assert set(ours.ties) == set(built.ties) and len(ours.ties) == len(built.ties)
    assert all(ours.owns(name) for pair in ours.ties for spelled in pair.namings for name in spelled)
    assert built.name_patterns <= ours.name_patterns
    assert ours.stacks(config) == built.stacks(config)
    assert ours.tensor_parallel_plan(config) == built.tensor_parallel_plan(config)
    assert set(built.conversions(config)) <= set(ours.conversions(config))
    assert ours.base_prefix == built.base_prefix
    assert not ours.ties or not built.ties or ours.ties_flag_editable == built.ties_flag_editable


# What a list of layers can be besides what was measured: then the class is built, and says what it thinks of it.
OTHERWISE: tuple[dict[str, Any], ...] = (
    {"layers_block_type": None},
    {"layers_block_type": "hybrid"},
    {"layers_block_type": ["hybrid", 3]},
    {"layers_block_type": ["hybrid"]},
    {"num_hidden_layers": 5},
    {"num_hidden_layers": None},
    {"num_mem_blocks": 0},
    {"num_mem_blocks": -1},
    {"num_mem_blocks": True},
    {"num_mem_blocks": "1"},
    {"num_mem_blocks": None},
    {"use_shared_attention_adapter": "yes"},
    {"add_bias_linear": None},
    {"layer_types": ["hybrid", "hybrid"]},
)


@pytest.mark.parametrize("changes", OTHERWISE, ids=repr)
def test_what_was_not_measured_is_not_read_off_the_table(changes: dict[str, Any]) -> None:
    row = find_class_record("Zamba2ForCausalLM")
    assert row is not None
    config = config_of("Zamba2ForCausalLM", ["hybrid", "hybrid"])
    assert row.covers(config) and row.architecture_for(config) is not None
    assert not row.covers({**config, **changes}) and row.architecture_for({**config, **changes}) is None


@pytest.mark.parametrize("gone", ["layers_block_type", "num_hidden_layers"])
def test_a_config_that_leaves_the_layers_to_the_class_is_not_read_off_the_table(gone: str) -> None:
    row = find_class_record("Zamba2ForCausalLM")
    config = config_of("Zamba2ForCausalLM", ["hybrid", "hybrid"])
    assert row is not None and not row.covers({key: value for key, value in config.items() if key != gone})


@pytest.mark.parametrize("class_name", CLASSES)
def test_without_a_config_nothing_is_said(class_name: str) -> None:
    assert lookup(class_name) is None
