"""The process group of a run, its mesh, collectives for objects, and errors that are raised on all ranks.

This module chooses backend, device and the rank of each mesh coordinate, and passes them to torch.distributed.
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

from ckptx.errors import CkptxError, EnvironmentProblem, InternalError, PeerFailure, UsageError, exit_code_of
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.processes.rendezvous import is_launched
from ckptx.runtime.torch_private import default_store, drop_group_references
from ckptx.wording import counted

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "tp")  # slowest to fastest: ranks of one tp group are consecutive
DATA_DIMS = ("dp_replicate", "dp_shard")  # ranks that differ along these dims get different data
_TIMEOUT = timedelta(minutes=10)  # of joining the process group, and of each collective
_REPORT_TIMEOUT = timedelta(seconds=5)  # a rank that lost a connection waits so long for a peer's failure report
_FAILURE_REPORT_KEY = "ckptx: failure report"  # in the default store; the value is "EXIT_CODE:rank RANK: MESSAGE"
# Raised by torch 2.11 and 2.13 for NCCL, sockets and stores. Without ConnectionError, which a download may raise.
_CONNECTION_ERRORS = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_GLOO_ERROR_TEXTS = ("/gloo/transport/", "Gloo connectFullMesh failed")

# (sizes of the mesh, device type) -> (default process group when the mesh was made, mesh)
_meshes: dict[tuple[ParallelDims, str], tuple[Any, DeviceMesh]] = {}


class RankContext(NamedTuple):
    """The rank of this process in its group, and its device.

    Attributes:
        rank: Global rank of this process.
        world_size: Number of processes.
        device: Device that this process computes on.
    """

    rank: int
    world_size: int
    device: torch.device


def select_device(requested: str, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """Return the device that `--device` selects.

    Args:
        requested: auto (cuda if there is a GPU for each rank of this machine, else cpu), cpu or cuda.
        local_rank: Index of the GPU on this machine.
        local_ranks: Number of ranks on this machine.

    Raises:
        EnvironmentProblem: The machine has no GPU, or none with this index.
    """
    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and device_count < max(1, local_ranks)):
        return torch.device("cpu")
    if local_rank >= device_count:
        raise EnvironmentProblem(
            f"--device {requested}: requires {counted(local_rank + 1, 'CUDA device')}, this machine has "
            f"{device_count}; use cpu"
        )
    return torch.device("cuda", local_rank)


def count_local_ranks() -> int:
    """Return the number of ranks on this machine: all ranks, unless the launcher states another number."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")


def unused_gpus_note(requested: str, device: torch.device, local_ranks: int) -> str | None:
    """Return the note that a machine has too few GPUs for its ranks, which therefore run on the CPU; else None.

    Args:
        requested: Value of `--device`.
        device: Device that was selected for it.
        local_ranks: Number of ranks on this machine.
    """
    if requested != "auto" or device.type != "cpu" or not torch.cuda.is_available():
        return None
    return (
        f"--device auto: {counted(local_ranks, 'rank')} run on the CPU, because this machine has only "
        f"{counted(torch.cuda.device_count(), 'GPU')}"
    )


