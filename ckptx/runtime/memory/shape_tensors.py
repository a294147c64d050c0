"""Tensors without storage, on which a training step runs as it would on real ones.

Floating-point tensors are fake: they have a shape, a dtype, strides and an autograd graph, and no memory. Small integer
and boolean tensors, and results that depend on these alone, are real, because models branch on them: the padding of a
sequence, the size of an image, the index of the next microbatch. So the same code runs as in training, masks included.
Code that reads a value of a fake tensor (the expert that a router selects) raises an error that names the operation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptx.runtime.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    disable_dispatch,
    get_overload_packet,
    get_schema,
    hide_dtensor_shape_inference,
    make_fake_tensor,
    storage_key,
    tree_leaves,
    unset_fake_temporarily,
)

OperationCallback = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]

_PLAIN_TENSOR_TYPES = (Tensor, FakeTensor, torch.nn.Parameter)
_REAL_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
_MAX_REAL_NUMEL = 2**22  # elements of a real tensor: ids and masks of a microbatch, and results of these
_MAX_CREATED_NUMEL = 64  # floating-point elements of a real tensor without inputs: counters of an optimizer
_META = torch.device("meta")


def _overloads_of_packets(*packets: Any) -> frozenset[Any]:
    return frozenset(getattr(packet, each) for packet in packets for each in packet.overloads())


def _aten_overloads(*names: str) -> frozenset[Any]:
    return _overloads_of_packets(*(getattr(torch.ops.aten, name) for name in names))


_CPU = torch.device("cpu")
_DEVICE_QUERY = torch.ops.prim.device.default
_INDEXING_OPS = (
    torch.ops.aten.index,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten._unsafe_index,
)
# Operations whose result is an argument itself, although their schemas do not state this.
_ARGUMENT_RETURNING_OPS = _overloads_of_packets(torch.ops._c10d_functional.wait_tensor)
# Views of one tensor: their kernels are the same for all devices and only compute a shape.
_VIEW_OPS = _aten_overloads(
    "view", "_unsafe_view", "detach", "alias", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice",
    "select", "as_strided",
)  # fmt: skip
_IN_PLACE_OPS = _aten_overloads(
    "mul_", "add_", "sub_", "div_", "addcmul_", "addcdiv_", "lerp_", "zero_", "fill_", "copy_"
)
_PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)
# Kernels that call `contiguous()` first, on a CPU and on CUDA.
_CONTIGUOUS_INPUT_OPS = (
    torch.ops.aten._softmax, torch.ops.aten._log_softmax, torch.ops.aten._softmax_backward_data,
    torch.ops.aten._log_softmax_backward_data, torch.ops.aten.native_layer_norm,
)  # fmt: skip


class _TensorLayout(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _ResultLayout(NamedTuple):
    """Layout of the result of an operation.

    Attributes:
        tensors: Layouts of its tensors.
        container: Type of a result that is a list or tuple of tensors; None for a single tensor.
    """

    tensors: tuple[_TensorLayout, ...]
    container: type | None


# Facts about operations that depend on the layouts of their arguments alone, so that all modes of a process share them.
_layouts_of_results: dict[Hashable, _ResultLayout] = {}
_operations_with_small_results: set[Hashable] = set()  # keys of operations on real tensors with a real result


@contextmanager
def _silence_torch_log() -> Iterator[None]:
    """Keep torch from logging the traceback of each operation whose shapes do not fit; the error is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class ShapeTensors(TorchDispatchMode):  # type: ignore[misc]  # torch types its base as Any
    """A dispatch mode in which floating-point results have a shape and no memory.

    Tensors on the meta device stay there; given storage (`empty_like(device=...)`), they become fake tensors.
    """

    def __init__(self, on_operation: OperationCallback | None = None) -> None:
        """Create the mode; operations are changed only within its `with` block.

        Args:
            on_operation: Called after every operation on plain tensors with the overload, its positional and keyword
                arguments, and its result; None calls nothing.
        """
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake.cache_enabled = False  # this mode caches results itself, at less cost
        self._template = FakeTensor(self._fake, torch.empty(0, device=_META), _CPU)
        self._on_operation = on_operation
        self._exit_stack = ExitStack()

    def __enter__(self) -> ShapeTensors:
        self._exit_stack.enter_context(_silence_torch_log())
        self._exit_stack.enter_context(hide_dtensor_shape_inference())
        self._exit_stack.enter_context(self._fake)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._exit_stack.__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_QUERY and isinstance(args[0], FakeTensor):  # called as often as all other operations
            return args[0].fake_device
        if any(each not in _PLAIN_TENSOR_TYPES for each in types):
            return NotImplemented  # a DTensor dispatches to plain tensors, which come here
        kwargs = kwargs or {}
        if get_overload_packet(func) in _CONTIGUOUS_INPUT_OPS:
            args = [self._make_contiguous(each) for each in args]
        out = self._compute(func, args, kwargs)
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs, out)
        return out

    def _make_contiguous(self, argument: Any) -> Any:
        """Return an argument of a kernel that copies non-contiguous inputs, and record that copy."""
        if not isinstance(argument, FakeTensor) or argument.is_contiguous():
            return argument
        clone, options = torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}
        copy = clone(argument, **options)
        if self._on_operation is not None:
            self._on_operation(clone, (argument,), options, copy)
        return copy

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in _VIEW_OPS and type(args[0]) is FakeTensor and args[0].fake_device == _CPU:
            with disable_dispatch():
                view = func(*args, **kwargs)
            return make_fake_tensor(view, self._template)
        if func in _IN_PLACE_OPS and type(args[0]) is FakeTensor:
            return args[0]
        key = _cache_key(func, args, kwargs)
        layout = None if key is None else _layouts_of_results.get(key)
        if layout is not None:
            return self._create_result(layout)
        result = self._compute_uncached(func, args, kwargs)
        if key is not None:
            _store_result_layout(key, result)
        return result

    def _create_result(self, layout: _ResultLayout) -> Any:
        if layout.container is None:
            return self._create(layout.tensors[0])
        return layout.container(map(self._create, layout.tensors))

    def _create(self, layout: _TensorLayout) -> FakeTensor:
        with disable_dispatch():
            meta_tensor = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META)
        return make_fake_tensor(meta_tensor, self._template)

    def _compute_uncached(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = list(iter_tensors(args, kwargs))
        if any(isinstance(each, FakeTensor) for each in tensors):
            if get_overload_packet(func) in _INDEXING_OPS:
                return _index_tensor(func, args, kwargs)
            if get_overload_packet(func) == torch.ops._c10d_functional.wait_tensor:
                return args[0]  # the same object, like for real tensors; a fake result would be a second tensor
            if get_overload_packet(func) == torch.ops.aten._grouped_mm and args[0].dtype != torch.bfloat16:
                return _grouped_product(*args, **kwargs)
            return func(*args, **kwargs)
        if any(each.device == _META for each in tensors):
            return self._compute_on_meta(func, args, kwargs, tensors)
        if kwargs.get("device") == _META:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self._compute_real(func, args, kwargs, max_numel=_MAX_REAL_NUMEL if tensors else _MAX_CREATED_NUMEL)

    def _compute_on_meta(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        device = kwargs.get("device")
        if device is not None and device != _META and len(tensors) == 1:
            like = tensors[0]
            return torch.ops.aten.empty_strided.default(
                like.shape, like.stride(), dtype=kwargs.get("dtype") or like.dtype, device=device
            )
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _compute_real(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], max_numel: int) -> Any:
        """Compute on real tensors; if the result is large, return a fake tensor of its shape instead.

        Args:
            func: Overload that `__torch_dispatch__` received.
            args: Positional arguments.
            kwargs: Keyword arguments.
            max_numel: Maximum number of elements of a real floating-point result; for other dtypes it is
                `_MAX_REAL_NUMEL`.
        """
        if _returns_tensors(func) and not get_schema(func).is_mutable and not _is_view(func):
            key = _key_of_real_operation(func, args, kwargs)
            layout = None if key is None else _layouts_of_results.get(key)
            if layout is not None:
                return self._create_result(layout)
            if key not in _operations_with_small_results:
                try:
                    fake_result = func(*args, **kwargs)
                except Exception:  # its shape depends on values, which are known
                    fake_result = None
                if any(_is_large(each, max_numel) for each in iter_tensors((fake_result,), {})):
                    if key is not None:
                        _store_result_layout(key, fake_result)
                    return fake_result
                if key is not None:
                    _operations_with_small_results.add(key)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


# torch wraps the method to keep dynamo out of it, which takes longer than most operations. Nothing is compiled here.
ShapeTensors.__torch_dispatch__ = getattr(  # type: ignore[method-assign]
    ShapeTensors.__torch_dispatch__, "__wrapped__", ShapeTensors.__torch_dispatch__
)


def _cache_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Return a key that determines the layout of a result.

    Returns:
        None if the layout may depend on values, if the result may be an argument or a view of one, if no argument is a
        fake tensor, or if one is neither a tensor nor a plain value.
    """
    parts: list[Hashable] = [func]
    has_fake = has_real = False
    for each in (*args, *kwargs.items()) if kwargs else args:
        if type(each) is FakeTensor:
            has_fake = True
            parts.append((each.shape, each.stride(), each.dtype))
        elif isinstance(each, _PLAIN_TYPES):
            parts.append((type(each), each))
        elif _is_real(each):
            has_real = True
            parts.append(("real", each.shape, each.stride(), each.dtype))
        elif isinstance(each, (list, tuple)):
            if all(isinstance(item, _PLAIN_TYPES) for item in each):
                parts.append(tuple(each))
                continue
            fakes = [type(item) is FakeTensor for item in each]
            if not all(is_fake or _is_real(item) for item, is_fake in zip(each, fakes, strict=True)):
                return None
            has_fake, has_real = has_fake or any(fakes), has_real or not all(fakes)
            layouts = ((item.shape, item.stride(), item.dtype) for item in each)
            parts.append(tuple(zip(fakes, layouts, strict=True)))
        else:
            return None
    if not has_fake or not _makes_new_tensors(func):
        return None
    if has_real and get_overload_packet(func) in _INDEXING_OPS:
        return None  # the values of a mask give the size
    return tuple(parts)


def _is_real(value: Any) -> bool:
    return type(value) in _REAL_TENSOR_TYPES and value.device == _CPU


@cache
def _returns_tensors(func: Any) -> bool:
    return any("Tensor" in str(each.type) for each in get_schema(func).returns)


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Return True if every result of an operation is a new tensor whose layout follows from those of its arguments."""
    if func.namespace not in ("aten", "_c10d_functional") or func in _ARGUMENT_RETURNING_OPS:
        return False
    return not get_schema(func).is_mutable and not _is_view(func)


def _key_of_real_operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Return a key that determines the size of the result of an operation on real tensors.

    Returns:
        None if an argument is neither a tensor nor a plain value.
    """
    parts: list[Hashable] = [func]
    for each in (*args, *kwargs.items()) if kwargs else args:
        if type(each) in _REAL_TENSOR_TYPES:
            parts.append((each.shape, each.stride(), each.dtype, each.device, each.layout))
        elif isinstance(each, _PLAIN_TYPES):
            parts.append((type(each), each if each == each else "nan"))  # NaN would never be found again
        elif isinstance(each, (list, tuple)) and all(isinstance(item, _PLAIN_TYPES) for item in each):
            parts.append(tuple((type(item), item) for item in each))
        else:
            return None
    return tuple(parts)


def _store_result_layout(key: Hashable, result: Any) -> None:
    layout = _find_result_layout(result)
    if layout is not None:
        _layouts_of_results[key] = layout


def _find_result_layout(result: Any) -> _ResultLayout | None:
    """Return the layout of a result; None if it does not describe the result fully."""
    tensors: Sequence[Any] = result if type(result) in (list, tuple) else (result,)
    if not all(map(_is_described_by_layout, tensors)):
        return None
    if len({storage_key(each.untyped_storage()) for each in tensors}) != len(tensors):
        return None
    layouts = tuple(_TensorLayout(each.shape, each.stride(), each.dtype) for each in tensors)
    return _ResultLayout(layouts, type(result) if type(result) in (list, tuple) else None)


def _is_described_by_layout(result: Any) -> bool:
    """Return True if a `_TensorLayout` describes a tensor fully: fake, strided, and with all of its storage."""
    return (
        type(result) is FakeTensor
        and result.fake_device == _CPU
        and result.layout is torch.strided
        and result.constant is None
        and result.storage_offset() == 0
        and not result.is_conj()
        and result.untyped_storage().nbytes() == _count_bytes(result)
    )


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of the smallest storage that holds a tensor at its start."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def iter_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, including those in lists of them."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple, dict)):
            yield from (leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor))


def _index_tensor(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Index a tensor, or write at indices; the number of true values in a real mask gives the size of the result.

    `args` are those of `index` (tensor, indices) or `index_put` (tensor, indices, values, ...).

    Raises:
        DynamicOutputShapeException: A mask is fake; the message names the operation.
    """
    masks = [each for each in args[1] if each is not None and each.dtype is torch.bool]
    if not masks or any(isinstance(each, FakeTensor) for each in masks):
        return func(*args, **kwargs)
    if len(args[1]) == 1 and isinstance(args[0], FakeTensor):  # including masks that are expanded to a whole tensor
        like, mask = args[0], masks[0]
        if len(args) > 2:  # index_put
            return like if get_schema(func).is_mutable else like.clone()
        with unset_fake_temporarily():
            count = int(mask.sum())
        return torch.ops.aten.new_empty.default(like, [count, *like.shape[mask.dim() :]])
    indices: list[Tensor | None] = []
    for each in args[1]:
        if each is None or each.dtype is not torch.bool:
            indices.append(each)
        else:
            with unset_fake_temporarily():
                indices += each.nonzero().unbind(1)
    return func(args[0], indices, *args[2:], **kwargs)


def _grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty result of a grouped matmul in another dtype than bfloat16, which fake tensors refuse.

    `offs` has one number per group: the end of the group in the dim that is divided into groups.
    """
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape = [len(offs) if offs is not None else len(left), *shape]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


@cache
def _is_view(func: Any) -> bool:
    """Return True if a result of an operation may be a view of an argument that it does not write to."""
    aliases = [each.alias_info for each in get_schema(func).returns]
    return any(each is not None and not bool(each.is_write) for each in aliases)


def _is_large(tensor: Tensor, max_numel: int) -> bool:
    """Return True if a result is too large to be real; `max_numel` applies to floating-point tensors."""
    return bool(tensor.numel() > (max_numel if tensor.is_floating_point() else _MAX_REAL_NUMEL))
