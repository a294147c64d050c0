"""Which checkpoint a path means, and what is refused on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptx.catalog.catalog import CheckpointPart
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.registry import locate, open_checkpoint
from ckptx.formats.sharded.file_names import shard_name
from tests.formats.cut_writer import rows, write_shard
from tests.support.checkpoint_writers import INDEX, LLAMA, SINGLE, llama, value, write_dcp, write_hf, write_safetensors
from tests.support.memory_storage import MemoryPath

TENSORS = {"w": value("F32", 2, 2), "b": value("F32", 2)}


@pytest.mark.parametrize("path", ["", INDEX])
def test_an_index_or_its_directory(place: MemoryPath, path: str) -> None:
    write_hf(place, llama(), shards=2)
    catalog = open_checkpoint(place / path)
    assert (catalog.format, len(catalog.tensors), catalog.config) == ("huggingface", 21, LLAMA)


@pytest.mark.parametrize("path", ["", SINGLE])
def test_a_single_file_or_its_directory(place: MemoryPath, path: str) -> None:
    write_hf(place, llama())
    assert open_checkpoint(place / path).format == "huggingface"


def test_one_shard_by_name_is_that_shard_alone(place: MemoryPath) -> None:
    write_hf(place, llama(), shards=2)
    assert 0 < len(open_checkpoint(place / "model-00001-of-00002.safetensors").tensors) < 21


@pytest.mark.parametrize("path", ["", ".metadata"])
def test_a_dcp_or_its_metadata(place: MemoryPath, path: str) -> None:
    write_dcp(place, TENSORS, objects=["step"])
    catalog = open_checkpoint(place / path)
    assert (catalog.format, set(catalog.tensors), list(catalog.objects)) == ("dcp", {"w", "b"}, ["step"])


@pytest.mark.parametrize("parts", [("model", "optim"), ("pytorch_model_fsdp_0", "optimizer_0")])
def test_model_and_optimizer_side_by_side_are_one_checkpoint(place: MemoryPath, parts: tuple[str, str]) -> None:
    write_dcp(place / parts[0], {"w": TENSORS["w"]})
    write_dcp(place / parts[1], {"optim.state.w.exp_avg": TENSORS["w"]})
    catalog = open_checkpoint(place)
    assert set(catalog.tensors) == {"w", "optim.state.w.exp_avg"}
    assert set(catalog.files) == {f"{part}/__0_0.distcp" for part in parts}


def test_what_lies_in_the_optimizer_part_is_optimizer_state_by_name_too(place: MemoryPath) -> None:
    write_dcp(place / "model", TENSORS)
    write_dcp(place / "optim", TENSORS, objects=["step"])
    catalog = open_checkpoint(place)
    assert set(catalog.tensors) == {"w", "b", "optimizer.w", "optimizer.b"}
    assert all(name == entry.name for name, entry in catalog.tensors.items())


def test_parts_remember_what_it_takes_to_write_them_apart(place: MemoryPath) -> None:
    write_dcp(place / "model", TENSORS)
    write_dcp(place / "optim", {"optim.state.w": TENSORS["w"], "w": TENSORS["w"]}, objects=["step"])
    catalog = open_checkpoint(place)
    assert catalog.parts == (
        CheckpointPart("model", {"w": "w", "b": "b"}, {"w": ("w",), "b": ("b",)}),
        CheckpointPart(
            "optim",
            {"optim.state.w": "optim.state.w", "optimizer.w": "w", "step": "step"},
            {"optim.state.w": ("optim.state.w",), "w": ("w",), "step": ("step",)},
        ),
    )
    assert [name for part in catalog.parts for name in part.names] == [*catalog.tensors, *catalog.objects]
    assert open_checkpoint(place / "model").parts == ()


def test_an_object_that_both_parts_save_is_kept_twice(place: MemoryPath) -> None:
    write_dcp(place / "model", TENSORS, objects=["step"])
    write_dcp(place / "optim", {}, objects=["step"])
    catalog = open_checkpoint(place)
    assert {name: place.file for name, place in catalog.objects.items()} == {
        "step": "model/__0_0.distcp",
        "optimizer.step": "optim/__0_0.distcp",
    }
    assert catalog.parts[1].names == {"optimizer.step": "step"}


@pytest.mark.parametrize("path", ["", shard_name(2, 1, 1)])
def test_sharded_safetensors_or_one_of_their_files(place: MemoryPath, path: str) -> None:
    write_shard(place, 1, {"w": rows(TENSORS["w"], 0, 1)})
    write_shard(place, 2, {"w": rows(TENSORS["w"], 1, 2)})
    (place / "config.json").write_text(json.dumps(LLAMA))
    (place / INDEX).write_text("{}")
    catalog = open_checkpoint(place / path)
    assert (catalog.format, catalog.root, catalog.config) == ("sharded", place, LLAMA)
    assert catalog.tensors["w"].shape == (2, 2)
    assert [sidecar.name for sidecar in catalog.sidecars] == ["config.json"]
    assert [note.split(" ")[0] for note in catalog.notes] == [INDEX]


def test_shards_below_an_hf_checkpoint_stay_behind(place: MemoryPath) -> None:
    """What torch's writer leaves when it consolidates."""
    write_hf(place, llama())
    write_shard(place / "sharded", 1, {"w": (TENSORS["w"], (0, 0))})
    catalog = open_checkpoint(place)
    assert catalog.format == "huggingface"
    assert catalog.notes == [f"not copied: sharded/{shard_name(1, 1, 1)}"]


