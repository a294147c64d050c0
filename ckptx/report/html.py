"""The layout of a checkpoint as one HTML page: mesh, bytes of each rank, and how each tensor is cut.

The page asks for nothing outside of itself and says so in its Content-Security-Policy; what it shows stands in it
without scripts, which add search and the drawing of a tensor to scale. Names in a checkpoint are anybody's text: here
they go through `escape`, in the data through `embedded`, and in the script into text nodes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote

from ckptx.model_view.rank_layout import Holder, Layout, TensorGroup, spans, spans_text
from ckptx.report.documents.inspection import InspectionReport
from ckptx.report.html_data import colors_of, cut_text, embedded, name_of, page_data, symbol_id, thumbnails
from ckptx.report.page import asset, escape, page
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


def layout_page(report: InspectionReport, layout: Layout) -> str:
    """The page.

    Args:
        report: Of `inspect`.
        layout: Who holds what; a part of the checkpoint when a glob narrowed it.
    """
    return page(
        f"{_title(report)} - layout",
        ["layout.css"],
        [
            thumbnails(layout, [group for _, group in _listed(layout)]),
            *_header(report, layout),
            "<main>",
            *_mesh(layout),
            *_bytes(layout),
            *_tensors(layout),
            "</main>",
            f'<script type="application/json" id="data">{embedded(shown(page_data(layout), longest=0))}</script>',
        ],
        asset("layout.js"),
    )


def _title(report: InspectionReport) -> str:
    """The name of a checkpoint, for a heading."""
    return escape(str(report.path).rstrip("/").rpartition("/")[2] or "checkpoint")


def _header(report: InspectionReport, layout: Layout) -> Iterator[str]:
    title = _title(report)
    dtypes = " ".join(
        f"<span class=chip>{escape(name)} <b>{count:,}</b></span>" for name, count in report.dtypes["before"].items()
    )
    facts = [
        ("format", escape(report.format)),
        ("architecture", escape(report.architecture or "unknown")),
        ("tensors", f"{report.tensors:,}"),
        ("parameters", f"{report.parameters:,}"),
        ("size", human_bytes(report.bytes)),
        ("dtypes", dtypes),
    ]
    yield "<header>"
    yield "<p class=eyebrow>checkpoint layout</p>"
    yield f"<h1>{title}</h1>"
    if (path := escape(str(report.path))) != title:
        yield f"<p class=path>{path}</p>"
    yield f"<dl>{''.join(f'<div><dt>{term}</dt><dd>{value}</dd></div>' for term, value in facts)}</dl>"
    shown = sum(group.count for group in layout.groups)
    if shown < report.tensors:
        yield f"<p class=note>This page is about {shown:,} of the {counted(report.tensors, 'tensor')}.</p>"
    yield "</header>"


def _mesh(layout: Layout) -> Iterator[str]:
    yield '<section aria-labelledby="mesh">'
    yield f'<h2 id="mesh">{"Mesh" if layout.by_rank else "Files"}</h2>'
    yield f"<p class=lead>{_mesh_sentence(layout)}</p>"
    bands = layout.bands()
    if len(layout.holders) > _MOST_CELLS:
        yield f"<p class=note>More than {_MOST_CELLS:,} ranks are not drawn one by one; --ranks --json lists them.</p>"
    tp = 1 if layout.dims is None else layout.dims.tp
    is_roomy = len(layout.holders) <= _ROOMY and tp <= _ROOMY_TP
    yield f'<div class="stages{"" if is_roomy else " dense"}" style="--tp:{_line(tp)}">'
    for stage, holders in bands:
        yield from _band(layout, stage, holders)
    yield "</div>"
    yield '<p class=readout id="holder" role="status"></p>'
    yield "</section>"


def _line(tp: int) -> int:
    """Cells in a line of a stage: those of all TP ranks, or as many lines of equal length as they need."""
    lines = -(-tp // _MOST_TP)
    return -(-tp // lines)


def _mesh_sentence(layout: Layout) -> str:
    if not layout.by_rank:
        said = "No file belongs to a rank"
        return f"{said}; nothing is cut: each tensor lies whole in one file." if not layout.cut_tensors else f"{said}."
    dims = layout.dims
    if dims is None:
        sentence = (
            f"<b>{counted(len(layout.holders), 'rank')}</b> by the names of the files. The mesh is unknown without a "
            "ckptx.json; ranks that hold layers in common are shown as one stage."
        )
    else:
        sentence = (
            f"<b>tp {dims.tp} &times; dp_shard {dims.dp_shard} &times; pp {dims.pp}</b> = "
            f"{counted(dims.world_size, 'rank')}. In a stage, columns are tp and rows dp"
            f"{'; hue tells tp, shade dp.' if dims.tp > 1 and dims.dp_shard > 1 else '.'}"
        )
    return sentence if layout.cut_tensors else f"{sentence} No tensor is cut: each lies whole on one rank."


def _band(layout: Layout, stage: int | None, holders: Sequence[Holder]) -> Iterator[str]:
    dims = layout.dims
    title = "files" if not layout.by_rank else "no stage" if stage is None else f"stage {stage}"
    found = spans(layer for holder in holders for layer in holder.layers)
    outside = layout.outside.get(stage, [])
    names = [escape(name) for name in outside[:_MOST_OUTSIDE]]
    if len(outside) > _MOST_OUTSIDE:
        names.append(f"{len(outside) - _MOST_OUTSIDE:,} more")
    total = sum(holder.nbytes for holder in holders)
    yield "<article class=stage>"
    yield f"<h3>{title} <span>{human_bytes(total)}</span></h3>"
    yield f"<p class=layers>{escape(spans_text(found)) if found else 'no layers'}</p>"
    if names:
        yield f"<p class=outside>{'<br>'.join(names)}</p>"
    if len(layout.holders) <= _MOST_CELLS:
        if dims is None:
            yield f'<div class="cells {"loose" if layout.by_rank else "names"}">'
        else:
            yield "<div class=cells>"
            line = _line(dims.tp)
            if line == dims.tp:
                yield "<i></i>" + "".join(f"<i>{'tp ' if tp == 0 else ''}{tp}</i>" for tp in range(dims.tp))
        most = max(holder.nbytes for holder in layout.holders) or 1
        colors = colors_of(layout)
        first = layout.holders.index(holders[0])
        for index, holder in enumerate(holders, start=first):
            if dims is not None and holder.tp is not None and holder.tp % line == 0:
                yield f"<i class=line>{_line_label(holder, is_whole=line == dims.tp)}</i>"
            hue, light = colors[index % len(colors)]
            yield _cell(holder, index, f"--h:{hue};--l:{light};--b:{holder.nbytes / most:.3f}")
        yield "</div>"
    yield "</article>"


def _line_label(holder: Holder, *, is_whole: bool) -> str:
    """What stands before a line of cells: its dp; and where lines go on, the TP rank it begins with."""
    if is_whole:
        return f"{'dp ' if holder.dp == 0 else ''}{holder.dp}"
    return f"dp {holder.dp} tp {holder.tp}"


def _cell(holder: Holder, index: int, style: str) -> str:
    size = human_bytes(holder.nbytes)
    place = "".join(
        f", {axis} {value}"
        for axis, value in (("stage", holder.stage), ("dp", holder.dp), ("tp", holder.tp))
        if value is not None
    )
    said = escape(f"{holder.label}{place}: {size}, {counted(holder.tensors, 'tensor')}")
    return (
        f'<a class=cell href="#rank={index}" data-h={index} style="{style}" title="{said}" aria-label="{said}">'
        f"<b>{escape(holder.label if holder.rank is None else str(holder.rank))}</b><span>{size}</span></a>"
    )


def _bytes(layout: Layout) -> Iterator[str]:
    balance = layout.balance()
    if balance is None:
        return
    kind = "rank" if layout.by_rank else "file"
    sizes = [holder.nbytes for holder in layout.holders]
    step = -(-len(sizes) // _MOST_BARS)
    bars = [max(sizes[at : at + step]) for at in range(0, len(sizes), step)]
    colors = colors_of(layout)
    gap = 0.12 if len(bars) <= 256 else 0.0
    top = balance["max"]
    said = escape(balance_text(balance))
    yield '<section aria-labelledby="bytes">'
    yield f'<h2 id="bytes">Bytes per {kind}</h2>'
    yield f"<p class=lead>{said}</p>"
    yield f"<div class=chart><span class=top>{human_bytes(top)}</span>"
    yield (
        f'<svg viewBox="0 0 {len(bars)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Bytes of tensor data per {kind}: {said}">'
    )
    for index, size in enumerate(bars):
        hue, light = colors[index * step % len(colors)]
        height = round(100 * size / top, 2)
        mark = f" data-h={index}" if step == 1 else ""
        yield (
            f'<rect x="{index + gap:g}" y="{100 - height:g}" width="{1 - 2 * gap:g}" height="{height:g}"{mark} '
            f'style="--h:{hue};--l:{light}"/>'
        )
    mean = round(100 - 100 * balance["mean"] / top, 2)
    yield f'<line x1="0" x2="{len(bars)}" y1="{mean}" y2="{mean}"/></svg>'
    last = layout.holders[-1]
    ends = (layout.holders[0].label, last.label) if layout.by_rank else ("first file", "last file")
    yield f"<span class=ends><span>{escape(ends[0])}</span><span>line: mean</span><span>{escape(ends[1])}</span></span>"
    yield "</div></section>"


def _tensors(layout: Layout) -> Iterator[str]:
    groups = layout.groups
    patterns = counted(len({group.pattern for group in groups}), "pattern")
    yield '<section aria-labelledby="tensors">'
    yield '<h2 id="tensors">Tensors</h2>'
    yield (
        f"<p class=lead>{counted(sum(g.count for g in groups), 'tensor')} of {patterns}; "
        f"{f'{layout.cut_tensors:,}' if layout.cut_tensors else 'none'} in more than one piece. Pick one to see where "
        "it lies.</p>"
    )
    yield '<div class=panes><div class=list><label id="search" hidden>Search names'
    yield '<input type="search" placeholder="layers.3 q_proj" spellcheck="false" autocomplete="off"></label>'
    yield '<nav id="rows" aria-label="tensors by pattern">'
    for index, group in _listed(layout):
        yield _row(layout, index, group)
    yield "</nav>"
    if len(groups) > _MOST_ROWS:
        yield f"<p class=note>{counted(len(groups) - _MOST_ROWS, 'more pattern')}; search finds them.</p>"
    yield "</div>"
    yield '<div class=detail id="detail">'
    yield "<noscript>Each row shows its cut in small; scripts draw it to scale.</noscript>"
    yield "</div></div></section>"


def _listed(layout: Layout) -> list[tuple[int, TensorGroup]]:
    """Groups and their indices, those of one pattern one after another, as many as are listed without a search."""
    order = {group.pattern: index for index, group in reversed(list(enumerate(layout.groups)))}
    return sorted(enumerate(layout.groups), key=lambda item: order[item[1].pattern])[:_MOST_ROWS]


def _row(layout: Layout, index: int, group: TensorGroup) -> str:
    first, members = next(iter(group.members.items()))
    cut = layout.cuts[group.cut]
    pattern = ".".join("<em>*</em>" if part == "*" else escape(part) for part in group.pattern.split("."))
    count = f"<b>{group.count:,}&times;</b> " if group.count > 1 else ""
    said = f"{count}{escape(group.dtype.name)} [{', '.join(map(str, cut.shape))}]"
    target = quote(one_line(name_of(group.pattern, members[0]), longest=0), safe="")
    return (
        f'<a class=row href="#tensor={target}" data-g={index}><svg viewBox="0 0 48 32" aria-hidden="true">'
        f'<use href="#{symbol_id(layout, group.cut, first)}"/></svg><span class=name>{pattern}</span>'
        f"<span class=meta>{said} <span>{escape(cut_text(cut))}</span></span></a>"
    )
