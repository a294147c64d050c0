"""Contents of `ckptx.json`, the manifest of an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, ShardedChunks
from ckptx.catalog.manifest import RANK_ORDER, SCHEMA, OriginalFiles
from ckptx.catalog.object_ids import ObjectIds
from ckptx.model_view.sharder import ShardedModel
from ckptx.version import __version__


def manifest_of(
    format_name: str,
    catalog: Catalog,
    digests: Mapping[str, str],
    *,
    aliases: Mapping[str, str] | None = None,
    copies: Mapping[str, str] | None = None,
    original: OriginalFiles | None = None,
    sharding: ShardedModel | None = None,
    model_names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the manifest of an output, without files and sidecars.

    Args:
        format_name: "dcp", "sharded" or "huggingface".
        catalog: Catalog of the allocated output.
        digests: Name of a tensor of `catalog` -> its digest in hex.
        aliases: Name that shares the bytes of a stored tensor -> name of that tensor.
        copies: Stored name with the same bytes as another -> name of the other.
        original: Record from which the original files can be restored; None for none.
        sharding: Sharding of the tensors; None if they are whole.
        model_names: Output name -> model name, where they differ.
    """
    aliases, copies, model_names = aliases or {}, copies or {}, model_names or {}
    chunk_table = _ChunkTable(catalog)
    tensors: dict[str, Any] = {}
    for name in (*catalog.tensors, *aliases):
        stored = aliases.get(name, name)
        _, dtype, shape, chunks, _ = catalog.tensors[stored]
        key, number = chunk_table.reference(chunks)
        entry: dict[str, Any] = {"dtype": dtype.name, "shape": shape, "digest": digests[stored], key: number}
        if name in aliases or name in copies:
            entry["tied_to"] = aliases.get(name) or copies[name]
        if name in model_names:
            entry["model"] = model_names[name]
        tensors[name] = entry
    mesh: dict[str, Any] = {"tp": 1, "pp": 1, "dp_shard": 1, "stages": None}
    if sharding is not None:
        mesh = sharding.mesh_entry()
    stages = mesh.pop("stages")
    return {
        "ckptx": SCHEMA,
        "tool": __version__,
        "format": format_name,
        "layout": {
            **mesh,
            "rank_order": RANK_ORDER,
            "stages": stages,
            **({"tp_plan": sharding.user_plan} if sharding and sharding.user_plan is not None else {}),
        },
        "origin": None if original is None else original.to_json(),
        "cuts": chunk_table.shardings,
        "tensors": tensors,
    }


class _ChunkTable:
    """Numbered lists of chunks; tensors with the same regions in the same files share one.

    Attributes:
        shardings: `cuts` of the manifest: `files` (indices in `Catalog.files`), `offsets`, `sizes` of each block, and
            `replicas` (indices of the blocks that are replicas).
    """

    def __init__(self, catalog: Catalog) -> None:
        self.shardings: list[dict[str, Any]] = []
        self._files = {name: index for index, name in enumerate(catalog.files)}
        self._indices: dict[tuple[int, int], int] = {}
        self._ids = ObjectIds()

    def reference(self, chunks: Sequence[Chunk]) -> tuple[str, int]:
        """Return "file" and a file index if the tensor is in one chunk, else "cut" and an index in `shardings`."""
        if type(chunks) is not ShardedChunks:
            (chunk,) = chunks
            return "file", self._files[chunk.file]
        if len(chunks.blocks) == 1:
            return "file", self._files[chunks.files[0]]
        key = (self._ids(chunks.blocks), self._ids(chunks.files))
        number = self._indices.get(key)
        if number is None:
            number = self._indices[key] = len(self.shardings)
            self.shardings.append(
                {
                    "files": [self._files[file] for file in chunks.files],
                    "offsets": [block.region.offsets for block in chunks.blocks],
                    "sizes": [block.region.sizes for block in chunks.blocks],
                    "replicas": [index for index, block in enumerate(chunks.blocks) if block.is_replica],
                }
            )
        return "cut", number
