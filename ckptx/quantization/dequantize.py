"""A catalog in which each quantized weight is a tensor of plain floats, decoded when it is read.

The decoded weight is an entry of the catalog whose only chunk is in a computed file; see `computed_files.py`.

    catalog     down_proj.weight      BF16 [7168, 2048]   chunk in "model-5.safetensors:128+9000"
    on disk     down_proj.weight      F8_E4M3             model-5.safetensors, byte 128
                down_proj.weight_scale_inv                model-5.safetensors, byte 9000
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError
from ckptx.quantization import decode
from ckptx.quantization.tensors import QuantizedTensor, QuantizedTensors
from ckptx.transfer.stream import TensorReader


@dataclass(frozen=True, slots=True)
class DecodedTensors:
    """Decoded weights of a checkpoint.

    Attributes:
        catalog: Catalog with the decoded weights in place of codes, and without companions and scales of activations.
        quantized: Quantized weights, in the order of the stored tensors.
        decoder_by_file: Name of the computed file of each decoded weight -> its decoder.
        stored_names: Name of a decoded weight -> stored name of its codes.
    """

    catalog: Catalog
    quantized: QuantizedTensors
    decoder_by_file: Mapping[str, TensorDecoder]
    stored_names: Mapping[str, str]


def decode_catalog(catalog: Catalog, quantized: QuantizedTensors, dtype: DType) -> DecodedTensors:
    """Replace quantized weights in a catalog by decoded ones.

    Args:
        catalog: Catalog of the checkpoint; every chunk of codes and companions is located.
        quantized: Its quantized weights.
        dtype: Dtype of the decoded weights, BF16 or F32.

    Raises:
        InputError: A decoded weight has the name of another tensor.
    """
    removed = quantized.companion_names.keys() | set(quantized.activation_scales)
    tensors: dict[str, TensorEntry] = {}
    decoder_by_file: dict[str, TensorDecoder] = {}
    for name, entry in catalog.tensors.items():
        if name in removed:
            continue
        tensor = quantized.tensors.get(name)
        if tensor is None:
            decoded = entry
        else:
            decoder = TensorDecoder(tensor, dtype)
            decoded = decoder.entry
            decoder_by_file[decoded.chunks[0].file] = decoder
        if decoded.name in tensors or (decoded.name != name and decoded.name in catalog.tensors):
            raise InputError(
                f'{catalog.location}: tensors "{name}" and "{decoded.name}" are two forms of one weight; remove '
                "one of them"
            )
        tensors[decoded.name] = decoded
    stored_names = {tensor.name: name for name, tensor in quantized.tensors.items()}
    return DecodedTensors(replace(catalog, tensors=tensors), quantized, decoder_by_file, stored_names)


class TensorDecoder:
    """Decoder of one quantized weight, as a computed file; see `ComputedFile`.

    Attributes:
        tensor: Quantized weight.
        dtype: Dtype of the decoded weight.
    """

    def __init__(self, tensor: QuantizedTensor, dtype: DType) -> None:
        """Store the tensor.

        Args:
            tensor: Quantized weight.
            dtype: Dtype to decode to, BF16 or F32.
        """
        self.tensor, self.dtype = tensor, dtype
        self._out_dtype: Any = np.uint16 if dtype.name == "BF16" else np.float32
        self._second_scale: float | None = None
        self._is_shape_checked = ".weight_shape" not in tensor.companions

    @property
    def entry(self) -> TensorEntry:
        """Entry of the decoded weight."""
        tensor = self.tensor
        shape = tensor.decoded_shape
        strides = None
        if tensor.scheme.is_transposed:
            *_, columns, rows = shape
            strides = (*_leading_strides(shape[:-2], rows * columns), 1, columns)
        chunk = Chunk(full_region(shape), self._file_name(), 0, self.nbytes, strides)
        return TensorEntry(tensor.name, self.dtype, shape, (chunk,))

    def _file_name(self) -> str:
        """Return a name that is equal for two weights only if they have the same codes and scales."""
        (file, offset), (scale_file, scale_offset) = self.tensor.codes.position, self.tensor.scale.position
        scale_position = f"{scale_offset}" if scale_file == file else f"{scale_file}:{scale_offset}"
        return f"{file}:{offset}+{scale_position}"

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded weight."""
        return self.dtype.nbytes(prod(self.tensor.shape))

    def stored_files(self) -> set[str]:
        """Return the names of the files with the codes and their companions."""
        entries = (self.tensor.codes, *self.tensor.companions.values())
        return {chunk.file for entry in entries for chunk in entry.chunks}

    def stored_spans(self, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        """Return the approximate span of the codes that a range is decoded from; empty if they have several chunks."""
        codes = self.tensor.codes
        first, last = (position * codes.nbytes // max(1, self.nbytes) for position in (offset, offset + nbytes))
        chunks = codes.chunks
        return [(chunks[0].file, chunks[0].offset + first, last - first)] if len(chunks) == 1 else []

    def read(self, reader: TensorReader, offset: int, view: memoryview) -> None:
        """Fill `view` with decoded bytes, row-major in the shape of the codes.

        Args:
            reader: Reader of the checkpoint.
            offset: First byte, within the decoded weight.
            view: Bytes to fill; `offset + len(view)` is at most `nbytes`.

        Raises:
            InputError: A file cannot be read, a scale is infinite or NaN, a divisor is zero, or the stored shape of
                the weight differs from that of the codes.
        """
        *_, rows_per_matrix, columns = self.tensor.shape
        row_nbytes = columns * np.dtype(self._out_dtype).itemsize
        position, end = offset, offset + len(view)
        while position < end:
            row, skipped = divmod(position, row_nbytes)
            matrix, first = divmod(row, rows_per_matrix)
            last_row = -(-end // row_nbytes)
            count = min(last_row - row, rows_per_matrix - first)
            nbytes = min(count * row_nbytes - skipped, end - position)
            part = view[position - offset : position - offset + nbytes]
            if not skipped and nbytes == count * row_nbytes:
                self._decode_rows(reader, matrix, first, np.frombuffer(part, self._out_dtype).reshape(count, columns))
            else:
                out = np.empty((count, columns), self._out_dtype)
                self._decode_rows(reader, matrix, first, out)
                part[:] = out.view(np.uint8).data.cast("B")[skipped : skipped + nbytes]
            position += nbytes

    def _decode_rows(self, reader: TensorReader, matrix: int, first: int, out: Any) -> None:
        """Decode rows of one matrix.

        Args:
            reader: Reader of the checkpoint.
            matrix: Index of the matrix in the flattened dims before the last two.
            first: First row.
            out: Receives the decoded rows, of shape (rows, columns of the weight).
        """
        tensor, scheme = self.tensor, self.tensor.scheme
        count, columns = out.shape
        leading_sizes = tensor.shape[:-2]
        leading_index = unravel_index(matrix, leading_sizes)
        if scheme.code_format == "e4m3":
            codes = self._read_rows(reader, tensor.codes, leading_index, first, count).reshape(count, columns)
            self._decode_blocks(reader, leading_index, first, codes, decode.e4m3_values(), out)
        elif scheme.code_format == "e2m1":
            packed = self._read_rows(reader, tensor.codes, leading_index, first, count).reshape(count, columns // 2)
            scales = self._read_rows(reader, tensor.scale, leading_index, first, count).reshape(count, -1)
            self._refuse_nonfinite_scales(scales)
            second_scale = self._read_second_scale(reader) if scheme.second_scale_suffix else None
            table = decode.pair_table(
                second_scale, is_divisor=scheme.is_second_scale_divisor, to_bf16=self._out_dtype == np.uint16
            )
            decode.decode_pairs(packed, scales, table, tensor.block[1], out)
        else:
            self._check_stored_shape(reader)
            bits = int(scheme.code_format[3:])
            packed = self._read_rows(reader, tensor.codes, leading_index, first, count).reshape(count, -1)
            codes = decode.unpack_nibbles(packed, columns) if bits == 4 else packed[:, :columns]
            values = np.arange(1 << bits, dtype=np.float32)
            zero_point = tensor.companions.get(".weight_zero_point")
            if zero_point is None:
                self._decode_blocks(reader, leading_index, first, codes, values - (1 << (bits - 1)), out)
            else:
                self._decode_with_zero_points(reader, first, codes, zero_point, out)

    def _decode_blocks(
        self, reader: TensorReader, leading_index: tuple[int, ...], first: int, codes: Any, values: Any, out: Any
    ) -> None:
        """Decode rows without zero points; `values` has the value of each code."""
        *_, rows, width = self.tensor.shape
        block_rows, block_columns = self.tensor.block
        end = first + len(codes)
        first_block, last_block = first // block_rows, -(-end // block_rows)
        scales = self._read_scales(reader, leading_index, first_block, last_block - first_block)
        if len(scales) == 1:  # of the only block row, or of every row
            block_rows = rows
        if len(values) == 256 and decode.uses_tables(self.tensor.block, rows, width):
            decode.decode_by_tables(codes, scales, values, (block_rows, block_columns), first, out)
            return
        position = first
        while position < end:
            block_row = position // block_rows
            stop = min(end, (block_row + 1) * block_rows) if block_rows > 1 else end
            part_scales = scales[block_row - first_block][None] if block_rows > 1 and len(scales) > 1 else scales
            decode.decode_by_products(
                codes[position - first : stop - first],
                part_scales,
                values,
                block_columns,
                out[position - first : stop - first],
            )
            position = stop

    def _decode_with_zero_points(
        self, reader: TensorReader, first: int, codes: Any, zero_point: TensorEntry, out: Any
    ) -> None:
        """Decode rows of integer codes with a zero point for each group; zero points are packed along the rows."""
        bits = int(self.tensor.scheme.code_format[3:])
        per_word = 32 // bits
        first_word, last_word = first // per_word, -(-(first + len(codes)) // per_word)
        words = self._read_rows(reader, zero_point, (), first_word, last_word - first_word)
        words = words.view("<u4").reshape(last_word - first_word, -1)
        shifts = (np.arange(per_word, dtype=np.uint32) * bits)[None, :, None]
        zeros = ((words[:, None, :] >> shifts) & ((1 << bits) - 1)).reshape(-1, words.shape[1])
        zeros = zeros[first - first_word * per_word :][: len(codes)].astype(np.float32)
        scales = self._read_scales(reader, (), first, len(codes))
        groups = np.arange(codes.shape[1]) // self.tensor.block[1]
        with np.errstate(over="ignore"):
            products = (codes.astype(np.float32) - zeros[:, groups]) * scales[:, groups]
        out[:] = decode.round_products(products, to_bf16=self._out_dtype == np.uint16)

    def _read_scales(self, reader: TensorReader, leading_index: tuple[int, ...], first: int, count: int) -> Any:
        """Return rows of scales as float32, of shape (count, blocks per row).

        If all rows of the matrix share their scales, the result has one row.

        Args:
            reader: Reader of the checkpoint.
            leading_index: Index of the matrix in each dim before the last two.
            first: First row of the scales.
            count: Number of rows of the scales.

        Raises:
            InputError: A scale is infinite or NaN.
        """
        scale = self.tensor.scale
        if len(scale.shape) < 2:
            data = self._read_all(reader, scale)
            rows = 1
            if self.tensor.granularity == "row":
                rows = min(count, scale.numel)
                itemsize = scale.dtype.itemsize
                data = data[first * itemsize : (first + rows) * itemsize]
        else:
            own_leading_index = leading_index[-(len(scale.shape) - 2) :] if len(scale.shape) > 2 else ()
            rows = min(count, scale.shape[-2])
            data = self._read_rows(reader, scale, own_leading_index, first if scale.shape[-2] > 1 else 0, rows)
        scales = stored_to_float32(data, scale.dtype).reshape(rows, -1)
        self._refuse_nonfinite_scales(scales)
        return scales

    def _check_stored_shape(self, reader: TensorReader) -> None:
        """Refuse a stored shape that differs from that of the codes."""
        if self._is_shape_checked:
            return
        entry = self.tensor.companions[".weight_shape"]
        sizes = self._read_all(reader, entry).view("<i8" if entry.dtype.name == "I64" else "<i4").tolist()
        if sizes != list(self.tensor.shape):
            raise InputError(
                f'tensor "{entry.name}": holds the shape {sizes}, but "{self.tensor.codes.name}" has codes for '
                f"{list(self.tensor.shape)}; ckptx decodes rows that fill their 32-bit words, restore the file "
                "from a copy"
            )
        self._is_shape_checked = True

    def _read_second_scale(self, reader: TensorReader) -> float:
        if self._second_scale is None:
            entry = self.tensor.companions[self.tensor.scheme.second_scale_suffix]
            value = float(stored_to_float32(self._read_all(reader, entry), entry.dtype)[0])
            if not np.isfinite(value):
                raise _scale_error(entry, f"{value}", "a finite number")
            if self.tensor.scheme.is_second_scale_divisor and not value:
                raise _scale_error(entry, f"{value}", "a divisor other than 0")
            self._second_scale = value
        return self._second_scale

    def _refuse_nonfinite_scales(self, scales: Any) -> None:
        """Refuse scales that are infinite or NaN.

        Args:
            scales: float32; or uint8, the stored bytes of scales in e4m3 or e8m0.
        """
        is_e4m3 = self.tensor.scale.dtype.name == "F8_E4M3"
        if scales.dtype != np.uint8:
            is_invalid = ~np.isfinite(scales)
        elif is_e4m3:
            is_invalid = (scales & 127) == 127
        else:
            is_invalid = scales == 255
        if not is_invalid.any():
            return
        value = scales[is_invalid][0]
        if scales.dtype != np.uint8:
            found = f"{value}"
        else:
            found = f"nan (e4m3 code {value})" if is_e4m3 else f"nan (exponent {value})"
        raise _scale_error(self.tensor.scale, found, "a finite number")

    def _read_rows(
        self, reader: TensorReader, entry: TensorEntry, leading_index: tuple[int, ...], first: int, count: int
    ) -> Any:
        """Return the bytes of rows of one matrix of a stored tensor, as uint8.

        Args:
            reader: Reader of the checkpoint.
            entry: Stored tensor.
            leading_index: Index of the matrix in each dim before its rows.
            first: First row.
            count: Number of rows.
        """
        trailing = entry.shape[len(leading_index) + 1 :]
        row = 0
        for index, size in zip((*leading_index, first), entry.shape, strict=False):
            row = row * size + index
        row_nbytes = entry.dtype.nbytes(prod(trailing))
        array = np.empty(count * row_nbytes, np.uint8)
        if reader.read_range(entry, row * row_nbytes, array.data):
            return array
        region = Region(
            (*leading_index, first, *(0 for _ in trailing)), (*(1 for _ in leading_index), count, *trailing)
        )
        return read_region(reader, entry, region)

    def _read_all(self, reader: TensorReader, entry: TensorEntry) -> Any:
        array = np.empty(entry.nbytes, np.uint8)
        if reader.read_range(entry, 0, array.data):
            return array
        return read_region(reader, entry, full_region(entry.shape))


def _scale_error(entry: TensorEntry, found: str, required: str) -> InputError:
    return InputError(
        f'tensor "{entry.name}": holds the scale {found}, but {required} is required; the file is damaged, restore it '
        "from a copy"
    )


def read_region(reader: TensorReader, entry: TensorEntry, region: Region) -> Any:
    """Return the stored bytes of a region of a tensor, row-major, as uint8 of shape (number of bytes,).

    Raises:
        InputError: The file cannot be read, or ends too early.
    """
    sink = _ArraySink(entry.dtype.nbytes(region.numel))
    reader.stream(entry, region, sink)
    return sink.array


class _ArraySink:
    """Sink that fills one array of bytes."""

    def __init__(self, nbytes: int) -> None:
        self.array: Any = np.empty(nbytes, np.uint8)
        self._view, self._filled = self.array.data, 0

    def space(self, nbytes: int) -> memoryview:
        return self._view[self._filled : self._filled + nbytes]

    def commit(self, view: memoryview) -> None:
        self._filled += len(view)


def stored_to_float32(data: Any, dtype: DType) -> Any:
    """Return stored numbers as float32.

    Args:
        data: Stored bytes, uint8.
        dtype: F32, BF16, F16 or F8_E4M3; any other dtype of one byte (F8_E8M0, U8) is taken as exponents of two.
    """
    if dtype.name == "F32":
        return data.view("<f4")
    if dtype.name == "BF16":
        return decode.bf16_values(data.view("<u2"))
    if dtype.name == "F16":
        return data.view("<f2").astype(np.float32)
    return (decode.e4m3_values() if dtype.name == "F8_E4M3" else decode.exponent_values())[data]


def _leading_strides(sizes: tuple[int, ...], inner: int) -> tuple[int, ...]:
    strides = []
    for size in reversed(sizes):
        strides.append(inner)
        inner *= size
    return tuple(reversed(strides))


def unravel_index(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index in each dim of these sizes for a flattened index, as `np.unravel_index`."""
    indices = []
    for size in reversed(sizes):
        index, rest = divmod(index, size)
        indices.append(rest)
    return tuple(reversed(indices))
