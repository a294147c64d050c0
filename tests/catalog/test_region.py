"""Rectangles, and the proof that they tile a tensor: geometry in words."""

from __future__ import annotations

import time
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.region import CoverageFault, Region, find_coverage_fault, full_region


def grid(shape: tuple[int, ...], *cuts: list[int]) -> list[Region]:
    """The cells between cut points along each dim: `grid((4, 2), [3], [])` is rows 0:3 and 3:4."""
    spans = []
    for size, points in zip(shape, cuts, strict=True):
        edges = [0, *points, size]
        spans.append([(a, b - a) for a, b in pairwise(edges)])
    return [Region(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in product(*spans)]


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        pytest.param((4, 2), ([], []), id="whole"),
        pytest.param((4, 2), ([2], []), id="rows"),
        pytest.param((4, 2), ([], [1]), id="columns"),
        pytest.param((4, 4), ([2], [2]), id="grid"),
        pytest.param((5, 7), ([3], [1, 6]), id="uneven grid"),
        pytest.param((2, 3, 4), ([1], [1, 2], [3]), id="3-d"),
        pytest.param((7,), ([1, 2, 3],), id="vector"),
        pytest.param((), (), id="0-d"),
    ],
)
def test_a_grid_covers(shape: tuple[int, ...], cuts: tuple[list[int], ...]) -> None:
    cells = grid(shape, *cuts)
    assert find_coverage_fault(shape, cells) is None
    assert find_coverage_fault(shape, cells[::-1]) is None


def test_bricks_that_are_no_grid_cover() -> None:
    #  +---+-------+
    #  | A |   B   |
    #  |   +---+---+
    #  |   | C | D |
    #  +---+---+   |
    #  |   E   |   |
    #  +-------+---+
    bricks = [
        Region((0, 0), (2, 1)),
        Region((0, 1), (1, 2)),
        Region((1, 1), (1, 1)),
        Region((1, 2), (2, 1)),
        Region((2, 0), (1, 2)),
    ]
    assert find_coverage_fault((3, 3), bricks) is None


def test_shards_without_rows_neither_help_nor_hurt() -> None:
    empty = [Region((3, 0), (0, 2)), Region((3, 0), (0, 2))]
    assert find_coverage_fault((3, 2), [full_region((3, 2)), *empty]) is None
    assert find_coverage_fault((3, 2), empty) == CoverageFault("gap", full_region((3, 2)))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0, 2)])
def test_a_tensor_without_elements_is_covered_by_nothing(shape: tuple[int, ...]) -> None:
    assert find_coverage_fault(shape, []) is None
    assert find_coverage_fault(shape, [full_region(shape)]) is None


@pytest.mark.parametrize(
    ("shape", "regions", "fault"),
    [
        pytest.param((4, 2), [], ("gap", (0, 0), (4, 2)), id="nothing at all"),
        pytest.param((4, 2), [((0, 0), (3, 2))], ("gap", (3, 0), (1, 2)), id="last row missing"),
        pytest.param((4, 2), [((1, 0), (3, 2))], ("gap", (0, 0), (1, 2)), id="first row missing"),
        pytest.param((4, 2), [((0, 0), (1, 2)), ((2, 0), (2, 2))], ("gap", (1, 0), (1, 2)), id="a row missing"),
        pytest.param((4, 2), [((0, 0), (4, 1))], ("gap", (0, 1), (4, 1)), id="a column missing"),
        pytest.param((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1))], ("gap", (1, 1), (1, 1)), id="a corner missing"),
        pytest.param((), [], ("gap", (), ()), id="0-d without a chunk"),
        pytest.param((4,), [((0,), (3,)), ((2,), (2,))], ("overlap", (2,), (1,)), id="one element twice"),
        pytest.param((2, 2), [((0, 0), (2, 2)), ((1, 1), (1, 1))], ("overlap", (1, 1), (1, 1)), id="corner twice"),
        pytest.param((2,), [((0,), (2,))] * 2, ("overlap", (0,), (2,)), id="the whole twice"),
        pytest.param((), [((), ())] * 2, ("overlap", (), ()), id="0-d twice"),
        pytest.param((4,), [((0,), (5,))], ("outside", (0,), (5,)), id="too long"),
        pytest.param((4,), [((-1,), (5,))], ("outside", (-1,), (5,)), id="begins before"),
        pytest.param((4,), [((0,), (-1,))], ("outside", (0,), (-1,)), id="negative size"),
        pytest.param((4, 2), [((0,), (4,))], ("outside", (0,), (4,)), id="too few dims"),
        pytest.param((0,), [((0,), (1,))], ("outside", (0,), (1,)), id="elements in an empty tensor"),
    ],
)
def test_a_fault_is_named_with_its_place(
    shape: tuple[int, ...],
    regions: list[tuple[tuple[int, ...], tuple[int, ...]]],
    fault: tuple[str, tuple[int, ...], tuple[int, ...]],
) -> None:
    kind, offsets, sizes = fault
    assert find_coverage_fault(shape, [Region(*region) for region in regions]) == (kind, Region(offsets, sizes))


