"""Copy plan: the tensors to copy, and the files and offsets they go to.

A block is a region of a target tensor that one rank stores, contiguous in its file; the whole tensor if it is not
sharded. In formats that store each block as a torch archive, it has a frame: the bytes of the archive before and after
the elements. Files with blocks of the same tensors are written together, as a file group, so that each byte of the
source is read only once:

    source          file group of one stage, tp 2       a copy step copies one tensor into the
    +-------+       rank 0      rank 1                  files of a group; a step range is what one
    | q     |  ->   q[:n/2]     q[n/2:]                 worker takes at a time: consecutive steps,
    | o     |  ->   o[:, :n/2]  o[:, n/2:]              or some rows of a single large tensor
    +-------+
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import ArchiveFrame, TensorEntry
from ckptx.catalog.region import Shape
from ckptx.transfer import digest

# Target bytes of a step range, about: long enough for sequential reads, short enough to balance workers.
STEP_RANGE_NBYTES = 128 << 20

ArchiveFrameBuilder = Callable[[DType, Shape], ArchiveFrame]


class CopyStep(NamedTuple):
    """Copy of one tensor or pickled object from the chunks of `source` to those of `target`.

    Attributes:
        target: Entry in the target catalog.
        source: Entry in the source catalog, with the same shape; if its dtype differs, the elements are cast.
        is_tensor: False for a pickled object, whose entries are 1-d U8 tensors of its bytes and whose block has no
            frame.
    """

    target: TensorEntry
    source: TensorEntry
    is_tensor: bool


class TargetFile(NamedTuple):
    """File to write: `prologue`, then `block_count` blocks without gaps.

    Attributes:
        name: Path relative to the target directory.
        nbytes: Size of the whole file in bytes.
        prologue: Bytes before the first block, such as a safetensors header; empty for none.
        block_count: Number of blocks.
    """

    name: str
    nbytes: int
    prologue: bytes
    block_count: int


class FileGroup(NamedTuple):
    """Files that are written together, by index in `CopyPlan.files`, and copy steps in the order of their blocks."""

    files: tuple[int, ...]
    steps: tuple[CopyStep, ...]


class StepRange(NamedTuple):
    """Copy steps of one file group that one worker runs; or, with `dim0_range`, a part of a single copy step.

    Attributes:
        group_index: Index of the file group in `CopyPlan.file_groups`.
        first_step: Index of the first step in the file group.
        stop_step: Index after the last step.
        dim0_range: First index and index after the last one of dim 0 of the tensor, if several workers copy it; None
            for whole tensors.
    """

    group_index: int
    first_step: int
    stop_step: int
    dim0_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Complete plan of a copy.

    Attributes:
        files: Files to write.
        file_groups: Groups of files that are written together, with their steps; each file is in one group.
        build_frame: Function that returns the archive frame around a block from dtype and shape of the block; None for
            formats without frames.
        bytes_read: Number of bytes of tensors and pickled objects to read.
        bytes_written: Sum of the file sizes in bytes.
    """

    files: tuple[TargetFile, ...]
    file_groups: tuple[FileGroup, ...]
    build_frame: ArchiveFrameBuilder | None
    bytes_read: int
    bytes_written: int

    def steps(self) -> Iterator[CopyStep]:
        """Yield every step, by file group."""
        for group in self.file_groups:
            yield from group.steps

    def to_lines(self) -> Iterator[str]:
        """Yield lines that describe the plan: each file group, and the source and target of each tensor in it."""
        for number, group in enumerate(self.file_groups):
            names = [self.files[index].name for index in group.files]
            yield f"group {number}: {', '.join(names)}"
            for step in group.steps:
                tensor = f"{step.target.name} {step.target.dtype} {list(step.target.shape)}"
                source, target = _format_position(step.source), _format_position(step.target)
                yield f"  {tensor} <- {step.source.name} {source} -> {target}"

    def step_ranges(self) -> list[StepRange]:
        """Return all step ranges: the first of each file group, then the second of each, and so on.

        Workers take them in this order, so that they write to different files: writers of one file block each other.
        """
        ordered: list[tuple[int, StepRange]] = []  # number of the range in its group, and range
        for index, group in enumerate(self.file_groups):
            ordered += enumerate(_split_group(index, group))
        ordered.sort(key=lambda pair: (pair[0], pair[1].group_index))
        return [step_range for _, step_range in ordered]


def _format_position(entry: TensorEntry) -> str:
    """Return file and offset of the first chunk, and the number of other chunks, such as `a.bin:64 and 3 more`."""
    first = entry.chunks[0]
    more = f" and {len(entry.chunks) - 1} more" if len(entry.chunks) > 1 else ""
    return f"{first.file}:{first.offset}{more}"


def _split_group(index: int, group: FileGroup) -> Iterator[StepRange]:
    """Yield the step ranges of the file group with this index, in order, at least one.

    A tensor of more than `STEP_RANGE_NBYTES` bytes gets several ranges of its own.
    """
    first = nbytes = 0
    for i, step in enumerate(group.steps):
        dim0_ranges = list(_split_dim0(step)) if step.target.nbytes > STEP_RANGE_NBYTES else []
        if len(dim0_ranges) > 1:
            if first < i or i == 0:
                yield StepRange(index, first, i)  # even if it is empty: the first range writes the prologues
            yield from (StepRange(index, i, i + 1, dim0_range) for dim0_range in dim0_ranges)
            first, nbytes = i + 1, 0
            continue
        nbytes += step.target.nbytes
        if nbytes >= STEP_RANGE_NBYTES:
            yield StepRange(index, first, i + 1)
            first, nbytes = i + 1, 0
    if first < len(group.steps) or not group.steps:
        yield StepRange(index, first, len(group.steps))


def _split_dim0(step: CopyStep) -> Iterator[tuple[int, int]]:
    """Yield ranges of dim 0 of about `STEP_RANGE_NBYTES` bytes, each of which starts at a leaf of the tensor's digest.

    Yield none for a tensor that cannot be split: 0-d, or with rows that do not end at a whole byte.
    """
    shape, dtype = step.target.shape, step.target.dtype
    row_bits = prod(shape[1:]) * dtype.bits
    if not shape or row_bits % 8:
        return
    row_bytes = row_bits // 8
    leaf_rows = digest.LEAF_NBYTES // gcd(row_bytes, digest.LEAF_NBYTES)  # the fewest rows that fill whole leaves
    rows_per_range = leaf_rows * max(1, STEP_RANGE_NBYTES // (leaf_rows * row_bytes))
    for begin in range(0, shape[0], rows_per_range):
        yield begin, min(begin + rows_per_range, shape[0])
