"""Which steps of a run are complete, which one to go on from, which may go: seen from what is on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptx.errors import UsageError
from ckptx.publishing.staging import Staging
from ckptx.runtime.training.checkpoints import ResumePoint, StepDirectories


@pytest.fixture(scope="session")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a save leaves, as small as it gets."""
    path = tmp_path_factory.mktemp("step") / "saved"
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "step": 3}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    return path


@pytest.fixture
def steps(tmp_path: Path, step: Path) -> StepDirectories:
    """Steps 3, 6 and 10, of which `latest` names the last."""
    found = StepDirectories(tmp_path / "run")
    for number in (10, 3, 6):
        shutil.copytree(step, found.path(number))
    found.mark_latest(10)
    return found


def names(steps: StepDirectories) -> list[str]:
    """What is in the directory."""
    return sorted(os.listdir(steps.root))


def test_complete_steps_are_found_in_the_order_of_their_numbers(steps: StepDirectories) -> None:
    assert steps.published() == [3, 6, 10]
    assert steps.choose() == ResumePoint(10)


def test_a_run_that_has_not_begun_has_none(tmp_path: Path) -> None:
    steps = StepDirectories(tmp_path / "run")
    assert (steps.published(), steps.choose(), steps.clean_up(), steps.retain(1)) == ([], ResumePoint(None), [], [])


# ------------------------------------------------------------------------------------ what is no step


