"""Compare the arguments that a Megatron checkpoint records with `config.json`.

The order of rows in `linear_qkv` depends on the numbers of heads, which its shape does not show: 8 heads of 64 and 4 of
128 have equal shapes. So a config with other heads is rejected. Other arguments decide what the model computes, and are
only compared for a note, because the tensors are converted correctly in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptx.architecture.trainer_naming.megatron import head_counts
from ckptx.errors import InputError, UnsupportedError

# Argument of Megatron -> keys of config.json, the first of which counts; a dot separates nested keys.
_COMPUTING_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "rotary_base": ("rope_theta", "rope_parameters.rope_theta"),
    "norm_epsilon": ("rms_norm_eps",),
    "moe_router_topk": ("num_experts_per_tok",),
}
# Arguments that change the meaning of values but no shape.
_OTHER_VALUES: Mapping[str, str] = {
    "apply_layernorm_1p": "so its norms are stored minus 1",
    "rotary_interleaved": "so RoPE rotates adjacent rows of a head instead of halves",
}


def check_arguments(arguments: Mapping[str, Any], where: str, config: Mapping[str, Any]) -> list[str]:
    """Compare the arguments of a training run with a config; return notes on other differences than heads.

    Args:
        arguments: Value by name; objects are stand-ins.
        where: The file or object that records them.
        config: Contents of `config.json`.

    Raises:
        InputError: The heads differ, or the config lacks their number.
        UnsupportedError: Weights have another meaning than on the Hub.
    """
    _refuse_other_values(arguments, where)
    _refuse_other_heads(arguments, where, config)
    return list(_differences(arguments, where, config))


def _refuse_other_values(values: Mapping[str, Any], where: str) -> None:
    """Refuse options with which the values, or the order of rows, are not those of the models on the Hub."""
    is_latent = values.get("multi_latent_attention") is True
    for name, meaning in _OTHER_VALUES.items():
        if values.get(name) is True and not (is_latent and name == "rotary_interleaved"):
            raise UnsupportedError(
                f"{where}: the training run had {name}, {meaning}, which is not converted; convert the checkpoint with "
                "Megatron Bridge, or pass --base none to keep names and values"
            )


def _refuse_other_heads(values: Mapping[str, Any], where: str, config: Mapping[str, Any]) -> None:
    if values.get("multi_latent_attention") is True or _count(values.get("num_attention_heads")) is None:
        return
    heads, kv_heads, head_dim = head_counts(config)
    is_grouped = values.get("group_query_attention") is True
    recorded: dict[str, tuple[Any, int]] = {
        "num_attention_heads": (values["num_attention_heads"], heads),
        "num_query_groups": (values.get("num_query_groups") if is_grouped else values["num_attention_heads"], kv_heads),
        "kv_channels": (values.get("kv_channels"), head_dim),
    }
    keys = {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
    for name, (found, expected) in recorded.items():
        if _count(found) not in (None, expected):
            raise InputError(
                f"{where}: the training run had {name} {found}, but config.json has "
                f"{keys.get(name, name)} {expected}, which the order of rows depends on; pass --base PATH with the "
                "config it was trained with"
            )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _differences(arguments: Mapping[str, Any], where: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each argument that differs from the config."""
    for name, keys in _COMPUTING_ARGUMENTS.items():
        recorded = arguments.get(name)
        found = next(((key, value) for key in keys if (value := _nested(config, key)) is not None), None)
        if found is not None and _is_number(recorded) and _is_number(found[1]) and recorded != found[1]:
            yield (
                f"config.json has {found[0]} {found[1]}, but the training run had {name} {recorded} "
                f"({where}); the output gets that of config.json"
            )
    untied = arguments.get("untie_embeddings_and_output_weights")
    tied = config.get("tie_word_embeddings")
    if isinstance(untied, bool) and isinstance(tied, bool) and untied is tied:
        yield (
            f"config.json has tie_word_embeddings {str(tied).lower()}, but the training run had "
            f"untie_embeddings_and_output_weights {untied} ({where})"
        )


def _nested(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
