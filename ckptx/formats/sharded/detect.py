"""Find sharded safetensors by the file names of stock writers; `hf/detect.py` finds those with other names."""

from __future__ import annotations

from ckptx.formats.located_checkpoint import LocatedCheckpoint
from ckptx.formats.rank_files import ShapeReader
from ckptx.formats.sharded.file_names import is_shard
from ckptx.storage.interface import Source


def detect(source: Source, read_shapes: ShapeReader) -> LocatedCheckpoint | None:
    """Find `shard-RRRRR-model-IIIII-of-NNNNN.safetensors`; None if there is no such file. `read_shapes` is unused."""
    return LocatedCheckpoint(source, "sharded", (".",)) if any(map(is_shard, source.listing())) else None
