"""Read the scalars of TensorBoard's event files.

    file     records, one after the other: u64 length | u32 masked CRC-32C of length | data | u32 masked CRC-32C of data
    data     an Event in protocol buffers, with a step and the values of some tags

as in TensorFlow's `record_writer.h`. TensorBoard's own package decodes the events and the tensors in them. This module
parses the records: the readers of TensorBoard and tbparse stop without an error at a damaged record, and trust the
length in its header. If a run was killed while writing, the last record is incomplete, and a note reports it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.errors import InputError, missing_package
from ckptx.storage.files import FilePool

# The header is the length and its checksum; the frame is the header and the checksum of the data.
_HEADER_BYTES, _FRAME_BYTES = 12, 16
_MAX_CHECKED_BYTES = 1 << 16  # checksums of longer records are not checked; a scalar takes about 100 bytes
_MAX_RECORD_BYTES = 64 << 20  # longer records, such as images, are skipped


class Scalar(NamedTuple):
    """A value of a tag.

    Attributes:
        tag: Name of the scalar, such as "train/loss".
        step: Global step at which it was logged.
        value: Value of the scalar; most writers store float32.
    """

    tag: str
    step: int
    value: float


def require_tensorboard(subject: str) -> None:
    """Check that event files can be read.

    Args:
        subject: Option or key that requires TensorBoard, for the error message.

    Raises:
        EnvironmentProblem: TensorBoard is not installed.
    """
    try:
        import tensorboard.compat.proto.event_pb2  # noqa: F401
    except ImportError as error:
        raise missing_package(subject, error) from error


def read_scalars(path: Path, notes: list[str]) -> Iterator[Scalar]:
    """Yield the scalars of a file in the order in which they were logged.

    Args:
        path: The file.
        notes: Receives a line if the file ends in the middle of a record.

    Raises:
        InputError: The file is damaged.
        EnvironmentProblem: TensorBoard is not installed.
    """
    require_tensorboard(str(path))
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    for offset, data in _read_records(path, notes):
        try:
            event = Event.FromString(data)
        except DecodeError as error:
            raise InputError(
                f"{path}: damaged event at byte {offset} ({error!s:.120}); delete the file or write it again"
            ) from None
        for value in event.summary.value:
            scalar = _scalar_value(value)
            if scalar is not None:
                yield Scalar(value.tag, event.step, scalar)


def _read_records(path: Path, notes: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of each record in the file, in bytes, and its data, except for records that are too long."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with FilePool(path.parent) as files:
        size, offset = files.size(path.name), 0
        while offset < size:
            header = files.read_up_to(path.name, offset, _HEADER_BYTES)
            if len(header) < _HEADER_BYTES:
                break
            length, crc = struct.unpack("<QI", header)
            if masked_crc32c(header[:8]) != crc:
                raise InputError(
                    f"{path}: the length of the record at byte {offset} does not match its checksum; the file is "
                    "damaged, delete it or write it again"
                )
            if offset + _FRAME_BYTES + length > size:
                break
            if length <= _MAX_RECORD_BYTES:
                data = files.read(path.name, offset + _HEADER_BYTES, length + 4)
                if length <= _MAX_CHECKED_BYTES and masked_crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
                    raise InputError(
                        f"{path}: the data of the record at byte {offset} does not match its checksum; the file is "
                        "damaged, delete it or write it again"
                    )
                yield offset, data[:-4]
            offset += _FRAME_BYTES + length
        if offset < size:
            notes.append(
                f"{path.name}: ends in the middle of a record, at byte {size}; the last logged values are missing"
            )


def _scalar_value(value: Any) -> float | None:
    """Return the scalar in a summary value; None for tensors of several elements, strings, images and other data."""
    from tensorboard.compat.proto.types_pb2 import DT_BFLOAT16
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = value.tensor
    if tensor.dtype == DT_BFLOAT16:  # numpy, and so TensorBoard without TensorFlow, does not support it
        bits = tensor.tensor_content or b"".join((half & 0xFFFF).to_bytes(2, "little") for half in tensor.half_val)
        return float(struct.unpack("<f", b"\0\0" + bits)[0]) if len(bits) == 2 else None
    try:
        array = make_ndarray(tensor)
    except (TypeError, ValueError):  # a dtype that is not numeric, or an empty tensor
        return None
    return float(array.item()) if array.size == 1 and array.dtype.kind in "fiu" else None
