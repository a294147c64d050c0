"""`--dtype`: float casts with the rounding of torch.

Torch rounds to nearest even, and casts to bf16 and fp16 from float32: a float64 goes through float32 first. A NaN stays
a NaN. Casts to bf16 and those from or to fp16 write every NaN as the default quiet NaN, because processors and torch's
vector instructions disagree on its bits (torch gives 0x7FC0 or 0xFFFF for bf16); so the same input gives the same bytes
everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptx.catalog.dtype import DType
from ckptx.transfer.overflow_counts import OverflowCounts
from ckptx.transfer.stream import Sink, push

_NUMPY_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
# Dtype -> unsigned integer dtype of the same width, mask that clears the sign bit, and bits of positive infinity.
_MAGNITUDES: dict[str, tuple[Any, Any, Any]] = {
    "F64": (np.uint64, np.uint64((1 << 63) - 1), np.uint64(0x7FF << 52)),
    "F32": (np.uint32, np.uint32((1 << 31) - 1), np.uint32(0xFF << 23)),
    "F16": (np.uint16, np.uint16((1 << 15) - 1), np.uint16(0x1F << 10)),
    "BF16": (np.uint16, np.uint16((1 << 15) - 1), np.uint16(0xFF << 7)),
}
# Source and target dtypes whose cast is exact.
_EXACT_CASTS = {("BF16", "F32"), ("BF16", "F64"), ("F16", "BF16"), ("F16", "F32"), ("F16", "F64"), ("F32", "F64")}


def cast(view: memoryview, source: DType, target: DType, counts: OverflowCounts | None = None) -> memoryview:
    """Cast the elements in `view` to `target`.

    Args:
        view: Whole elements of `source`, row-major.
        source: Source dtype, one of F64, F32, F16, BF16.
        target: Target dtype, one of the same.
        counts: Receives the number of overflows and underflows; None to skip counting.

    Returns:
        The bytes of the cast elements.
    """
    if source.name == "BF16":
        bits = np.frombuffer(view, np.uint16).astype(np.uint32) << 16
        values: Any = bits.view(np.float32)
    else:
        values = np.frombuffer(view, _NUMPY_DTYPES[source.name])
    with np.errstate(over="ignore", invalid="ignore"):
        if source.name == "F64":
            values = values.astype(np.float32)
        if target.name == "BF16":
            result = round_to_bf16(values.astype(np.float32))
        else:
            result = values.astype(_NUMPY_DTYPES[target.name])
            if "F16" in (source.name, target.name):
                result[np.isnan(result)] = np.nan
    if counts is not None and len(result) and (source.name, target.name) not in _EXACT_CASTS:
        _count_overflows(view, result, source.name, target.name, counts)
    return memoryview(result).cast("B")


def _count_overflows(view: memoryview, result: Any, source: str, target: str, counts: OverflowCounts) -> None:
    """Add the overflows and underflows of a cast to `counts`.

    Magnitudes are compared as integers. `view`, the elements before the cast, is read only if `result` has an infinity,
    a NaN or a zero.
    """
    uint_dtype, mask, infinity = _MAGNITUDES[target]
    after = result.view(uint_dtype) & mask
    may_overflow, may_underflow = after.max() >= infinity, not after.min()
    if not may_overflow and not may_underflow:
        return
    uint_dtype, mask, infinity_before = _MAGNITUDES[source]
    before = np.frombuffer(view, uint_dtype) & mask
    if may_overflow:  # NaN is above infinity as an integer, and is not counted
        counts.overflows += int(np.count_nonzero(after == infinity) - np.count_nonzero(before == infinity_before))
    if may_underflow:
        counts.underflows += int(np.count_nonzero(before) - np.count_nonzero(after))


def round_to_bf16(values: Any) -> Any:
    """Return float32 numbers rounded to bf16 (nearest, ties to even), as uint16; every NaN becomes 0x7FC0."""
    bits = values.view(np.uint32)
    rounded = bits >> 16  # in place from here on: a temporary array for each operation takes twice the time
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    result = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        result[is_nan] = 0x7FC0
    return result


class CastSink:
    """Sink that casts elements from one dtype to another and passes them to another sink."""

    def __init__(
        self, sink: Sink, source: DType, target: DType, scratch: memoryview, counts: OverflowCounts | None = None
    ) -> None:
        """Start without elements.

        Args:
            sink: Sink for the cast elements.
            source: Dtype of the bytes that this sink receives.
            target: Dtype of the bytes that `sink` receives.
            scratch: Memory for elements before the cast, at least one.
            counts: Receives the number of overflows and underflows; None to skip counting.
        """
        self._sink, self._source, self._target, self._counts = sink, source, target, counts
        self._scratch = scratch[: len(scratch) // source.itemsize * source.itemsize]
        self._filled = 0

    def space(self, nbytes: int) -> memoryview:
        return self._scratch[self._filled : self._filled + nbytes]

    def commit(self, view: memoryview) -> None:
        """Cast the complete elements received so far; keep an incomplete element until the rest arrives."""
        self._filled += len(view)
        ready = self._filled // self._source.itemsize * self._source.itemsize
        if not ready:
            return
        push(self._sink, cast(self._scratch[:ready], self._source, self._target, self._counts))
        rest = self._filled - ready
        self._scratch[:rest] = bytes(self._scratch[ready : self._filled])
        self._filled = rest
