"""Which checkpoint a path means, and what is refused on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptx.catalog.catalog import Part
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.registry import locate, open_checkpoint
from ckptx.formats.sharded.file_names import shard_name
from tests.formats.cut_writer import rows, write_shard
from tests.support.writers import INDEX, LLAMA, SINGLE, llama, value, write_dcp, write_hf, write_safetensors

TENSORS = {"w": value("F32", 2, 2), "b": value("F32", 2)}


@pytest.mark.parametrize("path", ["", INDEX])
def test_an_index_or_its_directory(tmp_path: Path, path: str) -> None:
    write_hf(tmp_path, llama(), shards=2)
    catalog = open_checkpoint(tmp_path / path)
    assert (catalog.format, len(catalog.tensors), catalog.config) == ("huggingface", 21, LLAMA)


@pytest.mark.parametrize("path", ["", SINGLE])
def test_a_single_file_or_its_directory(tmp_path: Path, path: str) -> None:
    write_hf(tmp_path, llama())
    assert open_checkpoint(tmp_path / path).format == "huggingface"


def test_one_shard_by_name_is_that_shard_alone(tmp_path: Path) -> None:
    write_hf(tmp_path, llama(), shards=2)
    assert 0 < len(open_checkpoint(tmp_path / "model-00001-of-00002.safetensors").tensors) < 21


@pytest.mark.parametrize("path", ["", ".metadata"])
def test_a_dcp_or_its_metadata(tmp_path: Path, path: str) -> None:
    write_dcp(tmp_path, TENSORS, objects=["step"])
    catalog = open_checkpoint(tmp_path / path)
    assert (catalog.format, set(catalog.tensors), list(catalog.objects)) == ("dcp", {"w", "b"}, ["step"])


@pytest.mark.parametrize("parts", [("model", "optim"), ("pytorch_model_fsdp_0", "optimizer_0")])
def test_model_and_optimizer_side_by_side_are_one_checkpoint(tmp_path: Path, parts: tuple[str, str]) -> None:
    write_dcp(tmp_path / parts[0], {"w": TENSORS["w"]})
    write_dcp(tmp_path / parts[1], {"optim.state.w.exp_avg": TENSORS["w"]})
    catalog = open_checkpoint(tmp_path)
    assert set(catalog.tensors) == {"w", "optim.state.w.exp_avg"}
    assert set(catalog.files) == {f"{part}/__0_0.distcp" for part in parts}


def test_what_lies_in_the_optimizer_part_is_optimizer_state_by_name_too(tmp_path: Path) -> None:
    write_dcp(tmp_path / "model", TENSORS)
    write_dcp(tmp_path / "optim", TENSORS, objects=["step"])
    catalog = open_checkpoint(tmp_path)
    assert set(catalog.tensors) == {"w", "b", "optimizer.w", "optimizer.b"}
    assert all(name == entry.name for name, entry in catalog.tensors.items())


def test_parts_remember_what_it_takes_to_write_them_apart(tmp_path: Path) -> None:
    write_dcp(tmp_path / "model", TENSORS)
    write_dcp(tmp_path / "optim", {"optim.state.w": TENSORS["w"], "w": TENSORS["w"]}, objects=["step"])
    catalog = open_checkpoint(tmp_path)
    assert catalog.parts == (
        Part("model", {"w": "w", "b": "b"}, {"w": ("w",), "b": ("b",)}),
        Part(
            "optim",
            {"optim.state.w": "optim.state.w", "optimizer.w": "w", "step": "step"},
            {"optim.state.w": ("optim.state.w",), "w": ("w",), "step": ("step",)},
        ),
    )
    assert [name for part in catalog.parts for name in part.names] == [*catalog.tensors, *catalog.objects]
    assert open_checkpoint(tmp_path / "model").parts == ()


def test_an_object_that_both_parts_save_is_kept_twice(tmp_path: Path) -> None:
    write_dcp(tmp_path / "model", TENSORS, objects=["step"])
    write_dcp(tmp_path / "optim", {}, objects=["step"])
    catalog = open_checkpoint(tmp_path)
    assert {name: place.file for name, place in catalog.objects.items()} == {
        "step": "model/__0_0.distcp",
        "optimizer.step": "optim/__0_0.distcp",
    }
    assert catalog.parts[1].names == {"optimizer.step": "step"}


@pytest.mark.parametrize("path", ["", shard_name(2, 1, 1)])
def test_sharded_safetensors_or_one_of_their_files(tmp_path: Path, path: str) -> None:
    write_shard(tmp_path, 1, {"w": rows(TENSORS["w"], 0, 1)})
    write_shard(tmp_path, 2, {"w": rows(TENSORS["w"], 1, 2)})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / INDEX).write_text("{}")
    catalog = open_checkpoint(tmp_path / path)
    assert (catalog.format, catalog.root, catalog.config) == ("sharded", tmp_path, LLAMA)
    assert catalog.tensors["w"].shape == (2, 2)
    assert [sidecar.name for sidecar in catalog.sidecars] == ["config.json"]
    assert [note.split(" ")[0] for note in catalog.notes] == [INDEX]


def test_shards_below_an_hf_checkpoint_stay_behind(tmp_path: Path) -> None:
    """What torch's writer leaves when it consolidates."""
    write_hf(tmp_path, llama())
    write_shard(tmp_path / "sharded", 1, {"w": (TENSORS["w"], (0, 0))})
    catalog = open_checkpoint(tmp_path)
    assert catalog.format == "huggingface"
    assert catalog.notes == [f"not carried: sharded/{shard_name(1, 1, 1)}"]


