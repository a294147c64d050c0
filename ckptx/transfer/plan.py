"""The nouns of a copy: what is written where, from which entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Frame, TensorEntry
from ckptx.catalog.region import Region

# One worker takes this much of a file at a time: long enough for one sequential pass, short enough to share out.
RUN = 512 << 20


class Item(NamedTuple):
    """One block of a target file: a region of a source tensor, cast to `dtype`, inside its frame.

    `offset` is where the frame begins in the file, `nbytes` the length of the elements alone.
    """

    name: str
    source: TensorEntry
    region: Region
    dtype: DType
    offset: int
    nbytes: int
    frame: Frame | None

    @property
    def end(self) -> int:
        """First byte after the frame."""
        if self.frame is None:
            return self.offset + self.nbytes
        return self.offset + len(self.frame.head) + self.nbytes + self.frame.tail_nbytes


class TargetFile(NamedTuple):
    """A file to write: `prologue`, then items without a hole."""

    name: str
    nbytes: int
    prologue: bytes
    items: tuple[Item, ...]


class Run(NamedTuple):
    """Consecutive items of one file, written by one worker in one pass."""

    file: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Everything the executor needs.

    Attributes:
        files: What to write.
        bytes_read: Bytes of tensor data that will be read.
        bytes_written: Sum of the file sizes.
    """

    files: tuple[TargetFile, ...]
    bytes_read: int
    bytes_written: int

    def runs(self) -> list[Run]:
        """The work, in an order in which neighbours are of different files: two writers on one file wait in turn."""
        runs: list[tuple[int, Run]] = []
        for index, file in enumerate(self.files):
            first = turn = 0
            start = 0
            for i, item in enumerate(file.items):
                if item.end - start >= RUN or i + 1 == len(file.items):
                    runs.append((turn, Run(index, first, i + 1)))
                    first, start, turn = i + 1, item.end, turn + 1
            if not file.items:
                runs.append((0, Run(index, 0, 0)))
        runs.sort(key=lambda pair: (pair[0], pair[1].file))
        return [run for _, run in runs]
