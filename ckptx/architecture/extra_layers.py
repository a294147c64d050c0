"""Layers after the last one of the config: multi-token prediction (MTP) layers, or layers of another, deeper model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptx.architecture.extra_tensors import ExtraTensor
from ckptx.architecture.shape_rules import star_prefixes
from ckptx.mapping.names import split_pattern

# A layer after the last one with any of these modules is an MTP layer.
_MTP_MODULES = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|embed_tokens|mtp[a-z0-9_]*)\.")
# Config keys with the number of MTP layers.
_MTP_COUNT_KEYS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
)


class ExtraLayer(NamedTuple):
    """A layer that a checkpoint has after the last layer of the model.

    Attributes:
        path: Path of the list of layers, in model names.
        layer_index: Index of the layer in the list, from 0.
    """

    path: str
    layer_index: int


def find_extra_layer(model_name: str, counts: Mapping[str, int]) -> ExtraLayer | None:
    """Return the layer of a tensor if it is after the last one of its list, else None.

    Args:
        model_name: Name of the tensor in the model; its first index is that of the layer.
        counts: Number of layers by path of the list. Lists that it does not have are unlimited.
    """
    pattern, indices = split_pattern(model_name)
    for path in star_prefixes(pattern)[:1]:
        if indices[0] >= counts.get(path, indices[0] + 1):
            return ExtraLayer(path, indices[0])
    return None


def unexplained_layers(
    layers: Mapping[str, ExtraLayer],
    counts: Mapping[str, int],
    config: Mapping[str, Any],
    extras: Mapping[str, ExtraTensor],
) -> Iterator[tuple[str, ExtraLayer]]:
    """Yield the name of the first tensor of each extra layer that must belong to another model, and the layer.

    A layer is left out if it is an MTP layer, by the count in the config or by a module in it, or if a checkpoint may
    have one of its tensors for another reason (`ExtraTensor.reason`) than that the class computes it.

    Args:
        layers: Extra layers by the name of each tensor in them.
        counts: Number of layers by path of the list.
        config: Contents of `config.json`.
        extras: Tensors that the class does not have, by the same names as `layers`.
    """
    mtp_layers = _count_mtp_layers(config)
    explained = {layer for name, layer in layers.items() if _MTP_MODULES.search(name) or _has_reason(extras.get(name))}
    first: dict[ExtraLayer, str] = {}
    for name, layer in layers.items():
        first.setdefault(layer, name)
    for layer, name in first.items():
        if layer not in explained and layer.layer_index >= counts[layer.path] + mtp_layers:
            yield name, layer


def _has_reason(extra: ExtraTensor | None) -> bool:
    return extra is not None and bool(extra.reason) and not extra.is_computed


def _count_mtp_layers(config: Mapping[str, Any]) -> int:
    """Return the number of MTP layers in the config, at the root or in `text_config`; 0 if it has none."""
    nested = config.get("text_config")
    configs: Iterable[Mapping[str, Any]] = (each for each in (config, nested) if isinstance(each, Mapping))
    return max((count for each in configs for key in _MTP_COUNT_KEYS if type(count := each.get(key)) is int), default=0)
