"""Which keys of two configs differ, and which of these change what a model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptx.comparison.configs import ConfigDifference, compare_configs

CONFIG: dict[str, Any] = {
    "architectures": ["XForCausalLM"], "model_type": "x", "rms_norm_eps": 1e-6, "eos_token_id": [1, 2],
    "layer_types": ["full", "sliding"], "sliding_window": 4096, "pad_token_id": None, "dtype": "bfloat16",
    "tie_word_embeddings": True, "use_bias": True,
    "text_config": {"rope_parameters": {"rope_theta": 1e4, "factor": 8}, "attention_dropout": 0.0, "scales": []},
    "vision_config": {}, "id2label": {"0": "a"},
}  # fmt: skip


def changed(key: str, value: Any) -> dict[str, Any]:
    """The config with one value changed, added, or, given as `...`, taken out."""
    made = copy.deepcopy(CONFIG)
    *scopes, name = key.split(".")
    at = made
    for scope in scopes:
        at = at.setdefault(scope, {})
    if value is ...:
        del at[name]
    else:
        at[name] = value
    return made


@pytest.mark.parametrize(
    ("key", "value", "is_noted"),
    [
        ("rms_norm_eps", 1e-5, False), ("sliding_window", 64, False), ("sliding_window", None, False),
        ("sliding_window", ..., False), ("layer_types", ["full", "full"], False), ("layer_types", ["full"], False),
        ("text_config.rope_parameters.factor", 32, False), ("text_config.rope_parameters.rope_theta", 10001, False),
        ("architectures", ["YForCausalLM"], False), ("model_type", "y", False), ("use_bias", False, False),
        ("use_bias", 1, False), ("what_no_list_knows", 1, False), ("text_config.new", "x", False),
        ("vision_config.depth", 2, False), ("token_dropout", True, False), ("text_config.top_k", 3, False),
        ("eos_token_id", 1, True), ("eos_token_id", [1, 2, 3], True), ("dtype", "float32", True),
        ("text_config.attention_dropout", 0.1, True), ("initializer_range", 0.3, True), ("pad_token_id", 0, True),
        ("transformers_version", "4", True), ("id2label.0", "b", True), ("vision_config.drop_path_rate", 0.1, True),
        ("text_config.use_cache", True, True), ("router_aux_loss_coef", 0.1, True),
    ],
)  # fmt: skip
def test_a_key_that_differs_is_named_and_judged(key: str, value: Any, is_noted: bool) -> None:
    for ours, theirs in ((CONFIG, changed(key, value)), (changed(key, value), CONFIG)):
        (found,) = compare_configs(ours, theirs)
        assert (found.key, found.has_no_effect) == (key, is_noted)
        assert found.reference != found.checkpoint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", False), ("text_config.tie_word_embeddings", True), ("new", None),
        ("text_config.rope_parameters.rope_theta", 10000), ("layer_types", ("full", "sliding")),
        ("pad_token_id", ...), ("rms_norm_eps", 0.000001), ("text_config.scales", ()),
    ],
)  # fmt: skip
def test_what_means_the_same_is_no_difference(key: str, value: Any) -> None:
    assert compare_configs(CONFIG, changed(key, value)) == []
    assert compare_configs(changed(key, value), CONFIG) == []


def test_ids_count_where_a_class_computes_with_them() -> None:
    other = changed("pad_token_id", 7)
    expected = ConfigDifference("pad_token_id", "null", "7", has_no_effect=False)
    assert compare_configs(CONFIG, other, relevant_keys={"pad_token_id"}) == [expected]
    assert compare_configs(CONFIG, other) == [expected._replace(has_no_effect=True)]


def test_what_is_not_there_is_said_to_be_missing() -> None:
    (found,) = compare_configs(CONFIG, changed("sliding_window", ...))
    assert (found.reference, found.checkpoint) == ("4096", "absent")


values = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, 0.5, float("nan"), "", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
configs = st.dictionaries(st.sampled_from(["a", "b", "sliding_window", "dtype", "x_dropout"]), values, max_size=4)


@given(configs, configs)
def test_a_config_is_like_itself_and_differences_have_two_sides(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert compare_configs(a, copy.deepcopy(a)) == []
    there, back = compare_configs(a, b), compare_configs(b, a)
    assert [(each.key, each.has_no_effect) for each in there] == [(each.key, each.has_no_effect) for each in back]
    assert [each.key for each in there] == sorted({each.key for each in there})
