"""`verify --run --pp` on real gloo ranks: stages compute, bit for bit, what the model computes in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptx
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.parallel.pipeline.schedules import can_split_backward
from tests.support.models import EVERY, read_hf, write
from tests.support.pool import GlooPool
from tests.support.verify_runs import assert_equal, run_verify

# The hidden state alone, tied and untied; per-layer inputs with shared keys and values; encoder and decoder; images.
RUN = ("llama-tied", "llama-untied", "gemma4-shared-kv", "t5", "gemma3-vlm", "qwen3-moe")
MORE = tuple(name for name in EVERY if name not in RUN)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUN)
def test_stages_compute_the_same_to_the_last_bit(pool: GlooPool, hf_of: Callable[[str], Path], name: str) -> None:
    document, text = run_verify(pool, hf_of(name), hf_of(name), 1, 1, pp=2)
    assert_equal(document, text, ParallelDims(pp=2))
    assert (document["max_abs"], document["max_abs_tolerance"], document["loss"]) == (0, 0, document["loss_reference"])
    assert (document["stages"], document["microbatches"], document["bubble_fraction"]) == (2, 2, 1 / 3)
    assert sum(not row["max_abs"] for row in document["gradient_differences"]) >= document["gradients"] - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_every_model_computes_the_same_in_stages(pool: GlooPool, hf_of: Callable[[str], Path], name: str) -> None:
    test_stages_compute_the_same_to_the_last_bit(pool, hf_of, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "mesh", "settings"),
    [
        ("llama-tied", {"tp": 2}, {"activation_checkpointing": "selective"}),
        ("gemma4-shared-kv", {"tp": 2}, {"activation_checkpointing": "full"}),
        ("gemma3-vlm", {"dp_shard": 2}, {"activation_checkpointing": "selective"}),
        ("llama-tied", {"dp_shard": 2}, {}),
        ("qwen3-moe", {"tp": 2}, {"schedule": "gpipe", "microbatches": 3}),
        ("llama-untied", {"dp_replicate": 2}, {"activation_checkpointing": "full"}),
    ],
)
def test_tp_fsdp2_and_checkpointing_inside_of_stages_stay_within_their_noise(
    pool: GlooPool, hf_of: Callable[[str], Path], name: str, mesh: dict[str, int], settings: dict[str, object]
) -> None:
    given = {"tp": 1, "dp_shard": 1, "pp": 2, **mesh}
    document, text = run_verify(pool, hf_of(name), hf_of(name), **given, **settings)
    layers = document["checkpointed_layers"]
    assert_equal(document, text, ParallelDims(**given), wrapped=layers)
    if "activation_checkpointing" in settings:
        whole, said = run_verify(pool, hf_of(name), hf_of(name), 1, 1, **settings)
        assert whole["checkpointed_layers"] == layers > 0, said


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_layers_of_stages_stay_within_their_noise(
    pool: GlooPool, hf_of: Callable[[str], Path], mode: str
) -> None:
    """Several microbatches: a graph that keeps something of one must not be used to recompute another."""
    settings = {"compile": True, "activation_checkpointing": mode, "microbatches": 4}
    document, text = run_verify(pool, hf_of("llama-tied"), hf_of("llama-tied"), 1, 1, pp=2, **settings)
    assert_equal(document, text, ParallelDims(pp=2), wrapped=document["checkpointed_layers"])
    assert 0 < document["max_abs"] < document["max_abs_tolerance"], "inductor reorders what eager mode does not"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma4-shared-kv", {"activation_checkpointing": "full"}),
        ("gemma4-vlm", {"activation_checkpointing": "selective", "inject": "images in some"}),
    ],
)
def test_eight_ranks_of_tp_stages_and_fsdp2_stay_within_their_noise(
    pool: GlooPool, hf_of: Callable[[str], Path], name: str, settings: dict[str, object]
) -> None:
    test_tp_fsdp2_and_checkpointing_inside_of_stages_stay_within_their_noise(
        pool, hf_of, name, {"tp": 2, "dp_shard": 2}, settings
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"])
@pytest.mark.parametrize("name", ["gemma4-shared-kv", "mllama"])
def test_every_schedule_computes_the_same_to_the_last_bit(
    pool: GlooPool, hf_of: Callable[[str], Path], name: str, schedule: str
) -> None:
    if schedule != "interleaved1f1b" and not can_split_backward():
        pytest.skip(f"torch {torch.__version__} cannot go backward in two parts, needed 2.13")
    split = "1,1,1,1" if name == "gemma4-shared-kv" else "1,1,1,0"
    document, text = run_verify(pool, hf_of(name), hf_of(name), 1, 1, pp=2, schedule=schedule, pp_split=split)
    assert_equal(document, text, ParallelDims(pp=2))
    assert (document["stages"], document["max_abs"]) == (4, 0)


def test_a_difference_is_named_with_its_stage(pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path) -> None:
    write(replace(EVERY["llama-untied"], dtype=torch.float32), tmp_path / "other")
    name = "model.layers.1.mlp.up_proj.weight"
    for file in (tmp_path / "other").glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = tensors[name].roll(1, 0)
            save_file(tensors, file, metadata={"format": "pt"})
    document, text = run_verify(pool, hf_of("llama-untied"), tmp_path / "other", 1, 1, pp=2)
    rows = {(row["level"], row["name"]): row["stage"] for row in document["differing"]}
    assert (document["exit"], rows["bytes", name], rows["forward", "logits"]) == (1, 1, 1)
    assert rows["gradients", "model.layers.0.self_attn.q_proj.weight"] == 0
    assert text.startswith(f"tensor bytes: {name}: differs from the reference (rank 1)")


def test_one_unit_in_the_last_place_is_a_difference(pool: GlooPool, hf_of: Callable[[str], Path]) -> None:
    """Also on the ranks that do not have the reference."""
    document, _ = run_verify(pool, hf_of("llama-tied"), hf_of("llama-tied"), 1, 1, pp=2, inject="last place")
    (row,) = document["differing"]
    assert (document["exit"], row["level"], row["rank"], row["tolerance"]) == (1, "forward", 1, 0)


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_rank_opens_the_files_of_its_stage_alone(
    pool: GlooPool, hf_of: Callable[[str], Path], tmp_path: Path, to: str
) -> None:
    ckptx.reshard(hf_of("llama-tied"), tmp_path / "cut", to=to, pp=2)
    document, text = run_verify(pool, hf_of("llama-tied"), tmp_path / "cut", 1, 1, pp=2)
    assert_equal(document, text, ParallelDims(pp=2))
    stored = {name: tensor.nbytes for name, tensor in read_hf(hf_of("llama-tied")).items()}
    first, last = document["bytes_read_per_rank"]
    assert first + last == sum(stored.values()) + stored["model.embed_tokens.weight"]  # which both stages use
    assert last - first == stored["model.norm.weight"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp_shard": 2, "schedule": "zbvzerobubble"}, "with FSDP2"),
        ({"schedule": "interleavedzerobubble", "activation_checkpointing": "selective"}, "pass of a layer twice"),
        ({"microbatches": 1}, "requires at least 2 microbatches for 2 stages, not 1"),
        ({"pp_split": "3,0"}, "expected 2 stages with 2 layers, none below 0, found 2 stages with 3 layers"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(
    pool: GlooPool, hf_of: Callable[[str], Path], settings: dict[str, object], said: str
) -> None:
    given = {"tp": 1, "dp_shard": 1, "pp": 2, **settings}
    kind, words = run_verify(pool, hf_of("llama-untied"), hf_of("llama-untied"), **given)
    assert str(kind) in ("UnsupportedError", "UsageError")
    assert said in words


def test_without_a_backward_pass_logits_are_the_same(pool: GlooPool, hf_of: Callable[[str], Path]) -> None:
    document, _ = run_verify(pool, hf_of("llama-tied"), hf_of("llama-tied"), 1, 1, pp=2, backward=False)
    assert (document["exit"], document["max_abs"], document["gradients"]) == (0, 0, None)
