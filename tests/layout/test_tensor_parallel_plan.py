"""Plans: which rule speaks of a tensor, and what it decides."""

from __future__ import annotations

from typing import Any

import pytest

from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.composition import Composition, Compositions
from ckptx.layout.placement import Placement
from ckptx.layout.styles import STYLES
from ckptx.layout.tensor_parallel_plan import PlacementDecision, Rule, TensorParallelPlan, decide_placement

Shape = tuple[int, ...]


def plan_of(**styles: str) -> TensorParallelPlan:
    """A plan of one component each: `plan_of(q_proj="colwise")`."""
    return TensorParallelPlan({name: Rule(style, "model plan") for name, style in styles.items()})


def decided(rule: Rule | str, name: str, shape: Shape, tp: int = 2, weight: Any = None) -> PlacementDecision:
    """What a rule for the module `m`, or for `m.x` itself if that is the name, decides about `m.<name>`."""
    rule = Rule(rule, "model plan") if isinstance(rule, str) else rule
    named = "m.x" if name == "x" or name.startswith("x_") else "m"
    pattern = f"m.{name}" if named == "m.x" else named
    return decide_placement(TensorParallelPlan({pattern: rule}), f"m.{name}", shape, tp, weight)


# --------------------------------------------------------------------------------------------------------------------
# Which rule


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.0.q.weight", "model.layers.*.q"),
        ("model.layers.12.q.weight_scale_inv", "model.layers.*.q"),
        ("model.layers.3.q.weight", "model.layers.3.q"),  # concrete before `*`
        ("model.layers.4.q.bias", "model.layers.*.q.bias"),  # the parameter before its module
        ("model.layers.3.q.bias", "model.layers.*.q.bias"),  # even where the module is concrete
        ("model.layers.0.experts.1.w.weight", "model.layers.0.experts.*.w"),
        ("model.layers.1.experts.0.w.weight", "model.layers.*.experts.0.w"),
        ("model.layers.0.experts.0.w.weight", "model.layers.0.experts.*.w"),  # as many `*`: the one further left
        ("model.layers.1.experts.1.w.weight", "model.layers.*.experts.*.w"),
        ("lm_head.weight", "lm_head"),
        ("w1.weight", "w1"),
        ("model.layers.0.q", "model.layers.*.q"),  # a parameter of that name
        ("model.layers.q.weight", None),
        ("model.layers.0.q.sub.weight", None),
        ("model.layers.0.other.weight", None),
        ("w2.weight", None),
        ("weight", None),
    ],
)
def test_the_most_specific_pattern_speaks(name: str, pattern: str | None) -> None:
    patterns = [
        "model.layers.*.q", "model.layers.*.q.bias", "model.layers.3.q", "model.layers.*.experts.*.w",
        "model.layers.*.experts.0.w", "model.layers.0.experts.*.w", "lm_head", "w1",
    ]  # fmt: skip
    rules = {pattern: Rule("colwise", pattern) for pattern in patterns}
    found = TensorParallelPlan(rules).find_rule(name)
    assert found == (None if pattern is None else (pattern, rules[pattern]))


def test_the_plan_of_the_user_goes_before_a_more_specific_one_of_the_model() -> None:
    model = TensorParallelPlan({"l.*.q.weight": Rule("rowwise", "model plan"), "l.*.k": Rule("rowwise", "model plan")})
    plan = TensorParallelPlan.from_user({"l.*.q": "replicate"}, fallback=model)
    assert plan.find_rule("l.0.q.weight") == ("l.*.q", Rule("replicate", "user plan"))
    assert plan.find_rule("l.0.k.weight") == ("l.*.k", Rule("rowwise", "model plan"))
    assert plan.find_rule("l.0.v.weight") is None
    assert plan.patterns() == ["l.*.q", "l.*.q.weight", "l.*.k"]


def test_patterns_that_match_nothing_are_named() -> None:
    plan = TensorParallelPlan.from_user(
        {
            "l.*.q": "colwise",
            "l.7.q": "colwise",
            "l.1.q": "replicate",
            "l.*.attn": "local_params",  # a hook; its parameters are further down
            "l.*.mlp": "colwise",  # would have to hold the parameters itself
            "l.*.k.bias": "colwise",
            "head": "colwise",
        }
    )
    names = ["l.0.q.weight", "l.1.q.weight", "l.0.attn.o.weight", "l.0.mlp.up.weight", "l.0.k.weight"]
    assert plan.find_unmatched_patterns(names) == ["l.7.q", "l.*.mlp", "l.*.k.bias", "head"]
    assert plan.find_unmatched_patterns([]) == list(plan.rules)


