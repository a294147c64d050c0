"""Megatron's names of families that Megatron Bridge maps, and that megatron-core builds on a GPU only.

The expected names and values are those of Bridge's mappings, written out here in torch operations:

    MiniMaxM2ForCausalLM     models/minimax_m2/minimax_m2_bridge.py
    HYV3ForCausalLM          models/hy_v3/hy_v3_bridge.py
    ExaoneMoeForCausalLM     models/exaone/exaone_moe/exaone_moe_bridge.py
    Exaone4ForCausalLM       models/exaone/exaone4/exaone4_bridge.py
    GlmMoeDsaForCausalLM     models/glm_moe_dsa/glm5_bridge.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptx
from ckptx.errors import CkptxError
from tests.support.megatron_layout import group_rows
from tests.support.torch_dcp import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HIDDEN, FFN, EXPERT_FFN, EXPERTS, HEADS, KV_HEADS, HEAD, VOCABULARY = 32, 48, 24, 4, 4, 2, 8, 130
LAYERS = 3
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_FFN, "num_shared_experts": 1}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": HEADS, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Class -> model type, and settings in addition to the common ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniMaxM2ForCausalLM": (
        "minimax_m2",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": EXPERT_FFN, "rotary_dim": HEAD},
    ),
    "HYV3ForCausalLM": ("hy_v3", {**MOE, "num_experts": EXPERTS, "num_nextn_predict_layers": 2}),
    "ExaoneMoeForCausalLM": (
        "exaone_moe",
        {**MOE, "num_experts": EXPERTS, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    ),
    "Exaone4ForCausalLM": ("exaone4", {"tie_word_embeddings": True, "sliding_window": 16}),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", {**MOE, **LATENT, "num_nextn_predict_layers": 1}),
}


def config_of(class_name: str, **settings: Any) -> dict[str, Any]:
    model_type, own = FAMILIES[class_name]
    return {
        "architectures": [class_name], "model_type": model_type, "dtype": "bfloat16", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD,
        "num_key_value_heads": KV_HEADS, "intermediate_size": FFN, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "eos_token_id": 2, **own, **settings,
    }  # fmt: skip


# --- the checkpoint on the Hub


def mlp(module: str, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, Any]:
    gate, up, down = (f"{module}.{name}.weight" for name in names)
    return {gate: (width, HIDDEN), up: (width, HIDDEN), down: (HIDDEN, width)}


def attention_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the attention of a layer by name on the Hub below `self_attn`."""
    if kind == "glm_moe_dsa":
        shapes: dict[str, tuple[int, ...]] = {
            "q_a_proj.weight": (16, HIDDEN), "q_a_layernorm.weight": (16,), "q_b_proj.weight": (HEADS * 12, 16),
            "kv_a_proj_with_mqa.weight": (12, HIDDEN), "kv_a_layernorm.weight": (8,),
            "kv_b_proj.weight": (HEADS * 16, 8), "o_proj.weight": (HIDDEN, HEADS * 8),
        }  # fmt: skip
        return shapes | {
            "indexer.wq_b.weight": (32, 16), "indexer.wk.weight": (16, HIDDEN), "indexer.k_norm.weight": (16,),
            "indexer.k_norm.bias": (16,), "indexer.weights_proj.weight": (2, HIDDEN),
        }  # fmt: skip
    rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
    shapes = {f"{x}_proj.weight": (rows[x], HIDDEN) for x in "qkv"} | {"o_proj.weight": (HIDDEN, rows["q"])}
    return shapes | {f"{x}_norm.weight": (rows[x] if kind == "minimax_m2" else HEAD,) for x in "qk"}


