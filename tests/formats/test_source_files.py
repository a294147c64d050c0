"""Messages about a checkpoint that was passed as a file name the file, not its directory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptx
from ckptx.errors import CkptxError, InputError
from ckptx.formats.registry import open_checkpoint
from tests.support.checkpoint_writers import LLAMA, llama, write_hf
from tests.support.forged_deepspeed import Checkpoint

CONFIG = LLAMA | {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}


def tensors(root: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(write_hf(root / "hf", llama()) / "model.safetensors")
    return loaded


def whole(root: Path) -> Path:
    return write_hf(root, llama()) / "model.safetensors"


def custom_name(root: Path) -> Path:
    return whole(root).rename(root / "step-5.safetensors")


def index(root: Path) -> Path:
    return write_hf(root, llama(), shards=2) / "model.safetensors.index.json"


def flat(name: str) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        torch.save(tensors(root), root / name)
        return root / name

    return write


def nested(root: Path) -> Path:
    torch.save({"model": tensors(root), "step": 5}, root / "step.pt")
    return root / "step.pt"


def bin_index(root: Path) -> Path:
    path = flat("part.bin")(root)
    path.with_name("pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors(root), "part.bin")})
    )
    return path.with_name("pytorch_model.bin.index.json")


def deepspeed(root: Path) -> Path:
    values = {name: tensor.float().numpy() for name, tensor in tensors(root).items()}
    Checkpoint([values], ranks=1, stage=0).write(root)
    return root / "mp_rank_00_model_states.pt"


WRITERS = {
    "model.safetensors": whole,
    "safetensors of another name": custom_name,
    "index": index,
    "pytorch_model.bin": flat("pytorch_model.bin"),
    "flat .pt": flat("step.pt"),
    "nested .pt": nested,
    "index of .bin": bin_index,
    "deepspeed": deepspeed,
}


@pytest.fixture(params=WRITERS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    path = WRITERS[request.param](root)
    shutil.rmtree(root / "hf", ignore_errors=True)
    (root / "config.json").unlink(missing_ok=True)
    return path


def test_an_error_names_the_file(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(str(file))}: has no config.json"):
        ckptx.convert("to-hf", file, tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1, "vocab_size": 77}))
    with pytest.raises(CkptxError, match=f"^{re.escape(str(file))}: does not match its config"):
        ckptx.convert("to-hf", file, tmp_path / "out", base=other)


def test_notes_on_two_files_of_one_directory_differ(file: Path, tmp_path: Path) -> None:
    catalog = open_checkpoint(file)
    assert catalog.location == file and catalog.root == file.parent
    (file.parent / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 77}))
    reference = write_hf(tmp_path / "reference", llama(), config=CONFIG)
    report = ckptx.diff(reference, file)
    assert any(note.startswith(f"{file}: does not match its config") for note in report.notes), report.notes


def test_a_directory_is_named_as_a_directory(tmp_path: Path) -> None:
    root = write_hf(tmp_path / "hf", llama())
    catalog = open_checkpoint(root)
    assert catalog.location == catalog.root == root
