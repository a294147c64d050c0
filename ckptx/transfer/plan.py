"""Copy plan: the tensors to copy, and the files and positions they go to.

Files that hold parts of the same tensors are written together, as a group, so that a byte of the source is read once:

    source          group of one stage, tp 2            a step copies one tensor into the files
    +-------+       rank 0      rank 1                  of a group; a step range is the part that
    | q     |  ->   q[:n/2]     q[n/2:]                 one worker copies in one pass: consecutive
    | o     |  ->   o[:, :n/2]  o[:, n/2:]              steps, or some rows of a single large
    +-------+                                           tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Frame, TensorEntry
from ckptx.catalog.region import Shape
from ckptx.transfer import digest

# Bytes that one worker takes at a time: long enough for a sequential pass, short enough to balance workers.
STEP_RANGE_NBYTES = 128 << 20

FrameBuilder = Callable[[DType, Shape], Frame]


class CopyStep(NamedTuple):
    """Copy of one tensor from the chunks of `source` to those of `target`; their dtypes may differ.

    `has_frame` is False for pickled objects, whose bytes are copied without a frame.
    """

    target: TensorEntry
    source: TensorEntry
    has_frame: bool


class TargetFile(NamedTuple):
    """File to write: `prologue`, then `block_count` blocks without gaps."""

    name: str
    nbytes: int
    prologue: bytes
    block_count: int


class FileGroup(NamedTuple):
    """Indices of files that are written together, and the tensors in them in the order of their blocks."""

    files: tuple[int, ...]
    steps: tuple[CopyStep, ...]


class StepRange(NamedTuple):
    """Copy steps of one file group that one worker runs; or, with `dim0_range`, a part of a single copy step.

    Attributes:
        group: Index of the file group in the plan.
        first: Index of the first step in the group.
        stop: Index after the last step.
        dim0_range: Range of dim 0 of the tensor that is copied; None for whole tensors.
    """

    group: int
    first: int
    stop: int
    dim0_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Complete plan of a copy.

    Attributes:
        files: Files to write.
        groups: Groups of files that are written together, with their steps.
        build_frame: Function that returns the frame around a block; None for formats without frames.
        bytes_read: Number of bytes of tensors and pickled objects to read.
        bytes_written: Sum of the file sizes in bytes.
    """

    files: tuple[TargetFile, ...]
    groups: tuple[FileGroup, ...]
    build_frame: FrameBuilder | None
    bytes_read: int
    bytes_written: int

    def steps(self) -> Iterator[CopyStep]:
        """Yield every step."""
        for group in self.groups:
            yield from group.steps

    def to_lines(self) -> Iterator[str]:
        """Yield lines that describe the plan: each group, and the source and target of each tensor in it."""
        for number, group in enumerate(self.groups):
            names = [self.files[index].name for index in group.files]
            yield f"group {number}: {', '.join(names)}"
            for step in group.steps:
                tensor = f"{step.target.name} {step.target.dtype} {list(step.target.shape)}"
                source, target = _format_position(step.source), _format_position(step.target)
                yield f"  {tensor} <- {step.source.name} {source} -> {target}"

    def step_ranges(self) -> list[StepRange]:
        """Return the step ranges, those of different groups in turn, because writers of one file block each other."""
        ordered: list[tuple[int, StepRange]] = []
        for index, group in enumerate(self.groups):
            ordered += enumerate(_split_group(index, group))
        ordered.sort(key=lambda pair: (pair[0], pair[1].group))
        return [step_range for _, step_range in ordered]


def _format_position(entry: TensorEntry) -> str:
    """Return file and offset of the first chunk, and the number of other chunks, as a string."""
    first = entry.chunks[0]
    more = f" and {len(entry.chunks) - 1} more" if len(entry.chunks) > 1 else ""
    return f"{first.file}:{first.offset}{more}"


def _split_group(index: int, group: FileGroup) -> Iterator[StepRange]:
    """Yield the step ranges of a group, in order; a tensor of more than `STEP_RANGE_NBYTES` bytes gets several."""
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
    """Yield ranges of dim 0 of about `STEP_RANGE_NBYTES` bytes that start at a leaf of its digest."""
    shape, dtype = step.target.shape, step.target.dtype
    row_bits = prod(shape[1:]) * dtype.bits
    if not shape or row_bits % 8:
        return
    row_bytes = row_bits // 8
    leaf_rows = digest.LEAF_NBYTES // gcd(row_bytes, digest.LEAF_NBYTES)  # the fewest rows that fill whole leaves
    rows_per_range = leaf_rows * max(1, STEP_RANGE_NBYTES // (leaf_rows * row_bytes))
    for begin in range(0, shape[0], rows_per_range):
        yield begin, min(begin + rows_per_range, shape[0])
