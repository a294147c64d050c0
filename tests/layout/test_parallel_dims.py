"""The mesh: tp runs fastest, pp slowest."""

from __future__ import annotations

import pytest

from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims


def test_ranks_are_numbered_tp_first_pp_last() -> None:
    dims = ParallelDims(tp=2, pp=2, dp_shard=3)
    places = [(pp, dp, tp) for pp in range(2) for dp in range(3) for tp in range(2)]
    assert [dims.rank(*place) for place in places] == list(range(12))
    assert [dims.coordinates(rank) for rank in range(12)] == places
    assert (dims.world_size, dims.ranks_per_stage) == (12, 6)


def test_a_slot_is_the_rank_within_its_stage() -> None:
    dims = ParallelDims(tp=4, pp=3, dp_shard=2)
    assert list(dims.ranks_of_stage(1)) == list(range(8, 16))
    for rank in range(dims.world_size):
        pp, dp, tp = dims.coordinates(rank)
        assert dims.ranks_of_stage(pp)[dims.rank_in_stage(dp, tp)] == rank


def test_replicas_are_between_stages_and_shards() -> None:
    dims = ParallelDims(tp=2, pp=2, dp_shard=3, dp_replicate=2)
    places = [(pp, dp, tp) for pp in range(2) for dp in range(6) for tp in range(2)]
    assert [dims.coordinates(rank) for rank in range(24)] == places
    assert (dims.world_size, dims.ranks_per_stage, dims.dp) == (24, 12, 6)


@pytest.mark.parametrize("axis", ["tp", "pp", "dp_shard", "dp_replicate"])
@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_below_1_is_refused(axis: str, size: int) -> None:
    with pytest.raises(UsageError, match=f"{axis} must be 1 or more, found {size}"):
        ParallelDims(**{axis: size})
