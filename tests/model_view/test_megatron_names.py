"""Megatron's names: the same tensors as in the Hugging Face model whose weights were laid out for Megatron."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptx
from ckptx.architecture.trainer_naming.megatron_prefixes import find_prefixes
from ckptx.errors import CkptxError
from tests.formats.stock_goldens import GOLDENS
from tests.support.megatron_layout import LOCAL_NORMS, TE_NORMS, to_megatron
from tests.support.megatron_models import MODELS, config_of, save_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIXTURES = GOLDENS.parent / "megatron"
ROWS = 32  # of the padded vocabulary


def save_megatron(path: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint with Megatron's names in one file; the format does not matter here."""
    path.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    return path


def written(path: Path) -> dict[str, Tensor]:
    """The tensors of an output."""
    return dict(load_file(path / "model.safetensors"))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# --- what megatron-core wrote


@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe"])
def test_a_checkpoint_of_megatron_core_is_the_model_that_was_laid_out(model: str, tmp_path: Path) -> None:
    hf, torch_dist = FIXTURES / model / "hf", FIXTURES / model / "torch_dist"
    report = ckptx.convert("to-hf", torch_dist, tmp_path / "out", base=hf)
    assert report.exit == 0 and report.names is not None and report.names["before"] == "megatron"
    assert_equal(written(tmp_path / "out"), written(hf))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "ckptx.json", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert report.ledger is not None and report.ledger["written"] == report.ledger["source"]
    notes = "\n".join(report.notes)
    assert "6 rows after vocab_size 26 left out of embedding.word_embeddings.weight" in notes
    assert "_extra_state of TransformerEngine left out" in notes
    assert "own names and layout" not in notes


@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe"])
def test_it_verifies_against_the_hugging_face_model(model: str) -> None:
    hf, torch_dist = FIXTURES / model / "hf", FIXTURES / model / "torch_dist"
    for pair in ((hf, torch_dist), (torch_dist, hf)):
        report = ckptx.verify(*pair, strict=True)
        assert report.exit == 0 and report.compared == len(written(hf))
    assert ckptx.diff(hf, torch_dist).exit == 0


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_it_is_resharded_under_published_names(to: str, tmp_path: Path) -> None:
    hf, torch_dist = FIXTURES / "qwen2" / "hf", FIXTURES / "qwen2" / "torch_dist"
    report = ckptx.reshard(torch_dist, tmp_path / "out", base=hf, tp=2, pp=2, to=to)
    assert report.exit == 0
    assert ckptx.verify(hf, tmp_path / "out").exit == 0
    names = ckptx.open_checkpoint(tmp_path / "out").tensors
    assert "model.layers.1.self_attn.q_proj.bias" in names
    assert not any("decoder" in name or "_extra_state" in name for name in names)
    assert not (tmp_path / "out" / "metadata.json").exists()


def test_to_dcp_has_published_names_and_no_objects(tmp_path: Path) -> None:
    hf, torch_dist = FIXTURES / "qwen3_moe" / "hf", FIXTURES / "qwen3_moe" / "torch_dist"
    assert ckptx.convert("to-dcp", torch_dist, tmp_path / "dcp", base=hf).exit == 0
    catalog = ckptx.open_checkpoint(tmp_path / "dcp")
    assert catalog.tensors.keys() == written(hf).keys() and not catalog.objects
    assert ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "hf").exit == 0
    assert_equal(written(tmp_path / "hf"), written(hf))


def test_a_training_loop_loads_it_by_the_names_of_the_model() -> None:
    from ckptx.runtime.checkpointing.reading import open_source

    model = FIXTURES / "qwen3_moe"
    config = json.loads((model / "hf" / "config.json").read_text())
    with open_source(model / "torch_dist", config=config) as source:
        assert source.tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == (2, 24, 16)


def test_inspect_checks_it_against_its_config(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "qwen3_moe" / "torch_dist", tmp_path / "src")
    shutil.copy(FIXTURES / "qwen3_moe" / "hf" / "config.json", tmp_path / "src")
    report = ckptx.inspect(tmp_path / "src")
    assert report.config_check is not None and report.config_check["mismatches"] == []
    assert "decoder.layers.1.mlp.router.weight" in ckptx.open_checkpoint(tmp_path / "src").tensors


def test_a_config_in_the_same_directory_is_a_base(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "qwen2" / "torch_dist", tmp_path / "src")
    shutil.copy(FIXTURES / "qwen2" / "hf" / "config.json", tmp_path / "src")
    assert ckptx.convert("to-hf", tmp_path / "src", tmp_path / "out").exit == 0
    assert_equal(written(tmp_path / "out"), written(FIXTURES / "qwen2" / "hf"))
    assert not (tmp_path / "out" / "common.pt").exists() and not (tmp_path / "out" / "metadata.json").exists()


# --- every family


