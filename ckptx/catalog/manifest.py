"""`ckptx.json`, the manifest: a record of the files that ckptx wrote, with digests. No loader needs it.

    {"ckptx": 1, "tool": "0.1.0", "format": "dcp",
     "layout": {"tp": 1, "pp": 1, "dp_shard": 1, "ep": 2 and "ep_inner": "experts", or both absent,
                "virtual_stages": 2 and "schedule_style": "loop", or both absent,
                "rank_order": "pp,dp,tp", "stages": null, "tp_plan": {...} or absent},
     "origin": {"format": "huggingface", "files": [{"name", "metadata"} or {"name", "header"}], "index": ...,
                "tensors": {NAME: index in files}} or null,
     "cuts": [{"files": [index in the files below], "offsets": [[...]], "sizes": [[...]], "replicas": [index]}],
     "files": {NAME: {"bytes", "digest"}}, "sidecars": {NAME: {"bytes", "digest"}},
     "tensors": {NAME: {"dtype", "shape", "digest", "file" or "cut", "tied_to", "model"}}}

It is written last, and contains no time, host or absolute path: the same input and options give the same bytes.
`origin` records the original safetensors files, with their tensors in order, so that they can be restored byte for byte
after any chain of conversions. A whole tensor refers to its `file`; a sharded one to a `cut`, which lists the file of
each block. `stages` lists the layers of each pipeline stage as [path, first, stop]: the path of the list of layers in
the model, the index of the first layer, and the index after the last. `tied_to` is the name of the tensor with the same
bytes, `model` the name of the tensor in the model if that differs. A digest is an xxh3-128, see transfer/digest.py.

A manifest comes with a checkpoint that may be untrusted, so it is parsed into the values below or refused. It can
determine the names of files and the order of tensors in them, but never their contents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.format_traits import TRAITS_BY_FORMAT, FormatTraits
from ckptx.catalog.region import Region, Shape

SCHEMA = 1
RANK_ORDER = "pp,dp,tp"  # axes from the slowest to the fastest, see layout/parallel_dims.py
ORIGIN_FORMAT = "huggingface"


class FileRecord(NamedTuple):
    """Size in bytes, and digest in hex, of a file as it was written."""

    nbytes: int
    digest: str


class ShardingRecord(NamedTuple):
    """Blocks of equally sharded tensors.

    Attributes:
        files: File of each block, as an index in `files` of the manifest.
        regions: Region of each block.
        replicas: Indices of the blocks that are replicas.
    """

    files: tuple[int, ...]
    regions: tuple[Region, ...]
    replicas: tuple[int, ...]


class TensorRecord(NamedTuple):
    """Record of a tensor as it was written: whole in one file, or sharded.

    Attributes:
        dtype, shape: Dtype and shape of the whole tensor.
        digest: Digest of its row-major bytes, in hex.
        file_index: Index of its file in `files` of the manifest; None if it is sharded.
        sharding_index: Index in `Manifest.shardings`; None if it is whole.
        tied_to: Name of the tensor with the same bytes that it is tied to; None if it is not tied.
        model_name: Name under which a model loads it: the model name, or the disk name if the stored name is that of a
            trainer. None if it is loaded under its stored name.
    """

    dtype: DType
    shape: Shape
    digest: str
    file_index: int | None
    sharding_index: int | None
    tied_to: str | None
    model_name: str | None


class LayoutRecord(NamedTuple):
    """Record of the mesh, of the stages and of the TP plan.

    Attributes:
        tp, pp, dp_shard: Sizes of the mesh.
        stages: For each pipeline stage, its layers as (path of the list of layers, first index, index after the last);
            None if unknown.
        tp_plan: Tensor-parallel rules of the user, pattern -> style; None if there were none.
        ep: Number of expert-parallel ranks; 1 without expert parallelism.
        ep_inner: Sharding of experts among the ranks with the same EP rank, "experts", "rows" or "columns"; None
            without expert parallelism.
        virtual_stages: Number of stages of each pipeline rank; `stages` has as many for each of the `pp` ranks.
        schedule_style: Assignment of these stages to ranks, "loop" or "v"; "loop" for one stage per rank.
    """

    tp: int
    pp: int
    dp_shard: int
    stages: tuple[tuple[tuple[str, int, int], ...], ...] | None
    tp_plan: Mapping[str, str] | None = None
    ep: int = 1
    ep_inner: str | None = None
    virtual_stages: int = 1
    schedule_style: str = "loop"


class OriginalFile(NamedTuple):
    """Record of one original safetensors file.

    Attributes:
        name: File name.
        metadata: `__metadata__` of the header, if the safetensors library would write the same header; else None.
        header: The text of any other header; None if `metadata` is enough to write it again.
    """

    name: str
    metadata: Mapping[str, str] | None
    header: str | None


class OriginalIndex(NamedTuple):
    """Record of the original index.

    Attributes:
        name: File name.
        metadata: `metadata` of the index, if transformers would write the same index; else None.
        text: The text of any other index; None if `metadata` is enough to write it again.
    """

    name: str
    metadata: Any
    text: str | None


@dataclass(frozen=True, slots=True)
class OriginalFiles:
    """A record from which the files of an HF checkpoint can be written again.

    Attributes:
        files: Every file.
        index: The index; None for a single file without one.
        tensors: Tensor name -> index of its file, in the order in the file.
    """

    files: tuple[OriginalFile, ...]
    index: OriginalIndex | None
    tensors: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the value of `origin` in a manifest."""
        files = [
            {"name": file.name, "metadata": file.metadata}
            if file.header is None
            else {"name": file.name, "header": file.header}
            for file in self.files
        ]
        index = self.index
        index_json = None if index is None else {"name": index.name, "metadata": index.metadata}
        if index is not None and index.text is not None:
            index_json = {"name": index.name, "text": index.text}
        return {"format": ORIGIN_FORMAT, "files": files, "index": index_json, "tensors": dict(self.tensors)}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A valid manifest.

    Attributes:
        path: Path of the manifest, for error messages.
        format: Format of the checkpoint: "dcp", "sharded" or "huggingface".
        layout: The mesh, and the layers of each pipeline stage.
        original: The files of the HF checkpoint at the beginning of the chain of conversions; None if there was none.
        shardings: Shardings, to which tensors refer by index.
        files: Tensor files by name, then commit markers (the index, or `.metadata`).
        sidecars: Other files that were copied along with the weights, by name.
        tensors: Tensors by name on disk.
    """

    path: str
    format: str
    layout: LayoutRecord
    original: OriginalFiles | None
    shardings: tuple[ShardingRecord, ...]
    files: Mapping[str, FileRecord]
    sidecars: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]

    @property
    def traits(self) -> FormatTraits:
        """Properties of the format."""
        return TRAITS_BY_FORMAT[self.format]


def encode_manifest(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest: one line per file and tensor, so that two can be compared line by line."""
    lines = ["{"]
    members = []
    for key, value in manifest.items():
        if key in ("files", "sidecars", "tensors") and value:
            entries_text = "".join(_encode_tensors(value)) if key == "tensors" else _encode_compact(value)[1:-1]
            entries_text = _ENTRY_END.sub('},\n  "', entries_text)
            members.append(f"{json.dumps(key)}: {{\n  {entries_text}\n}}")
        else:
            members.append(f"{json.dumps(key)}: {_encode_compact(value)}")
    lines.append(",\n".join(members))
    lines.append("}\n")
    return "\n".join(lines).encode()