# --------------------------------------------------------------------------------------------------------------------
# What a user may write


def test_a_user_plan_is_remembered_as_such() -> None:
    plan = TensorParallelPlan.from_user({"model.layers.*.mlp.up_proj": "local_colwise", "0.weight": "rowwise"})
    assert plan.rules["model.layers.*.mlp.up_proj"] == Rule("local_colwise", "user plan")
    assert plan.find_rule("0.weight") == ("0.weight", Rule("rowwise", "user plan"))


@pytest.mark.parametrize("style", ["columnwise", "", "Colwise", None, 3, ["colwise"]])
def test_an_unknown_style_is_refused_with_those_that_are_known(style: object) -> None:
    with pytest.raises(UsageError) as error:
        TensorParallelPlan.from_user({"model.layers.*.q_proj": style}, "plan.json")
    assert str(error.value).startswith(f'plan.json: unknown style {style!r} for "model.layers.*.q_proj"; use one of ')
    assert "colwise, colwise_gather_output, rowwise" in str(error.value)


@pytest.mark.parametrize("plan", [None, [], "colwise", [["q", "colwise"]]])
def test_what_is_no_mapping_is_refused(plan: object) -> None:
    with pytest.raises(UsageError, match=f"--tp-plan: expected an object of .*, found {type(plan).__name__}"):
        TensorParallelPlan.from_user(plan)


@pytest.mark.parametrize("pattern", ["", "a..b", ".a", "a.", "layers.*_proj", "layers.**", " a", "a. b", 3, None])
def test_a_pattern_that_can_match_nothing_is_refused(pattern: object) -> None:
    with pytest.raises(UsageError, match="invalid pattern"):
        TensorParallelPlan.from_user({pattern: "colwise"})


EXPERTS = ["layers.0.bank.w_gate_up", "layers.0.bank.w_down", "layers.0.router.weight"]


@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        ({"layers.*.bank": "packed_colwise"}, 'such as "layers.*.bank.w_gate_up": "packed_colwise"'),
        ({"layers.*.bank": "colwise", "layers.*.bank.w_gate_up": "packed_colwise"}, '"layers.*.bank.w_down"'),
        ({"layers.0.bank": "rowwise"}, '"layers.0.bank" names a module without a weight'),
        ({"layers.*.bank": "moe_tp_experts", "layers.*.bank.w_down": "rowwise"}, None),
        ({"layers.*.bank": "rowwise", "layers.*.bank.w_gate_up": "colwise", "layers.*.bank.w_down": "rowwise"}, None),
        ({"layers.*.router": "colwise"}, None),
    ],
)
def test_a_module_without_a_weight_is_not_sharded_by_its_name(rules: dict[str, str], refused: str | None) -> None:
    plan = TensorParallelPlan.from_user(rules)
    assert not plan.find_unmatched_patterns(EXPERTS)
    if refused is None:
        plan.refuse_modules_without_weight(EXPERTS)
        return
    with pytest.raises(UsageError) as error:
        plan.refuse_modules_without_weight(EXPERTS)
    assert refused in str(error.value) and "w_down, w_gate_up" in str(error.value)


def test_a_rule_of_a_style_that_nobody_knows_is_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match='model plan: "q" has the unknown style "diagonal"; override it in your own TP plan with one of',
    ):
        TensorParallelPlan({"q": Rule("diagonal", "model plan")})


# --------------------------------------------------------------------------------------------------------------------
# What a style does


@pytest.mark.parametrize(
    ("style", "name", "shape", "placement"),
    [
        ("colwise", "weight", (8, 6), Placement(0, (8,))),
        ("colwise", "bias", (8,), Placement(0, (8,))),
        ("colwise", "x", (4, 8, 6), Placement(1, (8,))),  # experts
        ("colwise", "x", (8,), Placement(0, (8,))),  # attention sinks
        ("colwise", "x_bias", (4, 8), Placement(1, (8,))),  # the bias of experts
        ("rowwise", "weight", (8, 6), Placement(1, (6,))),
        ("rowwise", "bias", (8,), None),
        ("rowwise", "x", (4, 8, 6), Placement(2, (6,))),
        ("rowwise", "x", (6,), Placement(0, (6,))),
        ("rowwise", "x_bias", (4, 8), None),
        ("packed_colwise", "x", (4, 8, 6), Placement(1, (4, 4))),
        ("packed_colwise", "weight", (8, 6), Placement(0, (4, 4))),
        ("packed_colwise", "weight", (7, 6), Placement(0, (4, 3))),
        ("packed_colwise", "bias", (8,), Placement(0, (4, 4))),
        ("packed_colwise", "x_bias", (4, 8), Placement(1, (4, 4))),
        ("packed_rowwise", "x", (4, 6, 8), Placement(2, (4, 4))),
        ("packed_rowwise", "bias", (8,), None),
        ("packed_rowwise", "x", (8,), None),
        ("embedding_rowwise", "weight", (101, 6), Placement(0, (101,))),
        ("embedding_colwise", "weight", (101, 6), Placement(1, (6,))),
        ("embedding_colwise", "bias", (6,), None),
        ("replicate", "weight", (8, 6), None),
        ("grouped_gemm", "x", (4, 8, 6), None),
        ("colwise", "weight", (1, 6), None),
        ("rowwise", "weight", (8, 1), None),
        ("colwise", "weight", (0, 6), None),
        ("colwise", "weight", (), None),
        ("rowwise", "weight", (), None),
        ("embedding_rowwise", "weight", (), None),
    ],
)
def test_a_style_cuts(style: str, name: str, shape: Shape, placement: Placement | None) -> None:
    found = decided(style, name, shape)
    assert found.placement == placement
    assert found.decided_by == "model plan"
    assert found.aligned
    assert found.reason


