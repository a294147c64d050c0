"""Find a DCP: `.metadata` in a directory, or in the separate model and optimizer directories of some trainers."""

from __future__ import annotations

from ckptx.errors import InputError
from ckptx.formats.hf.detect import detect_weights
from ckptx.formats.located_checkpoint import LocatedCheckpoint
from ckptx.formats.rank_files import ShapeReader
from ckptx.formats.sharded.file_names import is_shard
from ckptx.storage.interface import Source

_METADATA = ".metadata"

# Sibling directories that together are one checkpoint: model first, optimizer second.
_PART_DIRECTORIES = (
    ("model", "optim"), ("model", "optimizer"), ("pytorch_model_fsdp_0", "optimizer_0"), ("weights", "optimizer"),
)  # fmt: skip


def detect(source: Source, read_shapes: ShapeReader) -> LocatedCheckpoint | None:
    """Find a DCP in one directory, or in a model and an optimizer directory; None if there is none.

    Next to an optimizer DCP, the model may be in sharded safetensors.

    Raises:
        InputError, UnsupportedError: See `detect_weights`, which is called for such a model directory.
    """
    listing = source.listing()
    if listing.has(_METADATA):
        return LocatedCheckpoint(source, "dcp", (".",))
    for model, optimizer in _PART_DIRECTORIES:
        if not listing.is_file(f"{optimizer}/{_METADATA}"):
            continue
        if listing.is_file(f"{model}/{_METADATA}") or _has_shards(source, model, read_shapes):
            return LocatedCheckpoint(source, "dcp", (model, optimizer))
    return None


def refuse_interrupted(source: Source) -> None:
    """Refuse data files whose `.metadata`, which is written last, is missing.

    Raises:
        InputError: There are some.
    """
    if any(name.endswith(".distcp") for name in source.listing()):
        raise InputError(
            f"{source.location}: has .distcp files but no .metadata; the save was interrupted or is still running, "
            "use another checkpoint"
        )


def _has_shards(source: Source, name: str, read_shapes: ShapeReader) -> bool:
    """Return True if the subdirectory `name` exists and has sharded safetensors."""
    if not source.listing().is_directory(name):
        return False
    directory = source.with_location(source.location / name)
    # Names come first, as in `DETECTORS` of the registry: they decide without reading a header, even if the directory
    # also has merged weights, which `detect_weights` would find instead.
    if any(map(is_shard, directory.listing())):
        return True
    weights = detect_weights(directory, read_shapes)
    return weights is not None and weights.kind == "sharded"
