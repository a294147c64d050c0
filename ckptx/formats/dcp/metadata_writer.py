"""Write the `.metadata` of a torch DCP opcode by opcode, because a pickler would have to import torch.

Only classes and fields of torch 2.4 are used, and nothing records when or on which machine it was written. Repeated
values are put into the memo of the pickle, so that millions of chunks take some 60 bytes each and are generated as fast
as they are consumed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import NamedTuple

from ckptx.catalog.region import Region, Shape
from ckptx.errors import UnsupportedError
from ckptx.formats.dcp.metadata import FILESYSTEM_MODULE, METADATA_MODULE, DcpMetadata, StorageInfo, TensorMetadata
from ckptx.formats.torch_archive.archive import pickled_int


class StorageEntry(NamedTuple):
    """One entry of `storage_data`, for a chunk of a tensor or an object.

    Attributes:
        fqn: Name of the tensor or object.
        chunk_index: Index of the chunk in the tensor; None for an object.
        chunk_offsets: Offsets of the chunk in the tensor, in torch elements (see `DType`); None for an object.
        location: File, offset and length of the bytes of the chunk or object.
    """

    fqn: str
    chunk_index: int | None
    chunk_offsets: Shape | None
    location: StorageInfo


class ShardedStorageEntries(NamedTuple):
    """The entries of a sharded tensor, written fastest if equally sharded tensors share regions, files and lengths.

    Attributes:
        fqn: Name of the tensor.
        regions: Region of each chunk in torch elements, see `DType`.
        files: File of each chunk.
        file_offsets: First byte of each chunk in its file.
        lengths: Number of bytes of each chunk.
    """

    fqn: str
    regions: tuple[Region, ...]
    files: tuple[str, ...]
    file_offsets: Sequence[int]
    lengths: tuple[int, ...]


def metadata_to_bytes(metadata: DcpMetadata) -> bytes:
    """Return the bytes of a `.metadata` file, readable by torch >= 2.4.

    Raises:
        UnsupportedError: `planner_data` contains more than plain values.
    """
    return pickle_metadata(metadata.tensors, metadata.objects, _storage_entries(metadata), metadata.planner_data)


def _storage_entries(metadata: DcpMetadata) -> Iterator[StorageEntry]:
    indices = {
        (fqn, region.offsets): index
        for fqn, tensor in metadata.tensors.items()
        if len(tensor.chunks) > 1
        for index, region in enumerate(tensor.chunks)
    }
    for (fqn, offsets), location in metadata.storage.items():
        yield StorageEntry(fqn, None if offsets is None else indices.get((fqn, offsets), 0), offsets, location)


def pickle_metadata(
    tensors: Mapping[str, TensorMetadata],
    objects: Iterable[str],
    storage: Iterable[StorageEntry | ShardedStorageEntries],
    planner_data: object = None,
) -> bytes:
    """Return the bytes of a `.metadata` file; storage entries are consumed one by one.

    Args:
        tensors: Tensors by FQN.
        objects: FQNs of pickled objects.
        storage: An entry for each chunk and object, or one `ShardedStorageEntries` for all chunks of a sharded tensor.
        planner_data: None becomes the flat state dict {fqn: (fqn,)}, which torch's conversion to `torch.save` needs.

    Raises:
        UnsupportedError: `planner_data` contains more than plain values.
    """
    objects = list(objects)
    emitter, file = PickleEmitter(), BytesIO()
    write = file.write
    write(emitter.head())
    # Codes by `id`, as equal tensors may be one object; with the tensor itself, so that its id stays unique.
    known_tensors: dict[int, tuple[TensorMetadata, bytes]] = {}
    for fqn, tensor in tensors.items():
        write(emitter.text(fqn))
        known_tensor = known_tensors.get(id(tensor))
        if known_tensor is None:
            write(emitter.tensor(tensor))
            # Emitted again, because the code is shorter now that its values are in the memo.
            known_tensors[id(tensor)] = tensor, emitter.tensor(tensor)
        else:
            write(known_tensor[1])
    for fqn in objects:
        write(emitter.text(fqn) + emitter.global_reference(METADATA_MODULE, BYTES_CLASS) + b")\x81")
    write(b"u" + emitter.text("planner_data"))
    if planner_data is None:
        names = [emitter.text(fqn) for fqn in (*tensors, *objects)]
        write(b"}(" + b"".join([name + name + b"\x85" for name in names]) + b"u")
    else:
        write(emitter.plain(planner_data))
    write(emitter.text("storage_data") + b"}(")
    for code in _emit_storage(storage, emitter):
        write(code)
    write(b"u" + emitter.text("storage_meta") + b"N" + emitter.text("version") + emitter.text("1.0.0") + b"ub.")
    return file.getvalue()


def _emit_storage(storage: Iterable[StorageEntry | ShardedStorageEntries], emitter: PickleEmitter) -> Iterator[bytes]:
    key = emitter.new(METADATA_MODULE, "MetadataIndex") + emitter.text("fqn")
    entry_codes = _StorageEntryCodes(emitter)
    # Codes by `id` of regions, files and lengths; with the entries themselves, so that these ids stay unique.
    known_shardings: dict[tuple[int, int, int], tuple[ShardedStorageEntries, list[tuple[bytes, bytes]]]] = {}
    for entry in storage:
        name = key + emitter.text(entry.fqn)
        if isinstance(entry, StorageEntry):
            begin, end = entry_codes.surrounding_codes(entry.chunk_index, entry.chunk_offsets, entry.location)
            yield name + begin + pickled_int(entry.location.offset) + end
            continue
        _, regions, files, file_offsets, lengths = entry
        sharding = (id(regions), id(files), id(lengths))
        known = known_shardings.get(sharding)
        if known is None:
            for begin, end, offset in entry_codes.sharding_codes(entry):
                yield name + begin + pickled_int(offset) + end
            # Emitted again, because the codes are shorter now, as in `pickle_metadata`.
            known_shardings[sharding] = entry, [(begin, end) for begin, end, _ in entry_codes.sharding_codes(entry)]
            continue
        codes: list[bytes] = []
        previous_offset, offset_code = -1, b""
        for (begin, end), offset in zip(known[1], file_offsets, strict=True):
            if offset != previous_offset:  # blocks of one length begin at the same offset in the file of every rank
                previous_offset, offset_code = offset, pickled_int(offset)
            codes += (name, begin, offset_code, end)
        yield b"".join(codes)


class _StorageEntryCodes:
    """Opcodes before and after the offset in an entry of `storage_data`, without the name."""

    def __init__(self, emitter: PickleEmitter) -> None:
        self._emitter = emitter
        self._index_key, self._offset_key = emitter.text("index"), emitter.text("offset")
        self._storage_info = b"ub" + emitter.new(FILESYSTEM_MODULE, "_StorageInfo") + emitter.text("relative_path")
        self._length_key = emitter.text("length")

    def surrounding_codes(
        self, index: int | None, chunk_offsets: Shape | None, location: StorageInfo
    ) -> tuple[bytes, bytes]:
        """Return the opcodes of one entry before and after its offset in the file; see `StorageEntry`."""
        emitter = self._emitter
        index_code = b"N"
        if chunk_offsets is not None:
            index_code = pickled_int(index or 0) + self._offset_key + emitter.size(chunk_offsets)
        begin = self._index_key + index_code + self._storage_info + emitter.text(location.path) + self._offset_key
        end = self._length_key + pickled_int(location.length)
        if location.transforms:
            end += emitter.text("transform_descriptors") + emitter.plain(list(location.transforms))
        return begin, end + b"ub"

    def sharding_codes(self, sharding: ShardedStorageEntries) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield for each entry the opcodes before and after its offset, and the offset."""
        locations = zip(sharding.regions, sharding.files, sharding.file_offsets, sharding.lengths, strict=True)
        for index, (region, file, offset, length) in enumerate(locations):
            yield *self.surrounding_codes(index, region.offsets, StorageInfo(file, offset, length)), offset


