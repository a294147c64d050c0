"""Writers of an output file: each worker writes a range of it through its own buffer, and digests it on the way."""

from __future__ import annotations

from collections.abc import Callable

from ckptx.storage.interface import OutputFile
from ckptx.transfer import digest
from ckptx.transfer.digest import TreeDigest


class FileDigests:
    """Leaf digests of a file that several workers write; leaf i is bytes i * `LEAF_NBYTES` to (i + 1) * `LEAF_NBYTES`.

    Attributes:
        leaves: Index of the leaf -> digest of the complete leaf.
        partial_leaves: Position in the file in bytes -> unfinished digest of the leaf with this position, whose bytes
            were written in order up to it.
    """

    __slots__ = ("leaves", "partial_leaves")

    def __init__(self) -> None:
        self.leaves: dict[int, bytes] = {}
        self.partial_leaves: dict[int, TreeDigest] = {}

    def find_undigested_leaves(self, nbytes: int) -> list[tuple[int, int]]:
        """Return each leaf of a file of `nbytes` without a complete digest, as (index, first byte to read).

        The first byte is that of the leaf, or the position of its partial digest.
        """
        positions = {position // digest.LEAF_NBYTES: position for position in self.partial_leaves}
        count = -(-nbytes // digest.LEAF_NBYTES)
        return [
            (leaf, positions.get(leaf, leaf * digest.LEAF_NBYTES)) for leaf in range(count) if leaf not in self.leaves
        ]


class FileWriter:
    """Writer of the range of a target file that one worker writes.

    The contents of the buffer are written with one call when they end at a multiple of the buffer size in the file, so
    that writes are aligned as long as the worker writes front to back. The writer may also seek, for two blocks of one
    tensor in the same file.

    Attributes:
        position: Position in the file of the first byte in the buffer.
        buffered: Number of bytes in the buffer.
        nbytes: Total size of the file.
    """

    __slots__ = ("_buffer", "_file", "_file_digests", "_leaf_digest", "_on_write", "buffered", "nbytes", "position")

    def __init__(
        self,
        file: OutputFile,
        nbytes: int,
        buffer: memoryview,
        digests: FileDigests,
        on_write: Callable[[int], None],
        position: int,
    ) -> None:
        """Start at `position`.

        Args:
            file: File, open for writing.
            nbytes: Total size of the file.
            buffer: Buffer whose size divides `LEAF_NBYTES`.
            digests: Receives the digest of each leaf of the file that this worker completes.
            on_write: Called before each write with its number of bytes.
            position: Position of the first byte to write.
        """
        self.nbytes, self.position, self.buffered = nbytes, position, 0
        self._file, self._buffer, self._file_digests, self._on_write = file, buffer, digests, on_write
        self._leaf_digest = digests.partial_leaves.pop(position, None)

    def seek(self, position: int) -> None:
        """Continue at `position`, after flushing the buffer if it is another than the current one."""
        if position != self.position + self.buffered:
            self.suspend()
            self.position = position
            self._leaf_digest = self._file_digests.partial_leaves.pop(position, None)

    def space(self, nbytes: int) -> memoryview:
        """Return memory for the next bytes, at least one and at most `nbytes`."""
        size = len(self._buffer)
        return self._buffer[self.buffered : self.buffered + min(nbytes, size - (self.position + self.buffered) % size)]

    def reserve(self, nbytes: int) -> memoryview:
        """Return memory for exactly `nbytes`, which must fit into the buffer."""
        if self.buffered + nbytes > len(self._buffer):
            self.flush()
        return self._buffer[self.buffered : self.buffered + nbytes]

    def advance(self, nbytes: int) -> None:
        """Account for `nbytes` that were written to the memory returned last."""
        self.buffered += nbytes
        if self.buffered == len(self._buffer) or (self.position + self.buffered) % len(self._buffer) == 0:
            self.flush()

    def write(self, data: bytes) -> None:
        """Add bytes that are not tensor data: a header, a frame."""
        if len(data) <= len(self._buffer) - self.buffered:
            self._buffer[self.buffered : self.buffered + len(data)] = data
            self.advance(len(data))
            return
        written = 0
        while written < len(data):
            view = self.space(len(data) - written)
            view[:] = data[written : written + len(view)]
            written += len(view)
            self.advance(len(view))

    def write_through(self, view: memoryview) -> None:
        """Write bytes from a buffer of the caller, after flushing the buffer of this writer."""
        self.flush()
        self._write_view(view)

    def flush(self) -> None:
        """Write the contents of the buffer."""
        if self.buffered:
            self._write_view(self._buffer[: self.buffered])
            self.buffered = 0

    def _write_view(self, view: memoryview) -> None:
        self._on_write(len(view))
        done, position = 0, self.position
        while done < len(view):
            part = view[done : done + digest.LEAF_NBYTES - position % digest.LEAF_NBYTES]
            self._update_digest(part, position)
            done += len(part)
            position += len(part)
        self._file.write(view, self.position)
        self.position = position

    def suspend(self) -> None:
        """Flush, and store the digest of the current leaf for the worker that continues at this position."""
        self.flush()
        if self._leaf_digest is not None:
            self._file_digests.partial_leaves[self.position], self._leaf_digest = self._leaf_digest, None

    def _update_digest(self, view: memoryview, position: int) -> None:
        """Digest leaves that are written front to back; the executor reads the other leaves again at the end."""
        if position % digest.LEAF_NBYTES == 0:
            self._leaf_digest = TreeDigest()
        if self._leaf_digest is None:
            return
        end = position + len(view)
        is_last = end == self.nbytes
        self._leaf_digest.update(view, is_last=is_last)
        if is_last or end % digest.LEAF_NBYTES == 0:
            self._file_digests.leaves[(end - 1) // digest.LEAF_NBYTES] = self._leaf_digest.leaves[-1]
            self._leaf_digest = None