@pytest.mark.parametrize("class_name", MODELS)
@pytest.mark.parametrize(
    ("stacked", "norms", "prefix"), [(True, TE_NORMS, ""), (False, LOCAL_NORMS, "module.")], ids=["stacked", "layers"]
)
def test_a_family_is_mapped(class_name: str, stacked: bool, norms: dict[str, str], prefix: str, tmp_path: Path) -> None:
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    tensors = to_megatron(weights, config, rows=ROWS, stacked=stacked, norms=norms, prefix=prefix)
    source = save_megatron(tmp_path / "megatron", tensors)
    assert ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf").exit == 0
    assert_equal(written(tmp_path / "out"), weights)


def test_dense_and_expert_layers_alternate(tmp_path: Path) -> None:
    config = config_of("Qwen3MoeForCausalLM", mlp_only_layers=[0])
    weights = save_model(tmp_path / "hf", config)
    weights = {name: value for name, value in weights.items() if not name.startswith("model.layers.0.mlp.")}
    for name, shape in (("gate", (24, 16)), ("up", (24, 16)), ("down", (16, 24))):
        weights[f"model.layers.0.mlp.{name}_proj.weight"] = torch.randn(shape).bfloat16()
    tensors = to_megatron(weights, config, rows=26, stacked=False, norms=TE_NORMS)
    source = save_megatron(tmp_path / "megatron", tensors)
    assert ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf").exit == 0
    assert_equal(written(tmp_path / "out"), weights)


