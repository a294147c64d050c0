"""Weights that compressed-tensors quantizes: ckptx decodes them to the values that compressed-tensors decodes them to.

`make judges` installs compressed-tensors and runs this folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    BaseCompressor,
    FloatQuantizationCompressor,
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

import ckptx

_INT4 = {"num_bits": 4, "type": "int"}
_FLOAT8 = {"num_bits": 8, "type": "float"}

CASES: dict[str, tuple[str, type[BaseCompressor], dict[str, Any]]] = {
    "fp8 per tensor": ("float-quantized", FloatQuantizationCompressor, {**_FLOAT8, "strategy": "tensor"}),
    "fp8 per row": ("float-quantized", FloatQuantizationCompressor, {**_FLOAT8, "strategy": "channel"}),
    "fp8 in blocks": (
        "float-quantized",
        FloatQuantizationCompressor,
        {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]},
    ),
    "int4 in groups": (
        "pack-quantized",
        PackedQuantizationCompressor,
        {**_INT4, "strategy": "group", "group_size": 32},
    ),
    "int4 per row": ("pack-quantized", PackedQuantizationCompressor, {**_INT4, "strategy": "channel"}),
    "int4 with zero points": (
        "pack-quantized",
        PackedQuantizationCompressor,
        {**_INT4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int8 in groups": (
        "pack-quantized",
        PackedQuantizationCompressor,
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        NVFP4PackedCompressor,
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "float8_e4m3fn"},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        MXFP4PackedCompressor,
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"},
    ),
}


def _extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest values that share a scale, in the shape of the scales."""
    rows, columns = weight.shape
    strategy = str(args.strategy)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(2), groups.amax(2)


@pytest.mark.parametrize("shape", [(256, 128), (192, 160), (90, 96)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_decoded_weights_are_those_of_compressed_tensors(case: str, shape: tuple[int, int], tmp_path: Path) -> None:
    form, compressor, weights = CASES[case]
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).bfloat16()
    low, high = _extremes(weight.float(), args)
    state: dict[str, torch.Tensor] = {"weight": weight}
    global_scale = None
    if form.startswith("nvfp4"):
        global_scale = generate_gparam(weight.float().min(), weight.float().max()).reshape(1)
        state["weight_global_scale"] = global_scale
    scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
    state["weight_scale"] = scale if form.startswith(("nvfp4", "mxfp4")) else scale.bfloat16()
    if not args.symmetric:
        state["weight_zero_point"] = zero_point
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"].to(torch.bfloat16)

    source = tmp_path / "source"
    source.mkdir()
    tensors = {f"layer.{name}": value.detach().contiguous() for name, value in stored.items() if name != "g_idx"}
    save_file({**tensors, "layer.bias": torch.ones(shape[0])}, source / "model.safetensors")
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form).to_dict()
    document = {"quantization_config": {"quant_method": "compressed-tensors", **_plain(config)}}
    (source / "config.json").write_text(json.dumps(document))

    report = ckptx.convert("to-hf", source, tmp_path / "out", dequantize=True)
    decoded = load_file(tmp_path / "out" / "model.safetensors")
    assert decoded.keys() == {"layer.weight", "layer.bias"}
    assert torch.equal(decoded["layer.weight"].view(torch.int16), expected.contiguous().view(torch.int16))
    assert report.ledger["decoded"] == len(tensors) - 1


def _plain(value: Any) -> Any:
    """Return a document of plain JSON values."""
    return json.loads(json.dumps(value, default=lambda each: getattr(each, "value", None) or str(each)))
