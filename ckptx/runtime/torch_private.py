"""All private names of torch that ckptx uses.

    classes and functions   imported from here, see `_NAMES`
    attributes of objects   read by one function each, such as `local_tensor`

Checked with torch 2.11.0, 2.13.0 and 2.14.1. A name is looked up when it is first used. With a torch that lacks it,
commands that use it fail with an `EnvironmentProblem` that states the name and the version of torch; all others work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptx.errors import EnvironmentProblem

_TESTED_VERSIONS = ("2.11", "2.14")
_FAKE = "torch._subclasses.fake_tensor"
_CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_BACKWARD = "torch.distributed.pipelining._backward"
_CPU = torch.device("cpu")

# Name in this module -> full name in torch.
_NAMES = {
    # Tensors with a shape and without storage, for `forecast`.
    "FakeTensor": f"{_FAKE}.FakeTensor",
    "FakeTensorMode": f"{_FAKE}.FakeTensorMode",
    "unset_fake_temporarily": f"{_FAKE}.unset_fake_temporarily",
    "DataDependentOutputException": f"{_FAKE}.DataDependentOutputException",
    "DynamicOutputShapeException": f"{_FAKE}.DynamicOutputShapeException",
    # The store for process groups of the backend "fake", which have any size and one real process.
    "FakeStore": "torch.testing._internal.distributed.fake_pg.FakeStore",
    # The hook for every operation, and functions for nested arguments.
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
    "tree_map_only": "torch.utils._pytree.tree_map_only",
    # The placement of a shard made of several parts of a dim, and collectives with gradients.
    "StridedShard": "torch.distributed.tensor.placement_types._StridedShard",
    "functional_collectives": "torch.distributed._functional_collectives",
    # Activation checkpointing as a module around a layer.
    "CheckpointImpl": f"{_CHECKPOINT}.CheckpointImpl",
    "CheckpointWrapper": f"{_CHECKPOINT}.CheckpointWrapper",
    "checkpoint_wrapper": f"{_CHECKPOINT}.checkpoint_wrapper",
    # Separate gradients of inputs and of weights, as in zero-bubble schedules.
    "stage_backward_input": f"{_BACKWARD}.stage_backward_input",
    "stage_backward_weight": f"{_BACKWARD}.stage_backward_weight",
    # The base class of all dropout modules.
    "DropoutNd": "torch.nn.modules.dropout._DropoutNd",
}


def __getattr__(name: str) -> Any:
    """Find one of `_NAMES` in torch when it is first used.

    Raises:
        EnvironmentProblem: This version of torch does not have it.
    """
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _find(_NAMES[name])


@cache
def _find(path: str) -> Any:
    """Return a function, class or module of torch by its full name.

    Raises:
        EnvironmentProblem: This version of torch does not have it.
    """
    try:
        return resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise _missing_name_error(path) from error


def _attribute(value: Any, name: str) -> Any:
    """Return a private attribute of an object of torch.

    Raises:
        EnvironmentProblem: This version of torch does not have it.
    """
    try:
        return getattr(value, name)
    except AttributeError as error:
        raise _missing_name_error(f"{type(value).__name__}.{name}") from error


def _missing_name_error(name: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"torch {torch.__version__}: has no {name}, which ckptx uses; install a torch from {_TESTED_VERSIONS[0]} to "
        f"{_TESTED_VERSIONS[1]}, or a newer ckptx"
    )


# ------------------------------------------------------------------------------------------------------------- tensors


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, without autograd; any other tensor is returned unchanged.

    `DTensor.to_local` returns a new tensor each time, which cannot be compared by identity.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    found: Tensor = _attribute(tensor, "_local_tensor")
    return found


def dtensor_spec(tensor: DTensor) -> Any:
    """Return mesh, placements, shape and strides of a DTensor as one value."""
    return _attribute(tensor, "_spec")


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that is equal for two storage objects if and only if they are the same memory.

    `data_ptr` cannot serve as this key: it is 0 for every storage without memory.
    """
    found: int = _attribute(storage, "_cdata")
    return found


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd treats a tensor as a view of another one."""
    return bool(_attribute(tensor, "_is_view")())


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype by a tensor with one element, in place, in one kernel."""
    _find("torch._foreach_mul_")(tensors, factor)


def compute_norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the norm of each of several tensors of one device and dtype, computed in `dtype` in one kernel."""
    return list(_find("torch._foreach_norm")(tensors, norm_type, dtype=dtype))


def free_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS has on all GPUs; the next matrix product allocates its own again.

    They are memory of torch's allocator. A torch that was built without CUDA lacks the function, and needs none.
    """
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()


# ---------------------------------------------------------------------------------------------------------- operations


def get_schema(operation: Any) -> Any:
    """Return the schema of an operation: its name, results and mutated arguments.

    Args:
        operation: Overload that `__torch_dispatch__` received.

    Returns:
        None for a higher-order operation, which has no schema.
    """
    try:
        return operation._schema
    except AttributeError:
        if isinstance(operation, type(torch.ops.aten.mm.default)):
            raise _missing_name_error("OpOverload._schema") from None
        return None


def get_overload_packet(operation: Any) -> Any:
    """Return the packet of an operation's overloads: `aten.mm` for `aten.mm.out`."""
    return _attribute(operation, "_overloadpacket")


def disable_dispatch() -> Any:
    """Return a context manager in which no dispatch mode is called."""
    return _find("torch._C._DisableTorchDispatch")()


