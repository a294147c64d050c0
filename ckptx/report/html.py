"""HTML page of the layout of a checkpoint: mesh, bytes per rank, and the shards of each tensor.

This module computes the content; `templates/layout.html` is the markup. The page loads nothing, as its
Content-Security-Policy states, and is readable without its script, which adds search and the drawing of a tensor to
scale. Names in a checkpoint are untrusted: the template escapes them, `escape_json` escapes the JSON data, and the
script writes them into text nodes only.

A holder is a rank, or a file if ranks are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from markupsafe import Markup

from ckptx.model_view.rank_layout import Holder, Layout, TensorGroup, format_layer_ranges, layer_ranges
from ckptx.report.documents.inspection import InspectionReport
from ckptx.report.html_data import (
    escape_json,
    holder_colors,
    page_data,
    sharding_text,
    tensor_name,
    thumbnail_id,
    thumbnails,
)
from ckptx.report.number_formats import checkpoint_format_name
from ckptx.report.page import read_asset, render_page
from ckptx.report.ranks import balance_text
from ckptx.report.report import counted, human_bytes
from ckptx.report.text import architecture_text
from ckptx.untrusted.printable import escape_strings, one_line

_MAX_CELLS = 4096  # with more holders, the mesh is not drawn
_MAX_BARS = 2048  # with more holders, a bar is the maximum of several neighbors
_MAX_ROWS = 400  # groups of tensors listed without a search
# Cells show their bytes if there are at most this many holders and TP ranks, so that a line fits in 1,300 px.
_MAX_HOLDERS_WITH_BYTES = 64
_MAX_TP_WITH_BYTES = 12
_MAX_CELLS_PER_LINE = 32  # further TP ranks wrap to the next line
_MAX_TIES = 4  # ties listed in the head
_MAX_OUTSIDE_NAMES = 4  # modules outside layers listed per stage


@dataclass(frozen=True, slots=True)
class LayoutHeading:
    """The head of the page.

    Attributes:
        title: Name of the checkpoint: the last component of its path.
        path: Path of the checkpoint.
        facts: Pairs of term and value.
        dtypes: Pairs of dtype and number of tensors with it.
        note: Note that the page shows a part of the checkpoint; "" if it shows all.
    """

    title: str
    path: str
    facts: Sequence[tuple[str, str]]
    dtypes: Sequence[tuple[str, str]]
    note: str


@dataclass(frozen=True, slots=True)
class RankCell:
    """A cell in the drawing of a stage, for one holder.

    Attributes:
        index: Index among all holders.
        line_label: Label of the line that begins with this cell; None inside a line.
        label: Number of the rank, or name of the file.
        nbytes: Bytes of tensor data.
        share: `nbytes` divided by that of the largest holder, 0 to 1.
        tooltip: Coordinates, bytes and number of tensors, for the tooltip.
        hue: Hue of the cell in OKLCH, in degrees.
        lightness: Lightness of the cell in OKLCH, 0 to 1.
    """

    index: int
    line_label: str | None
    label: str
    nbytes: int
    share: str
    tooltip: str
    hue: int
    lightness: float


@dataclass(frozen=True, slots=True)
class MeshStage:
    """A pipeline stage, or files that belong to no rank.

    Attributes:
        title: Name of the stage.
        nbytes: Bytes of tensor data.
        layers: Layers of the stage, in words.
        modules_outside_layers: Names of modules outside layers; the last item may be the number of further ones.
        cells_class: CSS classes of the list of cells; None if there are too many to draw.
        columns: Headers of the columns of cells; empty without a mesh, if lines are wrapped, or if nothing is drawn.
        cells: Cells, line by line; empty if there are too many to draw.
    """

    title: str
    nbytes: int
    layers: str
    modules_outside_layers: Sequence[str]
    cells_class: str | None
    columns: Sequence[str]
    cells: Sequence[RankCell]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh and its stages.

    Attributes:
        title: "Mesh" or "Files".
        description: Sizes of the mesh, and the meaning of rows, columns and colors.
        note: Note that there are too many ranks to draw; "" if all are drawn.
        shows_bytes: True if cells have room for their bytes.
        cells_per_line: Number of cells in a line.
        stages: Pipeline stages, or a single group of files.
    """

    title: str
    description: Markup
    note: str
    shows_bytes: bool
    cells_per_line: int
    stages: Sequence[MeshStage]


