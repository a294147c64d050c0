"""An open file on a local disk, with thread-safe reads and writes by position.

Every byte of an output is written through it; `FilePool` reads sources. Another kind of storage would implement both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ckptx.storage.files import write_at


class OpenFile:
    """A file that is open by descriptor.

    Attributes:
        path: Path of the file, for messages.
    """

    __slots__ = ("_descriptor", "path")

    def __init__(self, descriptor: int, path: Path) -> None:
        """Store `descriptor`, which is closed either by `close` or by its opener."""
        self._descriptor, self.path = descriptor, path

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    @property
    def size(self) -> int:
        """Current size in bytes."""
        return os.fstat(self._descriptor).st_size

    @property
    def device_and_inode(self) -> tuple[int, int]:
        """Device and inode."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    def truncate(self, nbytes: int) -> None:
        """Truncate the file to at most `nbytes` bytes."""
        if self.size > nbytes:
            os.ftruncate(self._descriptor, nbytes)

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return up to `nbytes` bytes from `offset`."""
        return os.pread(self._descriptor, nbytes, offset)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`, and return the number of bytes read."""
        return os.preadv(self._descriptor, [view], offset)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset`.

        Raises:
            SpaceError: The disk or the quota is full.
            OutputError: Any other failure.
        """
        write_at(self._descriptor, data, offset, self.path)

    def sync(self) -> None:
        """Flush the file to disk.

        Raises:
            OSError: Flushing failed; written data may be lost.
        """
        os.fsync(self._descriptor)

    def blocks(self, size: int) -> Iterator[bytes]:
        """Iterate over the contents of the file, `size` bytes at a time.

        Raises:
            OSError: It cannot be read; the caller translates the error.
        """
        offset = 0
        while block := os.pread(self._descriptor, size, offset):
            yield block
            offset += len(block)
