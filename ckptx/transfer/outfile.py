"""Output file that is written front to back through one buffer and digested on the way."""

from __future__ import annotations

from collections.abc import Callable

from ckptx.storage.interface import OutputFile
from ckptx.transfer import digest
from ckptx.transfer.digest import TreeDigest


class FileDigests:
    """Partial digests of a file that several passes write.

    Attributes:
        leaves: Block number -> digest of the complete block.
        begun: Position -> digest of the block that was written in order up to there.
    """

    __slots__ = ("begun", "leaves")

    def __init__(self) -> None:
        self.leaves: dict[int, bytes] = {}
        self.begun: dict[int, TreeDigest] = {}

    def missing(self, nbytes: int) -> list[tuple[int, int]]:
        """Return number and first position to read of each block of a file of `nbytes` that is not digested yet."""
        begun = {position // digest.LEAF: position for position in self.begun}
        count = -(-nbytes // digest.LEAF)
        return [(leaf, begun.get(leaf, leaf * digest.LEAF)) for leaf in range(count) if leaf not in self.leaves]


class OutFile:
    """One pass over a range of a target file.

    The buffer is written with one call when it ends at a multiple of its size, so that writes are aligned as long as
    the pass goes front to back; it may also seek, for two blocks of one tensor in the same file.

    Attributes:
        position: Position of the buffer in the file.
        fill: Number of bytes in the buffer.
        nbytes: Total size of the file.
    """

    __slots__ = ("_buffer", "_digest", "_digests", "_file", "_on_write", "fill", "nbytes", "position")

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
            buffer: Buffer whose size divides the size of a digest block.
            digests: Receives the digest of each block of the file that this pass completes.
            on_write: Called with the number of bytes before they are written.
            position: First position to write.
        """
        self.nbytes, self.position, self.fill = nbytes, position, 0
        self._file, self._buffer, self._digests, self._on_write = file, buffer, digests, on_write
        self._digest = digests.begun.pop(position, None)

    @property
    def end(self) -> int:
        """Return the position of the next byte."""
        return self.position + self.fill

    def seek(self, position: int) -> None:
        """Continue at `position`."""
        if position != self.position + self.fill:
            self.leave()
            self.position = position
            self._digest = self._digests.begun.pop(position, None)

    def space(self, nbytes: int) -> memoryview:
        """Return memory for the next bytes, at least one and at most `nbytes`."""
        size = len(self._buffer)
        return self._buffer[self.fill : self.fill + min(nbytes, size - (self.position + self.fill) % size)]

    def reserve(self, nbytes: int) -> memoryview:
        """Return memory for exactly `nbytes`, which must fit into the buffer."""
        if self.fill + nbytes > len(self._buffer):
            self.flush()
        return self._buffer[self.fill : self.fill + nbytes]

    def advance(self, nbytes: int) -> None:
        """Account for `nbytes` that were written to the memory returned last."""
        self.fill += nbytes
        if self.fill == len(self._buffer) or (self.position + self.fill) % len(self._buffer) == 0:
            self.flush()

    def write(self, data: bytes) -> None:
        """Add bytes that are not tensor data: a header, a frame."""
        if len(data) <= len(self._buffer) - self.fill:
            self._buffer[self.fill : self.fill + len(data)] = data
            self.advance(len(data))
            return
        at = 0
        while at < len(data):
            view = self.space(len(data) - at)
            view[:] = data[at : at + len(view)]
            at += len(view)
            self.advance(len(view))

    def write_through(self, view: memoryview) -> None:
        """Write bytes from a buffer of the caller, after flushing the own buffer."""
        self.flush()
        self._put(view)

    def flush(self) -> None:
        """Write the contents of the buffer."""
        if self.fill:
            self._put(self._buffer[: self.fill])
            self.fill = 0

    def _put(self, view: memoryview) -> None:
        self._on_write(len(view))
        at, position = 0, self.position
        while at < len(view):
            piece = view[at : at + digest.LEAF - position % digest.LEAF]
            self._digest_piece(piece, position)
            at += len(piece)
            position += len(piece)
        self._file.write(view, self.position)
        self.position = position

    def leave(self) -> None:
        """Flush, and store the digest of the current block for the pass that continues at this position."""
        self.flush()
        if self._digest is not None:
            self._digests.begun[self.position], self._digest = self._digest, None

    def _digest_piece(self, piece: memoryview, position: int) -> None:
        """Digest blocks of the file that are written in order; the rest of other blocks is read back at the end."""
        if position % digest.LEAF == 0:
            self._digest = TreeDigest()
        if self._digest is None:
            return
        end = position + len(piece)
        is_last = end == self.nbytes
        self._digest.update(piece, last=is_last)
        if is_last or end % digest.LEAF == 0:
            self._digests.leaves[(end - 1) // digest.LEAF] = self._digest.leaves[-1]
            self._digest = None
