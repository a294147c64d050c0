"""Every writer stock torch has, and model names as trainers save them: the output must load and compute the same."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

import ckptx
from ckptx.errors import UnsupportedError
from tests.support.models import (
    EVERY,
    RECIPES,
    WIDE,
    assert_same_outputs,
    load,
    outputs,
    read_file,
    read_hf,
    write,
)
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors, metadata, raw
from tests.support.torch_dcp import load as stock_load

FAST = (
    "llama-tied",
    "llama-both-different",
    "gpt2",
    "mixtral",
    "t5",
    "gemma3-vlm",
    "qwen3-moe",
    "bert-pretraining",
    "phi3",
)
LLAMA = RECIPES["llama-tied"]
NAMES = slow_but((*RECIPES, *WIDE), RECIPES)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "hf"
    write(LLAMA, path)
    return path


def save(state: dict[str, Any], path: Path, **options: Any) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)
    return path


# Names of the model, not of its files


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", slow_but((*RECIPES, *WIDE), FAST))
def test_state_dict_of_the_model_becomes_a_checkpoint_that_loads(recipe: str, tmp_path: Path) -> None:
    """`model.state_dict()` has the names of modules, which differ from those on disk for one class in six, holds every
    tied name, and lies below any prefix."""
    write(EVERY[recipe], tmp_path / "hf")
    model = load(tmp_path / "hf")
    expected = outputs(model, EVERY[recipe].inputs())
    state = model.state_dict()
    for i, prefix in enumerate(("", "model.", "state.model.", "module.", "app._orig_mod.")):
        saved = save({f"{prefix}{name}": tensor for name, tensor in state.items()}, tmp_path / f"dcp{i}")
        report = ckptx.convert("dcp2hf", saved, tmp_path / f"out{i}", base=str(tmp_path / "hf"))
        assert report.dropped == []
        assert_same_outputs(outputs(load(tmp_path / f"out{i}"), EVERY[recipe].inputs()), expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recipe", slow_but((*RECIPES, *WIDE), FAST))
def test_names_of_modules_are_known(recipe: str, tmp_path: Path) -> None:
    write(EVERY[recipe], tmp_path / "hf")
    saved = save({f"model.{name}": t for name, t in load(tmp_path / "hf").state_dict().items()}, tmp_path / "dcp")
    report = ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(tmp_path / "hf"))
    assert list(report.unknown_tensors or ()) == []


# Writers


def test_one_file_per_tensor(hf: Path, tmp_path: Path) -> None:
    saved = save(read_hf(hf), tmp_path / "dcp", single_file_per_rank=False)
    assert len(list(saved.glob("*.distcp"))) == len(read_hf(hf))
    ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(hf))
    assert_same_tensors(read_hf(tmp_path / "out"), read_hf(hf))


def test_dcp_made_of_a_torch_file(hf: Path, tmp_path: Path) -> None:
    torch.save({"model": read_hf(hf), "epoch": 3, "rng": torch.arange(4)}, tmp_path / "model.pt")
    torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "dcp")
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=str(hf))
    assert_same_tensors(read_hf(tmp_path / "out"), read_hf(hf))
    assert [row["name"] for row in report.dropped] == ["rng"]
    assert report.objects["count"] == 1


def test_safetensors_payloads_inside_distcp_are_refused_by_name(hf: Path, tmp_path: Path) -> None:
    saved = save(read_hf(hf), tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(UnsupportedError, match="a safetensors payload"):
        ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(hf))
    assert not (tmp_path / "out").exists()


class Inverted(StreamTransformExtension):
    """Stores every byte inverted; stands for compression, which needs other packages."""

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        return Inverted()

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    def get_descriptor(self) -> str:
        return "stream.inverted/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                return output.write(bytes(byte ^ 0xFF for byte in bytes(data)))

            def flush(self) -> None:
                output.flush()

        return Writer()  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        raise AssertionError("only written")


def test_transformed_payloads_are_refused(hf: Path, tmp_path: Path) -> None:
    extensions: Sequence[StreamTransformExtension] = [Inverted()]
    saved = save(read_hf(hf), tmp_path / "dcp", _extensions=extensions)
    with pytest.raises(UnsupportedError, match=r"stream\.inverted"):
        ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(hf))
    assert not (tmp_path / "out").exists()


def test_sharded_safetensors_of_torch_become_an_hf_checkpoint(hf: Path, tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "dcp"), save_distributed=True)
    dcp.save(read_hf(hf), storage_writer=writer, no_dist=True)
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=str(hf))
    assert_same_tensors(read_hf(tmp_path / "out"), read_hf(hf))


def test_consolidated_safetensors_of_torch_are_an_hf_checkpoint(hf: Path, tmp_path: Path) -> None:
    names = sorted(read_hf(hf))
    mapping = {name: 1 + i % 2 for i, name in enumerate(names)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"), fqn_to_index_mapping=mapping)
    dcp.save(read_hf(hf), storage_writer=writer, no_dist=True)
    shutil.copy(hf / "config.json", tmp_path / "hf")
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    assert_same_tensors(stock_load(tmp_path / "dcp", names), read_hf(hf))
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out")
    for file in (tmp_path / "hf").glob("model*"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_torch_reads_the_safetensors_that_ckptx_writes(hf: Path, tmp_path: Path) -> None:
    ckptx.convert("dcp2hf", save(read_hf(hf), tmp_path / "dcp"), tmp_path / "out", base=str(hf), max_shard_size="20KB")
    expected = read_hf(hf)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    assert_same_tensors(state, expected)


# Options that decide the shape of the output


@pytest.mark.parametrize("size", [4_000, 20_000, 1_000_000_000])
def test_shards_keep_to_their_size_and_load(hf: Path, tmp_path: Path, size: int) -> None:
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp")
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", max_shard_size=size)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    tensors = {file.name: read_file(file) for file in files}
    for held in tensors.values():
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= size
    assert (len(files) > 1) == (sum(tensor.nbytes for tensor in read_hf(hf).values()) > size)
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, held in tensors.items() for name in held}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_hf(hf).values())
    assert_same_tensors(read_hf(tmp_path / "out"), read_hf(hf))
    assert_same_outputs(outputs(load(tmp_path / "out"), LLAMA.inputs()), outputs(load(hf), LLAMA.inputs()))


@pytest.mark.parametrize("files", [1, 2, 7, 100])
def test_number_of_files_and_prefix_of_a_dcp(hf: Path, tmp_path: Path, files: int) -> None:
    expected = read_hf(hf)
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp", files=files, prefix="app.model.")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == min(files, len(expected))
    loaded = stock_load(tmp_path / "dcp")
    assert set(loaded) == {f"app.model.{name}" for name in [*expected, "lm_head.weight"]}
    for name, tensor in expected.items():
        assert raw(loaded[f"app.model.{name}"]) == raw(tensor)
    assert set(metadata(tmp_path / "dcp")) == set(loaded)
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out")
    assert_same_tensors(read_hf(tmp_path / "out"), expected)
