"""Data and thumbnails of the layout page: each sharding is stored once, and tensors refer to it by index.

A holder is a rank, or a file if ranks are unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from ckptx.catalog.region import Region
from ckptx.model_view.rank_layout import Layout, Sharding, TensorGroup, distinct_regions, format_layer_ranges

_WIDTH, _HEIGHT = 48, 32  # size of a thumbnail in pixels
_MAX_THUMBNAIL_SHARDS = 64  # largest number of rectangles in a thumbnail
_MAX_FILES = 6  # file names listed per holder


class Axes(NamedTuple):
    """Dims of a tensor on the axes of its drawing.

    Attributes:
        vertical: Dim that is drawn from top to bottom; None for a tensor of fewer than two dims.
        horizontal: Dim that is drawn from left to right; None for a scalar.
        undrawn: All other dims.
    """

    vertical: int | None
    horizontal: int | None
    undrawn: tuple[int, ...]


def drawn_axes(sharding: Sharding) -> Axes:
    """Return the two dims to draw: sharded dims first, then the longest; the first of both is vertical."""
    dims = range(len(sharding.shape))
    if len(dims) < 2:
        return Axes(None, 0 if len(dims) else None, ())
    is_split = [_count_splits(sharding, dim) > 1 for dim in dims]
    drawn = sorted(sorted(dims, key=lambda dim: (not is_split[dim], -sharding.shape[dim], dim))[:2])
    return Axes(drawn[0], drawn[1], tuple(dim for dim in dims if dim not in drawn))


def sharding_text(sharding: Sharding, storing_tp_rank: int | None = None) -> str:
    """Return a sharding in words: `split 4-way on dim 0, 2-way on dim 1`; `not sharded, 4 replicas`.

    Args:
        sharding: Sharding to describe.
        storing_tp_rank: The only TP rank that stores a tensor that TP replicates; None for another tensor.
    """
    parts = [(dim, _count_splits(sharding, dim)) for dim in range(len(sharding.shape))]
    splits = ", ".join(f"{count}-way on dim {dim}" for dim, count in parts if count > 1)
    text = f"split {splits}" if splits else "not sharded"
    replicas = max((len(holders) for _, holders in distinct_regions(sharding)), default=1)
    if storing_tp_rank is not None:
        return f"{text}; replicated by TP, stored only by tp {storing_tp_rank}"
    return text if replicas == 1 else f"{text}, {replicas} replicas"


def _count_splits(sharding: Sharding, dim: int) -> int:
    """Count the distinct spans along a dim, by sorting, as untrusted numbers can be made to collide in a hash table."""
    spans = sorted(
        (shard.region.offsets[dim], shard.region.sizes[dim]) for shard in sharding.shards if shard.region.numel
    )
    return sum(1 for _ in groupby(spans))


def holder_colors(layout: Layout) -> list[tuple[int, float]]:
    """Return hue and lightness (OKLCH) of each rank of a stage, or of each holder if there is no mesh.

    TP ranks are spread over all hues; FSDP ranks of one TP rank have hues between it and the next. Without a mesh,
    neighbors differ by the golden angle (137.508 degrees). All colors are light enough for dark text.
    """
    dims = layout.dims
    if dims is None:
        return [(round(255 + 137.508 * index) % 360, 0.77) for index in range(max(1, len(layout.holders)))]
    tp, dp = (dims.tp, dims.dp_shard) if dims.tp > 1 else (dims.dp_shard, 1)
    return [
        (
            round(255 + 360 * (rank_in_stage % tp + 0.45 * (rank_in_stage // tp) / dp) / tp) % 360,
            round(0.72 + 0.16 * (rank_in_stage // tp) / max(1, dp - 1), 3),
        )
        for rank_in_stage in range(tp * dp)
    ]


def tensor_name(pattern: str, numbers: str) -> str:
    """Return the name of a tensor.

    Args:
        pattern: Pattern of its name, such as "layers.*.mlp.experts.*.weight".
        numbers: Numbers that replace the stars, joined by dots, such as "3.17".
    """
    remaining = iter(numbers.split(".") if numbers else ())
    return ".".join(next(remaining, "*") if part == "*" else part for part in pattern.split("."))


def page_data(layout: Layout) -> dict[str, Any]:
    """Return the data that layout.js reads.

    Elsewhere in the data, a holder is its index in "holders"; in a sharding, the index is relative to the first holder
    of the tensor. An entry of "groups" has the indices in the names of its tensors, by first holder.
    """
    storing_tp_ranks = layout.storing_tp_ranks()
    return {
        "unit": "rank" if layout.has_ranks else "file",
        "colors": holder_colors(layout),
        "holders": [
            [
                holder.label,
                [holder.stage, holder.dp, holder.tp],
                holder.nbytes,
                holder.tensor_count,
                format_layer_ranges(holder.layer_ranges()),
                holder.files[:_MAX_FILES],
                len(holder.files),
            ]
            for holder in layout.holders
        ],
        "bits": {group.dtype.name: group.dtype.bits for group in layout.groups},
        "shardings": [
            _sharding_data(sharding, storing_tp_ranks.get(index)) for index, sharding in enumerate(layout.shardings)
        ],
        "groups": [
            [
                group.pattern,
                group.dtype.name,
                group.sharding_index,
                [[first_holder, " ".join(indices)] for first_holder, indices in group.indices_by_holder.items()],
            ]
            for group in layout.groups
        ],
    }


def _sharding_data(sharding: Sharding, storing_tp_rank: int | None) -> dict[str, Any]:
    axes = drawn_axes(sharding)
    return {
        "shape": sharding.shape,
        "text": sharding_text(sharding, storing_tp_rank),
        "vertical": axes.vertical,
        "horizontal": axes.horizontal,
        "undrawn": axes.undrawn,
        "shards": [[holders, region.offsets, region.sizes] for region, holders in distinct_regions(sharding)],
    }


def escape_json(data: dict[str, Any]) -> str:
    """Return JSON for a script element: `<`, `>` and `&` are escaped, so that no name can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def thumbnail_id(layout: Layout, sharding_index: int, first_holder: int) -> str:
    """Return the id of the thumbnail of a sharding whose first holder is `first_holder`.

    With a mesh, all stages share thumbnails, because the colors of their ranks are the same.
    """
    return f"c{sharding_index}-{first_holder % len(holder_colors(layout)) if layout.dims is not None else first_holder}"