@pytest.mark.parametrize("style", [style for style, kind in STYLES.items() if not kind.is_sharding])
@pytest.mark.parametrize(("name", "shape"), [("weight", (8, 6)), ("bias", (8,)), ("x", (4, 8, 6))])
def test_a_style_about_the_forward_pass_cuts_nothing(style: str, name: str, shape: Shape) -> None:
    assert decided(style, name, shape).placement is None


@pytest.mark.parametrize(
    "old", ["colwise_rep", "rowwise_rep", "local_colwise", "local_rowwise", "local_packed_rowwise"]
)
def test_older_names_cut_alike(old: str) -> None:
    new = old.removeprefix("local_").removesuffix("_rep")
    for name, shape in (("weight", (8, 6)), ("bias", (8,)), ("x", (4, 6, 8))):
        assert decided(old, name, shape).placement == decided(new, name, shape).placement


@pytest.mark.parametrize(
    "style",
    ["local", "gather", "ep_router", "moe_tp_experts", "megamoe_router", "megamoe_experts", "sequence_parallel"],
)
def test_names_without_sharding_stay_valid(style: str) -> None:
    plan = TensorParallelPlan.from_user({"m": style})
    assert decide_placement(plan, "m.weight", (8, 6), 2).placement is None


@pytest.mark.parametrize(("size", "placement"), [(1, None), (2, Placement(0, (2,))), (3, Placement(0, (3,)))])
def test_two_elements_suffice_for_a_shard(size: int, placement: Placement | None) -> None:
    found = decided("colwise", "weight", (size, 6), tp=4)
    reason = "colwise shards dim 0" if placement else "dim 0 has size 1, replicated"
    assert found == PlacementDecision(placement, "model plan", reason, True)


@pytest.mark.parametrize(("heads", "aligned"), [(((4, 4),), False), (((8, 2),), True), (((16, 1),), True), ((), True)])
def test_the_halves_of_a_user_plan_hold_whole_heads_of_the_groups(
    heads: tuple[tuple[int, int], ...], aligned: bool
) -> None:
    """The groups are those of the model: two of 8 elements, of which each of 4 ranks holds 2."""
    model = TensorParallelPlan({"m": Rule("colwise", "model plan", groups=(8, 8), heads=heads)})
    found = decide_placement(
        TensorParallelPlan.from_user({"m": "packed_colwise"}, fallback=model), "m.weight", (16, 6), 4
    )
    assert (found.placement, found.aligned) == (Placement(0, (8, 8)), aligned)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tp, aligned", [(2, True), (4, False)])
@pytest.mark.parametrize("of_features", [True, False])
def test_heads_along_the_inputs_are_those_of_the_stored_order(
    transposed: bool, tp: int, aligned: bool, of_features: bool
) -> None:
    """The inputs are two heads of 8; the outputs, of the same size, are plain features."""
    model = TensorParallelPlan(
        {},
        compositions=Compositions(
            {"m": Composition("in", (((2, 8),),))}, transposed=frozenset({"m"}) if transposed else frozenset()
        ),
    )
    plan = TensorParallelPlan.from_user({"m": "colwise" if of_features else "rowwise"}, fallback=model)
    found = decide_placement(plan, "m.weight", (16, 16), tp)
    assert found.placement == Placement(0 if of_features is not transposed else 1, (16,))
    assert found.aligned is (of_features or aligned)


