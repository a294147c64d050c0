"""The report of a conversion gives names, counts and prefixes of the output, not those of the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.report.documents.conversion import ConversionReport
from tests.conversion.steps import TIED
from tests.support.checkpoint_writers import llama, write_dcp, write_hf

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", llama(head=False), config=TIED)


def lines_about_ties(report: ConversionReport) -> list[str]:
    lines = report.summary().splitlines()
    return [line.partition(" (source: ")[0] for line in lines if line.startswith(("tied: ", "alias: ", "not tied: "))]


def test_a_tie_has_one_line_in_the_names_of_the_output(hf: Path, tmp_path: Path) -> None:
    report = ckptx.convert("hf2dcp", hf, tmp_path / "dcp", names="torchtitan")
    assert [row["output_names"] for row in report.ties] == [["lm_head.weight", "tok_embeddings.weight"]]
    assert lines_about_ties(report) == ["tied: lm_head.weight = tok_embeddings.weight, one tensor with two names"]
    back = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "back", base=str(hf))
    assert [(row["action"], row["output_names"]) for row in back.ties] == [("single", [None, EMBEDDING])]
    assert lines_about_ties(back) == [f"tied: lm_head.weight = tok_embeddings.weight, stored as {EMBEDDING}"]


@pytest.mark.parametrize(
    ("options", "action"),
    [
        ({"tp": 2, "to": "dcp", "prefix": "actor."}, "alias"),
        ({"tp": 2, "pp": 2, "to": "dcp", "prefix": "actor."}, "copy"),
        ({"to": "safetensors"}, "copy"),
    ],
)
def test_tied_names_below_a_prefix(hf: Path, tmp_path: Path, options: dict[str, Any], action: str) -> None:
    prefix = options.get("prefix", "")
    report = ckptx.reshard(hf, tmp_path / "out", **options)
    names = [f"{prefix}{HEAD}", f"{prefix}{EMBEDDING}"]
    assert [(row["action"], row["output_names"]) for row in report.ties] == [(action, names)]
    (line,) = lines_about_ties(report)
    assert line.startswith(f"tied: {names[0]} = {names[1]}, ")


@pytest.mark.parametrize("pp", [1, 2])
def test_sharded_and_replicated_names_add_up(hf: Path, tmp_path: Path, pp: int) -> None:
    report = ckptx.reshard(hf, tmp_path / "out", tp=2, pp=pp, to="dcp")
    sharded = sum(row["tensors"] for row in report.rules or () if row["dim"] is not None)
    assert sum(row["tensors"] for row in report.rules or ()) == report.tensors == len(llama())
    by_rank = ckptx.inspect(tmp_path / "out", ranks=True).by_rank
    assert by_rank is not None and by_rank.sharded_tensors == sharded
    assert report.replicated is not None and report.replicated["tensors"] == report.tensors - sharded


def test_a_prefix_that_is_kept_removed_or_added(hf: Path, tmp_path: Path) -> None:
    dcp = write_dcp(tmp_path / "dcp", {f"state.{name}": tensor for name, tensor in llama().items()})
    base = str(write_hf(tmp_path / "base", llama()))
    found = {
        "kept": ckptx.reshard(dcp, tmp_path / "kept", base=base, tp=2),
        "removed": ckptx.convert("dcp2hf", dcp, tmp_path / "removed", base=base),
        "added": ckptx.convert("hf2dcp", hf, tmp_path / "added", prefix="state."),
        "none": ckptx.convert("hf2dcp", hf, tmp_path / "none"),
    }
    assert {kind: (report.prefix, report.output_prefix) for kind, report in found.items()} == {
        "kept": ("state.", "state."), "removed": ("state.", None), "added": (None, "state."), "none": (None, None),
    }  # fmt: skip


@pytest.mark.parametrize(("pp", "note"), [(1, ""), (2, " (a tied tensor once for each copy)")])
def test_a_dry_run_explains_what_it_would_read_again(hf: Path, tmp_path: Path, pp: int, note: str) -> None:
    report = ckptx.reshard(hf, tmp_path / "out", tp=2, pp=pp, to="dcp", dry_run=True)
    (line,) = [line for line in report.summary().splitlines() if line.startswith("would write")]
    assert line.partition("; would read ")[2].partition("iB")[2].partition(";")[0] == note


def test_dropped_state_is_reported_once(tmp_path: Path) -> None:
    moments = {f"optimizer.state.{name}.exp_avg": tensor for name, tensor in llama().items()}
    dcp = write_dcp(tmp_path / "dcp", llama() | moments)
    report = ckptx.convert("dcp2hf", dcp, tmp_path / "hf", base=str(write_hf(tmp_path / "base", llama())))
    assert not [note for note in report.notes if "dropped" in note]
    lines = [line for line in report.summary().splitlines() if "dropped" in line]
    assert len(lines) == 2
    assert lines[0].startswith(f"dropped: {len(moments)} tensors, ") and "optimizer state" in lines[0]
    assert lines[1] == f"source tensors: {2 * len(moments)} ({len(moments)} written, {len(moments)} dropped)"
