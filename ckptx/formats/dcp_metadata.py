"""The `.metadata` file of a torch DCP: a pickle that says which chunks exist and where each lies.

    Metadata
      state_dict_metadata   fqn -> TensorStorageMetadata(properties, size, chunks[(offsets, sizes)])
                            fqn -> BytesStorageMetadata            a pickled object
      storage_data          MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length)
      planner_data          fqn -> path in the nested state dict: {"a.b": ("a", "b")}

It is read with stand-ins for these classes, and written opcode by opcode, because a pickler would have to import torch.
Only classes and fields of torch 2.4 are named, and nothing tells on which machine or when it was written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.torch_zip import pickled_int
from ckptx.formats.unpickle import Call, Dict, Globals, Sealed, Symbol, load, without_garbage_collection

Key = tuple[str, Shape | None]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"


class TensorMetadata(NamedTuple):
    """A tensor as DCP describes it. `dtype` is the torch name, sizes are in torch elements."""

    dtype: str
    size: Shape
    chunks: tuple[Region, ...]


class StorageInfo(NamedTuple):
    """Where one chunk or object lies. `transforms` names what its bytes went through (compression), if anything."""

    path: str
    offset: int
    length: int
    transforms: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """A `.metadata` in plain values.

    Attributes:
        tensors: By FQN.
        objects: FQNs of pickled objects.
        storage: By (FQN, chunk offsets); objects have None for offsets. Entries may name the same bytes.
        planner_data: Path of each FQN in the nested state dict, or whatever another planner left.
        version: Version of the DCP format, None before torch 2.5.
    """

    tensors: Mapping[str, TensorMetadata]
    objects: tuple[str, ...]
    storage: Mapping[Key, StorageInfo]
    planner_data: Any = None
    version: str | None = "1.0.0"


# Stand-ins keep the pickled fields in their `__dict__`, also those of writers that add their own.
_Metadata = Sealed("_Metadata", (), {})
_TensorStorage = Sealed("_TensorStorage", (), {})
_BytesStorage = Sealed("_BytesStorage", (), {})
_ChunkStorage = Sealed("_ChunkStorage", (), {})
_Index = Sealed("_Index", (), {})
_Info = Sealed("_Info", (), {})
_StorageMeta = Sealed("_StorageMeta", (), {})


class _Properties(metaclass=Sealed):
    dtype: object

    def __setstate__(self, state: object) -> None:
        """Keeps the dtype of (dtype, layout, requires_grad, memory_format, pin_memory)."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise InputError("tensor properties are not five values")
        self.dtype = state[0]