def test_parts_with_a_name_in_common_are_refused(tmp_path: Path) -> None:
    write_dcp(tmp_path / "model", {"optimizer.w": TENSORS["w"]})
    write_dcp(tmp_path / "optim", {"w": TENSORS["w"]})
    with pytest.raises(InputError, match=r'"optimizer\.w" is in two parts'):
        open_checkpoint(tmp_path)


def test_the_one_checkpoint_below(tmp_path: Path) -> None:
    write_dcp(tmp_path / "run" / "step-10", TENSORS)
    (tmp_path / "run" / "logs").mkdir()
    assert open_checkpoint(tmp_path / "run").root == tmp_path / "run" / "step-10"
    assert open_checkpoint(tmp_path).root == tmp_path / "run" / "step-10"


def test_several_candidates_are_listed(tmp_path: Path) -> None:
    for step in range(1, 11):
        write_dcp(tmp_path / f"step-{step}", TENSORS)
    with pytest.raises(InputError, match=r"holds 10 checkpoints, needed one; pass one of: .*step-1, .* and 2 more$"):
        open_checkpoint(tmp_path)


def test_a_hidden_directory_is_no_candidate(tmp_path: Path) -> None:
    write_dcp(tmp_path / ".cache", TENSORS)
    write_dcp(tmp_path / "step-1", TENSORS)
    assert open_checkpoint(tmp_path).root == tmp_path / "step-1"


def test_an_index_wins_over_shards_and_dcp_over_both(tmp_path: Path) -> None:
    write_hf(tmp_path, llama(), shards=2)
    assert locate(tmp_path).weights == (INDEX,)
    write_dcp(tmp_path, TENSORS)
    assert locate(tmp_path).kind == "dcp"


def test_bin_beside_safetensors_is_left_behind(tmp_path: Path) -> None:
    write_hf(tmp_path, llama())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    catalog = open_checkpoint(tmp_path)
    assert catalog.format == "huggingface"
    assert any(note.startswith("pytorch_model.bin ") for note in catalog.notes)


def test_a_file_with_another_name_is_found_when_it_is_the_only_one(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "diffusion_pytorch_model.safetensors", TENSORS)
    assert open_checkpoint(tmp_path).tensors.keys() == TENSORS.keys()


def refused(path: Path, kind: type[CkptxError], said: str) -> None:
    with pytest.raises(kind, match=said) as refusal:
        open_checkpoint(path)
    assert "\n" not in str(refusal.value)


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "gone", InputError, "gone: no such file or directory")
    refused(tmp_path, InputError, "no checkpoint found, it is empty")
    (tmp_path / "README.md").write_text("")
    refused(tmp_path, InputError, r"no \.metadata, \*\.safetensors or")
    refused(tmp_path / "README.md", InputError, "is no weight file or index")
    (tmp_path / "link").symlink_to("gone")
    refused(tmp_path / "link", InputError, "symbolic link to gone, which does not exist")


def test_kinds_that_are_known_and_not_read(tmp_path: Path) -> None:
    for name, said in {
        "model.gguf": "GGUF is not read",
        "adapter_model.safetensors": "an adapter",
    }.items():
        (tmp_path / name).write_bytes(b"")
        refused(tmp_path / name, UnsupportedError, said)


def test_other_safetensors_beside_shards(tmp_path: Path) -> None:
    write_hf(tmp_path, llama(), shards=2)
    write_shard(tmp_path, 1, {"w": (TENSORS["w"], (0, 0))})
    refused(tmp_path, InputError, "holds model-00001-of-00002.safetensors, .* beside shard-")
    assert open_checkpoint(tmp_path / INDEX).format == "huggingface"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    refused(tmp_path, UnsupportedError, "an adapter")


def test_a_save_that_never_finished(tmp_path: Path) -> None:
    write_dcp(tmp_path, TENSORS)
    (tmp_path / ".metadata").unlink()
    refused(tmp_path, InputError, r"has \.distcp files but no \.metadata; the save was interrupted")


def test_both_a_single_file_and_an_index(tmp_path: Path) -> None:
    write_hf(tmp_path, llama(), shards=2)
    write_safetensors(tmp_path / SINGLE, llama())
    refused(tmp_path, InputError, "has both model.safetensors and model.safetensors.index.json")
    assert open_checkpoint(tmp_path / SINGLE).format == "huggingface"


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_safetensors(tmp_path / name, TENSORS)
    refused(tmp_path, InputError, "no model.safetensors or index, but a.safetensors, b.safetensors")


def test_an_unfinished_output(tmp_path: Path) -> None:
    tree = tmp_path / ".out.ckptx-partial" / "tree"
    write_dcp(tree, TENSORS)
    for path in (tree, tree / ".metadata", tree.parent):
        refused(path, InputError, "an unfinished output of ckptx")
    refused(tmp_path, InputError, "no checkpoint found")


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / SINGLE, {})
    refused(tmp_path, InputError, "holds no tensors")
    write_dcp(tmp_path / "dcp", {}, objects=["step"])
    refused(tmp_path / "dcp", InputError, "holds no tensors")
