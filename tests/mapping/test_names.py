"""Names without wrappers and prefixes; what is the model and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.errors import InputError
from ckptx.mapping.models import KnownNames
from ckptx.mapping.names import (
    WRAPPERS,
    assign_roles,
    is_optimizer,
    is_state_prefix,
    is_trainer_state,
    pattern_of,
    strip_wrappers,
)

PATTERNS = frozenset({"model.embed.weight", "model.layers.*.w", "model.norm.weight", "lm_head.weight"})
MODEL = ["model.embed.weight", "model.layers.0.w", "model.layers.1.w", "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.layers.0.w", "model.layers.0.w"),
        ("_orig_mod.model.layers.0.w", "model.layers.0.w"),
        ("model._orig_mod.layers.0._checkpoint_wrapped_module.w", "model.layers.0.w"),
        ("module.module.a", "a"),
        ("_fsdp_wrapped_module._orig_mod.a", "a"),
        ("modules.a", "modules.a"),
        ("a._orig_mod_b", "a._orig_mod_b"),
        ("module", "module"),
        ("_orig_mod.module", "module"),
    ],
)
def test_wrappers_at_any_depth(name: str, short: str) -> None:
    assert strip_wrappers([name]).names == {name: short}


def test_wrappers_are_counted() -> None:
    assert strip_wrappers(["module.a", "module._orig_mod.b", "c"]).counts == {"module": 2, "_orig_mod": 1}


def test_wrappers_of_a_tensor_that_is_stored_twice_are_counted_without_it() -> None:
    stripped = strip_wrappers(["optim._orig_mod.x", "optim.x", "_orig_mod.a"])
    assert stripped.counts == {"_orig_mod": 2}
    assert stripped.count_without(["optim._orig_mod.x", "optim.x"]) == {"_orig_mod": 1}


def test_a_component_that_the_architecture_has_is_no_wrapper() -> None:
    assert strip_wrappers(["vision.module.0.w"], frozenset({"vision.module.*.w"})).counts == {}


def test_module_is_a_name_where_the_name_without_it_is_there_and_nothing_is_known() -> None:
    unwrapped = strip_wrappers(["a", "module.a", "module.b", "_orig_mod.c"])
    assert unwrapped.names == {"a": "a", "module.a": "module.a", "module.b": "module.b", "_orig_mod.c": "c"}
    assert (unwrapped.counts, unwrapped.duplicates) == ({"_orig_mod": 1}, {})
    assert unwrapped.names_with_module == ("module.a", "module.b")


def test_module_is_a_name_where_the_architecture_does_not_know_the_name_without_it() -> None:
    state = ["optimizer.state.own.w.exp_avg", "optimizer.state.own.module.w.exp_avg"]
    unwrapped = strip_wrappers(["module.lm_head.weight", "own.w", "own.module.w", *state], PATTERNS)
    assert unwrapped.names["module.lm_head.weight"] == "lm_head.weight"
    assert {each: unwrapped.names[each] for each in ("own.w", "own.module.w", *state)} == {
        each: each for each in ("own.w", "own.module.w", *state)
    }
    assert (unwrapped.duplicates, unwrapped.names_with_module) == ({}, ("own.module.w", state[1]))


@given(st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_a_name_in_wrappers_is_a_duplicate_of_the_name_without_them(wrappers: list[str], data: st.DataObject) -> None:
    short = data.draw(st.sampled_from(MODEL))
    parts = short.split(".")
    for wrapper in wrappers:
        parts.insert(data.draw(st.integers(0, len(parts) - 1)), wrapper)
    wrapped = ".".join(parts)
    for names in ([*MODEL, wrapped], [wrapped, *MODEL]):
        unwrapped = strip_wrappers(names, PATTERNS)
        assert unwrapped.names == {name: name for name in MODEL}
        assert unwrapped.duplicates == {wrapped: short}


@pytest.mark.parametrize(
    ("name", "optimizer", "trainer"),
    [
        ("optimizer.state.model.w.exp_avg", True, False),
        ("optim.w", True, False),
        ("state.optimizers.0.w", True, False),
        ("app.optim.w", True, False),
        ("train_state.step", False, True),
        ("state.lr_scheduler.last", False, True),
        ("rng_state", False, True),
        ("state.model.w", False, False),
        ("model.optimizer.w", False, False),
        ("optimizers_head.w", False, False),
        ("stepper.w", False, False),
    ],
)
def test_what_is_not_the_model(name: str, optimizer: bool, trainer: bool) -> None:
    assert (is_optimizer(name), is_trainer_state(name)) == (optimizer, trainer)


@pytest.mark.parametrize("prefix", ["", "model.", "state.model.", "app.", "a.b.c."])
def test_the_prefix_that_leaves_known_names_is_found(prefix: str) -> None:
    others = ["optimizer.state.x", "train_state.step"]
    roles = assign_roles([prefix + name for name in MODEL] + others, PATTERNS)
    assert roles.prefix == prefix
    assert roles.model == {name: prefix + name for name in MODEL}
    assert (roles.optimizer, roles.other) == (["optimizer.state.x"], ["train_state.step"])


def test_names_beside_the_prefix_are_no_model() -> None:
    roles = assign_roles([*(f"app.{name}" for name in MODEL), "ema.w"], PATTERNS)
    assert (roles.prefix, roles.other) == ("app.", ["ema.w"])


def test_without_an_architecture_nothing_is_stripped() -> None:
    names = [f"model.{name}" for name in MODEL]
    roles = assign_roles(names, None)
    assert (roles.prefix, roles.model) == ("", {name: name for name in names})


def test_a_module_that_is_called_like_training_state_is_model() -> None:
    patterns = PATTERNS | {"scaler.weight", "optim.*.w"}
    roles = assign_roles(["scaler.weight", "scaler.bias", "optim.0.w"], patterns)
    assert (list(roles.model), roles.optimizer, roles.other) == (["scaler.weight", "optim.0.w"], [], ["scaler.bias"])


def test_names_nobody_knows_keep_their_prefix() -> None:
    assert assign_roles(["x.y.z"], PATTERNS).prefix == ""


def test_a_given_prefix_counts_without_an_architecture() -> None:
    roles = assign_roles(["m.a", "m.b", "c"], None, "m.")
    assert (roles.model, roles.other) == ({"a": "m.a", "b": "m.b"}, ["c"])


def test_a_prefix_that_no_name_has() -> None:
    with pytest.raises(InputError, match=r'no tensor name begins with "x\."'):
        assign_roles(["a"], None, "x.")


@given(st.lists(st.text("ab0.mo_", min_size=1, max_size=12), unique=True), st.sampled_from([None, "", "m", "a."]))
@settings(deadline=None)
def test_no_name_is_lost(names: list[str], prefix: str | None) -> None:
    try:
        roles = assign_roles(names, PATTERNS, prefix)
    except InputError:
        return
    assert sorted([*roles.model.values(), *roles.optimizer, *roles.other]) == sorted(names)


def test_numbers_in_names_are_one_pattern() -> None:
    assert pattern_of("model.layers.31.mlp.4.w0") == "model.layers.*.mlp.*.w0"
    assert pattern_of("0.a.1") == "*.a.*"
    assert pattern_of("w1.1x") == "w1.1x"


OPTIMIZER = [
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "optimizer", "optimizers",
    "optim", "optimizer_state_dict", "optimizer_states",
]  # fmt: skip
TRAINER = [
    "train_state", "lr_scheduler", "lr_schedulers", "scheduler", "sched", "dataloader", "rng", "rng_state",
    "rng_states", "loops", "callbacks", "step", "epoch", "iteration", "trainer", "scaler", "ema_optimizer",
]  # fmt: skip
GRADIENTS = ["grad", "grads", "gradients", "main_grad"]


@pytest.mark.parametrize("container", ["", "state.", "app.", "checkpoint.", "training."])
@pytest.mark.parametrize("root", [*OPTIMIZER, *TRAINER, *GRADIENTS, "model", "XX", "layers"])
def test_roots_of_state_are_known_alone_and_in_containers(root: str, container: str) -> None:
    for name in (f"{container}{root}", f"{container}{root}.model.norm.weight"):
        assert is_optimizer(name) is (root in OPTIMIZER)
        assert is_trainer_state(name) is (root in TRAINER)
    assert is_state_prefix(f"a.{root}.b") is (root in OPTIMIZER + TRAINER + GRADIENTS)
    assert not is_optimizer(f"other.{root}.x") and not is_trainer_state(f"other.{root}.x")
    assert not is_optimizer(f"{root.upper()}.x") and not is_trainer_state(f"{root.upper()}.x")


def test_an_architecture_knows_nothing_but_its_patterns_by_default() -> None:
    known = KnownNames(frozenset({"a.*.weight"}))
    assert (known.base_prefix, known.optional_patterns, known.layer_counts) == ("", frozenset(), {})


def test_what_was_asked_is_no_part_of_an_architecture() -> None:
    asked, other = (KnownNames(frozenset({"a.*.weight", "b.LayerNorm.weight"})) for _ in range(2))
    assert asked.known_name("a.3.weight") == "a.3.weight" and asked.known_name("a.weight") is None
    assert asked.known_name("b.LayerNorm.gamma") == "b.LayerNorm.weight"
    assert asked == other
