"""Which rectangles a rank holds: against the layout of files, and against torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from ckptx.catalog.region import Region
from ckptx.errors import InternalError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, tp_regions
from ckptx.layout.placement import blocks_of_stage as cut_of_files
from ckptx.runtime.parallel.shards import LocalShard, MeshDimSharding, compute_local_shards, to_local_shard
from tests.support.pool import GlooPool

SHAPES = [(12, 4), (7, 5), (1, 3), (9, 8)]


def assembled(whole: torch.Tensor, held: list[LocalShard], shape: tuple[int, ...]) -> torch.Tensor:
    """The local tensor that the pieces make up; NaN where none is."""
    local = torch.full(shape, float("nan"))
    for region, there in held:
        source = whole[tuple(slice(at, at + n) for at, n in zip(*region, strict=True))]
        local[tuple(slice(at, at + n) for at, n in zip(*there, strict=True))] = source
    return local


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0)])
def test_plain_shards_are_those_of_torch(shape: tuple[int, int], dims: tuple[int, int]) -> None:
    placements = [Shard(dim) for dim in dims]
    for sizes in itertools.product((1, 2, 3), (1, 2, 4)):
        for at in itertools.product(*map(range, sizes)):
            held, local = compute_local_shards(
                shape, [MeshDimSharding(*each) for each in zip(dims, sizes, at, strict=True)]
            )
            expected, offsets = _compute_local_shape_and_global_offset(shape, sizes, list(at), placements)
            assert local == tuple(expected)
            if 0 not in local:
                assert held == [LocalShard(Region(tuple(offsets), local), Region((0, 0), local))]
            else:
                assert held == []


@pytest.mark.parametrize("placement", [Placement(0, (9,)), Placement(1, (8,)), Placement(0, (4, 3, 2)), None])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_fsdp_inside_tp_is_as_files_are_cut(placement: Placement | None, dp: int) -> None:
    shape = (9, 8)
    dims = ParallelDims(tp=2, dp_shard=dp)
    blocks = cut_of_files(shape, placement, dims, True)
    for dp_rank, tp_rank in itertools.product(range(dp), range(2)):
        held, _ = compute_local_shards(
            shape, [MeshDimSharding(0, dp, dp_rank)], tp_regions(shape, placement, 2)[tp_rank]
        )
        assert [piece.region for piece in held] == [
            block.region for block in blocks if block.rank_in_stage == dims.rank_in_stage(dp_rank, tp_rank)
        ]


def test_fused_groups_lie_one_after_another() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    held, shape = compute_local_shards((6, 4), [], [Region((0, 0), (6, 1)), Region((0, 2), (6, 2))])
    assert torch.equal(assembled(whole, held, shape), whole[:, [0, 2, 3]])
    held, shape = compute_local_shards(
        (6, 4), [MeshDimSharding(0, 2, 1)], [Region((0, 0), (1, 4)), Region((3, 0), (3, 4))]
    )
    assert torch.equal(assembled(whole, held, shape), whole[[4, 5]])


def test_equal_groups_are_cut_one_by_one() -> None:
    whole = torch.arange(24.0).reshape(12, 2)
    held, shape = compute_local_shards((12, 2), [MeshDimSharding(0, 2, 1, groups=3)])
    assert torch.equal(assembled(whole, held, shape), torch.cat([part.chunk(2)[1] for part in whole.chunk(3)]))


def test_rectangles_that_lie_anyhow_are_refused() -> None:
    with pytest.raises(InternalError, match="differ in more than one dim"):
        compute_local_shards((4, 4), [], [Region((0, 0), (2, 2)), Region((2, 2), (2, 2))])


def gradient_of_columns(rank: int, world_size: int) -> tuple[str, tuple[int, ...], bool]:
    """How the gradient of a [4, 5] weight is cut whose columns are divided 3 : 2, and whether it is right."""
    mesh = init_device_mesh("cpu", (world_size,))
    weight = torch.arange(20.0).reshape(4, 5)
    columns = slice(0, 3) if rank == 0 else slice(3, 5)
    cut = DTensor.from_local(
        weight[:, columns].contiguous(), mesh, [Shard(1)], run_check=False, shape=weight.shape, stride=weight.stride()
    )
    parameter = nn.Parameter(cut)
    x = torch.arange(10.0).reshape(2, 5)
    nn.functional.linear(x[:, columns], to_local_shard(parameter)).sum().backward()
    gradient = parameter.grad
    expected = x[:, columns].sum(0).expand(4, -1)
    return str(gradient.placements), tuple(gradient.to_local().shape), torch.equal(gradient.to_local(), expected)


def test_a_gradient_is_cut_as_its_parameter_is_where_shards_are_unequal(pool: GlooPool) -> None:
    assert pool.run(gradient_of_columns, 2) == [("(Shard(dim=1),)", (4, 3), True), ("(Shard(dim=1),)", (4, 2), True)]