@contextmanager
def process_group(
    device: str = "auto", backend: str = "auto", store: dist.Store | None = None, local_ranks: int | None = None
) -> Iterator[RankContext]:
    """Join the process group of this run, and destroy it after the block; a group that exists is used and kept.

    A process that no launcher started is a group of its own.

    Args:
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl; auto is nccl on CUDA and gloo on CPU. Ignored if the group exists.
        store: Store for the rendezvous; None means the store of the launcher, or one in memory without a launcher.
            Ignored if the group exists.
        local_ranks: Number of ranks of this machine that must each have a GPU if auto is to be cuda; None means the
            number that the launcher started.

    Yields:
        Rank, number of ranks and device of this process.

    Raises:
        EnvironmentProblem: The machine does not have the device, or backend nccl is requested but the device is a CPU.
        PeerFailure: Another rank failed before all ranks had joined.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if local_ranks is None:
        local_ranks = count_local_ranks()
    selected_device = select_device(device, int(os.environ.get("LOCAL_RANK", "0")), local_ranks)
    if dist.is_initialized():
        yield RankContext(dist.get_rank(), dist.get_world_size(), selected_device)
        return
    rank_context = RankContext(rank, world_size, selected_device)
    if backend == "auto":
        backend = "nccl" if rank_context.device.type == "cuda" else "gloo"
    if backend == "nccl" and rank_context.device.type != "cuda":
        raise EnvironmentProblem("--backend nccl: requires a CUDA device, but the device of this run is cpu; use gloo")
    if rank_context.device.type == "cuda":
        torch.cuda.set_device(rank_context.device)
    try:
        if store is not None:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        elif is_launched():
            dist.init_process_group(backend, timeout=_TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    except RuntimeError as error:
        if not _is_connection_lost(error):
            raise
        code = EnvironmentProblem.exit_code
        message = f"rank {rank}: another rank exited before all ranks had joined; check its output"
        raise PeerFailure(message, code, is_reported=False) from error
    try:
        yield rank_context
    finally:
        destroy_process_groups()


def destroy_process_groups() -> None:
    """Destroy all process groups and their threads, even those of meshes that a model still refers to.

    A gloo thread that drops its last tensor while the interpreter exits kills the whole process with SIGABRT.
    """
    for _, mesh in _meshes.values():
        drop_group_references(mesh)
    _meshes.clear()
    dist.destroy_process_group()


def mesh_of(dims: ParallelDims, device_type: str) -> DeviceMesh:
    """Return the mesh of these sizes with dims `MESH_DIMS`, without "dp_replicate" if there is one replica.

    Within one process group, the same sizes always give the same mesh object. A mesh has a group per dim, each with
    threads and connections of its own, which last as long as the process group: DTensor caches the groups of a mesh and
    uses them for every equal mesh.

    Raises:
        UsageError: The number of processes is not the number of ranks.
    """
    if dist.get_world_size() != dims.world_size:
        replicas = f" x dp_replicate {dims.dp_replicate}" if dims.dp_replicate > 1 else ""
        raise UsageError(
            f"tp {dims.tp} x pp {dims.pp} x dp_shard {dims.dp_shard}{replicas}: requires {dims.world_size} processes, "
            f"not {dist.get_world_size()}; launch one for each rank, or run without a launcher to start them all"
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
    """Return the index of this rank among the ranks that get different data, from 0; 0 without data dims.

    Args:
        mesh: Mesh from `mesh_of`.
    """
    index = 0
    for name in DATA_DIMS:
        if name in (mesh.mesh_dim_names or ()):
            index = index * mesh[name].size() + mesh[name].get_local_rank()
    return index


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise an error on all ranks if the block failed on any of them.

    A rank that failed raises its own error, every other rank that of the lowest rank that failed. An exception that is
    neither a `CkptxError` nor a KeyboardInterrupt is raised as an `InternalError`.

    Args:
        group: Group of all ranks for the exchange; None means the default group, which only the main thread may use.
    """
    error: BaseException | None = None
    try:
        yield
    except (CkptxError, KeyboardInterrupt) as caught:
        error = caught
    except Exception as caught:  # raised on every rank as an internal error
        error = InternalError(f"{type(caught).__name__}: {caught}; please report this")
        error.__cause__ = caught
    errors = all_gather_object(None if error is None else (type(error), str(error)), group)
    if error is not None:
        raise error
    first = next((each for each in errors if each is not None), None)
    if first is not None:
        raise first[0](first[1])


@contextmanager
def report_failure_to_peers() -> Iterator[None]:
    """Report an error in the block to ranks that wait for this one, as pipeline stages do, and raise it here.

    Raises:
        PeerFailure: The block failed because another rank had failed; the message is that of the first rank that
            reported an error.
        Exception: The error of this rank, if it is the first that reports one, or if no other rank reports one in 5
            seconds.
    """
    try:
        yield
    except Exception as error:
        store, report = default_store(), None
        with suppress(Exception):  # the store may be gone as well
            if _is_connection_lost(error) or store.check([_FAILURE_REPORT_KEY]):
                store.wait([_FAILURE_REPORT_KEY], _REPORT_TIMEOUT)
                report = store.get(_FAILURE_REPORT_KEY).decode(errors="replace").split(":", 1)
            else:
                store.set(_FAILURE_REPORT_KEY, f"{exit_code_of(error)}:rank {dist.get_rank()}: {error}")
        if report is not None:
            raise PeerFailure(report[1], int(report[0]), is_reported=False) from error
        raise


def _is_connection_lost(error: BaseException) -> bool:
    """Return True for an error that shows, by itself or its cause, that another rank is lost.

    torch has classes for errors of sockets, stores and NCCL. gloo raises a plain RuntimeError ("Connection closed by
    peer", "Read error", "Timed out waiting") that names the place in gloo's source; that place, or torch's prefix when
    ranks connect, is all that distinguishes it from an error of the model. A pipeline stage raises another RuntimeError
    from it.
    """
    if isinstance(error, _CONNECTION_ERRORS) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in _GLOO_ERROR_TEXTS)
    ):
        return True
    return error.__cause__ is not None and _is_connection_lost(error.__cause__)


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks in the order of their ranks, on every rank; `group` as in `raise_on_all_ranks`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def broadcast_object(value: Any) -> Any:
    """Return the value of rank 0, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def broadcast(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, rank_context: RankContext
) -> torch.Tensor:
    """Return a tensor of rank 0 on every rank.

    Args:
        tensor: The tensor on rank 0. None on other ranks, or a tensor to receive into, which is overwritten.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        rank_context: Rank and device of this process.
    """
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=rank_context.device)
    tensor = tensor.contiguous()
    if rank_context.world_size > 1:
        dist.broadcast(tensor, src=0)
    return tensor
