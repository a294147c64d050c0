"""Data and thumbnails of the layout page: each sharding once, and tensors by reference to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from ckptx.catalog.region import Region
from ckptx.model_view.rank_layout import Layout, Sharding, TensorGroup, distinct_regions, format_layer_spans

_WIDTH, _HEIGHT = 48, 32  # of a thumbnail
_MOST_THUMBNAIL = 64  # rectangles in a thumbnail
_MOST_FILES = 6  # named per rank


class Axes(NamedTuple):
    """Dims of a tensor that are drawn `down` and `across` (None if it has too few), and the `others`."""

    down: int | None
    across: int | None
    others: tuple[int, ...]


def axes_of(cut: Sharding) -> Axes:
    """Return the two dims to draw: sharded dims first, then the longest; the lower dim is drawn down."""
    dims = range(len(cut.shape))
    if len(dims) < 2:
        return Axes(None, 0 if len(dims) else None, ())
    is_split = [_splits_along(cut, dim) > 1 for dim in dims]
    chosen = sorted(sorted(dims, key=lambda dim: (not is_split[dim], -cut.shape[dim], dim))[:2])
    return Axes(chosen[0], chosen[1], tuple(dim for dim in dims if dim not in chosen))


def sharding_text(cut: Sharding) -> str:
    """Return a sharding in words: `split 4-way on dim 0, 2-way on dim 1`; `whole, 4 replicas`."""
    parts = [(dim, _splits_along(cut, dim)) for dim in range(len(cut.shape))]
    splits = ", ".join(f"{count}-way on dim {dim}" for dim, count in parts if count > 1)
    text = f"split {splits}" if splits else "whole"
    replicas = max((len(holders) for _, holders in distinct_regions(cut)), default=1)
    return text if replicas == 1 else f"{text}, {replicas} replicas"


def _splits_along(cut: Sharding, dim: int) -> int:
    """Count the distinct spans along a dim, by sorting, as untrusted numbers can be made to collide in a hash table."""
    spans = sorted((p.region.offsets[dim], p.region.sizes[dim]) for p in cut.shards if p.region.numel)
    return sum(1 for _ in groupby(spans))


def colors_of(layout: Layout) -> list[tuple[int, float]]:
    """Return hue and lightness (OKLCH) of each rank of a stage, or of each holder if there is no mesh.

    TP ranks are spread over all hues; FSDP ranks of one TP rank have hues between it and the next. All colors are light
    enough for dark text.
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


def name_of(pattern: str, numbers: str) -> str:
    """Return the name of a tensor from its pattern and the numbers for its stars."""
    left = iter(numbers.split(".") if numbers else ())
    return ".".join(next(left, "*") if part == "*" else part for part in pattern.split("."))


def page_data(layout: Layout) -> dict[str, Any]:
    """Return the data of the script. Holders are indices, in a sharding relative to the first holder of the tensor."""
    return {
        "unit": "rank" if layout.has_ranks else "file",
        "colors": colors_of(layout),
        "holders": [
            [
                holder.label,
                [holder.stage, holder.dp, holder.tp],
                holder.nbytes,
                holder.tensors,
                format_layer_spans(holder.spans()),
                holder.files[:_MOST_FILES],
                len(holder.files),
            ]
            for holder in layout.holders
        ],
        "bits": {group.dtype.name: group.dtype.bits for group in layout.groups},
        "cuts": [_cut_row(cut) for cut in layout.shardings],
        "groups": [
            [
                group.pattern,
                group.dtype.name,
                group.sharding_index,
                [[at, " ".join(m)] for at, m in group.indices_by_holder.items()],
            ]
            for group in layout.groups
        ],
    }


def _cut_row(cut: Sharding) -> dict[str, Any]:
    axes = axes_of(cut)
    return {
        "shape": cut.shape,
        "text": sharding_text(cut),
        "down": axes.down,
        "across": axes.across,
        "others": axes.others,
        "pieces": [[holders, region.offsets, region.sizes] for region, holders in distinct_regions(cut)],
    }


def embedded(data: dict[str, Any]) -> str:
    """Return JSON for a script element: `<`, `>` and `&` are escaped, so that no name can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def symbol_id(layout: Layout, cut: int, first: int) -> str:
    """Return the id of the thumbnail of a sharding whose first holder is `first`; stages share thumbnails."""
    return f"c{cut}-{first % len(colors_of(layout)) if layout.dims is not None else first}"


@dataclass(frozen=True, slots=True)
class Box:
    """A shard in a thumbnail.

    Attributes:
        x: Left edge.
        y: Upper edge.
        width: Width.
        height: Height.
        hue: Hue of the first holder, in degrees of OKLCH.
        light: Lightness of the first holder, in OKLCH.
        is_replicated: True if several holders have the shard.
    """

    x: float
    y: float
    width: float
    height: float
    hue: int
    light: float
    is_replicated: bool


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """Thumbnail of a sharding, used by reference.

    Attributes:
        id: Id that `<use>` refers to.
        width: Width of the picture.
        height: Height of the picture.
        text: Shown instead of shards if there are none or too many to draw; None if shards are drawn.
        boxes: Shards.
    """

    id: str
    width: int
    height: int
    text: str | None
    boxes: Sequence[Box]


def thumbnails(layout: Layout, groups: Iterable[TensorGroup]) -> list[Thumbnail]:
    """Return the thumbnails of these tensors, each once."""
    known: dict[str, Thumbnail] = {}
    for group in groups:
        first = next(iter(group.indices_by_holder))
        key = symbol_id(layout, group.sharding_index, first)
        if key not in known:
            known[key] = _thumbnail(key, layout, layout.shardings[group.sharding_index], first)
    return list(known.values())


def _thumbnail(key: str, layout: Layout, cut: Sharding, first: int) -> Thumbnail:
    colors, axes = colors_of(layout), axes_of(cut)
    held = distinct_regions(cut)
    if held:
        facet = _others(held[0][0], axes)
        held = [item for item in held if _others(item[0], axes) == facet]
    if not held or len(held) > _MOST_THUMBNAIL:
        return Thumbnail(key, _WIDTH, _HEIGHT, f"{len(held):,}" if held else "empty", [])
    boxes = []
    for region, holders in held:
        x, width = _span(cut, region, axes.across, _WIDTH)
        y, height = _span(cut, region, axes.down, _HEIGHT)
        hue, light = colors[(first + holders[0]) % len(colors)]
        boxes.append(Box(x, y, width, height, hue, light, len(holders) > 1))
    return Thumbnail(key, _WIDTH, _HEIGHT, None, boxes)


def _others(region: Region, axes: Axes) -> tuple[tuple[int, int], ...]:
    return tuple((region.offsets[dim], region.sizes[dim]) for dim in axes.others)


def _span(cut: Sharding, region: Region, dim: int | None, room: int) -> tuple[float, float]:
    """Return start and length of a rectangle along a dim, in a picture `room` wide, with a gap between neighbors."""
    if dim is None:
        return (0, room)
    begin, size = region.offsets[dim] * room / cut.shape[dim], region.sizes[dim] * room / cut.shape[dim]
    gap = 0.5 if size > 2 and region.sizes[dim] < cut.shape[dim] else 0
    return round(begin, 2), round(max(size - gap, 0.3), 2)
