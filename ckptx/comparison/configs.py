"""Compare two configs key by key, before anything is run.

`verify` compares the contents of `config.json`; `verify --run` compares the configs as their classes read them, with
defaults.

Equal outputs do not show that two configs are equal, because the inputs of a run are short: an attention window of 64
tokens instead of 4,096 changes no logit of an input of twelve tokens. Therefore every key with different values is
returned. `has_no_effect` marks those that are known to have no effect on a forward or backward pass without dropout;
unknown keys count as having an effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

# Keys about the origin of a model, storage and kernels, additional outputs, initialization, training, generation, and
# the loss that a model computes from labels (`verify` computes its own from the logits). A dotted key has no effect if
# one of its parts is among them.
_KEYS_WITHOUT_EFFECT = frozenset(
    {
        # bookkeeping
        "_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "auto_map", "tokenizer_class",
        "processor_class", "task_specific_params", "finetuning_task", "id2label", "label2id", "problem_type",
        "bad_words_ids", "_diffusers_version",
        # storage and kernels
        "dtype", "torch_dtype", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
        "_attn_implementation_internal", "_experts_implementation", "_experts_implementation_internal",
        "experts_implementation", "chunk_size_feed_forward", "pretraining_tp", "use_flash_attention", "torchscript",
        "use_mamba_kernels", "use_bfloat16", "pruned_heads",
        # additional outputs
        "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
        "use_return_dict", "return_dict_in_generate", "output_scores",
        # initialization and training
        "initializer_range", "initializer_factor", "init_std", "initializer_cutoff_factor", "init_method",
        "gradient_checkpointing", "router_aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef", "z_loss_coefficient",
        "router_jitter_noise", "router_aux_loss_weight", "seq_aux", "label_smoothing", "use_gradient_checkpointing",
        "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length",
        "mask_feature_min_masks", "apply_spec_augment",
        # generation
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
        "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "max_new_tokens",
        "do_sample", "num_beams", "num_beam_groups", "diversity_penalty", "repetition_penalty", "length_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "early_stopping", "num_return_sequences",
        "remove_invalid_values", "exponential_decay_length_penalty", "generation_config",
    }
)  # fmt: skip
_DROPOUT = re.compile(r"dropout|drop_path|droppath|layerdrop|stochastic_depth|_pdrop$|^pdrop$|drop_rate")
_ALWAYS_RELEVANT_KEYS = frozenset({"token_dropout"})  # ESM: it scales embeddings even if no token is dropped
# Keys whose effect shows in the tensors themselves.
_KEYS_COMPARED_BY_TENSORS = frozenset({"tie_word_embeddings"})
ABSENT = "absent"


class ConfigDifference(NamedTuple):
    """A key with different values in two configs.

    Attributes:
        key: Key, with dots if it is nested.
        reference: Value in the reference as JSON, cut off after 120 characters; "absent" for a missing key.
        checkpoint: Value in the checkpoint, likewise.
        has_no_effect: True if no compared result depends on it.
    """

    key: str
    reference: str
    checkpoint: str
    has_no_effect: bool


def compare_configs(
    reference: Mapping[str, Any], checkpoint: Mapping[str, Any], *, relevant_keys: Collection[str] = ()
) -> list[ConfigDifference]:
    """Return the differences, sorted by key; keys whose effect shows in the tensors are not compared.

    Args:
        reference: Config of the reference: the contents of `config.json`, or `to_dict()` of its class.
        checkpoint: Config of the checkpoint, likewise.
        relevant_keys: Keys with an effect on this class, although they have none on most others.
    """
    reference_values, checkpoint_values = dict(_iter_leaves(reference)), dict(_iter_leaves(checkpoint))
    differences = []
    for key in sorted(reference_values.keys() | checkpoint_values.keys()):
        a, b = reference_values.get(key), checkpoint_values.get(key)
        name = key.rpartition(".")[2]
        if _are_equal(a, b) or name in _KEYS_COMPARED_BY_TENSORS:
            continue
        differences.append(
            ConfigDifference(
                key,
                _json_value(key, reference_values),
                _json_value(key, checkpoint_values),
                _has_no_effect(key, relevant_keys),
            )
        )
    return differences


def _iter_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; an empty object yields nothing."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _iter_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _are_equal(a: Any, b: Any) -> bool:
    """Return True for equal values: 1 equals 1.0, a list equals a tuple, NaN equals NaN, but True does not equal 1.

    The value of an absent key is None, so that it equals a null.
    """
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    return bool(a == b or (a != a and b != b))


def _has_no_effect(key: str, relevant_keys: Collection[str]) -> bool:
    parts = [part for part in key.split(".") if part not in relevant_keys and part not in _ALWAYS_RELEVANT_KEYS]
    return any(part in _KEYS_WITHOUT_EFFECT or _DROPOUT.search(part) for part in parts)


def _json_value(key: str, values: Mapping[str, Any]) -> str:
    return json.dumps(values[key], default=str)[:120] if key in values else ABSENT
