"""Output of `inspect --ranks`: report entries of ranks and files, and a table that is readable for a thousand ranks.

A holder is a rank, or a file if ranks are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptx.model_view.rank_layout import Holder, Layout, format_layer_ranges, layer_ranges
from ckptx.report.documents.inspection import RanksOfInspection
from ckptx.report.mesh_sizes import sizes_text
from ckptx.report.report import counted, human_bytes

_MAX_ROWS = 64  # more ranks are summarized by stage; more files or stages are not listed
_NUM_EXTREMES = 3  # largest and smallest ranks listed below the summary
_MAX_LAYERS_LENGTH = 60  # characters


def layout_report(layout: Layout) -> RanksOfInspection:
    """Return the mesh and the balance of its ranks; if ranks are unknown, the balance and entries of the files."""
    dims, mesh = layout.dims, None
    if dims is not None:
        stages = [layer_ranges(_layers_of_holders(holders)) for _, holders in layout.holders_by_stage()]
        mesh = {"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "stages": stages}
        if dims.ep > 1:
            mesh["ep"] = dims.ep
    by_file = [
        {"file": holder.label, "layers": holder.layer_ranges(), "tensors": holder.tensor_count, "bytes": holder.nbytes}
        for holder in layout.holders
    ]
    return RanksOfInspection(
        layout=mesh,
        sharded_tensors=layout.sharded_count,
        stored_by_one_tp_rank=layout.once_stored_count,
        balance=layout.balance(),
        by_file=None if layout.has_ranks else by_file,
    )


def rank_rows(layout: Layout) -> list[dict[str, Any]]:
    """Return the entry of the report for each rank; none if ranks are unknown."""
    return [
        {
            "rank": holder.rank,
            "stage": holder.stage,
            "dp": holder.dp,
            "tp": holder.tp,
            **({} if holder.ep is None else {"ep": holder.ep}),
            "layers": holder.layer_ranges(),
            "tensors": holder.tensor_count,
            "bytes": holder.nbytes,
            "files": holder.files,
        }
        for holder in (layout.holders if layout.has_ranks else ())
    ]


def mesh_text(layout: dict[str, Any] | None, num_ranks: int) -> str:
    """Return the mesh and its number of ranks: `tp 2 x pp 1 x dp_shard 2, 4 ranks`.

    Args:
        layout: Sizes of the mesh, as in `RanksOfInspection.layout`; None if the mesh is unknown.
        num_ranks: Number of ranks; 0 if the files are not those of ranks.
    """
    if not num_ranks:
        return "not sharded"
    if layout is None:
        return f"unknown, {counted(num_ranks, 'rank')} from file names"
    return f"{sizes_text(layout)}, {counted(num_ranks, 'rank')}"


def rank_lines(mesh_report: RanksOfInspection, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the summary about the mesh and its ranks, or about files without ranks.

    Args:
        mesh_report: Mesh, balance and files, from `layout_report`.
        rows: Entries of ranks, from `rank_rows`.
    """
    mesh = mesh_text(mesh_report.layout, len(rows))
    if rows and mesh_report.layout is None:
        mesh += "; ranks that have layers in common are shown as one stage"
    lines = [f"  mesh          {mesh}"]
    sharded = counted(mesh_report.sharded_tensors, "tensor") if mesh_report.sharded_tensors else "no tensors"
    lines.append(f"  sharded       {sharded}")
    if mesh_report.stored_by_one_tp_rank:
        replicated = counted(mesh_report.stored_by_one_tp_rank, "tensor")
        lines.append(
            f"  replicated    {replicated} by TP; only tp 0 stores them, and other TP ranks read them from there"
        )
    if not rows:
        lines += _file_lines(mesh_report.by_file or ())
    elif len(rows) <= _MAX_ROWS:
        lines += _rank_table(rows, mesh_report.balance)
    else:
        lines += _summary_lines(rows, mesh_report.balance)
    if mesh_report.balance:
        holder = "rank" if rows else "file"
        lines.append(f"  balance       tensor bytes per {holder}: {balance_text(mesh_report.balance)}")
    return lines


def balance_text(balance: dict[str, Any]) -> str:
    """Return mean and extremes of the bytes per rank, or per file if ranks are unknown."""
    most, least = (
        f"{human_bytes(balance[end])}{'' if rank is None else f' (rank {rank})'}"
        for end, rank in (("max", balance["max_rank"]), ("min", balance["min_rank"]))
    )
    return f"mean {human_bytes(balance['mean'])}, max {most}, min {least}, max/mean {balance['max_over_mean']:.2f}"


