"""Who holds which rectangle: geometry in words, without a disk."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.entry import Block
from ckptx.catalog.region import Region, find_coverage_fault, full_region
from ckptx.errors import InternalError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage, ceil_chunks, is_aligned, scale_placement, tp_regions

Shape = tuple[int, ...]


def rows(begin: int, size: int, width: int = 4) -> Region:
    return Region((begin, 0), (size, width))


def held(blocks: tuple[Block, ...], replica: bool = False) -> list[tuple[int, int, int]]:
    """(rank_in_stage, first row, rows) of each block."""
    return [
        (block.rank_in_stage, block.region.offsets[0], block.region.sizes[0])
        for block in blocks
        if block.is_replica is replica
    ]


@pytest.mark.parametrize(
    ("n", "parts", "sizes"),
    [(8, 2, [4, 4]), (10, 4, [3, 3, 3, 1]), (5, 4, [2, 2, 1, 0]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (7, 1, [7])],
)
def test_chunks_are_full_then_shorter_then_empty(n: int, parts: int, sizes: list[int]) -> None:
    chunks = ceil_chunks(n, parts)
    assert [size for _, size in chunks] == sizes
    assert [begin for begin, _ in chunks] == [sum(sizes[:i]) for i in range(parts)]


# --------------------------------------------------------------------------------------------------------------------
# TP alone


def test_rows_over_two_ranks() -> None:
    assert tp_regions((10, 4), Placement(0, (10,)), 2) == ((rows(0, 5),), (rows(5, 5),))


def test_columns_over_three_ranks_unevenly() -> None:
    found = tp_regions((2, 7), Placement(1, (7,)), 3)
    assert found == ((Region((0, 0), (2, 3)),), (Region((0, 3), (2, 3)),), (Region((0, 6), (2, 1)),))


def test_gate_and_up_are_cut_each_on_its_own() -> None:
    found = tp_regions((16, 4), Placement(0, (8, 8)), 2)
    assert found == ((rows(0, 4), rows(8, 4)), (rows(4, 4), rows(12, 4)))


def test_qkv_of_unequal_widths() -> None:
    #  q 0:8  k 8:12  v 12:16
    found = tp_regions((16, 4), Placement(0, (8, 4, 4)), 2)
    assert found[1] == (rows(4, 4), rows(10, 2), rows(14, 2))


def test_more_ranks_than_rows_leaves_the_last_with_nothing() -> None:
    assert tp_regions((2, 4), Placement(0, (2,)), 3) == ((rows(0, 1),), (rows(1, 1),), ())


def test_a_group_shorter_than_the_ranks_has_no_part_on_the_last() -> None:
    found = tp_regions((7, 4), Placement(0, (6, 1)), 3)
    assert found == ((rows(0, 2), rows(6, 1)), (rows(2, 2),), (rows(4, 2),))


def test_what_is_not_cut_is_whole_everywhere() -> None:
    assert tp_regions((3, 4), None, 2) == ((full_region((3, 4)),),) * 2


@pytest.mark.parametrize(
    "placement", [Placement(0, (9,)), Placement(2, (4,)), Placement(0, (5, 6)), Placement(-1, (4,))]
)
def test_a_placement_of_another_shape_is_a_defect(placement: Placement) -> None:
    with pytest.raises(InternalError, match="add up"):
        tp_regions((10, 4), placement, 2)


# --------------------------------------------------------------------------------------------------------------------
# The ranks of a stage


def test_fsdp_cuts_the_rows_inside_the_tp_slice() -> None:
    blocks = blocks_of_stage((10, 4), Placement(0, (10,)), ParallelDims(tp=2, dp_shard=2), False)
    assert held(blocks) == [(0, 0, 3), (1, 5, 3), (2, 3, 2), (3, 8, 2)]


def test_columns_and_rows_give_a_grid() -> None:
    blocks = blocks_of_stage((5, 6), Placement(1, (6,)), ParallelDims(tp=2, dp_shard=2), False)
    assert blocks == (
        Block(0, Region((0, 0), (3, 3))),
        Block(1, Region((0, 3), (3, 3))),
        Block(2, Region((3, 0), (2, 3))),
        Block(3, Region((3, 3), (2, 3))),
    )


def test_a_chunk_of_local_rows_may_end_one_group_and_begin_the_next() -> None:
    # tp0 holds gate 0:3 and up 6:9, six local rows; of three FSDP ranks the middle one gets the end of one
    # and the begin of the other.
    blocks = blocks_of_stage((12, 4), Placement(0, (6, 6)), ParallelDims(tp=2, dp_shard=3), False)
    assert held(blocks) == [
        (0, 0, 2), (1, 3, 2),
        (2, 2, 1), (2, 6, 1), (3, 5, 1), (3, 9, 1),
        (4, 7, 2), (5, 10, 2),
    ]  # fmt: skip


def test_groups_along_columns_are_each_cut_by_rows() -> None:
    blocks = blocks_of_stage((4, 8), Placement(1, (4, 4)), ParallelDims(tp=2, dp_shard=2), False)
    assert [block.region for block in blocks if block.rank_in_stage == 3] == [
        Region((2, 2), (2, 2)),
        Region((2, 6), (2, 2)),
    ]


def test_what_tp_does_not_cut_is_stored_once() -> None:
    assert blocks_of_stage((4, 4), None, ParallelDims(tp=4), False) == (Block(0, full_region((4, 4))),)
    assert held(blocks_of_stage((5, 4), None, ParallelDims(tp=2, dp_shard=2), False)) == [(0, 0, 3), (2, 3, 2)]


def test_replicas_are_marked() -> None:
    blocks = blocks_of_stage((5, 4), None, ParallelDims(tp=2, dp_shard=2), True)
    assert held(blocks) == [(0, 0, 3), (2, 3, 2)]
    assert held(blocks, replica=True) == [(1, 0, 3), (3, 3, 2)]


def test_replicate_changes_nothing_that_tp_cuts() -> None:
    dims = ParallelDims(tp=3, dp_shard=2)
    assert blocks_of_stage((7, 4), Placement(0, (7,)), dims, True) == blocks_of_stage(
        (7, 4), Placement(0, (7,)), dims, False
    )


def test_pipeline_stages_do_not_matter() -> None:
    assert blocks_of_stage((7, 4), Placement(0, (7,)), ParallelDims(2, 4, 2), False) == blocks_of_stage(
        (7, 4), Placement(0, (7,)), ParallelDims(2, 1, 2), False
    )


def test_fsdp_leaves_a_scalar_alone() -> None:
    assert blocks_of_stage((), None, ParallelDims(tp=2, dp_shard=4), False) == (Block(0, Region((), ())),)
    assert blocks_of_stage((), None, ParallelDims(tp=2, dp_shard=4), True)[1] == Block(
        1, Region((), ()), is_replica=True
    )


@pytest.mark.parametrize("placement", [None, Placement(1, (6,))])
def test_a_tensor_without_elements_is_one_block(placement: Placement | None) -> None:
    dims = ParallelDims(tp=2, dp_shard=2)
    assert blocks_of_stage((0, 6), placement, dims, True) == (Block(0, Region((0, 0), (0, 6))),)


# --------------------------------------------------------------------------------------------------------------------
# Elements that share a byte


def test_a_pair_is_never_parted() -> None:
    found = tp_regions((2, 10), Placement(1, (10,)), 2, pack=2)
    assert [region.sizes[1] for (region,) in found] == [6, 4]  # three pairs and two; 5 and 5 would part one


@pytest.mark.parametrize(("shape", "placement"), [((2, 7), Placement(1, (7,))), ((2, 8), Placement(1, (5, 3)))])
def test_a_group_of_half_bytes_is_not_cut(shape: Shape, placement: Placement) -> None:
    assert tp_regions(shape, placement, 2, pack=2) == ((full_region(shape),),) * 2
    assert blocks_of_stage(shape, placement, ParallelDims(tp=2), False, 2) == (Block(0, full_region(shape)),)
    assert blocks_of_stage(shape, placement, ParallelDims(tp=2), True, 2)[1:] == (
        Block(1, full_region(shape), is_replica=True),
    )


@pytest.mark.parametrize("pack", [2, 4])
@pytest.mark.parametrize("tp", [2, 3])
def test_packed_groups_are_sharded_like_their_bytes_or_not_at_all(pack: int, tp: int) -> None:
    """A single group that ends inside a byte, at any position, keeps the tensor whole."""
    for groups in (each for count in (1, 2, 3) for each in product(range(1, 9), repeat=count)):
        shape = (3, sum(groups))
        found = tp_regions(shape, Placement(1, groups), tp, pack)
        if any(width % pack for width in groups):
            assert found == ((full_region(shape),),) * tp, groups
            continue
        in_bytes = tp_regions((3, shape[1] // pack), Placement(1, tuple(width // pack for width in groups)), tp)
        assert found == tuple(
            tuple(Region((0, offsets[1] * pack), (3, sizes[1] * pack)) for offsets, sizes in regions)
            for regions in in_bytes
        ), groups


def test_pairs_along_the_last_dim_do_not_bind_the_rows() -> None:
    assert held(blocks_of_stage((5, 4), Placement(0, (5,)), ParallelDims(tp=2), False, 2)) == [(0, 0, 3), (1, 3, 2)]


def test_fsdp_does_not_part_pairs_of_a_vector() -> None:
    assert held(blocks_of_stage((6,), None, ParallelDims(dp_shard=2), False, 2)) == [(0, 0, 4), (1, 4, 2)]
    assert held(blocks_of_stage((7,), None, ParallelDims(dp_shard=2), False, 2)) == [(0, 0, 7)]


# --------------------------------------------------------------------------------------------------------------------
# Any shape, any mesh


@st.composite
def placed(draw: st.DrawFn) -> tuple[Shape, Placement | None]:
    """A shape of up to three dims and a placement that fits it, or none."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    if not shape or draw(st.booleans()):
        return shape, None
    dim = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    groups = tuple(b - a for a, b in zip([0, *edges], [*edges, shape[dim]], strict=True))
    return shape, Placement(dim, groups)


