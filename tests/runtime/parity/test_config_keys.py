"""A config key counts if a class computes with it: each key of small models is changed, and the model runs again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from ckptx.comparison import configs
from ckptx.comparison.configs import compare_configs
from tests.support.models import EVERY, build, tokens
from tests.support.slow import slow_but

# Of different build: rotary and learned positions, soft-caps, windows, experts, latent attention, state spaces.
MODELS = slow_but(
    ("llama-tied", "gemma2", "qwen3-moe", "deepseek-v3", "gpt2", "gpt-neox", "bert-mlm", "gpt-oss"),
    ("gemma2", "qwen3-moe", "gpt2"),
)
CLOSE = 1e-3  # of the largest logit; far above rounding, as of another chunk size


def other_values(value: Any) -> Iterator[Any]:
    """Other values of the type of a key; each may be one that the class refuses."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, max(1, value // 2))
    elif isinstance(value, float):
        yield 2 * value + 0.1
    elif isinstance(value, str):
        yield from ("relu", "gelu")
    elif isinstance(value, list):
        yield from (value[::-1], value[:1] * len(value))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            for other in other_values(inner):
                yield {**value, key: other}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found = model(**tokens(), use_cache=False) if "use_cache" in model.config.to_dict() else model(**tokens())
    result: torch.Tensor = found.logits
    return result.nan_to_num(1e30)


def run_with(model: Any, **changes: Any) -> torch.Tensor | None:
    """Return the logits of the same weights with other values of keys; None if the class cannot have them."""
    values = {**copy.deepcopy(model.config.to_dict()), **changes}
    try:
        config = type(model.config).from_dict(values)
        config._attn_implementation = model.config._attn_implementation
        other = type(model)(config).float().eval()
        other.load_state_dict(model.state_dict())
        return logits(other)
    except Exception:  # any error of a class that refuses a value
        return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_key_that_changes_the_logits_counts(name: str) -> None:
    model = build(EVERY[name]).float().eval()
    expected = run_with(model)
    assert expected is not None
    before = model.config.to_dict()
    effective = set()
    for key, value in before.items():
        for other in other_values(value) if key != "tie_word_embeddings" else ():  # which the tensors show
            found = run_with(model, **{key: other})
            if found is not None and not float((found - expected).abs().max()) < CLOSE * float(expected.abs().max()):
                effective.add(key)
                differences = compare_configs(before, {**before, key: other})
                assert any(not each.has_no_effect for each in differences), (key, value, other)
    assert len(effective) >= 3, effective


# Keys that classes compute with; the last ones have names like those of training, generation and dropout.
COMPUTING = (
    "rope_theta", "rope_scaling", "rms_norm_eps", "layer_norm_epsilon", "hidden_act", "num_experts_per_tok",
    "norm_topk_prob", "routed_scaling_factor", "scoring_func", "n_group", "topk_group", "sliding_window",
    "layer_types", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
    "partial_rotary_factor", "logit_scale", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
    "attention_bias", "use_qk_norm", "is_causal", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "head_dim", "image_token_id", "alibi", "parallel_attn", "conv_kernel", "time_step_limit",
    "router_scale", "use_parallel_residual", "scale_embedding", "token_dropout", "chunk_size",
    "attention_chunk_size", "pretraining_tp_scale", "num_beams_scale", "initial_scale",
)  # fmt: skip


@pytest.mark.parametrize("key", COMPUTING)
@pytest.mark.parametrize("scope", ["", "text_config.", "vision_config.inner."])
def test_a_key_that_classes_compute_with_counts_in_every_config(key: str, scope: str) -> None:
    (found,) = compare_configs({}, nested(f"{scope}{key}", 1))
    assert (found.key, found.has_no_effect) == (f"{scope}{key}", False)


NO_EFFECT = [*sorted(configs._KEYS_WITHOUT_EFFECT), "attention_dropout", "embd_pdrop", "layerdrop", "drop_path_rate"]


@pytest.mark.parametrize("key", NO_EFFECT)
def test_a_key_without_effect_has_none_anywhere_unless_the_class_computes_with_it(key: str) -> None:
    for path in (key, f"text_config.{key}", f"{key}.0", f"vision_config.{key}.inner"):
        (found,) = compare_configs({}, nested(path, 1))
        assert found.has_no_effect, path
        (found,) = compare_configs({}, nested(path, 1), relevant_keys={key})
        assert not found.has_no_effect, path
        (found,) = compare_configs({}, nested(path, 1), relevant_keys={"other"})
        assert found.has_no_effect, path


@pytest.mark.parametrize("outer", ["generation_config", "task_specific_params", "dropout_config"])
@pytest.mark.parametrize("inner", ["pad_token_id", "token_dropout", "rope_theta"])
def test_a_section_without_effect_has_none_whatever_is_in_it(outer: str, inner: str) -> None:
    (found,) = compare_configs({}, nested(f"{outer}.{inner}", 1), relevant_keys={"pad_token_id"})
    assert found.has_no_effect


def test_an_effect_of_one_key_does_not_hide_behind_others() -> None:
    """Each of several that differ is judged by itself."""
    changed = {"eos_token_id": 1, "rope_theta": 2, "text_config": {"use_cache": True, "rms_norm_eps": 3}}
    found = {each.key: each.has_no_effect for each in compare_configs({}, changed)}
    assert found == {
        "eos_token_id": True, "rope_theta": False, "text_config.use_cache": True, "text_config.rms_norm_eps": False,
    }  # fmt: skip


def nested(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}
