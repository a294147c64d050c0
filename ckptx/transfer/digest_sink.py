"""Sink that digests a tensor, and streaming through a cast."""

from __future__ import annotations

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Region, whole
from ckptx.transfer.cast_losses import CastLosses
from ckptx.transfer.digest import TreeDigest
from ckptx.transfer.split_tensor import RecordPart
from ckptx.transfer.stream import Sink, TensorReader

_BUFFER = 1 << 20


class DigestSink:
    """Sink that digests a tensor and discards its bytes."""

    def __init__(self, nbytes: int, buffer: memoryview) -> None:
        self.digest = TreeDigest()
        self._left = nbytes
        self._buffer = buffer

    def space(self, nbytes: int) -> memoryview:
        return self._buffer[: min(nbytes, self.digest.room)]

    def commit(self, view: memoryview) -> None:
        self._left -= len(view)
        self.digest.update(view, last=not self._left)


def stream_as(
    reader: TensorReader,
    entry: TensorEntry,
    region: Region,
    dtype: DType,
    sink: Sink,
    parts: list[RecordPart] | None = None,
    losses: CastLosses | None = None,
) -> None:
    """Send `region` of `entry` to `sink`, cast to `dtype` if it differs; for `parts` see `TensorReader.stream`.

    `losses` receives the numbers of overflows and underflows of the cast.
    """
    if entry.dtype is not dtype:
        from ckptx.transfer.cast import CastSink  # imports numpy, which most conversions do not use

        sink = CastSink(sink, entry.dtype, dtype, memoryview(bytearray(_BUFFER)), losses)
    reader.stream(entry, region, sink, parts)


def digest_of(reader: TensorReader, entry: TensorEntry, dtype: DType, losses: CastLosses | None = None) -> TreeDigest:
    """Return the layout-independent digest of a tensor cast to `dtype`, from its bytes."""
    nbytes = dtype.nbytes(entry.numel)
    sink = DigestSink(nbytes, memoryview(bytearray(min(_BUFFER, max(1, nbytes)))))
    stream_as(reader, entry, whole(entry.shape), dtype, sink, losses=losses)
    return sink.digest
