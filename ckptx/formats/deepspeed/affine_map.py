"""Read the affine map of one parameter: the views of the whole tensor and of the shards that have the same elements.

    logical_shape          shape of the whole tensor, with as many dims as the parameter or more
    ranks[R].shard_shape   shape of the shard of rank R, with as many dims
    ranks[R].pieces        for each view its `shape`, and offset and strides in the whole tensor (`source`) and in the
                           shard (`dest`)

Source: `deepspeed/checkpoint/affine.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ckptx.catalog.region import Shape
from ckptx.errors import UnsupportedError
from ckptx.formats.deepspeed.pickles import damaged_error, require_dict, require_list
from ckptx.formats.deepspeed.shard_ranges import ShardRange
from ckptx.formats.torch_archive.unpickle import is_shape
from ckptx.formats.unsupported import SAVE_WHERE_TRAINED
from ckptx.untrusted.limits import find_shape_fault


class AffineMap(NamedTuple):
    """The shards of one parameter.

    Attributes:
        shape: Shape of the whole tensor, with as many dims as the parameter or more.
        local_shapes: Shape of the shard of each rank, with as many dims.
        dim: The only dim along which they are sharded.
        ranges: Ranges along this dim, one for each view with elements.
    """

    shape: Shape
    local_shapes: list[Shape]
    dim: int
    ranges: list[ShardRange]


class _View(NamedTuple):
    """A region of a shard.

    Attributes:
        rank: Tensor parallel rank of the shard.
        shape: Shape of the region.
        source: Index of its first element in the whole tensor, in row-major order.
        source_strides: Strides in the whole tensor, in elements; not checked.
        dest: Index of its first element in the shard.
        dest_strides: Strides in the shard, in elements; not checked.
    """

    rank: int
    shape: Shape
    source: int
    source_strides: tuple[Any, ...]
    dest: int
    dest_strides: tuple[Any, ...]


def read_affine_map(value: object, ranks: int, subject: str) -> AffineMap:
    """Read one value of `params` in `affine_map`.

    Args:
        value: The value.
        ranks: Number of tensor parallel ranks.
        subject: Subject of error messages.

    Raises:
        InputError: It is damaged.
        UnsupportedError: The views are not ranges along one dim, or the shards have scaled values.
    """
    entry = require_dict(value, subject)
    whole = _shape(entry.get("logical_shape"), subject)
    by_rank = require_dict(entry.get("ranks"), subject)
    if sorted(map(str, by_rank)) != sorted(map(str, range(ranks))) or not all(type(rank) is int for rank in by_rank):
        raise damaged_error(subject, f"not of {ranks} tensor parallel ranks")
    local_shapes: list[Shape] = []
    views: list[_View] = []
    for rank in range(ranks):
        of_rank = require_dict(by_rank[rank], subject)
        local_shapes.append(_shape(of_rank.get("shard_shape"), subject))
        views += [_view(rank, each, subject) for each in require_list(of_rank.get("pieces"), subject, "pieces")]
    if any(len(shape) != len(whole) for shape in (*local_shapes, *(view.shape for view in views))):
        raise damaged_error(subject, "has shapes of different numbers of dims")
    # Dims along which a view or its shard has another size than the whole tensor.
    dims = {
        dim
        for view in views
        for dim, size in enumerate(whole)
        if view.shape[dim] != size or local_shapes[view.rank][dim] != size
    }
    dim = next(iter(dims), 0)
    step = prod(whole[dim + 1 :])
    ranges: list[ShardRange] = []
    for view in views:
        is_region = _is_region(view.shape, view.source_strides, whole)
        if (
            len(dims) > 1
            or not is_region
            or not _is_region(view.shape, view.dest_strides, local_shapes[view.rank])
            or view.source % max(step, 1)
            or view.dest % max(step, 1)
        ):
            raise UnsupportedError(
                f"{subject}: its shards are not ranges along one dim, which is not supported; {SAVE_WHERE_TRAINED}"
            )
        if prod(view.shape):
            size = view.shape[dim] if whole else 1
            ranges.append(ShardRange(view.rank, view.dest // step, view.source // step, size))
    return AffineMap(whole, local_shapes, dim, ranges)


def _view(rank: int, value: object, subject: str) -> _View:
    view = require_dict(value, subject)
    scale = view.get("scale", 1.0)
    if scale != 1.0:
        raise UnsupportedError(
            f"{subject}: the values of a rank are multiplied by {scale!s:.20}, which is not supported; "
            f"{SAVE_WHERE_TRAINED}"
        )
    source, source_strides = _offset_and_strides(view, "source", subject)
    dest, dest_strides = _offset_and_strides(view, "dest", subject)
    return _View(rank, _shape(view.get("shape"), subject), source, source_strides, dest, dest_strides)


def _offset_and_strides(view: Mapping[Any, Any], key: str, subject: str) -> tuple[int, tuple[Any, ...]]:
    offset, strides, *_ = *require_list(view.get(key), subject, key), None, None
    if type(offset) is not int or not 0 <= offset < 1 << 62:
        raise damaged_error(subject, f"{key} has no valid offset")
    return offset, tuple(require_list(strides, subject, f"strides of {key}"))


def _shape(value: object, subject: str) -> Shape:
    shape = tuple(require_list(value, subject, "a shape"))
    if not is_shape(shape) or find_shape_fault(shape) is not None:
        raise damaged_error(subject, "has no valid shape")
    return shape


def _is_region(shape: Shape, strides: tuple[Any, ...], whole: Shape) -> bool:
    """Return True if strides are those of a region of a row-major tensor; those of dims of size 1 mean nothing."""
    return len(shape) == len(strides) and all(
        size < 2 or stride == prod(whole[dim + 1 :])
        for dim, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )
