"""The layout of a checkpoint as one HTML page: mesh, bytes of each rank, and how each tensor is sharded.

This module says what the page shows, in rows; `templates/layout.html` says how. The page asks for nothing outside of
itself and says so in its Content-Security-Policy; what it shows stands in it without scripts, which add search and the
drawing of a tensor to scale. Names in a checkpoint are anybody's text: the template escapes them, in the data they go
through `embedded`, and in the script into text nodes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from markupsafe import Markup

from ckptx.model_view.rank_layout import Holder, Layout, TensorGroup, spans, spans_text
from ckptx.report.documents.inspection import InspectionReport
from ckptx.report.html_data import colors_of, cut_text, embedded, name_of, page_data, symbol_id, thumbnails
from ckptx.report.page import asset, page
from ckptx.report.ranks import balance_text
from ckptx.report.report import counted, human_bytes
from ckptx.untrusted.printable import one_line, shown

_MOST_CELLS = 4096  # ranks drawn one by one
_MOST_BARS = 2048
_MOST_ROWS = 400  # patterns listed without a search
_ROOMY = 64  # ranks that leave room for a number of bytes in each cell,
_ROOMY_TP = 12  # where no more than these stand side by side in 1,300 px
_MOST_TP = 32  # cells side by side; more go on in the next line
_MOST_OUTSIDE = 4


@dataclass(frozen=True, slots=True)
class LayoutHeading:
    """The head of the page.

    Attributes:
        title: The name of the checkpoint.
        path: Its path.
        facts: Terms with values.
        dtypes: Names of dtypes with the number of their tensors.
        note: Set if the page is about a part of the checkpoint; else "".
    """

    title: str
    path: str
    facts: Sequence[tuple[str, str]]
    dtypes: Sequence[tuple[str, str]]
    note: str


@dataclass(frozen=True, slots=True)
class RankCell:
    """A rank, or a file, in its stage.

    Attributes:
        index: Its number among all holders.
        line: The label of the line that begins with it; None inside a line.
        label: The number of the rank, or the name of the file.
        nbytes: Bytes of tensor data.
        part: `nbytes` relative to the largest holder.
        said: What it is, in words.
        hue: Of its color, in degrees of OKLCH.
        light: The lightness of its color.
    """

    index: int
    line: str | None
    label: str
    nbytes: int
    part: str
    said: str
    hue: int
    light: float


@dataclass(frozen=True, slots=True)
class MeshStage:
    """A pipeline stage, or files that belong to no rank.

    Attributes:
        title: Its name.
        nbytes: Bytes of tensor data.
        layers: Its layers, in words.
        outside: Modules outside of the layers.
        cells_kind: The class of the list of its cells; None if they are too many to draw.
        columns: What stands above the columns of cells.
        cells: The cells, row by row.
    """

    title: str
    nbytes: int
    layers: str
    outside: Sequence[str]
    cells_kind: str | None
    columns: Sequence[str]
    cells: Sequence[RankCell]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh and its stages.

    Attributes:
        title: "Mesh" or "Files".
        sentence: What the drawing shows.
        note: Set if ranks are too many to draw; else "".
        is_roomy: Whether each cell has room for a number of bytes.
        line: Cells side by side.
        stages: The stages.
    """

    title: str
    sentence: Markup
    note: str
    is_roomy: bool
    line: int
    stages: Sequence[MeshStage]


@dataclass(frozen=True, slots=True)
class Bar:
    """The bytes of a holder, or the most of several, in a chart that is 100 high.

    Attributes:
        x: Its left edge; a holder is 1 wide.
        y: Its upper edge.
        width: Its width.
        height: Its height.
        index: The number of the holder; None for several.
        hue: As in `Cell`.
        light: As in `Cell`.
    """

    x: str
    y: str
    width: str
    height: str
    index: int | None
    hue: int
    light: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Bytes of each holder.

    Attributes:
        kind: "rank" or "file".
        said: How balanced they are, in words.
        top: Bytes of the largest.
        mean: How far down the mean is.
        bars: A bar for each holder, or for each few of them.
        first: The label of the first bar.
        last: The label of the last bar.
    """

    kind: str
    said: str
    top: int
    mean: float
    bars: Sequence[Bar]
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A pattern in the list of tensors.

    Attributes:
        index: Its number among all groups.
        target: The name of its first tensor, quoted for an address.
        symbol: The id of its small picture.
        pattern: The pattern.
        count: How many tensors it stands for.
        dtype: Their dtype.
        shape: Their shape.
        cut: How they are sharded, in words.
    """

    index: int
    target: Markup
    symbol: str
    pattern: str
    count: int
    dtype: str
    shape: str
    cut: str


