"""The nouns of a copy: which tensors go into which files.

Files that hold parts of the same tensors are written together, as a group, so that a byte of the source is read once:

    source          group of one stage, tp 2            a step is one tensor on its way
    +-------+       rank 0      rank 1                  into the files of a group; a run is
    | q     |  ->   q[:n/2]     q[n/2:]                 what one worker does in one pass:
    | o     |  ->   o[:, :n/2]  o[:, n/2:]              some consecutive steps, or some rows
    +-------+                                           of a single large one
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

# One worker takes this much at a time: long enough for one sequential pass, short enough to share out.
RUN = 128 << 20

FrameOf = Callable[[DType, Shape], Frame]


class CopyStep(NamedTuple):
    """One tensor: `target` says where its blocks go, `source` where its elements are; their dtypes may differ.

    `framed` is False for bytes that are copied as they are, pickled objects.
    """

    target: TensorEntry
    source: TensorEntry
    framed: bool


class TargetFile(NamedTuple):
    """A file to write: `prologue`, then blocks without a hole; `blocks` is their number."""

    name: str
    nbytes: int
    prologue: bytes
    blocks: int


class FileGroup(NamedTuple):
    """Files that are written together, as indices, and the tensors in them in the order of their blocks."""

    files: tuple[int, ...]
    steps: tuple[CopyStep, ...]


class StepRange(NamedTuple):
    """Steps `first` to `stop` of a group; or, with `rows`, that range of dim 0 of the tensor of one step."""

    group: int
    first: int
    stop: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Everything the executor needs.

    Attributes:
        files: What to write.
        groups: Which of them together, and from what.
        frame_of: Frame around a block, for formats that have one.
        bytes_read: Bytes of tensor data that will be read.
        bytes_written: Sum of the file sizes.
    """

    files: tuple[TargetFile, ...]
    groups: tuple[FileGroup, ...]
    frame_of: FrameOf | None
    bytes_read: int
    bytes_written: int

    def steps(self) -> Iterator[CopyStep]:
        """Every step."""
        for group in self.groups:
            yield from group.steps

    def lines(self) -> Iterator[str]:
        """The plan in words: each group, and for each tensor in it where it is read and where its blocks go."""
        for number, group in enumerate(self.groups):
            names = [self.files[index].name for index in group.files]
            yield f"group {number}: {', '.join(names)}"
            for step in group.steps:
                form = f"{step.target.name} {step.target.dtype} {list(step.target.shape)}"
                yield f"  {form} <- {step.source.name} {_places(step.source)} -> {_places(step.target)}"

    def runs(self) -> list[StepRange]:
        """The work, in an order in which neighbours are of different groups: two writers on one file wait in turn."""
        ordered: list[tuple[int, StepRange]] = []
        for index, group in enumerate(self.groups):
            ordered += enumerate(_runs_of(index, group))
        ordered.sort(key=lambda pair: (pair[0], pair[1].group))
        return [run for _, run in ordered]


def _places(entry: TensorEntry) -> str:
    """File and first byte of the first chunk, and how many chunks follow."""
    first = entry.chunks[0]
    more = f" and {len(entry.chunks) - 1} more" if len(entry.chunks) > 1 else ""
    return f"{first.file}:{first.offset}{more}"


def _runs_of(index: int, group: FileGroup) -> Iterator[StepRange]:
    first = size = 0
    for i, step in enumerate(group.steps):
        shares = list(_shares(step)) if step.target.nbytes > RUN else []
        if len(shares) > 1:
            if first < i or i == 0:
                yield StepRange(
                    index, first, i
                )  # also when it is empty: the first run writes what stands before all blocks
            yield from (StepRange(index, i, i + 1, rows) for rows in shares)
            first, size = i + 1, 0
            continue
        size += step.target.nbytes
        if size >= RUN:
            yield StepRange(index, first, i + 1)
            first, size = i + 1, 0
    if first < len(group.steps) or not group.steps:
        yield StepRange(index, first, len(group.steps))


def _shares(step: CopyStep) -> Iterator[tuple[int, int]]:
    """Ranges of dim 0 of about `RUN` bytes that begin where a block of the tensor's digest begins."""
    shape, dtype = step.target.shape, step.target.dtype
    row_bits = prod(shape[1:]) * dtype.bits
    if not shape or row_bits % 8:
        return
    row_bytes = row_bits // 8
    unit = digest.LEAF // gcd(row_bytes, digest.LEAF)  # rows
    count = unit * max(1, RUN // (unit * row_bytes))
    for begin in range(0, shape[0], count):
        yield begin, min(begin + count, shape[0])
