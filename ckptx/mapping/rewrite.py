"""Rewrites of catalog entries: tensors made of others, whose chunks refer to the same bytes.

No bytes are moved. Reading a new tensor reads the files of the old ones; recorded checksums stay with the chunks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import overload

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import InputError, InternalError, UnsupportedError
from ckptx.wording import counted

# Name of the file in the chunks that `pad` adds. No checkpoint stores it; the files of a source read it as zeros.
ZEROS_FILE = "zeros"
# Advice for a conversion of names that ckptx cannot do.
KEEP_NAMES = "keep its names: pass --names hf or --names model, whichever it has now"


def merge(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Stack tensors of one shape along a new dim.

    Example:
        three of shape (4, 2), dim 0 -> (3, 4, 2)

    Raises:
        InputError: Shapes or dtypes differ.
    """
    first = entries[0]
    for entry in entries:
        _check_compatible(first, entry, first.shape, entry.shape)

    def add_dim(chunk: Chunk, index: int) -> Chunk:
        offsets, sizes = chunk.region
        region = Region((*offsets[:dim], index, *offsets[dim:]), (*sizes[:dim], 1, *sizes[dim:]))
        strides = None if chunk.strides is None else (*chunk.strides[:dim], 1, *chunk.strides[dim:])
        return _require_located(chunk, first.name)._replace(region=region, strides=strides)

    return TensorEntry(
        first.name,
        first.dtype,
        (*first.shape[:dim], len(entries), *first.shape[dim:]),
        tuple([add_dim(chunk, i) for i, entry in enumerate(entries) for chunk in entry.chunks]),
        tuple([add_dim(chunk, i) for i, entry in enumerate(entries) for chunk in entry.replicas]),
    )


def unmerge(entry: TensorEntry, dim: int) -> list[TensorEntry]:
    """Return the slices of a tensor along a dim, without that dim.

    Raises:
        InputError: The tensor has no such dim.
        UnsupportedError: The dtype packs elements into bytes along the dim.
    """
    _check_dim(entry, dim)
    return [
        _map_chunks(part, _without_dim(part.shape, dim), lambda chunk: _drop_dim(chunk, dim, entry.dtype))
        for part in split(entry, dim, (1,) * entry.shape[dim])
    ]


def _drop_dim(chunk: Chunk, dim: int, dtype: DType) -> Chunk:
    region = Region(_without_dim(chunk.region.offsets, dim), _without_dim(chunk.region.sizes, dim))
    strides = (
        None
        if chunk.strides is None
        else _none_if_row_major(dtype.to_torch_elements(region.sizes), _without_dim(chunk.strides, dim))
    )
    return chunk._replace(region=region, strides=strides)


