"""Write `fixtures/quantized/`: small quantized checkpoints, and the floats that torch and transformers decode them to.

    python tools/build_quantized_fixtures.py

`fixtures/quantized/NAME/` is a checkpoint as it is published; `fixtures/quantized/NAME.safetensors` has each decoded
weight, as `float32/WEIGHT` and `bfloat16/WEIGHT`. The script does not use ckptx, because tests compare what ckptx
decodes with what torch computes. gpt-oss is decoded by transformers.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROOT = Path(__file__).resolve().parent.parent / "fixtures" / "quantized"
ROWS, COLUMNS = 24, 64
BLOCK = (16, 24)  # neither divides the rows nor the columns
WEIGHT = "model.layers.0.mlp.down_proj"
ATTENTION = "model.layers.0.self_attn.o_proj"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Tensors = dict[str, Tensor]
StoredAndDecoded = tuple[Tensors, Tensors]  # tensors of the checkpoint, and its decoded weights in float32


def fp8(*shape: int) -> Tensor:
    """Return random codes of float8_e4m3fn, without NaN."""
    return (torch.randn(shape) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random positive scales."""
    return (torch.rand(shape) * 1e-2 + 1e-4).to(dtype)


def powers_of_two(*shape: int) -> Tensor:
    """Return random exponents of scales that are powers of two, uint8."""
    return torch.randint(118, 130, shape, dtype=torch.uint8)


