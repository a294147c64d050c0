"""Read tensors of a catalog as they are stored: dtype, shape and row-major bytes."""

from __future__ import annotations

import json
from pathlib import Path

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.region import Region, full_region
from ckptx.formats.dcp.reader import locate_payloads
from ckptx.formats.registry import open_checkpoint
from ckptx.transfer.stream import TensorReader
from tests.support.checkpoint_writers import Value


class _Bytes:
    """A sink that keeps all bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._memory = bytearray(1 << 16)

    def space(self, nbytes: int) -> memoryview:
        return memoryview(self._memory)[:nbytes]

    def commit(self, view: memoryview) -> None:
        self.data += view


def read_tensor(catalog: Catalog, name: str, region: Region | None = None) -> Value:
    """Return a tensor, or a region of it."""
    entry, sink = catalog.tensors[name], _Bytes()
    region = full_region(entry.shape) if region is None else region
    with catalog.source.open() as files:
        TensorReader(files).stream(entry, region, sink)
    return entry.dtype.name, region.sizes, bytes(sink.data)


def read_checkpoint(root: Path) -> dict[str, Value]:
    """Return all tensors of a checkpoint in any format."""
    catalog = open_checkpoint(root)
    if catalog.traits.has_archives:
        with catalog.source.open() as files:
            catalog = locate_payloads(catalog, files)
    return {name: read_tensor(catalog, name) for name in catalog.tensors}


def read_safetensors(root: Path, pattern: str = "*.safetensors") -> dict[str, Value]:
    """Return the tensors of safetensors files of a directory, without ckptx."""
    tensors: dict[str, Value] = {}
    for path in sorted(root.glob(pattern)):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, row in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, last = row["data_offsets"]
                assert name not in tensors
                tensors[name] = row["dtype"], tuple(row["shape"]), data[begin + first : begin + last]
    return tensors
