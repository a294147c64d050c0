"""Copies of columns between buffers: cutting rows into narrower ones, and weaving narrow ones into rows."""

from __future__ import annotations

from functools import cache
from types import ModuleType

# A slice costs the interpreter as much as a kilobyte costs the memory. Narrower rows are left to numpy, which takes
# longer to import than most checkpoints without such rows take in all.
_WIDE = 1024


def cut_rows(out: memoryview, rows: memoryview, pitch: int, column: int, width: int) -> None:
    """Fills `out` with the bytes `column` to `column + width` of each row.

    Args:
        out: `width` bytes for each row.
        rows: Rows of `pitch` bytes.
        pitch: Bytes from one row to the next.
        column: First byte taken.
        width: Bytes taken of each.
    """
    if width == pitch:
        out[:] = rows
    elif width >= _WIDE:
        at = 0
        for begin in range(column, column + pitch * (len(out) // width), pitch):
            out[at : at + width] = rows[begin : begin + width]
            at += width
    else:
        _reorder().cut(out, rows, pitch, column, width)


def weave_rows(out: memoryview, out_width: int, column: int, rows: memoryview, pitch: int, width: int) -> None:
    """Lays `width` bytes every `pitch` bytes of `rows` to `column` of rows of `out_width` bytes."""
    if width == out_width == pitch:
        out[:] = rows[: len(out)]
    elif width >= _WIDE:
        begin = 0
        for at in range(column, len(out), out_width):
            out[at : at + width] = rows[begin : begin + width]
            begin += pitch
    else:
        _reorder().weave(out, out_width, column, rows, pitch, width)


@cache
def _reorder() -> ModuleType:
    from ckptx.transfer import reorder

    return reorder
