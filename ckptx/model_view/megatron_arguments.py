"""Compare the arguments that a Megatron checkpoint records with `config.json`.

The order of rows in `linear_qkv` depends on the numbers of heads, which its shape does not show: 8 heads of 64 and 4 of
128 have equal shapes. So a config with other heads is rejected. Other arguments decide what the model computes, and are
only compared for a note, because the tensors are converted correctly in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptx.architecture.trainer_naming.megatron import head_counts
from ckptx.catalog.catalog import Catalog
from ckptx.errors import InputError, ReadError, UnsupportedError
from ckptx.formats.dcp.megatron_arguments import RecordedArguments, read_arguments
from ckptx.storage.interface import SourceFiles

# Argument of Megatron -> keys of config.json, the first of which counts; a dot separates nested keys.
_COMPUTING_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "rotary_base": ("rope_theta", "rope_parameters.rope_theta"),
    "norm_epsilon": ("rms_norm_eps",),
    "moe_router_topk": ("num_experts_per_tok",),
}


def check_recorded_arguments(catalog: Catalog, config: Mapping[str, Any], files: SourceFiles) -> list[str]:
    """Compare the recorded arguments, if any, with a config; return notes on other differences than heads.

    Args:
        catalog: Catalog of the checkpoint, under Megatron's names.
        config: Contents of `config.json`.
        files: Files of the checkpoint.

    Raises:
        InputError: The heads differ, or the config lacks their number.
        ReadError: The storage failed.
    """
    try:
        arguments = read_arguments(catalog, files)
    except ReadError:
        raise
    except (InputError, UnsupportedError) as error:
        return [f"arguments of the training run not compared with config.json: {error}"]
    if arguments is None:
        return []
    _refuse_other_heads(arguments, config)
    return list(_differences(arguments, config))


def _refuse_other_heads(arguments: RecordedArguments, config: Mapping[str, Any]) -> None:
    values = arguments.values
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
                f"{arguments.where}: the training run had {name} {found}, but config.json has "
                f"{keys.get(name, name)} {expected}, which the order of rows depends on; pass --base PATH with the "
                "config it was trained with"
            )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _differences(arguments: RecordedArguments, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each argument that differs from the config."""
    for name, keys in _COMPUTING_ARGUMENTS.items():
        recorded = arguments.values.get(name)
        found = next(((key, value) for key in keys if (value := _nested(config, key)) is not None), None)
        if found is not None and _is_number(recorded) and _is_number(found[1]) and recorded != found[1]:
            yield (
                f"config.json has {found[0]} {found[1]}, but the training run had {name} {recorded} "
                f"({arguments.where}); the output gets that of config.json"
            )
    untied = arguments.values.get("untie_embeddings_and_output_weights")
    tied = config.get("tie_word_embeddings")
    if isinstance(untied, bool) and isinstance(tied, bool) and untied is tied:
        yield (
            f"config.json has tie_word_embeddings {str(tied).lower()}, but the training run had "
            f"untie_embeddings_and_output_weights {untied} ({arguments.where})"
        )


def _nested(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