def local_tensor(shape: Shape, placement: Placement | None, tp: int, index: int) -> np.ndarray:
    """What TP leaves to a rank, by slicing each group of a numbered tensor."""
    numbered = np.arange(prod(shape)).reshape(shape)
    if placement is None:
        return numbered
    groups = np.split(numbered, np.cumsum(placement.groups)[:-1], axis=placement.dim)
    return np.concatenate([torch_chunk(group, tp, placement.dim)[index] for group in groups], axis=placement.dim)


def torch_chunk(values: np.ndarray, parts: int, dim: int) -> list[np.ndarray]:
    """`torch.chunk`, padded with empty ones."""
    step = -(-values.shape[dim] // parts)
    return [values.take(range(i * step, min((i + 1) * step, values.shape[dim])), dim) for i in range(parts)]


@given(placed(), st.integers(1, 5), st.integers(1, 5), st.booleans())
@settings(deadline=None, max_examples=300)
def test_every_element_is_held_once_and_by_whom_it_should(
    case: tuple[Shape, Placement | None], tp: int, dp: int, replicate: bool
) -> None:
    shape, placement = case
    dims = ParallelDims(tp=tp, dp_shard=dp)
    blocks = blocks_of_stage(shape, placement, dims, replicate)
    assert find_coverage_fault(shape, [block.region for block in blocks if not block.is_replica]) is None
    assert [block.rank_in_stage for block in blocks] == sorted(block.rank_in_stage for block in blocks)
    if not prod(shape):
        assert blocks == (Block(0, full_region(shape)),)
        return
    numbered = np.arange(prod(shape)).reshape(shape)
    for dp_index in range(dp):
        for tp_index in range(tp):
            mine = [block for block in blocks if block.rank_in_stage == dims.rank_in_stage(dp_index, tp_index)]
            assert all(block.region.numel for block in mine)
            assert all(block.is_replica is (placement is None and tp_index > 0) for block in mine)
            local = local_tensor(shape, placement, tp, tp_index)
            expected = local if not shape else torch_chunk(local, dp, 0)[dp_index]
            if (placement is None and tp_index and not replicate) or (not shape and dp_index):
                assert not mine
                continue
            parts = [numbered[box(block.region)].ravel() for block in mine]
            assert sorted(np.concatenate(parts) if parts else []) == sorted(expected.ravel())


@given(placed(), st.integers(1, 5), st.integers(1, 5), st.integers(2, 3))
@settings(deadline=None, max_examples=200)
def test_packs_are_kept_together(case: tuple[Shape, Placement | None], tp: int, dp: int, pack: int) -> None:
    shape, placement = case
    blocks = blocks_of_stage(shape, placement, ParallelDims(tp=tp, dp_shard=dp), False, pack)
    assert find_coverage_fault(shape, [block.region for block in blocks]) is None
    if shape and shape[-1] % pack == 0:
        assert all(block.region.offsets[-1] % pack == block.region.sizes[-1] % pack == 0 for block in blocks)


def box(region: Region) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))


