"""The report as a document and as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptx.catalog.dtype import BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.report.report import Report, count_dtypes, human_bytes
from ckptx.report.text import conversion_text, diff_text, verify_text


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0 B"), (1024, "1.00 KiB"), (5 << 20, "5.00 MiB"), (3 << 29, "1.50 GiB"), (4 << 40, "4.00 TiB")],
)
def test_bytes_for_people(nbytes: int, said: str) -> None:
    assert human_bytes(nbytes) == said


def test_dtypes_are_counted_by_name() -> None:
    entries = [TensorEntry("x", BY_NAME[name], (), ()) for name in ("F32", "BF16", "F32")]
    assert list(count_dtypes(entries).items()) == [("BF16", 1), ("F32", 2)]


def test_the_document_is_written_as_printed(tmp_path: Path) -> None:
    report = Report("verify", exit=1, details={"compared": 3})
    report.write(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == report.to_json()
    document = json.loads(report.to_json())
    assert (document["ok"], document["compared"], document["schema_version"]) == (False, 3, 2)


def test_details_do_not_hide_what_every_report_has() -> None:
    report = Report("verify", details={"dtype_kept": []})
    assert not report.details.keys() & (Report("x").to_dict().keys())


def test_time_and_memory_are_taken_at_the_end() -> None:
    report = Report("convert hf2dcp", bytes_written=10**9).finish()
    assert report.seconds > 0
    assert report.gb_per_s == pytest.approx(1 / report.seconds)
    assert report.peak_rss > 1 << 20


def conversion() -> Report:
    report = Report("convert hf2dcp", tensors=1, bytes_written=2 << 20)
    report.dtypes = {"before": {"F32": 1}, "after": {"BF16": 1}}
    return report


def test_a_summary_names_what_was_done_and_what_was_not() -> None:
    report = conversion()
    report.aliases = {f"alias{i:02d}": "w" for i in range(30)}
    report.dropped = [{"name": f"optimizer.{i}", "reason": "optimizer state is not converted to HF"} for i in range(3)]
    report.edits = [{"key": "dtype", "before": "float32", "after": "bfloat16"}]
    report.details = {"kept_dtype": ["a", "b"], "prefix": "model.", "architecture": None}
    lines = conversion_text(report).splitlines()
    assert lines[0] == "wrote 1 tensor, 2.00 MiB"
    assert "dtypes: F32 1 -> BF16 1" in lines
    assert 'prefix: "model." removed from names' in lines
    assert "dropped: 3 tensors (optimizer state is not converted to HF)" in lines
    assert "config.json: dtype: 'float32' -> 'bfloat16'" in lines
    assert "dtype kept: 2 tensors (a, ...)" in lines
    assert sum(line.startswith("alias: ") for line in lines) == 20


def test_a_long_list_of_differences_is_cut_and_says_so() -> None:
    rows = [{"name": f"t{i}", "what": "missing", "a": "F32 [1]", "b": None} for i in range(25)]
    report = Report("verify", exit=1, details={"compared": 30, "differing": rows})
    lines = verify_text(report).splitlines()
    assert lines[0] == "t0: missing: F32 [1] and absent"
    assert lines[20] == "and 5 more, --json lists all"
    assert lines[21] == "DIFFERENT: 25 tensors of 30 tensors compared"


def test_a_diff_without_differences() -> None:
    report = Report("diff", details={"compared": 1, "differing": [], "tied": []})
    assert diff_text(report) == "1 common name: the checkpoints have equal names, shapes and dtypes"
