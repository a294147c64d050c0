"""Sharded tensor as a grid of bytes: rows of equal width, and the cell of each block (region on one rank) in them.

    tensor (4, 6) sharded on dim 1 over two ranks   rows 4, width 6 * itemsize
    +-----+-----+                                   cell of block 0: rows 0:4, bytes 0 : 3 * itemsize
    |  0  |  1  |                                   cell of block 1: rows 0:4, bytes 3 * itemsize : 6 * itemsize
    +-----+-----+

The bytes of a block are in the same order as in the tensor, so that one pass over the tensor in row-major order fills
every block front to back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.region import Region, Shape
from ckptx.errors import InternalError


class Cell(NamedTuple):
    """Bytes `left` to `right` of the rows `top` to `bottom`; the ends are exclusive.

    `block` is the index of the block in the `regions` of `build_grid`. `offset_in_block` is the number of bytes of the
    block before the cell: 0, except in a grid from `slice_dim0`.
    """

    block: int
    top: int
    bottom: int
    left: int
    right: int
    offset_in_block: int = 0

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the cell."""
        return (self.bottom - self.top) * (self.right - self.left)


class Extent(NamedTuple):
    """Contiguous bytes of the tensor that are in one cell: index of its block, and number of bytes."""

    block: int
    nbytes: int


class Grid(NamedTuple):
    """Rows of `width` bytes and the cells in them. The cells tile the rows; those of replicas repeat others.

    `rows_per_index` is the number of rows for one index of dim 0; 0 if the grid is a single row with all of dim 0.
    """

    rows: int
    width: int
    rows_per_index: int
    cells: tuple[Cell, ...]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the whole grid."""
        return self.rows * self.width

    @property
    def min_cell_width(self) -> int:
        """Return the width of the narrowest cell that is not empty, in bytes; the row width if all are empty."""
        return min((cell.right - cell.left for cell in self.cells if cell.nbytes), default=self.width)

    def slice_dim0(self, begin: int, end: int, dim0_size: int) -> Grid:
        """Return the part for indices `begin` to `end` (exclusive) of dim 0, which has size `dim0_size`.

        Cells outside the part are left out; the others keep the index of their block.
        """
        if self.rows_per_index:
            top, bottom, left, right = begin * self.rows_per_index, end * self.rows_per_index, 0, self.width
        else:
            unit = self.width // dim0_size
            top, bottom, left, right = 0, 1, begin * unit, end * unit
        cells = []
        for cell in self.cells:
            first, last = max(cell.top, top), min(cell.bottom, bottom)
            low, high = max(cell.left, left), min(cell.right, right)
            if first < last and low < high:
                skipped_bytes = (first - cell.top) * (cell.right - cell.left) + low - cell.left
                offset_in_block = cell.offset_in_block + skipped_bytes
                cells.append(Cell(cell.block, first - top, last - top, low - left, high - left, offset_in_block))
        return Grid(bottom - top, right - left, self.rows_per_index, tuple(cells))

    def iterate_extents(self) -> Iterator[Extent]:
        """Yield the contiguous bytes of each cell, in row-major order of the tensor, for a grid without replicas."""
        nonempty_cells = [cell for cell in self.cells if cell.nbytes]
        assert sum(cell.nbytes for cell in nonempty_cells) == self.nbytes
        points = sorted({point for cell in nonempty_cells for point in (cell.top, cell.bottom)})
        for top, bottom in pairwise(points):
            cells = sorted(
                (cell for cell in nonempty_cells if cell.top <= top and bottom <= cell.bottom),
                key=lambda cell: cell.left,
            )
            if len(cells) == 1:  # as wide as the grid
                yield Extent(cells[0].block, (bottom - top) * (cells[0].right - cells[0].left))
                continue
            row = [Extent(cell.block, cell.right - cell.left) for cell in cells]
            for _ in range(bottom - top):
                yield from row


def is_grid(shape: Shape, regions: Sequence[Region]) -> bool:
    """Return True if `build_grid` has a grid for `regions`.

    They are sharded on at most one dim other than dim 0, or the bytes of each region are contiguous in the tensor.
    """
    return _has_at_most_one_inner_dim(_sharded_dims(shape, regions)) or _are_contiguous(shape, regions)


def _has_at_most_one_inner_dim(sharded_dims: Sequence[int]) -> bool:
    """Return True if at most one of the dims, which are in increasing order, is not dim 0."""
    return not any(0 < dim < sharded_dims[-1] for dim in sharded_dims)


def _are_contiguous(shape: Shape, regions: Sequence[Region]) -> bool:
    """Return True if each region has one index of each of the first dims, a range of the next dim, and all others."""
    for region in regions:
        dims = [dim for dim, size in enumerate(region.sizes) if size != 1]
        if dims and region.sizes[dims[0] + 1 :] != shape[dims[0] + 1 :]:
            return False
    return True


def _sharded_dims(shape: Shape, regions: Sequence[Region]) -> list[int]:
    """Return the dims in which a region is smaller than the tensor, in increasing order."""
    return [dim for dim in range(len(shape)) if any(region.sizes[dim] != shape[dim] for region in regions)]


def build_grid(dtype: DType, shape: Shape, regions: Sequence[Region]) -> Grid:
    """Return the grid of a tensor sharded into `regions` on at most one dim other than dim 0, as with TP and FSDP.

    Regions with contiguous bytes, such as gate and up of one expert of one layer, are cells of a single row. The
    regions have to tile the tensor, apart from replicas, which repeat a region; the planner checks this.

    Raises:
        InternalError: `is_grid` returns False for the regions.
    """
    sharded_dims = _sharded_dims(shape, regions)
    if not _has_at_most_one_inner_dim(sharded_dims):
        if _are_contiguous(shape, regions):
            return _build_row(dtype, shape, regions)
        raise InternalError(
            f"a tensor of shape {list(shape)} sharded on dims {sharded_dims}; this is a bug in ckptx, please report it"
        )
    dim = sharded_dims[-1] if sharded_dims else 0
    unit_bits = prod(shape[dim + 1 :]) * dtype.bits  # size of one index of `dim`; an F4 element has half a byte
    width = dtype.nbytes(prod(shape[dim:]))
    rows_per_index = prod(shape[1:dim]) if dim else 0
    cells = []
    for block, (offsets, sizes) in enumerate(regions):
        top, bottom = (offsets[0] * rows_per_index, (offsets[0] + sizes[0]) * rows_per_index) if dim else (0, 1)
        left, right = (offsets[dim] * unit_bits, (offsets[dim] + sizes[dim]) * unit_bits) if shape else (0, unit_bits)
        cells.append(Cell(block, top, bottom, left // 8, right // 8))
    return Grid(prod(shape[:dim]), width, rows_per_index, tuple(cells))


def _build_row(dtype: DType, shape: Shape, regions: Sequence[Region]) -> Grid:
    """Return a grid of one row for regions with contiguous bytes."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cells = []
    for block, (offsets, sizes) in enumerate(regions):
        begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        cells.append(Cell(block, 0, 1, begin * dtype.bits // 8, (begin + prod(sizes)) * dtype.bits // 8))
    return Grid(1, dtype.nbytes(prod(shape)), 0, tuple(cells))
