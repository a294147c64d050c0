"""Scalars of TensorBoard's event files, read without TensorBoard.

    file     records, one after the other: u64 length | u32 masked CRC-32C of it | data | u32 masked CRC-32C of the data
    data     Event: 2 step, 5 Summary: 1 Value, many: 1 tag, 2 simple_value (float), 8 Tensor
    Tensor   1 dtype, 4 content, or 5 floats, 6 doubles, 13 halves

as in TensorFlow's `record_writer.h` and in `event.proto`, `summary.proto` and `tensor.proto` of TensorBoard. Fields are
those of protocol buffers: a varint `number << 3 | type`, then a varint (0), 8 bytes (1), a length and bytes (2), or
4 bytes (5). A run that is still writing, or was killed, leaves half a record at the end; that is said.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckptx.errors import InputError
from ckptx.storage.files import FilePool

_HEAD, _AROUND = 12, 16
_CHECKED = 1 << 16  # bytes of the longest record whose data is held against its checksum: scalars take a hundred
_LONGEST = 64 << 20  # images and the like are passed over
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, lowest bit first
_MASK = 0xA282EAD8
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_KINDS = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}  # of tensors, by `DataType`
_BFLOAT16 = 14


class Scalar(NamedTuple):
    """One value of one tag.

    Attributes:
        tag: Its name.
        step: As the writer counted.
        value: The number; simple values are floats of 32 bits.
    """

    tag: str
    step: int
    value: float


def scalars(path: Path, notes: list[str]) -> Iterator[Scalar]:
    """The scalars of one file, in its order.

    Args:
        path: The file.
        notes: Gets a line where it ends in the middle of a record.

    Raises:
        InputError: It is damaged.
    """
    for at, data in _records(path, notes):
        try:
            yield from _of_event(data)
        except (ValueError, struct.error, IndexError) as error:
            raise InputError(
                f"{path}: damaged event at byte {at} ({error!s:.80}); delete the file or write it again"
            ) from None


def _records(path: Path, notes: list[str]) -> Iterator[tuple[int, bytes]]:
    with FilePool(path.parent) as files:
        size, at = files.size(path.name), 0
        while at < size:
            head = files.read_up_to(path.name, at, _HEAD)
            if len(head) < _HEAD:
                break
            length, crc = struct.unpack("<QI", head)
            if _masked(head[:8]) != crc:
                raise InputError(
                    f"{path}: no record of TensorBoard at byte {at}, its length has another checksum; it is damaged"
                )
            if at + _AROUND + length > size:
                break
            if length <= _LONGEST:
                data = files.read(path.name, at + _HEAD, length + 4)
                if length <= _CHECKED and _masked(data[:-4]) != int.from_bytes(data[-4:], "little"):
                    raise InputError(f"{path}: the record at byte {at} has another checksum; the file is damaged")
                yield at, data[:-4]
            at += _AROUND + length
        if at < size:
            notes.append(
                f"{path.name}: ends in the middle of a record, at byte {size}; what was logged last is missing"
            )


def _of_event(data: bytes) -> Iterator[Scalar]:
    step, summaries = 0, []
    for number, value in _fields(data):
        if number == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >= 1 << 63 else value
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            if number == 1 and isinstance(value, bytes) and (found := _of_value(value)) is not None:
                yield Scalar(found[0], step, found[1])


def _of_value(data: bytes) -> tuple[str, float] | None:
    tag, found = "", None
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            tag = value.decode("utf-8", "replace")
        elif number == 2:
            found = float(struct.unpack("<f", value)[0])
        elif number == 8:
            found = _of_tensor(value)
    return None if found is None else (tag, found)


def _of_tensor(data: bytes) -> float | None:
    """The number in a tensor of one element; None of what is no number, or several."""
    dtype, parts = 0, {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        else:
            parts[number] = value
    content, kind = parts.get(4), _KINDS.get(dtype)
    if isinstance(content, bytes) and content:
        if dtype == _BFLOAT16 and len(content) == 2:
            return float(struct.unpack("<f", b"\0\0" + content)[0])
        return float(np.frombuffer(content, kind)[0]) if kind and len(content) == np.dtype(kind).itemsize else None
    for field, form in ((5, "<f"), (6, "<d")):
        packed = parts.get(field)
        if isinstance(packed, bytes) and len(packed) == struct.calcsize(form):
            return float(struct.unpack(form, packed)[0])
    half = parts.get(13)
    if half is not None:
        bits = half if isinstance(half, int) else _varint(half, 0)[0]
        raw = (bits & 0xFFFF).to_bytes(2, "little")
        wide = b"\0\0" + raw
        return float(struct.unpack("<f", wide)[0] if dtype == _BFLOAT16 else np.frombuffer(raw, "<f2")[0])
    return None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: number, and a number or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_EIGHT, _FOUR):
            length = 8 if kind == _EIGHT else 4
        else:
            raise ValueError(f"a field of type {kind}")
        if at + length > len(data):
            raise ValueError("a field that ends behind its message")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


_CRC = _table()


def _masked(data: bytes) -> int:
    """The CRC-32C of some bytes, turned and moved, so that a checksum of checksums is no trap."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