@dataclass(frozen=True, slots=True)
class Tensors:
    """The list of tensors.

    Attributes:
        lead: What it has.
        rows: Patterns, those that are listed without a search.
        note: Set if there are more; else "".
    """

    lead: str
    rows: Sequence[TensorRow]
    note: str


def layout_page(report: InspectionReport, layout: Layout) -> str:
    """Return the page.

    Args:
        report: The report of `inspect`.
        layout: Who holds what; a part of the checkpoint when a glob narrowed it.
    """
    listed = _listed(layout)
    heading = _heading(report, layout)
    return page(
        "layout.html",
        f"{heading.title} - layout",
        ["layout.css"],
        asset("layout.js"),
        heading=heading,
        mesh=_mesh(layout),
        chart=_chart(layout),
        tensors=_tensors(layout, listed),
        thumbnails=thumbnails(layout, [group for _, group in listed]),
        data=Markup(embedded(shown(page_data(layout), longest=0))),
    )


def _heading(report: InspectionReport, layout: Layout) -> LayoutHeading:
    facts = [
        ("format", report.format),
        ("architecture", report.architecture or "unknown"),
        ("tensors", f"{report.tensors:,}"),
        ("parameters", f"{report.parameters:,}"),
        ("size", human_bytes(report.bytes)),
    ]
    drawn = sum(group.count for group in layout.groups)
    return LayoutHeading(
        title=str(report.path).rstrip("/").rpartition("/")[2] or "checkpoint",
        path=str(report.path),
        facts=facts,
        dtypes=[(name, f"{count:,}") for name, count in report.dtypes["before"].items()],
        note=f"This page is about {drawn:,} of the {counted(report.tensors, 'tensor')}."
        if drawn < report.tensors
        else "",
    )


def _mesh(layout: Layout) -> Mesh:
    tp = 1 if layout.dims is None else layout.dims.tp
    many = f"More than {_MOST_CELLS:,} ranks are not drawn one by one; --ranks --json lists them."
    return Mesh(
        title="Mesh" if layout.by_rank else "Files",
        sentence=_mesh_sentence(layout),
        note=many if len(layout.holders) > _MOST_CELLS else "",
        is_roomy=len(layout.holders) <= _ROOMY and tp <= _ROOMY_TP,
        line=_line(tp),
        stages=[_stage(layout, stage, holders) for stage, holders in layout.bands()],
    )