@dataclass(frozen=True, slots=True)
class Bar:
    """Bytes of a holder, or the maximum of several, in a chart that is 100 high.

    Attributes:
        x: Left edge; each bar has a slot of width 1.
        y: Upper edge.
        width: Width.
        height: Height.
        index: Index of the holder; None for several.
        hue: Hue of the bar in OKLCH, in degrees.
        lightness: Lightness of the bar in OKLCH, 0 to 1.
    """

    x: str
    y: str
    width: str
    height: str
    index: int | None
    hue: int
    lightness: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Bytes of each holder.

    Attributes:
        kind: "rank" or "file".
        balance: Mean and extremes, in words.
        largest: Bytes of the largest holder, which the upper edge stands for.
        mean_y: Distance of the mean from the upper edge, in percent.
        bars: A bar for each holder, or for each group of neighbors.
        first_label: Label of the first bar.
        last_label: Label of the last bar.
    """

    kind: str
    balance: str
    largest: int
    mean_y: float
    bars: Sequence[Bar]
    first_label: str
    last_label: str


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A row in the list of tensors: a group of tensors with the same pattern of names, dtype and sharding.

    Attributes:
        index: Index of the group in `Layout.groups`.
        first_name: Name of the first tensor of the group, quoted for a URL.
        thumbnail_id: Id of the thumbnail of the sharding.
        pattern: Pattern of names, such as "layers.*.mlp.up_proj.weight".
        count: Number of tensors in the group.
        dtype: Name of their dtype.
        shape: Sizes of their dims, separated by commas.
        sharding: Their sharding, in words.
    """

    index: int
    first_name: Markup
    thumbnail_id: str
    pattern: str
    count: int
    dtype: str
    shape: str
    sharding: str


@dataclass(frozen=True, slots=True)
class TensorList:
    """The list of tensors by pattern.

    Attributes:
        lead: Numbers of tensors, patterns and sharded tensors, as a sentence.
        rows: Groups that are listed before a search, those of one pattern next to each other.
        note: Note that there are more rows; "" if all are listed.
    """

    lead: str
    rows: Sequence[TensorRow]
    note: str


def layout_page(report: InspectionReport, layout: Layout) -> str:
    """Return the page as HTML.

    Args:
        report: Report of `inspect`.
        layout: Layout of the checkpoint, or of the tensors that a glob selected.
    """
    listed_groups = _first_groups(layout)
    heading = _heading(report, layout)
    return render_page(
        "layout.html",
        f"{heading.title} - layout",
        ["layout.css"],
        read_asset("layout.js"),
        heading=heading,
        mesh=_mesh(layout),
        chart=_chart(layout),
        tensors=_tensors(layout, listed_groups),
        thumbnails=thumbnails(layout, [group for _, group in listed_groups]),
        data=Markup(escape_json(escape_strings(page_data(layout), max_length=0))),
    )


def _heading(report: InspectionReport, layout: Layout) -> LayoutHeading:
    """Return the head of the page; its facts are about the whole checkpoint, even if the page shows a part of it."""
    facts = [
        ("format", checkpoint_format_name(report.format)),
        ("architecture", architecture_text(report)),
        ("tensors", f"{report.tensors:,}"),
        ("parameters", f"{report.parameters:,}"),
        ("size", human_bytes(report.bytes)),
        *(
            ("tied", f"{' = '.join(names)}, stored as copies, counted once in parameters")
            for names in report.tied_groups[:_MAX_TIES]
        ),
        *(("tied", f"{absent} = {stored}, stored as {stored}") for absent, stored in report.absent_ties[:_MAX_TIES]),
    ]
    num_shown = sum(group.count for group in layout.groups)
    return LayoutHeading(
        title=str(report.path).rstrip("/").rpartition("/")[2] or "checkpoint",
        path=str(report.path),
        facts=facts,
        dtypes=[(name, counted(count, "tensor")) for name, count in report.dtypes["before"].items()],
        note=f"This page shows {num_shown:,} of {counted(report.tensors, 'tensor')}."
        if num_shown < report.tensors
        else "",
    )


