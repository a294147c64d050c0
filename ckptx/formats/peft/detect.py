"""Find an adapter of PEFT: its config and one weight file, which have fixed names."""

from __future__ import annotations

from ckptx.formats.located_checkpoint import LocatedCheckpoint
from ckptx.formats.rank_files import ShapeReader
from ckptx.storage.interface import Source

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # in the order in which PEFT looks for them


def detect(source: Source, read_shapes: ShapeReader) -> LocatedCheckpoint | None:
    """Find the adapter in a directory; None if it has no config or no weights of one.

    Args:
        source: Files of the directory.
        read_shapes: Unused; part of the interface of all detectors.
    """
    listing = source.listing()
    if not listing.has(CONFIG_FILE):
        return None
    return next((LocatedCheckpoint(source, "peft", (name,)) for name in WEIGHT_FILES if listing.has(name)), None)


def locate_by_file(source: Source, name: str) -> LocatedCheckpoint | None:
    """Find the adapter of a weight file or of `adapter_config.json`; None for any other file, or without the config."""
    if name not in (CONFIG_FILE, *WEIGHT_FILES):
        return None
    located = detect(source, lambda location: None)
    if located is None or name == CONFIG_FILE:
        return located
    return located._replace(weights=(name,))
