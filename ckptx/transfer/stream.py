"""Stream a region of a tensor, in row-major order, into a sink.

The sink provides the memory, so that a plain copy reads from the file directly into the buffer that is written next.
The recorded CRC-32 of the source is checked on the way; stock torch never checks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain, product
from math import prod
from typing import NamedTuple, Protocol

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import ArchiveFrame, Chunk, LazyChunks, Record, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.columns import insert_columns
from ckptx.transfer.digest import crc32
from ckptx.transfer.grid import Cell, Grid, build_grid, is_grid
from ckptx.transfer.segments import TILE_NBYTES, Span, StridedRegion, Tile, iterate_segments
from ckptx.transfer.split_tensor import ChecksumPart, RecordPart
from ckptx.untrusted.hash_keys import packed_key


class Sink(Protocol):
    """Destination of a stream of bytes."""

    def space(self, nbytes: int) -> memoryview:
        """Return memory for the next bytes: at least one, at most `nbytes`."""

    def commit(self, view: memoryview) -> None:
        """Accept `view`, the filled part of the memory returned last."""


def push(sink: Sink, data: memoryview) -> None:
    """Copy `data` into `sink`."""
    while len(data):
        view = sink.space(len(data))
        view[:] = data[: len(view)]
        sink.commit(view)
        data = data[len(view) :]


class _FrameBuffers(NamedTuple):
    """Expected archive frame around elements, and memory for the frame that is read from a file.

    Attributes:
        head: Expected bytes before the elements.
        build_tail: Function that returns the expected bytes after the elements from their CRC-32.
        before_crc: First bytes of the tail, before the CRC-32 of the elements; empty if there are no elements.
        after_crc: Bytes of the tail right after this CRC-32; empty if there are no elements.
        head_buffer: Memory for the head in the file.
        tail_buffer: Memory for the tail in the file.
        nbytes: Size of both buffers together.
    """

    head: bytes
    build_tail: Callable[[int], bytes]
    before_crc: bytes
    after_crc: bytes
    head_buffer: bytearray
    tail_buffer: bytearray
    nbytes: int

    @classmethod
    def from_frame(cls, frame: ArchiveFrame) -> _FrameBuffers:
        head_buffer, tail_buffer = bytearray(len(frame.head)), bytearray(frame.tail_nbytes)
        nbytes = len(head_buffer) + len(tail_buffer)
        return cls(frame.head, frame.build_tail, *frame.tail_around_crc, head_buffer, tail_buffer, nbytes)


class _ArchiveSlot(NamedTuple):
    """Position of the elements of an archive in a tensor in memory.

    Attributes:
        begin: First byte of the rows with these elements.
        end: Byte after the last of these rows.
        pitch: Bytes per row; 0 if the elements fill everything from `begin` to `end`.
        column: First byte of the elements in each row.
        width: Bytes of the elements in each row.
        nbytes: Total bytes of the elements.
        frame: Archive frame around the elements.
    """

    begin: int
    end: int
    pitch: int
    column: int
    width: int
    nbytes: int
    frame: _FrameBuffers

    @classmethod
    def from_cell(cls, grid: Grid, cell: Cell, frame: _FrameBuffers) -> _ArchiveSlot:
        pitch, width = grid.width, cell.right - cell.left
        if width == pitch or grid.rows == 1:
            begin = cell.top * pitch + cell.left
            return cls(begin, begin + cell.nbytes, 0, 0, 0, cell.nbytes, frame)
        return cls(cell.top * pitch, cell.bottom * pitch, pitch, cell.left, width, cell.nbytes, frame)


def strided_row_nbytes(entry: TensorEntry) -> int:
    """Return the minimum memory for reading chunks that are not row-major, in bytes.

    `TensorReader` reads one index of the first dim with several indices at once, including gaps: this is the number of
    bytes in the file from its first to its last element. 0 if all chunks are row-major, or not located yet.
    """
    if type(entry.chunks) is not tuple:
        return 0
    min_nbytes = 0
    for chunk in entry.chunks:
        strides, sizes = chunk.strides, chunk.region.sizes
        if strides is not None and chunk.region.numel:
            row_dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
            inner = [dim for dim in range(len(sizes)) if dim != row_dim and strides[dim] <= strides[row_dim]]
            span = sum((sizes[dim] - 1) * strides[dim] for dim in inner) + 1
            min_nbytes = max(min_nbytes, span * entry.dtype.itemsize)
    return min_nbytes


class CheckedRecords:
    """Records of a checkpoint that one of several threads checked, or is to check, against their CRC-32."""

    def __init__(self) -> None:
        self._records: set[tuple[str, Record]] = set()
        self._lock = threading.Lock()

    def claim(self, file: str, record: Record) -> bool:
        """Return True to the first caller for a record, which has to check it, and False to all others."""
        with self._lock:
            is_first = (file, record) not in self._records
            self._records.add((file, record))
        return is_first


class TensorReader:
    """Reader of the tensors of one checkpoint; each thread has its own.

    Attributes:
        files: Files of the checkpoint.
        bytes_read: Number of bytes read from the files so far.
        records_without_crc: Number of different records without a CRC so far, except those counted by other readers
            with the same `checked_records`.
    """

    def __init__(
        self,
        files: SourceFiles,
        max_memory: int = 64 << 20,
        checked_records: CheckedRecords | None = None,
    ) -> None:
        """Store the files without reading them.

        Args:
            files: Files of the checkpoint; they must stay open.
            max_memory: Limit for the buffers of strided reads, in bytes.
            checked_records: Records that were already checked. Readers that share this object check a record that they
                read in parts only once. None for an object of its own.
        """
        self.files = files
        self.bytes_read = 0
        self.records_without_crc = 0
        self._max_memory = max_memory
        self._checked_records = CheckedRecords() if checked_records is None else checked_records
        self._tile: memoryview | None = None
        self._strip: memoryview | None = None
        self._grids: dict[tuple[DType, bytes], Grid | None] = {}
        self._frames: dict[tuple[DType, Shape], _FrameBuffers] = {}
        self._archive_slots: dict[tuple[DType, Shape, int], Sequence[_ArchiveSlot]] = {}
        self._ids = ObjectIds()

    def stream(
        self, entry: TensorEntry, region: Region, sink: Sink, record_parts: list[RecordPart] | None = None
    ) -> None:
        """Send `region` of `entry` to `sink`.

        Args:
            entry: Tensor to read.
            region: Region of the tensor.
            sink: Destination.
            record_parts: Receives the CRC-32 of records that are read only in part, if `region` is a range of dim 0 and
                other workers read the rest; the caller checks them when all parts are known. None to check each record
                here, with a separate read if streaming `region` does not read all of it.

        Raises:
            InputError: A file ends early, or bytes do not match the CRC-32 in their archive.
            UnsupportedError: A chunk with strides requires more memory than `max_memory`.
        """
        running_crcs = self._start_crcs(entry, region, record_parts is not None)
        for segment in iterate_segments(entry, region):
            if type(segment) is Span:
                self._read_span(entry, segment, running_crcs, sink)
            elif type(segment) is Tile:
                self._read_tile(entry, segment, running_crcs, sink)
            elif type(segment) is StridedRegion:
                self._read_strided(entry, segment, sink)
        for index, crc in running_crcs.items():
            chunk = entry.chunks[index]
            assert chunk.record is not None
            part = _checksum_part(entry, chunk, region, crc)
            if part.nbytes < chunk.record.nbytes:
                assert record_parts is not None
                record_parts.append(RecordPart(chunk.file, chunk.record, part))
            elif crc != chunk.record.crc:
                raise self.crc_error(entry.name, chunk.file, chunk.record, crc)

    def read_tensor(self, entry: TensorEntry, view: memoryview) -> bool:
        """Fill `view` with the row-major bytes of a tensor, with one read per chunk; fast for many small tensors.

        Returns:
            True if the tensor was read. False if only `stream` can read it, because its chunks are not row-major, do
            not form a grid or are part of a checksummed record, or an archive has an unexpected layout.

        Raises:
            InputError: See `stream`.
        """
        chunks = entry.chunks
        if type(chunks) is LazyChunks:
            return self._read_archives(entry, chunks, view)
        for chunk in chunks:
            record = chunk.record
            if chunk.strides is not None:
                return False
            if record is not None and (record.offset != chunk.offset or record.nbytes != chunk.nbytes):
                return False
        if len(chunks) == 1:
            self._read_chunk(entry, chunks[0], view)
            return True
        grid = self._find_grid(entry, chunks)
        if grid is None:
            return False
        for chunk, cell in zip(chunks, grid.cells, strict=True):
            if not cell.nbytes:
                continue
            rows = view[cell.top * grid.width : cell.bottom * grid.width]
            width = cell.right - cell.left
            if width == grid.width or grid.rows == 1:
                self._read_chunk(entry, chunk, rows[cell.left : cell.left + cell.nbytes])
                continue
            strip = self._strip_buffer(cell.nbytes)[: cell.nbytes]
            self._read_chunk(entry, chunk, strip)
            insert_columns(rows, grid.width, cell.left, strip, width, width)
        return True

    def read_range(self, entry: TensorEntry, offset: int, view: memoryview) -> bool:
        """Fill `view` with a range of the row-major bytes of a tensor; faster than `stream` for small ranges.

        Args:
            entry: Tensor to read.
            offset: First byte of the range, within the tensor.
            view: Bytes to fill.

        Returns:
            False, with nothing read, if only `stream` can read it: several chunks, a chunk that is not row-major, or a
            chunk in a checksummed record.

        Raises:
            InputError: The file cannot be read, or ends too early.
        """
        chunks = entry.chunks
        if type(chunks) is not tuple or len(chunks) != 1:
            return False
        chunk = chunks[0]
        if chunk.strides is not None or chunk.record is not None:
            return False
        self._read_into(chunk.file, chunk.offset + offset, view, entry.name)
        return True

    def _read_archives(self, entry: TensorEntry, chunks: LazyChunks, view: memoryview) -> bool:
        """Read archives as `read_tensor` does, checking their frames in the same read."""
        archives = chunks.archives
        slots = self._find_archive_slots(entry, chunks)
        located_slots = zip(slots, archives.files, archives.offsets, archives.lengths, strict=False)
        for (begin, end, pitch, column, width, nbytes, frame), file, offset, length in located_slots:
            rows = view[begin:end]
            if not pitch:
                if not self._read_archive(entry.name, frame, file, offset, length, rows):
                    return False
                continue
            strip = self._strip_buffer(nbytes)[:nbytes]
            if not self._read_archive(entry.name, frame, file, offset, length, strip):
                return False
            insert_columns(rows, pitch, column, strip, width, width)
        return bool(slots)

    def _find_archive_slots(self, entry: TensorEntry, chunks: LazyChunks) -> Sequence[_ArchiveSlot]:
        """Return the slot of each archive, cached for tensors with the same regions; empty if they form no grid."""
        regions, shape, dtype = chunks.archives.regions, entry.shape, entry.dtype
        key = (dtype, shape, self._ids(regions))
        slots = self._archive_slots.get(key)
        if slots is None:
            slots = ()
            if is_grid(shape, regions):
                frames = [self._find_frame_buffers(chunks.build_frame, dtype, region.sizes) for region in regions]
                grid = build_grid(dtype, shape, regions)
                slots = [
                    _ArchiveSlot.from_cell(grid, cell, frame) for cell, frame in zip(grid.cells, frames, strict=True)
                ]
            self._archive_slots[key] = slots
        return slots

    def _find_frame_buffers(
        self, build_frame: Callable[[DType, Shape], ArchiveFrame], dtype: DType, sizes: Shape
    ) -> _FrameBuffers:
        buffers = self._frames.get((dtype, sizes))
        if buffers is None:
            buffers = self._frames[dtype, sizes] = _FrameBuffers.from_frame(build_frame(dtype, sizes))
        return buffers

    def _read_archive(
        self, name: str, frame: _FrameBuffers, file: str, offset: int, length: int, view: memoryview
    ) -> bool:
        """Fill `view` with the elements of an archive; return False if its layout is unexpected.

        The whole frame is compared with the bytes that torch writes, because torch cannot read an archive whose zip
        directory is damaged. For an archive with other bytes, `stream` reports the error or reads it.
        """
        head, build_tail, before_crc, after_crc, head_buffer, tail_buffer, frame_nbytes = frame
        nbytes = len(view)
        if not before_crc or nbytes + frame_nbytes > length:
            return False
        nbytes_read = self.files.read_into(file, offset, [head_buffer, view, tail_buffer])
        if (
            nbytes_read != nbytes + frame_nbytes
            or head_buffer != head
            or not tail_buffer.startswith(before_crc)
            or not tail_buffer.startswith(after_crc, len(before_crc) + 4)
        ):
            return False
        recorded = int.from_bytes(tail_buffer[4:8], "little")  # the tail begins with a signature of 4 bytes
        if recorded and (crc := crc32(view)) != recorded:
            raise self.crc_error(name, file, Record(offset + len(head), nbytes, recorded), crc)
        if tail_buffer != build_tail(recorded):
            return False
        self.bytes_read += nbytes
        if not recorded:
            self._count_without_crc(file, Record(offset + len(head), nbytes, None))
        return True

    def _read_chunk(self, entry: TensorEntry, chunk: Chunk, view: memoryview) -> None:
        record = chunk.record
        self._read_into(chunk.file, chunk.offset, view, entry.name)
        if record is not None:
            if record.crc is None:
                self._count_without_crc(chunk.file, record)
            elif (crc := crc32(view)) != record.crc:
                raise self.crc_error(entry.name, chunk.file, record, crc)

    def _find_grid(self, entry: TensorEntry, chunks: Sequence[Chunk]) -> Grid | None:
        """Return the grid of the chunks, cached for tensors with the same regions; None if they form no grid."""
        regions = tuple([chunk.region for chunk in chunks])
        key = (entry.dtype, packed_key(len(entry.shape), entry.shape, *chain.from_iterable(regions)))
        if key not in self._grids:
            self._grids[key] = build_grid(entry.dtype, entry.shape, regions) if is_grid(entry.shape, regions) else None
        return self._grids[key]

    def _start_crcs(self, entry: TensorEntry, region: Region, accepts_parts: bool) -> dict[int, int]:
        """Return chunk index -> 0 for chunks whose CRC-32 is computed while streaming; check others in a separate read.

        Args:
            entry: Tensor to read.
            region: Region of the tensor.
            accepts_parts: True to compute the CRC-32 of a part of a record while streaming, for `record_parts` of
                `stream`.
        """
        running_crcs: dict[int, int] = {}
        for index, chunk in enumerate(entry.chunks):
            record = chunk.record
            if record is None:
                continue
            overlap = chunk.region if chunk.region == region else chunk.region.intersect(region)
            if overlap is None and chunk.region.numel:
                continue
            is_inside = overlap is None or overlap == chunk.region
            if record.crc is None:
                self._count_without_crc(chunk.file, record)
                continue
            is_whole_record = record.offset == chunk.offset and record.nbytes == chunk.nbytes
            if is_whole_record and chunk.strides is None and (is_inside or accepts_parts):
                running_crcs[index] = 0
            else:
                self._check_record(entry.name, chunk, record)
        return running_crcs

    def _count_without_crc(self, file: str, record: Record) -> None:
        if self._checked_records.claim(file, record):
            self.records_without_crc += 1

    def _check_record(self, name: str, chunk: Chunk, record: Record) -> None:
        """Read a whole record and compare its CRC-32, unless it was checked before."""
        if not self._checked_records.claim(chunk.file, record):
            return
        crc = 0
        buffer = self._tile_buffer(TILE_NBYTES)
        for offset in range(0, record.nbytes, TILE_NBYTES):
            view = buffer[: min(TILE_NBYTES, record.nbytes - offset)]
            self._read_into(chunk.file, record.offset + offset, view, name)
            crc = crc32(view, crc)
        if crc != record.crc:
            raise self.crc_error(name, chunk.file, record, crc)

    def crc_error(self, name: str, file: str, record: Record, crc: int) -> InputError:
        """Return the error for bytes of tensor `name` that do not match the CRC-32 of their record."""
        assert record.crc is not None
        return InputError(
            f'{self.files.root / file}: tensor "{name}": CRC-32 of its bytes is {crc:08x}, but the archive records '
            f"{record.crc:08x}; the file is corrupt, restore it from a copy"
        )

    def _read_into(self, file: str, offset: int, view: memoryview, name: str) -> None:
        nbytes_read = self.files.read_into(file, offset, [view])
        while nbytes_read < len(view):
            count = self.files.read_into(file, offset + nbytes_read, [view[nbytes_read:]])
            if not count:
                raise InputError(
                    f'{self.files.root / file}: ends at byte {offset + nbytes_read} inside tensor "{name}", which '
                    f"extends to byte {offset + len(view)}; the file is truncated, restore it from a copy"
                )
            nbytes_read += count
        self.bytes_read += len(view)

    def _read_span(self, entry: TensorEntry, span: Span, running_crcs: dict[int, int], sink: Sink) -> None:
        index, offset, remaining = span
        file = entry.chunks[index].file
        has_crc = index in running_crcs
        while remaining:
            view = sink.space(remaining)
            self._read_into(file, offset, view, entry.name)
            if has_crc:
                running_crcs[index] = crc32(view, running_crcs[index])
            offset += len(view)
            remaining -= len(view)
            sink.commit(view)

    def _read_tile(self, entry: TensorEntry, tile: Tile, running_crcs: dict[int, int], sink: Sink) -> None:
        """Read the rows of each strip with one call and copy them side by side, into memory of `sink` if it fits."""
        lengths = [(strip.rows - 1) * strip.pitch + strip.width for strip in tile.strips]
        buffer = self._strip_buffer(sum(lengths))
        views, position = [], 0
        for strip, length in zip(tile.strips, lengths, strict=True):
            view = buffer[position : position + length]
            self._read_into(entry.chunks[strip.chunk].file, strip.offset, view, entry.name)
            if strip.chunk in running_crcs:
                running_crcs[strip.chunk] = crc32(view, running_crcs[strip.chunk])
            views.append(view)
            position += length
        row = 0
        while row < tile.rows:
            view = sink.space((tile.rows - row) * tile.width)
            count = len(view) // tile.width
            out = view[: count * tile.width] if count else self._tile_buffer(tile.width)[: tile.width]
            for strip, rows in zip(tile.strips, views, strict=True):
                insert_columns(out, tile.width, strip.column, rows[row * strip.pitch :], strip.pitch, strip.width)
            if count:
                sink.commit(out)
            else:
                push(sink, out)
            row += max(1, count)

    def _read_strided(self, entry: TensorEntry, strided: StridedRegion, sink: Sink) -> None:
        """Send a region of a chunk that is not row-major, some rows at a time, so that memory stays bounded.

        Dims with a longer stride than the row dim are looped, one read each; the dims inside them are read as one
        span, including gaps, and reordered in memory.
        """
        chunk = entry.chunks[strided.chunk]
        itemsize = entry.dtype.itemsize
        strides = chunk.strides or ()
        starts = [a - b for a, b in zip(strided.region.offsets, chunk.region.offsets, strict=True)]
        sizes = list(strided.region.sizes)
        if entry.dtype.pack > 1:  # F4: strides count bytes, which are pairs of elements
            starts[-1] //= entry.dtype.pack
            sizes[-1] //= entry.dtype.pack
        row_dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
        # A strided row may span more bytes than it has.
        row_bytes = max(prod(sizes[row_dim + 1 :]), *strides[row_dim : row_dim + 1], 1) * itemsize
        rows_per_read = max(1, min(sizes[row_dim], self._max_memory // (2 * row_bytes)))
        for first in range(0, sizes[row_dim], rows_per_read):
            part_sizes = [*sizes[:row_dim], min(rows_per_read, sizes[row_dim] - first), *sizes[row_dim + 1 :]]
            begins = [start + (first if dim == row_dim else 0) for dim, start in enumerate(starts)]
            origin = sum(begin * stride for begin, stride in zip(begins, strides, strict=True))
            push(sink, self._gather(entry, chunk, origin, part_sizes, row_dim))

    def _gather(self, entry: TensorEntry, chunk: Chunk, origin: int, sizes: list[int], row_dim: int) -> memoryview:
        """Return a part of a chunk in row-major order, in a buffer that the next read reuses.

        Args:
            entry: Tensor of the chunk.
            chunk: Chunk with strides.
            origin: Position in the chunk of the first element, in elements.
            sizes: Size of each dim of the part, in the unit of the strides.
            row_dim: Dim of the rows; dims with a longer stride are looped.

        Raises:
            UnsupportedError: One span is larger than the memory limit.
        """
        from ckptx.transfer import strided_copy

        strides, itemsize = chunk.strides, entry.dtype.itemsize
        assert strides is not None
        looped = [dim for dim in range(len(sizes)) if strides[dim] > strides[row_dim] and sizes[dim] > 1]
        inner = [dim for dim in range(len(sizes)) if dim not in looped]
        span_nbytes = (sum((sizes[dim] - 1) * strides[dim] for dim in inner) + 1) * itemsize
        if span_nbytes > self._max_memory:
            raise UnsupportedError(
                f'{self.files.root / chunk.file}: tensor "{entry.name}" is stored with strides {strides}; one row '
                f"spans {span_nbytes} bytes, but {self._max_memory} are allowed; raise --max-memory"
            )
        out = self._tile_buffer(prod(sizes) * itemsize)[: prod(sizes) * itemsize]
        buffer = self._strip_buffer(span_nbytes)[:span_nbytes]
        for index in product(*(range(sizes[dim]) for dim in looped)):
            start = origin + sum(i * strides[dim] for i, dim in zip(index, looped, strict=True))
            self._read_into(chunk.file, chunk.offset + start * itemsize, buffer, entry.name)
            strided_copy.copy_strided(out, sizes, dict(zip(looped, index, strict=True)), buffer, strides, itemsize)
        return out

    def _tile_buffer(self, nbytes: int) -> memoryview:
        if self._tile is None or len(self._tile) < nbytes:
            self._tile = memoryview(bytearray(max(nbytes, TILE_NBYTES)))
        return self._tile

    def _strip_buffer(self, nbytes: int) -> memoryview:
        if self._strip is None or len(self._strip) < nbytes:
            self._strip = memoryview(bytearray(max(nbytes, TILE_NBYTES)))
        return self._strip


def _checksum_part(entry: TensorEntry, chunk: Chunk, region: Region, crc: int) -> ChecksumPart:
    """Return `crc` as the CRC-32 of the part of a row-major chunk that is inside `region`.

    Args:
        entry: Tensor of the chunk.
        chunk: Chunk that is a whole record.
        region: Range of dim 0 of the tensor, or a region that contains the chunk.
        crc: CRC-32 of the part.
    """
    overlap = chunk.region if chunk.region == region else chunk.region.intersect(region)
    if overlap is None or overlap == chunk.region:
        return ChecksumPart(0, chunk.nbytes, crc)
    row = chunk.nbytes // chunk.region.sizes[0]
    return ChecksumPart((overlap.offsets[0] - chunk.region.offsets[0]) * row, overlap.sizes[0] * row, crc)
