"""Numbers from ``config.json``: what is absent, what is null, and where sub-configs are read."""

from __future__ import annotations

from typing import Any

import pytest

from ckptx.architecture.expressions import Scope, evaluate, keys_of
from ckptx.architecture.structure import in_sub_config
from ckptx.errors import InputError

CONFIG: dict[str, Any] = {
    "heads": 6,
    "size": 48,
    "kv": None,
    "flag": True,
    "n_layer": 3,
    "kinds": ["a", "b"],
    "text_config": {"heads": 4, "deep": {"size": 7}},
}
SIZE = "head_dim ?? size // heads"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("12", 12),
        ("heads", 6),
        ("text_config.heads", 4),
        ("text_config.deep.size", 7),
        ("heads + 2 * size", 102),
        ("(heads + 2) * size", 384),
        ("size // heads // 2", 4),
        ("size - heads - 2", 40),
        (SIZE, 8),
        (f"2 * ({SIZE})", 16),
        ("kv ?? heads", 6),
        ("gone ?? kv ?? 5", 5),
        ("gone ?? heads + 1", 7),
        ("1 - flag", 0),
        ("#kinds ?? heads", 2),
        ("#text_config.kinds ?? heads", 6),
        ("#heads ?? 4", 4),
    ],
)
def test_expressions(expression: str, expected: int) -> None:
    assert evaluate(expression, Scope(CONFIG)) == expected


def test_an_absent_key_has_the_default_of_the_class_and_null_has_none() -> None:
    defaults = {"kv": 8, "gone": 9}
    assert evaluate("gone ?? heads", Scope(CONFIG, defaults)) == 9
    assert evaluate("kv ?? heads", Scope(CONFIG, defaults)) == 6, "null says: as many as heads"


def test_a_sub_config_that_is_absent_is_read_at_the_root() -> None:
    flat = {"heads": 6}
    assert evaluate("text_config.heads", Scope(flat)) == 6
    assert evaluate("text_config.heads", Scope(flat, {"text_config.heads": 2})) == 6
    assert evaluate("text_config.heads", Scope({}, {"text_config.heads": 2})) == 2


def test_a_sub_config_that_a_composite_makes_has_values_of_its_own() -> None:
    defaults = {"text_config.heads": 2, "!text_config.heads": 5}
    assert evaluate("text_config.heads", Scope({}, defaults)) == 5
    assert evaluate("text_config.heads", Scope({"text_config": {}}, defaults)) == 2
    assert evaluate("text_config.heads", Scope({"heads": 6}, defaults)) == 6


def test_aliases_and_a_root() -> None:
    assert evaluate("num_hidden_layers", Scope(CONFIG, aliases={"num_hidden_layers": "n_layer"})) == 3
    assert evaluate("heads", Scope(CONFIG, root=("text_config",))) == 4


def test_a_number_that_nothing_says_is_refused_by_its_key() -> None:
    with pytest.raises(InputError, match=r"config\.json: gone // heads: no number for gone"):
        evaluate("gone // heads", Scope(CONFIG))


@pytest.mark.parametrize("expression", ["n_layer // zero", "n_layer + n_layer // zero", "2 * (n_layer // zero)"])
def test_a_division_by_zero_is_named(expression: str) -> None:
    with pytest.raises(InputError, match=r"division by zero; correct the divisor") as caught:
        evaluate(expression, Scope({"n_layer": 1, "zero": 0}))
    assert "no number" not in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "missing"),
    [("gone + lost", "gone, lost"), ("gone ?? lost", "gone, lost"), ("(gone ?? heads) * lost", "lost")],
)
def test_only_keys_that_matter_are_named(expression: str, missing: str) -> None:
    with pytest.raises(InputError, match=rf"no number for {missing}; add it to config\.json"):
        evaluate(expression, Scope({"heads": 4}))


@pytest.mark.parametrize("text", ["", "heads +", "(heads", "heads)", "heads heads", "heads % 2", "+ 2", "a; b"])
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        evaluate(text, Scope(CONFIG))


def test_keys() -> None:
    assert keys_of(SIZE) == {"head_dim", "size", "heads"}
    assert in_sub_config(SIZE, "text_config") == "text_config.head_dim ?? text_config.size // text_config.heads"
    assert in_sub_config(SIZE, "") == SIZE
    assert keys_of("#kinds") == {"kinds"} and in_sub_config("#kinds", "text_config") == "#text_config.kinds"
