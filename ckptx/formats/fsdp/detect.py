"""Find per-rank FSDP files in a directory, by their names."""

from __future__ import annotations

from ckptx.errors import InputError
from ckptx.formats.fsdp.file_names import RankFile, parse_rank_file
from ckptx.formats.located_checkpoint import LocatedCheckpoint
from ckptx.formats.rank_files import ShapeReader
from ckptx.storage.interface import Source


def detect(source: Source, read_shapes: ShapeReader) -> LocatedCheckpoint | None:
    """Find verl's `model_world_size_W_rank_R.pt`, one file per rank.

    Args:
        source: Files of the directory.
        read_shapes: Unused; part of the interface of all detectors.

    Returns:
        The checkpoint of all rank files, or None if there are none; missing ranks are an error only when it is opened.

    Raises:
        InputError: The directory contains files of several world sizes.
    """
    found = _rank_files(source)
    sizes = sorted({each.world_size for each in found})
    if len(sizes) > 1:
        examples = ", ".join(min(each for each in found if each.world_size == size).name for size in sizes[:4])
        raise InputError(
            f"{source.location}: contains per-rank FSDP files of {len(sizes)} world sizes; choose one by passing a "
            f"file of it: {examples}"
        )
    return _located_checkpoint(source, found) if found else None


def locate_by_file(source: Source, name: str) -> LocatedCheckpoint | None:
    """Find all rank files of the same save as a given one; None if the name is not that of a rank file."""
    given_file = parse_rank_file(name)
    if given_file is None:
        return None
    return _located_checkpoint(
        source, [each for each in _rank_files(source) if each.world_size == given_file.world_size]
    )


def _rank_files(source: Source) -> list[RankFile]:
    return [found for name in source.listing() if (found := parse_rank_file(name)) is not None]


def _located_checkpoint(source: Source, files: list[RankFile]) -> LocatedCheckpoint:
    return LocatedCheckpoint(source, "fsdp", tuple(each.name for each in sorted(files)))
