"""`--dtype`: float casts, rounded as torch rounds them.

Torch rounds to nearest even, and to bf16 and fp16 from float32: a float64 goes through float32 first. A NaN stays a
NaN; where processors or torch's vector instructions disagree on its bits (torch gives 0x7FC0 or 0xFFFF for bf16), it
becomes the plain quiet NaN, so that the same input gives the same bytes everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptx.catalog.dtype import DType
from ckptx.transfer.stream import Sink, push

_NUMPY: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def cast(view: memoryview, source: DType, target: DType) -> memoryview:
    """The elements in `view` as `target`.

    Args:
        view: Whole elements of `source`, row-major.
        source: One of F64, F32, F16, BF16.
        target: Likewise.

    Returns:
        The bytes of the cast elements.
    """
    if source.name == "BF16":
        bits = np.frombuffer(view, np.uint16).astype(np.uint32) << 16
        values: Any = bits.view(np.float32)
    else:
        values = np.frombuffer(view, _NUMPY[source.name])
    with np.errstate(over="ignore", invalid="ignore"):
        if source.name == "F64":
            values = values.astype(np.float32)
        if target.name == "BF16":
            result = _to_bf16(values.astype(np.float32))
        else:
            result = values.astype(_NUMPY[target.name])
            if "F16" in (source.name, target.name):
                result[np.isnan(result)] = np.nan
    return memoryview(result).cast("B")


def _to_bf16(values: Any) -> Any:
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


class CastSink:
    """Casts what it is given and passes it on."""

    def __init__(self, sink: Sink, source: DType, target: DType, scratch: memoryview) -> None:
        self._sink, self._source, self._target = sink, source, target
        self._scratch = scratch[: len(scratch) // source.itemsize * source.itemsize]
        self._filled = 0

    def space(self, nbytes: int) -> memoryview:
        return self._scratch[self._filled : self._filled + nbytes]

    def commit(self, view: memoryview) -> None:
        """Casts the whole elements that have arrived; part of an element waits for the rest."""
        self._filled += len(view)
        ready = self._filled // self._source.itemsize * self._source.itemsize
        if not ready:
            return
        push(self._sink, cast(self._scratch[:ready], self._source, self._target))
        rest = self._filled - ready
        self._scratch[:rest] = bytes(self._scratch[ready : self._filled])
        self._filled = rest
