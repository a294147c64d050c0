"""Decoding of quantized weights, one range of rows at a time.

    value = decoded code * scale        in float32; rounded once to nearest even if the result is bf16

For a block of at least 512 elements, the products of its scale with all 256 codes are a table, and decoding is a
lookup. Where a scale is one byte, as in mxfp4 and nvfp4, one table has the products of all scales with all pairs of
4-bit codes. The lookups release the GIL.

A product beyond the range of the result is infinite, as in torch; only scales that are infinite or NaN are errors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ckptx.transfer.cast import round_to_bf16

_LOOKUP_NBYTES = 4 << 20  # bytes of the indices of one lookup, which should stay in the cache of a core
_MAX_TABLE_SIZE = 1 << 16  # products of all tables of one lookup, so that uint16 can index them
_MIN_TABLE_BLOCK = 512  # elements of a block from which a table of 256 products pays off


@lru_cache(maxsize=1)
def e4m3_values() -> Any:
    """Return the values of all 256 codes of float8_e4m3fn, as float32."""
    codes = np.arange(256, dtype=np.int32)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[(codes & 127) == 127] = np.nan
    return _read_only(np.where(codes >> 7, -values, values).astype(np.float32))


@lru_cache(maxsize=1)
def e2m1_values() -> Any:
    """Return the values of all 16 codes of float4_e2m1fn, as float32; code 8 is -0.0."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return _read_only(np.concatenate([values, -values]))


@lru_cache(maxsize=1)
def exponent_values() -> Any:
    """Return the values of all 256 codes of float8_e8m0fnu, powers of two, as float32; 255 is NaN."""
    values = np.ldexp(np.float64(1), np.minimum(np.arange(256), 254) - 127).astype(np.float32)
    values[255] = np.nan
    return _read_only(values)


def _read_only(values: Any) -> Any:
    values.flags.writeable = False
    return values


