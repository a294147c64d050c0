"""Reading an architecture off a meta model: every form of ``_tied_weights_keys``, configs, remote code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ckptx.architecture import lookup
from ckptx.architecture.architecture import Architecture
from ckptx.architecture.introspection import meta_model
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.tied import StoredTensor, resolve_ties
from ckptx.errors import EnvironmentProblem, UnsupportedError


class TinyConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "tiny-for-tests"
    tie_word_embeddings: bool = False


class Tiny(PreTrainedModel):  # type: ignore[misc]
    config_class = TinyConfig
    base_model_prefix = "model"
    _tied_weights_keys: Any = None

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(16, 4)
        self.model.copy = nn.Embedding(16, 4)
        self.lm_head = nn.Linear(4, 16)
        self.bias = nn.Parameter(torch.zeros(16))
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens


def ties(declared: Any) -> dict[str, str]:
    cls = type("TinyForms", (Tiny,), {"_tied_weights_keys": declared})
    return dict(pair.namings[0] for pair in derive(cls).ties)


def derive(cls: type[PreTrainedModel], **config: Any) -> Architecture:
    return meta_model.derive_architecture(cls, meta_model.default_config_builder(cls), config)


HEAD = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        pytest.param(HEAD, HEAD, id="dict"),
        pytest.param(["lm_head.weight"], HEAD, id="list of transformers 4"),
        pytest.param(
            [r"lm_head\.(weight|bias)"],
            HEAD | {"lm_head.bias": "bias"},
            id="list with a regex and the bias of a head",
        ),
        pytest.param({"lm_head.weight$": "model.embed_tokens.weight$"}, HEAD, id="dict with anchors"),
        pytest.param(
            {r"heads.(?!0)\d+": "heads.0"} | HEAD,
            HEAD | {f"heads.{at}.{leaf}": f"heads.0.{leaf}" for at in (1, 2) for leaf in ("weight", "bias")},
            id="dict of regexes",
        ),
        pytest.param({"model.copy": "model.embed_tokens"}, {"model.copy.weight": HEAD["lm_head.weight"]}, id="modules"),
        pytest.param(
            {"lm_head.weight": "model.copy.weight", "model.copy.weight": "model.embed_tokens.weight"},
            HEAD | {"model.copy.weight": "model.embed_tokens.weight"},
            id="chain",
        ),
        pytest.param({"lm_head.weight": "model.gone.weight"}, HEAD, id="a source that does not exist"),
    ],
)
def test_every_form_of_tied_weights_keys(declared: Any, expected: dict[str, str]) -> None:
    found = ties(declared)
    if "modules" not in str(declared):
        found = {target: source for target, source in found.items() if target in expected}
    assert found == expected


def test_heads_that_the_class_never_ties_are_candidates_with_a_constant_flag() -> None:
    (pair,) = derive(Tiny).ties
    assert pair.namings[0] == ("lm_head.weight", "model.embed_tokens.weight")
    assert not pair.flag.is_set({"tie_word_embeddings": True})


def test_building_leaves_transformers_as_it_was() -> None:
    before = PreTrainedModel.get_expanded_tied_weights_keys
    derive(type("TinyList", (Tiny,), {"_tied_weights_keys": ["lm_head.weight"]}))
    assert PreTrainedModel.get_expanded_tied_weights_keys is before


# ----------------------------------------------------------------------------- with a real config


def test_layer_ties_come_from_the_real_config() -> None:
    config = {
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "layers_block_type": ["hybrid", "mamba", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "num_attention_heads": 4,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "tie_word_embeddings": True,
    }
    found = find_architecture(config)
    built = meta_model.introspect(config)
    assert found is not None and found.known_from == "table"
    assert built is not None and set(built.ties) == set(found.ties)
    pairs = dict(pair.namings[0] for pair in found.ties)
    layer_pairs = {t: s for t, s in pairs.items() if t.startswith("model.layers.")}
    assert layer_pairs and all(t.startswith("model.layers.3.") for t in layer_pairs)
    assert all(s.startswith("model.layers.0.") for s in layer_pairs.values())


def test_an_exchanged_text_model_is_built() -> None:
    llava = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    measured = find_architecture({**llava, "text_config": {"model_type": "mistral"}})
    assert measured is not None and measured.known_from == "table"
    gemma = find_architecture({**llava, "text_config": {"model_type": "gemma"}})
    assert gemma is not None and gemma.known_from == "meta model"
    assert gemma.ties[0].flag.is_set({}), "a Gemma text model ties by default, and Llava forwards it"
    assert not measured.ties[0].flag.is_set({})


def test_a_config_that_cannot_be_built_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"ZambaForCausalLM: transformers .* cannot build it"):
        find_architecture({"architectures": ["ZambaForCausalLM"], "model_type": "zamba", "hidden_size": "wide"})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("No module named 'mamba_ssm'", name="mamba_ssm")

    monkeypatch.setattr(meta_model, "derive_architecture", refuse)
    with pytest.raises(EnvironmentProblem, match="requires the package mamba_ssm"):
        find_architecture({"architectures": ["ZambaForCausalLM"], "model_type": "zamba"})


def test_no_torch_is_named_only_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import ckptx.architecture.introspection

    monkeypatch.delitem(sys.modules, "ckptx.architecture.introspection.meta_model")
    monkeypatch.delattr(ckptx.architecture.introspection, "meta_model")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert find_architecture({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}) is not None
    with pytest.raises(EnvironmentProblem, match=r"must be built: requires torch, .* pip install 'ckptx\[run\]'"):
        find_architecture({"architectures": ["ZambaForCausalLM"], "model_type": "zamba"})


# ---------------------------------------------------------------------------- what transformers writes

SMALL: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8},
    "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 2, "n_head": 2},
    "GPTNeoXForCausalLM": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8},
    "LlamaForCausalLM": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8},
    "MixtralForCausalLM": {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "num_local_experts": 2,
    },
    "T5ForConditionalGeneration": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2},
}


@pytest.mark.parametrize("class_name", sorted(SMALL))
@pytest.mark.parametrize("tied", [True, False])
def test_saved_files_are_recognised_and_their_ties_resolved(class_name: str, tied: bool, tmp_path: Path) -> None:
    cls: Any = meta_model.find_class(class_name)
    small = cls.config_class(vocab_size=16, tie_word_embeddings=tied, **SMALL[class_name])
    cls(small).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    header = (tmp_path / "model.safetensors").read_bytes()
    entries = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    stored = {n: StoredTensor(tuple(e["shape"]), e["dtype"]) for n, e in entries.items() if n != "__metadata__"}

    architecture = find_architecture(config)
    assert architecture is not None and architecture.known_from == "table"
    assert architecture.match_fraction(stored) == 1.0
    decisions = resolve_ties(architecture, config, stored, lambda *_: False)
    always = class_name == "T5ForConditionalGeneration"
    expected = {"tied-to-only"} if tied or always else {"undeclared"}
    assert {each.stored for each in decisions} == expected


# ------------------------------------------------------------------------------------ remote code

REMOTE = """
import pathlib
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class FarConfig(PretrainedConfig):
    model_type = "far"
    def __init__(self, hidden_size=4, tie_word_embeddings=False, **kwargs):
        self.hidden_size = hidden_size
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

