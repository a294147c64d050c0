"""Write tensors in arbitrary chunks, and read catalog entries as tensors."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ckptx.catalog.dtype import DTYPES_BY_NAME, DTYPES_BY_TORCH_NAME
from ckptx.catalog.entry import Chunk, Record, TensorEntry
from ckptx.catalog.region import Region, find_coverage_fault, full_region
from ckptx.storage.files import FilePool
from ckptx.transfer.stream import TensorReader

# Storage of a tensor: number of chunks along each dimension, and the order of dimensions in a chunk.
LAYOUTS: dict[str, tuple[tuple[int, ...], bool]] = {
    "whole": ((1, 1, 1), False),
    "rows": ((3, 1, 1), False),
    "columns": ((1, 2, 1), False),
    "grid": ((2, 2, 2), False),
    "transposed": ((2, 1, 1), True),
}


class Collect:
    """A sink that keeps all bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._room = bytearray(1 << 16)

    def space(self, nbytes: int) -> memoryview:
        return memoryview(self._room)[:nbytes]

    def commit(self, view: memoryview) -> None:
        self.data += view


def store(root: Path, name: str, tensor: torch.Tensor, layout: str = "whole") -> TensorEntry:
    """Write a tensor to a separate file, each chunk with its CRC."""
    cuts, backwards = LAYOUTS[layout]
    spans = []
    for size, pieces in zip(tensor.shape, cuts, strict=False):
        step = -(-size // pieces)
        spans.append([(at, min(step, size - at)) for at in range(0, size, step)])
    body, chunks = bytearray(b"#" * 5), []
    for cell in itertools.product(*spans):
        region = Region(tuple(at for at, _ in cell), tuple(size for _, size in cell))
        piece = tensor[tuple(slice(at, at + size) for at, size in cell)]
        order = list(reversed(range(piece.ndim))) if backwards else list(range(piece.ndim))
        laid = piece.permute(order).contiguous()
        strides = tuple(laid.stride()[order.index(dim)] for dim in range(piece.ndim)) if backwards else None
        data = laid.view(torch.uint8).numpy().tobytes() if laid.ndim else bytes(laid.view(1).view(torch.uint8).tolist())
        record = Record(len(body), len(data), zlib.crc32(data))
        chunks.append(Chunk(region, f"{name}.bin", len(body), len(data), strides, record))
        body += data + b"#" * 3
    (root / f"{name}.bin").write_bytes(body)
    return TensorEntry(
        name, DTYPES_BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), tuple(chunks)
    )


def read(root: Path, entry: TensorEntry) -> torch.Tensor:
    """Read an entry as a tensor; its chunks must cover it exactly once."""
    fault = find_coverage_fault(entry.shape, [chunk.region for chunk in entry.chunks])
    assert fault is None, (entry.name, fault)
    sink = Collect()
    with FilePool(root) as files:
        TensorReader(files).stream(entry, full_region(entry.shape), sink)
    dtype = getattr(torch, DTYPES_BY_NAME[entry.dtype.name].torch_name or "")
    return torch.frombuffer(bytearray(sink.data) or bytearray(8), dtype=dtype)[: entry.numel].reshape(entry.shape)


def assert_reads(root: Path, entries: Mapping[str, TensorEntry], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that names, shapes, dtypes and bytes are equal."""
    assert set(entries) == set(expected)
    for name, tensor in expected.items():
        found = read(root, entries[name])
        assert entries[name].name == name
        assert found.shape == tensor.shape and found.dtype == tensor.dtype, name
        assert torch.equal(bits(found), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN equals NaN and 0.0 differs from -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return random values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def several(count: int, shape: Sequence[int]) -> list[torch.Tensor]:
    """Return random tensors of one shape."""
    return [numbers(*shape, seed=seed) for seed in range(count)]