def _mesh(layout: Layout) -> Mesh:
    """Return the mesh with its stages, or the files if ranks are unknown."""
    tp = 1 if layout.dims is None else layout.dims.tp
    note = f"Meshes of more than {_MAX_CELLS:,} ranks are not drawn; --ranks --json lists all ranks."
    return Mesh(
        title="Mesh" if layout.has_ranks else "Files",
        description=_mesh_description(layout),
        note=note if len(layout.holders) > _MAX_CELLS else "",
        shows_bytes=len(layout.holders) <= _MAX_HOLDERS_WITH_BYTES and tp <= _MAX_TP_WITH_BYTES,
        cells_per_line=_cells_per_line(tp),
        stages=[_mesh_stage(layout, stage, holders) for stage, holders in layout.holders_by_stage()],
    )


def _cells_per_line(tp: int) -> int:
    """Return the number of cells in a line: all TP ranks, or equal parts of them if they do not fit."""
    lines = -(-tp // _MAX_CELLS_PER_LINE)
    return -(-tp // lines)


def _mesh_description(layout: Layout) -> Markup:
    if not layout.has_ranks:
        text = "Files are not assigned to ranks"
        return Markup("{}.").format(
            text if layout.sharded_count else f"{text}; each tensor is stored in full in one file"
        )
    dims = layout.dims
    if dims is None:
        sentence = Markup(
            "<b>{}</b>, from file names. The mesh is unknown without a ckptx.json; ranks that have layers in "
            "common are shown as one stage."
        ).format(counted(len(layout.holders), "rank"))
    else:
        sentence = Markup(
            "<b>tp {} &times; pp {} &times; dp_shard {}{}</b> = {}. In a stage, columns are TP ranks and rows are DP "
            "ranks{}"
        ).format(
            dims.tp, dims.pp, dims.dp_shard, f" with ep {dims.ep}" if dims.ep > 1 else "",
            counted(dims.world_size, "rank"),
            "; ranks with the same TP and DP rank have the same color in each stage." if dims.pp > 1 else ".",
        )  # fmt: skip
    num_replicated = layout.once_stored_count
    if num_replicated:
        sentence += (
            f" TP replicates {counted(num_replicated, 'tensor')}: only tp 0 stores them, and other TP ranks read them "
            "from there."
        )
    return sentence if layout.sharded_count else sentence + " No tensor is sharded: each is stored in full on one rank."


def _mesh_stage(layout: Layout, stage: int | None, holders: Sequence[Holder]) -> MeshStage:
    dims = layout.dims
    ranges = layer_ranges(layer for holder in holders for layer in holder.layers)
    outside = layout.names_outside_layers.get(stage, [])
    names = list(outside[:_MAX_OUTSIDE_NAMES])
    if len(outside) > _MAX_OUTSIDE_NAMES:
        names.append(f"{len(outside) - _MAX_OUTSIDE_NAMES:,} more")
    is_drawn = len(layout.holders) <= _MAX_CELLS
    cells_class = "cells" if dims is not None else "cells loose" if layout.has_ranks else "cells names"
    columns = [f"{'tp ' if tp == 0 else ''}{tp}" for tp in range(dims.tp)] if dims is not None else []
    return MeshStage(
        title="files" if not layout.has_ranks else "no stage" if stage is None else f"stage {stage}",
        nbytes=sum(holder.nbytes for holder in holders),
        layers=format_layer_ranges(ranges) if ranges else "no layers",
        modules_outside_layers=names,
        cells_class=cells_class if is_drawn else None,
        columns=columns if is_drawn and dims is not None and _cells_per_line(dims.tp) == dims.tp else [],
        cells=list(_cells(layout, holders)) if is_drawn else [],
    )


def _cells(layout: Layout, holders: Sequence[Holder]) -> Iterator[RankCell]:
    """Yield the cells of one stage; its holders are neighbors in `layout.holders`."""
    dims, colors = layout.dims, holder_colors(layout)
    largest = max(holder.nbytes for holder in layout.holders) or 1
    for index, holder in enumerate(holders, start=layout.holders.index(holders[0])):
        begins_line = dims is not None and holder.tp is not None and holder.tp % _cells_per_line(dims.tp) == 0
        hue, lightness = colors[index % len(colors)]
        coordinates = "".join(
            f", {axis} {value}"
            for axis, value in (("stage", holder.stage), ("dp", holder.dp), ("tp", holder.tp), ("ep", holder.ep))
            if value is not None
        )
        tensors = counted(holder.tensor_count, "tensor")
        yield RankCell(
            index=index,
            line_label=_line_label(holder, has_all_tp_ranks=_cells_per_line(dims.tp) == dims.tp)
            if dims is not None and begins_line
            else None,
            label=holder.label if holder.rank is None else str(holder.rank),
            nbytes=holder.nbytes,
            share=f"{holder.nbytes / largest:.3f}",
            tooltip=f"{holder.label}{coordinates}: {human_bytes(holder.nbytes)}, {tensors}",
            hue=hue,
            lightness=lightness,
        )


def _line_label(holder: Holder, *, has_all_tp_ranks: bool) -> str:
    """Return the label of a line of cells: its DP rank and, if lines are wrapped, its first TP rank."""
    if has_all_tp_ranks:
        return f"{'dp ' if holder.dp == 0 else ''}{holder.dp}"
    return f"dp {holder.dp} tp {holder.tp}"


def _chart(layout: Layout) -> Chart | None:
    """Return the chart; None if there is no tensor data."""
    balance = layout.balance()
    if balance is None:
        return None
    sizes = [holder.nbytes for holder in layout.holders]
    holders_per_bar = -(-len(sizes) // _MAX_BARS)
    bar_sizes = [max(sizes[start : start + holders_per_bar]) for start in range(0, len(sizes), holders_per_bar)]
    colors = holder_colors(layout)
    gap = 0.12 if len(bar_sizes) <= 256 else 0.0
    largest = balance["max"]
    bars = []
    for index, size in enumerate(bar_sizes):
        hue, lightness = colors[index * holders_per_bar % len(colors)]
        height = round(100 * size / largest, 2)
        bars.append(
            Bar(
                x=f"{index + gap:g}",
                y=f"{100 - height:g}",
                width=f"{1 - 2 * gap:g}",
                height=f"{height:g}",
                index=index if holders_per_bar == 1 else None,
                hue=hue,
                lightness=lightness,
            )
        )
    first_label, last_label = (
        (layout.holders[0].label, layout.holders[-1].label) if layout.has_ranks else ("first file", "last file")
    )
    return Chart(
        kind="rank" if layout.has_ranks else "file",
        balance=balance_text(balance),
        largest=largest,
        mean_y=round(100 - 100 * balance["mean"] / largest, 2),
        bars=bars,
        first_label=first_label,
        last_label=last_label,
    )


def _tensors(layout: Layout, listed_groups: Sequence[tuple[int, TensorGroup]]) -> TensorList:
    groups = layout.groups
    patterns = counted(len({group.pattern for group in groups}), "pattern")
    sharded = f"{layout.sharded_count:,}" if layout.sharded_count else "none"
    num_unlisted, storing_tp_ranks = len(groups) - _MAX_ROWS, layout.storing_tp_ranks()
    holder = "rank" if layout.has_ranks else "file"
    return TensorList(
        lead=f"{counted(sum(group.count for group in groups), 'tensor')} in {patterns}; {sharded} sharded. "
        f"Select a tensor to see its shards, or a {holder} above to see what it stores.",
        rows=[
            _tensor_row(layout, index, group, storing_tp_ranks.get(group.sharding_index))
            for index, group in listed_groups
        ],
        note=f"{counted(num_unlisted, 'more row')}; search finds them." if num_unlisted > 0 else "",
    )


def _first_groups(layout: Layout) -> list[tuple[int, TensorGroup]]:
    """Return the first `_MAX_ROWS` groups, those of one pattern next to each other, with their index in the layout."""
    first_index = {group.pattern: index for index, group in reversed(list(enumerate(layout.groups)))}
    return sorted(enumerate(layout.groups), key=lambda item: first_index[item[1].pattern])[:_MAX_ROWS]


def _tensor_row(layout: Layout, index: int, group: TensorGroup, storing_tp_rank: int | None) -> TensorRow:
    first_holder, indices = next(iter(group.indices_by_holder.items()))
    sharding = layout.shardings[group.sharding_index]
    return TensorRow(
        index=index,
        first_name=Markup(quote(one_line(tensor_name(group.pattern, indices[0]), max_length=0), safe="")),
        thumbnail_id=thumbnail_id(layout, group.sharding_index, first_holder),
        pattern=group.pattern,
        count=group.count,
        dtype=group.dtype.name,
        shape=", ".join(map(str, sharding.shape)),
        sharding=sharding_text(sharding, storing_tp_rank),
    )