# --------------------------------------------------------------------------------------------------------------------
# Heads


@pytest.mark.parametrize(
    ("groups", "head", "tp", "aligned"),
    [
        ((32,), 8, 2, True),
        ((32,), 8, 4, True),
        ((32,), 8, 3, False),
        ((16,), 8, 4, False),  # two kv heads over four ranks
        ((40,), 8, 2, False),  # five heads over two ranks
        ((40,), 8, 4, False),
        ((97,), 1, 4, True),
        ((32, 16, 16), 8, 2, True),
        ((32, 16, 16), 8, 4, False),  # q is, k and v are not
    ],
)
def test_heads(groups: tuple[int, ...], head: int, tp: int, aligned: bool) -> None:
    assert is_aligned((sum(groups), 4), Placement(0, groups, head), tp) is aligned


@pytest.mark.parametrize("head", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_shards_are_aligned_if_no_head_is_on_two_ranks(head: int, tp: int) -> None:
    for groups in (each for count in (1, 2) for each in product(range(13), repeat=count)):
        ranks_by_head: dict[tuple[int, int], set[int]] = {}
        for group, width in enumerate(groups):
            for rank, rows_of_rank in enumerate(torch_chunk(np.arange(width), tp, 0)):
                for row in rows_of_rank:
                    ranks_by_head.setdefault((group, int(row) // head), set()).add(rank)
        expected = all(len(ranks) == 1 for ranks in ranks_by_head.values())
        assert is_aligned((sum(groups), 4), Placement(0, groups, head), tp) is expected, groups


def test_what_is_not_cut_is_aligned() -> None:
    assert is_aligned((7, 4), None, 3)


# --------------------------------------------------------------------------------------------------------------------
# Scales


def by_rows(*groups: int, align: int = 1) -> Placement:
    return Placement(0, groups, align)


# What it is: weight, how it is cut, scale, tp; how the scale is cut, and what is said of it.
SCALES = {
    "by row": ((256, 64), by_rows(256, align=32), (256, 1), 2, by_rows(256, align=32), "follows its weight"),
    "by row, columns cut": ((256, 64), Placement(1, (64,)), (256, 1), 2, None, "one value along dim 1"),
    "0-d": ((256, 64), by_rows(256), (), 2, None, "one value for the whole weight"),
    "1x1": ((256, 64), by_rows(256), (1, 1), 2, None, "one value along dim 0"),
    "weight not cut": ((256, 64), None, (256, 1), 2, None, "replicated like its weight"),
    "fewer dims": ((256, 64), by_rows(256), (256,), 2, None, "not a known kind of scale"),
    "longer": ((256, 64), by_rows(256), (256, 100), 2, None, "not a known kind of scale"),
    "no block explains it": ((256, 63), by_rows(256), (256, 40), 2, None, "not a known kind of scale"),
    "two blocks explain it": ((61, 64), by_rows(61), (6, 1), 2, None, "not a known kind of scale"),
    "blocks of 128": ((1536, 4096), by_rows(1536), (12, 32), 4, by_rows(12), "in blocks of 128"),
    "blocks along columns": ((1536, 4096), Placement(1, (4096,)), (12, 32), 4, Placement(1, (32,)), "in blocks of 128"),
    "192 rows a rank": ((1536, 4096), by_rows(1536), (12, 32), 8, None, "inside a block of 128"),
    "288 rows a rank": ((576, 512), by_rows(576), (5, 4), 2, None, "inside a block of 128"),
    "320 rows a rank": ((640, 512), by_rows(640), (5, 4), 2, None, "inside a block of 128"),
    "342 rows a rank": ((684, 64), by_rows(684), (6, 1), 2, None, "inside a block of 128"),
    "384 rows and 383": ((767, 64), by_rows(767), (6, 1), 2, by_rows(6), "in blocks of 128"),
    "groups of 16": ((3, 64, 96), Placement(2, (96,)), (3, 64, 6), 3, Placement(2, (6,)), "in blocks of 16"),
    "blocks of 48": ((192, 64), by_rows(192), (4, 1), 2, by_rows(4), "in blocks of 48"),
    "a block is 128 before 96": ((288, 64), by_rows(288), (3, 1), 3, None, "inside a block of 128"),
    "gate|up": ((512, 64), by_rows(256, 256), (4, 1), 2, by_rows(2, 2), "in blocks of 128"),
    "up begins in a block, though cut between": (
        (511, 64),
        by_rows(255, 256),
        (4, 1),
        2,
        None,
        "inside a block of 128",
    ),
    "up begins in a block": ((384, 64), by_rows(192, 192), (3, 1), 2, None, "inside a block of 128"),
}


@pytest.mark.parametrize(("weight", "placement", "scale", "tp", "expected", "reason"), SCALES.values(), ids=SCALES)
def test_a_scale_goes_with_its_weight_or_nowhere(
    weight: Shape, placement: Placement | None, scale: Shape, tp: int, expected: Placement | None, reason: str
) -> None:
    found, said = scale_placement(weight, placement, scale, tp)
    assert found == expected
    assert reason in said


@given(st.integers(1, 40), st.sampled_from([2, 4, 16, 128]), st.integers(-1, 1), st.integers(2, 5))
def test_a_cut_scale_has_the_blocks_of_the_rows_of_its_rank(blocks: int, block: int, off: int, tp: int) -> None:
    n = max(blocks * block + off, 2)
    size = -(-n // block)
    found, _ = scale_placement((n, 8), Placement(0, (n,)), (size, 1), tp)
    if found is None or size == n:
        return
    for (weight_begin, weight_rows), (begin, count) in zip(ceil_chunks(n, tp), ceil_chunks(size, tp), strict=True):
        needed = {row // block for row in range(weight_begin, weight_begin + weight_rows)}
        assert needed == set(range(begin, begin + count))