def _encode_tensors(tensors: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the JSON text of each tensor; the text around the digest is encoded once for otherwise equal entries."""
    texts_by_key: dict[tuple[object, ...], tuple[str, str]] = {}
    comma = ""
    for name, entry in tensors.items():
        get = entry.get
        key = (entry["dtype"], *entry["shape"], get("file"), get("cut"), get("tied_to"), get("model"))
        entry_text = texts_by_key.get(key)
        if entry_text is None:
            entry_text = texts_by_key[key] = _encode_around_digest(entry)
        yield f"{comma}{encode_basestring_ascii(name)}:{entry_text[0]}{entry['digest']}{entry_text[1]}"
        comma = ","


def _encode_around_digest(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return the JSON text of a tensor before and after the hexadecimal digits of its digest."""
    keys = list(entry)
    stop = keys.index("digest") + 1
    before = _encode_compact({**{key: entry[key] for key in keys[:stop]}, "digest": ""}).removesuffix('"}')
    after = _encode_compact({key: entry[key] for key in keys[stop:]})[1:]
    return before, f'",{after}' if keys[stop:] else '"}'


# Entries contain no object, and a quote inside a string is escaped: so `},"` ends an entry, or a string that ends in
# `},` and is followed by a colon, a comma or a bracket. A name that begins with one of these shares the line before it.
_ENTRY_END = re.compile(r'},"(?![:,}\]])')
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True)


def _encode_compact(value: Any) -> str:
    return _ENCODER.encode(value)