def make_fake_tensor(meta_tensor: Tensor, template: Any) -> Any:
    """Return a fake tensor with the shape and the storage of a tensor on the meta device.

    The constructor of `FakeTensor` gives the same result and takes several times as long.

    Args:
        meta_tensor: Tensor without a gradient.
        template: Fake tensor of the mode and device that the result gets; the device is the CPU, and its `constant`
            (a known value) is None.
    """
    fake_tensor = _find("torch.Tensor._make_subclass")(
        type(template), meta_tensor, False, dispatch_device=True, device_for_backend_keys=_CPU
    )
    _find("torch._C._set_throw_on_mutable_data_ptr")(fake_tensor)
    fake_tensor.__dict__.update(template.__dict__)
    return fake_tensor


@contextmanager
def hide_dtensor_shape_inference() -> Iterator[None]:
    """Hide from dispatch modes the fake tensors with which DTensor infers the shape of a result.

    DTensor infers a shape once per operation and input shape in a process, on fake whole tensors, which real training
    never allocates.
    """
    propagator = _find("torch.distributed.tensor._sharding_prop.ShardingPropagator")
    disable_current_modes = _find("torch.utils._python_dispatch._disable_current_modes")
    name = "_propagate_tensor_meta_non_cached"
    infer_shape = _attribute(propagator, name)

    def infer_shape_without_modes(self: Any, *args: Any) -> Any:
        with disable_current_modes():
            return infer_shape(self, *args)

    setattr(propagator, name, infer_shape_without_modes)
    try:
        yield
    finally:
        setattr(propagator, name, infer_shape)


def clear_sharding_caches() -> None:
    """Clear DTensor's caches of the shardings of results in this process.

    Its cached results refer to the mesh for which they were computed. A later mesh of the same shape has other process
    groups.
    """
    _find("torch.distributed.tensor.debug._clear_sharding_prop_cache")()


def list_compute_intensive_operations() -> Iterable[Any]:
    """Return the operations that torch's own partitioner never recomputes, as packets."""
    operations = _find("torch._functorch.partitioners.get_default_op_list")()
    found: Iterable[Any] = _attribute(operations, "compute_intensive_ops")
    return found


def use_first_compiled_graph() -> None:
    """Make dynamo try compiled graphs in the order in which they were compiled, for the rest of the process.

    By default the most recently used one is tried first. Once a second microbatch has compiled a graph with dynamic
    shapes, that graph would be used to recompute the first microbatch, whose saved results lack the sizes that it
    requires.
    """
    _find("torch._C._dynamo.eval_frame._set_lru_cache")(False)


# ------------------------------------------------------------------------------------------------------------ autograd


def current_backward_id() -> int | None:
    """Return the number of the backward pass that this thread is in; None outside of one."""
    graph_task_id = int(_find("torch._C._current_graph_task_id")())
    return None if graph_task_id == -1 else graph_task_id


def next_node_number() -> int:
    """Return the number of the next autograd node of this thread; numbers increase by one."""
    return int(_find("torch.autograd._get_sequence_nr")())


def running_node_number() -> int | None:
    """Return the number of the autograd node whose backward function is running; None if no node is running."""
    node = _find("torch._C._current_autograd_node")()
    return None if node is None else int(_attribute(node, "_sequence_nr")())


# ------------------------------------------------------------------------------------------------------------- modules


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the call that `nn.Module.compile` compiled; None for a module that is not compiled."""
    found: Callable[..., Any] | None = _attribute(module, "_compiled_call_impl")
    return found


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace the call that `compiled_call` returns; with None the module runs uncompiled."""
    compiled_call(module)  # raises if this version of torch has no such attribute
    module._compiled_call_impl = call


def apply_to_tensors(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by the result of a function, as `nn.Module.to` does.

    FSDP2 overrides `nn.Module._apply`, to update its own references.
    """
    _attribute(module, "_apply")(transform)


# ----------------------------------------------------------------------------------------------------------- processes


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return _find("torch.distributed.distributed_c10d._get_default_store")()


class _SendWork:
    """The work that `isend` returns, which keeps its tensor alive as the works of gloo and NCCL do.

    Attributes:
        tensor: Tensor that is sent.
    """

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work, self.tensor = work, tensor

    def wait(self, *timeout: Any) -> bool:
        """Wait until the tensor is sent. Even then, it is kept as long as this object exists."""
        return bool(self._work.wait(*timeout))


@contextmanager
def keep_sent_tensors() -> Iterator[None]:
    """Make the work that `isend` returns keep its tensor, within the block.

    The works of gloo and NCCL keep a sent tensor until they are deleted, and those of a fake process group do not. A
    pipeline schedule keeps works of sends for long: `GPipe` until the step ends, `1F1B` until the next send of the same
    direction, and schedules with several stages per rank until the step ends.
    """
    module = _find("torch.distributed.distributed_c10d")
    isend = _attribute(module, "isend")

    def isend_and_keep(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = isend(tensor, *args, **kwargs)
        return None if work is None else _SendWork(work, tensor)

    # P2POp accepts only the `isend` of its own module, and schedules pass `dist.isend`: both must be the new one.
    module.isend = dist.isend = isend_and_keep
    try:
        yield
    finally:
        module.isend = dist.isend = isend


def drop_group_references(mesh: DeviceMesh) -> None:
    """Drop the references of a mesh to its process groups, so that the groups are freed even if the mesh is kept.

    Meshes of torch 2.11 have no `_pg_registry`: they look up groups by name, and hold no reference to them.
    """
    getattr(mesh, "_pg_registry", {}).clear()