def layer_shapes(kind: str, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder layer by name on the Hub below the layer."""
    shapes = {f"self_attn.{name}": shape for name, shape in attention_shapes(kind).items()}
    norms = ("post_attention", "post_feedforward") if kind == "exaone4" else ("input", "post_attention")
    shapes |= {f"{name}_layernorm.weight": (HIDDEN,) for name in norms}
    if kind == "exaone4" or (layer == 0 and kind != "minimax_m2"):
        return shapes | mlp("mlp", FFN)
    if kind == "minimax_m2":
        for expert in range(EXPERTS):
            shapes |= mlp(f"block_sparse_moe.experts.{expert}", EXPERT_FFN, ("w1", "w3", "w2"))
        return shapes | {
            "block_sparse_moe.gate.weight": (EXPERTS, HIDDEN),
            "block_sparse_moe.e_score_correction_bias": (EXPERTS,),
        }
    for expert in range(EXPERTS):
        shapes |= mlp(f"mlp.experts.{expert}", EXPERT_FFN)
    router, bias, shared = ROUTING[kind]
    return shapes | {router: (EXPERTS, HIDDEN), bias: (EXPERTS,)} | mlp(shared, EXPERT_FFN)


# Model type -> router, bias of each expert and shared expert on the Hub.
ROUTING = {
    "hy_v3": ("mlp.router.gate.weight", "mlp.expert_bias", "mlp.shared_mlp"),
    "exaone_moe": ("mlp.gate.weight", "mlp.e_score_correction_bias", "mlp.shared_experts"),
    "glm_moe_dsa": ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.shared_experts"),
}


def mtp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the MTP layers by name on the Hub."""
    kind, count = config["model_type"], config.get("num_nextn_predict_layers", 0)
    if kind == "exaone_moe":
        shapes: dict[str, tuple[int, ...]] = {
            f"mtp.layers.0.{name}": shape for name, shape in layer_shapes(kind, 0).items() if count
        }
        outer = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm") if count else ()
        shapes |= {f"mtp.{name}.weight": (HIDDEN,) for name in outer}
        return shapes | ({"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)} if count else {})
    shapes = {}
    for layer in range(LAYERS, LAYERS + count):
        norms = ("enorm", "hnorm", "final_layernorm" if kind == "hy_v3" else "shared_head.norm")
        own = layer_shapes(kind, layer) | {f"{name}.weight": (HIDDEN,) for name in norms}
        own["eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        if kind == "glm_moe_dsa":
            own |= {"embed_tokens.weight": (VOCABULARY, HIDDEN), "shared_head.head.weight": (VOCABULARY, HIDDEN)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def save_model(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Save a model with random weights, its MTP layers included; return the weights."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        own = layer_shapes(config["model_type"], layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes |= mtp_shapes(config)
    generator = torch.Generator().manual_seed(11)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    for name in weights:
        if name.endswith(("correction_bias", "expert_bias", "weights_proj.weight")):
            weights[name] = weights[name].float()
        if name.endswith(".shared_head.head.weight"):
            weights[name] = weights["lm_head.weight"].clone()
        if name.endswith(".embed_tokens.weight") and name.startswith("model.layers."):
            weights[name] = weights["model.embed_tokens.weight"].clone()
    path.mkdir()
    write(path, config, weights)
    return weights


def write(path: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, path / "model.safetensors", {"format": "pt"})


# --- the mappings of Megatron Bridge


def megatron_attention(own: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the attention of a layer, with its norm, by Megatron's name below the layer."""
    found = {"self_attention.linear_proj.weight": own["self_attn.o_proj.weight"]}
    if kind == "glm_moe_dsa":
        names = {
            "input_layernorm.weight": "input_layernorm.weight",
            "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
            "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
            "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
            "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
            "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        }
        if "self_attn.indexer.wk.weight" in own:
            indexer = "self_attention.core_attention.indexer"
            names |= {
                f"{indexer}.linear_wq_b.weight": "self_attn.indexer.wq_b.weight",
                f"{indexer}.linear_wk.weight": "self_attn.indexer.wk.weight",
                f"{indexer}.k_norm.weight": "self_attn.indexer.k_norm.weight",
                f"{indexer}.k_norm.bias": "self_attn.indexer.k_norm.bias",
                f"{indexer}.linear_weights_proj.weight": "self_attn.indexer.weights_proj.weight",
            }
        return found | {megatron: own[hub] for megatron, hub in names.items()}
    if kind == "exaone4":
        found["self_attention.linear_proj.post_layernorm.weight"] = own["post_attention_layernorm.weight"]
    else:
        found["self_attention.linear_qkv.layer_norm_weight"] = own["input_layernorm.weight"]
    q, k, v = (own[f"self_attn.{x}_proj.weight"] for x in "qkv")
    found["self_attention.linear_qkv.weight"] = group_rows(q, k, v, KV_HEADS)
    return found | {f"self_attention.{x}_layernorm.weight": own[f"self_attn.{x}_norm.weight"] for x in "qk"}


def megatron_layer(own: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the tensors of a decoder layer by Megatron's name below the layer, from those on the Hub."""
    found = megatron_attention(own, kind)
    if "mlp.gate_proj.weight" in own:
        found["mlp.linear_fc1.weight"] = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
        found["mlp.linear_fc2.weight"] = own["mlp.down_proj.weight"]
        if kind == "exaone4":
            found["mlp.linear_fc2.post_layernorm.weight"] = own["post_feedforward_layernorm.weight"]
        else:
            found["mlp.linear_fc1.layer_norm_weight"] = own["post_attention_layernorm.weight"]
        return found
    found["pre_mlp_layernorm.weight"] = own["post_attention_layernorm.weight"]
    if kind == "minimax_m2":
        moe, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
        found["mlp.router.weight"] = own["block_sparse_moe.gate.weight"]
        found["mlp.router.expert_bias"] = own["block_sparse_moe.e_score_correction_bias"]
    else:
        moe, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
        router, bias, shared = ROUTING[kind]
        found["mlp.router.weight"], found["mlp.router.expert_bias"] = own[router], own[bias]
        found["mlp.shared_experts.linear_fc1.weight"] = torch.cat(
            [own[f"{shared}.gate_proj.weight"], own[f"{shared}.up_proj.weight"]]
        )
        found["mlp.shared_experts.linear_fc2.weight"] = own[f"{shared}.down_proj.weight"]
    experts = [f"{moe}.experts.{expert}" for expert in range(EXPERTS)]
    found["mlp.experts.experts.linear_fc1.weight"] = torch.stack(
        [torch.cat([own[f"{each}.{gate}.weight"], own[f"{each}.{up}.weight"]]) for each in experts]
    )
    found["mlp.experts.experts.linear_fc2.weight"] = torch.stack([own[f"{each}.{down}.weight"] for each in experts])
    return found


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def to_megatron(
    weights: dict[str, Tensor], config: dict[str, Any], *, mtp_module: str = "mtp_model_layer"
) -> dict[str, Tensor]:
    """Return all tensors of a model by Megatron's names, with one tensor for each layer, and without padding."""
    kind = config["model_type"]
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if "lm_head.weight" in weights:
        found["output_layer.weight"] = weights["lm_head.weight"]
    for layer in range(LAYERS):
        own = below(weights, f"model.layers.{layer}.")
        found |= {f"decoder.layers.{layer}.{name}": value for name, value in megatron_layer(own, kind).items()}
    for index in range(config.get("num_nextn_predict_layers", 0)):
        if kind == "exaone_moe":
            own, outer = below(weights, "mtp.layers.0."), below(weights, "mtp.")
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        else:
            own = outer = below(weights, f"model.layers.{LAYERS + index}.")
            names = ("enorm", "hnorm", "eh_proj", "final_layernorm" if kind == "hy_v3" else "shared_head.norm")
        prefix = f"mtp.layers.{index}"
        found |= {f"{prefix}.{mtp_module}.{name}": value for name, value in megatron_layer(own, kind).items()}
        modules = zip(("enorm", "hnorm", "eh_proj", "final_layernorm"), names, strict=True)
        found |= {f"{prefix}.{name}.weight": outer[f"{hub}.weight"] for name, hub in modules}
    return found


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
