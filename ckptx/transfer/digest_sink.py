"""Compute the digest of a tensor, and stream a region of a tensor cast to another dtype."""

from __future__ import annotations

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.transfer.digest import TreeDigest
from ckptx.transfer.overflow_counts import OverflowCounts
from ckptx.transfer.split_tensor import RecordPart
from ckptx.transfer.stream import Sink, TensorReader

_BUFFER_NBYTES = 1 << 20


class DigestSink:
    """Sink that computes the digest of a tensor and discards its bytes."""

    def __init__(self, nbytes: int, buffer: memoryview) -> None:
        """Start a stream of `nbytes` bytes in all; `buffer`, of any size but 0, receives them piece by piece."""
        self.digest = TreeDigest()
        self._remaining = nbytes
        self._buffer = buffer

    def space(self, nbytes: int) -> memoryview:
        """Return memory for the next bytes: at least one, at most `nbytes`. See `Sink`."""
        return self._buffer[: min(nbytes, self.digest.leaf_remaining)]

    def commit(self, view: memoryview) -> None:
        """Add `view`, the filled part of the memory returned last, to the digest."""
        self._remaining -= len(view)
        self.digest.update(view, is_last=not self._remaining)


def stream_cast(
    reader: TensorReader,
    entry: TensorEntry,
    region: Region,
    dtype: DType,
    sink: Sink,
    record_parts: list[RecordPart] | None = None,
    counts: OverflowCounts | None = None,
) -> None:
    """Send `region` of `entry` to `sink`, cast to `dtype` if the tensor has another dtype.

    `counts` receives the numbers of overflows and underflows of the cast; None to skip counting. For `record_parts` see
    `TensorReader.stream`.

    Raises:
        InputError, UnsupportedError: See `TensorReader.stream`.
    """
    if entry.dtype is not dtype:
        from ckptx.transfer.cast import CastSink  # imports numpy, which most conversions do not use

        sink = CastSink(sink, entry.dtype, dtype, memoryview(bytearray(_BUFFER_NBYTES)), counts)
    reader.stream(entry, region, sink, record_parts)


def digest_tensor(
    reader: TensorReader, entry: TensorEntry, dtype: DType, counts: OverflowCounts | None = None
) -> TreeDigest:
    """Read a tensor, cast it to `dtype`, and return the digest of its row-major bytes, independent of the layout.

    Raises:
        InputError, UnsupportedError: See `TensorReader.stream`.
    """
    nbytes = dtype.nbytes(entry.numel)
    sink = DigestSink(nbytes, memoryview(bytearray(min(_BUFFER_NBYTES, max(1, nbytes)))))
    stream_cast(reader, entry, full_region(entry.shape), dtype, sink, counts=counts)
    return sink.digest
