"""Grids of sharded tensors: the bytes of every block, in shares of any size, are those that numpy slices."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.region import Region
from ckptx.errors import InternalError
from ckptx.transfer.grid import Cell, Extent, Grid, build_grid, is_grid

Shape = tuple[int, ...]
ITEMSIZE = {"U8": 1, "F16": 2, "F32": 4}


@st.composite
def spans(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """A split of a dim into parts, some of them empty, as (begin, size)."""
    edges = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
    return [(begin, end - begin) for begin, end in zip([0, *edges], [*edges, size], strict=True)]


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Shape, list[Region]]:
    """A tensor that is split on dim 0 and on another dim, each part of the rows differently."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1))
    regions = []
    for begin, size in draw(spans(shape[0])):
        columns = draw(spans(shape[dim])) if dim else [(0, 0)]
        for left, width in columns:
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[0], sizes[0] = begin, size
            if dim:
                offsets[dim], sizes[dim] = left, width
            regions.append(Region(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(regions))


@st.composite
def contiguous(draw: st.DrawFn) -> tuple[Shape, list[Region]]:
    """A tensor that is split on three dims into regions with contiguous bytes, such as gate and up of each expert."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    regions = [
        Region((layer, expert, begin, 0), (1, 1, size, shape[3]))
        for layer in range(shape[0])
        for expert in range(shape[1])
        for begin, size in draw(spans(shape[2]))
    ]
    return shape, draw(st.permutations(regions))


def blocks_of(grid: Grid, data: bytes, blocks: list[bytearray], began: dict[int, int]) -> None:
    """Append the extents of a grid to blocks; `began` has the position of the first byte in each."""
    position = 0
    for block, nbytes in grid.iterate_extents():
        at = began.setdefault(block, len(blocks[block]))
        assert at <= len(blocks[block])
        blocks[block] += data[position : position + nbytes]
        position += nbytes
    assert position == len(data) == grid.nbytes


@settings(deadline=None)
@given(st.one_of(sharded(), contiguous()), st.sampled_from(sorted(ITEMSIZE)), st.data())
def test_shares_of_rows_give_the_bytes_of_each_block(
    case: tuple[Shape, list[Region]], dtype: str, data: st.DataObject
) -> None:
    shape, regions = case
    itemsize = ITEMSIZE[dtype]
    nbytes = prod(shape) * itemsize
    stored = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    expected = [
        stored.reshape(*shape, itemsize)[tuple(slice(b, b + n) for b, n in zip(*region, strict=True))].tobytes()
        for region in regions
    ]
    assert is_grid(shape, regions)
    grid = build_grid(DTYPES_BY_NAME[dtype], shape, regions)
    assert grid.nbytes == nbytes
    assert [sum(cell.nbytes for cell in grid.cells if cell.block == at) for at in range(len(regions))] == [
        len(each) for each in expected
    ]
    widths = [cell.right - cell.left for cell in grid.cells if cell.nbytes]
    assert grid.min_cell_width == min(widths)
    whole: list[bytearray] = [bytearray() for _ in regions]
    blocks_of(grid, stored.tobytes(), whole, {})
    assert whole == expected

    shares: list[bytearray] = [bytearray() for _ in regions]
    for begin, size in data.draw(spans(shape[0])):
        share = grid.slice_dim0(begin, begin + size, shape[0])
        part = stored.tobytes()[begin * nbytes // shape[0] : (begin + size) * nbytes // shape[0]]
        began: dict[int, int] = {}
        if size:
            blocks_of(share, part, shares, began)
        assert {cell.block: cell.offset_in_block for cell in share.cells} == began
    assert shares == expected


@settings(deadline=None)
@given(st.one_of(sharded(), contiguous()), st.data())
def test_a_share_of_a_share_is_a_share(case: tuple[Shape, list[Region]], data: st.DataObject) -> None:
    shape, regions = case
    grid = build_grid(DTYPES_BY_NAME["F16"], shape, regions)
    begin, end = sorted((data.draw(st.integers(0, shape[0])), data.draw(st.integers(0, shape[0]))))
    first, last = sorted((data.draw(st.integers(begin, end)), data.draw(st.integers(begin, end))))
    if begin < end:
        share = grid.slice_dim0(begin, end, shape[0])
        assert share.slice_dim0(first - begin, last - begin, end - begin) == grid.slice_dim0(first, last, shape[0])


def test_the_narrowest_cell_is_one_with_bytes() -> None:
    grid = build_grid(
        DTYPES_BY_NAME["F16"], (4, 6), [Region((0, 0), (4, 5)), Region((0, 5), (4, 1)), Region((0, 6), (4, 0))]
    )
    assert grid == Grid(4, 12, 1, (Cell(0, 0, 4, 0, 10), Cell(1, 0, 4, 10, 12), Cell(2, 0, 4, 12, 12)))
    assert grid.min_cell_width == 2
    assert grid._replace(cells=grid.cells[2:]).min_cell_width == 12
    assert list(grid.iterate_extents()) == [Extent(0, 10), Extent(1, 2)] * 4


def test_elements_of_half_a_byte_are_counted_in_bits() -> None:
    halves = [Region((0, 0), (2, 2)), Region((0, 2), (2, 4))]
    grid = build_grid(DTYPES_BY_NAME["F4"], (2, 6), halves)
    assert grid == Grid(2, 3, 1, (Cell(0, 0, 2, 0, 1), Cell(1, 0, 2, 1, 3)))
    assert build_grid(DTYPES_BY_NAME["F4"], (6,), [Region((0,), (4,)), Region((4,), (2,))]) == Grid(
        1, 3, 0, (Cell(0, 0, 1, 0, 2), Cell(1, 0, 1, 2, 3))
    )


def test_a_scalar_is_one_cell() -> None:
    grid = build_grid(DTYPES_BY_NAME["F32"], (), [Region((), ())])
    assert grid == Grid(1, 4, 0, (Cell(0, 0, 1, 0, 4),))


def test_two_dims_besides_the_first_are_a_defect() -> None:
    regions = [Region((0, 0, 0), (2, 1, 2)), Region((0, 1, 0), (2, 1, 4)), Region((0, 0, 2), (2, 1, 2))]
    assert not is_grid((2, 2, 4), regions)
    with pytest.raises(InternalError, match=r"\[2, 2, 4\] sharded on dims \[1, 2\]"):
        build_grid(DTYPES_BY_NAME["F32"], (2, 2, 4), regions)
