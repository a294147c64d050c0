"""Reads the state in a DCP other than the model, without executing anything: tensors by region, and plain values.

A plain value is None, a boolean, integer of 64 bits, float, string, dtype or tensor, or a list, tuple or dict (with
string or integer keys) of plain values. Bytes can be read, but are not stored. A DCP stores each value as an archive of
`torch.save`. It is read by the unpickler of `formats.torch_archive`, which runs no code; torch's own reader unpickles
`.metadata` unchecked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptx.catalog.entry import BytesEntry, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.dcp.reader import locate_payloads
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.torch_archive.archive import Archive, locate_tensor, open_archive
from ckptx.formats.torch_archive.unpickle import Symbol, TensorRef, UnsupportedObject
from ckptx.runtime.checkpointing.reading import RegionReader
from ckptx.runtime.parallel.shards import find_local_shards, narrow_to
from ckptx.runtime.torch_private import local_tensor
from ckptx.storage.interface import Location, SourceFiles
from ckptx.untrusted.limits import MAX_JSON_DEPTH

_INTEGER_LIMIT = 1 << 63  # limit of the unpickler


@dataclass(frozen=True, slots=True)
class StoredState:
    """The tensors and other values of an open checkpoint.

    Attributes:
        root: Directory of the checkpoint.
        tensors: Entries of all tensors, by name on disk.
        objects: Entries of all other values, by name on disk.
    """

    root: Location
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, BytesEntry]
    _files: SourceFiles
    _reader: RegionReader

    def fill(self, name: str, tensor: Tensor, local_regions: Sequence[Region] | None = None) -> None:
        """Read this rank's shards of a tensor.

        Args:
            name: Name of the entry, which has the shape of `tensor`.
            tensor: A DTensor, or a plain tensor that is whole or made of `local_regions`.
            local_regions: See `shards.find_local_shards`.

        Raises:
            InputError: The file is damaged.
            UnsupportedError: The entry cannot be read as the dtype of `tensor`.
        """
        local = local_tensor(tensor)
        entry = self.tensors[name]
        for shard in find_local_shards(name, tensor, local_regions):
            self._reader.fill(entry, shard.region, narrow_to(local.detach(), shard.local))

    def read_value(self, name: str) -> Any:
        """Return a plain value; its tensors are on the CPU.

        Raises:
            InputError: The archive is damaged, not a plain value, or nested too deeply; nothing in it was executed.
            UnsupportedError: It contains a kind of tensor that ckptx does not read.
        """
        entry = self.objects[name]
        subject = f'{self.root / entry.file}: object "{name}"'
        archive = open_archive(partial(self._files.read, entry.file), entry.offset, entry.nbytes, subject)
        return _PlainValueConverter(archive, partial(self._files.read, entry.file), subject).convert(archive.tree)


@contextmanager
def open_state(path: Path) -> Iterator[StoredState]:
    """Open a DCP; only headers are read, until the result is asked for tensors or values.

    Raises:
        InputError: There is no checkpoint, or it is damaged.
        UnsupportedError: The checkpoint is not a DCP.
    """
    catalog = open_checkpoint(path)
    if not catalog.traits.has_archives:
        raise UnsupportedError(
            f"{catalog.location}: is a {catalog.traits.name} checkpoint, expected a DCP, the only format with training "
            "state; use a checkpoint that was saved during training"
        )
    with catalog.source.open() as files:
        located = locate_payloads(catalog, files, lazy=True)
        yield StoredState(catalog.root, located.tensors, catalog.objects, files, RegionReader(files))


class _PlainValueConverter:
    """Converts the tree of an archive to plain values, in time proportional to its size."""

    def __init__(self, archive: Archive, read: Callable[[int, int], bytes], subject: str) -> None:
        self._archive, self._read, self._subject = archive, read, subject
        self._converted: dict[int, Any] = {}  # by id: an object with several references stays one object
        self._ids = ObjectIds()

    def convert(self, node: Any, depth: int = 0) -> Any:
        """Return the plain value of a node of the tree, which is nested in `depth` others."""
        if node is None or type(node) in (bool, int, float, str, bytes):
            return node
        key = self._ids(node)
        if key not in self._converted:
            if depth > MAX_JSON_DEPTH:
                raise InputError(
                    f"{self._subject}: is nested deeper than {MAX_JSON_DEPTH} levels; flatten it before saving"
                )
            self._converted[key] = self._convert_new(node, depth + 1)
        return self._converted[key]

    def _convert_new(self, node: Any, depth: int) -> Any:
        if isinstance(node, (TensorRef, UnsupportedObject)):  # both are tuples
            return self._read_tensor(node)
        if isinstance(node, dict):
            return {key: self.convert(value, depth) for key, value in dict.items(node)}
        if type(node) in (list, tuple):
            return type(node)(self.convert(each, depth) for each in node)
        if isinstance(node, Symbol) and isinstance(getattr(torch, node.removeprefix("torch."), None), torch.dtype):
            return getattr(torch, node.removeprefix("torch."))
        raise InputError(
            f"{self._subject}: contains a {type(node).__name__}, expected plain values; nothing was executed"
        )

    def _read_tensor(self, node: TensorRef | UnsupportedObject) -> Tensor:
        location = locate_tensor(node, self._archive.records, self._subject)
        if location.dtype.torch_name is None or location.dtype.pack > 1:
            raise UnsupportedError(
                f"{self._subject}: contains a tensor of dtype {location.dtype}, which is not supported in training "
                "state; save it with another dtype"
            )
        if location.strides is not None:
            raise UnsupportedError(
                f"{self._subject}: contains a tensor that is not row-major; save it with .contiguous()"
            )
        record = location.record
        data = self._read(record.offset, record.nbytes)
        if record.crc is not None and zlib.crc32(data) != record.crc:
            raise InputError(
                f"{self._subject}: the CRC-32 of a tensor does not match the recorded one; the file is damaged, "
                "copy it again"
            )
        begin = location.data_offset - record.offset
        dtype = getattr(torch, location.dtype.torch_name)
        if not location.nbytes:
            return torch.empty(location.torch_shape, dtype=dtype)
        return torch.frombuffer(bytearray(data[begin : begin + location.nbytes]), dtype=dtype).view(
            location.torch_shape
        )


# ----------------------------------------------------------------------------------------------- storing


def to_plain(value: Any, subject: str) -> Any:
    """Return a copy of a value that can be stored: builtin types, and row-major CPU tensors.

    Args:
        value: Plain value. An instance of a subclass of dict, list, int and so on is converted to that builtin type.
        subject: Subject of error messages.

    Raises:
        UnsupportedError: It contains a value that could not be read again.
    """
    if value is None or isinstance(value, (bool, torch.dtype)):
        return value
    if isinstance(value, int) and -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        return int(value)
    if isinstance(value, (float, str)):
        return float(value) if isinstance(value, float) else str(value)
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.layout is torch.strided:
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {_check_key(key, subject): to_plain(item, f"{subject}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, f"{subject}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    description = (
        f"the number {value}, which exceeds 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"
    )
    raise UnsupportedError(
        f"{subject}: is {description}, expected None, a boolean, number, string or plain tensor, or lists and dicts "
        "of them; pass an object whose state_dict has only those"
    )


def _check_key(key: Any, subject: str) -> Any:
    if type(key) in (str, int):
        return key
    raise UnsupportedError(
        f"{subject}: has the key {key!r} of type {type(key).__name__}; keys must be strings or integers"
    )


def compute_digest(value: Any) -> str:
    """Return a digest of a plain value: equal for equal types, numbers and tensor bytes, in any order of dict keys.

    Args:
        value: Result of `to_plain`, so that its tensors are row-major and on the CPU.
    """
    if isinstance(value, Tensor):
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        content = f"{value.dtype} {tuple(value.shape)} {blake2b(data, digest_size=16).hexdigest()}"
    elif isinstance(value, dict):
        content = repr(sorted((repr(key), compute_digest(item)) for key, item in value.items()))
    elif isinstance(value, (list, tuple)):
        content = repr([compute_digest(each) for each in value])
    else:
        content = repr(value)
    return blake2b(f"{type(value).__name__} {content}".encode(), digest_size=16).hexdigest()