def test_equal_area_is_no_cover() -> None:
    """Sizes add up, yet one corner is there twice and one not at all."""
    regions = [Region((0, 0), (2, 1)), Region((0, 1), (1, 1)), Region((0, 1), (1, 1))]
    assert find_coverage_fault((2, 2), regions) is not None


@pytest.mark.parametrize("cut", ["rows", "columns", "grid"])
def test_thousands_of_chunks_are_checked_in_a_blink(cut: str) -> None:
    shape = (8192, 8192)
    points = list(range(2, 8192, 2)), list(range(128, 8192, 128))
    cells = {
        "rows": lambda: grid(shape, points[0], []),
        "columns": lambda: grid(shape, [], points[0]),
        "grid": lambda: grid(shape, points[1], points[1]),
    }[cut]()
    assert len(cells) == 4096
    started = time.process_time()
    assert find_coverage_fault(shape, cells) is None
    assert find_coverage_fault(shape, cells[:-1]) is not None
    assert time.process_time() - started < 1


def test_intersection() -> None:
    a = Region((0, 2), (4, 4))
    assert a.intersect(Region((2, 0), (4, 4))) == Region((2, 2), (2, 2))
    assert a.intersect(Region((4, 0), (4, 4))) is None
    assert a.intersect(full_region((4, 8))) == a
    assert full_region(()).intersect(full_region(())) == full_region(())


def test_a_region_reads_like_a_slice() -> None:
    assert str(Region((0, 2), (4, 4))) == "[0:4, 2:6]"
    assert str(full_region(())) == "[]"


@st.composite
def guillotine(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape of 1 to 3 dims, cut again and again from edge to edge."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    pieces = [full_region(shape)]
    for _ in range(draw(st.integers(0, 8))):
        index = draw(st.integers(0, len(pieces) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        offsets, sizes = pieces[index]
        if sizes[dim] < 2:
            continue
        at = draw(st.integers(1, sizes[dim] - 1))
        pieces[index] = Region(offsets, (*sizes[:dim], at, *sizes[dim + 1 :]))
        second = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        pieces.append(Region(second, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return shape, draw(st.permutations(pieces))


@given(guillotine())
@settings(max_examples=150, deadline=None)
def test_guillotine_cuts_have_no_fault(cut: tuple[tuple[int, ...], list[Region]]) -> None:
    assert find_coverage_fault(*cut) is None


@given(guillotine(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_piece_dropped_doubled_or_shifted_is_found(
    cut: tuple[tuple[int, ...], list[Region]], data: st.DataObject
) -> None:
    shape, pieces = cut
    index = data.draw(st.integers(0, len(pieces) - 1))
    piece = pieces[index]
    others = pieces[:index] + pieces[index + 1 :]
    dropped = find_coverage_fault(shape, others)
    assert dropped is not None
    assert dropped.kind == "gap"
    assert dropped.region.intersect(piece) == dropped.region
    doubled = find_coverage_fault(shape, [*pieces, piece])
    assert doubled is not None
    assert doubled.kind == "overlap"
    dim = data.draw(st.integers(0, len(shape) - 1))
    for step in (-1, 1):
        offsets = tuple(at + step * (d == dim) for d, at in enumerate(piece.offsets))
        assert find_coverage_fault(shape, [*others, Region(offsets, piece.sizes)]) is not None
