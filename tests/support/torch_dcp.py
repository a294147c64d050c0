"""Read names, plain tensors and bytes of a DCP with torch, without ckptx."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor


def metadata(path: Path) -> dict[str, TensorStorageMetadata]:
    """Return the tensor metadata of a DCP by FQN, as stock `FileSystemReader` reads it."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def empty_like(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Create tensors to load into, filled with a pattern that makes missing bytes visible."""
    found = metadata(path)
    state = {}
    for name in names if names is not None else found:
        tensor = torch.empty(found[name].size, dtype=found[name].properties.dtype)
        if tensor.numel():
            tensor.flatten().view(torch.uint8).fill_(0x5A)
        state[name] = tensor
    return state


def load(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Call `dcp.load` with plain tensors in one process."""
    state = empty_like(path, names)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def payload_bytes(path: Path) -> int:
    """Return the total size of the `.distcp` files in bytes."""
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def raw(tensor: torch.Tensor) -> bytes:
    """Return the row-major bytes of a tensor of any dtype; a DTensor is gathered first."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    plain = tensor.detach().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that names, shapes, dtypes and bytes are equal."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert raw(other) == raw(tensor), name


def file_bytes(root: Path) -> dict[str, bytes]:
    """Read every file below a directory, by relative path."""
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}
