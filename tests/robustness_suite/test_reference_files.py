"""A run that changes what it is compared with: each change is found, named, and not compared with itself."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from ckptx.robustness_suite.reference_files import compare_file_snapshots, snapshot_files
from ckptx.robustness_suite.report_builder import ReportBuilder
from tests.robustness_suite.tampering import CHANGES, NO_CHANGES, tamper
from tests.robustness_suite.test_foreign_trainer import failed, notes, run

FILES = ("step-2/state.json", "step-2/model.safetensors", "step-5/optimizer.safetensors", "losses.jsonl", "step-2")
RUNS = {"rerun": "repeated run", "load-and-save": "run resumed for zero steps", "resumed": "resumed run"}
WORDS = {
    "other contents": "has other contents", "emptied": "has other contents", "appended": "has other contents",
    "one bit": "has other contents", "deleted": "was deleted", "renamed": "was renamed to", "added": "was added",
    "linked": "became a link",
}  # fmt: skip


def folder_of_a_run(root: Path) -> Path:
    """Two checkpoints, losses, and a link to the last."""
    for step in (2, 5):
        (root / f"step-{step}").mkdir(parents=True)
        for name in ("state.json", "model.safetensors", "optimizer.safetensors"):
            (root / f"step-{step}" / name).write_text(f"{step} {name}")
    (root / "losses.jsonl").write_text("{}")
    (root / "latest").symlink_to("step-5")
    return root


# ------------------------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize(("file", "change"), product(FILES, CHANGES))
@pytest.mark.parametrize("is_known", [False, True])
def test_every_change_is_seen_and_named(tmp_path: Path, file: str, change: str, is_known: bool) -> None:
    """Also where files with the same times are not read again, as for a trainer that is known."""
    root = folder_of_a_run(tmp_path / "uninterrupted")
    before = snapshot_files(root)
    tamper(root / file, change)
    found = compare_file_snapshots(before, snapshot_files(root, previous=before if is_known else None))
    assert found.ok is False
    assert any(WORDS[change] in f"{each.item} {each.actual}" for each in found.differences)
    expected = "extra.json" if change == "added" else file
    assert any(expected in each.item for each in found.differences)


@pytest.mark.parametrize(("file", "change"), product(FILES, NO_CHANGES))
def test_what_is_no_change_is_none(tmp_path: Path, file: str, change: str) -> None:
    root = folder_of_a_run(tmp_path / "uninterrupted")
    before = snapshot_files(root)
    tamper(root / file, change)
    found = compare_file_snapshots(before, snapshot_files(root))
    assert found.ok is True and found.compared >= 10


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    root = folder_of_a_run(tmp_path / "uninterrupted")
    before = snapshot_files(root)
    (root / "latest").unlink()
    (root / "latest").symlink_to("step-2")
    (found,) = compare_file_snapshots(before, snapshot_files(root)).differences
    assert (found.item, found.actual) == ("latest", "leads to step-2")


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_checkpoint_behind_a_link_is_looked_at_and_what_else_is_linked_is_not(
    tmp_path: Path, is_folder: bool
) -> None:
    root = folder_of_a_run(tmp_path / "uninterrupted")
    store = folder_of_a_run(tmp_path / "store")
    place = root / "linked" if is_folder else root / "step-2" / "weights.safetensors"
    place.symlink_to(store / "step-2" if is_folder else store / "step-2" / "model.safetensors")
    (root / "data").symlink_to("/")  # a whole machine
    followed = [root / "linked", root / "step-2"]
    before = snapshot_files(root, followed)
    assert len(before.entries) < 40
    (store / "step-2" / "model.safetensors").write_text("x")
    (found,) = compare_file_snapshots(before, snapshot_files(root, followed)).differences
    assert found.item.startswith(place.relative_to(root).as_posix()) and found.actual == "has other contents"


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    root = folder_of_a_run(tmp_path / "uninterrupted")
    (root / "step-2" / "up").symlink_to(root)
    (root / "step-2" / "self").symlink_to("self")
    os.mkfifo(root / "step-2" / "pipe")
    before = snapshot_files(root, [root / "step-2"])
    assert compare_file_snapshots(before, snapshot_files(root, [root / "step-2"])).ok


# ---------------------------------------------------------------------------------------------------- a whole run


def tampered(tmp_path: Path, when: str, file: str, change: str, fault: str = "") -> ReportBuilder:
    """The outcome of a trainer that does that."""
    command = (
        "{python} {recipe}/stub_trainer.py --out {out} --steps {steps} --total {total_steps} --save-at {save_at} "
        f"{{resume}} --fault '{fault}' --tamper '{when}|{file}|{change}'"
    )
    return run(tmp_path, command=command)


SAMPLE = {
    ("load-and-save", "step-2/state.json", "other contents"), ("resumed", "step-2", "deleted"),
    ("rerun", "step-2/model.safetensors", "appended"), ("resumed", "losses.jsonl", "appended"),
    ("load-and-save", "step-2/state.json", "touched"),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
    for case in product(RUNS, FILES, [*CHANGES, *NO_CHANGES])
]


@pytest.mark.parametrize(("when", "file", "change"), CASES)
def test_a_run_that_changes_the_reference_fails(tmp_path: Path, when: str, file: str, change: str) -> None:
    outcome = tampered(tmp_path, when, file, change)
    if change in NO_CHANGES:
        assert outcome.ok and failed(outcome) == {}
        return
    first = next(row for row in outcome.phases if row["ok"] is False)
    assert first["name"] == when.replace("-", " ") and failed(outcome)[first["name"]][0] == "reference files"
    assert first["cause"].startswith(f"reference checkpoint was modified by the {RUNS[when]}: ")
    expected = "extra.json" if change == "added" else file
    assert expected in first["cause"] and first["cause"] in first["notes"]
    rows = [row for row in outcome.differing if row["check"] == "reference files"]
    assert rows and {row["phase"] for row in rows} == {first["name"]}


def test_a_link_to_the_last_checkpoint_that_is_switched_fails(tmp_path: Path) -> None:
    outcome = tampered(tmp_path, "resumed", "latest", "other contents")
    assert failed(outcome)["resumed"][0] == "reference files"


def test_items_are_those_from_before_the_run(tmp_path: Path) -> None:
    """The run does not restore its moment, and writes its own checkpoint over the one it began with."""
    outcome = run(tmp_path, "moments written back")
    assert failed(outcome)["load and save"] == ["reference files", "moments"]
    assert "earlier run had modified" in notes(outcome, "resumed")


def test_a_run_that_writes_into_the_folder_of_another_is_named(tmp_path: Path) -> None:
    outcome = run(tmp_path, "writes elsewhere")
    assert failed(outcome)["load and save"] == ["reference files"]
    said = notes(outcome, "load and save")
    assert "reference checkpoint was modified by the run resumed for zero steps" in said
    assert "the command saved no checkpoint of step 2" in said
