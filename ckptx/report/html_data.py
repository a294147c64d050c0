"""What the script of the layout page draws from: cuts once, tensors by reference; and the small pictures of cuts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from ckptx.catalog.region import Region
from ckptx.model_view.rank_layout import Layout, Sharding, TensorGroup, distinct, spans_text

_WIDTH, _HEIGHT = 48, 32  # of a small picture
_MOST_THUMBNAIL = 64  # rectangles in it
_MOST_FILES = 6  # named for each rank


class Axes(NamedTuple):
    """Which dims of a tensor are drawn: down and across, None for a dim it does not have; `others` are left over."""

    down: int | None
    across: int | None
    others: tuple[int, ...]


def axes_of(cut: Sharding) -> Axes:
    """The two dims to draw: those that are cut first, then the longest; the first of them goes down."""
    dims = range(len(cut.shape))
    if len(dims) < 2:
        return Axes(None, 0 if len(dims) else None, ())
    is_cut = [_cuts_along(cut, dim) > 1 for dim in dims]
    chosen = sorted(sorted(dims, key=lambda dim: (not is_cut[dim], -cut.shape[dim], dim))[:2])
    return Axes(chosen[0], chosen[1], tuple(dim for dim in dims if dim not in chosen))


def cut_text(cut: Sharding) -> str:
    """A cut in words: `dim 0 in 4, dim 1 in 2`; `whole on 4`."""
    parts = [(dim, _cuts_along(cut, dim)) for dim in range(len(cut.shape))]
    said = ", ".join(f"dim {dim} in {count}" for dim, count in parts if count > 1) or "whole"
    copies = max((len(holders) for _, holders in distinct(cut)), default=1)
    return said if copies == 1 else f"{said}, {copies} copies"


def _cuts_along(cut: Sharding, dim: int) -> int:
    """Spans along a dim that differ. Sorted: hashes of numbers can be made to collide."""
    spans = sorted((p.region.offsets[dim], p.region.sizes[dim]) for p in cut.pieces if p.region.numel)
    return sum(1 for _ in groupby(spans))


def colors_of(layout: Layout) -> list[tuple[int, float]]:
    """Hue and lightness (OKLCH) of each rank_in_stage of a stage, or of each holder where there is no mesh.

    Hues part TP ranks as far as they go; FSDP ranks of one TP rank lie between it and the next. All are light enough
    for dark text.
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
    """A tensor's name from its pattern and its numbers."""
    left = iter(numbers.split(".") if numbers else ())
    return ".".join(next(left, "*") if part == "*" else part for part in pattern.split("."))


def page_data(layout: Layout) -> dict[str, Any]:
    """The data of the page. Holders are indices; a cut counts them from the first holder of the tensor."""
    return {
        "unit": "rank" if layout.by_rank else "file",
        "colors": colors_of(layout),
        "holders": [
            [
                holder.label,
                [holder.stage, holder.dp, holder.tp],
                holder.nbytes,
                holder.tensors,
                spans_text(holder.spans()),
                holder.files[:_MOST_FILES],
                len(holder.files),
            ]
            for holder in layout.holders
        ],
        "bits": {group.dtype.name: group.dtype.bits for group in layout.groups},
        "cuts": [_cut_row(cut) for cut in layout.cuts],
        "groups": [
            [group.pattern, group.dtype.name, group.cut, [[at, " ".join(m)] for at, m in group.members.items()]]
            for group in layout.groups
        ],
    }


def _cut_row(cut: Sharding) -> dict[str, Any]:
    axes = axes_of(cut)
    return {
        "shape": cut.shape,
        "says": cut_text(cut),
        "down": axes.down,
        "across": axes.across,
        "others": axes.others,
        "pieces": [[holders, region.offsets, region.sizes] for region, holders in distinct(cut)],
    }


def embedded(data: dict[str, Any]) -> str:
    """JSON that no name can end early: the three characters HTML could act on are escaped."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def symbol_id(layout: Layout, cut: int, first: int) -> str:
    """The small picture of a cut whose first holder is `first`: stages share pictures, ranks within one do not."""
    return f"c{cut}-{first % len(colors_of(layout)) if layout.dims is not None else first}"


@dataclass(frozen=True, slots=True)
class Box:
    """A shard in a small picture.

    Attributes:
        x: Its left edge.
        y: Its upper edge.
        width: Its width.
        height: Its height.
        hue: The hue of its first holder, in degrees of OKLCH.
        light: The lightness of its first holder.
        is_replicated: Whether several holders have it.
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
    """The small picture of how a tensor is sharded, used by reference.

    Attributes:
        id: What refers to it.
        width: The width of the picture.
        height: Its height.
        said: What stands in place of shards that are too many to draw, or none; None where they are drawn.
        boxes: The shards.
    """

    id: str
    width: int
    height: int
    said: str | None
    boxes: Sequence[Box]


def thumbnails(layout: Layout, groups: Iterable[TensorGroup]) -> list[Thumbnail]:
    """Return the small pictures of these tensors, each once."""
    known: dict[str, Thumbnail] = {}
    for group in groups:
        first = next(iter(group.members))
        key = symbol_id(layout, group.cut, first)
        if key not in known:
            known[key] = _thumbnail(key, layout, layout.cuts[group.cut], first)
    return list(known.values())


def _thumbnail(key: str, layout: Layout, cut: Sharding, first: int) -> Thumbnail:
    colors, axes = colors_of(layout), axes_of(cut)
    held = distinct(cut)
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
    """Where a rectangle begins and how long it is, in a picture `room` wide; a hair is left between two."""
    if dim is None:
        return (0, room)
    begin, size = region.offsets[dim] * room / cut.shape[dim], region.sizes[dim] * room / cut.shape[dim]
    hair = 0.5 if size > 2 and region.sizes[dim] < cut.shape[dim] else 0
    return round(begin, 2), round(max(size - hair, 0.3), 2)
