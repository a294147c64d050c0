"""Strided copies in memory. They require numpy, so this module is imported only when a tensor needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided


def insert_columns(out: memoryview, out_width: int, column: int, rows: memoryview, pitch: int, width: int) -> None:
    """Fill the bytes `column` to `column + width` of each row of `out`, with numpy; see `columns.insert_columns`."""
    target = np.frombuffer(out, np.uint8).reshape(-1, out_width)
    if pitch == width:
        source = np.frombuffer(rows, np.uint8)[: target.shape[0] * width].reshape(-1, width)
    else:
        source = as_strided(np.frombuffer(rows, np.uint8), (target.shape[0], width), (pitch, 1))
    target[:, column : column + width] = source


def extract_columns(out: memoryview, rows: memoryview, pitch: int, column: int, width: int) -> None:
    """Fill `out` with the bytes `column` to `column + width` of each row, with numpy; see `columns.extract_columns`."""
    target = np.frombuffer(out, np.uint8).reshape(-1, width)
    source = np.frombuffer(rows, np.uint8)[: target.shape[0] * pitch].reshape(-1, pitch)
    target[:] = source[:, column : column + width]


def copy_strided(
    out: memoryview,
    sizes: Sequence[int],
    fixed_indices: Mapping[int, int],
    span: memoryview,
    strides: Sequence[int],
    itemsize: int,
) -> None:
    """Copy strided elements into row-major order.

    Args:
        out: Row-major destination of `sizes` elements.
        sizes: Size of each dim of `out`.
        fixed_indices: Dim -> index in `out`, for dims of which `span` has one index only. Only the elements of `out`
            with these indices are filled.
        span: Source bytes from the first of these elements on.
        strides: Source stride of each dim, in elements.
        itemsize: Bytes per element.
    """
    free_dims = [dim for dim in range(len(sizes)) if dim not in fixed_indices]
    target = np.frombuffer(out, np.uint8).reshape(*sizes, itemsize)
    source = as_strided(
        np.frombuffer(span, np.uint8),
        (*(sizes[dim] for dim in free_dims), itemsize),
        (*(strides[dim] * itemsize for dim in free_dims), 1),
    )
    target[tuple(fixed_indices.get(dim, slice(None)) for dim in range(len(sizes)))] = source
