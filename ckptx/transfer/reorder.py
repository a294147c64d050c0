"""Strided copies in memory. The only part of a copy that needs numpy; loaded when a tensor needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided


def weave(out: memoryview, out_width: int, column: int, rows: memoryview, pitch: int, width: int) -> None:
    """Lays the rows of a strip into a tile: `width` bytes every `pitch` bytes, to `column` of rows of `out_width`."""
    target = np.frombuffer(out, np.uint8).reshape(-1, out_width)
    if pitch == width:
        source = np.frombuffer(rows, np.uint8)[: target.shape[0] * width].reshape(-1, width)
    else:
        source = as_strided(np.frombuffer(rows, np.uint8), (target.shape[0], width), (pitch, 1))
    target[:, column : column + width] = source


def cut(out: memoryview, rows: memoryview, pitch: int, column: int, width: int) -> None:
    """Takes `width` bytes from `column` on of each row of `pitch` bytes."""
    target = np.frombuffer(out, np.uint8).reshape(-1, width)
    source = np.frombuffer(rows, np.uint8)[: target.shape[0] * pitch].reshape(-1, pitch)
    target[:] = source[:, column : column + width]


def unstride(
    out: memoryview,
    sizes: Sequence[int],
    at: Mapping[int, int],
    span: memoryview,
    strides: Sequence[int],
    itemsize: int,
) -> None:
    """Copies strided elements into row-major order.

    Args:
        out: Row-major destination of `sizes` elements.
        sizes: One per dim.
        at: Dims that are fixed at a position; `span` holds the elements of the others.
        span: Bytes from the first element on.
        strides: Of the source, in elements, one per dim.
        itemsize: Bytes per element.
    """
    free = [dim for dim in range(len(sizes)) if dim not in at]
    target = np.frombuffer(out, np.uint8).reshape(*sizes, itemsize)
    source = as_strided(
        np.frombuffer(span, np.uint8),
        (*(sizes[dim] for dim in free), itemsize),
        (*(strides[dim] * itemsize for dim in free), 1),
    )
    target[tuple(at.get(dim, slice(None)) for dim in range(len(sizes)))] = source
