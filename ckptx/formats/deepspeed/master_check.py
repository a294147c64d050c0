"""Compare samples of the fp32 masters with the weights that the optimizer rounded from them.

In stages 1 and 2, the file of the weights and the flat tensors hold the same parameters. A wrong order of the flat
tensors, or files of two saves, would give a parameter the optimizer state of another. So a few elements of every
parameter are compared, bit for bit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InputError
from ckptx.formats.deepspeed.file_names import MODEL_FILE
from ckptx.storage.interface import SourceFiles

_SAMPLE = 8  # elements that are compared at each place
_ITEM_FORMATS = {"F32": "I", "F16": "H", "BF16": "H"}  # dtype -> struct format of an unsigned integer of the same size
_NAN = -1  # stands for all values that are not a number, whose bits depend on the device


def check_masters(files: SourceFiles, pairs: Iterable[tuple[TensorEntry, TensorEntry]]) -> None:
    """Compare each weight with its master; pairs with a dtype other than F32, F16 and BF16 are skipped.

    Args:
        files: Files of the checkpoint.
        pairs: Weight in the state dict, and the master in the flat tensors, of each parameter.

    Raises:
        InputError: A master does not round to its weight.
    """
    for weight, master in pairs:
        if not {weight.dtype.name, master.dtype.name} <= _ITEM_FORMATS.keys():
            continue
        is_whole = weight.chunks[0].region.sizes == weight.shape
        for stored, chunk, count in (_samples if is_whole else _samples_of_shards)(weight, master):
            rounded = [
                _rounded(bits, master.dtype, weight.dtype)
                for bits in _read(files, chunk.file, chunk.offset, count, master.dtype)
            ]
            values = [
                _NAN if _is_nan(bits, weight.dtype) else bits
                for bits in _read(files, stored.file, stored.offset, count, weight.dtype)
            ]
            if rounded != values:
                raise InputError(
                    f'{files.root}/{chunk.file}: the fp32 master of "{weight.name}" does not round to the weight in '
                    f"{stored.file}; the files are of different saves, or the parameters are in another order; copy "
                    f"them again, or pass {MODEL_FILE} to convert only the weights"
                )


class _Sample(NamedTuple):
    """The file of a few contiguous elements, and the position of their first byte in it."""

    file: str
    offset: int


def _samples(weight: TensorEntry, master: TensorEntry) -> Iterator[tuple[_Sample, _Sample, int]]:
    """Yield samples of a weight that is in one chunk: position of the weight, of its master, and number of elements.

    They are at the beginning of the first chunk of the master, in the middle of the middle one, and at the end of the
    last one. The elements of a chunk of a flat tensor are contiguous in the parameter, too. There are no samples of a
    weight that is not row-major.
    """
    stored, chunks = weight.chunks[0], master.chunks
    if stored.strides is not None:
        return
    for index, fraction in ((0, 0), (len(chunks) // 2, 1), (len(chunks) - 1, 2)):
        chunk = chunks[index]
        position = max(chunk.region.numel - _SAMPLE, 0) * fraction // 2
        first = _flat_index(weight.shape, chunk.region.offsets) + position
        yield (
            _Sample(stored.file, stored.offset + first * weight.dtype.itemsize),
            _Sample(chunk.file, chunk.offset + position * master.dtype.itemsize),
            min(_SAMPLE, chunk.region.numel),
        )


def _samples_of_shards(weight: TensorEntry, master: TensorEntry) -> Iterator[tuple[_Sample, _Sample, int]]:
    """Yield samples of a weight in several chunks, see `_samples`.

    They are at the beginning of the first row and at the end of the last row of each chunk. A chunk whose rows are not
    contiguous is skipped. The master is in one chunk, as in a universal checkpoint.
    """
    (whole,) = master.chunks
    for chunk in weight.chunks:
        offsets, sizes = chunk.region
        count = min(_SAMPLE, sizes[-1])
        strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes))) if chunk.strides is None else chunk.strides
        if strides[-1] != 1:
            continue
        for local in ((0,) * len(sizes), (*(size - 1 for size in sizes[:-1]), sizes[-1] - count)):
            first = _flat_index(weight.shape, tuple(map(int.__add__, offsets, local)))
            position = sum(index * stride for index, stride in zip(local, strides, strict=True))
            yield (
                _Sample(chunk.file, chunk.offset + position * weight.dtype.itemsize),
                _Sample(whole.file, whole.offset + first * master.dtype.itemsize),
                count,
            )


def _flat_index(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Return the index in row-major order of the element at `offsets` in a tensor."""
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


def _read(files: SourceFiles, file: str, offset: int, count: int, dtype: DType) -> tuple[int, ...]:
    """Return the bits of `count` elements, each as an unsigned integer."""
    data = files.read(file, offset, count * dtype.itemsize)
    return struct.unpack(f"<{count}{_ITEM_FORMATS[dtype.name]}", data)


def _is_nan(bits: int, dtype: DType) -> bool:
    infinity = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[dtype.name]
    magnitude = bits & (0x7FFFFFFF if dtype.name == "F32" else 0x7FFF)
    return magnitude > infinity


def _rounded(bits: int, dtype: DType, target: DType) -> int:
    """Return the bits of a value in another dtype, rounded to nearest, ties to even; `_NAN` for NaN."""
    if _is_nan(bits, dtype):
        return _NAN
    if dtype is target:
        return bits
    if dtype.name == "F16":
        value = struct.unpack("<e", struct.pack("<H", bits))[0]
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
    elif dtype.name == "BF16":
        bits <<= 16
    if target.name == "F32":
        return bits
    if target.name == "BF16":
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00
