"""Compare the settings of two adapters: with another alpha, equal tensors change a model in another way."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.errors import InputError

# Settings that do not change the merged weights of given tensors, or that the tensors themselves show.
_WITHOUT_EFFECT = frozenset({"path", "modules_to_save", "target_modules", "keeps_ties", "base_model", "revision"})
_KEYS = {"rank": "r", "alpha": "lora_alpha"}  # name of a field -> key of adapter_config.json, where they differ


def compare_adapter_settings(a: Catalog, b: Catalog) -> list[dict[str, Any]]:
    """Return the settings of two adapters that differ and change what they do, as entries of `differing`.

    Args:
        a: First checkpoint.
        b: Second checkpoint.

    Returns:
        An empty list for two models.

    Raises:
        InputError: Only one of them is an adapter, or a config is damaged.
        UnsupportedError: An adapter is no LoRA.
    """
    if not a.traits.is_adapter and not b.traits.is_adapter:
        return []
    if a.traits.is_adapter != b.traits.is_adapter:
        adapter, model = (a, b) if a.traits.is_adapter else (b, a)
        raise InputError(
            f"{adapter.location}: is an adapter, and {model.location} is a model; compare two adapters, or merge it "
            "first with `ckptx merge MODEL ADAPTER DST`"
        )
    from ckptx.adapters.config import AdapterConfig, read_adapter_config

    first, second = read_adapter_config(a.source), read_adapter_config(b.source)
    differences = []
    for field in fields(AdapterConfig):
        values = getattr(first, field.name), getattr(second, field.name)
        if field.name not in _WITHOUT_EFFECT and values[0] != values[1]:
            key = _KEYS.get(field.name, field.name)
            differences.append(
                {"name": f"adapter_config.json: {key}", "what": "setting", "a": str(values[0]), "b": str(values[1])}
            )
    return differences
