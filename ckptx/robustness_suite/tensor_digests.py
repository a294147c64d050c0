"""Compute digests of tensors of any size, and count their elements that are NaN or infinity."""

from __future__ import annotations

import struct
from math import isnan

import numpy as np

from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import full_region
from ckptx.storage.files import FilePool
from ckptx.transfer.digest import TreeDigest
from ckptx.transfer.stream import TensorReader, push

_BUFFER_BYTES = 1 << 20
# Dtype -> integer dtype of the same size, mask of the exponent bits; NaN and infinity have all of them set.
_EXPONENT_MASKS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "BF16": ("<u2", 0xFF << 7),
    "F16": ("<u2", 0x1F << 10),
}
# Dtype -> code of `struct`, for the dtypes of step counters and similar scalars, which are shown as their value.
_STRUCT_CODES = {"F32": "f", "F64": "d", "I64": "q", "I32": "i", "BOOL": "?"}


class TensorDigests:
    """Reads the tensors in the files of a pool block by block, and computes their digests."""

    def __init__(self, files: FilePool) -> None:
        self._files, self._reader = files, TensorReader(files)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def read(self, entry: TensorEntry, data: bytes | None = None) -> tuple[str, int | None]:
        """Return the description of a tensor, and the number of its elements that are not finite.

        The description has dtype, shape, and a digest of the bytes. For a single element of dtype F64, F32, I64, I32 or
        BOOL it has the value instead, if the bits can be recovered from it (`_single_element`).

        Args:
            entry: Dtype, shape, and position in the file.
            data: Elements in row-major order; None to read them from the file.

        Returns:
            Description and number; the number is None for dtypes other than F64, F32, BF16 and F16, whose elements are
            not counted.
        """
        sink = _Sink(entry, self._buffer)
        if data is None:
            self._reader.stream(entry, full_region(entry.shape), sink)
        else:
            push(sink, memoryview(data))
        element = self._single_element(entry, data)
        description = sink.describe(entry) if element is None else f"{entry.dtype} {list(entry.shape)} {element}"
        return description, sink.num_nonfinite if entry.dtype.name in _EXPONENT_MASKS else None

    def describe(self, entry: TensorEntry, data: bytes | None = None) -> str:
        """Return the description of a tensor, as `read` does."""
        return self.read(entry, data)[0]

    def _single_element(self, entry: TensorEntry, data: bytes | None) -> str | None:
        """Return the only element of a tensor as a string; None if its bits cannot be recovered from the string.

        The bits of a NaN, and of a boolean byte other than 0 and 1, cannot be recovered. The result is also None for a
        tensor that does not have exactly one element and one chunk, and for a dtype that is not in `_STRUCT_CODES`.
        """
        code = _STRUCT_CODES.get(entry.dtype.name)
        if code is None or entry.numel != 1 or len(entry.chunks) != 1:
            return None
        chunk = entry.chunks[0]
        raw = self._files.read(chunk.file, chunk.offset, entry.nbytes) if data is None else data
        value = struct.unpack(f"<{code}", raw)[0]
        is_recoverable = not isnan(value) and struct.pack(f"<{code}", value) == raw
        return repr(value) if is_recoverable else None


class _Sink:
    """Sink that digests the bytes of a tensor and counts its elements that are not finite."""

    def __init__(self, entry: TensorEntry, buffer: memoryview) -> None:
        self._digest, self._remaining, self._buffer = TreeDigest(), entry.nbytes, buffer
        self._exponent_mask = _EXPONENT_MASKS.get(entry.dtype.name)
        self._partial_element = b""
        self.num_nonfinite = 0

    def space(self, nbytes: int) -> memoryview:
        return self._buffer[: min(nbytes, self._digest.leaf_remaining, len(self._buffer))]

    def commit(self, view: memoryview) -> None:
        self._remaining -= len(view)
        self._digest.update(view, is_last=not self._remaining)
        if self._exponent_mask is not None:
            integer_dtype, exponent = self._exponent_mask
            width = np.dtype(integer_dtype).itemsize
            data = self._partial_element + view if self._partial_element else view
            usable = len(data) // width * width
            bits = np.frombuffer(data[:usable], integer_dtype)
            self.num_nonfinite += int(np.count_nonzero((bits & bits.dtype.type(exponent)) == exponent))
            self._partial_element = bytes(data[usable:])

    def describe(self, entry: TensorEntry) -> str:
        return f"{entry.dtype} {list(entry.shape)} {self._digest.digest().hex()}"
