"""HF to HF: a weight file that a trainer saved without a config becomes a complete directory in one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptx
from tests.support.checkpoint_writers import LLAMA, llama, names_in, write_hf

CONFIG = LLAMA | {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 16,
    "intermediate_size": 24,
}
PREFIXES = ["", "_orig_mod.", "module.", "module._orig_mod."]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    root = write_hf(tmp_path / "base", llama(), config=CONFIG)
    (root / "tokenizer.json").write_text("{}")
    (root / "generation_config.json").write_text("{}")
    return root


def saved(base: Path, prefix: str, kind: str) -> Path:
    """Save the state dict of a model, in float32 and with wrappers in its names, as accelerate does."""
    tensors = {f"{prefix}{name}": tensor.float() for name, tensor in load_file(base / "model.safetensors").items()}
    root = base.parent / "state"
    root.mkdir()
    if kind == "safetensors":
        save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, root / "pytorch_model.bin")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        (root / name).write_bytes(b"")
    return root


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_one_command_makes_a_complete_directory(base: Path, tmp_path: Path, prefix: str, kind: str) -> None:
    source, out = saved(base, prefix, kind), tmp_path / "out"
    report = ckptx.convert("to-hf", source, out, base=base, dtype="bf16", max_shard_size="2KB")
    names = names_in(out)
    assert {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json"} <= set(names)
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 1
    stored = {name: tensor for shard in shards for name, tensor in load_file(out / shard).items()}
    expected = load_file(base / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert ckptx.verify(source, out, dtype="bf16").ok and ckptx.verify(base, out).ok
    wrappers = [f'wrapper "{each}." removed from {len(expected)} names' for each in prefix.split(".") if each]
    assert sorted(note for note in report.notes if note.startswith("wrapper")) == sorted(wrappers)


@pytest.mark.parametrize("prefix", PREFIXES[1:])
def test_wrappers_are_removed_in_every_direction(base: Path, tmp_path: Path, prefix: str) -> None:
    source = saved(base, prefix, "safetensors")
    (source / "config.json").write_text(json.dumps(CONFIG))
    assert ckptx.inspect(source).config_check["mismatches"] == []  # type: ignore[index]
    ckptx.convert("to-dcp", source, tmp_path / "dcp")
    ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "back")
    ckptx.reshard(source, tmp_path / "tp2", tp=2)
    ckptx.convert("to-hf", tmp_path / "tp2", tmp_path / "whole")
    for name in ("dcp", "back", "tp2", "whole"):
        assert ckptx.verify(base, tmp_path / name, dtype="fp32").ok and ckptx.verify(source, tmp_path / name).ok
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


def test_names_that_the_class_knows_are_unchanged(base: Path, tmp_path: Path) -> None:
    """A part of the names has a wrapper: an unknown tensor, which the check against the config reports."""
    tensors = load_file(base / "model.safetensors")
    tensors["_orig_mod.extra"] = torch.ones(1)
    save_file(tensors, base / "model.safetensors")
    ckptx.convert("to-hf", base, tmp_path / "out", allow_config_mismatch=True)
    assert "_orig_mod.extra" in load_file(tmp_path / "out" / "model.safetensors")
