"""The `.metadata` file of a torch DCP: a pickle that lists the chunks and the location of each.

    Metadata
      state_dict_metadata   fqn -> TensorStorageMetadata(properties, size, chunks[(offsets, sizes)])
                            fqn -> BytesStorageMetadata            a pickled object
      storage_data          MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length)
      planner_data          fqn -> path in the nested state dict: {"a.b": ("a", "b")}
      all_local_plans       Megatron only: the SavePlan of each rank, with a WriteItem for each chunk

It is read with stand-ins for these classes. The stand-ins for plans keep nothing: a plan records what a rank intended
to write, not what the files contain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError
from ckptx.formats.torch_archive.unpickle import (
    LAYOUT_STAND_IN,
    MEMBER_BY_NAME,
    ORDERED_DICT,
    Call,
    EnumClass,
    Globals,
    ReadOnlyClass,
    Symbol,
    load,
    without_garbage_collection,
)
from ckptx.untrusted.hash_keys import UniqueTuples
from ckptx.untrusted.limits import MAX_DIMS, MAX_JSON_DEPTH, MAX_NUMEL_BITS, MAX_TENSORS, find_shape_fault

_INTEGER_TYPES = frozenset({int})
_INVALID_SHAPE = f"sizes or offsets are not a tuple of at most {MAX_DIMS} integers from 0 to 2^{MAX_NUMEL_BITS} - 1"

StorageKey = tuple[str, Shape | None]  # FQN, and offsets of a chunk in torch elements; None for an object

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
FILESYSTEM_MODULE = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"


class TensorMetadata(NamedTuple):
    """A tensor in `.metadata`.

    Attributes:
        dtype: Name of the torch dtype, such as "bfloat16".
        size: Shape in torch elements.
        chunks: Regions of the tensor that are stored, in torch elements.
    """

    dtype: str
    size: Shape
    chunks: tuple[Region, ...]


class StorageInfo(NamedTuple):
    """Location of a chunk or object.

    Attributes:
        path: File name relative to the directory of `.metadata`.
        offset: Position of the first byte in the file.
        length: Number of bytes.
        transforms: Names of the stream transforms of the bytes, such as compression; None for plain bytes.
    """

    path: str
    offset: int
    length: int
    transforms: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The contents of `.metadata` as plain values.

    Attributes:
        tensors: Tensors by FQN.
        objects: FQNs of pickled objects.
        storage: Location of each chunk and object, see `StorageKey`. Several may have the same bytes (aliases).
        planner_data: Path of each FQN in the nested state dict; custom planners may store other values.
        version: Version of the DCP format; None before torch 2.5.
    """

    tensors: Mapping[str, TensorMetadata]
    objects: tuple[str, ...]
    storage: Mapping[StorageKey, StorageInfo]
    planner_data: Any = None
    version: str | None = "1.0.0"


class ChunkLocations(NamedTuple):
    """Locations of the chunks of one tensor, in order. Equally sharded tensors may share all but `offsets`.

    Attributes:
        files: File name of each chunk.
        offsets: First byte of each chunk in its file.
        lengths: Number of bytes of each chunk.
    """

    files: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]


class LocatedMetadata(NamedTuple):
    """A `DcpMetadata` with a location for every chunk and object, and no locations for anything else.

    Attributes:
        tensors: Tensors by FQN.
        locations: Locations of the chunks of each tensor, by FQN.
        objects: Location of each pickled object, by FQN.
        planner_data: See `DcpMetadata`.
    """

    tensors: Mapping[str, TensorMetadata]
    locations: Mapping[str, ChunkLocations]
    objects: Mapping[str, StorageInfo]
    planner_data: Any


# Stand-ins keep the pickled fields in their `__dict__`, including fields that other writers add.
_Metadata = ReadOnlyClass("_Metadata", (), {})
_TensorStorage = ReadOnlyClass("_TensorStorage", (), {})
_BytesStorage = ReadOnlyClass("_BytesStorage", (), {})
_ChunkStorage = ReadOnlyClass("_ChunkStorage", (), {})
_Index = ReadOnlyClass("_Index", (), {})
_Info = ReadOnlyClass("_Info", (), {})
_StorageMeta = ReadOnlyClass("_StorageMeta", (), {})


