"""Detect a file of one rank that is a copy of the file of another rank, such as after a wrong copy from a cluster.

No file of stage 3 contains the number of its rank. Files of different ranks have different elements of the parameters,
so equal checksums of all of their flat tensors mean that one file is a copy. Constant elements, such as those of norms
that were not trained, can be equal on several ranks and are no evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptx.errors import InputError
from ckptx.formats.deepspeed.flat_chunks import FlatPart
from ckptx.storage.interface import SourceFiles

_SAMPLED = 1024  # elements that show if a flat tensor is constant


def refuse_copies(files: SourceFiles, parts_by_rank: Sequence[Sequence[FlatPart]]) -> None:
    """Refuse two ranks whose flat tensors are equal and not all constant.

    A rank is skipped if one of its flat tensors has no checksum.

    Args:
        files: Files of the checkpoint.
        parts_by_rank: For each rank, the flat tensors in its file: masters, or fragments of frozen parameters.

    Raises:
        InputError: The flat tensors of two ranks are equal.
    """
    first_ranks: dict[str, int] = {}
    for rank, parts in enumerate(parts_by_rank):
        if any(part.record.crc is None for part in parts):
            continue
        checksums = repr([(part.numel, part.record.crc) for part in parts])
        first = first_ranks.setdefault(checksums, rank)
        if first != rank and not all(_is_constant(files, part) for part in parts):
            raise InputError(
                f"{files.root / parts[0].file}: contains the same elements as {parts_by_rank[first][0].file}, of rank "
                f"{first}, so that one is a copy of the other; copy both files again from the machines that wrote them"
            )


def _is_constant(files: SourceFiles, part: FlatPart) -> bool:
    """Return True if the elements in the middle of a flat tensor are equal, or if it has none."""
    count = min(part.numel, _SAMPLED)
    itemsize = part.dtype.itemsize
    sample = files.read(part.file, part.offset + (part.numel - count) // 2 * itemsize, count * itemsize)
    return bytes(sample) == bytes(sample[:itemsize]) * count