@pytest.mark.parametrize("config", [None, LLAMA])
def test_files_with_training_state_next_to_a_dcp_are_listed(place: MemoryPath, config: dict[str, Any] | None) -> None:
    """Files from which accelerate resumes travel with the two DCPs; those that nothing resumes from are noted."""
    write_dcp(place / "pytorch_model_fsdp_0", TENSORS)
    write_dcp(place / "optimizer_0", {"exp_avg": TENSORS["w"]})
    for name in ("scheduler.bin", "random_states_0.pkl", "training_args.bin", "unrelated.txt"):
        (place / name).write_text("")
    if config is not None:
        (place / "config.json").write_text(json.dumps(config))
    catalog = open_checkpoint(place)
    assert catalog.training_files == ("random_states_0.pkl", "scheduler.bin")
    assert catalog.notes == ["not copied: training_args.bin"]


def test_parts_with_a_name_in_common_are_refused(place: MemoryPath) -> None:
    write_dcp(place / "model", {"optimizer.w": TENSORS["w"]})
    write_dcp(place / "optim", {"w": TENSORS["w"]})
    with pytest.raises(InputError, match=r'"optimizer\.w" is in both model and optim'):
        open_checkpoint(place)


def test_the_one_checkpoint_below(place: MemoryPath) -> None:
    write_dcp(place / "run" / "step-10", TENSORS)
    (place / "run" / "logs").mkdir()
    assert open_checkpoint(place / "run").root == place / "run" / "step-10"
    assert open_checkpoint(place).root == place / "run" / "step-10"


def test_several_candidates_are_listed(place: MemoryPath) -> None:
    for step in range(1, 11):
        write_dcp(place / f"step-{step}", TENSORS)
    with pytest.raises(InputError, match=r"contains 10 checkpoints; choose one: .*step-1, .* and 2 more$"):
        open_checkpoint(place)


def test_a_hidden_directory_is_no_candidate(place: MemoryPath) -> None:
    write_dcp(place / ".cache", TENSORS)
    write_dcp(place / "step-1", TENSORS)
    assert open_checkpoint(place).root == place / "step-1"


def test_an_index_wins_over_shards_and_dcp_over_both(place: MemoryPath) -> None:
    write_hf(place, llama(), shards=2)
    assert locate(place).weights == (INDEX,)
    write_dcp(place, TENSORS)
    assert locate(place).kind == "dcp"


def test_bin_beside_safetensors_is_left_behind(place: MemoryPath) -> None:
    write_hf(place, llama())
    (place / "pytorch_model.bin").write_bytes(b"")
    catalog = open_checkpoint(place)
    assert catalog.format == "huggingface"
    assert any(note.startswith("pytorch_model.bin ") for note in catalog.notes)


def test_a_file_with_another_name_is_found_when_it_is_the_only_one(place: MemoryPath) -> None:
    write_safetensors(place / "diffusion_pytorch_model.safetensors", TENSORS)
    assert open_checkpoint(place).tensors.keys() == TENSORS.keys()


def refused(path: MemoryPath, kind: type[CkptxError], said: str) -> None:
    with pytest.raises(kind, match=said) as refusal:
        open_checkpoint(path)
    assert "\n" not in str(refusal.value)


def test_nothing_there(place: MemoryPath) -> None:
    refused(place / "gone", InputError, "gone: no such file or directory")
    refused(place, InputError, "no checkpoint found, the directory is empty")
    (place / "README.md").write_text("")
    refused(place, InputError, r"no \.metadata, \*\.safetensors or")
    refused(place / "README.md", InputError, "not a weight file or index")


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    refused(tmp_path / "link", InputError, "symbolic link to gone, which does not exist")