def test_optimizer_state_is_listed_and_left_out(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    tensors = to_megatron(weights, config, rows=ROWS)
    moments = {
        "optimizer.state.exp_avg.output_layer.weight": torch.ones(ROWS, 16),
        "chained_1.optimizer.state.exp_avg.output_layer.weight": torch.ones(ROWS, 16),
        "rng_state.0": torch.ones(3),
        "decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(4),
    }
    source = save_megatron(tmp_path / "megatron", {**tensors, **moments})
    report = ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert_equal(written(tmp_path / "out"), weights)
    assert {each["name"] for each in report.dropped} == moments.keys()
    assert report.dropped_optimizer == {"tensors": 2, "bytes": 2 * ROWS * 16 * 4}
    assert any("optimizer state left out: 2 tensors" in note for note in report.notes)


def test_the_optimizer_is_not_compared(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    moment = {"chained_1.optimizer.state.exp_avg.output_layer.weight": torch.ones(ROWS, 16)}
    dcp.save({**to_megatron(weights, config, rows=ROWS), **moment}, checkpoint_id=tmp_path / "megatron")
    report = ckptx.verify(tmp_path / "hf", tmp_path / "megatron")
    assert report.exit == 0 and report.not_compared["optimizer"] == 1
    assert ckptx.verify(tmp_path / "hf", tmp_path / "megatron", strict=True).exit == 1


def test_values_that_differ_are_found(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    name = "model.layers.2.self_attn.q_proj.weight"
    swapped = {**weights, name: weights[name].flip(0)}
    source = save_megatron(tmp_path / "megatron", to_megatron(swapped, config, rows=ROWS))
    report = ckptx.verify(tmp_path / "hf", source)
    assert report.exit == 1
    assert [row["name"] for row in report.differing] == [name]


def test_without_a_base_names_stay(tmp_path: Path) -> None:
    report = ckptx.convert("to-hf", FIXTURES / "qwen2" / "torch_dist", tmp_path / "out", base="none")
    assert report.exit == 0
    assert "decoder.layers.mlp.linear_fc1.weight" in written(tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "prefixes"),
    [
        (["embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc1.weight"], [""]),
        (["module.embedding.word_embeddings.weight", "module.decoder.layers.0.mlp.linear_fc1.weight"], ["module."]),
        (["embedding.word_embeddings.weight"], []),
        (["bert.embedding.word_embeddings.weight", "decoder.layers.0.x"], []),
        (["optimizer.state.exp_avg.embedding.word_embeddings.weight"], []),
        (["model.embed_tokens.weight", "decoder.layers.0.fc1.weight"], []),
    ],
)
def test_names_identify_megatron(names: list[str], prefixes: list[str]) -> None:
    assert find_prefixes(names) == prefixes


# --- what cannot be mapped: one line each

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def drop(*names: str) -> Change:
    return lambda tensors, config: [tensors.pop(name) for name in names] and None


def with_settings(**settings: Any) -> Change:
    return lambda tensors, config: config.update(settings)


def add(name: str, like: str) -> Change:
    return lambda tensors, config: tensors.update({name: tensors[like].clone()})


def cut(name: str, dim: int, size: int) -> Change:
    return lambda tensors, config: tensors.update({name: tensors[name].narrow(dim, 0, size).clone()})


QKV = "decoder.layers.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"
EMBEDDING = "embedding.word_embeddings.weight"

REFUSED: dict[str, tuple[Change, int, str]] = {
    "layers of another config": (with_settings(num_hidden_layers=5), 3, "holds 4 layers, but config.json has num_"),
    "another number of heads": (with_settings(num_attention_heads=8), 3, "linear_qkv.weight"),
    "another number of kv heads": (with_settings(num_key_value_heads=4), 3, "linear_qkv.weight"),
    "heads with the same number of rows": (
        with_settings(num_attention_heads=6, num_key_value_heads=1),
        3,
        "model.layers.0.self_attn.o_proj.weight",
    ),
    "heads that do not divide": (with_settings(num_key_value_heads=3), 3, "not a multiple of num_key_value_heads"),
    "another width": (with_settings(hidden_size=24), 3, "expected shape"),
    "another MLP": (with_settings(intermediate_size=48), 3, "mlp.gate_proj.weight"),
    "a larger vocabulary than rows": (with_settings(vocab_size=40), 3, "is smaller than 40 along dim 0"),
    "no vocabulary in the config": (with_settings(vocab_size=None), 3, "vocab_size is null and must be a positive"),
    "heads that are no number": (with_settings(num_attention_heads="4"), 3, "must be a positive integer"),
    "zero heads": (with_settings(num_attention_heads=0), 3, "must be a positive integer"),
    "a missing tensor": (drop("decoder.layers.self_attention.linear_proj.weight"), 3, "o_proj.weight"),
    "no final norm": (drop("decoder.final_layernorm.weight"), 3, "model.norm.weight"),
    "a missing head": (drop("output_layer.weight"), 3, "lm_head.weight"),
    "rows of q, k and v": (cut(QKV, 1, 60), 3, "does not split into"),
    "half of fc1": (cut(FC1, 1, 24), 3, "mlp.gate_proj.weight"),
    "fewer layers in one tensor": (cut(FC1, 0, 3), 3, "holds 3 layers"),
    "a bias that the class lacks": (
        add("decoder.layers.self_attention.linear_proj.bias", "decoder.final_layernorm.weight"),
        3,
        "layers",
    ),
    "norms under both names": (
        add("decoder.layers.input_layernorm.weight", "decoder.layers.self_attention.linear_qkv.layer_norm_weight"),
        3,
        "model.layers.0.input_layernorm.weight",
    ),
    "a layer stored twice": (
        add("decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"),
        3,
        "both",
    ),
    "multi-token prediction": (add("mtp.layers.0.eh_proj.weight", FC1), 4, "has no counterpart in LlamaForCausalLM"),
    "an encoder next to it": (add("vision_model.decoder.x.weight", FC1), 4, "has no counterpart"),
    "two models": (
        lambda tensors, config: tensors.update({f"b.{name}": value.clone() for name, value in tensors.items()}),
        4,
        "holds 2 Megatron models",
    ),
    "another class": (
        with_settings(architectures=["GptOssForCausalLM"], model_type="gpt_oss"),
        4,
        "GptOssForCausalLM: the tensors have Megatron's names, which are mapped for DeepseekV2ForCausalLM, Deep",
    ),
    "a quantized class of the same shapes": (
        with_settings(architectures=["GemmaForCausalLM"], model_type="gemma"),
        4,
        "GemmaForCausalLM: the tensors have Megatron's names",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    change, exit_code, message = REFUSED[case]
    config = config_of("LlamaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    tensors = to_megatron(weights, config, rows=ROWS)
    (tmp_path / "hf" / "model.safetensors").unlink()
    change(tensors, config)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    source = save_megatron(tmp_path / "megatron", tensors)
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == exit_code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


def test_a_missing_layer_is_refused(tmp_path: Path) -> None:
    config = config_of("Qwen3ForCausalLM")
    tensors = to_megatron(save_model(tmp_path / "hf", config), config, rows=ROWS, stacked=False)
    tensors = {name: value for name, value in tensors.items() if ".layers.3." not in name}
    source = save_megatron(tmp_path / "megatron", tensors)
    with pytest.raises(CkptxError, match=r"model\.layers\.3") as caught:
        ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert caught.value.exit_code == 3 and not (tmp_path / "out").exists()


def test_missing_experts_are_refused(tmp_path: Path) -> None:
    config = config_of("MixtralForCausalLM")
    tensors = to_megatron(save_model(tmp_path / "hf", config), config, rows=ROWS)
    for name in ("linear_fc1", "linear_fc2"):
        cut(f"decoder.layers.mlp.experts.experts.{name}.weight", 1, 3)(tensors, {})
    source = save_megatron(tmp_path / "megatron", tensors)
    with pytest.raises(CkptxError, match=r"experts\.3\.") as caught:
        ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert caught.value.exit_code == 3


def test_keeping_the_optimizer_is_refused(tmp_path: Path) -> None:
    hf, torch_dist = FIXTURES / "qwen2" / "hf", FIXTURES / "qwen2" / "torch_dist"
    with pytest.raises(CkptxError, match="has no optimizer state that can be mapped") as caught:
        ckptx.reshard(torch_dist, tmp_path / "out", base=hf, tp=2, to="dcp", optimizer="keep")
    assert caught.value.exit_code == 4


def test_verify_against_another_model_compares_megatrons_names(tmp_path: Path) -> None:
    save_model(tmp_path / "other", config_of("LlamaForCausalLM"))
    report = ckptx.verify(tmp_path / "other", FIXTURES / "qwen2" / "torch_dist")
    assert report.exit == 1
    assert any("Megatron's names kept: " in note for note in report.notes)
