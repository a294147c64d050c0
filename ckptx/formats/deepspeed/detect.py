"""Find a DeepSpeed checkpoint: a directory with the files of one step, or its parent with the file `latest`."""

from __future__ import annotations

from collections.abc import Iterator

from ckptx.errors import InputError
from ckptx.formats.deepspeed.file_names import (
    LATEST,
    LATEST_UNIVERSAL,
    UNIVERSAL_DIRECTORY,
    is_deepspeed_file,
    is_model_file,
    is_parameter_file,
)
from ckptx.formats.located_checkpoint import LocatedCheckpoint
from ckptx.formats.rank_files import ShapeReader
from ckptx.formats.unsupported import is_unsupported_deepspeed, refuse_directory
from ckptx.storage.interface import Source

_MAX_TAG_BYTES = 4096  # of the file `latest`


def detect(source: Source, read_shapes: ShapeReader) -> LocatedCheckpoint | None:
    """Find the files of one step, in the directory or in the subdirectory that `latest` names.

    Args:
        source: Files of the directory.
        read_shapes: Unused; part of the interface of all detectors.

    Returns:
        The files of all ranks, or None if there are none.

    Raises:
        InputError: `latest` names a directory that does not exist.
        UnsupportedError: The checkpoint has pipeline stages or experts.
    """
    names = _step_files(source)
    if names:
        return LocatedCheckpoint(source, "deepspeed", names)
    latest = next((name for name in (LATEST, LATEST_UNIVERSAL) if source.listing().is_file(name)), None)
    if latest is None:
        return None
    tag = source.read_small(latest, _MAX_TAG_BYTES).decode("utf-8", "replace").strip()
    directories = source.listing().directories()
    if tag not in directories:
        steps = [name for name in directories if any(map(is_deepspeed_file, _names_in(source, name)))]
        if not steps:
            return None  # `latest` of another program
        raise InputError(
            f'{source.location / latest}: names the directory "{tag[:80]}", which does not exist; pass one of '
            f"{', '.join(steps[:4])}"
        )
    names = _step_files(source.with_location(source.location / tag))
    return LocatedCheckpoint(source, "deepspeed", tuple(f"{tag}/{name}" for name in names)) if names else None


def locate_by_file(source: Source, name: str) -> LocatedCheckpoint | None:
    """Find the checkpoint of a given file; None for a file that is not one of DeepSpeed's.

    For a `mp_rank_00_model_states.pt`, the checkpoint is the weights alone, in the files of all tensor parallel ranks;
    for any other file, it is the directory.
    """
    if is_model_file(name):
        return LocatedCheckpoint(source, "deepspeed", tuple(sorted(filter(is_model_file, source.listing()))))
    return LocatedCheckpoint(source, "deepspeed", _step_files(source)) if is_deepspeed_file(name) else None


def _names_in(source: Source, directory: str) -> tuple[str, ...]:
    """Return the names in a subdirectory; empty for a hidden one."""
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
    return (*names, *_parameter_files(source))


def _parameter_files(source: Source) -> Iterator[str]:
    """Yield the files of the parameters of a universal checkpoint, in `zero/`; nothing for other checkpoints."""
    if not source.listing().is_directory(UNIVERSAL_DIRECTORY):
        return
    parameters = source.with_location(source.location / UNIVERSAL_DIRECTORY)
    for parameter in sorted(parameters.listing().directories()):
        for name in sorted(parameters.with_location(parameters.location / parameter).listing()):
            path = f"{UNIVERSAL_DIRECTORY}/{parameter}/{name}"
            if is_parameter_file(path):
                yield path
