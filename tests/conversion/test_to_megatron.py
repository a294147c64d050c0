"""`convert to-megatron`: Megatron's tensors are those that its formulas give, and they come back byte for byte."""

from __future__ import annotations

import json
import pickletools
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

import ckptx
from ckptx.architecture.trainer_naming.megatron import block_shape
from ckptx.errors import CkptxError, UsageError
from ckptx.report.text import conversion_text
from tests.support.megatron_layout import TE_NORMS, to_megatron
from tests.support.megatron_models import MODELS, config_of, save_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS = 32  # of the padded vocabulary
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
NORM, EXPERT_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a DCP, as stock torch reads them."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {name: torch.zeros(each.size, dtype=each.properties.dtype) for name, each in metadata.items()}
    dcp.load(state, checkpoint_id=checkpoint)
    return state


def expected_tensors(weights: dict[str, Tensor], config: dict[str, Any], *, stacked: bool) -> dict[str, Tensor]:
    """Return the tensors that Megatron stores, computed with torch, with zeros as padding and both names of a norm."""
    tensors = to_megatron(weights, config, rows=ROWS, stacked=stacked, norms=TE_NORMS)
    for name in VOCABULARY:
        if name in tensors:
            tensors[name][config["vocab_size"] :] = 0
    for name in list(tensors):
        layer = name.removesuffix(NORM)
        if layer != name and f"{layer}mlp.router.weight" in tensors:
            tensors[layer + EXPERT_NORM] = tensors[name]
    return tensors


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# --- every family


@pytest.mark.parametrize("layers", ["stacked", "separate"])
@pytest.mark.parametrize("class_name", MODELS)
def test_a_family_is_stored_as_megatron_stores_it_and_comes_back(class_name: str, layers: str, tmp_path: Path) -> None:
    config = config_of(class_name)
    weights = save_model(tmp_path / "hf", config)
    report = ckptx.convert(
        "to-megatron", tmp_path / "hf", tmp_path / "out", layers=layers, pad_vocab_to_multiple_of=ROWS
    )
    assert report.exit == 0 and report.names == {"before": "hf", "after": "megatron", "permuted": []}
    assert report.ledger["written"] == report.ledger["source"] == len(weights)
    expected = expected_tensors(weights, config, stacked=layers == "stacked")
    assert_equal(stored(tmp_path / "out" / "release"), expected)
    assert report.tensors == len(expected)

    assert ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back").exit == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert ckptx.verify(tmp_path / "hf", tmp_path / "out", strict=True).exit == 0


