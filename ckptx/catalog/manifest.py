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
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ckptx.errors import InputError, UnsupportedError
from ckptx.storage import read_small
from ckptx.untrusted.limits import MANIFEST_BYTES

SCHEMA = 1


def read_manifest(path: Path) -> dict[str, Any]:
    """Parses a manifest.

    Raises:
        InputError: It is not one.
        UnsupportedError: A newer ckptx wrote it.
    """
    try:
        manifest = json.loads(read_small(path, MANIFEST_BYTES))
        version = manifest["ckptx"]
        for key in ("files", "sidecars", "tensors"):
            manifest[key].items()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: is not a manifest of ckptx ({type(error).__name__}: {error}); remove it if it is damaged, no "
            "loader needs it"
        ) from error
    if version != SCHEMA:
        raise UnsupportedError(f"{path}: manifest version {version}, this ckptx reads {SCHEMA}; use a newer ckptx")
    return dict(manifest)


def emit_manifest(manifest: dict[str, Any]) -> bytes:
    """The bytes of a manifest: one line for each file and tensor, so that two can be compared line by line."""
    lines = ["{"]
    blocks = []
    for key, value in manifest.items():
        if key in ("files", "sidecars", "tensors") and value:
            rows = _ROW_END.sub('},\n  "', _compact(value)[1:-1])
            blocks.append(f"{json.dumps(key)}: {{\n  {rows}\n}}")
        else:
            blocks.append(f"{json.dumps(key)}: {_compact(value)}")
    lines.append(",\n".join(blocks))
    lines.append("}\n")
    return "\n".join(lines).encode()


# Rows hold no object, and a quote inside a string is escaped: `},"` is where a row ends, or a string that ends in `},`,
# after which a colon, a comma or a bracket comes. A name that begins with one of these shares the line before it.
_ROW_END = re.compile(r'},"(?![:,}\]])')
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True)


def _compact(value: Any) -> str:
    return _ENCODER.encode(value)