def bf16_values(bits: Any) -> Any:
    """Return bf16 numbers, given as uint16, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_products(values: Any, *, to_bf16: bool) -> Any:
    """Return products in the dtype of the result; each NaN becomes the plain quiet NaN.

    Args:
        values: Products, float32, of any shape; changed in place unless they are rounded to bf16.
        to_bf16: True to round to bf16, returned as uint16; False to return `values` itself.
    """
    if to_bf16:
        return round_to_bf16(values)
    values[np.isnan(values)] = np.nan
    return values


def decode_by_tables(codes: Any, scales: Any, values: Any, block: tuple[int, int], first_row: int, out: Any) -> None:
    """Decode rows of a weight with a table of 256 products for each block.

    Args:
        codes: Codes, uint8, of shape (rows, columns of the weight).
        scales: Scales of the blocks of these rows, float32, of shape (block rows, blocks per row). The first block row
            is that of the first row.
        values: Value of each code, float32, of shape (256,).
        block: Rows and columns of a block.
        first_row: Index in the weight of the first row, which may be inside a block.
        out: Receives the result, uint16 for bf16 or float32, in the shape of `codes`; C-contiguous.
    """
    block_rows, block_columns = block
    rows, width = codes.shape
    blocks_per_row = scales.shape[1]
    rows_per_step = max(1, _LOOKUP_NBYTES // (8 * width))
    blocks_per_step = max(1, min(rows_per_step // block_rows, _MAX_TABLE_SIZE // (256 * blocks_per_row)))
    index = np.empty((min(rows_per_step, rows), width), np.intp)
    start = 0
    while start < rows:
        first_block = (first_row + start) // block_rows - first_row // block_rows
        block_end = min(len(scales), first_block + blocks_per_step)
        stop = min(rows, start + rows_per_step, (first_row // block_rows + block_end) * block_rows - first_row)
        with np.errstate(over="ignore"):  # a product beyond the range of float32 is infinity
            products = scales[first_block:block_end].reshape(-1, 1) * values
        tables = round_products(products, to_bf16=out.dtype == np.uint16).reshape(-1)
        part_index = index[: stop - start]
        if len(tables) == len(values):
            np.copyto(part_index, codes[start:stop])
        else:
            # Sums of small integers and one conversion are faster than sums of np.intp.
            positions = codes[start:stop].astype(np.uint16 if len(tables) <= _MAX_TABLE_SIZE else np.uint32)
            if blocks_per_row > 1:
                positions += (np.arange(width) // block_columns * 256).astype(positions.dtype)
            if block_end - first_block > 1:
                block_index = np.arange(first_row + start, first_row + stop) // block_rows
                positions += ((block_index - block_index[0]) * (blocks_per_row * 256)).astype(positions.dtype)[:, None]
            np.copyto(part_index, positions)
        np.take(tables, part_index, out=out[start:stop], mode="wrap")
        start = stop


def decode_by_products(codes: Any, scales: Any, values: Any, columns: int, out: Any) -> None:
    """Decode rows of a weight whose blocks are too small for tables.

    Args:
        codes: Codes, uint8, of shape (rows, columns of the weight).
        scales: Scales, float32, of shape (rows, blocks per row), or (1, blocks per row) if all rows have the same.
        values: Value of each code, float32, of shape (number of codes,).
        columns: Columns of a block; the last block of a row may be smaller.
        out: Receives the result, uint16 for bf16 or float32, in the shape of `codes`.
    """
    rows, width = codes.shape
    step = max(1, _LOOKUP_NBYTES // (16 * width))
    for first in range(0, rows, step):
        part = codes[first : first + step]
        products = np.take(values, part, mode="wrap")
        part_scales = scales if len(scales) == 1 else scales[first : first + step]
        whole = width // columns * columns
        with np.errstate(over="ignore"):
            if whole:
                blocks = products[:, :whole].reshape(len(part), -1, columns)
                products[:, :whole] = (blocks * part_scales[:, : whole // columns, None]).reshape(len(part), whole)
            if whole < width:
                products[:, whole:] *= part_scales[:, -1:]
        out[first : first + step] = round_products(products, to_bf16=out.dtype == np.uint16)


@lru_cache(maxsize=8)
def pair_table(second_scale: float | None, *, is_divisor: bool, to_bf16: bool) -> Any:
    """Return the products of every scale of one byte with every pair of e2m1 codes.

    Args:
        second_scale: Scale of the whole tensor, by which e4m3 scales are multiplied; None if scales are e8m0.
        is_divisor: True to divide by the second scale instead.
        to_bf16: True for pairs of bf16, as uint32; False for pairs of float32, as uint64.

    Returns:
        Array of shape (256 * 256,): at scale * 256 + byte, the product of the low nibble and then of the high nibble.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if second_scale is None:
            scales = exponent_values()
        else:
            factor = np.float32(second_scale)
            scales = e4m3_values() / factor if is_divisor else e4m3_values() * factor
        single = round_products(scales[:, None] * e2m1_values(), to_bf16=to_bf16)
    pairs = np.empty((256, 256, 2), single.dtype)
    codes = np.arange(256)
    pairs[..., 0], pairs[..., 1] = single[:, codes & 15], single[:, codes >> 4]
    return pairs.reshape(-1).view(np.uint32 if to_bf16 else np.uint64)


def decode_pairs(packed: Any, scales: Any, table: Any, group: int, out: Any) -> None:
    """Decode rows of packed pairs of e2m1 codes with a scale of one byte for each group.

    Args:
        packed: Pairs of codes, uint8, of shape (rows, columns / 2).
        scales: Scales as stored, uint8, of shape (rows, columns / group).
        table: Result of `pair_table`.
        group: Elements of a group.
        out: Receives the result, of shape (rows, columns); uint16 for bf16 or float32; C-contiguous.
    """
    rows, width = packed.shape
    pairs_out = out.view(table.dtype)
    step = max(1, _LOOKUP_NBYTES // (8 * width))
    index = np.empty((min(step, rows), width // (group // 2), group // 2), np.intp)
    for first in range(0, rows, step):
        part = packed[first : first + step]
        part_index = index[: len(part)]
        offsets = scales[first : first + step].astype(np.intp) << 8
        np.add(part.reshape(part_index.shape), offsets[:, :, None], out=part_index)
        np.take(table, part_index.reshape(part.shape), out=pairs_out[first : first + step], mode="wrap")


def unpack_nibbles(packed: Any, columns: int) -> Any:
    """Return 4-bit codes as bytes, low nibble first, in the shape (rows, columns).

    Args:
        packed: uint8 of shape (rows, at least columns / 2).
        columns: Number of codes of a row; nibbles after them are dropped.
    """
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(len(packed), -1)[:, :columns]


def uses_tables(block: tuple[int, int], rows: int, width: int) -> bool:
    """Return True if `decode_by_tables` is faster than `decode_by_products`.

    Args:
        block: Rows and columns of a block.
        rows: Rows of the weight.
        width: Columns of the weight.
    """
    return min(block[0], rows) * min(block[1], width) >= _MIN_TABLE_BLOCK
