"""Make quantized weights of every scheme, with the floats they decode to, from the formulas and without ckptx.

    value = value of the code * scale      in float32, rounded once

Decoding and encoding are written here a second time, in numpy: values of codes from their definition, blocks in loops,
rounding by searches in sorted tables.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoint_writers import Value, write_hf

Rng = np.random.Generator
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([_e4m3(code) for code in range(256)], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_NAN_CODES = (0x7F, 0xFF)


def bf16_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round float32 to bf16, to nearest and ties to even, by arithmetic in float64; return the bits as uint16."""
    wide = values.astype(np.float64)
    _, exponent = np.frexp(np.where(np.isfinite(wide), wide, 0))
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.where(np.isfinite(wide), np.rint(wide / unit) * unit, wide)
        bits = (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), bits)


def bf16_values(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_value(values: np.ndarray[Any, Any], dtype: str) -> Value:
    """Return floats as a tensor of dtype BF16, F16 or F32."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        return dtype, values.shape, bf16_bits(values).tobytes()
    return dtype, values.shape, (values if dtype == "F32" else values.astype(np.float16)).tobytes()


def as_floats(tensor: Value) -> np.ndarray[Any, Any]:
    """Return a tensor of dtype BF16, F16 or F32 as float32."""
    dtype, shape, data = tensor
    if dtype == "BF16":
        return bf16_values(np.frombuffer(data, np.uint16)).reshape(shape)
    return np.frombuffer(data, np.float32 if dtype == "F32" else np.float16).astype(np.float32).reshape(shape)


def _nearest(values: np.ndarray[Any, Any], positive: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the index of the nearest of sorted positive values; a tie belongs to the even index."""
    exact = positive.astype(np.float64)
    middles = (exact[1:] + exact[:-1]) / 2
    magnitude = np.abs(values.astype(np.float64))
    index = np.searchsorted(middles, magnitude, side="left")
    is_tie = (index < len(middles)) & (magnitude == middles[np.minimum(index, len(middles) - 1)])
    return index + (is_tie & (index % 2 == 1))


def to_e4m3(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (_nearest(values, E4M3[:127]) | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def to_e2m1(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (_nearest(values, E2M1[:8]) | np.where(np.signbit(values), 8, 0)).astype(np.uint8)


def power_of_two_at_least(value: float) -> int:
    """Return the exponent of the smallest power of two that is at least `value`, between -127 and 127."""
    return next((exponent for exponent in range(-127, 127) if 2.0**exponent >= value), 127)


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized weight.

    Attributes:
        name: Name of the decoded weight.
        parts: Stored tensors by name: the codes first, then what is decoded into the weight.
        truth: Decoded weight, float32.
        scales: Scale of each element of `truth`, float32.
    """

    name: str
    parts: dict[str, Value]
    truth: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]

    def stored_truth(self, dtype: str = "BF16") -> Value:
        return float_value(self.truth, dtype)


# ---- scales ----


def random_scales(shape: tuple[int, ...], dtype: str, rng: Rng) -> tuple[Value, np.ndarray[Any, Any]]:
    """Return scales as stored and as float32."""
    if dtype in ("F8_E8M0", "U8"):
        exponents = rng.integers(112, 124, shape, dtype=np.uint8)
        return (dtype, shape, exponents.tobytes()), np.ldexp(np.float32(1), exponents.astype(int) - 127).astype(
            np.float32
        ).reshape(shape)
    stored = float_value(rng.uniform(1e-3, 1e-1, shape).astype(np.float32), dtype)
    return stored, as_floats(stored)


def _store_scales(values: np.ndarray[Any, Any], dtype: str) -> tuple[Value, np.ndarray[Any, Any]]:
    if dtype in ("F8_E8M0", "U8"):
        exponents = np.array([power_of_two_at_least(float(value)) for value in values.reshape(-1)]).reshape(
            values.shape
        )
        stored = (dtype, values.shape, (exponents + 127).astype(np.uint8).tobytes())
        return stored, np.ldexp(np.float32(1), exponents).astype(np.float32)
    # A scale is never rounded to zero.
    smallest = {"F32": 2.0**-149, "BF16": 2.0**-133, "F16": 2.0**-24}[dtype]
    stored = float_value(np.where(values > smallest, values, smallest), dtype)
    return stored, as_floats(stored)


def _blocks(shape: tuple[int, ...], block: tuple[int, int]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Yield the slices of each block of the last two dims, and the index of its scale."""
    *lead, rows, columns = shape
    for at in itertools.product(*map(range, lead)):
        for i, first in enumerate(range(0, rows, block[0])):
            for j, left in enumerate(range(0, columns, block[1])):
                yield (*at, slice(first, first + block[0]), slice(left, left + block[1])), (*at, i, j)


def block_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _times_blocks(
    values: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], block: tuple[int, int]
) -> np.ndarray[Any, Any]:
    result = np.empty_like(values)
    with np.errstate(over="ignore"):
        for region, at in _blocks(values.shape, block):
            result[region] = values[region] * scales[at]
    return result


# ---- fp8 ----


@dataclass(frozen=True)
class Fp8:
    """fp8 weights.

    Attributes:
        scale: Suffix of the scales, after `X.weight` or, for fused experts, after the parameter.
        scale_dtype: Dtype of the scales.
        block: Rows and columns of a block, or None.
        scale_dims: Without a block, shape of the scales: `()`, `(1,)`, `("rows",)`, `("rows", 1)` or `(1, "columns")`.
        extra: Suffixes of scales of activations.
        is_power_of_two: True if float scales are powers of two.
    """

    scale: str = "_scale_inv"
    scale_dtype: str = "F32"
    block: tuple[int, int] | None = (128, 128)
    scale_dims: tuple[int | str, ...] = ()
    extra: tuple[str, ...] = ()
    is_power_of_two: bool = False

    def scale_name(self, name: str) -> str:
        return name.removesuffix(".weight") + self.scale if self.scale.startswith(".") else name + self.scale

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.block is not None:
            return block_grid(shape, self.block)
        sizes = {"rows": shape[-2], "columns": shape[-1]}
        own = tuple(sizes.get(each, each) if isinstance(each, str) else each for each in self.scale_dims)
        return (*shape[:-2], *own) if len(own) > 1 else own  # type: ignore[return-value]  # sizes are integers

    def _broadcast(self, scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return scales[:, None] if self.scale_dims == ("rows",) else scales

    def _parts(self, name: str, codes: np.ndarray[Any, Any], scales: Value) -> dict[str, Value]:
        parts = {name: ("F8_E4M3", codes.shape, codes.tobytes()), self.scale_name(name): scales}
        return parts | {
            name.removesuffix(".weight") + each: float_value(np.float32(0.5 + i), "F32")
            for i, each in enumerate(self.extra)
        }

    def make(self, name: str, shape: tuple[int, ...], rng: Rng) -> QuantizedWeight:
        codes = rng.integers(0, 256, shape, dtype=np.uint8)
        codes[np.isin(codes, _NAN_CODES)] = 0x80  # -0.0
        return self.decode(name, codes, *random_scales(self._grid(shape), self.scale_dtype, rng))

    def decode(
        self, name: str, codes: np.ndarray[Any, Any], stored: Value, scales: np.ndarray[Any, Any]
    ) -> QuantizedWeight:
        ones = np.ones(codes.shape, np.float32)
        each = ones * self._broadcast(scales) if self.block is None else _times_blocks(ones, scales, self.block)
        with np.errstate(over="ignore"):
            truth = E4M3[codes] * each
        return QuantizedWeight(name, self._parts(name, codes, stored), truth, each)

    def encode(self, name: str, values: np.ndarray[Any, Any]) -> QuantizedWeight:
        shape = values.shape
        grid = self._grid(shape)
        maxima = np.zeros(grid, np.float32)
        if self.block is not None:
            for region, at in _blocks(shape, self.block):
                maxima[at] = np.abs(values[region]).max()
        elif "rows" in self.scale_dims:
            maxima = np.abs(values).max(axis=-1).reshape(grid)
        else:
            maxima = np.abs(values).max().reshape(grid)
        scales = np.where(maxima > 0, maxima / np.float32(448), np.float32(1)).astype(np.float32)
        if self.is_power_of_two:
            scales = np.array([2.0 ** power_of_two_at_least(float(each)) for each in scales.reshape(-1)], np.float32)
            scales = scales.reshape(grid)
        stored, scales = _store_scales(scales, self.scale_dtype)
        codes = np.empty(shape, np.uint8)
        if self.block is None:
            codes[:] = to_e4m3(values / self._broadcast(scales))
        else:
            for region, at in _blocks(shape, self.block):
                codes[region] = to_e4m3(values[region] / scales[at])
        return self.decode(name, codes, stored, scales)


# ---- 4-bit floats ----


def pack_pairs(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pack 4-bit codes in bytes, the low nibble first."""
    return codes[..., 0::2] + 16 * codes[..., 1::2]


@dataclass(frozen=True)
class Mxfp4:
    """mxfp4 weights in one of three spellings.

    Attributes:
        form: `gpt-oss` (blocks, transposed), `deepseek` (`.weight` and `.scale`) or `packed` (compressed-tensors).
        dtype: Dtype of the codes of `deepseek` and `packed`: U8, I8 or F4.
        scale_dtype: Dtype of the scales.
    """

    form: str
    dtype: str = "U8"
    scale_dtype: str = "U8"

    def make(self, name: str, shape: tuple[int, ...], rng: Rng) -> QuantizedWeight:
        """Make a weight; `shape` is the decoded one."""
        if self.form == "gpt-oss":
            shape = (*shape[:-2], shape[-1], shape[-2])
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        exponents = rng.integers(112, 124, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)
        return self.decode(name, codes, exponents)

    def decode(self, name: str, codes: np.ndarray[Any, Any], exponents: np.ndarray[Any, Any]) -> QuantizedWeight:
        groups = E2M1[codes].reshape(*codes.shape[:-1], -1, 32).astype(np.float64)
        with np.errstate(over="ignore"):
            wide = groups * np.ldexp(1.0, exponents.astype(int) - 127)[..., None]
            truth = wide.astype(np.float32).reshape(codes.shape)
            each = np.repeat(np.ldexp(np.float32(1), exponents.astype(int) - 127), 32, axis=-1).astype(np.float32)
        packed = pack_pairs(codes)
        stem = name.removesuffix(".weight")
        if self.form == "gpt-oss":
            blocks = packed.reshape(*codes.shape[:-1], -1, 16)
            parts: dict[str, Value] = {
                f"{name}_blocks": ("U8", blocks.shape, blocks.tobytes()),
                f"{name}_scales": (self.scale_dtype, exponents.shape, exponents.tobytes()),
            }
            decoded = np.ascontiguousarray(np.swapaxes(truth, -1, -2))
            return QuantizedWeight(name, parts, decoded, np.swapaxes(each, -1, -2))
        shape = codes.shape if self.dtype == "F4" else packed.shape
        suffixes = (".weight", ".scale") if self.form == "deepseek" else (".weight_packed", ".weight_scale")
        parts = {
            stem + suffixes[0]: (self.dtype, shape, packed.tobytes()),
            stem + suffixes[1]: (self.scale_dtype, exponents.shape, exponents.tobytes()),
        }
        return QuantizedWeight(name, parts, truth, each)

    def encode(self, name: str, values: np.ndarray[Any, Any]) -> QuantizedWeight:
        if self.form == "gpt-oss":
            values = np.ascontiguousarray(np.swapaxes(values, -1, -2))
        groups = values.reshape(*values.shape[:-1], -1, 32)
        maxima = np.abs(groups).max(axis=-1)
        exponents = np.array(
            [power_of_two_at_least(float(each / np.float32(6))) if each else 0 for each in maxima.reshape(-1)]
        ).reshape(maxima.shape)
        codes = to_e2m1(groups / np.ldexp(np.float32(1), exponents)[..., None])
        return self.decode(name, codes.reshape(values.shape), (exponents + 127).astype(np.uint8))


@dataclass(frozen=True)
class Nvfp4:
    """nvfp4 weights of ModelOpt, or of compressed-tensors.

    Attributes:
        is_packed: True for the names of compressed-tensors, whose global scale is a divisor.
        extra: Suffix of a scale of activations.
    """

    is_packed: bool = False
    extra: str = ""

    def make(self, name: str, shape: tuple[int, ...], rng: Rng) -> QuantizedWeight:
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        scales = rng.integers(1, 0x7F, (*shape[:-1], shape[-1] // 16), dtype=np.uint8)
        whole = np.float32(rng.uniform(100, 4000) if self.is_packed else rng.uniform(1e-5, 1e-3))
        return self.decode(name, codes, scales, whole)

    def decode(
        self, name: str, codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], whole: np.float32
    ) -> QuantizedWeight:
        each = E4M3[scales] / whole if self.is_packed else E4M3[scales] * whole
        truth = (E2M1[codes].reshape(*scales.shape, 16) * each[..., None]).reshape(codes.shape)
        stem, packed = name.removesuffix(".weight"), pack_pairs(codes)
        names = (".weight_packed", ".weight_global_scale") if self.is_packed else (".weight", ".weight_scale_2")
        parts: dict[str, Value] = {
            stem + names[0]: ("U8", packed.shape, packed.tobytes()),
            f"{stem}.weight_scale": ("F8_E4M3", scales.shape, scales.tobytes()),
            stem + names[1]: float_value(whole.reshape((1,) if self.is_packed else ()), "F32"),
        }
        if self.extra:
            parts[stem + self.extra] = float_value(np.float32(7).reshape((1,) if self.is_packed else ()), "F32")
        return QuantizedWeight(name, parts, truth, np.repeat(each, 16, axis=-1))

    def encode(self, name: str, values: np.ndarray[Any, Any]) -> QuantizedWeight:
        amax, largest = np.abs(values).max(), np.float32(448 * 6)
        amax = np.float32(max(amax, 2.0**-100)) if amax else amax
        whole = np.float32(1) if not amax else largest / amax if self.is_packed else amax / largest
        groups = values.reshape(*values.shape[:-1], -1, 16)
        maxima = np.abs(groups).max(axis=-1)
        scaled = maxima * whole if self.is_packed else maxima / whole
        scales = np.maximum(to_e4m3(scaled / np.float32(6)), 1).astype(np.uint8)
        each = E4M3[scales] / whole if self.is_packed else E4M3[scales] * whole
        codes = to_e2m1(groups / each[..., None]).reshape(values.shape)
        return self.decode(name, codes, scales, np.float32(whole))


# ---- integers ----


def pack_words(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Pack codes of shape (rows, columns) in int32 words along the columns, the first code in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint64)
    for column in range(codes.shape[1]):
        words[:, column // per_word] += codes[:, column].astype(np.uint64) << np.uint64(bits * (column % per_word))
    return words.astype(np.uint32)


@dataclass(frozen=True)
class Integer:
    """`pack-quantized` weights of compressed-tensors.

    Attributes:
        bits: 4 or 8.
        group: Elements of a row that share a scale; None for one scale for each row.
        has_zero_points: True for asymmetric codes.
        scale_dtype: Dtype of the scales.
        has_shape: True to store `weight_shape`.
        shape_dtype: Dtype of `weight_shape`.
    """

    bits: int = 4
    group: int | None = 32
    has_zero_points: bool = False
    scale_dtype: str = "BF16"
    has_shape: bool = True
    shape_dtype: str = "I64"

    def make(self, name: str, shape: tuple[int, ...], rng: Rng) -> QuantizedWeight:
        groups = 1 if self.group is None else -(-shape[1] // self.group)
        codes = rng.integers(0, 1 << self.bits, shape, dtype=np.uint8)
        zeros = rng.integers(0, 1 << self.bits, (shape[0], groups), dtype=np.uint8) if self.has_zero_points else None
        return self.decode(name, codes, zeros, *random_scales((shape[0], groups), self.scale_dtype, rng))

    def decode(
        self,
        name: str,
        codes: np.ndarray[Any, Any],
        zeros: np.ndarray[Any, Any] | None,
        stored: Value,
        scales: np.ndarray[Any, Any],
    ) -> QuantizedWeight:
        rows, columns = codes.shape
        group = self.group or columns
        truth = np.empty(codes.shape, np.float32)
        for column in range(columns):
            zero = np.float32(1 << (self.bits - 1)) if zeros is None else zeros[:, column // group].astype(np.float32)
            truth[:, column] = (codes[:, column].astype(np.float32) - zero) * scales[:, column // group]
        stem, words = name.removesuffix(".weight"), pack_words(codes, self.bits)
        parts: dict[str, Value] = {
            f"{stem}.weight_packed": ("I32", words.shape, words.tobytes()),
            f"{stem}.weight_scale": stored,
        }
        if self.has_shape:
            sizes = np.array([rows, columns], np.int64 if self.shape_dtype == "I64" else np.int32)
            parts[f"{stem}.weight_shape"] = (self.shape_dtype, (2,), sizes.tobytes())
        if zeros is not None:
            packed = np.ascontiguousarray(pack_words(np.ascontiguousarray(zeros.T), self.bits).T)
            parts[f"{stem}.weight_zero_point"] = ("I32", packed.shape, packed.tobytes())
        return QuantizedWeight(name, parts, truth, scales[:, np.arange(columns) // group])

    def encode(self, name: str, values: np.ndarray[Any, Any]) -> QuantizedWeight:
        rows, columns = values.shape
        group = self.group or columns
        groups = -(-columns // group)
        scales, zeros = np.ones((rows, groups), np.float32), np.zeros((rows, groups), np.uint8)
        top, half = (1 << self.bits) - 1, 1 << (self.bits - 1)
        for row, number in itertools.product(range(rows), range(groups)):
            own = values[row, number * group : (number + 1) * group]
            low, high = np.minimum(own.min(), 0), np.maximum(own.max(), 0)
            if self.has_zero_points and high > low:
                scales[row, number] = (high - low) / np.float32(top)
            elif not self.has_zero_points and np.abs(own).max():
                scales[row, number] = np.abs(own).max() / np.float32(half - 1)
        exact = scales
        stored, scales = _store_scales(exact, self.scale_dtype)
        if self.has_zero_points and self.scale_dtype != "F32":  # rounded up
            bits = np.frombuffer(stored[2], np.uint16).reshape(scales.shape) + (scales < exact).astype(np.uint16)
            stored = self.scale_dtype, scales.shape, bits.astype(np.uint16).tobytes()
            scales = as_floats(stored)
        codes = np.empty(values.shape, np.uint8)
        for row, number in itertools.product(range(rows), range(groups)):
            span = slice(number * group, (number + 1) * group)
            own, scale = values[row, span], scales[row, number]
            if self.has_zero_points:
                zeros[row, number] = np.clip(np.rint(-np.minimum(own.min(), 0) / scale), 0, top)
                codes[row, span] = np.clip(np.rint(own / scale) + np.float32(zeros[row, number]), 0, top)
            else:
                codes[row, span] = np.clip(np.rint(own / scale), -half, half - 1) + half
        return self.decode(name, codes, zeros if self.has_zero_points else None, stored, scales)


Coder = Fp8 | Mxfp4 | Nvfp4 | Integer


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors as published."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_FLOAT8: dict[str, Any] = {"type": "float", "num_bits": 8}
_MODELOPT = {"producer": {"name": "modelopt", "version": "0.40.0"}}


@dataclass(frozen=True)
class PublishedScheme:
    """One way in which quantized checkpoints are published.

    Attributes:
        coder: Maker of a weight.
        config: `quantization_config`.
        document: Contents of `hf_quant_config.json`, which declares the quantization instead of the config.
        keys: Other keys of config.json.
        columns: Number that divides the columns of a weight.
    """

    coder: Coder
    config: Mapping[str, Any] | None
    document: Mapping[str, Any] | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    columns: int = 1


def fp8_config(block: tuple[int, int], **keys: Any) -> dict[str, Any]:
    return {**FP8, "weight_block_size": list(block), **keys}


_BLOCK = (128, 128)
_GROUP4: dict[str, Any] = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
_CHANNEL8: dict[str, Any] = {"type": "int", "num_bits": 8, "strategy": "channel"}
SCHEMES: dict[str, PublishedScheme] = {
    "fp8 blocks": PublishedScheme(Fp8(), fp8_config(_BLOCK)),
    "fp8 blocks, bf16 scales": PublishedScheme(Fp8(scale_dtype="BF16"), fp8_config(_BLOCK)),
    "fp8 blocks, fp16 scales": PublishedScheme(Fp8(scale_dtype="F16"), fp8_config(_BLOCK)),
    "fp8 blocks, e8m0 scales": PublishedScheme(
        Fp8(".scale", "F8_E8M0"), fp8_config(_BLOCK, scale_fmt="ue8m0"), keys={"expert_dtype": "fp8"}
    ),
    "fp8 blocks, u8 scales": PublishedScheme(
        Fp8(scale_dtype="U8", block=(1, 32)), fp8_config((1, 32), scale_fmt="ue8m0")
    ),
    "fp8 blocks, compressed-tensors": PublishedScheme(
        Fp8(".weight_scale", "BF16"),
        _compressed("float-quantized", **_FLOAT8, strategy="block", block_structure=[128, 128]),
    ),
    "fp8 tensor": PublishedScheme(
        Fp8("_scale_inv", "BF16", None, (), (".activation_scale",)),
        {**FP8, "activation_scheme": "static", "weight_block_size": None},
    ),
    "fp8 tensor, ModelOpt": PublishedScheme(
        Fp8(".weight_scale", "F32", None, (), (".input_scale",)),
        None,
        {
            **_MODELOPT,
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
        },
    ),
    "fp8 tensor, compressed-tensors": PublishedScheme(
        Fp8(".weight_scale", "F32", None, (1,), (".input_scale",)),
        _compressed("float-quantized", **_FLOAT8, strategy="tensor"),
    ),
    "fp8 rows": PublishedScheme(
        Fp8(".weight_scale", "BF16", None, ("rows", 1)),
        _compressed("float-quantized", **_FLOAT8, strategy="channel"),
    ),
    "fp8 rows, one dim": PublishedScheme(
        Fp8(".weight_scale", "F32", None, ("rows",)),
        _compressed("float-quantized", **_FLOAT8, strategy="channel"),
    ),
    "fp8 rows, fbgemm": PublishedScheme(
        Fp8(".weight_scale", "F32", None, ("rows", 1)),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "mxfp4 blocks": PublishedScheme(
        Mxfp4("gpt-oss"), {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, columns=32
    ),
    "mxfp4 deepseek": PublishedScheme(
        Mxfp4("deepseek", "I8", "F8_E8M0"),
        fp8_config(_BLOCK, scale_fmt="ue8m0"),
        keys={"expert_dtype": "fp4"},
        columns=32,
    ),
    "mxfp4 f4": PublishedScheme(Mxfp4("deepseek", "F4", "F8_E8M0"), {"quant_method": "mxfp4"}, columns=32),
    "mxfp4 packed": PublishedScheme(
        Mxfp4("packed"),
        _compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
        columns=32,
    ),
    "nvfp4": PublishedScheme(
        Nvfp4(extra=".input_scale"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        {**_MODELOPT, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}},
        columns=16,
    ),
    "nvfp4 packed": PublishedScheme(
        Nvfp4(is_packed=True, extra=".input_global_scale"),
        _compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        columns=16,
    ),
    "int4": PublishedScheme(Integer(), _compressed("pack-quantized", **_GROUP4), columns=8),
    "int4 zero points": PublishedScheme(
        Integer(has_zero_points=True, scale_dtype="F16"),
        _compressed("pack-quantized", **{**_GROUP4, "symmetric": False}),
        columns=8,
    ),
    "int4 rows": PublishedScheme(
        Integer(group=None, scale_dtype="F32", has_shape=False),
        _compressed("pack-quantized", **{**_GROUP4, "strategy": "channel", "group_size": None}),
        columns=8,
    ),
    "int8": PublishedScheme(Integer(8, None, shape_dtype="I32"), _compressed("pack-quantized", **_CHANNEL8), columns=4),
    "int8 zero points": PublishedScheme(
        Integer(8, 32, has_zero_points=True),
        _compressed("pack-quantized", **{**_CHANNEL8, "symmetric": False, "strategy": "group", "group_size": 32}),
        columns=4,
    ),
}


def with_block(scheme: PublishedScheme, block: tuple[int, int]) -> PublishedScheme:
    """Return a scheme of fp8 blocks with another size of its blocks; other schemes stay as they are."""
    coder, config = scheme.coder, scheme.config
    if not isinstance(coder, Fp8) or coder.block is None or config is None:
        return scheme
    coder = replace(coder, block=block)
    if config["quant_method"] == "fp8":
        return replace(scheme, coder=coder, config={**config, "weight_block_size": list(block)})
    (group,) = config["config_groups"].values()
    weights = {**group["weights"], "block_structure": list(block)}
    return replace(scheme, coder=coder, config={**config, "config_groups": {"group_0": {**group, "weights": weights}}})


def config_of(scheme: PublishedScheme, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return `config.json` with the declaration of a scheme."""
    declared = {} if scheme.config is None else {"quantization_config": dict(scheme.config)}
    return {**(config or {}), **scheme.keys, **declared}


def write_quantized(
    root: Path,
    tensors: Mapping[str, Value],
    scheme: PublishedScheme,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Write a quantized checkpoint, with the files that declare it."""
    write_hf(root, tensors, shards, config_of(scheme, config))
    if scheme.document is not None:
        (root / "hf_quant_config.json").write_text(json.dumps(scheme.document))
    return root


def rng_of(*words: object) -> Rng:
    """Return a generator whose numbers depend on these words only."""
    return np.random.default_rng(list(repr(words).encode()))