def test_kinds_that_are_known_and_not_read(place: MemoryPath) -> None:
    for name, said in {
        "model.gguf": "GGUF is not supported",
        "adapter_model.safetensors": "an adapter",
    }.items():
        (place / name).write_bytes(b"")
        refused(place / name, UnsupportedError, said)


def test_other_safetensors_beside_shards(place: MemoryPath) -> None:
    write_hf(place, llama(), shards=2)
    write_shard(place, 1, {"w": (TENSORS["w"], (0, 0))})
    refused(place, InputError, "contains model-00001-of-00002.safetensors, .* next to shard-")
    assert open_checkpoint(place / INDEX).format == "huggingface"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_directory(place: MemoryPath, name: str) -> None:
    (place / name).write_bytes(b"{}")
    refused(place, UnsupportedError, "an adapter")


def test_a_save_that_never_finished(place: MemoryPath) -> None:
    write_dcp(place, TENSORS)
    (place / ".metadata").unlink()
    refused(place, InputError, r"has \.distcp files but no \.metadata; the save was interrupted")


def test_both_a_single_file_and_an_index(place: MemoryPath) -> None:
    write_hf(place, llama(), shards=2)
    write_safetensors(place / SINGLE, llama())
    refused(place, InputError, "has both model.safetensors and model.safetensors.index.json, which does not list it")
    assert open_checkpoint(place / SINGLE).format == "huggingface"


def test_several_files_without_an_index(place: MemoryPath) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_safetensors(place / name, TENSORS)
    refused(place, InputError, "no model.safetensors or index, but a.safetensors, b.safetensors")


def test_an_unfinished_output(place: MemoryPath) -> None:
    tree = place / ".out.ckptx-partial" / "tree"
    write_dcp(tree, TENSORS)
    for path in (tree, tree / ".metadata", tree.parent):
        refused(path, InputError, "an unfinished output of ckptx")
    refused(place, InputError, "no checkpoint found")


@pytest.mark.parametrize("missing", [[], ["-00002"], ["-00001", "-00002", "-00003"]])
def test_an_unfinished_output_of_several_files(place: MemoryPath, missing: list[str]) -> None:
    """The index is written last."""
    tree = place / ".out.ckptx-partial" / "tree"
    write_hf(tree, llama(), shards=3)
    (tree / INDEX).unlink()
    for number in missing:
        (tree / f"model{number}-of-00003.safetensors").unlink()
    for path in (tree, tree.parent):
        refused(path, InputError, "an unfinished output of ckptx; run the conversion again with --resume")
    with pytest.raises(InputError) as caught:
        open_checkpoint(place / ".absent.ckptx-partial")
    assert "unfinished" not in str(caught.value)


def test_a_checkpoint_without_tensors(place: MemoryPath) -> None:
    write_safetensors(place / SINGLE, {})
    refused(place, InputError, "contains no tensors")
    write_dcp(place / "dcp", {}, objects=["step"])
    refused(place / "dcp", InputError, "contains no tensors")


def listed_by(place: MemoryPath, opened: MemoryPath) -> list[str]:
    """The directories that are listed to open a checkpoint, in order."""
    place.store.listed.clear()
    open_checkpoint(opened)
    return [str(path.relative_to(place.path)) for path in place.store.listed]


def test_every_directory_is_listed_once_and_only_if_it_decides(place: MemoryPath) -> None:
    write_hf(place / "hf", llama(), shards=2)
    (place / "hf" / ".cache" / "huggingface" / "x.lock").write_bytes(b"")
    assert listed_by(place, place / "hf") == ["hf"]
    (place / "hf" / "onnx" / "model.onnx").write_bytes(b"")
    assert listed_by(place, place / "hf") == ["hf", "hf/onnx"]
    write_dcp(place / "pair" / "model", TENSORS)
    write_dcp(place / "pair" / "optim", TENSORS)
    (place / "pair" / "logs" / "1").write_bytes(b"")
    assert listed_by(place, place / "pair") == ["pair", "pair/optim", "pair/model"]
    write_dcp(place / "run" / "step-2" / "dcp", TENSORS)
    (place / "run" / "logs" / "a" / "b" / "c" / "d").write_bytes(b"")
    assert listed_by(place, place / "run") == ["run", "run/logs", "run/logs/a", "run/step-2", "run/step-2/dcp"]


def test_what_is_nowhere_is_searched_for_once(place: MemoryPath) -> None:
    """Two levels down, whichever of the questions is asked there."""
    for number in range(3):
        (place / "none" / f"{number}" / "a" / "b" / "c.txt").write_bytes(b"")
    place.store.listed.clear()
    refused(place / "none", InputError, "no checkpoint found")
    listed = [str(path.relative_to(place.path)) for path in place.store.listed]
    assert len(listed) == len(set(listed)) == 1 + 3 + 3
