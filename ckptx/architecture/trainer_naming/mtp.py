"""Find the layers for multi-token prediction (MTP) in names on the Hub, and the weights that they copy.

On the Hub, they are numbered as layers after the last layer of the model. Training frameworks have a separate list for
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.errors import InputError

_MAX_MTP_LAYERS = 64

# Name of a weight of the model -> name of its copy in each MTP layer on the Hub, below the name of the layer.
_COPIED_WEIGHTS = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}


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


def copies_in_mtp_layers(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each copy of the embedding and the output head in an MTP layer -> name of the original.

    Args:
        config: Contents of `config.json`.

    Raises:
        InputError: See `mtp_layers`.
    """
    return {
        f"model.layers.{layer}.{copy}": original
        for layer in mtp_layers(config)
        for original, copy in _COPIED_WEIGHTS.items()
    }
