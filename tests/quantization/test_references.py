"""Decoded weights against torch's reader and transformers, where these are right, and ckptx where they are not."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckptx

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def fp8(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A weight in blocks of 128 x 128 with its scales, from a seed of its shape."""
    generator = torch.Generator().manual_seed(rows * 10_007 + columns)
    codes = (torch.randn(rows, columns, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) * 1e-3 + 1e-6
    return {"weight": codes, "weight_scale_inv": scales}


def write(root: Path, config: dict[str, Any], *files: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of one or several files with an index, which torch's reader requires."""
    root.mkdir()
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, root / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text(json.dumps({"quantization_config": config}))
    return root


def decoded(source: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    ckptx.convert("to-hf", source, tmp_path / "decoded", dequantize=True, index="always")
    return {
        name: value for path in (tmp_path / "decoded").glob("*.safetensors") for name, value in load_file(path).items()
    }


def read_with_torch(source: Path) -> dict[str, torch.Tensor]:
    """Return what torch's reader decodes, in tensors that were filled with ones before."""
    reader = QuantizedHuggingFaceStorageReader(str(source), target_dtype=torch.bfloat16)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.ones(entry.size, dtype=torch.bfloat16)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.endswith(("_scale_inv", "_scales"))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single process
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("rows", [128, 192, 576, 2112])
@pytest.mark.parametrize("columns", [128, 200, 512])
def test_fp8_blocks_are_those_of_torch(rows: int, columns: int, tmp_path: Path) -> None:
    parts = fp8(rows, columns)
    source = write(
        tmp_path / "source",
        FP8,
        {"a.weight": parts["weight"], "norm.weight": torch.ones(3).bfloat16()},
        {"a.weight_scale_inv": parts["weight_scale_inv"]},
    )
    ours, theirs = decoded(source, tmp_path), read_with_torch(source)
    assert ours.keys() == theirs.keys()
    assert all(equal(ours[name], theirs[name]) for name in ours)


def test_mxfp4_is_that_of_transformers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 160, (3, 64, 4), dtype=torch.uint8, generator=generator)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    source = write(tmp_path / "source", MXFP4, {f"{name}_blocks": blocks, f"{name}_scales": scales})
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = decoded(source, tmp_path)[name]
    assert ours.shape == (3, 128, 64) and equal(ours, expected)
    theirs = read_with_torch(source)[f"{name}_blocks"]
    is_read = theirs != 1  # torch's reader leaves most columns as they were
    assert is_read.float().mean() < 0.1


@pytest.mark.parametrize("rows", [192, 448, 576, 960])
def test_rows_that_transformers_rejects_or_decodes_wrongly(rows: int, tmp_path: Path) -> None:
    parts = fp8(rows, 256)
    ours = decoded(write(tmp_path / "source", FP8, {f"a.{name}": value for name, value in parts.items()}), tmp_path)
    scales = parts["weight_scale_inv"].numpy().repeat(128, 0)[:rows].repeat(128, 1)[:, :256]
    expected = torch.from_numpy(parts["weight"].float().numpy() * scales).bfloat16()
    assert equal(ours["a.weight"], expected)


@pytest.mark.parametrize("scale_name", ["a.scale", "a.weight_scale"])
def test_scale_names_that_torch_ignores(scale_name: str, tmp_path: Path) -> None:
    parts = fp8(256, 256)
    tensors = {"a.weight": parts["weight"], scale_name: parts["weight_scale_inv"]}
    ours = decoded(write(tmp_path / "source", FP8, tensors), tmp_path)
    assert ours.keys() == {"a.weight"}
    scales = np.kron(parts["weight_scale_inv"].numpy(), np.ones((128, 128), np.float32))
    assert equal(ours["a.weight"], torch.from_numpy(parts["weight"].float().numpy() * scales).bfloat16())


def test_a_scalar_scale_and_its_activation_scale(tmp_path: Path) -> None:
    codes = fp8(96, 64)["weight"]
    tensors = {
        "a.weight": codes,
        "a.weight_scale_inv": torch.tensor(0.0123).bfloat16(),
        "a.activation_scale": torch.tensor(0.5).bfloat16(),
    }
    config = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    ours = decoded(write(tmp_path / "source", config, tensors), tmp_path)
    assert ours.keys() == {"a.weight"}
    expected = (codes.float() * torch.tensor(0.0123).bfloat16().float()).bfloat16()
    assert equal(ours["a.weight"], expected)


def test_a_missing_scale_is_an_error(tmp_path: Path) -> None:
    parts = fp8(256, 256)
    source = write(
        tmp_path / "source", FP8, {**{f"a.{k}": v for k, v in parts.items()}, "b.weight": parts["weight"].clone()}
    )
    with pytest.raises(ckptx.errors.InputError, match=r'"b.weight" is F8_E4M3 .* its scales are missing'):
        ckptx.convert("to-hf", source, tmp_path / "out", dequantize=True)
    assert not (tmp_path / "out").exists()