_RANK_COLUMNS = ("rank", "stage", "dp", "tp", "layers", "tensors stored", "bytes", "vs mean", "files")


def _rank_table(rows: Sequence[dict[str, Any]], balance: dict[str, Any] | None) -> list[str]:
    """Return a table of ranks, with a column for the expert-parallel rank if there is one."""
    if not any("ep" in row for row in rows):
        return _table(_RANK_COLUMNS, [_rank_cells(row, balance) for row in rows])
    cells = [[*cells[:4], str(row["ep"]), *cells[4:]] for row in rows for cells in [_rank_cells(row, balance)]]
    return _table((*_RANK_COLUMNS[:4], "ep", *_RANK_COLUMNS[4:]), cells)


def _rank_cells(row: dict[str, Any], balance: dict[str, Any] | None) -> list[str]:
    return [
        str(row["rank"]),
        *("-" if row[axis] is None else str(row[axis]) for axis in ("stage", "dp", "tp")),
        _layers_text(row["layers"]),
        f"{row['tensors']:,}",
        human_bytes(row["bytes"]),
        f"{row['bytes'] / balance['mean']:.2f}" if balance else "-",
        str(len(row["files"])),
    ]


def _file_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    shown = rows[:_MAX_ROWS]
    cells = [
        [row["file"], _layers_text(row["layers"]), f"{row['tensors']:,}", human_bytes(row["bytes"])] for row in shown
    ]
    num_unlisted = len(rows) - len(shown)
    more = [f"    and {counted(num_unlisted, 'more file')}, --json lists all"] if num_unlisted else []
    return _table(("file", "layers", "tensors", "bytes"), cells) + more


def _summary_lines(rows: Sequence[dict[str, Any]], balance: dict[str, Any] | None) -> list[str]:
    """Return a line for each stage, then the largest and smallest ranks."""
    by_stage: dict[int | None, list[dict[str, Any]]] = {}
    for row in rows:
        by_stage.setdefault(row["stage"], []).append(row)
    shown = sorted(by_stage.items(), key=lambda item: (item[0] is None, item[0]))
    cells = []
    for stage, members in shown[:_MAX_ROWS]:
        sizes = [row["bytes"] for row in members]
        layers = layer_ranges(
            (path, i) for row in members for path, first, stop in row["layers"] for i in range(first, stop)
        )
        mean = sum(sizes) / len(sizes)
        cells.append(
            [
                "-" if stage is None else str(stage),
                ranges_text([row["rank"] for row in members]),
                _layers_text(layers),
                human_bytes(min(sizes)),
                human_bytes(mean),
                human_bytes(max(sizes)),
                f"{mean / balance['mean']:.2f}" if balance else "-",
            ]
        )
    lines = _table(("stage", "ranks", "layers", "min", "mean", "max", "vs mean"), cells)
    if len(shown) > _MAX_ROWS:
        lines.append(f"    and {counted(len(shown) - _MAX_ROWS, 'more stage')}, --json lists all ranks")
    ordered = sorted(rows, key=lambda row: (-row["bytes"], row["rank"]))
    extremes = [*ordered[:_NUM_EXTREMES], *ordered[-_NUM_EXTREMES:]]
    lines.append("    largest and smallest ranks; --json lists all")
    return lines + _rank_table(extremes, balance)


def ranges_text(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: `0-3, 8`."""
    return format_layer_ranges(layer_ranges(("", number) for number in set(numbers))).strip()


def _layers_of_holders(holders: list[Holder]) -> set[tuple[str, int]]:
    return {layer for holder in holders for layer in holder.layers}


def _layers_text(layers: Sequence[tuple[str, int, int]]) -> str:
    """Return ranges of layers, given as path, first index and index after the last one, in at most 60 characters."""
    text = format_layer_ranges(layers)
    return text if len(text) <= _MAX_LAYERS_LENGTH else f"{text[: _MAX_LAYERS_LENGTH - 4].rstrip(' ,;')} ..."


_LEFT_ALIGNED = {"layers", "file", "ranks"}


def _table(columns: Sequence[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = []
    for row in (columns, *rows):
        cells = (
            cell.ljust(width) if title in _LEFT_ALIGNED else cell.rjust(width)
            for title, cell, width in zip(columns, row, widths, strict=True)
        )
        lines.append("    " + "  ".join(cells).rstrip())
    return lines
