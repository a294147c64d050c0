"""Entries of a catalog: tensors, their chunks on disk, pickled objects and sidecars."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from math import prod
from operator import itemgetter
from typing import NamedTuple, overload

from ckptx.catalog.dtype import DType
from ckptx.catalog.region import Region, Shape


class Record(NamedTuple):
    """One uncompressed member of a torch archive, the zip file that `torch.save` writes, with its checksum.

    Attributes:
        offset: Absolute position of the first byte in its file.
        nbytes: Length in bytes.
        crc: CRC-32 of the bytes; None if the writer left the CRC field 0 although the member has bytes.
    """

    offset: int
    nbytes: int
    crc: int | None


class Chunk(NamedTuple):
    """One region of a tensor, and the location of its elements.

    Attributes:
        region: Region of the tensor.
        file: Path of the file, relative to the root of the catalog.
        offset: Position of the first byte of the elements in the file; for an archive, of the archive.
        nbytes: Bytes from `offset` to the end of the last element; with strides, this includes bytes between the
            elements. For an archive, its length.
        strides: Strides in torch elements, see `DType.pack`, one per dim; None if the elements are row-major.
        record: Record of the storage that contains the elements; None if the format has no checksums, or if
            `is_archive`.
        is_archive: True if `offset` and `nbytes` are those of a whole torch archive (the zip file that `torch.save`
            writes) that was not parsed yet.
    """

    region: Region
    file: str
    offset: int
    nbytes: int
    strides: Shape | None = None
    record: Record | None = None
    is_archive: bool = False


class Block(NamedTuple):
    """A region of a tensor on one rank of a mesh.

    Attributes:
        rank_in_stage: The rank within its pipeline stage: dp_index * tp + tp_index.
        region: Region of the tensor.
        is_replica: True if an earlier block of the tensor holds the same elements; False for the first of equal blocks.
            The check that blocks cover a tensor without gaps or overlaps ignores replicas.
    """

    rank_in_stage: int
    region: Region
    is_replica: bool = False


class ShardedChunks(Sequence[Chunk]):
    """The chunks of one tensor of an output that is sharded for a mesh, created on access.

    Equally sharded tensors share all but the offsets, so that a plan for thousands of ranks stays small. Unlike
    `ComputedChunks`, two sequences are equal only if they are the same object, so that no comparison of output tensors
    creates their chunks.

    Attributes:
        blocks: The blocks of the tensor.
        files: File name of each block.
        offsets: Position of the first byte of each block in its file; of its archive, if `are_archives`.
        lengths: Length of each block in bytes, including the bytes of its archive before and after the elements.
        are_archives: True if the blocks are torch archives, see `Chunk`.
    """

    __slots__ = ("are_archives", "blocks", "files", "lengths", "offsets")

    def __init__(
        self,
        blocks: tuple[Block, ...],
        files: tuple[str, ...],
        offsets: array[int],
        lengths: tuple[int, ...],
        are_archives: bool = False,
    ) -> None:
        assert len(blocks) == len(files) == len(offsets) == len(lengths)
        self.blocks, self.files, self.offsets, self.lengths = blocks, files, offsets, lengths
        self.are_archives = are_archives

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Chunk]:
        for block, file, offset, nbytes in zip(self.blocks, self.files, self.offsets, self.lengths, strict=True):
            yield Chunk(block.region, file, offset, nbytes, is_archive=self.are_archives)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        region, file = self.blocks[index].region, self.files[index]
        return Chunk(region, file, self.offsets[index], self.lengths[index], is_archive=self.are_archives)


class ComputedChunks(Sequence[Chunk]):
    """Base class of the chunks of a source tensor that are created on access.

    Two sequences of one class are equal if their chunks are: names with equal chunks share their bytes.
    """

    __slots__ = ()

    def make_chunk(self, index: int) -> Chunk:
        """Return the chunk at a position, which may be negative."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        return tuple(self)[index] if isinstance(index, slice) else self.make_chunk(index)


