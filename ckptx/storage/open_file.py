"""One open file of a local disk: reads and writes at a position, by as many threads as like.

These are the verbs through which every byte of an output goes; together with `FilePool`, which reads sources, they are
what another kind of storage would have to offer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ckptx.storage.files import write_at


class OpenFile:
    """A file by its descriptor.

    Attributes:
        path: Where it is, for messages.
    """

    __slots__ = ("_descriptor", "path")

    def __init__(self, descriptor: int, path: Path) -> None:
        """Takes over `descriptor`, if anybody calls `close`; else it is closed by whoever opened it."""
        self._descriptor, self.path = descriptor, path

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._descriptor)

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._descriptor).st_size

    @property
    def identity(self) -> tuple[int, int]:
        """Its device and inode."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino

    def cut_to(self, nbytes: int) -> None:
        """Leaves out what lies behind the first `nbytes` bytes."""
        if self.size > nbytes:
            os.ftruncate(self._descriptor, nbytes)

    def read(self, nbytes: int, offset: int) -> bytes:
        """What there is of `nbytes` bytes from `offset` on."""
        return os.pread(self._descriptor, nbytes, offset)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills `view` from `offset` on; the number of bytes that were there."""
        return os.preadv(self._descriptor, [view], offset)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Writes all of `data` at `offset`.

        Raises:
            SpaceError: The disk or the quota is full.
            OutputError: Any other failure.
        """
        write_at(self._descriptor, data, offset, self.path)

    def sync(self) -> None:
        """Brings it to the disk.

        Raises:
            OSError: That failed; what was written may be lost.
        """
        os.fsync(self._descriptor)

    def blocks(self, size: int) -> Iterator[bytes]:
        """All of it, `size` bytes at a time.

        Raises:
            OSError: It cannot be read; what that means depends on whose file it is.
        """
        at = 0
        while block := os.pread(self._descriptor, size, at):
            yield block
            at += len(block)