def _drop(*_: object) -> None:
    """Stands in for constructors of values that ckptx has no use for (absolute paths, memory formats)."""


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_ALLOWED: Globals = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _TensorStorage,
    (_METADATA, "BytesStorageMetadata"): _BytesStorage,
    (_METADATA, "ChunkStorageMetadata"): _ChunkStorage,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _StorageMeta,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): Call(_drop),
    (_SHARDED_TENSOR, "TensorProperties"): _Properties,
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): Call(_drop),
    (_FILESYSTEM, "_StorageInfo"): _Info,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): Call(lambda name: Symbol(name)),
    ("collections", "OrderedDict"): Dict,
    **{(module, name): Call(_drop) for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


def parse_metadata(data: bytes, where: str) -> DcpMetadata:
    """Reads a `.metadata` of any torch from 2.0 on. Nothing in it is executed.

    Args:
        data: The bytes of the file.
        where: Subject of error messages.

    Raises:
        InputError: It is damaged, or names classes that have no place in it.
    """
    with without_garbage_collection():
        return _parse(load(data, _ALLOWED, where), where)


def _parse(root: object, where: str) -> DcpMetadata:
    if not isinstance(root, _Metadata):
        raise InputError(f"{where}: holds a {type(root).__name__}, needed the metadata of a torch DCP; copy it again")
    fields = vars(root)
    shapes = _Shapes()
    try:
        tensors, objects = _parse_state(fields["state_dict_metadata"], shapes)
        storage = _parse_storage(fields["storage_data"], shapes)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: damaged metadata ({type(error).__name__}: {error!s:.120}); copy it again") from None
    version = fields.get("version")
    return DcpMetadata(
        tensors, objects, storage, fields.get("planner_data"), version if isinstance(version, str) else None
    )


@dataclass(slots=True)
class _Shapes:
    """Checked shapes and regions, each kept once: a checkpoint repeats a few of them many thousand times."""

    seen: dict[Shape, Shape] = field(default_factory=dict)
    regions: dict[tuple[Shape, Shape], Region] = field(default_factory=dict)

    def shape(self, value: Any) -> Shape:
        known = self.seen.get(value)
        if known is None:
            if type(value) is not tuple or any(type(size) is not int or not 0 <= size < 1 << 63 for size in value):
                raise ValueError("a size is not a tuple of counts")
            known = self.seen.setdefault(value, value)
        return known

    def region(self, offsets: Any, sizes: Any) -> Region:
        known = self.regions.get((offsets, sizes))
        if known is None:
            known = Region(self.shape(offsets), self.shape(sizes))
            if len(known.offsets) != len(known.sizes):
                raise ValueError("a chunk has offsets and sizes of different length")
            self.regions[known] = known
        return known


def _parse_state(state: Any, shapes: _Shapes) -> tuple[dict[str, TensorMetadata], tuple[str, ...]]:
    tensors: dict[str, TensorMetadata] = {}
    objects: list[str] = []
    for fqn, described in dict.items(state):
        _check_text(fqn)
        fields = vars(described)
        if type(described) is _TensorStorage:
            dtype = fields["properties"].dtype
            if type(dtype) is not Symbol:
                raise ValueError(f"{fqn!r} has no dtype")
            chunks = []
            for chunk in fields["chunks"]:
                place = vars(chunk)
                chunks.append(shapes.region(place["offsets"], place["sizes"]))
            tensors[fqn] = TensorMetadata(dtype[6:], shapes.shape(fields["size"]), tuple(chunks))
        elif type(described) is _BytesStorage:
            objects.append(fqn)
        else:
            raise TypeError(f"{fqn!r} is neither a tensor nor an object")
    return tensors, tuple(objects)


def _parse_storage(storage: Any, shapes: _Shapes) -> dict[Key, StorageInfo]:
    found: dict[Key, StorageInfo] = {}
    for index, info in dict.items(storage):
        named = vars(index)
        fqn, offsets = named["fqn"], named.get("offset")
        key = (fqn, None if offsets is None else shapes.shape(offsets))
        fields = vars(info)
        path, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        _check_text(fqn)
        _check_text(path)
        if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length < 1 << 63:
            raise ValueError(f"{fqn!r} lies at no valid byte range")
        if key in found:
            raise ValueError(f"{fqn!r} has two places for one chunk")
        transforms = fields.get("transform_descriptors")
        found[key] = StorageInfo(path, offset, length, tuple(map(str, transforms)) if transforms else None)
    return found


def _check_text(value: Any) -> None:
    if type(value) is not str:
        raise TypeError(f"a name is a {type(value).__name__}, not a text")
    if not value.isascii():
        value.encode()  # refuses half surrogates, which could not be printed or written


def emit_metadata(metadata: DcpMetadata) -> bytes:
    """The `.metadata` file for `metadata`, readable by torch >= 2.4.

    `planner_data` of None becomes the flat state dict {fqn: (fqn,)}: torch's conversion to `torch.save` needs it.

    Raises:
        UnsupportedError: `planner_data` holds more than plain values.
    """
    out = _Emitter()
    parts = [
        b"\x80\x04",
        out.preamble(),
        out.new(_METADATA, "Metadata"),
        out.text("state_dict_metadata"),
        b"}(",
    ]
    bodies: dict[TensorMetadata, bytes] = {}
    for fqn, tensor in metadata.tensors.items():
        parts.append(out.text(fqn))
        body = bodies.get(tensor)
        if body is None:
            parts.append(out.tensor(tensor))
            bodies[tensor] = out.tensor(tensor)  # shorter the second time: what it shares is in the memo
        else:
            parts.append(body)
    for fqn in metadata.objects:
        parts += (out.text(fqn), out.glob(_METADATA, "BytesStorageMetadata"), b")\x81")
    parts += (b"u", out.text("planner_data"))
    if metadata.planner_data is None:
        names = [out.text(fqn) for fqn in (*metadata.tensors, *metadata.objects)]
        parts += (b"}(", *[name + name + b"\x85" for name in names], b"u")
    else:
        parts.append(out.plain(metadata.planner_data))
    parts += (out.text("storage_data"), b"}(")
    _emit_storage(metadata, out, parts)
    parts += (b"u", out.text("storage_meta"), b"N", out.text("version"), out.text("1.0.0"), b"ub.")
    return b"".join(parts)


def _emit_storage(metadata: DcpMetadata, out: _Emitter, parts: list[bytes]) -> None:
    hints = {
        (fqn, region.offsets): pickled_int(position)
        for fqn, tensor in metadata.tensors.items()
        if len(tensor.chunks) > 1
        for position, region in enumerate(tensor.chunks)
    }
    key = out.new(_METADATA, "MetadataIndex") + out.text("fqn")
    hint = out.text("index")
    at = out.text("offset")
    info = b"ub" + out.new(_FILESYSTEM, "_StorageInfo") + out.text("relative_path")
    size = out.text("length")
    for (fqn, offsets), place in metadata.storage.items():
        parts += (key, out.text(fqn), hint)
        if offsets is None:
            parts.append(b"N")
        else:
            parts += (hints.get((fqn, offsets), b"K\0"), at, out.size(offsets))
        parts += (info, out.text(place.path), at, pickled_int(place.offset), size, pickled_int(place.length))
        if place.transforms:
            parts += (out.text("transform_descriptors"), out.plain(list(place.transforms)))
        parts.append(b"ub")


_CLASSES = (
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_FILESYSTEM, "_StorageInfo"),
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


class _Emitter:
    """Opcodes of values. What repeats is memoized when first written, so use results in the order they come."""

    __slots__ = ("_memo",)

    def __init__(self) -> None:
        self._memo: dict[object, bytes] = {}

    def _remember(self, key: object, code: bytes) -> bytes:
        number = len(self._memo)
        self._memo[key] = b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
        return code + b"\x94"

    def text(self, value: str) -> bytes:
        known = self._memo.get(value)
        if known is not None:
            return known
        data = value.encode()
        size = b"\x8c%c" % len(data) if len(data) < 256 else b"X" + len(data).to_bytes(4, "little")
        return self._remember(value, size + data)

    def glob(self, module: str, name: str) -> bytes:
        key = (module, name)
        return self._memo.get(key) or self._remember(key, self.text(module) + self.text(name) + b"\x93")

    def preamble(self) -> bytes:
        """Puts names that repeat into the memo, by pushing each and dropping it again."""
        names = [self.glob(module, name) for module, name in _CLASSES] + [self.text(name) for name in _FIELDS]
        return b"".join([name + b"0" for name in names])

    def new(self, module: str, name: str) -> bytes:
        """Opens an instance and its fields; `ub` closes both."""
        return self.glob(module, name) + b")\x81}("

    def size(self, shape: Shape) -> bytes:
        return self._memo.get(shape) or self._remember(
            shape, self.glob("torch", "Size") + _tuple(list(map(pickled_int, shape))) + b"\x85R"
        )

    def properties(self, dtype: str) -> bytes:
        key = ("properties", dtype)
        known = self._memo.get(key)
        if known is None:
            build = self.glob(_METADATA, "TensorProperties") + b")\x81(" + self.glob("torch", dtype)
            build += self.glob("torch.serialization", "_get_layout") + self.text("torch.strided") + b"\x85R\x89"
            build += self.glob(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\0\x85R\x89tb"
            known = self._remember(key, build)
        return known

    def tensor(self, tensor: TensorMetadata) -> bytes:
        code = self.new(_METADATA, "TensorStorageMetadata") + self.text("properties")
        code += self.properties(tensor.dtype) + self.text("size") + self.size(tensor.size) + self.text("chunks") + b"]("
        for region in tensor.chunks:
            code += self.new(_METADATA, "ChunkStorageMetadata") + self.text("offsets")
            code += self.size(region.offsets) + self.text("sizes") + self.size(region.sizes) + b"ub"
        return code + b"eub"

    def plain(self, value: object) -> bytes:
        """Any nest of dicts, lists, tuples, texts, numbers and None."""
        if value is None:
            return b"N"
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            return pickled_int(value)
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if type(value) is str:
            return self.text(value)
        if isinstance(value, tuple):
            return _tuple([self.plain(item) for item in value])
        if isinstance(value, list):
            return b"](" + b"".join([self.plain(item) for item in value]) + b"e"
        if isinstance(value, Mapping):
            return b"}(" + b"".join([self.plain(k) + self.plain(v) for k, v in value.items()]) + b"u"
        raise UnsupportedError(
            f"planner_data holds a {type(value).__name__}, needed plain values; save with torch's default planner"
        )


def _tuple(items: list[bytes]) -> bytes:
    if len(items) > 3:
        return b"(" + b"".join(items) + b"t"
    return b"".join(items) + (b")", b"\x85", b"\x86", b"\x87")[len(items)]