class ArchiveChunks(ComputedChunks):
    """The archives of one tensor of a DCP, as chunks that are created on access.

    Equally sharded tensors share all but the offsets. For most tensors of a large checkpoint only the position and the
    number of chunks are used.

    Attributes:
        regions: Region of the tensor in each archive.
        files: File name of each archive.
        offsets: Position of the first byte of each archive in its file.
        lengths: Length of each archive in bytes.
    """

    __slots__ = ("files", "lengths", "offsets", "regions")

    def __init__(
        self, regions: Sequence[Region], files: Sequence[str], offsets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self.regions, self.files, self.offsets, self.lengths = regions, files, offsets, lengths

    def with_files(self, files: Sequence[str]) -> ArchiveChunks:
        """Return the same chunks in other files."""
        return ArchiveChunks(self.regions, files, self.offsets, self.lengths)

    def sorted_by_position(self) -> ArchiveChunks:
        """Return the same chunks in the order on disk."""
        chunks = sorted(self, key=_POSITION)
        return ArchiveChunks(
            [chunk.region for chunk in chunks],
            [chunk.file for chunk in chunks],
            [chunk.offset for chunk in chunks],
            [chunk.nbytes for chunk in chunks],
        )

    def __len__(self) -> int:
        return len(self.regions)

    def __iter__(self) -> Iterator[Chunk]:
        columns = self.regions, self.files, self.offsets, self.lengths
        return map(_archive_chunk, zip(*columns, repeat(None), repeat(None), repeat(True), strict=False))

    def make_chunk(self, index: int) -> Chunk:
        region, file = self.regions[index], self.files[index]
        return Chunk(region, file, self.offsets[index], self.lengths[index], is_archive=True)


_POSITION = itemgetter(1, 2)  # file and first byte of a chunk
_archive_chunk = partial(tuple.__new__, Chunk)  # several times as fast as `Chunk` with seven arguments


class LazyChunks(Sequence[Chunk]):
    """The chunks of one tensor whose archives have the expected lengths, but were not parsed yet.

    Accessing a chunk parses the archives. A reader that reads whole archives compares their bytes before and after the
    elements (`ArchiveFrame`) itself instead, which saves two reads per archive.

    Attributes:
        archives: The archives.
        build_frame: Returns the expected bytes around the elements of an archive, from dtype and shape.
    """

    __slots__ = ("_parse", "_parsed_chunks", "archives", "build_frame")

    def __init__(
        self,
        archives: ArchiveChunks,
        build_frame: Callable[[DType, Shape], ArchiveFrame],
        parse: Callable[[Iterable[Chunk]], tuple[Chunk, ...]],
    ) -> None:
        """Store the archives without parsing them.

        Args:
            archives: All archives of the tensor.
            build_frame: Returns the expected bytes around the elements of an archive, from dtype and shape.
            parse: Parses some of the archives and returns their chunks; its errors are passed on.
        """
        self.archives, self.build_frame = archives, build_frame
        self._parse = parse
        self._parsed_chunks: tuple[Chunk, ...] | None = None

    @property
    def parsed_chunks(self) -> tuple[Chunk, ...]:
        """The chunks; the first access reads and parses all archives."""
        if self._parsed_chunks is None:
            self._parsed_chunks = self._parse(self.archives)
        return self._parsed_chunks

    def parse_overlapping(self, region: Region) -> tuple[Chunk, ...]:
        """Return the chunks that overlap a region of the tensor, without parsing other archives or opening their files.

        The result is not cached.
        """
        return self._parse([each for each in self.archives if each.region.intersect(region) is not None])

    def __len__(self) -> int:
        return len(self.archives)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.parsed_chunks)

    def __eq__(self, other: object) -> bool:
        return self.archives == other.archives if isinstance(other, LazyChunks) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.archives)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        return self.parsed_chunks[index]


class TensorEntry(NamedTuple):
    """A logical tensor. Its `chunks` tile `shape` exactly, which is checked when a checkpoint is opened.

    `shape` counts elements like safetensors: the last dim of an F4 tensor is twice as large as in torch. `replicas` are
    copies of some of `chunks`; readers compare them.
    """

    name: str
    dtype: DType
    shape: Shape
    chunks: Sequence[Chunk]
    replicas: tuple[Chunk, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, row-major and unpadded."""
        return (prod(self.shape) * self.dtype.bits + 7) // 8  # `DType.nbytes` inlined, as this is called very often

    def with_name(self, name: str) -> TensorEntry:
        """Return the tensor under another name."""
        return self if self.name == name else TensorEntry(name, *self[1:])

    @property
    def position(self) -> tuple[str, int]:
        """File and offset of the first chunk, equal for names that share bytes; no archive is opened.

        The tensor must have a chunk.
        """
        chunks = self.chunks
        if type(chunks) is LazyChunks:
            chunks = chunks.archives
        if type(chunks) is ArchiveChunks or type(chunks) is ShardedChunks:
            return chunks.files[0], chunks.offsets[0]
        return chunks[0][1:3]


class BytesEntry(NamedTuple):
    """A pickled object in a DCP (optimizer step, RNG state, ...), which is copied or counted, but never unpickled."""

    name: str
    file: str
    offset: int
    nbytes: int


class Sidecar(NamedTuple):
    """A file that is copied along with the weights: config, tokenizer, chat template, custom code."""

    name: str
    nbytes: int


class ArchiveFrame(NamedTuple):
    """The frame of a block of elements in a DCP: the bytes of its torch archive before and after the elements.

    Attributes:
        head: Bytes before the elements.
        build_tail: Returns the tail, the bytes after the elements, from their CRC-32; it is always `tail_nbytes` long.
        tail_nbytes: Length of the tail, which does not depend on the elements.
        tail_around_crc: The bytes from the beginning of the tail to the CRC-32 of the elements, and the bytes that
            follow the CRC-32. A reader compares both before it uses the CRC-32 between them. Both are empty for a block
            without elements, whose tail has no CRC-32 there.
    """

    head: bytes
    build_tail: Callable[[int], bytes]
    tail_nbytes: int
    tail_around_crc: tuple[bytes, bytes]
