"""The nouns of a catalog: where the blocks of a tensor lie on disk."""

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
    """A checksummed stretch of a file: one stored member of a torch archive.

    Attributes:
        offset: First byte, absolute in its file.
        nbytes: Length in bytes.
        crc: CRC-32 of the bytes, or None when the writer recorded none (a field of 0 over bytes means that).
    """

    offset: int
    nbytes: int
    crc: int | None


class Chunk(NamedTuple):
    """One region of one tensor, and where its elements lie.

    Attributes:
        region: The part of the tensor it holds.
        file: Path of the file, relative to the root of the catalog.
        offset: First byte of the first element; for an archive, first byte of the archive.
        nbytes: Bytes from `offset` on that hold it.
        strides: Strides in elements, one per dim, or None when the elements are row-major.
        record: The checksummed record the elements belong to, where the format has one.
        archive: True while `offset` and `nbytes` still name a whole torch archive that nobody has looked into.
    """

    region: Region
    file: str
    offset: int
    nbytes: int
    strides: Shape | None = None
    record: Record | None = None
    archive: bool = False


class Block(NamedTuple):
    """A rectangle of a tensor and the rank that holds it.

    Attributes:
        rank_in_stage: The rank within its pipeline stage: dp_index * tp + tp_index.
        region: Which elements.
        replica: True when another block holds the same elements and counts for coverage.
    """

    rank_in_stage: int
    region: Region
    replica: bool = False


class ShardedChunks(Sequence[Chunk]):
    """The chunks of one tensor cut for a mesh, made when asked for.

    Tensors that are cut alike share all but the offsets, so that a plan for thousands of ranks stays small.

    Attributes:
        blocks: What is cut.
        files: Name of the file of each block.
        lengths: Bytes of each block, its frame included.
        offsets: Where each block begins in its file.
        archive: As in `Chunk`.
    """

    __slots__ = ("archive", "blocks", "files", "lengths", "offsets")

    def __init__(
        self,
        blocks: tuple[Block, ...],
        files: tuple[str, ...],
        lengths: tuple[int, ...],
        offsets: array[int],
        archive: bool = False,
    ) -> None:
        assert len(blocks) == len(files) == len(lengths) == len(offsets)
        self.blocks, self.files, self.lengths, self.offsets, self.archive = blocks, files, lengths, offsets, archive

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Chunk]:
        for block, file, offset, nbytes in zip(self.blocks, self.files, self.offsets, self.lengths, strict=True):
            yield Chunk(block.region, file, offset, nbytes, archive=self.archive)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        region, file = self.blocks[index].region, self.files[index]
        return Chunk(region, file, self.offsets[index], self.lengths[index], archive=self.archive)


class StoredChunks(Sequence[Chunk]):
    """The archives of one tensor of a DCP, made when asked for.

    Tensors that are cut alike share all but the offsets. Of most tensors of a large checkpoint nobody asks for more
    than where they begin and how many chunks they have.

    Attributes:
        regions: What each archive holds.
        files: Name of the file of each.
        offsets: Where each begins in its file.
        lengths: Bytes of each.
    """

    __slots__ = ("files", "lengths", "offsets", "regions")

    def __init__(
        self, regions: Sequence[Region], files: Sequence[str], offsets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self.regions, self.files, self.offsets, self.lengths = regions, files, offsets, lengths

    def in_files(self, files: Sequence[str]) -> StoredChunks:
        """The same in files of other names."""
        return StoredChunks(self.regions, files, self.offsets, self.lengths)

    def in_order(self) -> StoredChunks:
        """The same in the order in which they lie on disk."""
        chunks = sorted(self, key=_PLACE)
        return StoredChunks(
            [chunk.region for chunk in chunks],
            [chunk.file for chunk in chunks],
            [chunk.offset for chunk in chunks],
            [chunk.nbytes for chunk in chunks],
        )

    def __len__(self) -> int:
        return len(self.regions)

    def __iter__(self) -> Iterator[Chunk]:
        columns = self.regions, self.files, self.offsets, self.lengths
        return map(_archive, zip(*columns, repeat(None), repeat(None), repeat(True), strict=False))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, StoredChunks) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        region, file = self.regions[index], self.files[index]
        return Chunk(region, file, self.offsets[index], self.lengths[index], archive=True)