def concat(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Concatenate tensors along a dim.

    Raises:
        InputError: A tensor has no such dim, or the other dims or dtypes differ.
    """
    first = entries[0]
    for entry in entries:
        _check_dim(entry, dim)
        _check_compatible(first, entry, _without_dim(first.shape, dim), _without_dim(entry.shape, dim))
    *starts, total = accumulate((entry.shape[dim] for entry in entries), initial=0)

    def shift_chunks(chunks: Iterable[Chunk], start: int) -> Iterator[Chunk]:
        return (_shift(_require_located(chunk, first.name), dim, start) for chunk in chunks)

    return TensorEntry(
        first.name,
        first.dtype,
        (*first.shape[:dim], total, *first.shape[dim + 1 :]),
        tuple(
            [chunk for entry, start in zip(entries, starts, strict=True) for chunk in shift_chunks(entry.chunks, start)]
        ),
        tuple(
            [
                chunk
                for entry, start in zip(entries, starts, strict=True)
                for chunk in shift_chunks(entry.replicas, start)
            ]
        ),
    )


def split(entry: TensorEntry, dim: int, sizes: Sequence[int]) -> list[TensorEntry]:
    """Split a tensor along a dim.

    Raises:
        InputError: The tensor has no such dim, or the sizes do not add up to it.
        UnsupportedError: A part begins or ends inside a byte.
    """
    _check_dim(entry, dim)
    if sum(sizes) != entry.shape[dim]:
        raise InputError(
            f'tensor "{entry.name}": shape {list(entry.shape)} does not split into {_describe_parts(sizes)} along '
            f"dim {dim}; use the config that belongs to this checkpoint"
        )
    edges = list(accumulate(sizes, initial=0))
    parts: list[list[Chunk]] = [[] for _ in sizes]
    replicas: list[list[Chunk]] = [[] for _ in sizes]
    for chunks, destination in ((entry.chunks, parts), (entry.replicas, replicas)):
        for chunk in chunks:
            offsets, lengths = chunk.region
            first, stop = offsets[dim], offsets[dim] + lengths[dim]
            index = max(0, bisect_right(edges, first) - 1)
            while index < len(sizes) and edges[index] < stop:
                begin, end = max(first, edges[index]), min(stop, edges[index + 1])
                if begin < end:
                    part = slice_chunk(chunk, _replace_extent(chunk.region, dim, begin, end - begin), entry)
                    destination[index].append(_shift(part, dim, -edges[index]))
                index += 1
    shapes = [(*entry.shape[:dim], size, *entry.shape[dim + 1 :]) for size in sizes]
    return [
        TensorEntry(entry.name, entry.dtype, shape, tuple(part), tuple(part_replicas))
        for shape, part, part_replicas in zip(shapes, parts, replicas, strict=True)
    ]


def split_groups(entry: TensorEntry, dim: int, groups: int, sizes: Sequence[int]) -> list[TensorEntry]:
    """Split every group of a tensor along a dim into parts, and concatenate the first parts, the second parts, ...

    Example:
        groups 2, sizes (2, 1, 1): q0 q1 k0 v0 q2 q3 k1 v1 -> q0 q1 q2 q3, k0 k1, v0 v1

    Raises:
        InputError: The tensor has no such dim, or the groups do not add up to it.
        UnsupportedError: A part begins or ends inside a byte.
    """
    parts = split(entry, dim, tuple(sizes) * groups)
    return [concat(parts[index :: len(sizes)], dim) for index in range(len(sizes))]


def join_groups(entries: Sequence[TensorEntry], dim: int, groups: int, sizes: Sequence[int]) -> TensorEntry:
    """Concatenate the first parts of all tensors along a dim, then their second parts, ...; inverse of `split_groups`.

    Example:
        groups 2, sizes (2, 1, 1): q0 q1 q2 q3, k0 k1, v0 v1 -> q0 q1 k0 v0 q2 q3 k1 v1

    Raises:
        InputError: A tensor has no such dim, its size is not that of its parts, or the other dims or dtypes differ.
        UnsupportedError: A part begins or ends inside a byte.
    """
    columns = [split(entry, dim, (size,) * groups) for entry, size in zip(entries, sizes, strict=True)]
    return concat([part for parts in zip(*columns, strict=True) for part in parts], dim)


def pad(entry: TensorEntry, dim: int, size: int) -> TensorEntry:
    """Return the tensor with zeros after its last element along a dim, as a chunk of `ZEROS_FILE`.

    Args:
        entry: Tensor to pad.
        dim: Dim to pad.
        size: New size of the dim.

    Raises:
        InputError: The tensor has no such dim, or is larger.
    """
    _check_dim(entry, dim)
    missing = size - entry.shape[dim]
    if missing < 0:
        raise InputError(
            f'tensor "{entry.name}": shape {list(entry.shape)} is larger than {size} along dim {dim}; use the config '
            "that belongs to this checkpoint"
        )
    shape = (*entry.shape[:dim], missing, *entry.shape[dim + 1 :])
    if not prod(shape):
        return entry
    zeros = Chunk(full_region(shape), ZEROS_FILE, 0, entry.dtype.nbytes(prod(shape)))
    return concat([entry, TensorEntry(entry.name, entry.dtype, shape, (zeros,))], dim)


def truncate(entry: TensorEntry, dim: int, size: int) -> TensorEntry:
    """Return the first `size` elements along a dim.

    Raises:
        InputError: The tensor has no such dim, or is smaller.
        UnsupportedError: The end is inside a byte.
    """
    _check_dim(entry, dim)
    if entry.shape[dim] < size:
        raise InputError(
            f'tensor "{entry.name}": shape {list(entry.shape)} is smaller than {size} along dim {dim}; use the config '
            "that belongs to this checkpoint"
        )
    return split(entry, dim, (size, entry.shape[dim] - size))[0]


def transpose(entry: TensorEntry, a: int, b: int) -> TensorEntry:
    """Exchange two dims.

    Raises:
        InputError: The tensor has no such dim.
        UnsupportedError: The dtype packs elements into bytes along one of them.
    """
    _check_dim(entry, max(a, b))
    order = list(range(len(entry.shape)))
    order[a], order[b] = order[b], order[a]
    if entry.dtype.bits % 8 and order[-1] != len(order) - 1:
        raise UnsupportedError(
            f'tensor "{entry.name}": {entry.dtype} elements share bytes along the last dim and cannot be transposed; '
            + KEEP_NAMES
        )

    def reorder(values: Shape) -> Shape:
        return tuple(values[dim] for dim in order)

    def transpose_chunk(chunk: Chunk) -> Chunk:
        region = Region(reorder(chunk.region.offsets), reorder(chunk.region.sizes))
        strides = reorder(_strides(_require_located(chunk, entry.name), entry))
        return chunk._replace(
            region=region, strides=_none_if_row_major(entry.dtype.to_torch_elements(region.sizes), strides)
        )

    return _map_chunks(entry, reorder(entry.shape), transpose_chunk)


def deinterleave(entry: TensorEntry, dim: int, inverse: bool) -> TensorEntry:
    """Reorder a0 b0 a1 b1 along a dim to a0 a1 b0 b1; with `inverse`, apply the inverse.

    Raises:
        InputError: The tensor has no such dim, or its size is odd.
        UnsupportedError: The dtype packs elements into bytes along the dim.
    """
    _check_dim(entry, dim)
    size = entry.shape[dim]
    if size % 2:
        raise InputError(
            f'tensor "{entry.name}": shape {list(entry.shape)} does not split into pairs along dim {dim}; use the '
            "config that belongs to this checkpoint"
        )
    return regroup(entry, dim, *((2, size // 2) if inverse else (size // 2, 2)))


def permute_rope(entry: TensorEntry, heads: int, inverse: bool) -> TensorEntry:
    """Reorder the rows of each head from rotary pairs (x0 y0 x1 y1) to halves (x0 x1 y0 y1); `inverse` is the inverse.

    Raises:
        InputError: The rows do not divide into that many heads of pairs.
        UnsupportedError: The tensor has one dim, and its dtype packs elements into bytes.
    """
    rows = entry.shape[0] if entry.shape else 0
    if heads < 1 or rows % (2 * heads):
        raise InputError(
            f'tensor "{entry.name}": shape {list(entry.shape)} does not split into {heads} heads of rotary pairs; use '
            "the config that belongs to this checkpoint"
        )
    half = rows // heads // 2
    return regroup(entry, 0, *((2, half) if inverse else (half, 2)))


def regroup(entry: TensorEntry, dim: int, a: int, b: int) -> TensorEntry:
    """Exchange the order of `a` and `b` in groups of `a` times `b` elements along a dim.

    Equals `x.unflatten(dim, (-1, a, b)).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)`.

    Example:
        a=2, b=3: x0 x1 x2 y0 y1 y2 -> x0 y0 x1 y1 x2 y2

    Raises:
        UnsupportedError: The dtype packs elements into bytes along the dim.
    """
    if entry.dtype.bits % 8 and dim == len(entry.shape) - 1:
        raise UnsupportedError(
            f'tensor "{entry.name}": {entry.dtype} elements share bytes along dim {dim} and cannot be reordered; '
            + KEEP_NAMES
        )
    if not prod(entry.shape):
        return entry
    return entry._replace(
        chunks=RegroupedRows(entry, entry.chunks, dim, a, b),
        replicas=tuple(RegroupedRows(entry, entry.replicas, dim, a, b)),
    )


class RegroupedRows(Sequence[Chunk]):
    """Chunks of a regrouped tensor: one for each index of the dim and source chunk, created on access.

    A permuted projection of an 8B model has thousands of them, which the catalog does not store.
    """

    __slots__ = ("_a", "_b", "_dim", "_first_rows", "_starts")

    def __init__(self, entry: TensorEntry, chunks: Sequence[Chunk], dim: int, a: int, b: int) -> None:
        self._dim, self._a, self._b = dim, a, b
        filled = [_require_located(chunk, entry.name) for chunk in chunks if chunk.region.numel]
        self._starts = list(accumulate((chunk.region.sizes[dim] for chunk in filled), initial=0))
        # The first row of each source chunk, and the bytes from one row to the next.
        self._first_rows = [
            (
                slice_chunk(chunk, _replace_extent(chunk.region, dim, chunk.region.offsets[dim], 1), entry),
                _strides(chunk, entry)[dim] * entry.dtype.itemsize,
            )
            for chunk in filled
        ]

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Chunk]:
        for index, begin in enumerate(self._starts[:-1]):
            for row in range(self._starts[index + 1] - begin):
                yield self._row_chunk(index, row)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        at = bisect_right(self._starts, index) - 1
        return self._row_chunk(at, index - self._starts[at])

    def _row_chunk(self, chunk_index: int, row: int) -> Chunk:
        (region, file, offset, nbytes, strides, record, _), row_bytes = self._first_rows[chunk_index]
        dim, offsets = self._dim, region.offsets
        group, offset_in_group = divmod(offsets[dim] + row, self._a * self._b)
        i, j = divmod(offset_in_group, self._b)
        target = group * self._a * self._b + j * self._a + i
        region = Region((*offsets[:dim], target, *offsets[dim + 1 :]), region.sizes)
        return Chunk(region, file, offset + row * row_bytes, nbytes, strides, record)


def slice_chunk(chunk: Chunk, part: Region, entry: TensorEntry) -> Chunk:
    """Return the chunk for `part` of the region of `chunk`, referring to the same bytes.

    Raises:
        UnsupportedError: The part begins or ends inside a byte.
    """
    if part == chunk.region:
        return _require_located(chunk, entry.name)
    dtype = entry.dtype
    starts = tuple(a - b for a, b in zip(part.offsets, chunk.region.offsets, strict=True))
    if dtype.bits % 8 and (dtype.pack == 1 or starts[-1] % dtype.pack or part.sizes[-1] % dtype.pack):
        raise UnsupportedError(
            f'tensor "{entry.name}": {dtype} elements share bytes and cannot be split at {part}; {KEEP_NAMES}'
        )
    strides = _strides(_require_located(chunk, entry.name), entry)
    sizes = dtype.to_torch_elements(part.sizes)
    first = sum(start * stride for start, stride in zip(dtype.to_torch_elements(starts), strides, strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return chunk._replace(
        region=part,
        offset=chunk.offset + first * dtype.itemsize,
        nbytes=span * dtype.itemsize if part.numel else 0,
        strides=_none_if_row_major(sizes, strides),
    )


def _strides(chunk: Chunk, entry: TensorEntry) -> Shape:
    """Return the strides of a chunk in torch elements, including row-major ones.

    Raises:
        UnsupportedError: The dtype packs elements into bytes, and rows begin inside a byte.
    """
    if chunk.strides is not None:
        return chunk.strides
    dtype, sizes = entry.dtype, chunk.region.sizes
    if dtype.bits % 8 and (dtype.pack == 1 or any(size % dtype.pack for size in sizes[-1:])):
        raise UnsupportedError(
            f'tensor "{entry.name}": {dtype} elements of two rows share a byte and cannot be reordered; {KEEP_NAMES}'
        )
    sizes = dtype.to_torch_elements(sizes)
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _none_if_row_major(sizes: Shape, strides: Shape) -> Shape | None:
    """Return the strides, or None if they are row-major."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return strides
        expected *= size
    return None


def _map_chunks(entry: TensorEntry, shape: Shape, change: Callable[[Chunk], Chunk]) -> TensorEntry:
    chunks = tuple([change(chunk) for chunk in entry.chunks])
    return entry._replace(shape=shape, chunks=chunks, replicas=tuple([change(chunk) for chunk in entry.replicas]))


def _replace_extent(region: Region, dim: int, begin: int, size: int) -> Region:
    """Return `region` with another extent along one dim."""
    offsets, sizes = region
    return Region((*offsets[:dim], begin, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]))


