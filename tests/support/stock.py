"""What stock torch says about a DCP: names, plain tensors, bytes. ckptx takes no part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor


def metadata(path: Path) -> dict[str, TensorStorageMetadata]:
    """Tensors of a DCP by FQN, as stock `FileSystemReader` reads them."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def empty_like(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors to load into, filled with a pattern that a missing byte would show."""
    found = metadata(path)
    state = {}
    for name in names if names is not None else found:
        tensor = torch.empty(found[name].size, dtype=found[name].properties.dtype)
        if tensor.numel():
            tensor.flatten().view(torch.uint8).fill_(0x5A)
        state[name] = tensor
    return state


def load(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """`dcp.load` into plain tensors, in one process."""
    state = empty_like(path, names)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def payload_bytes(path: Path) -> int:
    """Bytes of the `.distcp` files."""
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major bytes of a tensor of any dtype; a DTensor is gathered first."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    plain = tensor.detach().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Same names, shapes, dtypes and bytes."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert raw(other) == raw(tensor), name


def file_bytes(root: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path."""
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}
