"""Values of the wrong kind in ``config.json``: each is refused by the name of its key, at every level."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.architecture.class_table import lookup
from ckptx.architecture.configs import read_flag
from ckptx.architecture.expressions import Scope, keys_of
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.model_files import class_names
from ckptx.errors import InputError
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf

# What JSON can hold, and is no boolean.
NOT_FLAGS = st.one_of(
    st.none(), st.integers(), st.floats(allow_nan=False), st.text(), st.lists(st.booleans()),
    st.dictionaries(st.text(), st.booleans()),
)  # fmt: skip
SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


@lru_cache
def flag_paths() -> list[tuple[str, ...]]:
    """Every key that decides a tie, in whatever class; reading what is known of all of them takes a second."""
    known = [lookup(name) for name in class_names()]
    return sorted({path for each in known if each is not None for pair in each.ties for path in pair.flag.paths})


def placed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A config with nothing but one key."""
    for key in reversed(path):
        value = {key: value}
    return dict(value)


@given(value=NOT_FLAGS)
@settings(deadline=None)
def test_a_flag_is_true_or_false_or_absent(value: Any) -> None:
    for path in flag_paths():
        for flag in (True, False):
            assert read_flag(placed(path, flag), path) is flag
        assert read_flag({}, path) is None
        with pytest.raises(InputError, match=f"config.json: {'.'.join(path)} is .* and must be true or false"):
            read_flag(placed(path, value), path)


@given(value=st.one_of(st.text(), st.integers(), st.lists(st.integers())))
def test_a_config_on_the_way_to_a_flag_is_an_object(value: Any) -> None:
    path = ("text_config", "tie_word_embeddings")
    with pytest.raises(InputError, match=r"config.json: text_config is .* and must be an object"):
        read_flag({"text_config": value}, path)


@pytest.mark.parametrize(
    "class_name",
    ["LlamaForCausalLM", "T5ForConditionalGeneration", "Gemma3ForConditionalGeneration", "Lfm2ForCausalLM"],
)
@pytest.mark.parametrize("value", ["false", "true", 0, 1, [], None], ids=repr)
def test_no_class_takes_another_value_for_its_flag(class_name: str, value: Any) -> None:
    known = lookup(class_name)
    assert known is not None
    for pair in known.ties:
        for path in pair.flag.paths:
            config = placed(path, value)
            for ask in (pair.flag.is_set, pair.flag.explain):
                with pytest.raises(InputError, match=".".join(path)):
                    ask(config)


@pytest.mark.parametrize("value", ["2", "", "auto", 2.0, 0.5], ids=repr)
@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "Qwen2_5_VLForConditionalGeneration", "FalconForCausalLM"])
def test_a_number_is_no_text_and_no_fraction(class_name: str, value: Any) -> None:
    known = lookup(class_name)
    assert known is not None
    for key in sorted({key for each in known.structure.expressions() for key in keys_of(each)}):
        scope = Scope(placed(tuple(key.split(".")), value))
        with pytest.raises(InputError, match=f"config.json: {key} is .* and must be a whole number"):
            scope.value(key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", "false"), ("tie_word_embeddings", 1), ("tie_word_embeddings", None),
        ("num_attention_heads", "2"), ("num_hidden_layers", "2"), ("num_hidden_layers", 2.0),
        ("architectures", "LlamaForCausalLM"), ("architectures", [1]), ("architectures", {}), ("model_type", 7),
        ("text_config", []), ("auto_map", ["x"]),
    ],
)  # fmt: skip
def test_every_command_that_reads_a_key_names_it(tmp_path: Path, key: str, value: Any) -> None:
    config = {**LLAMA, **SIZES, **HEADS, "tie_word_embeddings": True, key: value}
    write_hf(tmp_path / "hf", llama(head=False), config=config)
    write_dcp(tmp_path / "dcp", llama(head=False), config=config)
    for run in (
        lambda: ckptx.reshard(tmp_path / "hf", tmp_path / "out", tp=2),
        lambda: ckptx.reshard(tmp_path / "dcp", tmp_path / "out", tp=2),
    ):
        with pytest.raises(InputError) as caught:
            run()
        assert f"config.json: {key} is {json.dumps(value)} and must be" in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_an_empty_list_of_architectures_is_none() -> None:
    assert find_architecture({"architectures": []}) is None
    assert find_architecture({"architectures": None}) is None
