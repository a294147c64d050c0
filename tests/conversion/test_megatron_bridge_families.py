"""Megatron's names of families that Megatron Bridge maps: both directions, byte for byte, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import ckptx
from ckptx.errors import CkptxError
from tests.support.megatron_bridge_families import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    config_of,
    save_model,
    to_megatron,
    write,
)
from tests.support.torch_dcp import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# --- both directions


@pytest.mark.parametrize("class_name", FAMILIES)
def test_a_family_is_written_under_the_names_of_the_bridge_and_comes_back(class_name: str, tmp_path: Path) -> None:
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    report = ckptx.convert(
        "to-megatron", tmp_path / "hf", tmp_path / "out", pad_vocab_to_multiple_of=1, layers="separate"
    )
    copies = {name for name in weights if name.endswith((".shared_head.head.weight", "3.embed_tokens.weight"))}
    assert report.exit == 0 and {each["name"] for each in report.dropped} == copies
    expected = to_megatron(weights, config)
    found = load(tmp_path / "out" / "release")
    # The norm before experts has a second name, which Megatron uses without TransformerEngine.
    norms = {name for name in found if name.endswith("mlp.linear_fc1.layer_norm_weight")} - expected.keys()
    assert all(
        torch.equal(found[name], found[name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")])
        for name in norms
    )
    assert_equal({name: value for name, value in found.items() if name not in norms}, expected)

    assert ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back").exit == 0
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
    assert ckptx.verify(tmp_path / "hf", tmp_path / "out", strict=True).exit == 0


@pytest.mark.parametrize("mtp_module", ["mtp_model_layer", "transformer_layer"])
@pytest.mark.parametrize("class_name", FAMILIES)
def test_what_the_bridge_saves_becomes_the_model_on_the_hub(class_name: str, mtp_module: str, tmp_path: Path) -> None:
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    tensors = to_megatron(weights, config, mtp_module=mtp_module)
    dcp.save(tensors, checkpoint_id=tmp_path / "megatron")
    report = ckptx.convert("to-hf", tmp_path / "megatron", tmp_path / "out", base=tmp_path / "hf")
    assert report.ledger["written"] == report.ledger["source"] == len(tensors)
    assert_equal(dict(load_file(tmp_path / "out" / "model.safetensors")), weights)


@pytest.mark.parametrize("class_name", ["MiniMaxM2ForCausalLM", "Exaone4ForCausalLM"])
def test_layers_with_equal_tensors_are_stacked(class_name: str, tmp_path: Path) -> None:
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", pad_vocab_to_multiple_of=1)
    assert report.megatron is not None and report.megatron["layers"] == "stacked"
    found = load(tmp_path / "out" / "release")
    separate = to_megatron(weights, config)
    for name in {each.split(".", 3)[3] for each in separate if each.startswith("decoder.layers.")}:
        layers = [separate[f"decoder.layers.{layer}.{name}"] for layer in range(LAYERS)]
        assert torch.equal(found[f"decoder.layers.{name}"], torch.stack(layers))
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


@pytest.mark.parametrize("class_name", [name for name in FAMILIES if name != "Exaone4ForCausalLM"])
def test_it_is_resharded_from_megatron(class_name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of(class_name, num_nextn_predict_layers=0))
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "megatron")
    assert ckptx.reshard(tmp_path / "megatron", tmp_path / "tp2", tp=2, pp=2, to="dcp").exit == 0
    ckptx.convert("to-hf", tmp_path / "tp2", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_norms_of_latent_attention_are_read_as_parts_of_linear_layers(tmp_path: Path) -> None:
    """Bridge maps both names: those of the layer with an indexer, and of plain latent attention."""
    config = config_of("GlmMoeDsaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    tensors = {
        name.replace("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight").replace(
            "kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight"
        ): value
        for name, value in to_megatron(weights, config).items()
    }
    assert "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight" in tensors
    dcp.save(tensors, checkpoint_id=tmp_path / "megatron")
    ckptx.convert("to-hf", tmp_path / "megatron", tmp_path / "out", base=tmp_path / "hf")
    assert_equal(dict(load_file(tmp_path / "out" / "model.safetensors")), weights)


def test_layers_that_share_an_indexer_have_none(tmp_path: Path) -> None:
    """The check of the config expects an indexer in every layer."""
    config = config_of("GlmMoeDsaForCausalLM", indexer_types=["full", "full", "shared"])
    weights = save_model(tmp_path / "hf", config)
    weights = {
        name: value for name, value in weights.items() if not name.startswith("model.layers.2.self_attn.indexer")
    }
    write(tmp_path / "hf", config, weights)
    with pytest.raises(CkptxError, match=r"model\.layers\.2\.self_attn\.indexer.* pass --allow-config-mismatch"):
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    ckptx.convert(
        "to-megatron", tmp_path / "hf", tmp_path / "out", allow_config_mismatch=True, pad_vocab_to_multiple_of=1
    )
    found = load(tmp_path / "out" / "release")
    assert [name for name, value in to_megatron(weights, config).items() if not torch.equal(found[name], value)] == []
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back", allow_config_mismatch=True)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


@pytest.mark.parametrize("class_name", FAMILIES)
def test_a_model_that_transformers_saved_comes_back(class_name: str, tmp_path: Path) -> None:
    import transformers

    settings = {key: value for key, value in config_of(class_name).items() if key not in ("architectures", "dtype")}
    config = transformers.AutoConfig.for_model(**settings)
    getattr(transformers, class_name)(config).save_pretrained(tmp_path / "hf")
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert report.exit == 0 and report.dropped == []
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


# --- what the mappings do not cover: one line each, and no output

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def add(**shapes: tuple[int, ...]) -> Change:
    """Add tensors; `__` in a key is a dot."""
    return lambda weights, _: weights.update(
        {name.replace("__", "."): torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    )


def with_biases(flag: str, names: tuple[str, ...]) -> Change:
    """Add the biases that a class has with this flag in the config, except for those of routed experts."""

    def change(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        config[flag] = True
        for name in [each for each in weights if each.endswith(tuple(f"{name}.weight" for name in names))]:
            if ".experts." not in name:
                weights[name.replace(".weight", ".bias")] = torch.zeros(len(weights[name])).bfloat16()

    return change


def with_settings(**settings: Any) -> Change:
    return lambda _, config: config.update(settings)


def untied(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = False
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


def a_second_mtp_layer(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["num_nextn_predict_layers"] = 2
    weights["mtp.layers.1.input_layernorm.weight"] = torch.zeros(HIDDEN).bfloat16()


NORM = (HIDDEN,)
REFUSED: dict[str, tuple[str, Change, str]] = {
    "biases of attention": (
        "HYV3ForCausalLM",
        with_biases("attention_bias", ("q_proj", "k_proj", "v_proj", "o_proj")),
        "_proj.bias",
    ),
    "biases of MLPs": (
        "HYV3ForCausalLM",
        with_biases("mlp_bias", ("gate_proj", "up_proj", "down_proj")),
        "_proj.bias",
    ),
    "a copy of the embedding in an MTP layer": (
        "HYV3ForCausalLM",
        add(model__layers__3__embed_tokens__weight=(VOCABULARY, HIDDEN)),
        "model.layers.3.embed_tokens.weight",
    ),
    "MTP layers that the config does not declare": (
        "HYV3ForCausalLM",
        with_settings(num_nextn_predict_layers=0),
        "model.layers.3.",
    ),
    "an MTP layer too many": (
        "HYV3ForCausalLM",
        with_settings(num_nextn_predict_layers=1),
        "model.layers.4.",
    ),
    "an MTP module that the config does not declare": (
        "ExaoneMoeForCausalLM",
        with_settings(num_nextn_predict_layers=0),
        "mtp.",
    ),
    "a second MTP layer": (
        "ExaoneMoeForCausalLM",
        a_second_mtp_layer,
        "mtp.layers.1.input_layernorm.weight",
    ),
    "experts in an MTP layer": (
        "ExaoneMoeForCausalLM",
        add(mtp__layers__0__mlp__gate__weight=(EXPERTS, HIDDEN)),
        "mtp.layers.0.mlp.gate.weight",
    ),
    "an untied output head": ("Exaone4ForCausalLM", untied, "lm_head.weight"),
    "an MTP layer of MiniMax": (
        "MiniMaxM2ForCausalLM",
        add(model__mtp__0__norm__weight=NORM),
        "model.mtp.0.norm.weight",
    ),
    "biases of latent attention": (
        "GlmMoeDsaForCausalLM",
        with_biases("attention_bias", ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")),
        ".bias",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    class_name, change, message = REFUSED[case]
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    change(weights, config)
    write(tmp_path / "hf", config, weights)
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    text = str(caught.value)
    assert message in text and ("no counterpart" in text or "belongs to layer" in text) and "\n" not in text
    assert caught.value.exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("HYV3ForCausalLM", "decoder.layers.0.self_attention.linear_qkv.bias"),
        ("HYV3ForCausalLM", "mtp.layers.2.enorm.weight"),
        ("MiniMaxM2ForCausalLM", "mtp.layers.0.enorm.weight"),
        ("MiniMaxM2ForCausalLM", "decoder.layers.0.mlp.shared_experts.linear_fc2.weight"),
        ("ExaoneMoeForCausalLM", "mtp.layers.1.mtp_model_layer.mlp.linear_fc2.weight"),
        ("ExaoneMoeForCausalLM", "mtp.layers.0.mtp_model_layer.mlp.router.weight"),
        ("Exaone4ForCausalLM", "output_layer.weight"),
        ("Exaone4ForCausalLM", "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"),
        ("GlmMoeDsaForCausalLM", "decoder.layers.0.self_attention.core_attention.indexer.linear_wq.weight"),
        ("GlmMoeDsaForCausalLM", "decoder.layers.0.self_attention.linear_qkv.weight"),
    ],
)
def test_a_tensor_that_the_bridge_does_not_map_is_refused(class_name: str, name: str, tmp_path: Path) -> None:
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    tensors = {**to_megatron(weights, config), name: torch.zeros(VOCABULARY, HIDDEN)}
    dcp.save(tensors, checkpoint_id=tmp_path / "megatron")
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-hf", tmp_path / "megatron", tmp_path / "out", base=tmp_path / "hf")
    assert f'"{name}" has no counterpart in {class_name}' in str(caught.value) and caught.value.exit_code == 4
    assert not (tmp_path / "out").exists()


# Families of Bridge with arithmetic, transposed or reshaped tensors, other heads in some layers, or names of their own.
OTHERS = (
    "Ernie4_5_MoeForCausalLM", "FalconH1ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM",
    "GptOssForCausalLM", "MiMoV2FlashForCausalLM", "NemotronForCausalLM", "NemotronHForCausalLM",
    "Qwen3NextForCausalLM", "Step3p5ForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("class_name", OTHERS)
def test_other_families_are_refused_by_name(class_name: str, tmp_path: Path) -> None:
    config = config_of("Exaone4ForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    dcp.save(to_megatron(weights, config), checkpoint_id=tmp_path / "megatron")
    write(tmp_path / "hf", {**config, "architectures": [class_name], "model_type": "llama"}, weights)
    with pytest.raises(
        CkptxError, match=f"^{class_name}: the tensors have Megatron's names, which are mapped"
    ) as caught:
        ckptx.convert("to-hf", tmp_path / "megatron", tmp_path / "out", base=tmp_path / "hf")
    assert caught.value.exit_code == 4 and not (tmp_path / "out").exists()
