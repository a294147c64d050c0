"""Build pickled FSDP state dicts value by value, including values that torch never writes."""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

_TENSOR = "torch.distributed.tensor"


@dataclass(frozen=True)
class Name:
    """A pickled global, such as a class or function."""

    module: str
    name: str


@dataclass(frozen=True)
class Object:
    """A pickled object: its class, arguments and state."""

    kind: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class FunctionCall:
    """A pickled call of a function."""

    function: Name
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Storage:
    """A reference to a storage of the archive, by its persistent id."""

    key: str
    numel: int
    kind: str


class _Pickler(pickle._Pickler):
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        write = self.write  # type: ignore[attr-defined]
        if isinstance(obj, Name):
            write(f"c{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Object | FunctionCall):
            self.save(obj.kind if isinstance(obj, Object) else obj.function)
            self.save(obj.arguments)
            write(b"\x81" if isinstance(obj, Object) else b"R")
            if isinstance(obj, Object) and obj.state is not None:
                self.save(obj.state)
                write(b"b")
        elif isinstance(obj, Storage):
            self.save(("storage", Name("torch", obj.kind), obj.key, "cpu", obj.numel))
            write(b"Q")
        else:
            super().save(obj, save_persistent_id)


def pickle_value(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 2).dump(value)
    return out.getvalue()


@dataclass
class Archive:
    """A torch archive: storages in the order in which they are added, then the state dict."""

    storages: list[bytes] = field(default_factory=list)

    def tensor(self, values: np.ndarray[Any, Any]) -> FunctionCall:
        """Add a float32 tensor with a separate storage."""
        values = np.ascontiguousarray(values, np.float32)
        return self.stored("FloatStorage", values.shape, values.tobytes())

    def stored(self, kind: str, shape: tuple[int, ...], data: bytes) -> FunctionCall:
        """Add a row-major tensor with a separate storage of a given type, such as "BFloat16Storage"."""
        self.storages.append(data)
        strides = tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
        storage = Storage(str(len(self.storages) - 1), prod(shape), kind)
        arguments = storage, 0, shape, strides, False, FunctionCall(Name("collections", "OrderedDict"))
        return FunctionCall(Name("torch._utils", "_rebuild_tensor_v2"), arguments)

    def write(self, path: Path, state: Any) -> None:
        path.write_bytes(self.contents(state))

    def contents(self, state: Any) -> bytes:
        """Return the archive; its bytes are always the same."""
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as file:
            file.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle_value(state))
            file.writestr(zipfile.ZipInfo("archive/byteorder"), "little")
            for key, data in enumerate(self.storages):
                file.writestr(zipfile.ZipInfo(f"archive/data/{key}"), data)
            file.writestr(zipfile.ZipInfo("archive/version"), "3\n")
        return stream.getvalue()


def placement(kind: str, **state: Any) -> Object:
    return Object(Name(f"{_TENSOR}.placement_types", kind), (), state)


def shard(dim: int) -> Object:
    return placement("Shard", dim=dim)


def mesh(sizes: tuple[int, ...], coordinate: Any, rank: Any = None, **state: Any) -> Object:
    layout = Object(Name("torch.distributed._mesh_layout", "_MeshLayout"), (), {"shape": sizes, "stride": sizes})
    known = {"_layout": layout, "_coordinate_on_dim": coordinate, "_rank": rank, **state}
    return Object(Name("torch.distributed.device_mesh", "DeviceMesh"), (), known)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and all(isinstance(size, int) for size in shape)


def dtensor(shape: Any, local: Any, mesh: Any, placements: Any, dtype: str = "float32") -> FunctionCall:
    spec = Object(Name(f"{_TENSOR}._dtensor_spec", "DTensorSpec"), (), {"mesh": mesh, "placements": placements})
    kind = Name(_TENSOR, "DTensor")
    strides = tuple(prod(shape[at + 1 :]) for at in range(len(shape))) if _is_shape(shape) else (1,)
    strided = FunctionCall(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    device = FunctionCall(Name("torch", "device"), ("cpu",))
    rebuilt = kind, Name("torch", dtype), shape, strides, 0, strided, device, False
    wrapper = Name("torch._utils", "_rebuild_wrapper_subclass")
    state = (None, {"_local_tensor": local, "_spec": spec})
    return FunctionCall(Name("torch._tensor", "_rebuild_from_type_v2"), (wrapper, kind, rebuilt, state))
