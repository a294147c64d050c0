"""Pickled FSDP state dicts put together value by value, so that each value can be one that torch would never write."""

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
    """A global."""

    module: str
    name: str


@dataclass(frozen=True)
class Object:
    """An object of a class, built with arguments, its state set."""

    kind: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class Called:
    """The result of a function."""

    function: Name
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Storage:
    """A float32 storage of an archive, by its persistent id."""

    key: str
    numel: int


class _Pickler(pickle._Pickler):
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        write = self.write  # type: ignore[attr-defined]
        if isinstance(obj, Name):
            write(f"c{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Object | Called):
            self.save(obj.kind if isinstance(obj, Object) else obj.function)
            self.save(obj.arguments)
            write(b"\x81" if isinstance(obj, Object) else b"R")
            if isinstance(obj, Object) and obj.state is not None:
                self.save(obj.state)
                write(b"b")
        elif isinstance(obj, Storage):
            self.save(("storage", Name("torch", "FloatStorage"), obj.key, "cpu", obj.numel))
            write(b"Q")
        else:
            super().save(obj, save_persistent_id)


def pickled(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 2).dump(value)
    return out.getvalue()


@dataclass
class Archive:
    """One archive: storages as they are added, then the state dict."""

    storages: list[bytes] = field(default_factory=list)

    def tensor(self, values: np.ndarray[Any, Any]) -> Called:
        """A float32 tensor in a storage of its own."""
        values = np.ascontiguousarray(values, np.float32)
        self.storages.append(values.tobytes())
        strides = tuple(int(prod(values.shape[at + 1 :])) for at in range(values.ndim))
        storage = Storage(str(len(self.storages) - 1), values.size)
        arguments = storage, 0, values.shape, strides, False, Called(Name("collections", "OrderedDict"))
        return Called(Name("torch._utils", "_rebuild_tensor_v2"), arguments)

    def write(self, path: Path, state: Any) -> None:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", pickled(state))
            file.writestr("archive/byteorder", "little")
            for key, data in enumerate(self.storages):
                file.writestr(f"archive/data/{key}", data)
            file.writestr("archive/version", "3\n")


def placement(kind: str, **state: Any) -> Object:
    return Object(Name(f"{_TENSOR}.placement_types", kind), (), state)


def shard(dim: int) -> Object:
    return placement("Shard", dim=dim)


def mesh(sizes: tuple[int, ...], coordinate: Any, rank: Any = None, **state: Any) -> Object:
    layout = Object(Name("torch.distributed._mesh_layout", "_MeshLayout"), (), {"shape": sizes, "stride": sizes})
    known = {"_layout": layout, "_coordinate_on_dim": coordinate, "_rank": rank, **state}
    return Object(Name("torch.distributed.device_mesh", "DeviceMesh"), (), known)


def dtensor(shape: Any, local: Any, mesh: Any, placements: Any) -> Called:
    spec = Object(Name(f"{_TENSOR}._dtensor_spec", "DTensorSpec"), (), {"mesh": mesh, "placements": placements})
    kind = Name(_TENSOR, "DTensor")
    rebuilt = kind, Name("torch", "float32"), shape, (1,), 0, None, None, False
    wrapper = Name("torch._utils", "_rebuild_wrapper_subclass")
    state = (None, {"_local_tensor": local, "_spec": spec})
    return Called(Name("torch._tensor", "_rebuild_from_type_v2"), (wrapper, kind, rebuilt, state))
