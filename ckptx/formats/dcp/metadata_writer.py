"""Write the `.metadata` of a torch DCP opcode by opcode, because a pickler would have to import torch.

Only classes and fields of torch 2.4 are used, and nothing records when or on which machine it was written. Repeated
values are put into the memo of the pickle, so that millions of chunks take some 60 bytes each and are generated as fast
as they are consumed.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import NamedTuple

from ckptx.catalog.region import Region, Shape
from ckptx.errors import UnsupportedError
from ckptx.formats.dcp.metadata import FILESYSTEM_MODULE, METADATA_MODULE, DcpMetadata, StorageInfo, TensorMetadata
from ckptx.formats.torch_archive.archive import pickled_int

_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ  # an instance of the class before, without fields
_CALL = pickle.TUPLE1 + pickle.REDUCE  # the result of a function, both before: function, argument
_BEGIN_DICT = pickle.EMPTY_DICT + pickle.MARK  # keys and values follow, then SETITEMS
_BEGIN_LIST = pickle.EMPTY_LIST + pickle.MARK  # items follow, then APPENDS
_END_INSTANCE = pickle.SETITEMS + pickle.BUILD  # the end of a dict of fields, which the instance before it receives


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
    write(emitter.emit_head())
    # Codes by `id`, as equal tensors may be one object; with the tensor itself, so that its id stays unique.
    tensor_codes: dict[int, tuple[TensorMetadata, bytes]] = {}
    for fqn, tensor in tensors.items():
        write(emitter.emit_text(fqn))
        known_tensor = tensor_codes.get(id(tensor))
        if known_tensor is None:
            write(emitter.emit_tensor(tensor))
            # Emitted again, because the code is shorter now that its values are in the memo.
            tensor_codes[id(tensor)] = tensor, emitter.emit_tensor(tensor)
        else:
            write(known_tensor[1])
    for fqn in objects:
        write(emitter.emit_text(fqn) + emitter.emit_global(METADATA_MODULE, BYTES_CLASS) + _NEW)
    write(pickle.SETITEMS + emitter.emit_text("planner_data"))
    if planner_data is None:
        names = [emitter.emit_text(fqn) for fqn in (*tensors, *objects)]
        write(_BEGIN_DICT + b"".join([name + name + pickle.TUPLE1 for name in names]) + pickle.SETITEMS)
    else:
        write(emitter.emit_plain(planner_data))
    write(emitter.emit_text("storage_data") + _BEGIN_DICT)
    for code in _emit_storage(storage, emitter):
        write(code)
    write(pickle.SETITEMS + emitter.emit_text("storage_meta") + pickle.NONE)
    write(emitter.emit_text("version") + emitter.emit_text("1.0.0") + _END_INSTANCE + pickle.STOP)
    return file.getvalue()


def _emit_storage(storage: Iterable[StorageEntry | ShardedStorageEntries], emitter: PickleEmitter) -> Iterator[bytes]:
    """Yield the opcodes of the entries of `storage_data`."""
    key = emitter.emit_new(METADATA_MODULE, "MetadataIndex") + emitter.emit_text("fqn")
    entry_codes = _StorageEntryCodes(emitter)
    # Codes by `id` of regions, files and lengths; with the entries themselves, so that these ids stay unique.
    known_shardings: dict[tuple[int, int, int], tuple[ShardedStorageEntries, list[tuple[bytes, bytes]]]] = {}
    for entry in storage:
        name = key + emitter.emit_text(entry.fqn)
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
        self._index_key, self._offset_key = emitter.emit_text("index"), emitter.emit_text("offset")
        self._storage_info = (
            _END_INSTANCE + emitter.emit_new(FILESYSTEM_MODULE, "_StorageInfo") + emitter.emit_text("relative_path")
        )
        self._length_key = emitter.emit_text("length")

    def surrounding_codes(
        self, index: int | None, chunk_offsets: Shape | None, location: StorageInfo
    ) -> tuple[bytes, bytes]:
        """Return the opcodes of one entry before and after its offset in the file; see `StorageEntry`."""
        emitter = self._emitter
        index_code = pickle.NONE
        if chunk_offsets is not None:
            index_code = pickled_int(index or 0) + self._offset_key + emitter.emit_size(chunk_offsets)
        begin = self._index_key + index_code + self._storage_info + emitter.emit_text(location.path) + self._offset_key
        end = self._length_key + pickled_int(location.length)
        if location.transforms:
            end += emitter.emit_text("transform_descriptors") + emitter.emit_plain(list(location.transforms))
        return begin, end + _END_INSTANCE

    def sharding_codes(self, sharding: ShardedStorageEntries) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield for each entry the opcodes before and after its offset, and the offset."""
        locations = zip(sharding.regions, sharding.files, sharding.file_offsets, sharding.lengths, strict=True)
        for index, (region, file, offset, length) in enumerate(locations):
            yield *self.surrounding_codes(index, region.offsets, StorageInfo(file, offset, length)), offset


BYTES_CLASS = "BytesStorageMetadata"
# Classes, functions and names of fields that `PickleEmitter.emit_head` puts into the memo.
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


