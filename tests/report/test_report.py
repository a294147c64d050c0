"""The report as a document and as text."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.report import documents
from ckptx.report.documents.comparison import DiffReport, VerifyReport
from ckptx.report.documents.inspection import RanksOfInspection
from ckptx.report.report import Log, Report, Stopwatch, count_dtypes, human_bytes
from ckptx.report.text import conversion_text, diff_text, inspect_text, verify_text
from tests.report.made import converted, inspected


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 B"), (1023, "1023 B"), (1023.6, "1.00 KiB"), (1024, "1.00 KiB"), ((1 << 20) - 100, "1023.90 KiB"),
        ((1 << 20) - 1, "1.00 MiB"), (5 << 20, "5.00 MiB"), (3 << 29, "1.50 GiB"), ((1 << 40) - 1, "1.00 TiB"),
        (4 << 40, "4.00 TiB"),
    ],
)  # fmt: skip
def test_bytes_for_people(nbytes: int, said: str) -> None:
    assert human_bytes(nbytes) == said


def test_dtypes_are_counted_by_name() -> None:
    entries = [TensorEntry("x", DTYPES_BY_NAME[name], (), ()) for name in ("F32", "BF16", "F32")]
    assert list(count_dtypes(entries).items()) == [("BF16", 1), ("F32", 2)]


def test_the_document_is_written_as_printed(tmp_path: Path) -> None:
    report = VerifyReport(command="verify", exit=1, parameters=9, compared=3, total=3, differing=[])
    report.write(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == report.to_json()
    document = json.loads(report.to_json())
    assert (document["ok"], document["compared"], document["schema_version"]) == (False, 3, 3)


REPORTS = [each for each in vars(documents).values() if isinstance(each, type) and issubclass(each, Report)]


@pytest.mark.parametrize("made", REPORTS)
def test_a_document_says_everything_but_what_is_optional(made: type[Report]) -> None:
    """Of every command: no field is hidden by another, and one that is None is there unless it is optional."""
    given = {each.name: None for each in fields(made) if each.default is MISSING and each.default_factory is MISSING}
    document = made(**given | {"command": "x"}).to_dict()
    expected = {each.name for each in fields(made) if not each.metadata.get("optional")}
    assert document.keys() == expected | {"schema_version", "ok"}
    assert all(document[name] is None for name in given if name != "command")


def test_what_ranks_hold_stands_beside_the_other_fields() -> None:
    by_rank = RanksOfInspection(layout=None, sharded_tensors=3, balance=None, by_file=[{"file": "a"}])
    document = inspected(by_rank=by_rank).to_dict()
    assert (document["layout"], document["sharded_tensors"], document["balance"]) == (None, 3, None)
    assert document["stored_by_one_tp_rank"] == 0
    assert document["by_file"] == [{"file": "a"}] and "by_rank" not in document
    assert "by_file" not in inspected(by_rank=replace(by_rank, by_file=None)).to_dict()


def test_time_and_memory_are_taken_at_the_end() -> None:
    report = Stopwatch().stop(converted(bytes_written=10**9))
    assert report.seconds > 0
    assert report.written_gb_per_s == pytest.approx(1 / report.seconds)
    assert report.peak_rss > 1 << 20


def test_a_log_keeps_what_was_said_before_an_error() -> None:
    log = Log()
    view = log(Noted(("first", "second")))
    log.note("third")
    assert view.notes == ("first", "second")
    assert log.notes == ["first", "second", "third"]


class Noted(NamedTuple):
    """A value with notes."""

    notes: tuple[str, ...]


def test_a_summary_names_what_was_done_and_what_was_not() -> None:
    report = converted(
        aliases={f"alias{i:02d}": "w" for i in range(30)},
        dropped=[
            *({"name": f"optimizer.{i}", "reason": "optimizer state is not converted to HF"} for i in range(3)),
            {"name": "step", "reason": "training state is not converted to HF"},
        ],
        dropped_optimizer={"tensors": 3, "bytes": 3 << 20},
        objects={"count": 2, "bytes": 5},
        config_edits=[{"key": "dtype", "before": "float32", "after": "bfloat16"}],
        dtype_unchanged=["a", "b"],
        prefix="model.",
    )
    lines = conversion_text(report).splitlines()
    assert lines[0] == "wrote 1 tensor, 2.00 MiB in files"
    assert "dtypes: F32 (1 tensor) -> BF16 (1 tensor)" in lines
    assert 'prefix: "model." removed from names' in lines
    assert [line for line in lines if line.startswith("dropped: ")] == [
        "dropped: 3 tensors, 3.00 MiB (optimizer state is not converted to HF)",
        "dropped: 1 tensor (training state is not converted to HF)",
        "dropped: 2 pickled objects, 5 B",
    ]
    assert "config.json: dtype: 'float32' -> 'bfloat16'" in lines
    assert "not cast by --dtype: 2 tensors (a, ...)" in lines
    assert sum(line.startswith("alias: ") for line in lines) == 20


@pytest.mark.parametrize(
    ("prefix", "output_prefix", "text"),
    [
        ("model.", None, 'prefix: "model." removed from names'),
        ("model.", "model.", 'prefix: "model." kept in names'),
        (None, "model.", 'prefix: "model." added to names'),
        (None, None, None),
    ],
)
def test_a_prefix_is_kept_removed_or_added(prefix: str | None, output_prefix: str | None, text: str | None) -> None:
    lines = conversion_text(converted(prefix=prefix, output_prefix=output_prefix)).splitlines()
    assert [line for line in lines if line.startswith("prefix")] == ([text] if text else [])


def test_nothing_that_was_not_dropped_is_listed() -> None:
    empty = {"dropped_optimizer": {"tensors": 0, "bytes": 0}, "objects": {"count": 0, "bytes": 0}}
    assert "dropped" not in conversion_text(converted(**empty))
    assert "dropped" not in conversion_text(converted(objects={"count": 3, "is_copied": True}))


@pytest.mark.parametrize(
    ("action", "output_names", "text"),
    [
        ("alias", ["head", "tok"], "tied: head = tok, one tensor with two names (source: evidence)"),
        ("copy", ["head", "tok"], "tied: head = tok, stored under both names, as copies (source: evidence)"),
        ("single", [None, "tok"], "tied: lm_head = embed, stored as tok (source: evidence)"),
        ("single", [None, None], "tied: lm_head = embed, stored under one name (source: evidence)"),
        ("keep-both", ["head", "tok"], "not tied: head, tok (source: evidence)"),
        ("none", [None, "tok"], "not tied: lm_head, embed (source: evidence)"),
    ],
)
def test_a_tie_is_one_line_in_the_names_of_the_output(action: str, output_names: list[str | None], text: str) -> None:
    tie = {"name": "lm_head", "tied_to": "embed", "declared": True, "evidence": "evidence", "action": action}
    aliases = {"head": "tok"} if action == "alias" else {}
    lines = conversion_text(converted(ties=[tie | {"output_names": output_names}], aliases=aliases)).splitlines()
    assert [line for line in lines if "tied" in line or "alias" in line] == [text]


def test_tensors_of_the_model_have_titles() -> None:
    lines = inspect_text(inspected(optimizer={"tensors": 2, "bytes": 8})).splitlines()
    assert lines[-2:] == ["    names  tensors  bytes", "    w      9        1 B"]
    row = {"name": "w", "dtype": "F32", "shape": [2], "bytes": 8, "files": ["a"]}
    lines = inspect_text(inspected(selected_tensors=[row])).splitlines()
    assert lines[-2:] == ["    tensor  dtype  shape  bytes  files", "    w       F32    [2]    8 B    a"]
    assert "files" not in inspect_text(inspected(selected_tensors=[])).splitlines()[-1]


def test_names_of_shared_bytes_and_copies() -> None:
    lines = inspect_text(inspected(alias_groups=[["embed", "head", "tail"]], tied_groups=[["a", "b"]])).splitlines()
    assert "  alias         tail = head = embed" in lines
    assert "  tied          a = b, stored as copies, counted once in parameters" in lines


def test_a_long_list_of_differences_is_cut_and_says_so() -> None:
    rows = [{"name": f"t{i}", "what": "missing", "a": "F32 [1]", "b": None} for i in range(25)]
    report = VerifyReport(command="verify", exit=1, parameters=9, compared=5, total=30, differing=rows)
    lines = verify_text(report).splitlines()
    assert lines[0] == "t0: missing: F32 [1] in the reference, absent in the checkpoint"
    assert lines[20] == "and 5 more; --json lists all"
    assert lines[21] == "DIFFERENT: 25 of 30 tensors differ"


def test_a_diff_without_differences() -> None:
    report = DiffReport(command="diff", parameters=9, compared=1, total=1, differing=[], tied_tensors=[])
    assert diff_text(report) == "EQUAL: 1 tensor has equal shapes and dtypes"


def test_a_report_is_short_in_a_terminal() -> None:
    for report_class in REPORTS:
        assert report_class.__repr__ is Report.__repr__, report_class
    assert repr(Report(command="convert to-hf", tensors=90)) == "<Report of convert to-hf: exit 0, 90 tensors>"
    assert repr(Report(command="verify", exit=3, error="a: gone")) == "<Report of verify: exit 3, 0 tensors, a: gone>"
