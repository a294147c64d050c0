"""The processes of a run: their group, their mesh, and what they say to each other.

torch.distributed does all of it; here is only which backend, which device, and which rank is where.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckptx.errors import CkptxError, Defect, EnvironmentProblem, PeerFailure, UsageError, exit_code_of
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.processes.rendezvous import is_launched
from ckptx.runtime.torch_private import default_store, forget_groups

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "tp")  # row-major, so that a rank is where `ParallelDims` says
DATA_DIMS = ("dp_replicate", "dp_shard")  # along which ranks see other data
_TIMEOUT = timedelta(minutes=10)
_PATIENCE = timedelta(seconds=5)
_LAST_WORDS = "ckptx: last words"
# What torch 2.11 and 2.13 raise: for NCCL, for a socket, for a store. No ConnectionError, which a download may raise.
_LOST = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_GLOO = ("/gloo/transport/", "Gloo connectFullMesh failed")

_meshes: dict[tuple[ParallelDims, str], tuple[Any, DeviceMesh]] = {}  # with the world that each belongs to


class RankContext(NamedTuple):
    """Where this process is.

    Attributes:
        rank: Among all processes.
        world_size: Their number.
        device: What it computes on.
    """

    rank: int
    world_size: int
    device: torch.device


def device_of(wanted: str, local_rank: int = 0) -> torch.device:
    """The device that `--device` asks for.

    Raises:
        EnvironmentProblem: There is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda or local_rank >= torch.cuda.device_count():
        found = torch.cuda.device_count() if has_cuda else 0
        raise EnvironmentProblem(f"--device {wanted}: found {found} CUDA devices, needed {local_rank + 1}; use cpu")
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(
    device: str = "auto", backend: str = "auto", store: dist.Store | None = None
) -> Iterator[RankContext]:
    """This process in its group, which ends with the block unless it was there before.

    A process that nobody launched is a group of its own.

    Args:
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl; auto is nccl on CUDA and gloo on CPU.
        store: Where the ranks meet; the one of whoever launched them when left out.

    Raises:
        EnvironmentProblem: There is no such device or backend.
        PeerFailure: Another rank is gone before all have met.
    """
    if dist.is_initialized():
        yield RankContext(
            dist.get_rank(), dist.get_world_size(), device_of(device, int(os.environ.get("LOCAL_RANK", "0")))
        )
        return
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    process = RankContext(rank, world_size, device_of(device, int(os.environ.get("LOCAL_RANK", "0"))))
    if backend == "auto":
        backend = "nccl" if process.device.type == "cuda" else "gloo"
    if backend == "nccl" and process.device.type != "cuda":
        raise EnvironmentProblem("--backend nccl: needs CUDA devices, found none; use gloo")
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
    try:
        if store is not None:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        elif is_launched():
            dist.init_process_group(backend, timeout=_TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        code = EnvironmentProblem.exit_code
        said = f"rank {rank}: another rank was gone before all had met; look at its output"
        raise PeerFailure(said, code, is_said=False) from error
    try:
        yield process
    finally:
        end_groups()


def end_groups() -> None:
    """Ends the world, and the threads of its groups, also of those in a mesh that a model still refers to.

    A thread of gloo that drops its last tensor while the interpreter ends takes the whole process down with SIGABRT.
    """
    for _, mesh in _meshes.values():
        forget_groups(mesh)
    _meshes.clear()
    dist.destroy_process_group()


def mesh_of(dims: ParallelDims, device_type: str) -> DeviceMesh:
    """The mesh of a layout, with dims `MESH_DIMS`, or without "dp_replicate" where there is one replica; in one world
    the same one each time.

    Each of its groups has threads and connections of its own. They cannot end before the world does: DTensor remembers
    the groups of a mesh for every mesh that is equal to it.

    Raises:
        UsageError: There are not as many processes as ranks.
    """
    if dist.get_world_size() != dims.world_size:
        replicas = f" x dp_replicate {dims.dp_replicate}" if dims.dp_replicate > 1 else ""
        raise UsageError(
            f"tp {dims.tp} x pp {dims.pp} x dp_shard {dims.dp_shard}{replicas}: found {dist.get_world_size()} "
            f"processes, needed {dims.world_size}; start one for each rank, or none and they are started for you"
        )
    world, mesh = _meshes.get((dims, device_type), (None, None))
    if mesh is None or world is not dist.group.WORLD:
        sizes = dict(zip(MESH_DIMS, (dims.pp, dims.dp_replicate, dims.dp_shard, dims.tp), strict=True))
        if dims.dp_replicate == 1:  # a group of one rank has threads, too
            del sizes["dp_replicate"]
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _meshes[dims, device_type] = dist.group.WORLD, mesh
    return mesh


def data_index(mesh: DeviceMesh) -> int:
    """Which of the ranks that see other data this one is."""
    index = 0
    for name in DATA_DIMS:
        if name in (mesh.mesh_dim_names or ()):
            index = index * mesh[name].size() + mesh[name].get_local_rank()
    return index


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """What one rank cannot do fails on all of them, with the words of the first that could not.

    Args:
        group: Of all ranks, through which they tell each other; None is the default one, which is the main thread's.
    """
    error: BaseException | None = None
    try:
        yield
    except (CkptxError, KeyboardInterrupt) as caught:
        error = caught
    except Exception as caught:  # told to every rank, and raised there as a defect
        error = Defect(f"{type(caught).__name__}: {caught}; please report this")
        error.__cause__ = caught
    said = all_gather_object(None if error is None else (type(error), str(error)), group)
    if error is not None:
        raise error
    first = next((each for each in said if each is not None), None)
    if first is not None:
        raise first[0](first[1])


@contextmanager
def report_failure_to_peers() -> Iterator[None]:
    """What one rank cannot do while others wait for it, as stages of a pipeline do: it says why, and ends.

    The others notice that it is gone, and say its words.
    """
    try:
        yield
    except Exception as error:
        store, said = default_store(), None
        with suppress(Exception):  # the store may be gone as well
            if _is_lost(error) or store.check([_LAST_WORDS]):
                store.wait([_LAST_WORDS], _PATIENCE)
                said = store.get(_LAST_WORDS).decode(errors="replace").split(":", 1)
            else:
                store.set(_LAST_WORDS, f"{exit_code_of(error)}:rank {dist.get_rank()}: {error}")
        if said is not None:
            raise PeerFailure(said[1], int(said[0]), is_said=False) from error
        raise


def _is_lost(error: BaseException) -> bool:
    """Return True for an error that says, itself or by its cause, that another rank is gone or does not answer.

    torch has classes for what sockets, the store and NCCL say. gloo says it in a plain RuntimeError ("Connection closed
    by peer", "Read error", "Timed out waiting"), with the place in gloo's source that met it: this place, or what torch
    puts before it when ranks meet, is all that tells it from an error of the model. A stage of a pipeline raises
    another RuntimeError from it.
    """
    if isinstance(error, _LOST) or (isinstance(error, RuntimeError) and any(each in str(error) for each in _GLOO)):
        return True
    return error.__cause__ is not None and _is_lost(error.__cause__)


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of each rank, on every rank; `group` as in `together`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def broadcast_object(value: Any) -> Any:
    """The value of rank 0."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def broadcast(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, process: RankContext
) -> torch.Tensor:
    """A tensor of rank 0."""
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=process.device)
    tensor = tensor.contiguous()
    if process.world_size > 1:
        dist.broadcast(tensor, src=0)
    return tensor
