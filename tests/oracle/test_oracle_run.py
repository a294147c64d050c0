"""`verify --run` on real gloo ranks: models under TP x FSDP2 compute what they compute in one piece, and every injected
defect is found and named at its level."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ckptx
from ckptx.cli.main import cli
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from tests.support.models import EVERY, VOCAB, Recipe, write
from tests.support.pool import GlooPool
from tests.support.runner import CliRunner
from tests.support.verify_runs import assert_equal, run_verify

# Different builds, in every run: tied, multimodal, shared keys and values, experts, latent attention, Conv1D.
RUN = ("llama-tied", "gemma3-vlm", "qwen3-moe", "deepseek-v3", "phi3")
MORE = tuple(name for name in EVERY if name not in RUN)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUN)
def test_a_model_computes_the_same_on_a_mesh(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    ckptx.convert("hf2dcp", hf_of(name), tmp_path / "dcp")
    document, text = run_verify(pool, hf_of(name), tmp_path / "dcp")
    assert_equal(document, text, ParallelDims(tp=2, dp_shard=2))
    assert document["max_abs"] < 1e-4, "a sum in another order, in float32"


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_every_model_computes_the_same_on_a_mesh(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    test_a_model_computes_the_same_on_a_mesh(pool, hf_of, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUN, "gemma2", "qwen2", "mixtral", "llava", "mistral3", "gemma4-vlm", "whisper"])
def test_bfloat16_stays_within_its_own_noise(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    document, text = run_verify(pool, hf_of(name), hf_of(name), compute_dtype="bf16")
    assert_equal(document, text, ParallelDims(tp=2, dp_shard=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tp", [1, 2])
def test_layers_that_share_parameters_are_sharded_together(pool: GlooPool, tmp_path: Path, tp: int) -> None:
    write(Recipe(_shares_a_transformer, dict), tmp_path / "hf")
    document, text = run_verify(pool, tmp_path / "hf", tmp_path / "hf", tp=tp, dp_shard=2)
    assert_equal(document, text, ParallelDims(tp=tp, dp_shard=2))


def _shares_a_transformer() -> Any:
    """Two of four layers have the same attention and MLP."""
    config = transformers.Zamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=48, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], mamba_d_state=8,
        mamba_headdim=16, mamba_ngroups=1, n_mamba_heads=4, num_mem_blocks=1, adapter_rank=4,
    )  # fmt: skip
    return transformers.Zamba2ForCausalLM(config)


def test_what_cannot_be_run_says_so(pool: GlooPool, tmp_path: Path) -> None:
    write(Recipe(_hears_without_text, dict, dtype=torch.float32), tmp_path / "ctc")
    kind, said = run_verify(pool, tmp_path / "ctc", tmp_path / "ctc", tp=1, dp_shard=2)
    assert kind == "UnsupportedError"
    assert "fails on inputs input_ids, attention_mask: TypeError" in said


def _hears_without_text() -> Any:
    """A class that wants a waveform and nothing else."""
    config = transformers.HubertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        conv_dim=(16,), conv_kernel=(10,), conv_stride=(5,), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    return transformers.HubertForCTC(config)


@pytest.mark.parametrize("to", ["dcp", pytest.param("safetensors", marks=pytest.mark.slow)])
def test_a_cut_checkpoint_is_run_as_it_is(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path, to: str
) -> None:
    hf = hf_of("llama-tied")
    ckptx.reshard(hf, tmp_path / "cut", to=to, tp=2, pp=2)
    document, text = run_verify(pool, hf, tmp_path / "cut", tp=2, dp_shard=1)
    assert_equal(document, text, ParallelDims(tp=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["full", "submodule", "selective"])
def test_recomputing_changes_nothing(pool: GlooPool, hf_of: Callable[[str], Path], mode: str) -> None:
    hf = hf_of("llama-untied")
    plain, _ = run_verify(pool, hf, hf)
    document, text = run_verify(pool, hf, hf, activation_checkpointing=mode)
    assert_equal(document, text, ParallelDims(tp=2, dp_shard=2), wrapped=2)
    for number in ("max_abs", "loss", "grad_max_abs"):
        assert document[number] == plain[number]


def test_on_one_rank_results_are_equal_bit_for_bit(hf_of: Callable[[str], Path], tmp_path: Path) -> None:
    ckptx.convert("hf2dcp", hf_of("mixtral"), tmp_path / "dcp")
    arguments = [str(hf_of("mixtral")), str(tmp_path / "dcp"), "--run", "--json"]
    result = CliRunner().invoke(cli, ["verify", *arguments], standalone_mode=False)
    document = json.loads(result.stdout)
    assert (result.return_value, document["exit"], document["world_size"]) == (0, 0, 1)
    assert document["max_abs"] == document["max_abs_tolerance"] == document["grad_max_abs"] == 0.0


def test_the_python_function_runs_models_too(hf_of: Callable[[str], Path]) -> None:
    report = ckptx.verify(hf_of("llama-tied"), hf_of("llama-tied"), run=True, backward=False)
    assert (report.exit, report.run, report.grad_max_abs) == (0, True, None)
    with pytest.raises(UsageError, match="verify does not take --nonsense"):
        ckptx.verify(hf_of("llama-tied"), hf_of("llama-tied"), nonsense=1)


# ----------------------------------------------------------------------------------------------------- injected defects


def changed(hf: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(hf, to)
    index = to / "model.safetensors.index.json"
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(to.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    index.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


TWO = {"tp": 2, "dp_shard": 1}  # enough ranks for what has nothing of a mesh


def levels(document: dict[str, Any]) -> set[str]:
    return {row["level"] for row in document["differing"]}


def test_a_flipped_bit_in_a_slice_is_named_with_its_rank(pool: GlooPool, hf_of: Callable[[str], Path]) -> None:
    document, text = run_verify(pool, hf_of("llama-untied"), hf_of("llama-untied"), inject="slice")
    assert document["exit"] == 1
    found = [(row["rank"], row["name"]) for row in document["differing"] if row["level"] == "bytes"]
    assert found == [(1, "model.layers.1.mlp.up_proj.weight")]
    assert "bytes: model.layers.1.mlp.up_proj.weight: differs from the reference (rank 1)" in text


def test_another_eps_in_the_config_is_named_and_shows_in_the_forward_pass(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path
) -> None:
    other = changed(hf_of("llama-untied"), tmp_path / "eps", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    document, text = run_verify(pool, hf_of("llama-untied"), other, **TWO)
    assert document["exit"] == 1
    assert {"config", "forward"} <= levels(document) and "bytes" not in levels(document)
    assert "config: rms_norm_eps: 1e-06 in the reference, 0.001 in the checkpoint" in text
    assert document["first_divergence"]["module"] == "model.layers.0.input_layernorm"
    assert "first module with a different output: model.layers.0.input_layernorm" in text


def test_a_key_that_changes_nothing_is_a_note(pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path) -> None:
    other = changed(hf_of("llama-untied"), tmp_path / "eos", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"eos_token_id": 7, "attention_dropout": 0.5}))
    document, text = run_verify(pool, hf_of("llama-untied"), other, **TWO)
    assert_equal(document, text, ParallelDims(**TWO))
    (note,) = (each for each in document["notes"] if each.startswith("config differences without effect"))
    assert "eos_token_id (2 in the reference, 7 in the checkpoint)" in note
    assert "attention_dropout (0.0 in the reference, 0.5 in the checkpoint)" in note


def test_a_tensor_that_nothing_reads_is_a_difference_unless_both_have_it(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """What computes nothing changes no logit; plain verify would say that it is there."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.gate_proj.extra"] = torch.ones(3)

    plain, other = hf_of("llama-untied"), changed(hf_of("llama-untied"), tmp_path / "more", add)
    document, text = run_verify(pool, plain, other, **TWO)
    assert [(row["level"], row["name"]) for row in document["differing"]] == [
        ("bytes", "model.layers.0.mlp.gate_proj.extra")
    ]
    assert "bytes: model.layers.0.mlp.gate_proj.extra: unknown to the class, and not in the reference" in text
    for checkpoint in (plain, other):
        document, text = run_verify(pool, other, checkpoint, **TWO)
        assert_equal(document, text, ParallelDims(**TWO))
        (note,) = (
            each for each in document["notes"] if each.startswith("tensors of the reference that its class does not")
        )
        assert note.endswith("not compared: model.layers.0.mlp.gate_proj.extra (unknown to the class)")


