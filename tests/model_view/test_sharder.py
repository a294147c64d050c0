"""Which stage and which rule each tensor of a checkpoint gets, in whatever form it is stored; no files, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, shard_tensor
from ckptx.layout.stages import Stack, StageMap
from ckptx.layout.tensor_parallel_plan import Rule, TensorParallelPlan
from ckptx.mapping.ops import Conversion, Op
from ckptx.mapping.rules import NameRules
from ckptx.model_view.sharder import ShardedModel, Sharder, effective_plan, find_placement, read_plan

Shape = tuple[int, ...]

PLAN = {
    "model.embed": "embedding_rowwise", "model.layers.*.q": "colwise", "model.layers.*.o": "rowwise",
    "model.layers.*.experts.gate_up": "packed_colwise", "model.layers.*.experts.down": "rowwise", "head": "colwise",
}  # fmt: skip
STACK = Stack("model.layers", 4, after=("model.norm", "head"))


def mesh_of(
    shapes: Mapping[str, Shape],
    *,
    tp: int = 2,
    pp: int = 1,
    dp: int = 1,
    plan: Mapping[str, str] = PLAN,
    rules: NameRules | None = None,
    unknown: Sequence[str] = (),
    replicate: bool = False,
    dtype: str = "BF16",
) -> ShardedModel:
    """The cut of tensors of these names and shapes."""
    dims = ParallelDims(tp, pp, dp)
    known = TensorParallelPlan({pattern: Rule(style, "model plan") for pattern, style in plan.items()})
    sharder = Sharder(known, dims, StageMap([STACK], pp), rules, replicate)
    tensors = {name: TensorEntry(name, DTYPES_BY_NAME[dtype], shape, ()) for name, shape in shapes.items()}
    return sharder.place(tensors, unknown)


def held(mesh: ShardedModel, name: str) -> list[tuple[int, Shape, Shape]]:
    return [(rank_in_stage, *region) for rank_in_stage, region, _ in mesh.placements[name].blocks]


# Stages


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.embed.weight", 0),
        ("model.layers.0.q.weight", 0),
        ("model.layers.1.q.weight", 0),
        ("model.layers.2.q.weight", 1),
        ("model.layers.3.norm.weight", 1),
        ("model.norm.weight", 1),
        ("head.weight", 1),
        ("tower.layers.3.q.weight", 0),
    ],
)
def test_a_tensor_goes_with_its_layer(name: str, stage: int) -> None:
    mesh = mesh_of({name: (8, 4)}, pp=2)
    assert mesh.placements[name].stage == stage
    assert mesh.layers() == [[["model.layers", 0, 2]], [["model.layers", 2, 4]]]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.layers.4.q.weight", 1),
        ("model.layers.0.strange.weight", 0),
        ("model.layers.3.strange.weight", 1),
        ("mtp.layers.0.q.weight", 1),
        ("model.mtp_head.weight", 1),
        ("nextn.q.weight", 1),
        ("something.else", 0),
    ],
)
def test_what_the_model_does_not_have_is_replicated_with_the_layer_before_it(name: str, stage: int) -> None:
    mesh = mesh_of({name: (8, 4)}, pp=2, unknown=[name])
    assert list(mesh.unknown_tensors) == [name]
    assert mesh.placements[name].stage == stage
    assert mesh.placements[name].decision.reason == "not in the model; replicated"
    assert held(mesh, name) == [(0, (0, 0), (8, 4))]


def test_a_layer_behind_the_last_is_extra_though_its_names_are_known() -> None:
    mesh = mesh_of({"model.layers.3.q.weight": (8, 4), "model.layers.4.q.weight": (8, 4)})
    assert list(mesh.unknown_tensors) == ["model.layers.4.q.weight"]
    assert len(held(mesh, "model.layers.3.q.weight")) == 2


# Ranks


def test_tp_then_fsdp_by_rank() -> None:
    mesh = mesh_of({"model.layers.0.q.weight": (8, 4), "model.norm.weight": (5,)}, dp=2)
    assert held(mesh, "model.layers.0.q.weight") == [
        (0, (0, 0), (2, 4)), (1, (4, 0), (2, 4)), (2, (2, 0), (2, 4)), (3, (6, 0), (2, 4)),
    ]  # fmt: skip
    assert held(mesh, "model.norm.weight") == [(0, (0,), (3,)), (2, (3,), (2,))]


def test_what_tp_does_not_cut_goes_to_every_rank_if_asked() -> None:
    mesh = mesh_of({"model.norm.weight": (5,)}, replicate=True, dp=2)
    assert [(rank_in_stage, replica) for rank_in_stage, _, replica in mesh.placements["model.norm.weight"].blocks] == [
        (0, False), (1, True), (2, False), (3, True),
    ]  # fmt: skip


def test_pairs_of_four_bits_stay_together() -> None:
    shapes = {"model.layers.0.o.weight": (4, 12)}
    assert [sizes[1] for _, _, sizes in held(mesh_of(shapes, tp=4, dtype="F4"), "model.layers.0.o.weight")] == [4, 4, 4]
    assert [sizes[1] for _, _, sizes in held(mesh_of(shapes, tp=4), "model.layers.0.o.weight")] == [3, 3, 3, 3]


def test_a_scale_follows_its_weight_though_the_model_has_none() -> None:
    """Quantised checkpoints have it beside the weight; nothing else that is unknown is cut."""
    shapes = {
        "model.layers.0.q.weight": (8, 4), "model.layers.0.q.weight_scale": (8, 1),
        "model.layers.0.q.strange_bias": (8,), "model.layers.0.z.scale": (8, 1),
    }  # fmt: skip
    mesh = mesh_of(shapes, unknown=[name for name in shapes if not name.endswith("q.weight")])
    assert held(mesh, "model.layers.0.q.weight_scale") == [(0, (0, 0), (4, 1)), (1, (4, 0), (4, 1))]
    assert len(held(mesh, "model.layers.0.z.scale")) == 1
    assert list(mesh.unknown_tensors) == ["model.layers.0.z.scale"]


# Forms on disk

EXPERTS = NameRules(
    [
        Conversion(
            ("disk.*.experts.*.gate", "disk.*.experts.*.up"), ("model.layers.*.experts.gate_up",),
            (Op("merge"), Op("concat", 1)),
        ),
        Conversion(("disk.*.experts.*.down",), ("model.layers.*.experts.down",), (Op("merge"),)),
        Conversion(("disk.*.qkv",), tuple(f"model.layers.*.{name}.weight" for name in ("q", "k", "v")), (Op("chunk"),)),
        Conversion(("disk.*.o",), ("model.layers.*.o.weight",)),
    ],
    model_patterns=("model.layers.*.norm.weight",),
)  # fmt: skip


def shapes_of_experts(layer: int = 0) -> dict[str, Shape]:
    return {
        f"disk.{layer}.experts.{expert}.{name}": (6, 4) if name == "down" else (4, 6)
        for expert in range(3)
        for name in ("gate", "up", "down")
    }


def test_an_expert_on_disk_is_cut_as_the_fused_tensor_is() -> None:
    mesh = mesh_of(shapes_of_experts(), rules=EXPERTS)
    for expert in range(3):
        for name in ("gate", "up"):  # half of the rows of each, as a rank has them of [gate|up]
            assert held(mesh, f"disk.0.experts.{expert}.{name}") == [(0, (0, 0), (2, 6)), (1, (2, 0), (2, 6))]
        assert held(mesh, f"disk.0.experts.{expert}.down") == [(0, (0, 0), (6, 2)), (1, (0, 2), (6, 2))]
    assert {placed.decision.decided_by for placed in mesh.placements.values()} == {"model plan"}


def test_experts_of_a_layer_lie_on_its_stage() -> None:
    mesh = mesh_of(shapes_of_experts(1) | shapes_of_experts(2), pp=2, rules=EXPERTS)
    assert {mesh.placements[name].stage for name in shapes_of_experts(1)} == {0}
    assert {mesh.placements[name].stage for name in shapes_of_experts(2)} == {1}


def test_a_fused_projection_that_the_model_splits_is_cut_in_its_parts() -> None:
    plan = {f"model.layers.*.{name}": "colwise" for name in ("q", "k", "v")}
    mesh = mesh_of({"disk.3.qkv": (24, 5)}, rules=EXPERTS, plan=plan)
    assert held(mesh, "disk.3.qkv") == [
        (0, (0, 0), (4, 5)), (0, (8, 0), (4, 5)), (0, (16, 0), (4, 5)),
        (1, (4, 0), (4, 5)), (1, (12, 0), (4, 5)), (1, (20, 0), (4, 5)),
    ]  # fmt: skip
    assert mesh.placements["disk.3.qkv"].decision.placement == Placement(0, (8, 8, 8))


def test_a_fused_projection_of_parts_that_are_cut_differently_is_whole() -> None:
    mesh = mesh_of({"disk.3.qkv": (24, 5)}, rules=EXPERTS, plan={"model.layers.*.q": "colwise"})
    assert held(mesh, "disk.3.qkv") == [(0, (0, 0), (24, 5))]
    assert mesh.placements["disk.3.qkv"].decision.decided_by == "default"


def test_another_name_alone_changes_nothing() -> None:
    mesh = mesh_of({"disk.3.o": (4, 8)}, pp=4, rules=EXPERTS)
    assert (mesh.placements["disk.3.o"].stage, held(mesh, "disk.3.o")) == (
        3,
        [(0, (0, 0), (4, 4)), (1, (0, 4), (4, 4))],
    )


def test_layers_alike_share_their_blocks() -> None:
    """A plan for many ranks stays small."""
    mesh = mesh_of({f"model.layers.{layer}.q.weight": (8, 4) for layer in range(4)})
    assert len({id(placed.blocks) for placed in mesh.placements.values()}) == 1
    mesh = mesh_of(shapes_of_experts(0) | shapes_of_experts(1), rules=EXPERTS)
    assert (
        len({id(mesh.placements[f"disk.{layer}.experts.{expert}.up"].blocks) for layer in (0, 1) for expert in (0, 2)})
        == 1
    )


def test_a_rule_for_one_layer_is_not_that_of_others() -> None:
    plan = {**PLAN, "model.layers.2.q": "replicate"}
    mesh = mesh_of({f"model.layers.{layer}.q.weight": (8, 4) for layer in range(4)}, plan=plan)
    assert [len(placed.blocks) for placed in mesh.placements.values()] == [2, 2, 1, 2]


# Rows of the report


def test_tensors_cut_alike_are_one_row() -> None:
    plan = {**PLAN, "model.layers.2.q": "replicate"}
    shapes: dict[str, Shape] = {f"model.layers.{layer}.q.weight": (8, 4) for layer in range(4)}
    mesh = mesh_of({**shapes, "model.norm.weight": (8,)}, plan=plan)
    rows = mesh.rules({})
    assert [(row["pattern"], row["tensors"], row["dim"], row["rule"]) for row in rows] == [
        ("model.layers.*.q.weight", 3, 0, "model plan"),
        ("model.layers.*.q.weight", 1, None, "model plan"),
        ("model.norm.weight", 1, None, "default"),
    ]
    with_aliases = mesh.rules(
        {"model.layers.4.q.weight": "model.layers.0.q.weight", "head.weight": "model.norm.weight"}
    )
    assert [(row["pattern"], row["tensors"], row["dim"]) for row in with_aliases] == [
        ("model.layers.*.q.weight", 4, 0),
        ("model.layers.*.q.weight", 1, None),
        ("model.norm.weight", 1, None),
        ("head.weight", 1, None),
    ]
    assert all(row["aligned"] for row in rows)
    assert json.loads(json.dumps(rows)) == rows


def test_cuts_inside_heads_are_listed() -> None:
    known = TensorParallelPlan({"model.layers.*.q": Rule("colwise", "model plan", heads=((2, 4),))})
    tensors = {"model.layers.0.q.weight": TensorEntry("", DTYPES_BY_NAME["F32"], (8, 4), ())}
    for tp, unaligned in ((2, []), (4, list(tensors))):
        sharder = Sharder(known, ParallelDims(tp), StageMap([STACK], 1), None, False)
        assert sharder.place(tensors, []).unaligned == unaligned


# Placements told from blocks


@pytest.mark.parametrize(
    ("shape", "placement"),
    [
        ((10, 4), Placement(0, (10,))),
        ((4, 10), Placement(1, (10,))),
        ((10, 4), Placement(0, (4, 6))),
        ((3, 12, 5), Placement(1, (6, 6))),
        ((9,), Placement(0, (3, 3, 3))),
    ],
)
@pytest.mark.parametrize("tp", [2, 3])
def test_a_placement_is_told_from_its_blocks(shape: Shape, placement: Placement, tp: int) -> None:
    found = find_placement(shape, shard_tensor(shape, placement, ParallelDims(tp), True), tp)
    assert found is not None
    assert shard_tensor(shape, found, ParallelDims(tp), True) == shard_tensor(shape, placement, ParallelDims(tp), True)


@pytest.mark.parametrize(
    "regions",
    [
        [((0, 0), (3, 4)), ((3, 0), (1, 4))],  # uneven, not as chunks are
        [((2, 0), (2, 4)), ((0, 0), (2, 4))],  # the wrong way round
        [((0, 0), (2, 2)), ((2, 2), (2, 2))],  # cut along two dims
        [((0, 0), (4, 4)), ((0, 0), (4, 4))],  # not cut at all
    ],
)
def test_blocks_that_no_placement_gives(regions: list[tuple[Shape, Shape]]) -> None:
    blocks = [Block(rank_in_stage, Region(*region)) for rank_in_stage, region in enumerate(regions)]
    assert find_placement((4, 4), blocks, 2) is None


# Plans of the user


def test_a_plan_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"a.b": "colwise"}')
    assert read_plan(str(tmp_path / "plan.json")) == {"a.b": "colwise"}
    plan = effective_plan(None, None, {"a.b": "colwise"})
    assert plan.find_rule("a.b.weight") == ("a.b", Rule("colwise", "user plan"))
    assert effective_plan(None, None, None).patterns() == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object such as .*, found list"),
        ("3", "expected a JSON object such as .*, found int"),
        ("\ufeff{}", "not JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_plan_that_is_none(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_plan(str(tmp_path / "plan.json"))