_PLACE = itemgetter(1, 2)  # file and first byte of a chunk
_archive = partial(tuple.__new__, Chunk)  # from its fields in one value, several times as fast as from seven


class ArchivedChunks(Sequence[Chunk]):
    """The chunks of one tensor whose archives are as long as they should be, but were not looked into yet.

    Asking for a chunk looks. A reader that reads an archive anyway looks at what it has read instead, and saves itself
    two reads for each of them.

    Attributes:
        archives: The archives.
        frame_of: What should be around the elements of each.
    """

    __slots__ = ("_locate", "_located", "archives", "frame_of")

    def __init__(
        self,
        archives: StoredChunks,
        frame_of: Callable[[DType, Shape], Frame],
        locate: Callable[[Iterable[Chunk]], tuple[Chunk, ...]],
    ) -> None:
        """`locate` gives the chunks that the archives hold; it raises what opening them raises."""
        self.archives, self.frame_of = archives, frame_of
        self._locate = locate
        self._located: tuple[Chunk, ...] | None = None

    @property
    def located(self) -> tuple[Chunk, ...]:
        """The chunks themselves."""
        if self._located is None:
            self._located = self._locate(self.archives)
        return self._located

    def within(self, region: Region) -> tuple[Chunk, ...]:
        """The chunks that overlap a region; no other archive is looked into, nor its file opened."""
        return self._locate([each for each in self.archives if each.region.intersect(region) is not None])

    def __len__(self) -> int:
        return len(self.archives)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.located)

    def __eq__(self, other: object) -> bool:
        return self.archives == other.archives if isinstance(other, ArchivedChunks) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.archives)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        return self.located[index]


class TensorEntry(NamedTuple):
    """A logical tensor. `chunks` tile `shape` exactly; opening a checkpoint proves it.

    `shape` counts elements as safetensors does: an F4 tensor has twice the last dim that torch shows. `replicas` hold
    the elements of some of `chunks` once more; whoever reads the tensor compares them.
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
        return (prod(self.shape) * self.dtype.bits + 7) // 8  # as `DType.nbytes`; asked for several times a tensor

    def called(self, name: str) -> TensorEntry:
        """The same tensor under this name."""
        return self if self.name == name else TensorEntry(name, *self[1:])

    @property
    def place(self) -> tuple[str, int]:
        """File and first byte of the first chunk, which names that share bytes have in common; no archive is opened."""
        chunks = self.chunks
        if type(chunks) is ArchivedChunks:
            chunks = chunks.archives
        if type(chunks) is StoredChunks or type(chunks) is ShardedChunks:
            return chunks.files[0], chunks.offsets[0]
        return chunks[0][1:3]


class BytesEntry(NamedTuple):
    """A pickled object inside a DCP (optimizer step, RNG state, ...). Never unpickled, only carried or counted."""

    name: str
    file: str
    offset: int
    nbytes: int


class Sidecar(NamedTuple):
    """A file that travels with the weights byte for byte: config, tokenizer, chat template, remote code."""

    name: str
    nbytes: int


class Frame(NamedTuple):
    """The bytes a format puts around a block of elements: nothing in safetensors, a torch archive in a DCP.

    Attributes:
        head: Bytes before the elements.
        tail: Gives the bytes after them from their CRC-32; always `tail_nbytes` long.
        tail_nbytes: Length of the tail, known before any element is read.
        around_crc: How the tail begins: what stands before the CRC-32 of the elements, and what right behind it. Empty
            for a block without elements.
    """

    head: bytes
    tail: Callable[[int], bytes]
    tail_nbytes: int
    around_crc: tuple[bytes, bytes]