class FarForCausalLM(PreTrainedModel):
    config_class = FarConfig
    base_model_prefix = "far"
    _tied_weights_keys = ["unembed.weight"]
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(8, config.hidden_size)
        self.unembed = nn.Linear(config.hidden_size, 8, bias=False)
        self.post_init()
    def get_input_embeddings(self):
        return self.embed
    def get_output_embeddings(self):
        return self.unembed
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, Any], Path]]:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "far"
    folder.mkdir()
    (folder / "modeling_far.py").write_text(REMOTE)
    config = {
        "architectures": ["FarForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_far.FarConfig",
            "AutoModelForCausalLM": "modeling_far.FarForCausalLM",
        },
        "model_type": "far",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    yield config, folder


def test_remote_code_is_not_run_unless_trusted(far: tuple[dict[str, Any], Path]) -> None:
    config, folder = far
    (folder / "modeling_far.py").write_text("raise SystemExit('executed')")
    found = find_architecture(config, config_dir=folder)
    assert found is not None and found.known_from == "suffix table"


def test_trusted_remote_code_with_a_list_of_ties_is_built(far: tuple[dict[str, Any], Path]) -> None:
    config, folder = far
    found = find_architecture(config, config_dir=folder, trust_remote_code=True)
    assert found is not None and found.known_from == "meta model"
    (pair,) = found.ties
    assert pair.namings[0] == ("unembed.weight", "embed.weight")
    assert pair.flag.is_set(config) and not pair.flag.is_set({})


def test_trusted_remote_code_that_is_not_there_is_refused(far: tuple[dict[str, Any], Path]) -> None:
    config, folder = far
    (folder / "modeling_far.py").unlink()
    with pytest.raises(UnsupportedError, match=r"put the Python file next to config\.json"):
        find_architecture(config, config_dir=folder, trust_remote_code=True)


# ------------------------------------------------------------------------------------- the search


def test_no_architectures_means_no_architecture() -> None:
    assert find_architecture({}) is None
    assert find_architecture({"architectures": []}) is None


def test_an_unknown_class_falls_to_the_suffix_table() -> None:
    found = find_architecture({"architectures": ["FutureForCausalLM"], "model_type": "future"})
    assert found is not None and found.known_from == "suffix table"


def test_a_class_name_with_other_code_is_another_class() -> None:
    own = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoModel": "modeling.DeepseekV3ForCausalLM"},
    }
    same = find_architecture({**own, "model_type": "deepseek_v3"})
    other = find_architecture({**own, "model_type": "kimi_k2"})
    assert same is not None and same.known_from == "table"
    assert other is not None and other.known_from == "suffix table"


def test_a_text_class_over_a_composite_config_reads_the_nested_flag() -> None:
    composite = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3",
        "tie_word_embeddings": True,
        "text_config": {"model_type": "gemma3_text", "tie_word_embeddings": False},
    }
    found = find_architecture(composite)
    assert found is not None and not found.ties[0].flag.is_set(composite)
    assert found.ties[0].flag.explain(composite) == "text_config.tie_word_embeddings=false (config.json)"
    own = find_architecture({**composite, "model_type": "gemma3_text", "text_config": None})
    assert own is not None and own.ties[0].flag.is_set(composite)


def test_the_search_module_does_not_import_the_builder_at_its_top() -> None:
    assert not hasattr(lookup, "meta_model")