@dataclass(frozen=True, slots=True)
class Box:
    """A shard in a thumbnail; lengths are in pixels.

    Attributes:
        x: Left edge.
        y: Upper edge.
        width: Width.
        height: Height.
        hue: Hue of the first holder in OKLCH, in degrees.
        lightness: Lightness of the first holder in OKLCH, 0 to 1.
        is_replicated: True if several holders have the shard.
    """

    x: float
    y: float
    width: float
    height: float
    hue: int
    lightness: float
    is_replicated: bool


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """Thumbnail of a sharding, used by reference.

    Attributes:
        id: Id that `<use>` refers to.
        width: Width in pixels.
        height: Height in pixels.
        text: Text to show if there are no shards, or too many to draw; None if shards are drawn.
        boxes: Shards that are drawn.
    """

    id: str
    width: int
    height: int
    text: str | None
    boxes: Sequence[Box]


def thumbnails(layout: Layout, groups: Iterable[TensorGroup]) -> list[Thumbnail]:
    """Return the thumbnails of these groups, each once."""
    by_id: dict[str, Thumbnail] = {}
    for group in groups:
        first_holder = next(iter(group.indices_by_holder))
        key = thumbnail_id(layout, group.sharding_index, first_holder)
        if key not in by_id:
            by_id[key] = _thumbnail(key, layout, layout.shardings[group.sharding_index], first_holder)
    return list(by_id.values())


def _thumbnail(key: str, layout: Layout, sharding: Sharding, first_holder: int) -> Thumbnail:
    colors, axes = holder_colors(layout), drawn_axes(sharding)
    shards = distinct_regions(sharding)
    if shards:
        undrawn_spans = _undrawn_spans(shards[0][0], axes)
        shards = [item for item in shards if _undrawn_spans(item[0], axes) == undrawn_spans]
    if not shards or len(shards) > _MAX_THUMBNAIL_SHARDS:
        return Thumbnail(key, _WIDTH, _HEIGHT, f"{len(shards):,}" if shards else "empty", [])
    boxes = []
    for region, holders in shards:
        x, width = _drawn_span(sharding, region, axes.horizontal, _WIDTH)
        y, height = _drawn_span(sharding, region, axes.vertical, _HEIGHT)
        hue, lightness = colors[(first_holder + holders[0]) % len(colors)]
        boxes.append(Box(x, y, width, height, hue, lightness, len(holders) > 1))
    return Thumbnail(key, _WIDTH, _HEIGHT, None, boxes)


def _undrawn_spans(region: Region, axes: Axes) -> tuple[tuple[int, int], ...]:
    return tuple((region.offsets[dim], region.sizes[dim]) for dim in axes.undrawn)


def _drawn_span(sharding: Sharding, region: Region, dim: int | None, extent: int) -> tuple[float, float]:
    """Return start and length of a shard along a dim that is `extent` pixels long, with a gap between neighbors."""
    if dim is None:
        return (0, extent)
    begin, size = region.offsets[dim] * extent / sharding.shape[dim], region.sizes[dim] * extent / sharding.shape[dim]
    gap = 0.5 if size > 2 and region.sizes[dim] < sharding.shape[dim] else 0
    return round(begin, 2), round(max(size - gap, 0.3), 2)
