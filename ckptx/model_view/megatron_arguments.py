"""Compare the arguments that a Megatron checkpoint records with `config.json`.

The order of rows in `linear_qkv` depends on the numbers of heads, which its shape does not show: 8 heads of 64 and 4 of
128 have equal shapes. So a config with other heads is rejected. Other arguments decide what the model computes, and are
only compared for a note, because the tensors are converted correctly in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptx.architecture.trainer_naming.megatron import head_counts
from ckptx.errors import InputError, UnsupportedError


class ArgumentNames(NamedTuple):
    """Names of arguments of a training program, apart from those of heads, which are the same in all.

    Attributes:
        computing: Argument -> keys of config.json, of which the first that is present is compared; a dot separates
            nested keys. If argument and key differ, the model computes something else with the same tensors.
        other_values: Boolean argument with which the tensors have other values or another order of rows than on the
            Hub, but the same shapes -> clause of the error message that says what differs.
        tied: Argument that is equal to tie_word_embeddings; None if there is none.
        untied: Argument that is the opposite of tie_word_embeddings; None if there is none.
        grouping: Argument without which num_query_groups has no effect; None if there is none.
    """

    computing: Mapping[str, tuple[str, ...]]
    other_values: Mapping[str, str]
    tied: str | None = None
    untied: str | None = None
    grouping: str | None = None


_ZERO_CENTERED = "so its norms are stored minus 1"
_INTERLEAVED = "so RoPE rotates adjacent rows of a head instead of halves"
_ROTARY_BASE = ("rope_theta", "rope_parameters.rope_theta")

# Names of `args` in Megatron-LM.
MEGATRON_LM = ArgumentNames(
    {"rotary_base": _ROTARY_BASE, "norm_epsilon": ("rms_norm_eps",), "moe_router_topk": ("num_experts_per_tok",)},
    {"apply_layernorm_1p": _ZERO_CENTERED, "rotary_interleaved": _INTERLEAVED},
    untied="untie_embeddings_and_output_weights",
    grouping="group_query_attention",
)
# Names of the model providers of Megatron Bridge, see CONFIG_MAPPING in its models/conversion/model_bridge.py.
MEGATRON_BRIDGE = ArgumentNames(
    {
        "num_layers": ("num_hidden_layers",),
        "hidden_size": ("hidden_size",),
        "vocab_size": ("vocab_size",),
        "rotary_base": _ROTARY_BASE,
        "rotary_percent": ("partial_rotary_factor", "rope_parameters.partial_rotary_factor"),
        "layernorm_epsilon": ("rms_norm_eps",),
        "moe_router_topk": ("num_experts_per_tok",),
    },
    {"layernorm_zero_centered_gamma": _ZERO_CENTERED, "rotary_interleaved": _INTERLEAVED},
    tied="share_embeddings_and_output_weights",
)


def check_arguments(
    arguments: Mapping[str, Any], where: str, config: Mapping[str, Any], names: ArgumentNames
) -> list[str]:
    """Compare the arguments of a training run with a config; return notes on other differences than heads.

    Args:
        arguments: Value by name; values that were Python objects are `UnknownObject` stand-ins, and are not compared.
        where: The file or object that records them.
        config: Contents of `config.json`.
        names: Names of the arguments.

    Raises:
        InputError: The heads differ, or the config lacks their number.
        UnsupportedError: The tensors have other values or another order of rows than on the Hub, see
            `ArgumentNames.other_values`.
    """
    _refuse_other_values(arguments, where, names)
    _refuse_other_heads(arguments, where, config, names)
    return list(_differences(arguments, where, config, names))


def _refuse_other_values(values: Mapping[str, Any], where: str, names: ArgumentNames) -> None:
    """Refuse arguments with which the values, or the order of rows, are not those of the models on the Hub.

    With multi-head latent attention (MLA), `rotary_interleaved` is accepted.

    Raises:
        UnsupportedError: There is such an argument.
    """
    is_latent = values.get("multi_latent_attention") is True
    for name, meaning in names.other_values.items():
        if values.get(name) is True and not (is_latent and name == "rotary_interleaved"):
            raise UnsupportedError(
                f"{where}: the training run had {name}, {meaning}, which is not converted; convert the checkpoint with "
                "Megatron Bridge, or pass --base none to keep names and values"
            )


def _refuse_other_heads(values: Mapping[str, Any], where: str, config: Mapping[str, Any], names: ArgumentNames) -> None:
    """Refuse a config with other numbers or sizes of heads than the training run.

    Nothing is compared with multi-head latent attention, which has no `linear_qkv`, or if no number of heads is
    recorded.

    Raises:
        InputError: The heads differ, or the config lacks their number.
    """
    if values.get("multi_latent_attention") is True or _count(values.get("num_attention_heads")) is None:
        return
    heads, kv_heads, head_dim = head_counts(config)
    is_grouped = names.grouping is None or values.get(names.grouping) is True
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
    """Return a positive integer as it is; None for any other value, which then is not compared."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _differences(
    arguments: Mapping[str, Any], where: str, config: Mapping[str, Any], names: ArgumentNames
) -> Iterator[str]:
    """Yield a note for each argument that differs from the config."""
    for name, keys in names.computing.items():
        recorded = arguments.get(name)
        found = next(((key, value) for key in keys if (value := _nested(config, key)) is not None), None)
        if found is not None and _is_number(recorded) and _is_number(found[1]) and recorded != found[1]:
            yield (
                f"config.json has {found[0]} {found[1]}, but the training run had {name} {recorded} "
                f"({where}); the output gets that of config.json"
            )
    tied = config.get("tie_word_embeddings")
    for tie, is_opposite in ((names.tied, False), (names.untied, True)):
        recorded = None if tie is None else arguments.get(tie)
        if isinstance(recorded, bool) and isinstance(tied, bool) and (recorded is tied) is is_opposite:
            yield (
                f"config.json has tie_word_embeddings {str(tied).lower()}, but the training run had "
                f"{tie} {recorded} ({where})"
            )


def _nested(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
