"""Recognize checkpoints with Megatron's names, without the tables of these names."""

from __future__ import annotations

from collections.abc import Collection

from ckptx.mapping.names import is_state_prefix

LAYERS = "decoder.layers"
_EMBEDDING = "embedding.word_embeddings.weight"


def find_prefixes(names: Collection[str]) -> list[str]:
    """Return the prefixes of the Megatron models among the names of a checkpoint, such as "" or "module."; sorted."""
    prefixes = {name.removesuffix(_EMBEDDING) for name in names if name.endswith(_EMBEDDING)}
    prefixes = {each for each in prefixes if (not each or each.endswith(".")) and not is_state_prefix(each)}
    in_layers = tuple(f"{prefix}{LAYERS}." for prefix in prefixes)
    found = {start[: -len(LAYERS) - 1] for start in in_layers if any(name.startswith(start) for name in names)}
    return sorted(found)
