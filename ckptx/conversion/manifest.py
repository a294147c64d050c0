"""What `ckptx.json` says after a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.manifest import SCHEMA
from ckptx.version import __version__


def manifest_of(
    kind: str,
    layout: Catalog,
    digests: Mapping[str, str],
    *,
    aliases: Mapping[str, str] | None = None,
    order: list[str] | None = None,
    shards: Mapping[str, int] | None = None,
    origin: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest of an output, without files and sidecars.

    Args:
        kind: "dcp" or "huggingface".
        layout: The allocated target.
        digests: By name of a stored tensor.
        aliases: Names that share the bytes of a stored tensor.
        order: Names in the order a way back needs; those left out follow.
        shards: Index of the original file by name of a tensor.
        origin: What it takes to write the original files again.
    """
    files = {name: index for index, name in enumerate(layout.files)}
    aliases, shards = aliases or {}, shards or {}
    rows: dict[str, Any] = {}
    for name in dict.fromkeys([*(order or ()), *layout.tensors, *aliases]):
        stored = aliases.get(name, name)
        entry = layout.tensors[stored]
        row: dict[str, Any] = {"dtype": entry.dtype.name, "shape": entry.shape, "digest": digests[stored]}
        row["file"] = files[entry.chunks[0].file]
        if stored != name:
            row["tied_to"] = stored
        if name in shards:
            row["origin"] = shards[name]
        rows[name] = row
    return {
        "ckptx": SCHEMA,
        "tool": __version__,
        "format": kind,
        "layout": {"tp": 1, "pp": 1, "dp_shard": 1, "rank_order": "pp,dp,tp", "stages": None},
        "origin": origin,
        "tensors": rows,
    }