def memo_reference(number: int) -> bytes:
    """Return the opcode and argument that get a value from the memo."""
    return pickle.BINGET + b"%c" % number if number < 256 else pickle.LONG_BINGET + number.to_bytes(4, "little")


class PickleEmitter:
    """Emits opcodes for values and memoizes repeated ones, so results must be written in the order of the calls.

    Attributes:
        memo: Value -> opcodes that get it from the memo. A value is a string, a shape, (module, name) for a class or
            function, or ("properties", dtype) for the properties of a tensor.
    """

    __slots__ = ("memo",)

    def __init__(self) -> None:
        self.memo: dict[object, bytes] = {}

    def _memoize(self, key: object, code: bytes) -> bytes:
        self.memo[key] = memo_reference(len(self.memo))
        return code + pickle.MEMOIZE

    def emit_text(self, value: str) -> bytes:
        known = self.memo.get(value)
        if known is not None:
            return known
        data = value.encode()
        if len(data) < 256:
            return self._memoize(value, pickle.SHORT_BINUNICODE + b"%c" % len(data) + data)
        return self._memoize(value, pickle.BINUNICODE + len(data).to_bytes(4, "little") + data)

    def emit_global(self, module: str, name: str) -> bytes:
        key = (module, name)
        return self.memo.get(key) or self._memoize(
            key, self.emit_text(module) + self.emit_text(name) + pickle.STACK_GLOBAL
        )

    def emit_head(self) -> bytes:
        """Return the opcodes before the first tensor. They push repeated names and pop them again to fill the memo."""
        names = [self.emit_global(module, name) for module, name in _CLASSES] + [
            self.emit_text(name) for name in _FIELDS
        ]
        begin = self.emit_new(METADATA_MODULE, "Metadata") + self.emit_text("state_dict_metadata") + _BEGIN_DICT
        return pickle.PROTO + b"\x04" + b"".join([name + pickle.POP for name in names]) + begin

    def emit_new(self, module: str, name: str) -> bytes:
        """Return the opcodes that begin an instance and its fields; `_END_INSTANCE` ends both."""
        return self.emit_global(module, name) + _NEW + _BEGIN_DICT

    def emit_size(self, shape: Shape) -> bytes:
        return self.memo.get(shape) or self._memoize(
            shape, self.emit_global("torch", "Size") + _tuple(list(map(pickled_int, shape))) + _CALL
        )

    def emit_properties(self, dtype: str) -> bytes:
        key = ("properties", dtype)
        known = self.memo.get(key)
        if known is None:
            build = self.emit_global(METADATA_MODULE, "TensorProperties") + _NEW + pickle.MARK
            build += self.emit_global("torch", dtype)
            build += self.emit_global("torch.serialization", "_get_layout") + self.emit_text("torch.strided") + _CALL
            build += pickle.NEWFALSE  # requires_grad
            build += self.emit_global(METADATA_MODULE, "_MEM_FORMAT_ENCODING") + pickled_int(0) + _CALL
            build += pickle.NEWFALSE + pickle.TUPLE + pickle.BUILD  # pin_memory, end of the state
            known = self._memoize(key, build)
        return known

    def emit_tensor(self, tensor: TensorMetadata) -> bytes:
        code = self.emit_new(METADATA_MODULE, "TensorStorageMetadata") + self.emit_text("properties")
        code += self.emit_properties(tensor.dtype) + self.emit_text("size") + self.emit_size(tensor.size)
        code += self.emit_text("chunks") + _BEGIN_LIST
        for region in tensor.chunks:
            code += self.emit_new(METADATA_MODULE, "ChunkStorageMetadata") + self.emit_text("offsets")
            code += (
                self.emit_size(region.offsets) + self.emit_text("sizes") + self.emit_size(region.sizes) + _END_INSTANCE
            )
        return code + pickle.APPENDS + _END_INSTANCE

    def emit_plain(self, value: object) -> bytes:
        """Return the opcodes of nested dicts, lists, tuples, strings, numbers and None."""
        if type(value) is str:
            return self.emit_text(value)
        if isinstance(value, tuple):
            return _tuple([self.emit_plain(item) for item in value])
        if value is None:
            return pickle.NONE
        if isinstance(value, bool):
            return pickle.NEWTRUE if value else pickle.NEWFALSE
        if isinstance(value, int):
            return pickled_int(value)
        if isinstance(value, float):
            return pickle.BINFLOAT + struct.pack(">d", value)
        if isinstance(value, list):
            return _BEGIN_LIST + b"".join([self.emit_plain(item) for item in value]) + pickle.APPENDS
        if isinstance(value, Mapping):
            items = [self.emit_plain(key) + self.emit_plain(item) for key, item in value.items()]
            return _BEGIN_DICT + b"".join(items) + pickle.SETITEMS
        raise UnsupportedError(
            f"planner_data contains a {type(value).__name__}, but only plain values can be written; save with torch's "
            "default planner"
        )


def _tuple(items: list[bytes]) -> bytes:
    if len(items) > 3:
        return pickle.MARK + b"".join(items) + pickle.TUPLE
    return b"".join(items) + (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)[len(items)]
