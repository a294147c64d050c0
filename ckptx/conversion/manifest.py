"""What `ckptx.json` says after a conversion, and what a later conversion learns from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.manifest import SCHEMA, read_manifest
from ckptx.formats.dcp import METADATA
from ckptx.formats.sidecars import MANIFEST
from ckptx.transfer.digest import digest_bytes
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


def manifest_beside(source: Catalog, notes: list[str]) -> dict[str, Any] | None:
    """The manifest of a DCP that ckptx wrote from an HF checkpoint and nobody saved over since, or None.

    Raises:
        InputError: There is one, but it is damaged.
    """
    if not (source.root / MANIFEST).is_file() or not (source.root / METADATA).is_file():
        return None
    manifest = read_manifest(source.root / MANIFEST)
    if manifest.get("format") != "dcp" or manifest.get("origin") is None:
        return None
    data = (source.root / METADATA).read_bytes()
    if manifest["files"].get(METADATA) != {"bytes": len(data), "digest": digest_bytes(data)}:
        notes.append(f"{MANIFEST} describes another {METADATA}; ignored")
        return None
    return manifest
