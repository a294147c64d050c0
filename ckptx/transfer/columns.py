"""Copy columns of bytes between buffers: out of rows, and into rows."""

from __future__ import annotations

from functools import cache
from types import ModuleType

# In bytes. A slice costs the interpreter as much as copying a kilobyte. Narrower rows are copied by numpy, whose import
# takes longer than the whole conversion of most checkpoints without such rows.
_MIN_SLICE_WIDTH = 1024


def extract_columns(out: memoryview, rows: memoryview, pitch: int, column: int, width: int) -> None:
    """Fill `out` with the bytes `column` to `column + width` of each row.

    Args:
        out: Destination, `width` bytes for each row.
        rows: Source rows of `pitch` bytes.
        pitch: Number of bytes from one row to the next.
        column: First byte to copy of each row.
        width: Number of bytes to copy of each row.
    """
    if width == pitch:
        out[:] = rows
    elif width >= _MIN_SLICE_WIDTH:
        position = 0
        for begin in range(column, column + pitch * (len(out) // width), pitch):
            out[position : position + width] = rows[begin : begin + width]
            position += width
    else:
        _load_strided_copy().extract_columns(out, rows, pitch, column, width)


def insert_columns(out: memoryview, out_width: int, column: int, rows: memoryview, pitch: int, width: int) -> None:
    """Fill the bytes `column` to `column + width` of each row of `out`.

    Args:
        out: Destination rows of `out_width` bytes.
        out_width: Number of bytes of a destination row.
        column: First byte to fill of each destination row.
        rows: Source rows; the first `width` bytes of each are copied.
        pitch: Number of bytes from one source row to the next.
        width: Number of bytes to copy of each source row.
    """
    if width == out_width == pitch:
        out[:] = rows[: len(out)]
    elif width >= _MIN_SLICE_WIDTH:
        begin = 0
        for position in range(column, len(out), out_width):
            out[position : position + width] = rows[begin : begin + width]
            begin += pitch
    else:
        _load_strided_copy().insert_columns(out, out_width, column, rows, pitch, width)


@cache
def _load_strided_copy() -> ModuleType:
    """Return the module `strided_copy`, imported on first use because it imports numpy."""
    from ckptx.transfer import strided_copy

    return strided_copy
