"""Decoding of every scheme, bit for bit, against `tests/support/quantized.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptx.catalog.region import Region
from ckptx.formats.registry import open_checkpoint
from ckptx.quantization.checkpoint import find_quantized_tensors, open_dequantized
from tests.support.catalog_tensors import read_tensor
from tests.support.checkpoint_writers import value
from tests.support.quantized import (
    E4M3,
    SCHEMES,
    Fp8,
    Integer,
    Mxfp4,
    Nvfp4,
    PublishedScheme,
    QuantizedWeight,
    as_floats,
    bf16_bits,
    float_value,
    fp8_config,
    rng_of,
    with_block,
    write_quantized,
)

DTYPES = ("BF16", "F32")


def assert_decodes(root: Path, weight: QuantizedWeight, dtype: str) -> None:
    """Check the whole weight, byte ranges of its computed file, and regions of rows and columns."""
    catalog = open_dequantized(open_checkpoint(root), dtype)
    expected = weight.stored_truth(dtype)
    found = read_tensor(catalog, weight.name)
    assert found[:2] == expected[:2]
    assert found[2] == expected[2]
    (chunk,) = catalog.tensors[weight.name].chunks
    stored = expected[2]
    if chunk.strides is not None:
        stored = float_value(np.swapaxes(weight.truth, -1, -2), dtype)[2]
    rng = rng_of("ranges", weight.name, dtype, weight.truth.shape)
    with catalog.source.open() as files:
        for size in (1, 2, 3, 7, 64, 257, 1000, 5000, len(stored)):
            first = int(rng.integers(0, max(1, len(stored) - size + 1)))
            assert files.read(chunk.file, first, min(size, len(stored) - first)) == stored[first : first + size]
    whole = np.frombuffer(expected[2], np.uint16 if dtype == "BF16" else np.uint32).reshape(expected[1])
    for _ in range(3):
        ends = [sorted(int(each) for each in rng.choice(size + 1, 2, replace=False)) for size in expected[1]]
        part = whole[tuple(slice(*each) for each in ends)]
        region = Region(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
        assert read_tensor(catalog, weight.name, region)[2] == part.tobytes()


SHAPES = {
    "aligned": (128, 256),
    "ragged rows": (90, 128),
    "ragged columns": (64, 200),
    "ragged rows and columns": (77, 168),
    "one row": (1, 64),
    "smaller than a block": (5, 32),
}


def fitting(shape: tuple[int, ...], scheme: PublishedScheme) -> tuple[int, ...]:
    """Return the shape with as many columns as the scheme can have."""
    columns = -(-shape[-1] // scheme.columns) * scheme.columns
    return (*shape[:-1], columns)


BLOCKS = [(label, (128, 128)) for label in SCHEMES] + [
    (label, (32, 64)) for label, scheme in SCHEMES.items() if with_block(scheme, (32, 64)) is not scheme
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("label", "block"), BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scheme_and_shape(tmp_path: Path, dtype: str, label: str, block: tuple[int, int], shape: str) -> None:
    scheme = with_block(SCHEMES[label], block)
    sizes = fitting(SHAPES[shape], scheme)
    name = "layers.0.down_proj.weight"
    if label == "mxfp4 blocks":
        name, sizes = "experts.down_proj", (3, -(-sizes[1] // 32) * 32, sizes[0])
    weight = scheme.coder.make(name, sizes, rng_of(label, shape))
    other = value("F32", 5)
    tensors = {"norm.weight": value("BF16", 8), **weight.parts, "gate.e_score_correction_bias": other}
    root = write_quantized(tmp_path / "model", tensors, scheme)
    assert_decodes(root, weight, dtype)
    assert read_tensor(open_dequantized(open_checkpoint(root), dtype), "gate.e_score_correction_bias") == other


FUSED = {
    "blocks": (Fp8(), fp8_config((128, 128))),
    "small blocks": (Fp8(block=(24, 40)), fp8_config((24, 40))),
    "columns": (Fp8("_scale", "F32", None, (1, "columns")), {"quant_method": "fbgemm_fp8"}),
    "rows": (Fp8("_scale", "BF16", None, ("rows", 1)), {"quant_method": "fbgemm_fp8"}),
    "matrices": (Fp8("_scale", "F32", None, (1, 1)), {"quant_method": "fbgemm_fp8"}),
    "whole": (Fp8("_scale_inv", "BF16", None, ()), {"quant_method": "fp8", "weight_block_size": None}),
}


@pytest.mark.parametrize("shape", [(3, 64, 80), (2, 130, 200), (4, 8, 600), (2, 600, 8), (2, 2, 33, 40)])
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_experts(tmp_path: Path, dtype: str, kind: str, shape: tuple[int, ...]) -> None:
    coder, config = FUSED[kind]
    scheme = PublishedScheme(coder, config)
    weight = coder.make("layers.0.experts.gate_up_proj", shape, rng_of(kind, shape))
    assert_decodes(write_quantized(tmp_path / "model", weight.parts, scheme), weight, dtype)


@pytest.mark.parametrize("label", SCHEMES)
def test_companions_in_other_files(tmp_path: Path, label: str) -> None:
    scheme = SCHEMES[label]
    name, sizes = "a.weight", fitting((40, 160), scheme)
    if label == "mxfp4 blocks":
        name, sizes = "experts.down_proj", (3, 64, 40)
    weight = scheme.coder.make(name, sizes, rng_of(label))
    names = list(weight.parts)
    tensors = {name: weight.parts[name] for name in reversed(names)}
    root = write_quantized(tmp_path / "model", tensors, scheme, shards=len(names))
    for dtype in DTYPES:
        assert_decodes(root, weight, dtype)


@pytest.mark.parametrize("width", [16, 256, 1024])
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 0.3, -1.5, 1e30, 1e38, 1e-38, 1e-44])
def test_every_fp8_code(tmp_path: Path, scale: float, width: int) -> None:
    """All codes, NaN among them, with scales whose products are subnormal, or infinite."""
    codes = np.arange(2048, dtype=np.uint16).astype(np.uint8).reshape(-1, width)
    coder = Fp8(block=(128, 128))
    scheme = PublishedScheme(coder, fp8_config((128, 128)))
    grid = np.full((-(-len(codes) // 128), -(-width // 128)), scale, np.float32)
    weight = coder.decode("a.weight", codes, float_value(grid, "F32"), grid)
    catalog = open_dequantized(open_checkpoint(write_quantized(tmp_path / "model", weight.parts, scheme)))
    bits = np.frombuffer(read_tensor(catalog, "a.weight")[2], np.uint16).reshape(codes.shape)
    assert np.array_equal(bits, bf16_bits(weight.truth))
    assert np.array_equal(np.isnan(E4M3[codes]), bits & 0x7FFF == 0x7FC0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["deepseek", "packed"])
def test_every_mxfp4_code_and_exponent(tmp_path: Path, form: str, dtype: str) -> None:
    coder = Mxfp4(form, "U8", "F8_E8M0")
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (255, 1))
    weight = coder.decode("a.weight", codes, np.arange(255, dtype=np.uint8).reshape(-1, 1))
    scheme = SCHEMES["mxfp4 packed" if form == "packed" else "mxfp4 deepseek"]
    root = write_quantized(tmp_path / "model", weight.parts, scheme)
    assert_decodes(root, weight, dtype)
    if dtype == "BF16":  # bfloat16 has all values, but for those beyond its range
        assert np.array_equal(as_floats(weight.stored_truth()), weight.truth)


def test_every_nvfp4_scale(tmp_path: Path) -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    for is_packed in (False, True):
        coder = Nvfp4(is_packed)
        weight = coder.decode("a.weight", codes, np.arange(127, dtype=np.uint8).reshape(-1, 1), np.float32(3.7e-3))
        root = write_quantized(
            tmp_path / f"{is_packed}", weight.parts, SCHEMES["nvfp4 packed" if is_packed else "nvfp4"]
        )
        for dtype in DTYPES:
            assert_decodes(root, weight, dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero_points", [False, True])
def test_every_integer_code(tmp_path: Path, has_zero_points: bool, bits: int) -> None:
    coder = Integer(bits, 32, has_zero_points, "F32")
    count = 1 << bits
    codes = np.arange(count * 32, dtype=np.uint32).astype(np.uint8).reshape(-1, 32) & (count - 1)
    zeros = (np.arange(len(codes), dtype=np.uint32) & (count - 1)).astype(np.uint8).reshape(-1, 1)
    scales = np.linspace(1e-3, 3, len(codes), dtype=np.float32).reshape(-1, 1)
    weight = coder.decode("a.weight", codes, zeros if has_zero_points else None, float_value(scales, "F32"), scales)
    label = f"int{bits} zero points" if has_zero_points else f"int{bits}"
    scheme = SCHEMES["int8 zero points" if label == "int8" else label]
    if label == "int8":
        group = {
            "targets": ["Linear"],
            "weights": {"type": "int", "num_bits": 8, "strategy": "group", "group_size": 32},
        }
        scheme = replace(scheme, config={**(scheme.config or {}), "config_groups": {"group_0": group}})
    root = write_quantized(tmp_path / "model", weight.parts, scheme)
    for dtype in DTYPES:
        assert_decodes(root, weight, dtype)


def test_empty_weights(tmp_path: Path) -> None:
    """Weights without elements do not take the bytes of their neighbors, at whose positions they are."""
    coder = Fp8(block=(32, 32))
    scheme = PublishedScheme(coder, fp8_config((32, 32)))
    rng = rng_of("empty")
    empty, full = coder.make("a.weight", (0, 64), rng), coder.make("b.weight", (64, 64), rng)
    empty2 = coder.make("c.weight", (64, 0), rng)
    parts = [*empty.parts.items(), *full.parts.items(), *empty2.parts.items()]
    for number, order in enumerate(([0, 2, 1, 3], [2, 0, 3, 1], [4, 0, 2, 5, 1, 3], [0, 4, 2, 1, 5, 3])):
        tensors = dict(parts[index] for index in order)
        catalog = open_dequantized(open_checkpoint(write_quantized(tmp_path / str(number), tensors, scheme)))
        assert read_tensor(catalog, "b.weight") == full.stored_truth()
        assert read_tensor(catalog, "a.weight") == ("BF16", (0, 64), b"")


SCHEMES_BY_PART = {
    "nvfp4 and fp8": ("nvfp4", "fp8 tensor, ModelOpt"),
    "mxfp4 and fp8": ("mxfp4 deepseek", "fp8 blocks, e8m0 scales"),
}


@pytest.mark.parametrize("kind", SCHEMES_BY_PART)
def test_two_schemes_in_one_checkpoint(tmp_path: Path, kind: str) -> None:
    first, second = (SCHEMES[label] for label in SCHEMES_BY_PART[kind])
    a, b = (
        scheme.coder.make(name, (96, 160), rng_of(kind)) for name, scheme in (("a.weight", first), ("b.weight", second))
    )
    scheme = first
    if kind == "nvfp4 and fp8":
        layers = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
        scheme = PublishedScheme(
            first.coder, None, {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
        )
    root = write_quantized(tmp_path / "model", {**a.parts, **b.parts}, scheme)
    assert len({tensor.scheme.name for tensor in find_quantized_tensors(open_checkpoint(root)).tensors.values()}) == 2
    for dtype in DTYPES:
        assert_decodes(root, a, dtype)
        assert_decodes(root, b, dtype)
