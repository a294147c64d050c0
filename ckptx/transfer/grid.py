"""Sharded tensor as a grid of bytes: rows of equal width, and the cell of each block in them.

    tensor (4, 6) sharded on dim 1 over two ranks   rows 4, width 6 * itemsize
    +-----+-----+                                   cell of block 0: rows 0:4, bytes 0 : 3 * itemsize
    |  0  |  1  |                                   cell of block 1: rows 0:4, bytes 3 * itemsize : 6 * itemsize
    +-----+-----+

Within a cell the bytes of its block follow each other in the same order as in the tensor, so that one pass over the
tensor in row-major order fills every block front to back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.region import Region, Shape
from ckptx.errors import Defect


class Cell(NamedTuple):
    """Bytes `left` to `right` of the rows `top` to `bottom`.

    `block` is the index of the block, `begin` the number of its bytes before the cell, which are in another share.
    """

    block: int
    top: int
    bottom: int
    left: int
    right: int
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the cell."""
        return (self.bottom - self.top) * (self.right - self.left)


class Piece(NamedTuple):
    """Contiguous bytes of one cell in the tensor."""

    block: int
    nbytes: int


class Grid(NamedTuple):
    """Rows of `width` bytes and the cells in them; `inner` rows belong to an index of dim 0 (0: part of a row)."""

    rows: int
    width: int
    inner: int
    cells: tuple[Cell, ...]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the whole grid."""
        return self.rows * self.width

    @property
    def narrowest(self) -> int:
        """Return the row width of the narrowest cell in bytes."""
        return min((cell.right - cell.left for cell in self.cells if cell.nbytes), default=self.width)

    def share(self, begin: int, end: int, dim0: int) -> Grid:
        """Return the part for indices `begin` to `end` of dim 0, which has size `dim0`; blocks keep their index."""
        if self.inner:
            top, bottom, left, right = begin * self.inner, end * self.inner, 0, self.width
        else:
            unit = self.width // dim0
            top, bottom, left, right = 0, 1, begin * unit, end * unit
        cells = []
        for cell in self.cells:
            first, last = max(cell.top, top), min(cell.bottom, bottom)
            low, high = max(cell.left, left), min(cell.right, right)
            if first < last and low < high:
                before = (first - cell.top) * (cell.right - cell.left) + low - cell.left
                cells.append(Cell(cell.block, first - top, last - top, low - left, high - left, before))
        return Grid(bottom - top, right - left, self.inner, tuple(cells))

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces in row-major order."""
        filled = [cell for cell in self.cells if cell.nbytes]
        points = sorted({point for cell in filled for point in (cell.top, cell.bottom)})
        for top, bottom in pairwise(points):
            across = sorted(
                (cell for cell in filled if cell.top <= top and bottom <= cell.bottom), key=lambda cell: cell.left
            )
            if len(across) == 1:
                yield Piece(across[0].block, (bottom - top) * (across[0].right - across[0].left))
                continue
            row = [Piece(cell.block, cell.right - cell.left) for cell in across]
            for _ in range(bottom - top):
                yield from row


def is_grid(shape: Shape, regions: Sequence[Region]) -> bool:
    """Return True if `regions` are sharded on dim 0 and at most one other dim."""
    cut = _cut_dims(shape, regions)
    return not any(0 < dim < cut[-1] for dim in cut)


def _cut_dims(shape: Shape, regions: Sequence[Region]) -> list[int]:
    return [dim for dim in range(len(shape)) if any(region.sizes[dim] != shape[dim] for region in regions)]


def grid_of(dtype: DType, shape: Shape, regions: Sequence[Region]) -> Grid:
    """Return the grid of a tensor sharded into `regions`, on dim 0 and at most one other dim, as TP with FSDP gives.

    Raises:
        Defect: The regions are sharded on more dims.
    """
    cut = _cut_dims(shape, regions)
    if not is_grid(shape, regions):
        raise Defect(f"a tensor of shape {list(shape)} sharded on dims {cut}; this is a bug in ckptx, please report it")
    dim = cut[-1] if cut else 0
    unit = prod(shape[dim + 1 :]) * dtype.bits  # of one index of `dim`, in bits: half a byte for F4
    width = dtype.nbytes(prod(shape[dim:]))
    inner = prod(shape[1:dim]) if dim else 0
    cells = []
    for block, (offsets, sizes) in enumerate(regions):
        top, bottom = (offsets[0] * inner, (offsets[0] + sizes[0]) * inner) if dim else (0, 1)
        left, right = (offsets[dim] * unit, (offsets[dim] + sizes[dim]) * unit) if shape else (0, unit)
        cells.append(Cell(block, top, bottom, left // 8, right // 8))
    return Grid(prod(shape[:dim]), width, inner, tuple(cells))
