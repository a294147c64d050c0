"""`ckptx.json`: what ckptx wrote, with digests. Written last, never needed by a loader.

    {"ckptx": 1, "tool": "0.1.0", "format": "dcp",
     "layout": {"tp": 1, "pp": 1, "dp_shard": 1, "rank_order": "pp,dp,tp", "stages": null},
     "origin": {"format": "huggingface", "files": [{"name", "metadata"} or {"name", "header"}], "index": ...,
                "tensors": {NAME: index in files}} or null,
     "cuts": [{"files": [index in the files below], "offsets": [[...]], "sizes": [[...]], "replicas": [index]}],
     "files": {NAME: {"bytes", "digest"}}, "sidecars": {NAME: {"bytes", "digest"}},
     "tensors": {NAME: {"dtype", "shape", "digest", "file" or "cut", "tied_to", "model"}}}

It holds no time, host or absolute path: the same input and options give the same bytes. `origin` remembers how the
safetensors files were laid out, tensors in their order there, so that they can be given back byte for byte through any
chain of conversions. A tensor in one piece names its `file`; others, the `cut` that says which block is in which file.
`stages` lists the layers of each pipeline stage as [path, first, stop]. `tied_to` names the tensor with the same bytes,
`model` what the tensor is called in the model where that differs.

Whoever hands over a checkpoint hands over its manifest, so it is read into the values below or refused. It may decide
how files are called and in which order tensors lie in them, never what they hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.form import FORMS, Form
from ckptx.catalog.region import Region, Shape

SCHEMA = 1
RANK_ORDER = "pp,dp,tp"
ORIGINAL_FORMAT = "huggingface"


class FileRecord(NamedTuple):
    """A file as it was written."""

    nbytes: int
    digest: str


class ShardingRecord(NamedTuple):
    """Blocks of tensors that are cut alike: the file of each, by index, and the blocks that repeat another one."""

    files: tuple[int, ...]
    regions: tuple[Region, ...]
    replicas: tuple[int, ...]


class TensorRecord(NamedTuple):
    """A tensor as it was written: in one `file`, or by a `cut`; both are indices."""

    dtype: DType
    shape: Shape
    digest: str
    file: int | None
    cut: int | None
    tied_to: str | None
    model: str | None


class LayoutRecord(NamedTuple):
    """The mesh a checkpoint was cut for, and the layers (path, first, stop) of each pipeline stage."""

    tp: int
    pp: int
    dp_shard: int
    stages: tuple[tuple[tuple[str, int, int], ...], ...] | None


class OriginalFile(NamedTuple):
    """A safetensors file: the metadata of a header as the library writes it, or the text of any other header."""

    name: str
    metadata: Mapping[str, str] | None
    header: str | None


class OriginalIndex(NamedTuple):
    """An index: the metadata of one as transformers writes it, or the text of any other."""

    name: str
    metadata: Any
    text: str | None


@dataclass(frozen=True, slots=True)
class OriginalFiles:
    """What it takes to write the files of an HF checkpoint again.

    Attributes:
        files: Every file.
        index: None for a single file without one.
        tensors: Name -> index of its file, in the order in which they lie there.
    """

    files: tuple[OriginalFile, ...]
    index: OriginalIndex | None
    tensors: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """The `origin` of a manifest."""
        files = [
            {"name": file.name, "metadata": file.metadata}
            if file.header is None
            else {"name": file.name, "header": file.header}
            for file in self.files
        ]
        index = self.index
        as_json = None if index is None else {"name": index.name, "metadata": index.metadata}
        if index is not None and index.text is not None:
            as_json = {"name": index.name, "text": index.text}
        return {"format": ORIGINAL_FORMAT, "files": files, "index": as_json, "tensors": dict(self.tensors)}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that was read and found to be one.

    Attributes:
        where: How errors name it.
        format: Of the checkpoint it describes: "dcp", "sharded" or "huggingface".
        layout: How tensors were cut.
        original: The files of the HF checkpoint at the beginning of the chain; None when it did not begin with one.
        cuts: By index.
        files: Files of tensors, then commit markers.
        sidecars: Files that travel with the weights.
        tensors: By name on disk.
    """

    where: str
    format: str
    layout: LayoutRecord
    original: OriginalFiles | None
    cuts: tuple[ShardingRecord, ...]
    files: Mapping[str, FileRecord]
    sidecars: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]

    @property
    def form(self) -> Form:
        """What follows from the format."""
        return FORMS[self.format]


def emit_manifest(manifest: dict[str, Any]) -> bytes:
    """The bytes of a manifest: one line for each file and tensor, so that two can be compared line by line."""
    lines = ["{"]
    blocks = []
    for key, value in manifest.items():
        if key in ("files", "sidecars", "tensors") and value:
            rows = "".join(_tensor_rows(value)) if key == "tensors" else _compact(value)[1:-1]
            rows = _ROW_END.sub('},\n  "', rows)
            blocks.append(f"{json.dumps(key)}: {{\n  {rows}\n}}")
        else:
            blocks.append(f"{json.dumps(key)}: {_compact(value)}")
    lines.append(",\n".join(blocks))
    lines.append("}\n")
    return "\n".join(lines).encode()


def _tensor_rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Names and rows of tensors: what stands around the digest is encoded once for all that are alike."""
    around: dict[tuple[object, ...], tuple[str, str]] = {}
    comma = ""
    for name, row in rows.items():
        get = row.get
        kind = (row["dtype"], *row["shape"], get("file"), get("cut"), get("tied_to"), get("model"))
        known = around.get(kind)
        if known is None:
            known = around[kind] = _around_digest(row)
        yield f"{comma}{encode_basestring_ascii(name)}:{known[0]}{row['digest']}{known[1]}"
        comma = ","


def _around_digest(row: Mapping[str, Any]) -> tuple[str, str]:
    """What stands before and behind the hexadecimal digits of a digest, which look the same in JSON."""
    keys = list(row)
    at = keys.index("digest") + 1
    before = _compact({**{key: row[key] for key in keys[:at]}, "digest": ""}).removesuffix('"}')
    behind = _compact({key: row[key] for key in keys[at:]})[1:]
    return before, f'",{behind}' if keys[at:] else '"}'


# Rows hold no object, and a quote inside a string is escaped: `},"` is where a row ends, or a string that ends in `},`,
# after which a colon, a comma or a bracket comes. A name that begins with one of these shares the line before it.
_ROW_END = re.compile(r'},"(?![:,}\]])')
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True)


def _compact(value: Any) -> str:
    return _ENCODER.encode(value)