def expand(values: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """Return a value for each element, given one for each block.

    Args:
        values: Value of each block.
        rows: Rows of a block.
        columns: Columns of a block.
        shape: Shape of the result; blocks at the edges may be smaller.
    """
    repeated = values.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return repeated[..., : shape[-2], : shape[-1]]


def nibbles(packed: Tensor) -> Tensor:
    """Return two codes for each byte, the low nibble first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()


def pack_words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack unsigned codes in int32 words along a dim, the first code in the lowest bits."""
    codes = codes.movedim(dim, -1)
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word)).reshape(*codes.shape[:-1], -1, per_word)
    words = (padded.long() << (torch.arange(per_word) * bits)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words.movedim(-1, dim).contiguous()


def fp8_blocks(name: str, suffix: str, dtype: torch.dtype, *leading_dims: int) -> StoredAndDecoded:
    """Return an fp8 weight with a scale for each block.

    Args:
        name: Name of the module; with `leading_dims`, that of the weight.
        suffix: Suffix of the scale: after the name of the weight if it begins with "_", else after that of the module.
        dtype: Dtype of the scales.
        leading_dims: Dims before rows and columns: the number of experts.
    """
    codes = fp8(*leading_dims, ROWS, COLUMNS)
    grid = (*leading_dims, -(-ROWS // BLOCK[0]), -(-COLUMNS // BLOCK[1]))
    values = powers_of_two(*grid).view(dtype) if dtype == torch.float8_e8m0fnu else scales(*grid, dtype=dtype)
    truth = codes.float() * expand(values, *BLOCK, codes.shape)
    weight = name if leading_dims else f"{name}.weight"
    scale = weight + suffix if suffix.startswith("_") else name + suffix
    return {weight: codes, scale: values}, {weight: truth}


def fp8_broadcast(*shape: int, dtype: torch.dtype, suffix: str, extra: str = "") -> StoredAndDecoded:
    """Return an fp8 weight with scales that broadcast to it.

    Args:
        shape: Shape of the scales; () for one scale.
        dtype: Dtype of the scales.
        suffix: Suffix of the scales after the name of the module.
        extra: Suffix of a scale of activations, which decoding ignores; empty for none.
    """
    codes, values = fp8(ROWS, COLUMNS), scales(*shape, dtype=dtype)
    tensors = {f"{WEIGHT}.weight": codes, f"{WEIGHT}{suffix}": values}
    if extra:
        tensors[f"{WEIGHT}{extra}"] = torch.tensor(0.25)
    return tensors, {f"{WEIGHT}.weight": codes.float() * values.float()}


def mxfp4_gpt_oss() -> StoredAndDecoded:
    """Return two experts in mxfp4 as gpt-oss stores them; transformers decodes them to bfloat16, which is exact."""
    blocks = torch.randint(0, 256, (2, ROWS, COLUMNS // 32, 16), dtype=torch.uint8)
    exponents = powers_of_two(2, ROWS, COLUMNS // 32)
    truth = convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16)
    return {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": exponents}, {EXPERTS: truth.float().contiguous()}


def mxfp4(weight: str, scale: str, dtype: torch.dtype, scale_dtype: torch.dtype) -> StoredAndDecoded:
    """Return a weight in mxfp4.

    Args:
        weight: Suffix of the packed codes after the name of the module.
        scale: Suffix of the scales after the name of the module.
        dtype: Dtype of the packed codes, of one byte.
        scale_dtype: Dtype of the scales, of one byte.
    """
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    exponents = powers_of_two(ROWS, COLUMNS // 32)
    values = exponents.view(torch.float8_e8m0fnu).float()
    truth = E2M1[nibbles(packed)] * expand(values, 1, 32, torch.Size((ROWS, COLUMNS)))
    stored = {WEIGHT + weight: packed.view(dtype), WEIGHT + scale: exponents.view(scale_dtype)}
    return stored, {f"{WEIGHT}.weight": truth}


def nvfp4(*, is_packed: bool) -> StoredAndDecoded:
    """Return a weight in nvfp4, as compressed-tensors (`is_packed`) or as ModelOpt stores it."""
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    group_scales = (torch.rand(ROWS, COLUMNS // 16) * 400).to(torch.float8_e4m3fn)
    global_scale = torch.tensor(811.3 if is_packed else 1.7e-4)
    scale = group_scales.float() / global_scale if is_packed else group_scales.float() * global_scale
    truth = E2M1[nibbles(packed)] * expand(scale, 1, 16, torch.Size((ROWS, COLUMNS)))
    if is_packed:
        names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
        values = (packed, group_scales, global_scale.reshape(1), torch.tensor([9.5]))
    else:
        names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
        values = (packed, group_scales, global_scale, torch.tensor(9.5))
    stored = {f"{WEIGHT}.{name}": value for name, value in zip(names, values, strict=True)}
    return stored, {f"{WEIGHT}.weight": truth}


def integers(bits: int, group_size: int, dtype: torch.dtype, *, has_zero_points: bool) -> StoredAndDecoded:
    """Return a weight of packed integers, with a scale for each group of a row.

    Args:
        bits: Bits of an integer.
        group_size: Elements of a group.
        dtype: Dtype of the scales.
        has_zero_points: Store a zero point for each group; without it, integers are symmetric.
    """
    codes = torch.randint(0, 1 << bits, (ROWS - 3, COLUMNS))
    shape, grid = codes.shape, (ROWS - 3, COLUMNS // group_size)
    values = scales(*grid, dtype=dtype)
    zeros = torch.randint(0, 1 << bits, grid) if has_zero_points else torch.full(grid, 1 << (bits - 1))
    truth = (codes - expand(zeros, 1, group_size, shape)) * expand(values, 1, group_size, shape)
    stored = {
        f"{WEIGHT}.weight_packed": pack_words(codes, bits, 1),
        f"{WEIGHT}.weight_scale": values,
        f"{WEIGHT}.weight_shape": torch.tensor(shape),
    }
    if has_zero_points:
        stored[f"{WEIGHT}.weight_zero_point"] = pack_words(zeros, bits, 0)
    return stored, {f"{WEIGHT}.weight": truth}


def nvfp4_and_fp8() -> StoredAndDecoded:
    """Return a weight in nvfp4 and one in fp8 with one scale, as ModelOpt stores a model of mixed precision."""
    stored, decoded = nvfp4(is_packed=False)
    own, own_decoded = fp8_broadcast(dtype=torch.float32, suffix=".weight_scale", extra=".input_scale")
    stored |= {name.replace(WEIGHT, ATTENTION): tensor for name, tensor in own.items()}
    return stored, decoded | {name.replace(WEIGHT, ATTENTION): tensor for name, tensor in own_decoded.items()}


def modelopt(**quantization: Any) -> dict[str, Any]:
    """Return the contents of a `hf_quant_config.json` of ModelOpt."""
    return {"producer": {"name": "modelopt"}, "quantization": quantization}


def compressed_tensors(format_name: str, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors with one group, given its `format` and `weights`."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": [],
    }


def checkpoints() -> dict[str, tuple[dict[str, Any], StoredAndDecoded]]:
    """Return name of the checkpoint -> its `quantization_config`, and its tensors, stored and decoded.

    A checkpoint of ModelOpt has the contents of its `hf_quant_config.json` instead of a `quantization_config`.
    """
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    float8: dict[str, Any] = {"type": "float", "num_bits": 8}
    float4: dict[str, Any] = {"type": "float", "num_bits": 4}
    integer4: dict[str, Any] = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
    bf16, f32 = torch.bfloat16, torch.float32
    return {
        "fp8_blocks": (blocks, fp8_blocks(WEIGHT, "_scale_inv", f32)),
        "fp8_blocks_bf16_scales": (blocks, fp8_blocks(WEIGHT, "_scale_inv", bf16)),
        "fp8_blocks_e8m0_scales": (
            {**blocks, "scale_fmt": "ue8m0"},
            fp8_blocks(WEIGHT, ".scale", torch.float8_e8m0fnu),
        ),
        "fp8_experts": (blocks, fp8_blocks(EXPERTS, "_scale_inv", f32, 2)),
        "fp8_tensor": (
            {**blocks, "activation_scheme": "static", "weight_block_size": None},
            fp8_broadcast(dtype=bf16, suffix=".weight_scale_inv", extra=".activation_scale"),
        ),
        "fp8_rows": (
            compressed_tensors("float-quantized", **float8, strategy="channel"),
            fp8_broadcast(ROWS, 1, dtype=bf16, suffix=".weight_scale"),
        ),
        "fp8_fbgemm": (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            fp8_broadcast(ROWS, 1, dtype=f32, suffix=".weight_scale"),
        ),
        "mxfp4_gpt_oss": ({"quant_method": "mxfp4"}, mxfp4_gpt_oss()),
        "mxfp4_deepseek": (
            {**blocks, "scale_fmt": "ue8m0"},
            mxfp4(".weight", ".scale", torch.int8, torch.float8_e8m0fnu),
        ),
        "mxfp4_packed": (
            compressed_tensors("mxfp4-pack-quantized", **float4, strategy="group", group_size=32),
            mxfp4(".weight_packed", ".weight_scale", torch.uint8, torch.uint8),
        ),
        "nvfp4_modelopt": (modelopt(quant_algo="NVFP4", group_size=16), nvfp4(is_packed=False)),
        "nvfp4_packed": (
            compressed_tensors("nvfp4-pack-quantized", **float4, strategy="tensor_group", group_size=16),
            nvfp4(is_packed=True),
        ),
        "int4": (compressed_tensors("pack-quantized", **integer4), integers(4, 32, bf16, has_zero_points=False)),
        "int4_zero_points": (
            compressed_tensors("pack-quantized", **{**integer4, "symmetric": False}),
            integers(4, 32, torch.float16, has_zero_points=True),
        ),
        "int8": (
            compressed_tensors("pack-quantized", type="int", num_bits=8, strategy="channel"),
            integers(8, COLUMNS, f32, has_zero_points=False),
        ),
        "nvfp4_and_fp8": (
            modelopt(
                quant_algo="MIXED_PRECISION",
                quantized_layers={
                    WEIGHT: {"quant_algo": "NVFP4", "group_size": 16},
                    ATTENTION: {"quant_algo": "FP8"},
                },
            ),
            nvfp4_and_fp8(),
        ),
    }


def write(name: str, config: dict[str, Any], stored: Tensors, decoded: Tensors) -> None:
    """Write one checkpoint in two files, and its decoded weights.

    The first tensor of `stored`, which has codes, is in the second file with a norm; the others are in the first file.
    """
    root = ROOT / name
    root.mkdir()
    is_modelopt = "producer" in config
    declared = {} if is_modelopt else {"quantization_config": config}
    (root / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **declared}, indent=2) + "\n")
    if is_modelopt:
        (root / "hf_quant_config.json").write_text(json.dumps(config, indent=2) + "\n")
    codes, *companions = stored
    files = {
        "model-00001-of-00002.safetensors": [*companions],
        "model-00002-of-00002.safetensors": [codes, "norm.weight"],
    }
    tensors = {**stored, "norm.weight": torch.randn(8).to(torch.bfloat16)}
    for file, names in files.items():
        save_file({each: tensors[each] for each in names}, root / file, metadata={"format": "pt"})
        os.chmod(root / file, 0o644)
    weight_map = {each: file for file, names in files.items() for each in names}
    index = {"metadata": {"total_size": sum(each.nbytes for each in tensors.values())}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    truth = {"bfloat16/norm.weight": tensors["norm.weight"]}
    for each, value in decoded.items():
        truth |= {f"float32/{each}": value.contiguous(), f"bfloat16/{each}": value.to(torch.bfloat16).contiguous()}
    save_file(truth, ROOT / f"{name}.safetensors")
    os.chmod(ROOT / f"{name}.safetensors", 0o644)


def main() -> None:
    """Write all checkpoints."""
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    torch.manual_seed(0)
    for name, (config, (stored, decoded)) in checkpoints().items():
        write(name, config, stored, decoded)


if __name__ == "__main__":
    main()
