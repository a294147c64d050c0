"""A checkpoint of one class beside the config of another: judged as transformers judges it while it loads."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.model_view.config_check import match_config
from ckptx.model_view.config_match import ConfigMatch
from ckptx.model_view.view import view_model

# Equal sizes, so that only names tell the classes from each other.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


class Sibling(NamedTuple):
    """A class of text models, and what its config says beside the sizes."""

    class_name: str
    changes: dict[str, Any] = {}  # noqa: RUF012 (not changed)


SIBLINGS: dict[str, Sibling] = {
    "llama": Sibling("LlamaForCausalLM"),
    "llama with biases": Sibling("LlamaForCausalLM", {"attention_bias": True}),
    "llama with biases in its MLP": Sibling("LlamaForCausalLM", {"mlp_bias": True}),
    "llama as a classifier": Sibling("LlamaForSequenceClassification"),
    "llama as a tagger": Sibling("LlamaForTokenClassification"),
    "mistral": Sibling("MistralForCausalLM"),
    "qwen2": Sibling("Qwen2ForCausalLM"),
    "qwen3": Sibling("Qwen3ForCausalLM"),
    "qwen3 with biases": Sibling("Qwen3ForCausalLM", {"attention_bias": True}),
    "gemma": Sibling("GemmaForCausalLM"),
    "gemma2": Sibling("Gemma2ForCausalLM"),
    "gemma3": Sibling("Gemma3ForCausalLM"),
    "mixtral": Sibling("MixtralForCausalLM"),
    "qwen2 moe": Sibling("Qwen2MoeForCausalLM"),
    "qwen3 moe": Sibling("Qwen3MoeForCausalLM"),
    "olmo2": Sibling("Olmo2ForCausalLM"),
    "stablelm": Sibling("StableLmForCausalLM"),
    "stablelm with norms": Sibling("StableLmForCausalLM", {"qk_layernorm": True}),
    "starcoder2": Sibling("Starcoder2ForCausalLM"),
    "starcoder2 without biases": Sibling("Starcoder2ForCausalLM", {"use_bias": False}),
    "granite": Sibling("GraniteForCausalLM"),
    "smollm3": Sibling("SmolLM3ForCausalLM"),
}
PAIRS = list(permutations(SIBLINGS, 2))
TIED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "llama as a classifier", "llama as a tagger")


def model_of(sibling: Sibling, **changes: Any) -> Any:
    """The class with small sizes and weights of its own."""
    torch.manual_seed(0)
    cls = getattr(transformers, sibling.class_name)
    model = cls(cls.config_class(**{**SIZES, **sibling.changes, **changes}))
    model.config.architectures = [sibling.class_name]
    return model


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Every sibling as `save_pretrained` writes it, by name and whether its embeddings are tied."""
    found = {}
    for is_tied in (False, True):
        for name, sibling in SIBLINGS.items():
            if not is_tied or name in TIED:
                found[name, is_tied] = tmp_path_factory.mktemp("sibling")
                model_of(sibling, tie_word_embeddings=is_tied).save_pretrained(found[name, is_tied])
    return found


@contextlib.contextmanager
def beside(weights: Path, config: Path, at: Path) -> Iterator[Path]:
    """The weights of one checkpoint and the config of another."""
    at.mkdir()
    shutil.copy(weights / "model.safetensors", at)
    shutil.copy(config / "config.json", at)
    yield at
    shutil.rmtree(at)


def judged_by_transformers(place: Path, class_name: str) -> dict[str, Any]:
    """What the class misses, does not expect and cannot fit in; empty where it loads the whole checkpoint."""
    with contextlib.suppress(RuntimeError):  # of experts that do not go together
        _, report = getattr(transformers, class_name).from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True
        )
        return {key: value for key, value in report.items() if value}
    return {"raises": True}


def judged(place: Path) -> ConfigMatch:
    """What ckptx says of it."""
    header = json.loads(_header(place / "model.safetensors"))
    tensors = {
        name: TensorEntry(name, DTYPES_BY_NAME[row["dtype"]], shape, (Chunk(full_region(shape), name, 0, 8),))
        for name, row in header.items()
        if name != "__metadata__"
        for shape in [tuple(row["shape"])]
    }
    config = json.loads((place / "config.json").read_text())
    return match_config(view_model(Catalog(place, "huggingface", tensors, config=config)))


def _header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", SIBLINGS)
def test_a_config_fits_exactly_where_transformers_loads_everything(
    places: dict[tuple[str, bool], Path], config: str, tmp_path: Path
) -> None:
    """Every pair: whatever transformers misses, or does not expect, is a misfit, and nothing else is."""
    for weights in SIBLINGS:
        with beside(places[weights, False], places[config, False], tmp_path / "pair") as place:
            report = judged_by_transformers(place, SIBLINGS[config].class_name)
            fit = judged(place)
            assert bool(fit.mismatches) == bool(report), (weights, config, report, fit.mismatches[:3])
            if weights == config:
                assert not fit.mismatches and not fit.extras
            for name in report.get("unexpected_keys", ()):
                assert name in {each.name for each in fit.mismatches} or len(fit.mismatches) > 0


@pytest.mark.parametrize("config", TIED)
def test_tied_embeddings_hide_no_other_class(places: dict[tuple[str, bool], Path], config: str, tmp_path: Path) -> None:
    """A classifier stores no head of a language model, and a tied language model stores none either."""
    for weights in TIED:
        with beside(places[weights, True], places[config, True], tmp_path / "pair") as place:
            report = judged_by_transformers(place, SIBLINGS[config].class_name)
            fit = judged(place)
            assert bool(fit.mismatches) == bool(report), (weights, config, report, fit.mismatches[:3])


def test_there_are_pairs_of_both_kinds(places: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    """Mistral and Llama have the same names, so that both answers occur."""
    with beside(places["mistral", False], places["llama", False], tmp_path / "pair") as place:
        assert not judged(place).mismatches
    assert len(PAIRS) == len(SIBLINGS) * (len(SIBLINGS) - 1)
