"""Find a DeepSpeed checkpoint: a directory with the files of one step, or its parent with the file `latest`."""

from __future__ import annotations

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.deepspeed.file_names import LATEST, MODEL_FILE, is_deepspeed_file
from ckptx.formats.located_checkpoint import LocatedCheckpoint
from ckptx.formats.rank_files import ShapeReader
from ckptx.formats.unsupported import is_unsupported_deepspeed, refuse_directory
from ckptx.storage.interface import Source

_MAX_TAG_BYTES = 4096
_UNIVERSAL_DIRECTORY = "zero"


def detect(source: Source, read_shapes: ShapeReader) -> LocatedCheckpoint | None:
    """Find the files of one step, in the directory or in the subdirectory that `latest` names.

    Args:
        source: Files of the directory.
        read_shapes: Unused; part of the interface of all detectors.

    Returns:
        The files of all ranks, or None if there are none.

    Raises:
        InputError: `latest` names a directory that does not exist.
        UnsupportedError: The checkpoint has tensor parallelism, pipeline stages or experts, or is a universal one.
    """
    names = _step_files(source)
    if names:
        return LocatedCheckpoint(source, "deepspeed", names)
    if not source.listing().is_file(LATEST):
        return None
    tag = source.read_small(LATEST, _MAX_TAG_BYTES).decode("utf-8", "replace").strip()
    directories = source.listing().directories()
    if tag not in directories:
        steps = [name for name in directories if any(map(is_deepspeed_file, _names_in(source, name)))]
        if not steps:
            return None  # `latest` of another program
        raise InputError(
            f'{source.location / LATEST}: names the directory "{tag[:80]}", which does not exist; pass one of '
            f"{', '.join(steps[:4])}"
        )
    names = _step_files(source.with_location(source.location / tag))
    return LocatedCheckpoint(source, "deepspeed", tuple(f"{tag}/{name}" for name in names)) if names else None


def locate_by_file(source: Source, name: str) -> LocatedCheckpoint | None:
    """Find the checkpoint of a given file: the weights in `mp_rank_00_model_states.pt` alone, else the directory."""
    if name == MODEL_FILE:
        return LocatedCheckpoint(source, "deepspeed", (name,))
    return LocatedCheckpoint(source, "deepspeed", _step_files(source)) if is_deepspeed_file(name) else None


def _names_in(source: Source, directory: str) -> tuple[str, ...]:
    return () if directory.startswith(".") else tuple(source.with_location(source.location / directory).listing())


def _step_files(source: Source) -> tuple[str, ...]:
    """Return the files of a directory of one step, sorted by name; empty if it is not one.

    Raises:
        UnsupportedError: See `detect`.
    """
    names = tuple(sorted(name for name in source.listing() if is_deepspeed_file(name)))
    if not names:
        return ()
    refuse_directory(source.location, [name for name in source.listing() if is_unsupported_deepspeed(name)])
    if source.listing().is_directory(_UNIVERSAL_DIRECTORY):
        raise UnsupportedError(
            f"{source.location}: a DeepSpeed universal checkpoint is not supported (found {_UNIVERSAL_DIRECTORY}/); "
            "pass the checkpoint it was made from"
        )
    return names
