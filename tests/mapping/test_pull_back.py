"""The cut of the model seen from the disk: every element is numbered, and each rank must hold the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ckptx.catalog.entry import Block
from ckptx.catalog.region import Region, Shape, find_coverage_fault, full_region
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage
from ckptx.mapping.name_index import fill_pattern
from ckptx.mapping.ops import Conversion, Op
from ckptx.mapping.pull_back import PullBack
from ckptx.mapping.rules import NameRules
from tests.support.conversions import CASES, run_by_loader

Place = Callable[[Shape], "Placement | None"]

# How the model's tensors are cut, by their shape.
PLACES: dict[str, Place] = {
    "replicated": lambda shape: None,
    "first dim": lambda shape: Placement(0, (shape[0],)),
    "last dim": lambda shape: Placement(len(shape) - 1, (shape[-1],)),
    "rows of experts": lambda shape: Placement(max(0, len(shape) - 2), (shape[max(0, len(shape) - 2)],)),
    "halves of rows": lambda shape: (lambda dim: Placement(dim, (-(-shape[dim] // 2), shape[dim] // 2)))(
        max(0, len(shape) - 2)
    ),
}
MESHES = [ParallelDims(tp=2), ParallelDims(tp=3), ParallelDims(tp=4), ParallelDims(tp=2, dp_shard=2)]
# Rows that a cut takes out of the middle of what is permuted lie in no rectangle.
SCATTERED = {
    "interleaved rows",
    "interleaved rows of experts",
    "rotary rows",
    "rotary biases",
    "rotary rows of a fused qkv",
}


def numbered(shapes: dict[str, Shape]) -> dict[str, torch.Tensor]:
    """Tensors in which every element has a number of its own."""
    result, first = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        result[name] = torch.arange(first, first + count).reshape(shape)
        first += count
    return result


def inside(tensor: torch.Tensor, region: Region) -> set[int]:
    spans = tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))
    return set(tensor[spans].flatten().tolist())


def holdings(
    tensors: dict[str, torch.Tensor], blocks: dict[str, tuple[Block, ...]]
) -> dict[tuple[int, bool], set[int]]:
    """The numbers that each rank holds."""
    held: dict[tuple[int, bool], set[int]] = {}
    for name, tensor in tensors.items():
        for block in blocks[name]:
            mine = held.setdefault((block.rank_in_stage, block.is_replica), set())
            new = inside(tensor, block.region)
            assert not mine & new, "an element is listed twice"
            mine |= new
    return held


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_on_disk_what_they_hold_in_the_model(case: str, place: str, mesh: ParallelDims) -> None:
    conversion, ops, shapes = CASES[case]
    sources = [
        [pattern.replace("*", str(at)) for at in range(len(column))]
        for pattern, column in zip(conversion.sources, shapes, strict=True)
    ]
    disk = numbered(
        {
            name: shape
            for names, column in zip(sources, shapes, strict=True)
            for name, shape in zip(names, column, strict=True)
        }
    )
    made = run_by_loader(conversion, ops, [[disk[name] for name in names] for names in sources])
    model = {name: made[i][0] for i, name in enumerate(conversion.targets)}
    cuts = {
        name: blocks_of_stage(tuple(tensor.shape), PLACES[place](tuple(tensor.shape)), mesh, True)
        for name, tensor in model.items()
    }
    pull = PullBack(
        NameRules([conversion]),
        {name: tuple(each.shape) for name, each in disk.items()},
        lambda name, shape: cuts[name],
    )
    found = {name: pull.blocks(name) for name in disk}
    if case in SCATTERED and any(blocks is None for blocks in found.values()):
        assert place != "replicated" or mesh.dp_shard > 1
        return
    blocks = {name: each for name, each in found.items() if each is not None}
    assert set(blocks) == set(disk)
    assert holdings(disk, blocks) == holdings(model, cuts)
    for name, tensor in disk.items():
        kept = [block.region for block in blocks[name] if not block.is_replica]
        assert find_coverage_fault(tuple(tensor.shape), kept) is None


def blocks_of(conversion: Conversion, shapes: dict[str, Shape], place: Place, mesh: ParallelDims) -> dict[str, object]:
    pull = PullBack(
        NameRules([conversion]), shapes, lambda name, shape: blocks_of_stage(shape, place(shape), mesh, False)
    )
    return {name: pull.blocks(name) for name in shapes}


def rows(rank_in_stage: int, begin: int, size: int, width: int = 5) -> Block:
    return Block(rank_in_stage, Region((begin, 0), (size, width)))


def test_halves_of_fused_experts_are_rows_of_each_expert() -> None:
    conversion = CASES["gate and up of experts"][0]
    shapes = {fill_pattern(leaf, (e,)): (4, 6) for leaf in conversion.sources for e in range(3)}
    found = blocks_of(conversion, shapes, lambda shape: Placement(1, (4, 4)), ParallelDims(tp=2))
    assert set(found.values()) == {(rows(0, 0, 2, 6), rows(1, 2, 2, 6))}


def test_a_plain_cut_of_fused_experts_gives_each_projection_to_one_rank() -> None:
    conversion = CASES["gate and up of experts"][0]
    shapes = {fill_pattern(leaf, (e,)): (4, 6) for leaf in conversion.sources for e in range(3)}
    found = blocks_of(conversion, shapes, lambda shape: Placement(1, (8,)), ParallelDims(tp=2))
    assert found["e.2.gate"] == (rows(0, 0, 4, 6),) and found["e.2.up"] == (rows(1, 0, 4, 6),)


def test_experts_cut_by_number_belong_to_their_rank() -> None:
    conversion = CASES["experts of one projection"][0]
    shapes = {fill_pattern("e.*.gate", (e,)): (4, 6) for e in range(3)}
    found = blocks_of(conversion, shapes, lambda shape: Placement(0, (3,)), ParallelDims(tp=2))
    assert [found[name][0].rank_in_stage for name in shapes] == [0, 0, 1]  # type: ignore[index]


def test_a_fused_qkv_is_cut_in_each_of_its_parts() -> None:
    conversion = CASES["fused qkv"][0]
    found = blocks_of(conversion, {"x": (12, 5)}, lambda shape: Placement(0, (4,)), ParallelDims(tp=2))
    assert found["x"] == (rows(0, 0, 2), rows(0, 4, 2), rows(0, 8, 2), rows(1, 2, 2), rows(1, 6, 2), rows(1, 10, 2))


def test_interleaved_gate_and_up_are_cut_in_pairs() -> None:
    conversion = CASES["interleaved gate and up"][0]
    found = blocks_of(conversion, {"x": (8, 5)}, lambda shape: Placement(0, (4,)), ParallelDims(tp=2))
    assert found["x"] == (rows(0, 0, 4), rows(1, 4, 4))


def test_rotary_rows_are_cut_between_heads_and_not_inside() -> None:
    conversion = CASES["rotary rows"][0]  # 4 heads of 6 rows
    for tp, expected in ((2, (rows(0, 0, 12), rows(1, 12, 12))), (3, None)):
        found = blocks_of(conversion, {"x": (24, 5)}, lambda shape: Placement(0, (24,)), ParallelDims(tp=tp))
        assert found["x"] == expected


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "op", [Op("interleave"), Op("interleave", args=(1,)), Op("permute_rope", args=(2, 0))], ids=str
)
def test_reordered_rows_have_an_answer_only_with_as_many_rectangles_as_in_the_model(op: Op, tp: int) -> None:
    """One rectangle more than the rank has in the model is one too many."""
    conversion = Conversion(("x",), ("y",), (op,))
    for count in range(4, 28, 4):
        disk_rows = torch.arange(count)
        if op.kind == "interleave":
            model_rows = disk_rows.reshape((2, -1) if op.args else (-1, 2)).T.flatten()
        else:
            model_rows = disk_rows.reshape(2, -1, 2).transpose(1, 2).flatten()
        for groups in ((count,), (count // 2, count // 2)):
            cut = blocks_of_stage((count, 5), Placement(0, groups), ParallelDims(tp=tp), False)
            held: dict[int, list[int]] = {}
            for block in cut:
                begin, size = block.region.offsets[0], block.region.sizes[0]
                held.setdefault(block.rank_in_stage, []).extend(model_rows[begin : begin + size].tolist())
            expected = []
            for rank, indices in held.items():
                starts = [row for row in sorted(indices) if row - 1 not in indices]
                ends = [row + 1 for row in sorted(indices) if row + 1 not in indices]
                expected.append([rows(rank, begin, end - begin) for begin, end in zip(starts, ends, strict=True)])
            is_found = all(
                len(blocks) <= sum(block.rank_in_stage == rank for block in cut)
                for rank, blocks in zip(held, expected, strict=True)
            )
            found = blocks_of(
                conversion, {"x": (count, 5)}, lambda shape, g=groups: Placement(0, g), ParallelDims(tp=tp)
            )
            assert found["x"] == (tuple(block for blocks in expected for block in blocks) if is_found else None)


def test_an_unsupported_conversion_and_an_unknown_name_have_no_answer() -> None:
    odd = Conversion(("x",), ("y",), (Op("unsupported:Conv3dToLinear"),))
    found = blocks_of(odd, {"x": (4, 2), "other": (3,)}, lambda shape: None, ParallelDims(tp=2))
    assert found == {"x": None, "other": None}


def test_a_tensor_without_elements_is_one_block() -> None:
    conversion = CASES["fused qkv"][0]
    assert blocks_of(conversion, {"x": (12, 0)}, lambda shape: None, ParallelDims(tp=2)) == {
        "x": (Block(0, full_region((12, 0))),)
    }


def test_tensors_that_are_cut_alike_share_their_blocks() -> None:
    pattern = "l.*.e.*.gate"
    conversion = Conversion((pattern,), ("l.*.gate",), (Op("merge"),))
    shapes = {fill_pattern(pattern, (n, e)): (4, 6) for n in range(3) for e in range(5)}
    found = blocks_of(conversion, shapes, lambda shape: Placement(1, (4,)), ParallelDims(tp=2))
    assert len({id(blocks) for blocks in found.values()}) == 1


def test_layers_of_different_shapes_have_answers_of_their_own() -> None:
    pattern = "l.*.qkv"
    conversion = Conversion((pattern,), ("l.*.q", "l.*.k"), (Op("chunk"),))
    shapes = {"l.0.qkv": (8, 5), "l.1.qkv": (16, 5)}
    found = blocks_of(conversion, shapes, lambda shape: Placement(0, (shape[0],)), ParallelDims(tp=2))
    assert found["l.0.qkv"] == (rows(0, 0, 2), rows(0, 4, 2), rows(1, 2, 2), rows(1, 6, 2))
    assert found["l.1.qkv"] == (rows(0, 0, 4), rows(0, 8, 4), rows(1, 4, 4), rows(1, 12, 4))


def test_what_may_be_stored_transposed_is_cut_as_its_shape_says() -> None:
    conversion = Conversion(("x",), ("x",), (Op("transpose", 0, 1, (1,)),))
    for shape_of, expected in (
        (lambda name: (5, 8), (Block(0, Region((0, 0), (8, 3))), Block(1, Region((0, 3), (8, 2))))),
        (lambda name: (8, 5), (rows(0, 0, 4), rows(1, 4, 4))),
        (None, None),
    ):
        pull = PullBack(
            NameRules([conversion], shape_of=shape_of),
            {"x": (8, 5)},
            lambda name, shape: blocks_of_stage(shape, Placement(0, (shape[0],)), ParallelDims(tp=2), False),
        )
        assert pull.blocks("x") == expected
