"""Files beside the weights: what travels, what stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptx.errors import InputError
from ckptx.formats.sidecars import list_sidecars, sidecars_of_file
from ckptx.storage.local import LocalSource
from tests.support.memory_storage import MemoryPath


def lay_out(root: MemoryPath, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def around(root: MemoryPath, *used: str) -> tuple[list[str], list[str]]:
    found = list_sidecars(root, frozenset(used))
    assert all(sidecar.nbytes == root.size(sidecar.name) for sidecar in found.copied)
    return [sidecar.name for sidecar in found.copied], list(found.dropped)


def test_config_tokenizer_template_code_and_licence_travel(place: MemoryPath) -> None:
    names = sorted(["LICENSE", "chat_template.jinja", "config.json", "modeling_x.py", "tokenizer.model"])
    lay_out(place, *names, "model.safetensors")
    assert around(place, "model.safetensors") == (names, [])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "tf_model.h5", "model.gguf", "model.safetensors.index.json"])
def test_weights_that_are_not_used_stay_and_are_named(place: MemoryPath, name: str) -> None:
    lay_out(place, "config.json", "model.safetensors", name)
    assert around(place, "model.safetensors") == (["config.json"], [name])


def test_the_config_of_an_adapter_is_dropped(place: MemoryPath) -> None:
    """With the config alone, transformers looks for the adapter in the output, and fails."""
    lay_out(place, "config.json", "model.safetensors", "adapter_config.json")
    assert around(place, "model.safetensors") == (["config.json"], ["adapter_config.json"])
    lay_out(place, "adapter_model.safetensors")
    assert around(place, "model.safetensors") == (["config.json"], ["adapter_config.json", "adapter_model.safetensors"])


def test_our_own_marks_do_not_travel(place: MemoryPath) -> None:
    lay_out(place, "ckptx.json", ".metadata", "config.json", "__0_0.distcp")
    assert around(place, "__0_0.distcp") == (["config.json"], [])


def test_a_directory_of_other_weights_stays_whole(place: MemoryPath) -> None:
    lay_out(place, "config.json", "onnx/model.onnx", "onnx/config.json", "additional/vocab.txt")
    assert around(place) == (["additional/vocab.txt", "config.json"], ["onnx/config.json", "onnx/model.onnx"])


def test_modules_of_sentence_transformers_travel_with_their_weights(place: MemoryPath) -> None:
    lay_out(place, "model.safetensors", "2_Dense/model.safetensors", "2_Dense/config.json", "x/model.safetensors")
    (place / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}]))
    carried, left = around(place, "model.safetensors")
    assert carried == ["2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"]
    assert left == ["x/model.safetensors"]


@pytest.mark.parametrize("text", ["{}", "[1]", "{", '[{"path": 1}]'])
def test_somebody_elses_modules_json(place: MemoryPath, text: str) -> None:
    (place / "modules.json").write_text(text)
    assert around(place) == (["modules.json"], [])


def test_hidden_directories_and_depths_are_left_alone(place: MemoryPath) -> None:
    lay_out(place, ".git/config.json", ".cache/x.json", "a/b/c/kept.json", "a/b/c/d/deep.json")
    assert around(place) == (["a/b/c/kept.json"], [])


def test_logs_in_directories_stay_and_are_named(place: MemoryPath) -> None:
    lay_out(place, "config.json", "runs/events.out.tfevents.1", "templates/tool.jinja")
    assert around(place) == (["config.json", "templates/tool.jinja"], ["runs/events.out.tfevents.1"])


def test_the_directories_of_a_checkpoint_in_parts_hold_no_sidecars(place: MemoryPath) -> None:
    lay_out(place, "config.json", "model/.metadata", "model/__0_0.distcp", "optim/.metadata", "optim/__0_0.distcp")
    assert around(place, "model/__0_0.distcp", "optim/__0_0.distcp") == (["config.json"], [])


def test_one_file_among_anything_takes_only_what_is_a_models(place: MemoryPath) -> None:
    lay_out(place, "config.json", "tokenizer.json", "tokenizer_config.json", "modeling_x.py", "merges.txt")
    lay_out(place, "holiday.jpg", "notes.txt", "other.safetensors", "setup.py", "photos/a.json")
    names = [sidecar.name for sidecar in sidecars_of_file(place).copied]
    assert names == ["config.json", "merges.txt", "modeling_x.py", "tokenizer.json", "tokenizer_config.json"]


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("../blobs/abc")
    with pytest.raises(InputError, match=r"tokenizer\.json: symbolic link to \.\./blobs/abc, which does not exist"):
        list_sidecars(LocalSource(tmp_path), frozenset())


def test_a_directory_that_contains_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "loop").symlink_to(".")
    assert "config.json" in [each.name for each in list_sidecars(LocalSource(tmp_path), frozenset()).copied]