class _Properties(metaclass=ReadOnlyClass):
    """Stand-in for `TensorProperties`, which keeps the dtype."""

    dtype: object

    def __setstate__(self, state: object) -> None:
        """Keep the dtype of (dtype, layout, requires_grad, memory_format, pin_memory)."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise InputError("tensor properties are not five values")
        self.dtype = state[0]


class _InertPlan(metaclass=ReadOnlyClass):
    """Stand-in for a plan and its parts, which keeps none of their fields."""

    __slots__ = ()

    def __new__(cls, *_: object) -> _InertPlan:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


def _discard(*_: object) -> None:
    """Stand in for constructors of values that ckptx does not use (absolute paths, memory formats)."""


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_ALLOWED_GLOBALS: Globals = {
    (METADATA_MODULE, "Metadata"): _Metadata,
    (METADATA_MODULE, "TensorStorageMetadata"): _TensorStorage,
    (METADATA_MODULE, "BytesStorageMetadata"): _BytesStorage,
    (METADATA_MODULE, "ChunkStorageMetadata"): _ChunkStorage,
    (METADATA_MODULE, "MetadataIndex"): _Index,
    (METADATA_MODULE, "StorageMeta"): _StorageMeta,
    (METADATA_MODULE, "TensorProperties"): _Properties,
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"): EnumClass(_discard),
    (_SHARDED_TENSOR, "TensorProperties"): _Properties,
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): EnumClass(_discard),
    (FILESYSTEM_MODULE, "_StorageInfo"): _Info,
    **{(_PLANNER, name): _InertPlan for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")},
    (_PLANNER, "WriteItemType"): EnumClass(_InertPlan),
    (FILESYSTEM_MODULE, "_StoragePrefix"): _InertPlan,
    **MEMBER_BY_NAME,
    (_MEGATRON, "MCoreSavePlan"): _InertPlan,
    (_MEGATRON, "MCoreMetadata"): _Metadata,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): LAYOUT_STAND_IN,
    ("collections", "OrderedDict"): ORDERED_DICT,
    **{(module, name): Call(_discard) for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


def parse_metadata(data: bytes, where: str) -> DcpMetadata:
    """Parse the `.metadata` of torch 2.0 or newer without executing any of it.

    Args:
        data: The bytes of the file.
        where: Subject of error messages.

    Raises:
        InputError: It is damaged, or refers to a class that is not allowed in it.
    """
    with without_garbage_collection():
        return _parse(load(data, _ALLOWED_GLOBALS, where), where, len(data))


def _parse(root: object, where: str, nbytes: int) -> DcpMetadata:
    """Parse the unpickled value; `nbytes`, the size of the file, limits the number of chunks and values in it."""
    if not isinstance(root, _Metadata):
        raise InputError(
            f"{where}: expected the metadata of a torch DCP, found a pickled {type(root).__name__}; copy it again"
        )
    fields = vars(root)
    shapes, strings = ShapeCache(), _StringChecker()
    try:
        tensors, objects = _parse_state(fields["state_dict_metadata"], shapes, strings, nbytes)
        storage = _parse_storage(fields["storage_data"], shapes, strings)
        planner_data = _check_planner_data(fields.get("planner_data"), strings, nbytes)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: damaged metadata ({type(error).__name__}: {error!s:.120}); copy it again") from None
    version = fields.get("version")
    return DcpMetadata(tensors, objects, storage, planner_data, version if isinstance(version, str) else None)


@dataclass(slots=True)
class ShapeCache:
    """Cache of checked shapes and regions, because a checkpoint repeats a few of them many thousand times.

    A pickle refers back to a tuple that was one object in memory, so most lookups are by `id`. Ids stay valid because
    the unpickled values and the stored ones outlive the cache.
    """

    _by_id: dict[int, Shape] = field(default_factory=dict)
    _stored: UniqueTuples[Shape] = field(default_factory=UniqueTuples)
    _regions: dict[tuple[int, int], Region] = field(default_factory=dict)
    _faults: dict[int, str | None] = field(default_factory=dict)

    def shape(self, value: Any) -> Shape:
        """Return the stored shape that equals `value`; the caller keeps `value` alive."""
        shape = self._by_id.get(id(value))
        if shape is None:
            shape = self._by_id[id(value)] = self.store(value)
        return shape

    def store(self, value: Any) -> Shape:
        """Return the stored shape that equals `value`, which may be freed afterwards."""
        # Checked before hashing, because hashing a deeply nested tuple could take forever.
        if type(value) is not tuple or len(value) > MAX_DIMS or not _INTEGER_TYPES.issuperset(map(type, value)):
            raise ValueError(_INVALID_SHAPE)
        shape = self._stored.get(value)
        if shape is None:
            if any(not 0 <= size < 1 << MAX_NUMEL_BITS for size in value):
                raise ValueError(_INVALID_SHAPE)
            shape = self._stored.add(value)
        return shape

    def region(self, offsets: Any, sizes: Any) -> Region:
        """Return the stored region with these offsets and sizes, which the caller keeps alive."""
        region = self._regions.get((id(offsets), id(sizes)))
        if region is None:
            begin, extent = self.shape(offsets), self.shape(sizes)
            if len(begin) != len(extent):
                raise ValueError("a chunk has offsets and sizes of different length")
            region = self._regions.get((id(begin), id(extent))) or Region(begin, extent)
            self._regions[id(offsets), id(sizes)] = self._regions[id(begin), id(extent)] = region
        return region

    def fault(self, shape: Shape) -> str | None:
        """Return the reason why a stored shape is invalid, or None if it is valid; see `find_shape_fault`."""
        if id(shape) not in self._faults:
            self._faults[id(shape)] = find_shape_fault(shape)
        return self._faults[id(shape)]


@dataclass(slots=True)
class _StringChecker:
    """Checks that strings can be encoded as UTF-8, each once: a pickle may refer to one of megabytes many times."""

    _checked: set[str] = field(default_factory=set)

    def check(self, value: Any) -> None:
        if type(value) is not str:
            raise TypeError(f"a name is a {type(value).__name__}, not a string")
        if not value.isascii() and value not in self._checked:
            value.encode()  # raises for lone surrogates, which cannot be printed or written
            self._checked.add(value)


def _parse_state(
    state: Any, shapes: ShapeCache, strings: _StringChecker, max_chunks: int
) -> tuple[dict[str, TensorMetadata], tuple[str, ...]]:
    """Parse tensors and objects with at most `max_chunks` chunks: tensors may share one pickled list of chunks."""
    tensors: dict[str, TensorMetadata] = {}
    objects: list[str] = []
    if len(state) > MAX_TENSORS:
        raise ValueError(f"{len(state):,} names, allowed at most {MAX_TENSORS:,}")
    for fqn, value in dict.items(state):
        strings.check(fqn)
        fields = vars(value)
        if type(value) is _TensorStorage:
            dtype = fields["properties"].dtype
            if type(dtype) is not Symbol:
                raise ValueError(f"{fqn!r} has no dtype")
            chunks = []
            max_chunks -= len(fields["chunks"])
            if max_chunks < 0:
                raise ValueError("more chunks than the file has bytes")
            for chunk in fields["chunks"]:
                chunk_fields = vars(chunk)
                chunks.append(shapes.region(chunk_fields["offsets"], chunk_fields["sizes"]))
            size = shapes.shape(fields["size"])
            if (fault := shapes.fault(size)) is not None:
                raise ValueError(f"{fqn!r} has {fault}")
            tensors[fqn] = TensorMetadata(dtype[6:], size, tuple(chunks))  # the name after `torch.`
        elif type(value) is _BytesStorage:
            objects.append(fqn)
        else:
            raise TypeError(f"{fqn!r} is neither a tensor nor an object")
    return tensors, tuple(objects)


def _parse_storage(storage: Any, shapes: ShapeCache, strings: _StringChecker) -> dict[StorageKey, StorageInfo]:
    locations: dict[StorageKey, StorageInfo] = {}
    for index, info in dict.items(storage):
        index_fields = vars(index)
        fqn, offsets = index_fields["fqn"], index_fields.get("offset")
        key = (fqn, None if offsets is None else shapes.shape(offsets))
        fields = vars(info)
        path, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        strings.check(fqn)
        strings.check(path)
        if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length < 1 << 63:
            raise ValueError(f"{fqn!r} has an invalid byte range")
        if key in locations:
            raise ValueError(f"{fqn!r} has two locations for one chunk")
        transforms = fields.get("transform_descriptors")
        if transforms:
            locations[key] = StorageInfo(path, offset, length, _transform_names(transforms))
            continue
        locations[key] = StorageInfo(path, offset, length)
    return locations


def _transform_names(transforms: Any) -> tuple[str, ...]:
    """Return the first eight names, shortened for a message."""
    if not isinstance(transforms, list | tuple):
        raise TypeError("transforms are not a list")
    return tuple(each[:80] if isinstance(each, str) else f"a {type(each).__name__}" for each in transforms[:8])


def _check_planner_data(value: Any, strings: _StringChecker, max_values: int) -> Any:
    """Check `planner_data` level by level before any code recurses into it, and return it.

    Args:
        value: `planner_data` of the writer. A dict is carried into an output, so it must not contain itself.
        strings: Checks the strings in it.
        max_values: Maximum number of values.

    Raises:
        ValueError: It is deeper than `MAX_JSON_DEPTH` levels, or has more than `max_values` values when written out.
    """
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        next_level: list[Any] = []
        for each in level:
            if isinstance(each, str):
                strings.check(str(each))
            elif isinstance(each, dict):
                next_level.extend(each)
                next_level.extend(each.values())
            elif isinstance(each, tuple | list):
                next_level.extend(each)
            if len(next_level) > max_values:
                raise ValueError("planner_data has more values than the file has bytes")
        if not next_level:
            return value
        max_values -= len(next_level)
        level = next_level
    raise ValueError(f"planner_data is nested deeper than {MAX_JSON_DEPTH} levels")