@pytest.mark.parametrize(
    ("style", "shape", "placement"),
    [
        ("colwise", (6, 8), Placement(1, (8,))),
        ("rowwise", (6, 8), Placement(0, (6,))),
        ("packed_colwise", (6, 8), Placement(1, (4, 4))),
        ("packed_rowwise", (6, 8), Placement(0, (3, 3))),
        ("colwise", (8,), Placement(0, (8,))),
        ("colwise", (4, 8, 6), Placement(1, (8,))),
    ],
)
def test_a_transposed_weight_has_its_features_in_the_other_dim(style: str, shape: Shape, placement: Placement) -> None:
    name = "bias" if len(shape) == 1 else "weight"
    assert decided(Rule(style, "override", transposed=True), name, shape).placement == placement


def test_fused_groups() -> None:
    rule = Rule("colwise", "override", "fused q, k, v", groups=(32, 16, 16))
    found = decided(rule, "weight", (64, 32))
    assert found == PlacementDecision(
        Placement(0, (32, 16, 16)), "override", "colwise shards dim 0 in groups 32+16+16; fused q, k, v", True
    )
    assert decided(rule, "bias", (64,)).placement == Placement(0, (32, 16, 16))
    wrong = decided(rule, "weight", (65, 32))
    assert wrong.placement is None
    assert wrong.reason == "dim 0 has size 65, its groups 32+16+16 do not add up; replicated"


@pytest.mark.parametrize(
    ("heads", "tp", "align", "aligned"),
    [
        ((), 3, 1, True),
        (((8, 8),), 2, 8, True),
        (((8, 8),), 3, 8, False),
        (((5, 7), (4, 16), (8, 8)), 8, 16, False),  # the first that fits
        (((5, 7), (9, 9)), 3, 1, True),  # none fits: no check
    ],
)
def test_heads_are_told_from_the_size(heads: tuple[tuple[int, int], ...], tp: int, align: int, aligned: bool) -> None:
    found = decided(Rule("colwise", "model plan", heads=heads), "weight", (64, 32), tp)
    assert found.placement == Placement(0, (64,), align)
    assert found.aligned is aligned


def test_a_tensor_without_a_rule_is_replicated() -> None:
    assert decide_placement(plan_of(q="colwise"), "k.weight", (8, 6), 2) == PlacementDecision(
        None, "default", "no rule; replicated", True
    )


def test_experts_by_ownership_are_no_tp_cut() -> None:
    assert decided("grouped_gemm", "x", (4, 8, 6)).reason == "expert parallelism is not TP; replicated"


def test_one_rank_cuts_nothing_and_still_tells_who_decides() -> None:
    assert decided("colwise", "weight", (8, 6), tp=1) == PlacementDecision(None, "model plan", "tp is 1", True)
    scale = decided("colwise", "weight_scale", (8, 1), tp=1, weight=((8, 6), Placement(0, (8,))))
    assert scale == PlacementDecision(None, "model plan", "tp is 1", True)


# --------------------------------------------------------------------------------------------------------------------
# Companions


def test_a_scale_follows_its_weight() -> None:
    weight = ((512, 256), Placement(0, (512,), 64))
    by_block = decided("colwise", "weight_scale_inv", (4, 2), weight=weight)
    assert by_block == PlacementDecision(
        Placement(0, (4,)), "model plan", "scale follows its weight in blocks of 128", True
    )
    by_row = decided("colwise", "weight_scale", (512, 1), 16, weight=weight)
    assert (by_row.placement, by_row.aligned) == (weight[1], False)


def test_a_scale_of_a_weight_that_no_module_rule_names_follows_it_too() -> None:
    plan = plan_of(**{"experts": "moe_tp_experts", "experts.up": "colwise"})
    weight = ((4, 256, 64), Placement(1, (256,)))
    assert decide_placement(plan, "experts.up_scale", (4, 2, 1), 2, weight).placement == Placement(1, (2,))


def test_a_bias_is_no_companion() -> None:
    assert decided("rowwise", "bias", (8,), weight=((8, 6), Placement(1, (6,)))).placement is None
    assert decided("colwise", "bias", (8,), weight=((8, 6), Placement(0, (8,)))).placement == Placement(0, (8,))


def test_a_parameter_with_a_rule_of_its_own_is_no_companion() -> None:
    assert decided("rowwise", "x_scale", (8, 6), weight=((8, 6), Placement(0, (8,)))).placement == Placement(1, (6,))


@pytest.mark.parametrize("name", ["qweight", "weight_scale", "g_idx"])
def test_what_a_style_was_not_made_for_is_replicated(name: str) -> None:
    found = decided("colwise", name, (8, 6))
    assert found == PlacementDecision(None, "model plan", "no weight or bias, and no rule of its own; replicated", True)
