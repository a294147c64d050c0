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
    kind: str,
    layout: Catalog,
    digests: Mapping[str, str],
    *,
    aliases: Mapping[str, str] | None = None,
    copies: Mapping[str, str] | None = None,
    original: OriginalFiles | None = None,
    mesh: ShardedModel | None = None,
    model_names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the manifest of an output, without files and sidecars.

    Args:
        kind: "dcp", "sharded" or "huggingface".
        layout: Allocated output.
        digests: Digest of each stored tensor.
        aliases: Name that shares the bytes of a stored tensor -> name of that tensor.
        copies: Stored name with the same bytes as another -> name of the other.
        original: Record from which the original files can be restored; None for none.
        mesh: Sharding of the tensors; None if they are whole.
        model_names: Output name -> model name, where they differ.
    """
    aliases, copies, model_names = aliases or {}, copies or {}, model_names or {}
    chunk_table = _ChunkTable(layout)
    rows: dict[str, Any] = {}
    for name in (*layout.tensors, *aliases):
        stored = aliases.get(name, name)
        _, dtype, shape, chunks, _ = layout.tensors[stored]
        key, number = chunk_table.reference(chunks)
        row: dict[str, Any] = {"dtype": dtype.name, "shape": shape, "digest": digests[stored], key: number}
        if name in aliases or name in copies:
            row["tied_to"] = aliases.get(name) or copies[name]
        if name in model_names:
            row["model"] = model_names[name]
        rows[name] = row
    dims = None if mesh is None else mesh.dims
    return {
        "ckptx": SCHEMA,
        "tool": __version__,
        "format": kind,
        "layout": {
            "tp": dims.tp if dims else 1,
            "pp": dims.pp if dims else 1,
            "dp_shard": dims.dp_shard if dims else 1,
            "rank_order": RANK_ORDER,
            "stages": mesh.layers() if mesh else None,
            **({"tp_plan": mesh.user_plan} if mesh and mesh.user_plan is not None else {}),
        },
        "origin": None if original is None else original.to_json(),
        "cuts": chunk_table.rows,
        "tensors": rows,
    }


class _ChunkTable:
    """Numbered lists of chunks; tensors with the same chunks in the same files share one."""

    def __init__(self, layout: Catalog) -> None:
        self.rows: list[dict[str, Any]] = []
        self._files = {name: index for index, name in enumerate(layout.files)}
        self._indices: dict[tuple[int, int], int] = {}
        self._ids = ObjectIds()

    def reference(self, chunks: Sequence[Chunk]) -> tuple[str, int]:
        """Return "file" and a file index if the tensor is in one chunk, else "cut" and an index in `rows`."""
        if type(chunks) is not ShardedChunks:
            (chunk,) = chunks
            return "file", self._files[chunk.file]
        if len(chunks.blocks) == 1:
            return "file", self._files[chunks.files[0]]
        key = (self._ids(chunks.blocks), self._ids(chunks.files))
        number = self._indices.get(key)
        if number is None:
            number = self._indices[key] = len(self.rows)
            self.rows.append(
                {
                    "files": [self._files[file] for file in chunks.files],
                    "offsets": [block.region.offsets for block in chunks.blocks],
                    "sizes": [block.region.sizes for block in chunks.blocks],
                    "replicas": [index for index, block in enumerate(chunks.blocks) if block.is_replica],
                }
            )
        return "cut", number