def _line(tp: int) -> int:
    """Return how many cells stand in a line: those of all TP ranks, or as many lines of equal length as they need."""
    lines = -(-tp // _MOST_TP)
    return -(-tp // lines)


def _mesh_sentence(layout: Layout) -> Markup:
    if not layout.by_rank:
        said = "No file belongs to a rank"
        return Markup("{}.").format(said if layout.cut_tensors else f"{said}; each tensor is stored whole in one file")
    dims = layout.dims
    if dims is None:
        sentence = Markup(
            "<b>{}</b> by the names of the files. The mesh is unknown without a ckptx.json; ranks that hold layers in "
            "common are shown as one stage."
        ).format(counted(len(layout.holders), "rank"))
    else:
        sentence = Markup(
            "<b>tp {} &times; dp_shard {} &times; pp {}</b> = {}. In a stage, columns are TP ranks and rows are DP "
            "ranks{}"
        ).format(
            dims.tp, dims.dp_shard, dims.pp, counted(dims.world_size, "rank"),
            "; hue shows TP, shade DP." if dims.tp > 1 and dims.dp_shard > 1 else ".",
        )  # fmt: skip
    return sentence if layout.cut_tensors else sentence + " No tensor is sharded: each is stored whole on one rank."


def _stage(layout: Layout, stage: int | None, holders: Sequence[Holder]) -> MeshStage:
    dims = layout.dims
    found = spans(layer for holder in holders for layer in holder.layers)
    outside = layout.outside.get(stage, [])
    names = list(outside[:_MOST_OUTSIDE])
    if len(outside) > _MOST_OUTSIDE:
        names.append(f"{len(outside) - _MOST_OUTSIDE:,} more")
    is_drawn = len(layout.holders) <= _MOST_CELLS
    kind = "cells" if dims is not None else "cells loose" if layout.by_rank else "cells names"
    columns = [f"{'tp ' if tp == 0 else ''}{tp}" for tp in range(dims.tp)] if dims is not None else []
    return MeshStage(
        title="files" if not layout.by_rank else "no stage" if stage is None else f"stage {stage}",
        nbytes=sum(holder.nbytes for holder in holders),
        layers=spans_text(found) if found else "no layers",
        outside=names,
        cells_kind=kind if is_drawn else None,
        columns=columns if is_drawn and dims is not None and _line(dims.tp) == dims.tp else [],
        cells=list(_cells(layout, holders)) if is_drawn else [],
    )


def _cells(layout: Layout, holders: Sequence[Holder]) -> Iterator[RankCell]:
    dims, colors = layout.dims, colors_of(layout)
    most = max(holder.nbytes for holder in layout.holders) or 1
    for index, holder in enumerate(holders, start=layout.holders.index(holders[0])):
        begins = dims is not None and holder.tp is not None and holder.tp % _line(dims.tp) == 0
        hue, light = colors[index % len(colors)]
        place = "".join(
            f", {axis} {value}"
            for axis, value in (("stage", holder.stage), ("dp", holder.dp), ("tp", holder.tp))
            if value is not None
        )
        yield RankCell(
            index=index,
            line=_line_label(holder, is_whole=_line(dims.tp) == dims.tp) if dims is not None and begins else None,
            label=holder.label if holder.rank is None else str(holder.rank),
            nbytes=holder.nbytes,
            part=f"{holder.nbytes / most:.3f}",
            said=f"{holder.label}{place}: {human_bytes(holder.nbytes)}, {counted(holder.tensors, 'tensor')}",
            hue=hue,
            light=light,
        )


def _line_label(holder: Holder, *, is_whole: bool) -> str:
    """Return what stands before a line of cells: its DP rank; and where lines go on, the TP rank it begins with."""
    if is_whole:
        return f"{'dp ' if holder.dp == 0 else ''}{holder.dp}"
    return f"dp {holder.dp} tp {holder.tp}"


def _chart(layout: Layout) -> Chart | None:
    """Return the chart; None without tensor data."""
    balance = layout.balance()
    if balance is None:
        return None
    sizes = [holder.nbytes for holder in layout.holders]
    step = -(-len(sizes) // _MOST_BARS)
    largest = [max(sizes[at : at + step]) for at in range(0, len(sizes), step)]
    colors = colors_of(layout)
    gap = 0.12 if len(largest) <= 256 else 0.0
    top = balance["max"]
    bars = []
    for index, size in enumerate(largest):
        hue, light = colors[index * step % len(colors)]
        height = round(100 * size / top, 2)
        bars.append(
            Bar(
                x=f"{index + gap:g}",
                y=f"{100 - height:g}",
                width=f"{1 - 2 * gap:g}",
                height=f"{height:g}",
                index=index if step == 1 else None,
                hue=hue,
                light=light,
            )
        )
    ends = (layout.holders[0].label, layout.holders[-1].label) if layout.by_rank else ("first file", "last file")
    return Chart(
        kind="rank" if layout.by_rank else "file",
        said=balance_text(balance),
        top=top,
        mean=round(100 - 100 * balance["mean"] / top, 2),
        bars=bars,
        first=ends[0],
        last=ends[1],
    )


def _tensors(layout: Layout, listed: Sequence[tuple[int, TensorGroup]]) -> Tensors:
    groups = layout.groups
    patterns = counted(len({group.pattern for group in groups}), "pattern")
    sharded = f"{layout.cut_tensors:,}" if layout.cut_tensors else "none"
    more = len(groups) - _MOST_ROWS
    return Tensors(
        lead=f"{counted(sum(group.count for group in groups), 'tensor')} of {patterns}; {sharded} in more than one "
        "shard. Select one to see its shards.",
        rows=[_row(layout, index, group) for index, group in listed],
        note=f"{counted(more, 'more pattern')}; search finds them." if more > 0 else "",
    )


def _listed(layout: Layout) -> list[tuple[int, TensorGroup]]:
    """Return groups with their indices, those of one pattern together, as many as are listed without a search."""
    order = {group.pattern: index for index, group in reversed(list(enumerate(layout.groups)))}
    return sorted(enumerate(layout.groups), key=lambda item: order[item[1].pattern])[:_MOST_ROWS]


def _row(layout: Layout, index: int, group: TensorGroup) -> TensorRow:
    first, members = next(iter(group.members.items()))
    cut = layout.cuts[group.cut]
    return TensorRow(
        index=index,
        target=Markup(quote(one_line(name_of(group.pattern, members[0]), longest=0), safe="")),
        symbol=symbol_id(layout, group.cut, first),
        pattern=group.pattern,
        count=group.count,
        dtype=group.dtype.name,
        shape=", ".join(map(str, cut.shape)),
        cut=cut_text(cut),
    )
