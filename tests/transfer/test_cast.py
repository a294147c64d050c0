"""`--dtype`: rounding stated in words, against a reference in exact arithmetic, and against torch."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.transfer.cast import CastSink, cast
from ckptx.transfer.stream import push

NAMES = ("F64", "F32", "F16", "BF16")
EXPONENT = {"F64": 11, "F32": 8, "F16": 5, "BF16": 8}
MANTISSA = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}
WORD = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2"}


def words(data: memoryview | bytes, name: str) -> list[int]:
    return [int(word) for word in np.frombuffer(data, WORD[name])]


def run(bits: list[int], source: str, target: str) -> list[int]:
    data = memoryview(np.array(bits, WORD[source]).tobytes())
    return words(cast(data, DTYPES_BY_NAME[source], DTYPES_BY_NAME[target]), target)


def bf16(number: float) -> int:
    """The bits of a number cast from float32 to bfloat16."""
    return run([struct.unpack("<I", struct.pack("<f", number))[0]], "F32", "BF16")[0]


def decode(bits: int, name: str) -> Fraction | float:
    """The number that `bits` are, exactly; inf and NaN as floats."""
    e, m = EXPONENT[name], MANTISSA[name]
    sign = -1 if bits >> (e + m) else 1
    exponent, mantissa = bits >> m & (1 << e) - 1, bits & (1 << m) - 1
    if exponent == (1 << e) - 1:
        return math.nan if mantissa else sign * math.inf
    bias = (1 << (e - 1)) - 1
    if exponent == 0:
        return sign * Fraction(mantissa, 1 << m) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 1 << m)) * Fraction(2) ** (exponent - bias)


def encode(number: Fraction | float, name: str, negative: bool) -> int:
    """The bits of `number` rounded to nearest even, from the definition: mantissa steps of the binade, ties to even."""
    e, m = EXPONENT[name], MANTISSA[name]
    sign = int(negative) << (e + m)
    infinity = sign | ((1 << e) - 1) << m
    if isinstance(number, float):
        return infinity | (1 << (m - 1) if math.isnan(number) else 0)
    number = abs(number)
    bias = (1 << (e - 1)) - 1
    if not number:
        return sign
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > number
    exponent = max(exponent, 1 - bias)
    steps = round(number / Fraction(2) ** (exponent - m))  # Python rounds fractions half to even
    return min(sign + steps + ((exponent + bias - 1) << m), infinity)


def reference(bits: int, source: str, target: str) -> int:
    """What torch does: float64 goes through float32, the others are rounded once."""
    number = decode(bits, source)
    negative = bool(bits >> (EXPONENT[source] + MANTISSA[source]))
    if source == "F64":
        number = decode(encode(number, "F32", negative), "F32")
    return encode(number, target, negative)


def interesting(name: str) -> list[int]:
    """Bit patterns around every place where rounding, exponents or kinds of number change."""
    e, m = EXPONENT[name], MANTISSA[name]
    bias = (1 << (e - 1)) - 1
    exponents = {0, 1, 2, bias - 1, bias, bias + 1, (1 << e) - 2, (1 << e) - 1}
    edges = (-150, -149, -127, -126, -25, -24, -15, -14, 15, 16, 127, 128)  # of the ranges of the targets
    exponents |= {edge + bias for edge in edges if 0 <= edge + bias < 1 << e}
    mantissas = {0, 1, (1 << m) - 1, 1 << (m - 1), (1 << (m - 1)) - 1, (1 << (m - 1)) + 1}
    for keep in (7, 10, 23):  # mantissa bits of the targets: half a step, around it, and odd steps
        if keep < m:
            half = 1 << (m - keep - 1)
            mantissas |= {half - 1, half, half + 1, 2 * half, 3 * half - 1, 3 * half, 3 * half + 1, (1 << m) - half}
    return [
        sign << (e + m) | exponent << m | mantissa
        for sign in (0, 1)
        for exponent in sorted(exponents)
        for mantissa in sorted(mantissas)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_all_pairs_round_to_nearest_even(source: str, target: str) -> None:
    if source == target:
        return
    bits = list(range(1 << 16)) if source == "BF16" and target == "F16" else interesting(source)
    if source == "F16":
        bits = list(range(0, 1 << 16, 7))
    got = run(bits, source, target)
    for before, after in zip(bits, got, strict=True):
        number = decode(before, source)
        if isinstance(number, float) and math.isnan(number):
            assert math.isnan(decode(after, target)), hex(before)
        else:
            assert after == reference(before, source, target), hex(before)


def test_ties_go_to_even() -> None:
    assert bf16(1.0) == 0x3F80
    assert bf16(1.0 + 2**-8) == 0x3F80, "half a step above an even one goes down"
    assert bf16(1.0 + 2**-7 + 2**-8) == 0x3F82, "half a step above an odd one goes up"
    assert bf16(1.0 + 2**-8 + 2**-23) == 0x3F81, "more than half goes up"
    assert bf16(-1.0 - 2**-8) == 0xBF80


def test_rounding_up_may_reach_infinity() -> None:
    assert run([0x7F7FFFFF], "F32", "BF16") == [0x7F80]
    assert run([0xFF7FFFFF], "F32", "BF16") == [0xFF80]


def test_infinity_and_signed_zero_stay() -> None:
    assert run([0x7F800000, 0xFF800000, 0, 0x80000000], "F32", "BF16") == [0x7F80, 0xFF80, 0, 0x8000]


def test_every_nan_is_one_nan() -> None:
    """Also those whose payload lies in the bits that are cut off, which truncation would turn into infinity."""
    nans = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]
    assert run(nans, "F32", "BF16") == [0x7FC0] * 6


@pytest.mark.parametrize(("source", "target", "nan"), [("F32", "F16", 0x7E00), ("F16", "F32", 0x7FC00000)])
def test_nans_to_and_from_fp16_have_no_payload(source: str, target: str, nan: int) -> None:
    signaling = {"F32": [0x7F800001, 0xFFFFFFFF], "F16": [0x7C01, 0xFFFF]}[source]
    assert run(signaling, source, target) == [nan] * 2


def test_subnormals_stay_subnormals() -> None:
    assert run([0x00010000, 0x00008000, 0x00008001, 0x007FFFFF], "F32", "BF16") == [1, 0, 1, 0x80]


def test_fp16_overflows_to_infinity_at_65520() -> None:
    patterns = [struct.unpack("<I", struct.pack("<f", number))[0] for number in (65504, 65519.996, 65520, 1e30, -1e30)]
    assert run(patterns, "F32", "F16") == [0x7BFF, 0x7BFF, 0x7C00, 0x7C00, 0xFC00]


def test_bf16_widens_without_change() -> None:
    bits = [word for word in range(1 << 16) if word & 0x7F80 != 0x7F80 or not word & 0x7F]
    assert run(bits, "BF16", "F32") == [word << 16 for word in bits]


@given(st.binary(min_size=8, max_size=400), st.sampled_from(NAMES), st.sampled_from(NAMES), st.data())
@settings(deadline=None)
def test_a_stream_in_odd_pieces_is_cast_like_the_whole(
    data: bytes, source: str, target: str, draw: st.DataObject
) -> None:
    if source == target:
        return
    width = DTYPES_BY_NAME[source].itemsize
    data = data[: len(data) // width * width]
    kept = bytearray()

    class Keep:
        def space(self, nbytes: int) -> memoryview:
            return memoryview(bytearray(min(nbytes, 5)))

        def commit(self, view: memoryview) -> None:
            kept.extend(view)

    sink = CastSink(
        Keep(), DTYPES_BY_NAME[source], DTYPES_BY_NAME[target], memoryview(bytearray(draw.draw(st.integers(width, 50))))
    )
    left = data
    while left:
        size = draw.draw(st.integers(1, len(left)))
        push(sink, memoryview(left[:size]))
        left = left[size:]
    assert kept == cast(memoryview(data), DTYPES_BY_NAME[source], DTYPES_BY_NAME[target])


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_torch_casts_alike(source: str, target: str) -> None:
    if source == target:
        return
    import torch

    view: dict[str, Any] = {"F64": torch.int64, "F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}
    bits = interesting(source)
    signed = np.array(bits, WORD[source]).view(WORD[source].replace("u", "i"))
    cast_by_torch = torch.from_numpy(signed).view(getattr(torch, str(DTYPES_BY_NAME[source].torch_name)))
    result = (
        cast_by_torch.to(getattr(torch, str(DTYPES_BY_NAME[target].torch_name))).view(view[target]).numpy().tobytes()
    )
    for before, ours, theirs in zip(bits, run(bits, source, target), words(result, target), strict=True):
        if math.isnan(decode(theirs, target)):  # payloads are not torch's either: they follow its vector instructions
            assert math.isnan(decode(ours, target)), hex(before)
        else:
            assert ours == theirs, hex(before)