@pytest.mark.parametrize("class_name", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_dcp_comes_back_through_megatron(class_name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of(class_name))
    ckptx.convert("to-dcp", tmp_path / "hf", tmp_path / "dcp", tp=2, pp=2)
    ckptx.convert("to-megatron", tmp_path / "dcp", tmp_path / "megatron")
    assert ckptx.convert("to-dcp", tmp_path / "megatron", tmp_path / "dcp2").exit == 0
    assert ckptx.verify(tmp_path / "dcp", tmp_path / "dcp2", strict=True).exit == 0
    ckptx.convert("to-hf", tmp_path / "dcp2", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_a_training_checkpoint_loses_its_state_and_the_summary_says_so(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    moments = {f"optimizer.state.{name}.exp_avg": torch.ones(value.shape) for name, value in weights.items()}
    state = {**{f"model.{name}": value for name, value in weights.items()}, **moments, "train_state": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "step")
    report = ckptx.convert("to-megatron", tmp_path / "step", tmp_path / "out", base=tmp_path / "hf", optimizer=None)
    assert report.dropped_optimizer is not None and report.dropped_optimizer["tensors"] == len(weights)
    assert report.ledger["written"] == len(weights) and report.ledger["dropped"] == len(weights) + 1
    text = conversion_text(report)
    assert f"dropped: {len(weights)} tensors" in text and "optimizer state is not converted to Megatron" in text
    assert "weights only (no optimizer state, no _extra_state of TransformerEngine)" in text
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back")
    assert_equal(dict(load_file(tmp_path / "back" / "model.safetensors")), weights)


def test_megatron_is_stored_in_another_form(tmp_path: Path) -> None:
    config = config_of("Qwen3MoeForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "stacked")
    report = ckptx.convert(
        "to-megatron", tmp_path / "stacked", tmp_path / "separate", layers="separate", pad_vocab_to_multiple_of=ROWS
    )
    assert report.names is not None and report.names["before"] == report.names["after"] == "megatron"
    assert_equal(stored(tmp_path / "separate" / "release"), expected_tensors(weights, config, stacked=False))


def test_a_cast_is_that_of_the_parts(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", dtype="fp32", pad_vocab_to_multiple_of=ROWS)
    floats = {name: value.float() for name, value in weights.items()}
    assert_equal(stored(tmp_path / "out" / "release"), expected_tensors(floats, config, stacked=True))
    assert json.loads((tmp_path / "out" / "release" / "config.json").read_text())["dtype"] == "float32"


# --- layers


def save_alternating(path: Path) -> dict[str, Tensor]:
    """A model whose first layer has a dense MLP, and the others experts."""
    config = config_of("Qwen3MoeForCausalLM", mlp_only_layers=[0])
    weights = save_model(path, config)
    weights = {name: value for name, value in weights.items() if not name.startswith("model.layers.0.mlp.")}
    for name, shape in (("gate", (24, 16)), ("up", (24, 16)), ("down", (16, 24))):
        weights[f"model.layers.0.mlp.{name}_proj.weight"] = torch.randn(shape).bfloat16()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return weights


def test_layers_with_different_tensors_stay_separate(tmp_path: Path) -> None:
    weights = save_alternating(tmp_path / "hf")
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert report.megatron is not None and report.megatron["layers"] == "separate"
    tensors = stored(tmp_path / "out" / "release")
    assert f"decoder.layers.0.{NORM}" in tensors and f"decoder.layers.0.{EXPERT_NORM}" not in tensors
    assert {f"decoder.layers.1.{NORM}", f"decoder.layers.1.{EXPERT_NORM}"} <= tensors.keys()
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back")
    assert_equal(dict(load_file(tmp_path / "back" / "model.safetensors")), weights)


def test_layers_with_different_tensors_cannot_be_stacked(tmp_path: Path) -> None:
    save_alternating(tmp_path / "hf")
    with pytest.raises(CkptxError, match=r"layers 0 and 1 have different tensors: .* use --layers separate") as caught:
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", layers="stacked")
    assert caught.value.exit_code == 4 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "shape", "blocks"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", (4, 48, 16), (1, 24, 16)),
        ("decoder.layers.3.mlp.linear_fc1.weight", (48, 16), (24, 16)),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (4, 8, 24, 16), (1, 1, 12, 16)),
        ("decoder.layers.3.mlp.experts.experts.linear_fc2.weight", (8, 16, 12), (1, 16, 12)),
        ("decoder.layers.self_attention.linear_qkv.weight", (4, 64, 16), (1, 64, 16)),
        ("decoder.layers.mlp.linear_fc1.layer_norm_weight", (4, 16), (1, 16)),
        ("embedding.word_embeddings.weight", (32, 16), (32, 16)),
    ],
)
def test_a_loader_reads_single_layers_and_experts(name: str, shape: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    assert block_shape(name, shape) == blocks


def test_a_layer_is_a_chunk_of_its_own(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("MixtralForCausalLM"))
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    metadata = FileSystemReader(tmp_path / "out" / "release").read_metadata().state_dict_metadata
    fc1 = metadata["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert {tuple(chunk.sizes) for chunk in fc1.chunks} == {(1, 1, 24, 16)} and len(fc1.chunks) == 4 * 4 * 2


# --- vocabulary


@pytest.mark.parametrize(("multiple", "rows"), [(1, 26), (13, 26), (32, 32), (None, 128)])
def test_the_vocabulary_is_padded_with_zeros(multiple: int | None, rows: int, tmp_path: Path) -> None:
    weights = save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", pad_vocab_to_multiple_of=multiple)
    tensors = stored(tmp_path / "out" / "release")
    for name, disk_name in zip(VOCABULARY, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        assert tensors[name].shape == (rows, 16)
        assert torch.equal(tensors[name][:26], weights[disk_name]) and not tensors[name][26:].any()
    assert report.megatron == {
        "layers": "stacked", "vocabulary_rows": 26, "padded_rows": rows, "is_head_separate": True,
    }  # fmt: skip
    padding = "of 26 rows, not padded" if rows == 26 else f"padded with zeros from 26 to {rows} rows"
    assert f"vocabulary {padding}, untied output head" in conversion_text(report)


def test_padding_is_not_counted_as_read(tmp_path: Path) -> None:
    weights = save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    nbytes = sum(value.nbytes for value in weights.values())
    for options in ({"dry_run": True}, {}):
        report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", **options)
        assert report.bytes_read == nbytes


def test_a_dry_run_lists_the_files_that_are_written(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    planned = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    written = {path.relative_to(tmp_path / "out").as_posix(): path.stat().st_size for path in files(tmp_path / "out")}
    assert {each["name"]: each["bytes"] for each in planned.files or ()} == written


# --- ties


def test_a_tied_head_is_not_stored(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("Qwen2ForCausalLM"))
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert "output_layer.weight" not in stored(tmp_path / "out" / "release")
    assert report.ties[0]["action"] == "single" and report.ties[0]["output_names"] == [None, VOCABULARY[0]]
    assert "output head tied to the embedding" in conversion_text(report)


def test_a_tied_head_that_is_stored_twice_is_written_once(tmp_path: Path) -> None:
    weights = save_model(tmp_path / "hf", config_of("Qwen2ForCausalLM"))
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(both, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert "output_layer.weight" not in stored(tmp_path / "out" / "release")
    assert report.ledger["source"] == len(both) and report.ledger["dropped"] == 0


def test_a_head_that_differs_from_its_embedding_is_stored(tmp_path: Path) -> None:
    weights = save_model(tmp_path / "hf", config_of("Qwen2ForCausalLM"))
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}
    save_file(both, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert torch.equal(stored(tmp_path / "out" / "release")["output_layer.weight"][:26], both["lm_head.weight"])
    assert report.megatron is not None and report.megatron["is_head_separate"]
    assert [edit["after"] for edit in report.config_edits] == [False]
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back")
    assert_equal(dict(load_file(tmp_path / "back" / "model.safetensors")), both)


# --- files


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file())


@pytest.mark.parametrize("layers", ["stacked", "separate"])
def test_the_directory_is_that_of_a_release(layers: str, tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", layers=layers)
    release = tmp_path / "out" / "release"
    assert [path.relative_to(tmp_path / "out").as_posix() for path in files(tmp_path / "out")] == [
        "ckptx.json", "latest_checkpointed_iteration.txt", "release/.metadata", "release/__0_0.distcp",
        "release/common.pt", "release/config.json", "release/metadata.json", "release/tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((release / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
        "common_backend_version": 1,
    }  # fmt: skip
    assert torch.load(release / "common.pt", weights_only=True) == {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": layers == "separate"},
    }


def test_common_pt_names_no_class(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out" / "release" / "common.pt") as archive:
        opcodes = {opcode.name for opcode, _, _ in pickletools.genops(archive.read("archive/data.pkl"))}
    assert not opcodes & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ", "BUILD"}


def test_the_bytes_depend_on_the_source_and_the_options_alone(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("Qwen3MoeForCausalLM"))
    for name, threads in (("a", 1), ("b", 4)):
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / name, workers=threads)
    for path in files(tmp_path / "a"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_overwrite_replaces_an_output_and_nothing_else(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    with pytest.raises(CkptxError, match="exists and is not empty") as caught:
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert caught.value.exit_code == 5
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", layers="separate", overwrite=True)
    assert report.exit == 0 and "decoder.layers.0.mlp.linear_fc2.weight" in stored(tmp_path / "out" / "release")
    (tmp_path / "out" / "release" / "notes.txt").write_text("mine")
    with pytest.raises(CkptxError, match=r"release/notes\.txt"):
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", overwrite=True)


def test_a_complete_output_is_not_written_again(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", resume=True).bytes_written == 0


def test_buffers_that_megatron_computes_are_left_out(tmp_path: Path) -> None:
    weights = save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(4)}
    save_file({**weights, **buffers}, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert {each["name"] for each in report.dropped} == buffers.keys() and report.ledger["dropped"] == len(buffers)
    assert "dropped: 4 tensors (buffer that Megatron computes from the config)" in conversion_text(report)


# --- what cannot be converted: one line each

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def with_settings(**settings: Any) -> Change:
    return lambda weights, config: config.update(settings)


def drop(*names: str) -> Change:
    return lambda weights, config: [weights.pop(name) for name in names] and None


def add(name: str, like: str) -> Change:
    return lambda weights, config: weights.update({name: weights[like].clone()})


def add_biases(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["attention_bias"] = True
    for layer in range(4):
        for name in "qkvo":
            rows = len(weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"])
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.zeros(rows).bfloat16()


def cast(name: str) -> Change:
    return lambda weights, config: weights.update({name: weights[name].float()})


Q = "model.layers.0.self_attn.q_proj.weight"
REFUSED: dict[str, tuple[Change, int, str]] = {
    "a class without rules": (
        with_settings(architectures=["GemmaForCausalLM"], model_type="gemma"),
        4,
        "GemmaForCausalLM: its tensors have no Megatron names in ckptx, which has those of DeepseekV2ForCausalLM, De",
    ),
    "a class without a head": (with_settings(architectures=["LlamaForSequenceClassification"]), 3, "score.weight"),
    "an unknown class": (
        with_settings(architectures=["NovelForCausalLM"], model_type="novel"),
        4,
        "NovelForCausalLM: its tensors have no Megatron names",
    ),
    "no class": (with_settings(architectures=None, model_type=None), 4, "names no known architecture"),
    "biases of attention": (
        add_biases,
        4,
        "has no counterpart in the Megatron model of LlamaForCausalLM (and 15 more)",
    ),
    "a missing tensor": (drop(Q), 3, Q),
    "a missing head": (drop("lm_head.weight"), 3, "lm_head.weight"),
    "no embedding": (drop("model.embed_tokens.weight"), 3, "model.embed_tokens.weight"),
    "another number of heads": (with_settings(num_attention_heads=8), 3, "q_proj.weight"),
    "heads that do not divide": (with_settings(num_key_value_heads=3), 3, "k_proj.weight"),
    "no heads": (with_settings(num_attention_heads=0), 3, "must be a positive integer"),
    "a larger vocabulary": (with_settings(vocab_size=40), 3, "the vocabulary"),
    "fewer layers in the config": (with_settings(num_hidden_layers=3), 3, "model.layers.3"),
    "an extra tensor": (add("model.layers.0.mlp.extra.weight", "model.norm.weight"), 3, "mlp.extra.weight"),
    "parts of two dtypes": (cast(Q), 3, f'"{Q}", F32 of shape'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    change, exit_code, message = REFUSED[case]
    config = config_of("LlamaForCausalLM")
    weights = save_model(tmp_path / "hf", config)
    change(weights, config)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_model_with_latent_attention_that_transformers_saved_comes_back(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "num_hidden_layers": 2}
    DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **experts, **ranks)).save_pretrained(tmp_path / "hf")
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_a_config_is_required(tmp_path: Path) -> None:
    weights = save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    dcp.save(dict(weights), checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CkptxError, match=r"has no config\.json, which gives the class.* pass --base PATH") as caught:
        ckptx.convert("to-megatron", tmp_path / "dcp", tmp_path / "out")
    assert caught.value.exit_code == 3 and "--base none" not in str(caught.value)
    with pytest.raises(UsageError, match="--base none: convert to-megatron requires a config"):
        ckptx.convert("to-megatron", tmp_path / "dcp", tmp_path / "out", base="none")
    assert ckptx.convert("to-megatron", tmp_path / "dcp", tmp_path / "out", base=tmp_path / "hf").exit == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "model"}, "convert to-megatron does not take --names"),
        ({"tied": "copy"}, "convert to-megatron does not take --tied"),
        ({"optimizer": "keep"}, "convert to-megatron does not take --optimizer"),
        ({"tp": 2}, "convert to-megatron does not take --tp"),
        ({"make_vocab_size_divisible_by": 8}, "use --pad-vocab-to-multiple-of"),
        ({"pad_vocab_to_multiple_of": 0}, "--pad-vocab-to-multiple-of: 0 must be between 1 and 1,048,576"),
        ({"layers": "both"}, '--layers: "both" must be one of stacked, separate'),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    with pytest.raises(UsageError, match=message):
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", **options)


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    weights = save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    scale = Q.replace("weight", "weight_scale_inv")
    quantized = {**weights, Q: weights[Q].to(torch.float8_e4m3fn), scale: torch.ones(1, 1)}
    config = config_of("LlamaForCausalLM", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    save_file(quantized, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    assert caught.value.exit_code == 4 and "pass --dequantize" in str(caught.value)
    report = ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out", dequantize=True)
    assert report.exit == 0 and report.ledger["decoded"] == 1


def test_an_output_of_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", config_of("LlamaForCausalLM"))
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "damaged")
    data = tmp_path / "damaged" / "release" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(CkptxError):
        ckptx.convert("to-hf", tmp_path / "damaged", tmp_path / "back")
