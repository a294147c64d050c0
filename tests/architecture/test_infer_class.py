"""The class of a config that names none: found by the names of the tensors, for every recipe and other heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptx
from ckptx.architecture.infer_class import infer_class
from tests.support.checkpoint_writers import llama, write_dcp, write_hf
from tests.support.models import EVERY, Recipe
from tests.support.slow import slow_but

FAST = ("llama-tied", "gpt2", "mixtral", "t5", "gemma3-vlm", "paligemma", "qwen3-moe", "bert-pretraining", "whisper")
SLOW = slow_but(EVERY, FAST)
# Classes whose tensors are those of another class of the model type, name by name: what is taken for them.
SAME_NAMES = {"MistralForTokenClassification": "MistralForSequenceClassification"}
LLAMA = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def names_of(recipe: Recipe) -> tuple[Any, dict[str, Any], set[str]]:
    """The model without storage, its config as a dict without a class, and the names of its tensors once each."""
    with torch.device("meta"):
        model = recipe.model()
    config = model.config.to_dict()
    config.pop("architectures", None)
    tied = {target for target in (model.all_tied_weights_keys or {}) if model.config.get_text_config() is not None}
    declared = getattr(model.config, "tie_word_embeddings", False)
    names = set(model.state_dict()) - (tied if declared else set())
    return model, config, names


@pytest.mark.parametrize("name", SLOW)
def test_the_class_of_a_model_is_found_by_its_names(name: str) -> None:
    model, config, names = names_of(EVERY[name])
    wanted = type(model).__name__
    for prefix in ("", "model.", "app.model."):
        found = infer_class(config, {prefix + each for each in names})
        assert found is not None
        assert found.class_name == SAME_NAMES.get(wanted, wanted), found.note


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SLOW)
def test_the_names_of_the_base_model_alone_are_those_of_the_base_class(name: str) -> None:
    model, config, _ = names_of(EVERY[name])
    base = model.base_model
    if base is model:
        pytest.skip("is a base model")
    if type(base).__name__ not in {each for each in dir(transformers) if each.endswith("Model")}:
        pytest.skip("its base model is no class of its own")
    found = infer_class(config, base.state_dict().keys())
    assert found is not None
    assert found.class_name == type(base).__name__, found.note


@pytest.mark.parametrize(
    ("config_class", "model_class"),
    [
        ("LlamaConfig", "LlamaForSequenceClassification"), ("BertConfig", "BertForSequenceClassification"),
        ("BertConfig", "BertForQuestionAnswering"), ("Qwen3Config", "Qwen3ForSequenceClassification"),
        ("LlamaConfig", "LlamaForQuestionAnswering"), ("RobertaConfig", "RobertaForSequenceClassification"),
    ],
)  # fmt: skip
def test_a_classifier_is_told_from_a_language_model(config_class: str, model_class: str) -> None:
    config = getattr(transformers, config_class)(num_hidden_layers=2)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    found = infer_class({**config.to_dict(), "architectures": None}, model.state_dict().keys())
    assert found is not None
    assert model_class == found.class_name or model_class in found.note


@pytest.mark.parametrize(
    ("tie", "head", "wanted"),
    [
        (False, True, "LlamaForCausalLM"), (True, True, "LlamaForCausalLM"), (True, False, "LlamaForCausalLM"),
        (False, False, "LlamaModel"),
    ],
)  # fmt: skip
def test_a_head_is_there_or_tied_or_there_is_none(tie: bool, head: bool, wanted: str) -> None:
    found = infer_class({**LLAMA, "tie_word_embeddings": tie}, llama(head=head))
    assert found is not None
    assert found.class_name == wanted


@pytest.mark.parametrize("model_type", ["nonsense", "", None])
def test_an_unknown_model_type_tells_nothing(model_type: str | None) -> None:
    assert infer_class({"model_type": model_type}, llama()) is None


def test_names_of_another_model_tell_nothing() -> None:
    assert infer_class(LLAMA, ["a.weight", "b.weight", "model.norm.weight"]) is None


def _prefixed(prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in llama().items()}


@pytest.mark.parametrize("prefix", ["", "model.", "state.model."])
@pytest.mark.parametrize(
    "run",
    [
        lambda here: ckptx.convert("dcp2hf", here / "dcp", here / "out"),
        lambda here: ckptx.convert("dcp2hf", here / "dcp", here / "out", base=here / "base"),
        lambda here: ckptx.reshard(here / "dcp", here / "out", tp=2, to="safetensors"),
    ],
    ids=["dcp2hf", "dcp2hf --base", "reshard"],
)
def test_a_prefix_is_stripped_without_the_name_of_the_class(
    tmp_path: Path, prefix: str, run: Callable[[Path], Any]
) -> None:
    write_dcp(tmp_path / "dcp", _prefixed(prefix), config=LLAMA)
    write_hf(tmp_path / "base", llama(), config=LLAMA)
    report = run(tmp_path)
    assert any("assuming LlamaForCausalLM" in each for each in report.notes)
    assert report.architecture["class"] == "LlamaForCausalLM"
    names = set(ckptx.open_checkpoint(tmp_path / "out").tensors)
    assert names == set(llama())
