"""Layers for multi-token prediction (MTP), which are layers after the last one on the Hub and a list in trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.errors import InputError

_MAX_MTP_LAYERS = 64

# Name of a tensor of the model -> name, below an MTP layer on the Hub, of its copy.
_SHARED_MODULES = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}


def mtp_layers(config: Mapping[str, Any]) -> range:
    """Return the layer indices of the MTP layers on the Hub, which follow the last layer of the model.

    They begin at `num_hidden_layers`, and there are `num_nextn_predict_layers` of them, none if the config lacks it.

    Args:
        config: Contents of `config.json`.

    Raises:
        InputError: The config has an invalid number of layers.
    """
    count = config.get("num_nextn_predict_layers") or 0
    first = config.get("num_hidden_layers")
    if isinstance(count, bool) or isinstance(first, bool):
        count = first = None
    if not isinstance(count, int) or not isinstance(first, int) or not 0 <= count <= _MAX_MTP_LAYERS:
        raise InputError(
            f"config.json: num_hidden_layers {config.get('num_hidden_layers')!r} and num_nextn_predict_layers "
            f"{config.get('num_nextn_predict_layers')!r} must be the numbers of layers and of at most "
            f"{_MAX_MTP_LAYERS} MTP layers; take config.json from the original model"
        )
    return range(first, first + count)


def shared_tensors(config: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> name of the original, for tensors of MTP layers that repeat the embedding and the output head.

    Args:
        config: Contents of `config.json`.

    Raises:
        InputError: See `mtp_layers`.
    """
    return {
        f"model.layers.{layer}.{copy}": original
        for layer in mtp_layers(config)
        for original, copy in _SHARED_MODULES.items()
    }
