"""Encoding of floats as the codes and scales of a scheme, some rows at a time, in float32.

    scale = amax / largest code       of each block; how it is rounded depends on the scheme
    code  = nearest to value / scale  ties to even; values out of range become the largest code

docs/quantization.md has the formula of each scheme. Tools that quantize do not agree to the last bit, so there is no
reference for all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptx.quantization.decode import bf16_values, e4m3_values
from ckptx.transfer.cast import round_to_bf16

E4M3_MAX, E2M1_MAX = 448.0, 6.0
# Smallest positive number of each dtype of scales; a smaller scale becomes this number, and not zero.
_SMALLEST_SCALES = {"F32": 2.0**-149, "BF16": 2.0**-133, "F16": 2.0**-24}
_SMALLEST_AMAX = 2.0**-100  # of a whole nvfp4 weight, so that its scale and the inverse are normal numbers
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between code i and code i + 1


def encode_e4m3(values: Any) -> Any:
    """Return the nearest float8_e4m3fn codes, as uint8; values beyond 448 become 448, and NaN becomes 0x7F.

    Args:
        values: float32, of any shape.
    """
    bits = values.view(np.uint32)
    magnitude = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    magnitude_bits = magnitude.view(np.uint32)
    # Drop 20 of 23 mantissa bits, rounding to even, and change the exponent bias from 127 to 7.
    normal = (magnitude_bits + (((magnitude_bits >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    with np.errstate(invalid="ignore"):
        subnormal = np.rint(magnitude * np.float32(512)).astype(np.uint32)  # in units of 2**-9
    codes = np.where(magnitude < np.float32(2.0**-6), subnormal, normal)
    codes = np.where(np.isnan(values), np.uint32(0x7F), codes | ((bits >> 24) & 0x80))
    return codes.astype(np.uint8)


def encode_e2m1(values: Any) -> Any:
    """Return the nearest float4_e2m1fn codes, as uint8; values beyond 6 become 6.

    Args:
        values: float32, of any shape.
    """
    magnitude = np.abs(values)
    codes = np.zeros(values.shape, np.uint8)
    for lower_code, midpoint in enumerate(_E2M1_MIDPOINTS):
        # A tie belongs to the even code of the two.
        codes += magnitude >= midpoint if lower_code % 2 else magnitude > midpoint
    return codes | ((values.view(np.uint32) >> 28) & 8).astype(np.uint8)


def pack_nibbles(codes: Any) -> Any:
    """Return 4-bit codes in bytes, low nibble first.

    Args:
        codes: uint8 of shape (rows, an even number of columns).
    """
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def block_maxima(values: Any, rows: int, columns: int) -> Any:
    """Return the largest magnitude of each block.

    Args:
        values: float32 of shape (rows of the weight, columns of the weight); the last blocks may be smaller.
        rows: Rows of a block.
        columns: Columns of a block.

    Returns:
        float32 of shape (blocks along the rows, blocks along the columns).
    """
    magnitude = np.abs(values)
    by_rows = np.maximum.reduceat(magnitude, np.arange(0, values.shape[0], rows), axis=0) if rows > 1 else magnitude
    return np.maximum.reduceat(by_rows, np.arange(0, values.shape[1], columns), axis=1)


def floats_to_stored(scales: Any, dtype: str, *, rounds_up: bool = False) -> Any:
    """Return float scales as they are stored: float32, bits of bf16 (uint16) or float16.

    A scale below the smallest positive number of the dtype becomes that number; one beyond its range, infinity.

    Args:
        scales: float32, not negative.
        dtype: `F32`, `BF16` or `F16`.
        rounds_up: True to round up instead of to the nearest number.
    """
    scales = np.maximum(scales, np.float32(_SMALLEST_SCALES[dtype]))
    if dtype == "F32":
        return scales
    if dtype == "BF16":
        stored = round_to_bf16(scales)
        return stored + (rounds_up & (bf16_values(stored) < scales)).astype(np.uint16)
    with np.errstate(over="ignore"):
        stored = scales.astype(np.float16)
    return np.where(rounds_up & (stored < scales), np.nextafter(stored, np.float16(np.inf)), stored)


def fp8_scales(maxima: Any, *, is_power_of_two: bool) -> Any:
    """Return the scales of fp8 blocks: amax / 448, and 1 for a block of zeros.

    Args:
        maxima: Largest magnitude of each block, float32.
        is_power_of_two: True to round each scale up to a power of two, for scales that are exponents.
    """
    scales = np.where(maxima > 0, maxima / np.float32(E4M3_MAX), np.float32(1))
    return np.ldexp(np.float32(1), power_of_two_exponents(scales)) if is_power_of_two else scales


def power_of_two_exponents(scales: Any) -> Any:
    """Return the exponent of the smallest power of two that is at least the scale, for each scale.

    Exponents are clipped to the range -127 to 127; a scale of zero has exponent -127.
    """
    mantissa, exponent = np.frexp(scales)
    return np.where(scales > 0, np.clip(exponent - (mantissa == 0.5), -127, 127), -127)


def mxfp4_exponents(maxima: Any) -> Any:
    """Return the stored exponents of mxfp4 groups: the smallest power of two that is at least amax / 6.

    Args:
        maxima: Largest magnitude of each group, float32.

    Returns:
        uint8, the exponent plus 127; 127 for a group of zeros.
    """
    exponents = power_of_two_exponents(np.where(maxima > 0, maxima / np.float32(E2M1_MAX), np.float32(1)))
    return (exponents + 127).astype(np.uint8)


def nvfp4_second_scale(amax: float, *, is_divisor: bool) -> float:
    """Return the scale of a whole nvfp4 weight: amax / (448 * 6), or its inverse as a divisor; 1 for zeros.

    Args:
        amax: Largest magnitude of the weight; one between 0 and 2**-100 counts as 2**-100.
        is_divisor: True for the inverse.
    """
    largest = np.float32(E4M3_MAX * E2M1_MAX)
    if not amax:
        return 1.0
    amax = max(amax, _SMALLEST_AMAX)
    return float(largest / np.float32(amax) if is_divisor else np.float32(amax) / largest)


def nvfp4_scales(maxima: Any) -> Any:
    """Return the stored scales of nvfp4 groups: amax / 6, rounded to e4m3; at least 2**-9.

    Args:
        maxima: Largest magnitude of each group in units of the second scale, float32.

    Returns:
        Codes of float8_e4m3fn, uint8.
    """
    codes = encode_e4m3(maxima / np.float32(E2M1_MAX))
    return np.where(codes == 0, np.uint8(1), codes)


def e4m3_to_float(codes: Any) -> Any:
    """Return the values of codes of float8_e4m3fn, as float32."""
    return e4m3_values()[codes]


def integer_scales(maxima: Any, bits: int) -> Any:
    """Return the scales of symmetric integer groups: amax / 7 for 4 bits, amax / 127 for 8; 1 for zeros."""
    largest = np.float32((1 << (bits - 1)) - 1)
    return np.where(maxima > 0, maxima / largest, np.float32(1))


def encode_integers(values: Any, scales: Any, bits: int) -> Any:
    """Return the nearest codes of symmetric integers, with the offset of `pack-quantized`: code + 2**(bits - 1).

    Args:
        values: float32 of shape (rows, columns).
        scales: Scale of each value, float32, in the shape of `values`.
        bits: 4 or 8.
    """
    half = 1 << (bits - 1)
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.rint(values / scales), -half, half - 1)
    return (codes + half).astype(np.uint8)


def expand_blocks(scales: Any, shape: tuple[int, int], rows: int, columns: int) -> Any:
    """Return the scale of each element of a matrix.

    Args:
        scales: Scales of shape (blocks along the rows, blocks along the columns).
        shape: Rows and columns of the matrix.
        rows: Rows of a block; the last blocks may be smaller.
        columns: Columns of a block.
    """
    expanded = np.repeat(scales, rows, axis=0)[: shape[0]] if rows > 1 else scales
    return np.repeat(expanded, columns, axis=1)[:, : shape[1]]
