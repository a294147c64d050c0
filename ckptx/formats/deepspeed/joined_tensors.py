"""Join the shards of the tensor parallel ranks to whole tensors, without reading their elements.

The region of a chunk of a shard is in coordinates of the shard. A `Join` lists pieces, which are regions of shards,
with their positions in the whole tensor. The part of a chunk that is inside a piece becomes a chunk of the whole
tensor, and its region is in coordinates of the whole tensor.

If no two ranks have the same elements, these chunks are created when they are read, like the chunks of the shards.
If several ranks have the same elements, those of the first rank become chunks, and those of the others their replicas,
which readers compare. The flat tensors of two ranks can split the same elements at different points, but a replica must
have the same region as its chunk, so the elements of each rank are split at the points of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptx.catalog.entry import Chunk, ComputedChunks, TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.formats.deepspeed.shard_ranges import Join, Piece
from ckptx.mapping.rewrite import slice_chunk


class RecentChunks:
    """Cache of the chunks of the 16 tensors whose chunks were created last; all would take too much memory."""

    _MAX_TENSORS = 16

    def __init__(self) -> None:
        self._chunks: dict[int, tuple[JoinedChunks, tuple[Chunk, ...]]] = {}

    def of(self, owner: JoinedChunks) -> tuple[Chunk, ...]:
        """Return the chunks of a tensor, from the cache if it has them."""
        known = self._chunks.get(id(owner))
        if known is not None:
            return known[1]
        chunks = tuple(owner.create())
        self._chunks[id(owner)] = owner, chunks  # the owner is stored because the id could be reused
        for oldest in list(self._chunks)[: -self._MAX_TENSORS]:
            self._chunks.pop(oldest, None)
        return chunks


class JoinedChunks(ComputedChunks):
    """The chunks of a whole tensor of which no two ranks have the same elements.

    Attributes:
        shards: The shard of each tensor parallel rank.
        pieces: Pieces of these shards, which tile the whole tensor.
        recent: Cache of the chunks of this tensor and of others.
    """

    __slots__ = ("pieces", "recent", "shards")

    def __init__(self, shards: Sequence[TensorEntry], pieces: Sequence[Piece], recent: RecentChunks) -> None:
        self.shards, self.pieces, self.recent = shards, pieces, recent

    def create(self) -> Iterator[Chunk]:
        """Create the chunks, without using the cache."""
        for piece in self.pieces:
            yield from _chunks_of_piece(self.shards[piece.rank], piece)

    def __len__(self) -> int:
        return len(self.recent.of(self))

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.recent.of(self))

    def make_chunk(self, index: int) -> Chunk:
        # The first chunk of every tensor is read, as its position in the files. It is created without the other chunks,
        # which would replace those of another tensor in the cache.
        return next(self.create()) if index == 0 else self.recent.of(self)[index]


def join_shards(name: str, shards: Sequence[TensorEntry], join: Join, recent: RecentChunks) -> TensorEntry:
    """Return a whole tensor.

    Args:
        name: Name of the whole tensor.
        shards: The shard of each tensor parallel rank, of the shapes for which the join was made, and of one dtype.
        join: Positions of the shards.
        recent: Cache of chunks, one for all tensors of the checkpoint.
    """
    dtype = shards[0].dtype
    if 0 in join.shape:
        first = shards[0].chunks[0]
        return TensorEntry(name, dtype, join.shape, (first._replace(region=full_region(join.shape), nbytes=0),))
    if all(len(group) == 1 for group in join.groups):
        return TensorEntry(name, dtype, join.shape, JoinedChunks(shards, [each[0] for each in join.groups], recent))
    chunks: list[Chunk] = []
    replicas: list[Chunk] = []
    for group in join.groups:
        by_rank = [list(_chunks_of_piece(shards[piece.rank], piece)) for piece in group]
        regions = _common_regions([[chunk.region for chunk in each] for each in by_rank])
        for position, each in enumerate(by_rank):
            (replicas if position else chunks).extend(_split(each, regions, shards[group[position].rank]))
    return TensorEntry(name, dtype, join.shape, tuple(chunks), tuple(replicas))


def _chunks_of_piece(shard: TensorEntry, piece: Piece) -> Iterator[Chunk]:
    """Yield the parts of the chunks of a shard that are inside a piece, with their regions of the whole tensor."""
    shift = [whole - local for whole, local in zip(piece.offsets, piece.local.offsets, strict=True)]
    for chunk in shard.chunks:
        part = piece.local.intersect(chunk.region)
        if part is None:
            continue
        moved = Region(tuple(map(int.__add__, part.offsets, shift)), part.sizes)
        yield slice_chunk(chunk, part, shard)._replace(region=moved)


def _common_regions(by_rank: Sequence[Sequence[Region]]) -> list[Region]:
    """Return the regions that result if the same elements are split at the points of all ranks.

    Args:
        by_rank: Regions into which each rank splits the elements, as consecutive ranges in row-major order.
    """
    common = list(by_rank[0])
    for regions in by_rank[1:]:
        if regions != common:
            common = list(_overlaps(common, regions))
    return common


def _overlaps(a: Sequence[Region], b: Sequence[Region]) -> Iterator[Region]:
    """Yield the intersections of two sequences of consecutive ranges of the same elements, in order."""
    i = j = 0
    a_end, b_end = a[0].numel, b[0].numel  # number of elements up to the end of a[i], and up to the end of b[j]
    while True:
        part = a[i].intersect(b[j])
        assert part is not None
        yield part
        # Advance where a range ends: in `a`, in `b`, or in both if they end at the same element.
        i, j = i + (a_end <= b_end), j + (b_end <= a_end)
        if i == len(a):
            return
        a_end, b_end = (
            a_end + a[i].numel if a_end <= b_end else a_end,
            b_end + b[j].numel if b_end <= a_end else b_end,
        )


def _split(chunks: Sequence[Chunk], regions: Sequence[Region], shard: TensorEntry) -> Iterator[Chunk]:
    """Split the chunks of a shard, so that there is one for each region.

    The regions are in the order of the chunks, and each one is inside a single chunk.
    """
    remaining = iter(regions)
    for chunk in chunks:
        numel = chunk.region.numel
        while numel:
            region = next(remaining)
            numel -= region.numel
            yield slice_chunk(chunk, region, shard)._replace(region=region)
