"""Weights with an adapter added, computed when their bytes are read.

    merged = W + s B A                                LoRA
    merged = m / |W + s B A| * (W + s B A)            DoRA, with the norm of each output row and its magnitude m

The sum is computed in float32; for a float32 weight, and where weight and change nearly cancel, in float64. It is
rounded once to the dtype of the weight, so that the result is within one unit in the last place of the correctly
rounded one. A weight is computed in blocks of rows whose size depends on its shape alone. So its bytes do not depend on
the order of reads, on the layout of the output or on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptx.adapters.adapter import ExpertSlice, LoraLayer
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError
from ckptx.quantization.dequantize import read_region, stored_to_float32
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.cast import round_to_bf16
from ckptx.transfer.stream import TensorReader

_BLOCK_NUMEL = 1 << 18  # elements of a block, at least one row; its float32 values fit into the cache of a core
_REFINED_NUMEL = 1 << 20  # elements of the factors that are gathered at a time
_READER_NBYTES = 16 << 20  # memory limit for strided reads of the adapter, per thread


class AdapterFiles:
    """Open files of one adapter, with a reader for each thread.

    Attributes:
        reader: Reader of the calling thread.
    """

    def __init__(self, files: SourceFiles) -> None:
        """Store the files; they must stay open."""
        self.files = files
        self._local, self._lock = threading.local(), threading.Lock()
        self._expert_rows: tuple[str, Any] = "", None

    def expert_rows(self, entry: TensorEntry, experts: int) -> Any:
        """Return the B of a parameter with the matrices of its experts one after another; kept until the next one.

        Args:
            entry: B, [out, rank * experts]; the expert is the index that changes fastest.
            experts: Number of experts.

        Returns:
            Integers with the bits of the elements, of shape (experts, out, rank).
        """
        with self._lock:
            if self._expert_rows[0] != entry.name:
                data = read_region(self.reader, entry, full_region(entry.shape)).view(f"u{entry.dtype.itemsize}")
                rows = data.reshape(entry.shape[0], -1, experts).transpose(2, 0, 1)
                self._expert_rows = entry.name, np.ascontiguousarray(rows)
            return self._expert_rows[1]

    @property
    def reader(self) -> TensorReader:
        reader: TensorReader | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = TensorReader(self.files, _READER_NBYTES)
        return reader


class ThreadCache(threading.local):
    """Data of the weight that a thread computed last; one weight per thread, so that memory is bounded.

    Attributes:
        owner: Weight that the rest belongs to; None at first.
        block_index: Index of the block; None before the first.
        block: Bytes of the block.
        right: Position of an addition, and the index of its expert or -1 -> its right factor, and the largest norm of
            the columns of this factor.
    """

    def __init__(self) -> None:
        self.owner: object = None
        self.block_index: int | None = None
        self.block = memoryview(b"")
        self.right: dict[tuple[int, int], tuple[Any, float]] = {}

    def start(self, owner: object) -> None:
        """Drop what belongs to another weight."""
        if self.owner is not owner:
            self.owner, self.block_index, self.block, self.right = owner, None, memoryview(b""), {}


class Addition(NamedTuple):
    """One layer of an adapter that is added to a weight.

    Attributes:
        layer: The layer.
        files: Files of its adapter.
        factor: Factor in addition to the scaling of the layer.
        is_transposed: True if the weight is stored as [in, out], the transpose of `B A`; always for an embedding.
    """

    layer: LoraLayer
    files: AdapterFiles
    factor: float
    is_transposed: bool


class _Term(NamedTuple):
    """One product that is added to some rows of a weight.

    Attributes:
        left: [rows, rank].
        right: [rank, columns].
        column_norm: Largest norm of the columns of `right`.
        scaling: Factor of the product.
    """

    left: Any
    right: Any
    column_norm: float
    scaling: Any


class MergedWeight:
    """A weight with the layers of one or more adapters added; see `ComputedFile`.

    Attributes:
        base: Weight of the base.
        nbytes: Size in bytes, that of the weight.
    """

    def __init__(
        self,
        base: TensorEntry,
        additions: Sequence[Addition],
        cache: ThreadCache,
        *,
        adds_biases: bool = False,
        replacement: tuple[TensorEntry, AdapterFiles] | None = None,
    ) -> None:
        """Store weight and layers.

        Args:
            base: Weight of the base, with plain float elements and located chunks.
            additions: Layers to add, at least one. A layer of DoRA is the only one.
            cache: Cache that all weights of a run share.
            adds_biases: True if `base` is the bias of the layers, to which their `bias` is added.
            replacement: Tensor of the adapter to which the layers are added instead of `base`, and its files; None for
                `base` itself.
        """
        self._replacement = replacement
        self.base, self.nbytes = base, base.nbytes
        self._additions, self._adds_biases, self._cache = additions, adds_biases, cache
        # Rows and columns of the matrix, or of each of the matrices of all experts, one after another.
        matrix_dims = 1 if len(base.shape) == 3 and additions[0].layer.expert is not None else 0
        self._rows = prod(base.shape[: matrix_dims + 1])
        self._columns = prod(base.shape[matrix_dims + 1 :])
        self._matrix_rows = base.shape[1] if matrix_dims else self._rows
        self._block_rows = max(1, min(self._matrix_rows, _BLOCK_NUMEL // max(1, self._columns)))
        while matrix_dims and self._matrix_rows % self._block_rows:  # a block belongs to one expert
            self._block_rows -= 1
        self._compute_dtype: Any = np.float64 if base.dtype.name in ("F32", "F64") else np.float32
        self._norm_lock = threading.Lock()
        self._column_factors: Any = None

    @property
    def entry(self) -> TensorEntry:
        """Return the entry of the merged weight, with the name of the weight."""
        return _in_file(self.base, self.file_name)

    @property
    def file_name(self) -> str:
        """Return the name of the computed file."""
        return f"{self.base.name} with adapters"

    def stored_files(self) -> set[str]:
        """Return the names of the files of the base with the weight; empty if the adapter replaces it."""
        return set() if self._replacement is not None else {chunk.file for chunk in self.base.chunks}

    def stored_spans(self, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        """Return the span of the weight in the base for a range; empty if it has several chunks."""
        chunks = self.base.chunks
        if self._replacement is not None or len(chunks) != 1 or chunks[0].strides is not None or chunks[0].is_archive:
            return []
        return [(chunks[0].file, chunks[0].offset + offset, nbytes)]

    def read(self, reader: TensorReader, offset: int, view: memoryview) -> None:
        """Fill `view` with merged bytes, row-major.

        Args:
            reader: Reader of the base.
            offset: First byte.
            view: Bytes to fill; `offset + len(view)` is at most `nbytes`.

        Raises:
            InputError: A file cannot be read, or a merged value is out of range.
        """
        block_nbytes = self.base.dtype.nbytes(self._block_rows * self._columns)
        position, end = offset, offset + len(view)
        while position < end:
            index, skipped = divmod(position, block_nbytes)
            block = self._block(reader, index)
            count = min(len(block) - skipped, end - position)
            view[position - offset : position - offset + count] = block[skipped : skipped + count]
            position += count

    def _block(self, reader: TensorReader, index: int) -> memoryview:
        """Return the bytes of a block of rows; the last one of each thread is kept."""
        self._cache.start(self)
        if self._cache.block_index == index:
            return self._cache.block
        first = index * self._block_rows
        count = min(self._block_rows, self._rows - first)
        with np.errstate(over="ignore", invalid="ignore"):  # `_stored_bytes` refuses the values
            values = self._sum(reader, first, count)
            layer = self._additions[0].layer
            if layer.magnitude is not None and not self._adds_biases:
                if self._additions[0].is_transposed:
                    values *= self._factors_of_columns(reader)
                else:
                    norms = np.linalg.norm(values, axis=1)
                    values *= self._factors(self._magnitude()[first : first + count], norms)[:, None]
        block = _stored_bytes(values, self.base)
        self._cache.block_index, self._cache.block = index, block
        return block

    def _sum(self, reader: TensorReader, first: int, count: int) -> Any:
        """Return rows of the weight with all layers added, of shape (count, columns)."""
        base = self._base_rows(reader, first, count).reshape(count, self._columns)
        if self._adds_biases:
            values = base
            for layer, files, factor, _ in self._additions:
                assert layer.bias is not None
                bias = _read_rows(files.reader, layer.bias, first, count, self._compute_dtype)
                values += (bias * self._compute_dtype(layer.scaling * factor)).reshape(count, 1)
            return values
        terms = [self._term(position, addition, first, count) for position, addition in enumerate(self._additions)]
        values = base
        for term in terms:
            delta = term.left @ term.right
            delta *= term.scaling  # after the product, as PEFT does
            delta += values
            values = delta
        if self._compute_dtype is np.float32:
            self._refine(values, base, terms)
        return values

    def _term(self, position: int, addition: Addition, first: int, count: int) -> _Term:
        right, column_norm = self._right(position, addition, first)
        scaling = self._compute_dtype(addition.layer.scaling * addition.factor)
        return _Term(self._left_rows(addition, first, count), right, column_norm, scaling)

    def _refine(self, values: Any, base: Any, terms: Sequence[_Term]) -> None:
        """Compute in float64 the elements that are so small against their terms that float32 is not exact enough.

        The error of an element in float32 is at most 2 ** -24 of the sum of the magnitudes, for each operation. It has
        to be less than a quarter of a unit in the last place of the dtype of the weight.

        Args:
            values: Sums in float32; changed in place.
            base: The weight without layers.
            terms: Terms that were added to it.
        """
        magnitude = max(float(base.max()), -float(base.min()))
        rank = 0
        for term in terms:
            row_norm = float(np.sqrt(np.einsum("ij,ij->i", term.left, term.left).max()))
            magnitude += abs(float(term.scaling)) * row_norm * term.column_norm
            rank += term.left.shape[1]
        bits = 8 if self.base.dtype.name == "BF16" else 11  # of the significand
        smallest = magnitude * (rank + 3) * 2.0 ** (bits + 2 - 24)
        positions = np.flatnonzero(np.abs(values) < smallest)  # much faster than nonzero on two dims
        step = max(1, _REFINED_NUMEL // max(1, rank))
        for begin in range(0, len(positions), step):
            i, j = np.divmod(positions[begin : begin + step], values.shape[1])
            exact = base[i, j].astype(np.float64)
            for term in terms:
                products = term.left[i].astype(np.float64) * term.right[:, j].T
                exact += float(term.scaling) * products.sum(axis=1)
            values[i, j] = exact

    def _base_rows(self, reader: TensorReader, first: int, count: int) -> Any:
        """Return rows of the weight without layers; those of a replacement are rounded to the dtype of the weight."""
        if self._replacement is None and self._matrix_rows < self._rows:
            matrix, row = divmod(first, self._matrix_rows)
            region = Region((matrix, row, 0), (1, count, self._columns))
            return _to_float(read_region(reader, self.base, region), self.base.dtype, self._compute_dtype)
        if self._replacement is None:
            return _read_rows(reader, self.base, first, count, self._compute_dtype)
        entry, files = self._replacement
        values = _read_rows(files.reader, entry, first, count, np.float64)
        rounded = np.frombuffer(_stored_bytes(values, self.base), np.uint8)
        return _to_float(rounded, self.base.dtype, self._compute_dtype)

    def _left_rows(self, addition: Addition, first: int, count: int) -> Any:
        """Return rows of the left factor, of shape (count, rank): of B, or of the transpose of A."""
        layer, reader = addition.layer, addition.files.reader
        if layer.expert is not None:
            index, row = self._expert_row(layer.expert, first)
            if addition.is_transposed:
                return self._expert_a(addition, index, row, count).T
            return self._expert_b(addition, index, row, count)
        if not addition.is_transposed:
            return _read_rows(reader, layer.b, first, count, self._compute_dtype).reshape(count, layer.rank)
        region = Region((0, first), (layer.rank, count))
        data = read_region(reader, layer.a, region)
        return _to_float(data, layer.a.dtype, self._compute_dtype).reshape(layer.rank, count).T

    def _expert_row(self, expert: ExpertSlice, first: int) -> tuple[int, int]:
        """Return the expert of a row of the stored tensor, and the row in the matrix of the expert."""
        matrix, row = divmod(first, self._matrix_rows)
        return expert.first + matrix, expert.row + row

    def _expert_a(self, addition: Addition, index: int, first: int, count: int) -> Any:
        """Return columns of the A of one expert, of shape (rank, count)."""
        layer = addition.layer
        region = Region((index * layer.rank, first), (layer.rank, count))
        data = read_region(addition.files.reader, layer.a, region)
        return _to_float(data, layer.a.dtype, self._compute_dtype).reshape(layer.rank, count)

    def _expert_b(self, addition: Addition, index: int, first: int, count: int) -> Any:
        """Return rows of the B of one expert, of shape (count, rank)."""
        layer = addition.layer
        assert layer.expert is not None
        rows = addition.files.expert_rows(layer.b, layer.expert.experts)[index, first : first + count]
        return _to_float(
            np.ascontiguousarray(rows).view(np.uint8).reshape(-1), layer.b.dtype, self._compute_dtype
        ).reshape(count, layer.rank)

    def _right(self, position: int, addition: Addition, first: int) -> tuple[Any, float]:
        """Return the right factor, of shape (rank, columns), and the largest norm of its columns; kept by each thread.

        It is A, or the transpose of B.
        """
        cached, layer = self._cache.right, addition.layer
        if layer.expert is not None:
            index, _ = self._expert_row(layer.expert, first)
            if (position, index) not in cached:
                column = layer.expert.column
                right = (
                    np.ascontiguousarray(self._expert_b(addition, index, column, self._columns).T)
                    if addition.is_transposed
                    else self._expert_a(addition, index, column, self._columns)
                )
                for key in [each for each in cached if each[0] == position]:  # of the expert before
                    del cached[key]
                cached[position, index] = right, _largest_column_norm(right)
            return cached[position, index]
        if (position, -1) not in cached:
            entry = layer.b if addition.is_transposed else layer.a
            data = read_region(addition.files.reader, entry, full_region(entry.shape))
            values = _to_float(data, entry.dtype, self._compute_dtype)
            right = (
                np.ascontiguousarray(values.reshape(self._columns, layer.rank).T)
                if addition.is_transposed
                else values.reshape(layer.rank, self._columns)
            )
            cached[position, -1] = right, _largest_column_norm(right)
        return cached[position, -1]

    def _magnitude(self) -> Any:
        """Return the norms that DoRA trained, of shape (out,)."""
        (addition,) = self._additions
        entry = addition.layer.magnitude
        assert entry is not None
        data = read_region(addition.files.reader, entry, full_region(entry.shape))
        return _to_float(data, entry.dtype, self._compute_dtype).reshape(-1)

    def _factors_of_columns(self, reader: TensorReader) -> Any:
        """Return the factor of each column of a transposed weight under DoRA, of shape (columns,).

        The norms of columns need all rows, which are read once more for this.
        """
        with self._norm_lock:
            if self._column_factors is None:
                squares = np.zeros(self._columns, np.float64)
                for first in range(0, self._rows, self._block_rows):
                    values = self._sum(reader, first, min(self._block_rows, self._rows - first))
                    squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)
                norms = np.sqrt(squares).astype(self._compute_dtype)
                self._column_factors = self._factors(self._magnitude(), norms)
            return self._column_factors

    def _factors(self, magnitude: Any, norms: Any) -> Any:
        if not (norms.all() and np.isfinite(norms).all()):
            raise InputError(
                f'tensor "{self.base.name}": a row of weight and adapter together is zero or has a norm that is out of '
                "range, and DoRA divides by its norm; the adapter is damaged, or belongs to another model"
            )
        return magnitude / norms


def _largest_column_norm(values: Any) -> float:
    return float(np.sqrt(np.einsum("ij,ij->j", values, values).max()))


class ReplacedTensor:
    """A tensor of an adapter in place of one of the base; see `ComputedFile`."""

    def __init__(self, base: TensorEntry, entry: TensorEntry, files: AdapterFiles) -> None:
        """Store both tensors.

        Args:
            base: Tensor of the base, of the same shape.
            entry: Tensor of the adapter.
            files: Files of the adapter.
        """
        self.base, self._entry, self._files = base, entry, files
        self.nbytes = base.nbytes

    @property
    def entry(self) -> TensorEntry:
        """Return the entry of the tensor, with name and dtype of the one in the base."""
        return _in_file(self.base, self.file_name)

    @property
    def file_name(self) -> str:
        """Return the name of the computed file."""
        return f"{self.base.name} of an adapter"

    def stored_files(self) -> set[str]:
        """Return an empty set: no file of the base is read."""
        return set()

    def stored_spans(self, offset: int, nbytes: int) -> list[tuple[str, int, int]]:
        """Return an empty list."""
        return []

    def read(self, reader: TensorReader, offset: int, view: memoryview) -> None:
        """Fill `view` with bytes of the tensor in the dtype of the base; see `ComputedFile.read`.

        Raises:
            InputError: A file cannot be read, or a value is out of range.
        """
        columns = prod(self.base.shape[1:])
        row_nbytes = max(1, self.base.dtype.nbytes(columns))
        first, last = offset // row_nbytes, -(-(offset + len(view)) // row_nbytes)
        values = _read_rows(self._files.reader, self._entry, first, last - first, np.float64)
        block = _stored_bytes(values, self.base)
        skipped = offset - first * row_nbytes
        view[:] = block[skipped : skipped + len(view)]


def _read_rows(reader: TensorReader, entry: TensorEntry, first: int, count: int, dtype: Any) -> Any:
    """Return rows of a tensor, indices of its first dim, as floats of shape (number of elements,)."""
    if not entry.shape:
        return _to_float(read_region(reader, entry, full_region(())), entry.dtype, dtype)
    region = Region((first, *(0 for _ in entry.shape[1:])), (count, *entry.shape[1:]))
    return _to_float(read_region(reader, entry, region), entry.dtype, dtype)


def _to_float(data: Any, stored: DType, dtype: Any) -> Any:
    values = data.view("<f8") if stored.name == "F64" else stored_to_float32(data, stored)
    return values.astype(dtype, copy=False)


def _stored_bytes(values: Any, entry: TensorEntry) -> memoryview:
    """Return values rounded to the dtype of a tensor.

    Raises:
        InputError: A value is NaN, infinite, or out of range for the dtype.
    """
    with np.errstate(over="ignore"):
        name = entry.dtype.name
        if name == "BF16":
            result = round_to_bf16(np.ascontiguousarray(values, np.float32))
            is_finite = not result.size or (result & 0x7FFF).max() < 0x7F80
        else:
            result = np.ascontiguousarray(values, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[name])
            is_finite = np.isfinite(result).all()
    if not is_finite:
        raise InputError(
            f'tensor "{entry.name}": weight and adapter together give a value that is NaN or out of range for {name}; '
            "the adapter is damaged, or belongs to another model"
        )
    return memoryview(result.view(np.uint8).reshape(-1))


def _in_file(base: TensorEntry, file_name: str) -> TensorEntry:
    """Return an entry with name, dtype and shape of `base`, whose elements are a whole file, row-major."""
    chunk = Chunk(full_region(base.shape), file_name, 0, base.nbytes)
    return TensorEntry(base.name, base.dtype, base.shape, (chunk,))
