"""`reshard --virtual-stages`: each rank of an interleaved or V schedule finds all of its stages in its own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import UsageError
from ckptx.runtime.parallel.pipeline.schedules import SCHEDULES, can_split_backward
from tests.support.models import EVERY, write
from tests.support.sharded_files import read_dcp_regions, with_layers
from tests.support.slow import slow_but

# Schedule, style of the files, and the split of six layers over four stages.
CASES = [
    ("interleaved1f1b", "loop", "even"),
    ("interleaved1f1b", "loop", "1,2,2,1"),
    ("zbvzerobubble", "v", "even"),
    ("dualpipev", "v", "2,1,1,2"),
]


def skip_if_unsupported(schedule: str) -> None:
    """Skip a test of a schedule that the installed torch cannot run."""
    if SCHEDULES[schedule].splits_backward and not can_split_backward():
        pytest.skip("this torch cannot split the backward pass")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 layers, and a head of its own."""
    path = tmp_path_factory.mktemp("llama") / "hf"
    write(with_layers("llama-untied", 6), path)
    return path


@pytest.mark.parametrize(
    ("schedule", "style", "split"),
    slow_but(CASES, [("interleaved1f1b", "loop", "1,2,2,1"), ("zbvzerobubble", "v", "even")]),
)
def test_a_rank_reads_its_own_stages_only(hf: Path, tmp_path: Path, schedule: Any, style: Any, split: str) -> None:
    skip_if_unsupported(schedule)
    cut = tmp_path / "cut"
    ckptx.reshard(hf, cut, to="dcp", pp=2, virtual_stages=2, schedule_style=style, pp_split=split)
    report = ckptx.verify(hf, cut, run=True, pp=2, schedule=schedule, microbatches=4)
    assert (report.exit, report.stages) == (0, 4)
    found = ckptx.inspect(cut, ranks=True)
    assert report.bytes_read_per_rank == [row["bytes"] for row in found.ranks]
    recorded = [f"using the stages of {cut / 'ckptx.json'}: --pp-split {split}"]
    assert [note for note in report.notes if "stages" in note] == (recorded if split != "even" else [])


def test_the_stages_of_another_schedule_are_not_used(hf: Path, tmp_path: Path) -> None:
    """Their ranks have other layers, so that counts that were recorded for one say nothing about the other."""
    skip_if_unsupported("zbvzerobubble")
    cut = tmp_path / "cut"
    ckptx.reshard(hf, cut, to="dcp", pp=2, virtual_stages=2, schedule_style="loop", pp_split="1,2,2,1")
    report = ckptx.verify(hf, cut, run=True, pp=2, schedule="zbvzerobubble", microbatches=4)
    assert report.exit == 0 and not [note for note in report.notes if "using the stages" in note]


@pytest.mark.parametrize("style", ["loop", "v"])
@pytest.mark.parametrize("model", slow_but(EVERY, ["llama-tied", "t5", "mixtral"]))
def test_all_tensors_are_written_once(tmp_path: Path, model: str, style: Any) -> None:
    write(EVERY[model], tmp_path / "hf")
    options: dict[str, Any] = {"virtual_stages": 2, "schedule_style": style, "pp_split": "even"}
    try:
        ckptx.reshard(tmp_path / "hf", tmp_path / "cut", to="dcp", tp=2, pp=2, **options)
    except UsageError as error:  # fewer layers than stages
        assert "each stage requires a layer" in str(error)
        return
    except ckptx.errors.UnsupportedError as error:
        assert "cannot find the layer list" in str(error)
        return
    assert ckptx.verify(tmp_path / "hf", tmp_path / "cut").ok
    assert read_dcp_regions(tmp_path / "cut")


def test_four_stages_in_the_report(hf: Path, tmp_path: Path) -> None:
    report = ckptx.reshard(hf, tmp_path / "cut", pp=2, virtual_stages=2, schedule_style="v")
    assert report.layout is not None
    assert (report.layout["pp"], report.layout["virtual_stages"], report.layout["schedule_style"]) == (2, 2, "v")
    assert [stage[0][1:] for stage in report.layout["stages"]] == [[0, 2], [2, 4], [4, 5], [5, 6]]
    assert [row["layers"] for row in ckptx.inspect(tmp_path / "cut", ranks=True).ranks] == [
        [("model.layers", 0, 2), ("model.layers", 5, 6)],
        [("model.layers", 2, 5)],
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pp": 2, "virtual_stages": 3, "schedule_style": "v"}, "--schedule-style v has two stages per pipeline rank"),
        ({"virtual_stages": 2}, "--virtual-stages requires --pp 2 or more"),
        ({"pp": 2, "schedule_style": "v"}, "--schedule-style requires --virtual-stages 2 or more"),
        ({"pp": 2, "virtual_stages": 4}, "6 layers for 8 stages, but each stage requires a layer"),
        ({"pp": 2, "virtual_stages": 2, "pp_split": "3,3"}, "expected 4 stages with 6 layers"),
    ],
)
def test_what_no_schedule_has_is_refused(hf: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ckptx.reshard(hf, tmp_path / "cut", **options)
    assert not (tmp_path / "cut").exists()
