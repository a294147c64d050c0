"""Saves that are killed at each of their operations: the last good step loads, and nothing else is taken for good."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptx.robustness_suite.kills import OPERATION_KINDS, kill_at, operation_kind, record_operations, select_kill_points
from ckptx.robustness_suite.surviving_steps import check_steps
from ckptx.runtime.checkpointing.save import save
from ckptx.runtime.training.checkpoints import StepDirectories
from tests.support import killed_ranks
from tests.support.forked_programs import preloaded_context
from tests.support.killed_ranks import RANKS, SAVES, Kill, Trained
from tests.support.slow import slow_but

POINTS = 20
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


class Rehearsed(NamedTuple):
    """Steps 3 and 6, what each rank does when it saves step 9, and what steps hold then."""

    start: Path
    names: dict[str, list[list[str]]]
    known: dict[int, str]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    root = tmp_path_factory.mktemp("kills")
    killed_ranks.save_first_steps(root / "start")
    known = dict(check_steps(root / "start", good_step=6).digests)
    names = {}
    for how, function in SAVES.items():
        names[how], left = killed_ranks.run_without_kill(root / "start", root / how, function)
        assert known[6] == left.digests[6]
        assert known.setdefault(9, left.digests[9]) == left.digests[9], "sync and async differ"
    return Rehearsed(root / "start", names, known)


def test_a_save_is_told_in_its_operations(rehearsed: Rehearsed) -> None:
    first, second = rehearsed.names["sync"]
    in_order = [
        "write __0_0.distcp", "fsync __0_0.distcp", "rename .metadata.tmp -> .metadata", "fsync .metadata",
        "fsync __1_0.distcp", "fsync .step-N.ckptx-partial/tree", "rename .step-N.ckptx-partial/tree -> step-N",
        "fsync root", "fsync .latest.ckptx-new", "rename .latest.ckptx-new -> latest", "fsync root #2",
        "rename step-N -> .step-N.removed.ckptx-partial/tree", "fsync root #3",
        "unlink .step-N.removed.ckptx-partial/tree/.metadata", "rmdir .step-N.removed.ckptx-partial",
    ]  # fmt: skip
    assert [each for each in first if each in in_order] == in_order
    assert {operation_kind(each) for each in first} == set(OPERATION_KINDS)
    assert "write __1_0.distcp #2" in second and not any("metadata" in each for each in second)
    assert len(set(first)) == len(first)


def test_both_ways_of_saving_do_the_same(rehearsed: Rehearsed) -> None:
    assert rehearsed.names["sync"] == rehearsed.names["async"]


def test_points_are_of_every_kind(rehearsed: Rehearsed) -> None:
    first = rehearsed.names["sync"][0]
    assert [operation_kind(each) for each in select_kill_points(first, 3)] == ["data", "metadata", "publish"]
    assert {operation_kind(each) for each in select_kill_points(first, len(OPERATION_KINDS))} == set(OPERATION_KINDS)
    assert select_kill_points(first, 3)[1:] == [
        "rename .metadata.tmp -> .metadata", "rename .step-N.ckptx-partial/tree -> step-N",
    ]  # fmt: skip
    assert select_kill_points(first, 10_000) == first
    assert select_kill_points([], 3) == []
    assert len(select_kill_points(first, POINTS)) == POINTS


CASES = [(how, index, everyone) for how in SAVES for index in range(POINTS) for everyone in (False, True)]
FAST = [("sync", 4, True), ("async", 8, False), ("sync", 16, False)]


@pytest.mark.parametrize(("how", "index", "everyone"), slow_but(CASES, FAST))
def test_rank_0_is_killed(rehearsed: Rehearsed, tmp_path: Path, how: str, index: int, everyone: bool) -> None:
    point = select_kill_points(rehearsed.names[how][0], POINTS)[index]
    check(rehearsed, tmp_path / "run", how, Kill(0, point, everyone))


OTHERS = [(how, index, everyone) for how in SAVES for index in range(5) for everyone in (False, True)]


@pytest.mark.parametrize(("how", "index", "everyone"), slow_but(OTHERS, [("async", 3, False)]))
def test_rank_1_is_killed(rehearsed: Rehearsed, tmp_path: Path, how: str, index: int, everyone: bool) -> None:
    point = select_kill_points(rehearsed.names[how][1], 5)[index]
    check(rehearsed, tmp_path / "run", how, Kill(1, point, everyone))


def check(rehearsed: Rehearsed, root: Path, how: str, kill: Kill) -> None:
    codes, left = killed_ranks.run_killed_save(rehearsed.start, root, SAVES[how], kill, rehearsed.known)
    assert codes[kill.rank] == -signal.SIGKILL
    assert codes[1 - kill.rank] in ((-signal.SIGKILL,) if kill.all_ranks else (0, 1))
    assert left.violations == [], kill.at
    assert 6 in left.published


@pytest.mark.parametrize("index", slow_but(range(8), [1, 2]))
def test_a_step_that_is_there_is_replaced_in_one_step(rehearsed: Rehearsed, tmp_path: Path, index: int) -> None:
    names = killed_ranks.run_without_kill(rehearsed.start, tmp_path / "whole", killed_ranks.save_in_foreground, step=6)[
        0
    ][0]
    exchange = names.index("exchange .step-N.ckptx-partial/tree <-> step-N")
    root = tmp_path / "run"
    shutil.copytree(rehearsed.start, root)
    kill = Kill(0, names[exchange - 1 + index], all_ranks=True)
    assert killed_ranks.run(root, 6, killed_ranks.save_in_background, kill=kill) == [-signal.SIGKILL] * RANKS
    left = check_steps(root, good_step=6, expected_digests=rehearsed.known)
    assert (left.violations, left.latest, left.published) == ([], 6, [3, 6]), kill.at


# ------------------------------------------------------------------------------------ injected defects


def marks_first(at: Trained, root: Path, step: int) -> None:
    """`latest` is written before the step is complete."""
    if torch.distributed.get_rank() == 0:
        (root / "latest").write_text(f"step-{step}\n")
    killed_ranks.save_in_foreground(at, root, step)


def in_its_place(at: Trained, root: Path, step: int) -> None:
    """No staging: stock torch writes where the step will be."""
    state = {"model": at.model.state_dict(), "step": step}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(StepDirectories(root).path(step)))


def over_the_last(at: Trained, root: Path, step: int) -> None:
    """Stock torch writes over a step that is there."""
    in_its_place(at, root, 6)


def keeps_nothing(at: Trained, root: Path, step: int) -> None:
    """Retention goes first, and takes all there is."""
    if torch.distributed.get_rank() == 0:
        for each in StepDirectories(root).published():
            shutil.rmtree(StepDirectories(root).path(each))
    save(
        at.model,
        None,
        StepDirectories(root).path(step),
        **{**killed_ranks.save_arguments(at, root, step), "on_published": None},
    )


PUBLISH = "rename .step-N.ckptx-partial/tree -> step-N"


@pytest.mark.parametrize(
    ("how", "at", "fault"),
    [
        (marks_first, PUBLISH, "latest: names step-9, which is incomplete"),
        (
            in_its_place,
            "rename step-N/.metadata.tmp -> step-N/.metadata",
            "step-9: is incomplete, but loaders may load it",
        ),
        (over_the_last, "write step-N/__0_0.distcp #2", "step-6: "),
        (over_the_last, "rename step-N/.metadata.tmp -> step-N/.metadata", "step-6: "),
        (keeps_nothing, PUBLISH, "step-6: was complete, but no step is now the latest"),
    ],
)
def test_an_injected_defect_is_found(rehearsed: Rehearsed, tmp_path: Path, how: Any, at: str, fault: str) -> None:
    root = tmp_path / "run"
    shutil.copytree(rehearsed.start, root)
    codes = killed_ranks.run(root, 9, how, kill=Kill(0, at, True))
    assert codes == [-signal.SIGKILL] * RANKS
    assert any(
        each.startswith(fault) for each in check_steps(root, good_step=6, expected_digests=rehearsed.known).violations
    )


@pytest.mark.parametrize("believes", ["the highest number", "what latest says"])
def test_a_half_published_directory_that_is_chosen_is_found(
    rehearsed: Rehearsed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, believes: str
) -> None:
    root = tmp_path / "run"
    shutil.copytree(rehearsed.start, root)
    shutil.copytree(root / "step-6", root / "step-9")
    (root / "step-9" / ".metadata").unlink()
    monkeypatch.setattr(StepDirectories, "is_published", lambda steps, step: steps.path(step).is_dir())
    if believes == "what latest says":
        (root / "latest").write_text("step-9\n")
    assert any("step-9: looks complete, but does not load" in each for each in check_steps(root).violations)


def test_a_next_save_that_fails_or_is_not_the_latest_is_found(rehearsed: Rehearsed) -> None:
    assert any("step-6 is" in each for each in check_steps(rehearsed.start, next_save=lambda: 7).violations)


# ------------------------------------------------------------------------------------ latest, and what goes


def marked(root: Path) -> None:
    StepDirectories(root).mark_latest(3)


def retained(root: Path) -> None:
    StepDirectories(root).retain(1)


@pytest.mark.parametrize(("act", "lost"), [(marked, set()), (retained, {3})])
def test_cut_at_each_operation(
    rehearsed: Rehearsed, tmp_path: Path, act: Callable[[Path], None], lost: set[int]
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(rehearsed.start, whole)
    with record_operations(whole) as names:
        act(whole)
    assert len(names) >= 5
    seen = set()
    for index, name in enumerate(names):
        root = tmp_path / f"cut-{index}"
        shutil.copytree(rehearsed.start, root)
        process = preloaded_context().Process(target=_cut, args=(root, name, act))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, name
        left = check_steps(root, good_step=3 if act is marked else 6, expected_digests=rehearsed.known)
        assert left.violations == [], name
        assert {3, 6} - set(left.published) <= lost, name
        seen.add((left.latest, *left.published))
        act(root)
        again = check_steps(root, expected_digests=rehearsed.known)
        assert (again.violations, again.hidden) == ([], [])
        assert sorted(os.listdir(root)) == sorted(os.listdir(whole)), name
    assert len(seen) == 2, "it is done in one step"


def _cut(root: Path, name: str, act: Callable[[Path], None]) -> None:
    with kill_at(root, name):
        act(root)


@pytest.mark.parametrize("deletes", ["in place", pytest.param("metadata last", marks=pytest.mark.slow)])
def test_a_removal_without_a_rename_is_found(rehearsed: Rehearsed, tmp_path: Path, deletes: str) -> None:
    """The injected defect: files go one by one under the name of the step."""
    found = []
    with record_operations(tmp_path) as names:
        shutil.copytree(rehearsed.start, tmp_path / "0")
        del names[:]
        removed(tmp_path / "0", deletes)
    for index, name in enumerate(names):
        root = tmp_path / f"{index + 1}"
        shutil.copytree(rehearsed.start, root)
        process = preloaded_context().Process(target=_removed, args=(root, name.replace("0/", ""), deletes))
        process.start()
        process.join()
        found += check_steps(root, good_step=6).violations
    assert any("step-3: is incomplete" in each for each in found)


def removed(root: Path, deletes: str) -> None:
    names = sorted(os.listdir(root / "step-3"), key=lambda name: (name == ".metadata") == (deletes == "metadata last"))
    for name in names:
        os.unlink(root / "step-3" / name)
    os.rmdir(root / "step-3")


def _removed(root: Path, name: str, deletes: str) -> None:
    with kill_at(root, name):
        removed(root, deletes)