def _shift(chunk: Chunk, dim: int, distance: int) -> Chunk:
    """Return the chunk with its region moved by `distance` elements along a dim."""
    if not distance:
        return chunk
    offsets, sizes = chunk.region
    return chunk._replace(region=Region((*offsets[:dim], offsets[dim] + distance, *offsets[dim + 1 :]), sizes))


def _require_located(chunk: Chunk, name: str) -> Chunk:
    """Return the chunk, which must have the position of its elements and not that of an archive.

    Raises:
        InternalError: The chunk is an archive that was not parsed.
    """
    if chunk.is_archive:
        raise InternalError(f'tensor "{name}": was rewritten before its payload was located; please report this')
    return chunk


def _without_dim(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


def _describe_parts(sizes: Sequence[int]) -> str:
    if len(sizes) <= 8:
        return f"parts of {list(sizes)}"
    return f"{counted(len(sizes), 'part')} with a total size of {sum(sizes)}"


def _check_dim(entry: TensorEntry, dim: int) -> None:
    """Raise an InputError for a tensor that has no dim `dim`."""
    if dim >= len(entry.shape):
        raise InputError(
            f'tensor "{entry.name}": shape {list(entry.shape)} has no dim {dim}; the tensor belongs to another model'
        )


def _check_compatible(first: TensorEntry, other: TensorEntry, a: Shape, b: Shape) -> None:
    """Raise an InputError if the dtypes of two tensors differ, or `a` and `b`, sizes of the first and of the other."""
    if first.dtype is not other.dtype or a != b:
        raise InputError(
            f'tensor "{other.name}": {other.dtype} of shape {list(other.shape)} cannot be combined with '
            f'"{first.name}", {first.dtype} of shape {list(first.shape)}; one of them belongs to another model'
        )