def test_a_lost_gradient_is_named(pool: GlooPool, hf_of: Callable[[str], Path]) -> None:
    document, _ = run_verify(pool, hf_of("llama-untied"), hf_of("llama-untied"), inject="gradient")
    assert levels(document) == {"gradients"}
    assert {row["name"] for row in document["differing"]} == {"model.layers.0.self_attn.o_proj.weight"}
    assert {row["rank"] for row in document["differing"]} == {0, 1, 2, 3}


def test_exchanged_projections_are_named(pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()

    swapped = changed(hf_of("llama-untied"), tmp_path / "swapped", swap)
    document, _ = run_verify(pool, hf_of("llama-untied"), swapped, **TWO)
    assert levels(document) == {"bytes", "forward", "gradients"}
    assert {row["name"] for row in document["differing"] if row["level"] == "bytes"} == {first, second}


def test_what_is_not_a_number_is_found_before_anything_else(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")

    spoiled = changed(hf_of("llama-untied"), tmp_path / "nan", spoil)
    document, text = run_verify(pool, hf_of("llama-untied"), spoiled, **TWO)
    first = next(row for row in document["differing"] if row["level"] == "forward")
    assert first["what"].endswith("not finite in the checkpoint")
    assert document["kl"] == "nan"
    assert "not finite" in text
    both, _ = run_verify(pool, spoiled, spoiled, **TWO)
    assert both["exit"] == 1, "that both are not numbers does not make them equal"


def test_a_missing_tensor_is_refused_on_every_rank(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    lacking = changed(hf_of("llama-untied"), tmp_path / "lacking", lambda tensors: tensors.__delitem__(name))
    kind, said = run_verify(pool, hf_of("llama-untied"), lacking, **TWO)
    assert (kind, name in said) == ("InputError", True)


def test_heads_that_do_not_divide_are_refused_before_anything_is_built(
    pool: GlooPool, hf_of: Callable[[str], Path]
) -> None:
    kind, said = run_verify(pool, hf_of("llama-untied"), hf_of("llama-untied"), tp=3, dp_shard=1)
    assert kind == "UnsupportedError"
    assert "num_attention_heads=4, num_key_value_heads=2" in said
    kind, said = run_verify(pool, hf_of("llama-untied"), hf_of("llama-untied"), tp=4, dp_shard=1)
    assert (kind, "tp=4 does not divide num_key_value_heads=2" in said) == ("UnsupportedError", True)


# ------------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tp", "2"], "--tp requires --run"),
        (["--run", "--dtype", "bf16"], "--compute-dtype"),
        (["--run", "--device", "tpu"], '--device: "tpu" must be one of auto, cpu, cuda'),
        (["--run", "--activation-checkpointing", "some"], "must be one of none, full, submodule, selective"),
        (["--run", "--tp", "0"], "--tp: 0 must be between 1 and"),
        (["--run", "--tp", "2", "--tp-plan", "gone.json"], "gone.json"),
        (["--run", "--tp-plan", "gone.json"], "--tp-plan requires --tp 2 or more"),
    ],
)
def test_options_that_cannot_be(hf_of: Callable[[str], Path], options: list[str], said: str) -> None:
    hf = str(hf_of("llama-untied"))
    result = CliRunner().invoke(cli, ["verify", hf, hf, *options], standalone_mode=False)
    assert result.return_value == 2
    assert said in result.stderr


@pytest.mark.slow
def test_the_command_starts_its_ranks_itself(hf_of: Callable[[str], Path], tmp_path: Path) -> None:
    hf = str(hf_of("llama-untied"))
    result = CliRunner().invoke(cli, ["verify", hf, hf, "--run", "--tp", "2"], standalone_mode=False)
    assert result.return_value == 0, result.stderr
    assert "ran on random text inputs in float32, tp 2 x dp_shard 1 (2 ranks)" in result.stdout
    result = CliRunner().invoke(cli, ["verify", hf, hf, "--run", "--tp", "3"], standalone_mode=False)
    assert result.return_value == 4
    assert "num_attention_heads=4, num_key_value_heads=2" in result.stderr
