"""What stock torch and safetensors say, for tests: golden checkpoints, and a plain reader of located chunks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import deserialize

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_TORCH_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import full_region
from ckptx.formats.dcp.metadata import DcpMetadata, StorageInfo, StorageKey, TensorMetadata
from ckptx.formats.dcp.metadata_writer import metadata_to_bytes
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.storage.interface import SourceFiles

GOLDENS = Path(__file__).resolve().parents[2] / "fixtures" / "dcp"

Values = dict[str, tuple[str, tuple[int, ...], bytes]]


def golden_values(name: str) -> Values:
    """Dtype name, shape and row-major bytes of every tensor of a golden, by safetensors."""
    parsed = deserialize((GOLDENS / f"{name}.safetensors").read_bytes())  # type: ignore[no-untyped-call]
    return {key: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for key, info in parsed}


def values(catalog: Catalog) -> Values:
    """The same of a catalog whose chunks are located, gathered with numpy strides."""
    with catalog.source.open() as files:
        return {name: (entry.dtype.name, entry.shape, _gather(entry, files)) for name, entry in catalog.tensors.items()}


def _gather(entry: TensorEntry, files: SourceFiles) -> bytes:
    pack, itemsize = entry.dtype.pack, entry.dtype.itemsize

    def packed(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes if pack == 1 else (*sizes[:-1], sizes[-1] // pack)

    target = np.zeros(packed(entry.shape), dtype=f"V{itemsize}")
    for chunk in entry.chunks:
        assert not chunk.is_archive
        shape = packed(chunk.region.sizes)
        flat = np.frombuffer(files.read(chunk.file, chunk.offset, chunk.nbytes), dtype=f"V{itemsize}")
        if chunk.strides is None:
            block = flat.reshape(shape)
        else:
            steps = tuple(stride * itemsize for stride in chunk.strides)
            block = np.lib.stride_tricks.as_strided(flat, shape, steps)
        at = packed(chunk.region.offsets)
        target[tuple(slice(begin, begin + size) for begin, size in zip(at, shape, strict=True))] = block
    return target.tobytes()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major bytes of a tensor of any dtype."""
    plain = tensor.detach().contiguous()
    if not plain.numel():
        return b""
    return plain.flatten().view(torch.uint8).numpy().tobytes()


def raw_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of the torch dtype `name` over random bytes."""
    dtype = DTYPES_BY_TORCH_NAME[name]
    high = 2 if name == "bool" else 256
    nbytes = prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, high, nbytes, dtype=np.uint8)
    if not nbytes:
        return torch.empty(shape, dtype=getattr(torch, name))
    return torch.from_numpy(data).view(getattr(torch, name)).reshape(shape)


def archive(tensor: torch.Tensor) -> bytes:
    """The archive ckptx writes for a row-major tensor."""
    dtype = DTYPES_BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")]
    data = raw_bytes(tensor)
    frame = archive_frame(dtype, dtype.from_torch_elements(tuple(tensor.shape)))
    return frame.head + data + frame.build_tail(zlib.crc32(data))


def write_dcp(
    root: Path,
    tensors: dict[str, torch.Tensor],
    cuts: Mapping[str, Sequence[tuple[slice, ...]]] | None = None,
    aliases: dict[str, str] | None = None,
    planner_data: Any = None,
) -> DcpMetadata:
    """A DCP by ckptx's own writers: one file, tensors whole or cut as `cuts` says, `aliases` sharing bytes."""
    root.mkdir(parents=True, exist_ok=True)
    described: dict[str, TensorMetadata] = {}
    storage: dict[StorageKey, StorageInfo] = {}
    data = b""
    for name, tensor in tensors.items():
        regions = []
        for cut in (cuts or {}).get(name, [tuple(slice(0, size) for size in tensor.shape)]):
            part = tensor[cut] if tensor.dim() else tensor
            offsets = tuple(span.start for span in cut)
            regions.append(full_region(tuple(part.shape))._replace(offsets=offsets))
            block = archive(part)
            storage[name, offsets] = StorageInfo("__0_0.distcp", len(data), len(block))
            data += block
        described[name] = TensorMetadata(str(tensor.dtype)[6:], tuple(tensor.shape), tuple(regions))
    for alias, name in (aliases or {}).items():
        described[alias] = described[name]
        storage.update({(alias, key[1]): place for key, place in list(storage.items()) if key[0] == name})
    metadata = DcpMetadata(described, (), storage, planner_data)
    (root / "__0_0.distcp").write_bytes(data)
    (root / ".metadata").write_bytes(metadata_to_bytes(metadata))
    return metadata
