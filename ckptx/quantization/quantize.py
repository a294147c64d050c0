"""Float weights that are quantized in the scheme of a base when their bytes are read.

The base is the quantized checkpoint that training started from (`--quantize base`). A weight that, rounded to bfloat16,
equals the decoded weight of the base gets the codes and scales of the base: encoding would give the same values, but
not always the same scales. Each other weight is encoded as `encode.py` describes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ckptx.catalog.dtype import DTYPES_BY_NAME, DType
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.rewrite import transpose
from ckptx.quantization import encode
from ckptx.quantization.dequantize import TensorDecoder, read_region, stored_to_float32, unravel_index
from ckptx.quantization.schemes import EXPONENT_SCALES
from ckptx.quantization.tensors import QuantizedTensor
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.cast import round_to_bf16
from ckptx.transfer.stream import TensorReader

_BATCH_NBYTES = 4 << 20  # bytes of float32 values that are encoded at a time
_READER_NBYTES = 16 << 20  # memory limit for strided reads of the base, per thread


@dataclass(frozen=True, slots=True)
class _Analysis:
    """Result of the comparison of a weight with the base.

    Attributes:
        is_unchanged: True if the weight, rounded to bfloat16, equals the decoded weight of the base.
        amax: Largest magnitude of the weight; 0 if the scheme has no scale for the whole weight.
    """

    is_unchanged: bool
    amax: float


class _ThreadState(threading.local):
    """Reader of the base for one thread, and the batch of rows that the thread encoded last.

    Attributes:
        reader: Reader of the base.
        batch_key: Encoder, matrix and index of the batch, see `WeightEncoder.encode_batch`; None before the first.
        batch: Encoded rows of codes and companions, by suffix.
    """

    def __init__(self, files: SourceFiles) -> None:
        self.reader = TensorReader(files, _READER_NBYTES)
        self.batch_key: object = None
        self.batch: Mapping[str, Any] = {}


class BaseContents:
    """Contents of the base, for the encoders of all weights.

    Attributes:
        thread: State of the calling thread; each thread sees its own.
        bytes_read: Number of bytes that were read from the base.
    """

    def __init__(self, files: SourceFiles) -> None:
        """Store the files.

        Args:
            files: Files of the base; they must stay open.
        """
        self.thread = _ThreadState(files)
        self._files, self._lock = files, threading.Lock()
        self.bytes_read = 0

    def decode(self, decoder: TensorDecoder, offset: int, view: memoryview) -> None:
        """Fill `view` with bytes of a decoded weight, from byte `offset` on.

        Raises:
            InputError: See `TensorDecoder.read`.
        """
        reader = self.thread.reader
        before = reader.bytes_read
        decoder.read(reader, offset, view)
        self._count(reader.bytes_read - before)

    def copy(self, entry: TensorEntry, offset: int, view: memoryview) -> None:
        """Fill `view` with row-major bytes of a stored tensor, from byte `offset` on.

        Raises:
            InputError: The file cannot be read, or ends too early.
        """
        if len(entry.chunks) == 1 and entry.chunks[0].strides is None:
            chunk = entry.chunks[0]
            view[:] = self._files.read(chunk.file, chunk.offset + offset, len(view))
            self._count(len(view))
        else:
            reader = self.thread.reader
            before = reader.bytes_read
            data = read_region(reader, entry, full_region(entry.shape))
            view[:] = data[offset : offset + len(view)].data
            self._count(reader.bytes_read - before)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes


class WeightEncoder:
    """Encoder of one weight, for its codes and for each of its companions.

    Attributes:
        base: The same weight in the base.
        analysis: Result of the comparison with the base; None before the weight is read.
    """

    def __init__(
        self, source: TensorEntry, base: QuantizedTensor, contents: BaseContents, *, has_power_of_two_scales: bool
    ) -> None:
        """Check that the weight can be encoded.

        Args:
            source: Weight in floating point, in the shape of the decoded weight of the base.
            base: The same weight in the base.
            contents: Contents of the base.
            has_power_of_two_scales: True if the float scales of the base are powers of two.

        Raises:
            InputError: The shapes differ.
            UnsupportedError: The dtype is not a plain float, or the base has a scale for each column or each matrix.
        """
        self.base = base
        if source.shape != base.decoded_shape:
            raise InputError(
                f'tensor "{source.name}": has shape {list(source.shape)}, but {list(base.decoded_shape)} in the base; '
                "pass the base that the model was trained from"
            )
        if not source.dtype.is_castable:
            raise UnsupportedError(
                f'tensor "{source.name}": is {source.dtype}, and --quantize requires floating-point weights; leave out '
                "--quantize"
            )
        if base.granularity in ("column", "matrix"):
            raise UnsupportedError(
                f'tensor "{source.name}": has {base.description} in the base, but ckptx encodes weights with a scale '
                "for each block, row, group or tensor; leave out --quantize"
            )
        dims = len(source.shape)
        self._source = transpose(source, dims - 2, dims - 1) if base.scheme.is_transposed else source
        self._contents = contents
        self._has_power_of_two_scales = has_power_of_two_scales or base.scale.dtype.name in EXPONENT_SCALES
        self._lock = threading.Lock()
        self.analysis: _Analysis | None = None

    @property
    def min_bytes_to_read(self) -> int:
        """Lower bound of the bytes that are read: the weight, and the base that it is compared with."""
        return self._source.nbytes + self.base.nbytes

    @property
    def source_dtype(self) -> DType:
        """Dtype of the weight in the source."""
        return self._source.dtype

    def computed_files(self) -> list[EncodedTensorFile]:
        """Return a computed file for the codes and for each companion."""
        return [EncodedTensorFile(self, entry) for entry in (self.base.codes, *self.base.companions.values())]

    def stored_files(self) -> set[str]:
        """Return the names of the source files with the weight."""
        return {chunk.file for chunk in self._source.chunks}

    def analyze(self, reader: TensorReader) -> _Analysis:
        """Compare the weight with that of the base on the first call, and return the result.

        Raises:
            InputError: The weight or the base cannot be read.
        """
        with self._lock:
            if self.analysis is None:
                self.analysis = self._compare_with_base(reader)
            return self.analysis

    def _compare_with_base(self, reader: TensorReader) -> _Analysis:
        if not prod(self.base.shape):
            return _Analysis(True, 0)
        decoder = TensorDecoder(self.base, DTYPES_BY_NAME["BF16"])
        needs_amax = bool(self.base.scheme.second_scale_suffix) or self.base.granularity == "tensor"
        *leading_sizes, rows, columns = self.base.shape
        batch_rows, amax, is_unchanged = self._batch_rows(), 0.0, True
        for matrix in range(prod(leading_sizes)):
            for first in range(0, rows, batch_rows):
                count = min(batch_rows, rows - first)
                values = self._read_values(reader, matrix, first, count)
                if is_unchanged:
                    decoded = np.empty((count, columns), np.uint16)
                    offset = (matrix * rows + first) * columns * 2
                    self._contents.decode(decoder, offset, decoded.view(np.uint8).data.cast("B"))
                    is_unchanged = bool((round_to_bf16(values) == decoded).all())
                if needs_amax:
                    amax = max(amax, float(np.abs(values).max(initial=0)))
                elif not is_unchanged:
                    return _Analysis(False, 0)
        return _Analysis(is_unchanged, amax)

    def _batch_rows(self) -> int:
        """Return the number of rows that are encoded together.

        It is a multiple of the rows of a block and, with zero points, of the rows whose zero points share an int32; or
        all rows of a matrix.
        """
        rows, columns = self.base.shape[-2:]
        block_rows = 1 if self.base.granularity == "tensor" else self.base.block[0]
        if ".weight_zero_point" in self.base.companions:
            block_rows = self._codes_per_word
        return min(rows, max(1, _BATCH_NBYTES // (4 * columns * block_rows)) * block_rows)

    @property
    def _codes_per_word(self) -> int:
        """Number of integer codes, or of zero points, in an int32."""
        return 32 // int(self.base.scheme.code_format[3:])  # "int4" or "int8"

    def _read_values(self, reader: TensorReader, matrix: int, first: int, count: int) -> Any:
        """Return `count` rows of one matrix, from row `first` on, as float32 of shape (count, columns).

        `matrix` is an index in the flattened dims before the last two.
        """
        *leading_sizes, _, columns = self.base.shape
        offsets = (*unravel_index(matrix, tuple(leading_sizes)), first, 0)
        region = Region(offsets, (*(1 for _ in leading_sizes), count, columns))
        data = read_region(reader, self._source, region)
        if self._source.dtype.name == "F64":
            return data.view("<f8").astype(np.float32).reshape(count, columns)
        return stored_to_float32(data, self._source.dtype).reshape(count, columns)

    def encode_batch(self, reader: TensorReader, matrix: int, index: int) -> Mapping[str, Any]:
        """Return the stored rows of codes and companions for one batch of rows, by suffix.

        The batch that a thread encoded last is kept, because several parts of one batch are often read in a row.

        Args:
            reader: Reader of the weight.
            matrix: Index of the matrix in the flattened dims before the last two.
            index: Index of the batch in the matrix.

        Raises:
            InputError: The weight cannot be read, holds infinity or NaN, or needs a scale beyond the range of its
                dtype.
        """
        key, thread = (self, matrix, index), self._contents.thread
        if thread.batch_key == key:
            return thread.batch
        batch_rows, rows = self._batch_rows(), self.base.shape[-2]
        first = index * batch_rows
        values = self._read_values(reader, matrix, first, min(batch_rows, rows - first))
        if not np.isfinite(values).all():
            raise InputError(
                f'tensor "{self._source.name}": holds infinity or NaN, which {self.base.scheme.name} does not '
                "represent; leave out --quantize to write it in floating point"
            )
        batch = self._encode(values)
        thread.batch_key, thread.batch = key, batch
        return batch

    def _encode(self, values: Any) -> dict[str, Any]:
        """Return rows of codes and companions by suffix, each as an array whose bytes are those to store.

        Args:
            values: Rows of one batch, float32 of shape (rows, columns).
        """
        base, scheme = self.base, self.base.scheme
        rows, columns = base.block
        shape = values.shape
        assert self.analysis is not None
        with np.errstate(over="ignore", under="ignore"):
            if scheme.code_format == "e4m3":
                is_per_tensor = base.granularity == "tensor"
                maxima = (
                    np.full((1, 1), self.analysis.amax, np.float32)
                    if is_per_tensor
                    else encode.block_maxima(values, rows, columns)
                )
                scales = encode.fp8_scales(maxima, is_power_of_two=self._has_power_of_two_scales)
                stored = self._scales_to_stored(scales)
                element_scales = encode.expand_blocks(
                    stored_to_float32(_to_byte_array(stored).reshape(-1), base.scale.dtype).reshape(scales.shape),
                    shape,
                    shape[0] if is_per_tensor else rows,
                    columns,
                )
                return {scheme.codes_suffix: encode.encode_e4m3(values / element_scales), scheme.scale_suffix: stored}
            if scheme.code_format == "e2m1":
                maxima = encode.block_maxima(values, 1, columns)
                if scheme.second_scale_suffix:
                    stored, scales = self._encode_nvfp4_scales(maxima)
                else:
                    stored = encode.mxfp4_exponents(maxima)
                    scales = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
                codes = encode.encode_e2m1(values / encode.expand_blocks(scales, shape, 1, columns))
                return {scheme.codes_suffix: encode.pack_nibbles(codes), scheme.scale_suffix: stored}
            return self._encode_integers(values)

    def _encode_nvfp4_scales(self, maxima: Any) -> tuple[Any, Any]:
        """Return the stored scales of groups (e4m3 codes), and the float32 scales that values are divided by.

        The latter also contain the scale of the whole weight, as a factor or divisor.

        Args:
            maxima: Largest magnitude of each group, float32.
        """
        second_scale = np.float32(self.second_scale())
        if self.base.scheme.is_second_scale_divisor:
            stored = encode.nvfp4_scales(maxima * second_scale)
            return stored, encode.e4m3_to_float(stored) / second_scale
        stored = encode.nvfp4_scales(maxima / second_scale)
        return stored, encode.e4m3_to_float(stored) * second_scale

    def second_scale(self) -> float:
        """Return the scale of the whole nvfp4 weight, rounded to the dtype in which it is stored."""
        dtype = self.base.companions[self.base.scheme.second_scale_suffix].dtype
        return float(stored_to_float32(self._stored_second_scale(), dtype)[0])

    def _stored_second_scale(self) -> Any:
        """Return the stored bytes of the scale of the whole nvfp4 weight, as uint8."""
        assert self.analysis is not None
        is_divisor = self.base.scheme.is_second_scale_divisor
        scale = encode.nvfp4_second_scale(self.analysis.amax, is_divisor=is_divisor)
        dtype = self.base.companions[self.base.scheme.second_scale_suffix].dtype
        return _to_byte_array(
            self._check_scales(encode.floats_to_stored(np.array([scale], np.float32), dtype.name), dtype)
        )

    def _encode_integers(self, values: Any) -> dict[str, Any]:
        """Return rows of packed integer codes, of scales, and of zero points if the base has these; see `_encode`."""
        base, scheme = self.base, self.base.scheme
        bits, columns = int(scheme.code_format[3:]), base.block[1]
        zero_points: dict[str, Any] = {}
        if ".weight_zero_point" in base.companions:
            edges = np.arange(0, values.shape[1], columns)
            low = np.minimum(np.minimum.reduceat(values, edges, axis=1), 0)
            high = np.maximum(np.maximum.reduceat(values, edges, axis=1), 0)
            largest = (1 << bits) - 1
            scales = np.where(high > low, (high - low) / np.float32(largest), np.float32(1))
            # Rounded up, so that the codes reach from the lowest to the highest value.
            stored = self._scales_to_stored(scales, rounds_up=True)
            scales = stored_to_float32(_to_byte_array(stored).reshape(-1), base.scale.dtype).reshape(scales.shape)
            zeros = np.clip(np.rint(-low / scales), 0, largest).astype(np.float32)
            element_scales = encode.expand_blocks(scales, values.shape, 1, columns)
            element_zeros = encode.expand_blocks(zeros, values.shape, 1, columns)
            codes = np.clip(np.rint(values / element_scales) + element_zeros, 0, largest).astype(np.uint8)
            zero_points[".weight_zero_point"] = _pack_words(zeros.astype(np.uint32).T, bits).T
        else:
            scales = encode.integer_scales(encode.block_maxima(values, 1, columns), bits)
            stored = self._scales_to_stored(scales)
            scales = stored_to_float32(_to_byte_array(stored).reshape(-1), base.scale.dtype).reshape(scales.shape)
            codes = encode.encode_integers(values, encode.expand_blocks(scales, values.shape, 1, columns), bits)
        return zero_points | {scheme.scale_suffix: stored, scheme.codes_suffix: _pack_words(codes, bits)}

    def _scales_to_stored(self, scales: Any, *, rounds_up: bool = False) -> Any:
        """Return scales, given as float32, as an array whose bytes are those to store in the dtype of the base.

        `rounds_up` has no effect on exponents, which are always rounded up.
        """
        name = self.base.scale.dtype.name
        if name in EXPONENT_SCALES:
            return (encode.power_of_two_exponents(scales) + 127).astype(np.uint8)
        return self._check_scales(encode.floats_to_stored(scales, name, rounds_up=rounds_up), self.base.scale.dtype)

    def _check_scales(self, stored: Any, dtype: DType) -> Any:
        """Return stored scales; refuse those beyond the range of their dtype, which only F16 can exceed."""
        if dtype.name == "F16" and not np.isfinite(stored).all():
            raise InputError(
                f'tensor "{self._source.name}": has values whose scales are beyond the range of {dtype.name}, the '
                "dtype of the scales in the base; leave out --quantize to write it in floating point"
            )
        return stored

    def read(self, entry: TensorEntry, reader: TensorReader, offset: int, view: memoryview) -> None:
        """Fill `view` with bytes of the codes or of a companion.

        Args:
            entry: Entry of the codes or of a companion in the base.
            reader: Reader of the weight.
            offset: First byte, within the entry.
            view: Bytes to fill.

        Raises:
            InputError: The base or the weight cannot be read, or see `encode_batch`.
        """
        suffix = next(
            (key for key, each in self.base.companions.items() if each is entry), self.base.scheme.codes_suffix
        )
        if self.analyze(reader).is_unchanged or suffix == ".weight_shape":
            self._contents.copy(entry, offset, view)
        elif suffix == self.base.scheme.second_scale_suffix and suffix:
            view[:] = self._stored_second_scale().tobytes()[offset : offset + len(view)]
        elif entry.numel == 1:  # the only scale, equal in all batches
            view[:] = _to_byte_array(self.encode_batch(reader, 0, 0)[suffix]).tobytes()[offset : offset + len(view)]
        else:
            self._copy_rows(entry, suffix, reader, offset, view)

    def _copy_rows(self, entry: TensorEntry, suffix: str, reader: TensorReader, offset: int, view: memoryview) -> None:
        """Fill `view` with bytes of codes or of a companion from encoded batches; for the arguments see `read`."""
        *leading_sizes, rows, _ = self.base.shape
        matrices, batch_rows = prod(leading_sizes), self._batch_rows()
        matrix_nbytes = entry.nbytes // matrices
        batches = -(-rows // batch_rows)
        position, end = offset, offset + len(view)
        while position < end:
            matrix, matrix_offset = divmod(position, matrix_nbytes)
            # All batches of a matrix have the same number of bytes, except the last one.
            batch_nbytes = self._batch_nbytes(entry, suffix, batch_rows)
            index = min(matrix_offset // batch_nbytes, batches - 1)
            data = _to_byte_array(self.encode_batch(reader, matrix, index)[suffix]).reshape(-1)
            first = matrix_offset - index * batch_nbytes
            count = min(len(data) - first, end - position)
            view[position - offset : position - offset + count] = data[first : first + count].data
            position += count

    def _batch_nbytes(self, entry: TensorEntry, suffix: str, batch_rows: int) -> int:
        """Return the stored bytes of codes or a companion for a whole batch of `batch_rows` rows of the weight."""
        *leading_sizes, rows, _ = self.base.shape
        if suffix == self.base.scheme.codes_suffix:
            rows_per_stored_row = 1
        elif suffix == ".weight_zero_point":
            rows_per_stored_row = self._codes_per_word
        else:
            rows_per_stored_row = self.base.block[0]
        stored_rows = -(-rows // rows_per_stored_row)
        return entry.nbytes // prod(leading_sizes) // stored_rows * -(-batch_rows // rows_per_stored_row)


@dataclass(frozen=True, slots=True)
class EncodedTensorFile:
    """Codes or companion of an encoded weight as a computed file; see `ComputedFile`.

    Attributes:
        encoder: Encoder of the weight.
        entry: The same tensor in the base.
    """

    encoder: WeightEncoder
    entry: TensorEntry

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    def read(self, reader: TensorReader, offset: int, view: memoryview) -> None:
        self.encoder.read(self.entry, reader, offset, view)

    def stored_files(self) -> set[str]:
        return self.encoder.stored_files()

    def stored_spans(self, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        return []


@dataclass(frozen=True, slots=True)
class BaseTensorFile:
    """Tensor of the base, copied unchanged, as a computed file; see `ComputedFile`.

    Attributes:
        entry: Tensor in the base.
        contents: Contents of the base.
    """

    entry: TensorEntry
    contents: BaseContents

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    def read(self, reader: TensorReader, offset: int, view: memoryview) -> None:
        self.contents.copy(self.entry, offset, view)

    def stored_files(self) -> set[str]:
        return set()

    def stored_spans(self, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        return []


def computed_entry(entry: TensorEntry) -> TensorEntry:
    """Return an entry with name, dtype and shape of one of the base, whose bytes are in a computed file of its own."""
    region = full_region(entry.shape)
    return TensorEntry(
        entry.name, entry.dtype, entry.shape, (Chunk(region, computed_file_name(entry), 0, entry.nbytes),)
    )


def computed_file_name(entry: TensorEntry) -> str:
    """Return the name of the computed file of `computed_entry`."""
    return f"quantized {entry.name}"


def _pack_words(codes: Any, bits: int) -> Any:
    """Return integer codes packed in int32 words along the columns, the first code in the lowest bits.

    Args:
        codes: Unsigned codes of shape (rows, columns); the last word of a row is filled with zeros.
        bits: 4 or 8.
    """
    per_word = 32 // bits
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), np.uint32)
    padded[:, :columns] = codes
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    return np.bitwise_or.reduce(padded.reshape(rows, -1, per_word) << shifts, axis=2).astype("<u4")


def _to_byte_array(values: Any) -> Any:
    """Return the bytes of an array, row-major, as uint8; the last dim is multiplied by the itemsize."""
    return np.ascontiguousarray(values).view(np.uint8)


def unchanged_count_and_encoded_names(encoders: Mapping[str, WeightEncoder]) -> tuple[int, list[str]]:
    """Return the number of weights that equal the base, and the names of those that were encoded.

    A weight of which nothing was read yet is in neither.
    """
    analyses = {name: encoder.analysis for name, encoder in encoders.items() if encoder.analysis is not None}
    encoded = [name for name, analysis in analyses.items() if not analysis.is_unchanged]
    return len(analyses) - len(encoded), encoded
