"""An open file on a local disk, with thread-safe reads and writes by position.

Every byte of an output is written through an `OpenFile`, which implements `OutputFile`; `FilePool` reads sources. A
failed access raises OutputError with the path, or SpaceError if the disk is full.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ckptx.storage.files import output_errors, write_at


class OpenFile:
    """A file that is open by descriptor.

    Attributes:
        descriptor: File descriptor.
        path: Path of the file, for messages.
    """

    __slots__ = ("descriptor", "path")

    def __init__(self, descriptor: int, path: Path) -> None:
        """Store `descriptor`, which is closed either by `close` or by its opener."""
        self.descriptor, self.path = descriptor, path

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    @property
    def size(self) -> int:
        """Current size in bytes."""
        with output_errors(self.path):
            return os.fstat(self.descriptor).st_size

    @property
    def device_and_inode(self) -> tuple[int, int]:
        """Device and inode, in this order."""
        with output_errors(self.path):
            status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino

    def truncate(self, nbytes: int) -> None:
        """Truncate the file to `nbytes` bytes if it is longer; a shorter file does not change."""
        if self.size > nbytes:
            with output_errors(self.path):
                os.ftruncate(self.descriptor, nbytes)

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return up to `nbytes` bytes from `offset`; empty at the end of the file."""
        with output_errors(self.path):
            return os.pread(self.descriptor, nbytes, offset)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`, and return the number of bytes read, which may be less than its length."""
        with output_errors(self.path):
            return os.preadv(self.descriptor, [view], offset)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset`.

        Raises:
            SpaceError: The disk or the quota is full.
            OutputError: Any other failure.
        """
        write_at(self.descriptor, data, offset, self.path)

    def sync(self) -> None:
        """Flush the file to disk.

        Raises:
            OutputError, SpaceError: Flushing failed; written data may be lost.
        """
        with output_errors(self.path):
            os.fsync(self.descriptor)

    def blocks(self, size: int) -> Iterator[bytes]:
        """Iterate over the contents of the file, at most `size` bytes at a time."""
        offset = 0
        while block := self.read(size, offset):
            yield block
            offset += len(block)
