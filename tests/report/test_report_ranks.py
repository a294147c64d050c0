"""The table of `inspect --ranks`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckptx.layout.parallel_dims import ParallelDims
from ckptx.model_view.rank_layout import Holder, Layout
from ckptx.report.ranks import layout_report, ranges_text, rank_rows
from ckptx.report.text import inspect_text
from tests.report.made import inspected


def said(dims: ParallelDims | None, holders: Sequence[Holder]) -> list[str]:
    layout = Layout(list(holders), dims, [], [], {})
    report = inspected(
        tensors=9, dtypes={"before": {"BF16": 9}}, by_rank=layout_report(layout), ranks=rank_rows(layout)
    )
    return inspect_text(report).splitlines()


def ranks_of(dims: ParallelDims) -> list[Holder]:
    holders = []
    for rank in range(dims.world_size):
        pp, dp, tp = dims.coordinates(rank)
        holders.append(Holder(f"rank {rank}", rank, pp, dp, tp, 3, 1024 + rank, [f"__{rank}_0.distcp"]))
        holders[-1].layers = {("layers", pp)}
    return holders


def test_a_row_for_each_rank() -> None:
    lines = said(dims := ParallelDims(2, 2), ranks_of(dims))
    assert lines[6] == "  mesh          tp 2 x pp 2 x dp_shard 1, 4 ranks"
    assert " ".join(lines[8].split()) == "rank stage dp tp layers tensors bytes vs mean files"
    assert " ".join(lines[11].split()) == "2 1 0 0 layers 1 3 1.00 KiB 1.00 1"
    extremes = "max 1.00 KiB (rank 3), min 1.00 KiB (rank 0), max/mean 1.00"
    assert lines[-1] == f"  balance       tensor bytes per rank: mean 1.00 KiB, {extremes}"
    assert not any(line.split()[:1] == ["w"] for line in lines)


def test_files_without_ranks_are_balanced_as_files() -> None:
    lines = said(None, [Holder("a.safetensors", None, tensors=1, nbytes=4), Holder("b.safetensors", None)])
    assert lines[-1].startswith("  balance       tensor bytes per file: mean 2 B, max 4 B, min 0 B")


def test_many_ranks_are_summed_up_by_stage() -> None:
    lines = said(dims := ParallelDims(8, 16, 8), ranks_of(dims))
    assert len(lines) < 40
    (stage,) = [line for line in lines if line.split()[:2] == ["3", "192-255"]]
    assert stage.split()[2:4] == ["layers", "3"]
    rows = [line.split()[0] for line in lines[-7:-1]]
    assert rows == ["1023", "1022", "1021", "2", "1", "0"]


def test_what_is_unknown_is_a_dash() -> None:
    lines = said(None, [Holder("rank 0", 0, tensors=1, nbytes=4), Holder("rank 7", 7)])
    assert (
        "  mesh          unknown, 2 ranks from file names; ranks that have layers in common are shown as one stage"
        in lines
    )
    assert "  sharded       no tensors" in lines
    assert " ".join(lines[-2].split()) == "7 - - - - 0 0 B 0.00 0"


def test_files_are_listed_where_there_are_no_ranks() -> None:
    lines = said(None, [Holder(f"model-{i:05d}.safetensors", tensors=1, nbytes=4) for i in range(70)])
    assert "  mesh          not sharded" in lines
    assert lines[-2] == "    and 6 more files, --json lists all"
    assert lines[-3].split() == ["model-00063.safetensors", "-", "1", "4", "B"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([3, 1, 2], "1-3"), ([0, 2, 3], "0, 2-3"), (range(64, 128), "64-127")]
)
def test_numbers_as_ranges(numbers: Sequence[int], text: str) -> None:
    assert ranges_text(numbers) == text
