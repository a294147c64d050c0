"""The table of `inspect --ranks`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import ShardedChunks, TensorEntry
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage
from ckptx.model_view.rank_layout import Holder, Layout, layout_by_rank
from ckptx.report.html_data import page_data
from ckptx.report.ranks import layout_report, ranges_text, rank_rows
from ckptx.report.text import inspect_text
from tests.report.made import inspected

BF16 = DTYPES_BY_NAME["BF16"]


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
    assert " ".join(lines[8].split()) == "rank stage dp tp layers tensors stored bytes vs mean files"
    assert " ".join(lines[11].split()) == "2 1 0 0 layers 1 3 1.00 KiB 1.00 1"
    extremes = "max 1.00 KiB (rank 3), min 1.00 KiB (rank 0), max/mean 1.00"
    assert lines[-1] == f"  balance       tensor bytes per rank: mean 1.00 KiB, {extremes}"
    assert not any(line.split()[:1] == ["w"] for line in lines)


@pytest.mark.parametrize(("replicate", "said_of"), [(False, "1 tensor"), (True, "")])
def test_replicated_tensors_that_one_tp_rank_stores(replicate: bool, said_of: str) -> None:
    dims = ParallelDims(2, 1, 2)
    blocks = {"split": blocks_of_stage((4, 4), Placement(1, (4,)), dims, replicate)}
    blocks["norm"] = blocks_of_stage((4,), None, dims, replicate)
    catalog = Catalog(Path("made"), "dcp", {})
    catalog.files.update({f"__{rank}_0.distcp": 64 for rank in range(4)})
    for name, each in blocks.items():
        files = tuple(f"__{block.rank_in_stage}_0.distcp" for block in each)
        lengths = tuple(BF16.nbytes(block.region.numel) for block in each)
        chunks = ShardedChunks(each, files, array("q", range(0, 64 * len(each), 64)), lengths)
        catalog.tensors[name] = TensorEntry(name, BF16, (4, 4) if name == "split" else (4,), chunks)
    layout = layout_by_rank(catalog, {name: name for name in catalog.tensors}, dims)
    assert layout.once_stored_count == (not replicate)
    by_rank = layout_report(layout)
    assert by_rank.stored_by_one_tp_rank == (not replicate)
    lines = inspect_text(inspected(tensors=2, by_rank=by_rank, ranks=rank_rows(layout))).splitlines()
    found = [line.split("  ")[-1].partition(" by TP")[0] for line in lines if line.startswith("  replicated ")]
    assert found == ([said_of] if said_of else [])
    texts = [sharding["text"] for sharding in page_data(layout)["shardings"]]
    assert [text.partition("; ")[2] for text in texts] == [
        "", "" if replicate else "replicated by TP, stored only by tp 0"
    ]  # fmt: skip


def test_files_without_ranks_are_balanced_as_files() -> None:
    lines = said(None, [Holder("a.safetensors", None, tensor_count=1, nbytes=4), Holder("b.safetensors", None)])
    assert lines[-1].startswith("  balance       tensor bytes per file: mean 2 B, max 4 B, min 0 B")


def test_many_ranks_are_summed_up_by_stage() -> None:
    lines = said(dims := ParallelDims(8, 16, 8), ranks_of(dims))
    assert len(lines) < 40
    (stage,) = [line for line in lines if line.split()[:2] == ["3", "192-255"]]
    assert stage.split()[2:4] == ["layers", "3"]
    rows = [line.split()[0] for line in lines[-7:-1]]
    assert rows == ["1023", "1022", "1021", "2", "1", "0"]


def test_what_is_unknown_is_a_dash() -> None:
    lines = said(None, [Holder("rank 0", 0, tensor_count=1, nbytes=4), Holder("rank 7", 7)])
    assert (
        "  mesh          unknown, 2 ranks from file names; ranks that have layers in common are shown as one stage"
        in lines
    )
    assert "  sharded       no tensors" in lines
    assert " ".join(lines[-2].split()) == "7 - - - - 0 0 B 0.00 0"


def test_files_are_listed_where_there_are_no_ranks() -> None:
    lines = said(None, [Holder(f"model-{i:05d}.safetensors", tensor_count=1, nbytes=4) for i in range(70)])
    assert "  mesh          not sharded" in lines
    assert lines[-2] == "    and 6 more files, --json lists all"
    assert lines[-3].split() == ["model-00063.safetensors", "-", "1", "4", "B"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([3, 1, 2], "1-3"), ([0, 2, 3], "0, 2-3"), (range(64, 128), "64-127")]
)
def test_numbers_as_ranges(numbers: Sequence[int], text: str) -> None:
    assert ranges_text(numbers) == text
