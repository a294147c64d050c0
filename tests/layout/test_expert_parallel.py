"""Which experts each rank holds: by name, by arithmetic, and as DTensor and `fully_shard` place them."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptx.catalog.entry import Block
from ckptx.catalog.region import find_coverage_fault
from ckptx.errors import UsageError
from ckptx.layout.expert_parallel import INNER_SHARDINGS, ExpertPosition, InnerSharding, expert_blocks, find_position
from ckptx.layout.parallel_dims import ParallelDims
from tests.layout.fake_ranks import Answers, Asked, Elements, Experts, ask

Shape = tuple[int, ...]

# Mesh and shape: EP below, equal to and above TP; more ranks than experts; a bias.
EXPERTS = (
    Experts((8, 6, 4), 2, 2, 2, 0),
    Experts((8, 6, 4), 2, 2, 4, 0),
    Experts((16, 4, 2), 4, 2, 2, 0),
    Experts((16, 4, 2), 2, 4, 8, 0),
    Experts((4, 8, 6), 2, 4, 2, 1),
    Experts((4, 8, 12), 2, 4, 2, 2),
    Experts((8, 6), 2, 2, 2, 1),
    Experts((12, 4, 2), 1, 6, 3, 0),
)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return ask(Asked([], [], [], [], [], (), EXPERTS))


def held(shape: Shape, blocks: tuple[Block, ...], rank: int) -> Elements:
    """The elements of one rank, each the row-major index in the whole tensor."""
    numbered = np.arange(prod(shape)).reshape(shape)
    (region,) = [block.region for block in blocks if block.rank_in_stage == rank]
    return numbered[tuple(slice(a, a + n) for a, n in zip(*region, strict=True))]


def test_ranks_hold_what_dtensor_gives_them(answers: Answers) -> None:
    for case, ranks in zip(EXPERTS, answers.experts, strict=True):
        dims = ParallelDims(tp=case.tp, dp_shard=case.dp_shard, ep=case.ep)
        inner: InnerSharding = "experts" if case.dim == 0 else "columns" if case.dim == 2 else "rows"
        blocks = expert_blocks("w", case.shape, ExpertPosition("experts", None), case.shape[0], dims, inner)
        for rank, theirs in enumerate(ranks):
            assert np.array_equal(held(case.shape, blocks, rank), theirs), (case, rank)


def test_another_order_of_ranks_would_be_noticed(answers: Answers) -> None:
    case, ranks = EXPERTS[0], answers.experts[0]
    consecutive = np.arange(prod(case.shape)).reshape(case.shape)[2:4]  # rank 1, if EP ranks were consecutive
    assert not np.array_equal(consecutive, ranks[1])


@pytest.mark.parametrize(
    ("name", "shape", "position"),
    [
        ("model.layers.3.mlp.experts.gate_up_proj", (8, 4, 2), ("model.layers.3.mlp.experts", None)),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", (8, 4), ("model.layers.3.mlp.experts", None)),
        ("model.layers.3.mlp.experts.gate_up_proj_blocks", (8, 4, 2, 16), ("model.layers.3.mlp.experts", None)),
        ("layers.0.moe.experts.w1_EFD", (8, 4, 2), ("layers.0.moe.experts", None)),
        (
            "layers.0.moe.routed_experts.inner_experts.w1_EFD",
            (8, 4, 2),
            ("layers.0.moe.routed_experts.inner_experts", None),
        ),
        ("model.layers.3.mlp.experts.17.up_proj.weight", (4, 2), ("model.layers.3.mlp.experts", 17)),
        ("model.layers.3.mlp.experts.17.up_proj.weight_scale", (), ("model.layers.3.mlp.experts", 17)),
        ("model.layers.3.ffn.experts.expert_5.fc1.bias", (4,), ("model.layers.3.ffn.experts", 5)),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", (4, 2), None),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", (4, 2), None),
        ("model.layers.3.mlp.experts.e_score_correction_bias", (8,), None),
        ("model.layers.3.mlp.experts.mlp.w1", (32, 2), None),
        ("model.layers.3.mlp.gate.weight", (8, 2), None),
        ("model.experts", (8, 2), None),
        ("experts.01.weight", (8, 2), None),
    ],
)
def test_the_experts_of_a_tensor_follow_from_its_name(
    name: str, shape: Shape, position: tuple[str, int] | None
) -> None:
    assert find_position(name, shape) == position


@given(
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([4, 6, 8, 12]),
    st.sampled_from([(), (12,), (12, 24), (24, 12, 2)]),
    st.sampled_from(INNER_SHARDINGS),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
)
def test_blocks_tile_the_tensor_and_stay_on_the_ranks_of_their_experts(
    tp: int, dp: int, ep: int, count: int, rest: Shape, inner: InnerSharding, expert: int | None, replicate: bool
) -> None:
    assume(tp * dp % ep == 0 and count % ep == 0 and (rest or expert is not None))
    num_inner_ranks = tp * dp // ep
    assume(inner != "experts" or count // ep % num_inner_ranks == 0)
    assume(inner == "experts" or all(size % num_inner_ranks == 0 for size in rest[:2]))
    shape = rest if expert is not None else (count, *rest)
    dims, position = ParallelDims(tp=tp, dp_shard=dp, ep=ep), ExpertPosition("experts", expert)
    blocks = expert_blocks("w", shape, position, count, dims, inner, replicate=replicate)
    assert find_coverage_fault(shape, [block.region for block in blocks if not block.is_replica]) is None
    size = count // ep
    for block in blocks:
        begin, end = (expert, expert + 1) if expert is not None else (block.region.offsets[0], sum_of(block))
        assert block.rank_in_stage % ep * size <= begin < end <= (block.rank_in_stage % ep + 1) * size
    if replicate:
        owners = {block.rank_in_stage for block in blocks}
        assert owners == {rank for rank in range(tp * dp) if expert is None or rank % ep == expert // size} or (
            inner == "experts" and expert is not None and len(owners) == 1
        )


def sum_of(block: Block) -> int:
    return block.region.offsets[0] + block.region.sizes[0]


@pytest.mark.parametrize(
    ("shape", "ep", "inner", "said"),
    [
        ((6, 4, 4), 4, "experts", r"--ep 4: must divide the number of experts, .* use one of 1, 2, 3, 6$"),
        ((4, 4, 4), 2, "experts", r"--ep-inner experts: each EP rank has 2 of the 4 experts .* use --ep-inner rows"),
        ((8, 6, 8), 2, "rows", r'--ep-inner rows: dim 1 of "w" has size 6, which 4 ranks'),
        ((8, 8, 6), 2, "columns", r'--ep-inner columns: dim 2 of "w" has size 6, which 4 ranks'),
    ],
)
def test_uneven_division_is_refused(shape: Shape, ep: int, inner: InnerSharding, said: str) -> None:
    dims = ParallelDims(tp=2, dp_shard=4, ep=ep)
    with pytest.raises(UsageError, match=said):
        expert_blocks("w", shape, ExpertPosition("experts", None), shape[0], dims, inner)


def test_columns_keep_packed_elements_together() -> None:
    dims, position = ParallelDims(dp_shard=2, ep=1), ExpertPosition("experts", None)
    assert expert_blocks("w", (2, 4, 4), position, 2, dims, "columns", pack=2)
    with pytest.raises(UsageError, match="size 6, which 2 ranks"):
        expert_blocks("w", (2, 4, 6), position, 2, dims, "columns", pack=2)


def test_equal_blocks_are_one_object() -> None:
    dims = ParallelDims(tp=2, dp_shard=2, ep=2)
    for inner, expert in product(INNER_SHARDINGS, (None, 5)):
        shape = (8, 4, 4) if expert is None else (4, 4)
        first, second = (
            expert_blocks(name, shape, ExpertPosition(name, expert), 8, dims, inner) for name in ("a", "b")
        )
        assert first is second
