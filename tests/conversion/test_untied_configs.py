"""A config that ties two different tensors: both are kept, and the config of safetensors is edited where that helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.report.documents.conversion import ConversionReport
from tests.conversion.steps import CONFIG, TIED
from tests.support.checkpoint_writers import llama, value, write_hf

T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 8, "d_ff": 12, "d_kv": 4,
    "num_heads": 2, "num_layers": 1, "vocab_size": 16, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True,
}  # fmt: skip
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {**CONFIG, "model_type": "llama"},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "image_size": 8, "patch_size": 4,
    },
}  # fmt: skip
COMMANDS = ["to-hf", "to-megatron", "safetensors", "to-dcp", "dcp"]
READS_CONFIG = COMMANDS[:3]  # outputs whose loaders take the ties from the config


def run(command: str, source: Path, out: Path) -> ConversionReport:
    if command.startswith("to-"):
        return ckptx.convert(command, source, out, allow_config_mismatch=True)
    return ckptx.reshard(source, out, to=command, tp=2, allow_config_mismatch=True)


def written_config(out: Path, command: str) -> Any:
    return json.loads((out / ("release" if command == "to-megatron" else "") / "config.json").read_text())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("config", [TIED, CONFIG], ids=["tied", "untied"])
def test_the_flag_is_written_as_false(tmp_path: Path, config: dict[str, Any], command: str) -> None:
    source = write_hf(tmp_path / "hf", llama(), config=config)
    report = run(command, source, tmp_path / "out")
    is_edited = config is TIED and command in READS_CONFIG
    edit = {"key": "tie_word_embeddings", "before": True, "after": False}
    assert report.config_edits == ([edit] if is_edited else [])
    notes = [note for note in report.notes if "tie_word_embeddings written" in note]
    assert notes == (["tie_word_embeddings written as false: the tensors differ"] if is_edited else [])
    expected = {**config, "tie_word_embeddings": False} if is_edited else config
    assert written_config(tmp_path / "out", command) == expected


@pytest.mark.parametrize(("whole", "text"), [(True, True), (None, True), (True, False), (True, None), (None, False)])
@pytest.mark.parametrize("command", ["to-hf", "safetensors", "dcp"])
def test_flags_of_the_whole_and_of_the_text_model(
    tmp_path: Path, command: str, whole: bool | None, text: bool | None
) -> None:
    config: dict[str, Any] = {**LLAVA, "text_config": {**LLAVA["text_config"], "tie_word_embeddings": text}}
    if text is None:
        del config["text_config"]["tie_word_embeddings"]
    if whole is not None:
        config["tie_word_embeddings"] = whole
    tensors = {f"language_model.{name}": tensor for name, tensor in llama().items()}
    report = run(command, write_hf(tmp_path / "hf", tensors, config=config), tmp_path / "out")
    if command == "dcp" or not (whole or text):
        assert report.config_edits == [] and written_config(tmp_path / "out", command) == config
        return
    assert report.config_edits == [
        {"key": "text_config.tie_word_embeddings", "before": text, "after": False},
        {"key": "tie_word_embeddings", "before": whole, "after": False},
    ]
    assert written_config(tmp_path / "out", command) == {
        **config,
        "tie_word_embeddings": False,
        "text_config": {**config["text_config"], "tie_word_embeddings": False},
    }


@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("command", ["to-hf", "safetensors", "dcp"])
def test_a_class_that_always_ties_is_noted_where_its_loader_would_overwrite_a_tensor(
    tmp_path: Path, command: str, is_equal: bool
) -> None:
    shared = value("BF16", 16, 8, seed=1)
    tensors = {"shared.weight": shared, "lm_head.weight": shared if is_equal else value("BF16", 16, 8, seed=2)}
    report = run(command, write_hf(tmp_path / "hf", tensors, config=T5), tmp_path / "out")
    note = (
        '"lm_head.weight" and "shared.weight" differ, but the class always ties them: from_pretrained would load one '
        "for both from sharded safetensors; convert to-hf for from_pretrained, or load with torch's "
        "HuggingFaceStorageReader"
    )
    assert (note in report.notes) == (command == "safetensors" and not is_equal)
    unchanged = "tie_word_embeddings is unchanged: T5ForConditionalGeneration computes with it"
    assert (unchanged in report.notes) == (command != "dcp" and not is_equal)
    assert report.config_edits == [] and written_config(tmp_path / "out", command) == T5


@pytest.mark.parametrize("command", ["safetensors", "to-hf"])
def test_a_flag_that_is_edited_needs_no_note_on_loaders(tmp_path: Path, command: str) -> None:
    report = run(command, write_hf(tmp_path / "hf", llama(), config=TIED), tmp_path / "out")
    assert not any("always ties them" in note for note in report.notes)
