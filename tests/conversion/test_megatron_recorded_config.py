"""The config that ckptx wrote a Megatron checkpoint with: other heads give other rows of q, k and v."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import ckptx
from ckptx.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
OTHERS: list[dict[str, Any]] = [
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with an HF checkpoint and the Megatron checkpoint that ckptx made of it."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, **HEADS)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    ckptx.convert("to-megatron", tmp_path / "hf", tmp_path / "megatron")
    return tmp_path


def edit(config: Path, **changes: Any) -> None:
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("to", ["to-hf", "to-dcp", "reshard"])
@pytest.mark.parametrize("place", ["base", "own"])
def test_other_heads_are_refused(saved: Path, other: dict[str, Any], to: str, place: str) -> None:
    shutil.copytree(saved / "hf", saved / "base")
    edit((saved / "base" if place == "base" else saved / "megatron" / "release") / "config.json", **other)
    options = {"base": saved / "base"} if place == "base" else {}
    with pytest.raises(InputError, match="order of rows in linear_qkv") as caught:
        if to == "reshard":
            ckptx.reshard(saved / "megatron", saved / "out", tp=2, **options)
        else:
            ckptx.convert(to, saved / "megatron", saved / "out", **options)
    assert "\n" not in str(caught.value) and not (saved / "out").exists()


@pytest.mark.parametrize("changes", [{}, {"rope_theta": 5e5}, {"max_position_embeddings": 64}])
def test_a_base_with_the_same_heads_is_accepted(saved: Path, changes: dict[str, Any]) -> None:
    shutil.copytree(saved / "hf", saved / "base")
    edit(saved / "base" / "config.json", **changes)
    ckptx.convert("to-hf", saved / "megatron", saved / "out", base=saved / "base")
    expected, found = (load_file(saved / name / "model.safetensors") for name in ("hf", "out"))
    assert expected.keys() == found.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_checkpoint_of_megatron_itself_has_no_recorded_config(saved: Path) -> None:
    """Without ckptx.json nothing is known of the config, so that the one next to the tensors is used."""
    (saved / "megatron" / "ckptx.json").unlink()
    ckptx.convert("to-hf", saved / "megatron", saved / "out")
    assert ckptx.verify(saved / "hf", saved / "out").exit == 0
