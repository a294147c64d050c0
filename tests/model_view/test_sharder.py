"""Which stage and which rule each tensor of a checkpoint gets, in whatever form it is stored; no files, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage
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
    dtypes: Mapping[str, str] | None = None,
) -> ShardedModel:
    """The cut of tensors of these names and shapes."""
    dims = ParallelDims(tp, pp, dp)
    known = TensorParallelPlan({pattern: Rule(style, "model plan") for pattern, style in plan.items()})
    sharder = Sharder(known, dims, StageMap([STACK], pp), rules, replicate)
    tensors = {
        name: TensorEntry(name, DTYPES_BY_NAME[(dtypes or {}).get(name, dtype)], shape, ())
        for name, shape in shapes.items()
    }
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


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "scales", "weight"])
@pytest.mark.parametrize("layer", [0, 3, 4, 5, 11])
@pytest.mark.parametrize("module", ["q", "o", "z"])
@pytest.mark.parametrize("rules", [None, "of model names", "of no names"])
def test_scales_are_extra_or_known_as_their_weights_are(module: str, layer: int, leaf: str, rules: str | None) -> None:
    """A scale of a layer behind the last is replicated like its weight, though a rule knows the weight."""
    name = f"model.layers.{layer}.{module}"
    shapes: dict[str, Shape] = {f"{name}.weight": (8, 4), f"{name}.{leaf}": (8, 4)}
    patterns = [f"model.layers.*.{each}.weight" for each in "qoz"] if rules == "of model names" else []
    known = None if rules is None else NameRules([], model_patterns=patterns)
    for unknown in ([], [f"{name}.{leaf}"], [*shapes]):
        mesh = mesh_of(shapes, unknown=unknown, rules=known)
        is_extra = layer >= 4 or f"{name}.weight" in unknown or rules == "of no names"
        assert list(mesh.unknown_tensors) == ([*shapes] if is_extra else [])
        is_sharded = not is_extra and module != "z"
        assert [len(held(mesh, each)) for each in shapes] == [1 + is_sharded] * len(shapes)
        reasons = {placed.decision.reason for placed in mesh.placements.values()}
        assert (reasons == {"not in the model; replicated"}) is is_extra


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


@pytest.mark.parametrize("dtypes", [("F4", "BF16"), ("BF16", "F4"), ("F4", "F4"), ("F4", "U8", "F4", "BF16")], ids=str)
def test_layers_of_several_dtypes_are_sharded_each_as_its_dtype_needs(dtypes: tuple[str, ...]) -> None:
    """Their shapes and decisions are equal; only the width of an element tells the shards apart."""
    names = [f"model.layers.{layer}.o.weight" for layer in range(len(dtypes))]
    mesh = mesh_of(dict.fromkeys(names, (4, 12)), tp=4, dtypes=dict(zip(names, dtypes, strict=True)))
    for name, dtype in zip(names, dtypes, strict=True):
        assert held(mesh, name) == held(mesh_of({name: (4, 12)}, tp=4, dtype=dtype), name)
        assert len(held(mesh, name)) == (3 if dtype == "F4" else 4)


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


@pytest.mark.parametrize("rows", [6, 9, 24])
@pytest.mark.parametrize("sharded", ["q", "k", "v", "qk", "kv"])
def test_a_fused_projection_of_parts_that_are_cut_differently_is_whole(sharded: str, rows: int) -> None:
    plan = {f"model.layers.*.{part}": "colwise" for part in sharded}
    mesh = mesh_of({"disk.3.qkv": (rows, 5)}, rules=EXPERTS, plan=plan)
    assert held(mesh, "disk.3.qkv") == [(0, (0, 0), (rows, 5))]
    assert mesh.placements["disk.3.qkv"].decision.decided_by == "default"


@pytest.mark.parametrize("plan", [{"model.layers.*.h": "colwise"}, {"model.layers.*.g": "colwise"}], ids=str)
def test_a_tensor_of_two_parameters_is_whole_if_only_one_of_them_is_sharded(plan: dict[str, str]) -> None:
    """Also if one rank has all of its rows, as the first shard of a parameter and as a replica of the other."""
    rules = NameRules(
        [
            Conversion(
                tuple(f"disk.*.{name}" for name in "abc"), ("model.layers.*.g.weight", "model.layers.*.h.weight"),
                (Op("concat"), Op("chunk")),
            )
        ]
    )  # fmt: skip
    for first, middle, last in product(range(1, 7), range(2, 7), range(1, 7)):
        half = (first + middle + last) // 2
        if 2 * half != first + middle + last or half < 2 or not first < half < first + middle:
            continue
        shapes = {"disk.0.a": (first, 5), "disk.0.b": (middle, 5), "disk.0.c": (last, 5)}
        mesh = mesh_of(shapes, rules=rules, plan=plan)
        assert held(mesh, "disk.0.b") == [(0, (0, 0), (middle, 5))]
        reason = mesh.placements["disk.0.b"].decision.reason
        assert reason == "stored in a form that cannot be sharded like the model; replicated", shapes


@pytest.mark.parametrize("counts", [(4, 6), (6, 4), (4, 3, 4), (2, 4, 8)], ids=str)
def test_experts_that_the_model_shards_by_number_are_judged_by_the_number_of_their_layer(
    counts: tuple[int, ...],
) -> None:
    """Tensors of equal names and shapes on disk may belong to lists of different lengths."""
    heads = (*((count // 2, 2) for count in counts if count % 4 == 0), (3, 2))
    rule = Rule("embedding_rowwise", "model plan", heads=heads)
    plan = TensorParallelPlan({"model.layers.*.experts.down": rule})
    shapes = {
        f"disk.{layer}.experts.{expert}.down": (6, 4) for layer, count in enumerate(counts) for expert in range(count)
    }
    sharder = Sharder(plan, ParallelDims(2), StageMap([STACK], 1), EXPERTS, False)
    mesh = sharder.place({name: TensorEntry(name, DTYPES_BY_NAME["BF16"], s, ()) for name, s in shapes.items()}, [])
    assert {len(placed.blocks) for placed in mesh.placements.values()} == {1}
    inside_pairs = [layer for layer, count in enumerate(counts) if count == 6]
    assert mesh.unaligned == [name for name in shapes if int(name.split(".")[1]) in inside_pairs]


def test_a_name_on_disk_that_is_also_a_name_of_the_model_is_the_one_that_is_free() -> None:
    """`q` becomes `o`, unless `o` is there as well: then both are names of the model."""
    rules = NameRules(
        [Conversion(("model.layers.*.q.weight",), ("model.layers.*.o.weight",))],
        model_patterns=("model.layers.*.q.weight", "model.layers.*.o.weight"),
    )
    q, o = "model.layers.0.q.weight", "model.layers.0.o.weight"
    alone, both = mesh_of({q: (8, 4)}, rules=rules), mesh_of({q: (8, 4), o: (8, 4)}, rules=rules)
    rows, columns = [(0, (0, 0), (4, 4)), (1, (4, 0), (4, 4))], [(0, (0, 0), (8, 2)), (1, (0, 2), (8, 2))]
    assert held(alone, q) == columns
    assert (held(both, q), held(both, o)) == (rows, columns)


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
    decisions = {name.rpartition(".")[2]: set[int]() for name in mesh.placements}
    for name, placed in mesh.placements.items():
        decisions[name.rpartition(".")[2]].add(id(placed.decision))
    assert [len(each) for each in decisions.values()] == [1, 1, 1]
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
    found = find_placement(shape, blocks_of_stage(shape, placement, ParallelDims(tp), True), tp)
    assert found is not None
    assert blocks_of_stage(shape, found, ParallelDims(tp), True) == blocks_of_stage(
        shape, placement, ParallelDims(tp), True
    )


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
