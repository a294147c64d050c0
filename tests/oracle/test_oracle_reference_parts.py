"""`verify --run --reference-memory`: the same answers from a reference, or two sides, of which a piece is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptx
from ckptx.errors import SpaceError, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from tests.support.models import randomize, transformers
from tests.support.pool import GlooPool
from tests.support.verify_runs import assert_equal, run_verify

_SMALL = 22_000_000  # a bound that takes several pieces


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama of six layers, each of which takes more than the activations of a batch."""
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=1000, tie_word_embeddings=True,
    )  # fmt: skip
    randomize(transformers.LlamaForCausalLM(config)).save_pretrained(path)
    return path


def changed(hf: Path, to: Path, *, tensor: str = "", **config: Any) -> Path:
    """A copy with the rows of one tensor in another order, or another config."""
    tensors = load_file(hf / "model.safetensors")
    if tensor:
        tensors[tensor] = tensors[tensor].roll(1, 0)
    to.mkdir()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((hf / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(said | config))
    return to


@pytest.mark.parametrize(
    "settings", [{"activation_checkpointing": "selective"}, pytest.param({}, marks=pytest.mark.slow)]
)
def test_on_one_rank_both_sides_are_walked_in_pieces(
    pool: GlooPool, hf: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    ckptx.reshard(hf, tmp_path / "cut", to="dcp", pp=2)
    whole, _ = run_verify(pool, hf, tmp_path / "cut", 1, 1)
    assert whole["reference_parts"] == 1
    found, text = run_verify(pool, hf, tmp_path / "cut", 1, 1, reference_memory=_SMALL, **settings)
    assert_equal(found, text, ParallelDims(), wrapped=6 if settings else 0)
    assert found["reference_parts"] > 2
    assert f"reference  run in {found['reference_parts']} parts, one after another" in text
    same = (
        "loss",
        "max_abs",
        "max_abs_tolerance",
        "grad_max_abs",
        "gradients",
        "compared",
        "bytes_read",
        "without_gradient",
    )
    assert {name: found[name] for name in same} == {name: whole[name] for name in same}
    assert (found["max_abs"], found["grad_max_abs"]) == (0, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_shard": 2}, {"pp": 2}])
def test_ranks_are_held_against_a_reference_in_pieces(pool: GlooPool, hf: Path, layout: dict[str, int]) -> None:
    given = {"tp": 1, "dp_shard": 1, **layout}
    whole, _ = run_verify(pool, hf, hf, **given)
    found, text = run_verify(pool, hf, hf, reference_memory=_SMALL, **given)
    assert_equal(found, text, ParallelDims(**given))
    assert (whole["reference_parts"], found["reference_parts"] > 2) == (1, True)
    same = ("loss_reference", "loss_tolerance", "max_abs_tolerance", "gradients", "logits_std")
    assert {name: found[name] for name in same} == {name: whole[name] for name in same}
    limits = [{row["name"]: row["tolerance"] for row in each["gradient_differences"]} for each in (whole, found)]
    assert limits[0] == limits[1]


def test_without_a_backward_pass_too(pool: GlooPool, hf: Path) -> None:
    found, text = run_verify(pool, hf, hf, 1, 1, reference_memory=16_000_000, backward=False)
    assert (found["exit"], found["gradients"], found["max_abs"]) == (0, None, 0), text
    assert found["reference_parts"] > 1


def test_the_least_is_named_and_is_enough(pool: GlooPool, hf: Path) -> None:
    for error, said in pool.run(_refused, 1, str(hf), 10**6):
        assert error == "SpaceError"
        least = re.search(r"requires at least .* in up to 6 parts, .*; use --reference-memory (\d+)MB", said)
        assert least is not None, said
    found, text = run_verify(pool, hf, hf, 1, 1, reference_memory=int(least[1]) * 10**6)
    assert_equal(found, text, ParallelDims())


def _refused(rank: int, world_size: int, path: str, memory: int) -> tuple[str, str]:
    from tests.support.verify_runs import verify_on_rank

    found: tuple[str, str] = verify_on_rank(rank, world_size, path, path, {"reference_memory": memory})
    return found


def test_a_size_is_a_size(hf: Path) -> None:
    with pytest.raises(UsageError, match='--reference-memory: "lots" is not a size'):
        ckptx.verify(hf, hf, run=True, reference_memory="lots")
    with pytest.raises(SpaceError, match=r"the limit is 1\.00 MiB"):
        ckptx.verify(hf, hf, run=True, device="cpu", reference_memory="1MiB")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [{}, {"pp": 2}])
@pytest.mark.parametrize(
    ("tensor", "config", "levels", "module"),
    [
        ("model.layers.5.mlp.up_proj.weight", {}, {"bytes", "forward", "gradients"}, "model.layers.5.mlp.up_proj"),
        ("", {"rms_norm_eps": 1e-2}, {"config", "forward", "gradients"}, "model.layers.0.input_layernorm"),
    ],
)
def test_what_differs_is_named_in_pieces_and_stages_as_in_the_whole(
    pool: GlooPool, hf: Path, tmp_path: Path, tensor: str, config: dict[str, Any], levels: set[str], module: str,
    layout: dict[str, int],
) -> None:  # fmt: skip
    other = changed(hf, tmp_path / "other", tensor=tensor, **config)
    documents = []
    for settings in ({}, {"reference_memory": _SMALL}):
        found, text = run_verify(pool, hf, other, 1, 1, **layout, **settings)
        assert (found["exit"], {row["level"] for row in found["differing"]}) == (1, levels), text
        assert found["first_divergence"]["module"] == module
        documents.append(found)
    whole, pieces = documents
    assert (whole["reference_parts"], pieces["reference_parts"] > 1) == (1, True)
    assert whole["first_divergence"] == pieces["first_divergence"]
    rows = [{(row["level"], row["name"], row.get("max_abs")) for row in each["differing"]} for each in documents]
    assert rows[0] == rows[1]


def test_a_missing_and_a_needless_tensor_are_named(pool: GlooPool, hf: Path, tmp_path: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    other = changed(hf, tmp_path / "other")
    save_file({**tensors, "model.more.weight": torch.ones(2)}, other / "model.safetensors", metadata={"format": "pt"})
    found, text = run_verify(pool, hf, other, 1, 1, reference_memory=_SMALL)
    assert [(row["level"], row["name"]) for row in found["differing"]] == [("bytes", "model.more.weight")], text
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    ((error, said),) = pool.run(_refused, 1, str(other), _SMALL)
    assert (error, "model.layers.3.mlp.up_proj.weight" in said) == ("InputError", True)