def without_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def with_half_the_metadata(path: Path) -> None:
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data[: len(data) // 2])


def without_a_file(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def with_a_short_file(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size - 1)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("step")


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


SPOILED = [without_metadata, with_half_the_metadata, without_a_file, with_a_short_file, empty, a_file, a_link]


@pytest.mark.parametrize("spoil", SPOILED)
def test_what_is_incomplete_is_never_chosen_marked_or_removed(
    steps: StepDirectories, spoil: Callable[[Path], None]
) -> None:
    spoil(steps.path(10))
    assert steps.published() == [3, 6]
    assert steps.choose().step == 6
    assert "names step-10, which is not complete; using step-6, the newest complete step" in steps.choose().note
    with pytest.raises(UsageError, match="step-10: is not a complete step"):
        steps.mark_latest(10)
    assert steps.retain(1) == [3]
    assert steps.published() == [6]
    assert {"step-10", "latest"} < set(names(steps))


@pytest.mark.parametrize("name", ["step-0003", "step-x", "step-", "Step-12", "step-12 ", ".step-12", "step-٣", "12"])
def test_other_names_are_none(steps: StepDirectories, step: Path, name: str) -> None:
    shutil.copytree(step, steps.root / name)
    assert steps.published() == [3, 6, 10]
    steps.retain(1)
    assert name in names(steps)


def test_what_is_being_saved_is_none(steps: StepDirectories, step: Path) -> None:
    with Staging(steps.path(12)) as staging:
        staging.begin(b"", resume=False)
        shutil.copytree(step, staging.tree_path, dirs_exist_ok=True)
        assert steps.published() == [3, 6, 10]
        assert steps.choose() == ResumePoint(10)
        assert steps.clean_up() == []
        assert staging.tree_path.is_dir()
        staging.publish()
    assert steps.published() == [3, 6, 10, 12]


# ------------------------------------------------------------------------------------ the latest


def test_latest_is_obeyed_where_it_names_an_older_step(steps: StepDirectories) -> None:
    steps.mark_latest(3)
    assert steps.choose().step == steps.latest() == 3
    assert "step-10 is complete, too" in steps.choose().note
    assert (steps.root / "latest").read_text() == "step-3\n"


@pytest.mark.parametrize("said", ["", "step-0003", "../step-3", "step-3\nstep-6", "3", "step-99", "\x00", "s" * 5000])
def test_latest_that_names_no_step_is_not_believed(steps: StepDirectories, said: str) -> None:
    (steps.root / "latest").write_text(said)
    choice = steps.choose()
    assert choice.step == 10
    assert "using step-10, the newest complete step" in choice.note


def test_latest_may_be_missing(steps: StepDirectories) -> None:
    (steps.root / "latest").unlink()
    assert steps.choose().step == 10
    assert "does not exist" in steps.choose().note


def test_marking_writes_through_nothing_that_lies_in_its_way(steps: StepDirectories, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (steps.root / "latest").unlink()
    for name in ("latest", ".latest.ckptx-new"):
        (steps.root / name).symlink_to(tmp_path / "mine")
    steps.mark_latest(6)
    assert not (steps.root / "latest").is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"
    assert names(steps) == ["latest", "step-10", "step-3", "step-6"]


# ------------------------------------------------------------------------------------ removing


@pytest.mark.parametrize(
    ("keep", "latest", "left"),
    [(1, 10, [10]), (2, 10, [6, 10]), (3, 10, [3, 6, 10]), (9, 10, [3, 6, 10]), (1, 3, [3, 10])],
)
def test_the_newest_stay_and_what_latest_names(steps: StepDirectories, keep: int, latest: int, left: list[int]) -> None:
    steps.mark_latest(latest)
    assert steps.retain(keep) == [each for each in (3, 6, 10) if each not in left]
    assert steps.published() == left
    assert names(steps) == sorted(["latest", *(f"step-{each}" for each in left)])


def test_at_least_one_is_kept(steps: StepDirectories) -> None:
    with pytest.raises(UsageError, match="keep is 0 and must be 1 or more"):
        steps.retain(0)
    assert steps.published() == [3, 6, 10]


def test_the_only_complete_one_stays_whatever_is_newer(steps: StepDirectories) -> None:
    without_metadata(steps.path(10))
    with_a_short_file(steps.path(6))
    assert steps.retain(1) == []
    assert steps.published() == [3]


def test_a_step_in_which_somebody_keeps_something_stays(steps: StepDirectories) -> None:
    (steps.path(3) / "notes").mkdir()
    (steps.path(3) / "notes" / "mine.txt").write_text("mine")
    assert steps.retain(1) == [6]
    assert (steps.path(3) / "notes" / "mine.txt").read_text() == "mine"


def test_what_every_step_carries_along_goes_with_it(steps: StepDirectories) -> None:
    for each, text in ((3, "carried"), (6, "edited"), (10, "carried")):
        (steps.path(each) / "how_it_was_made").mkdir()
        (steps.path(each) / "how_it_was_made" / "notes.rst").write_text(text)
    assert steps.retain(1) == [3]
    assert steps.published() == [6, 10]


def test_what_was_cut_is_finished_and_what_is_locked_is_left(steps: StepDirectories, step: Path) -> None:
    for name in (".step-1.removed.ckptx-partial", ".step-2.ckptx-partial"):
        shutil.copytree(step, steps.root / name / "tree")
        (steps.root / name / "lock").touch()
    (steps.root / ".step-4.removed.ckptx-partial").mkdir()
    (steps.root / ".mine.ckptx-partial").mkdir()
    shutil.copytree(step, steps.root / ".step-5.ckptx-partial")  # no lock: not ours
    with Staging(steps.path(7)):
        assert [path.name for path in steps.clean_up()] == [
            ".step-1.removed.ckptx-partial", ".step-2.ckptx-partial", ".step-4.removed.ckptx-partial",
        ]  # fmt: skip
        assert ".step-7.ckptx-partial" in names(steps)
    assert {".mine.ckptx-partial", ".step-5.ckptx-partial"} < set(names(steps))
    assert steps.published() == [3, 6, 10]


def test_a_removal_that_was_cut_is_finished_before_the_same_step_is_removed_again(
    steps: StepDirectories, step: Path
) -> None:
    shutil.copytree(step, steps.root / ".step-3.removed.ckptx-partial" / "tree")
    (steps.root / ".step-3.removed.ckptx-partial" / "lock").touch()
    assert steps.retain(1) == [3, 6]
    assert names(steps) == ["latest", "step-10"]
