"""Truth tables of the tie flag, for config classes that are plain functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptx.architecture.tie_flags import UnmeasurableFlagError, config_tree, find_config_path, measure_flag

NESTED = [("a",), ("b",), ("c",)]


def test_more_than_three_keys_are_refused_by_name() -> None:
    def build(values: dict[str, Any]) -> SimpleNamespace:
        flags = [values.get("tie_word_embeddings")]
        flags += [(values.get(name) or {}).get("tie_word_embeddings") for (name,) in NESTED]
        return SimpleNamespace(tie_word_embeddings=any(flags))

    with pytest.raises(UnmeasurableFlagError) as caught:
        measure_flag(build, {}, (), NESTED)
    assert str(caught.value) == (
        "its tied weights depend on 4 config keys (tie_word_embeddings, a.tie_word_embeddings, b.tie_word_embeddings, "
        "c.tie_word_embeddings), and ckptx supports at most 3; change the config class so that it reads fewer of them"
    )


def test_a_class_that_requires_the_key_is_refused() -> None:
    def build(values: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(tie_word_embeddings=values["tie_word_embeddings"])

    with pytest.raises(
        UnmeasurableFlagError, match="from a config without tie_word_embeddings; give the key a default"
    ):
        measure_flag(build, {}, (), [])


class Nested:
    """A config with one nested config, to any depth."""

    sub_configs = ("inner",)

    def __init__(self, depth: int) -> None:
        if depth:
            self.inner = Nested(depth - 1)

    def to_dict(self) -> dict[str, Any]:
        return {}


def test_nested_configs_are_read_to_a_depth_of_five() -> None:
    assert [path for path, _ in config_tree(Nested(9))] == [("inner",) * depth for depth in range(6)]


def test_a_config_that_is_not_in_the_tree_has_the_path_of_one_of_its_type_or_of_the_root() -> None:
    root = SimpleNamespace(to_dict=dict, sub_configs=("inner",), inner=Nested(1))
    tree = list(config_tree(root))
    assert find_config_path(root.inner.inner, tree) == ("inner", "inner")
    assert find_config_path(Nested(0), tree) == ("inner",)
    assert find_config_path(object(), tree) == ()