_CLASSES = (
    (METADATA_MODULE, "Metadata"),
    (METADATA_MODULE, "TensorStorageMetadata"),
    (METADATA_MODULE, "TensorProperties"),
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    (METADATA_MODULE, "ChunkStorageMetadata"),
    (METADATA_MODULE, "MetadataIndex"),
    (FILESYSTEM_MODULE, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
)
_FIELDS = (
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "index",
    "offset",
    "relative_path",
    "length",
)


BYTES_CLASS = "BytesStorageMetadata"


def memo_reference(number: int) -> bytes:
    """Return the opcode and argument that get a value from the memo."""
    return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")


class PickleEmitter:
    """Emits opcodes for values and memoizes repeated ones, so results must be written in the order of the calls.

    Attributes:
        memo: Opcodes that refer to a value, by string, shape, (module, name) of a global, or ("properties", dtype).
    """

    __slots__ = ("memo",)

    def __init__(self) -> None:
        self.memo: dict[object, bytes] = {}

    def _memoize(self, key: object, code: bytes) -> bytes:
        self.memo[key] = memo_reference(len(self.memo))
        return code + b"\x94"

    def text(self, value: str) -> bytes:
        known = self.memo.get(value)
        if known is not None:
            return known
        data = value.encode()
        size = b"\x8c%c" % len(data) if len(data) < 256 else b"X" + len(data).to_bytes(4, "little")
        return self._memoize(value, size + data)

    def global_reference(self, module: str, name: str) -> bytes:
        key = (module, name)
        return self.memo.get(key) or self._memoize(key, self.text(module) + self.text(name) + b"\x93")

    def head(self) -> bytes:
        """Return the opcodes before the first tensor. They push repeated names and pop them again to fill the memo."""
        names = [self.global_reference(module, name) for module, name in _CLASSES] + [
            self.text(name) for name in _FIELDS
        ]
        begin = self.new(METADATA_MODULE, "Metadata") + self.text("state_dict_metadata") + b"}("
        return b"\x80\x04" + b"".join([name + b"0" for name in names]) + begin

    def new(self, module: str, name: str) -> bytes:
        """Return the opcodes that open an instance and its fields; `ub` closes both."""
        return self.global_reference(module, name) + b")\x81}("

    def size(self, shape: Shape) -> bytes:
        return self.memo.get(shape) or self._memoize(
            shape, self.global_reference("torch", "Size") + _tuple(list(map(pickled_int, shape))) + b"\x85R"
        )

    def properties(self, dtype: str) -> bytes:
        key = ("properties", dtype)
        known = self.memo.get(key)
        if known is None:
            build = (
                self.global_reference(METADATA_MODULE, "TensorProperties")
                + b")\x81("
                + self.global_reference("torch", dtype)
            )
            build += (
                self.global_reference("torch.serialization", "_get_layout") + self.text("torch.strided") + b"\x85R\x89"
            )
            build += self.global_reference(METADATA_MODULE, "_MEM_FORMAT_ENCODING") + b"K\0\x85R\x89tb"
            known = self._memoize(key, build)
        return known

    def tensor(self, tensor: TensorMetadata) -> bytes:
        code = self.new(METADATA_MODULE, "TensorStorageMetadata") + self.text("properties")
        code += self.properties(tensor.dtype) + self.text("size") + self.size(tensor.size) + self.text("chunks") + b"]("
        for region in tensor.chunks:
            code += self.new(METADATA_MODULE, "ChunkStorageMetadata") + self.text("offsets")
            code += self.size(region.offsets) + self.text("sizes") + self.size(region.sizes) + b"ub"
        return code + b"eub"

    def plain(self, value: object) -> bytes:
        """Return the opcodes of nested dicts, lists, tuples, strings, numbers and None."""
        if type(value) is str:
            return self.text(value)
        if isinstance(value, tuple):
            return _tuple([self.plain(item) for item in value])
        if value is None:
            return b"N"
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            return pickled_int(value)
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, list):
            return b"](" + b"".join([self.plain(item) for item in value]) + b"e"
        if isinstance(value, Mapping):
            return b"}(" + b"".join([self.plain(k) + self.plain(v) for k, v in value.items()]) + b"u"
        raise UnsupportedError(
            f"planner_data contains a {type(value).__name__}, but only plain values can be written; save with torch's "
            "default planner"
        )


def _tuple(items: list[bytes]) -> bytes:
    if len(items) > 3:
        return b"(" + b"".join(items) + b"t"
    return b"".join(items) + (b")", b"\x85", b"\x86", b"\x87")[len(items)]
