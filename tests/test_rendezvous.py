"""The meeting of the ranks of one run, played by threads: they hear each other, fail together, and leave nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import EnvironmentProblem, InputError, PeerFailure
from ckptx.publishing import rendezvous
from ckptx.publishing.rendezvous import Rendezvous
from tests.writers import names_in

MEETING = ".cut.ckptx-ranks"


def together(*ranks: Callable[[], Any]) -> list[Any]:
    """Runs each in a thread; what they return, or raise."""
    results: list[Any] = [None] * len(ranks)

    def call(at: int) -> None:
        try:
            results[at] = ranks[at]()
        except BaseException as error:
            results[at] = error

    threads = [threading.Thread(target=call, args=(at,), daemon=True) for at in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "still waiting"
    return results


def session(
    target: Path, rank: int, size: int, work: Callable[[Rendezvous], Any], late: float = 0
) -> Callable[[], Any]:
    """A rank that comes after `late` seconds, does its work, and leaves."""

    def attend() -> Any:
        time.sleep(late)
        here = Rendezvous(target, rank, size)
        with here.session():
            return work(here)

    return attend


def exchange(here: Rendezvous) -> list[Any]:
    """Says something and hears all."""
    here.say("word", here.rank * 10)
    return [here.hear(rank, "word") for rank in range(here.world_size)]


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("late", [0, size_late := 1])
def test_all_ranks_hear_each_other_and_leave_nothing(tmp_path: Path, size: int, late: int) -> None:
    """Whoever is late, rank 0 or the last one."""
    ranks = [
        session(tmp_path / "cut", rank, size, exchange, 0.2 * (rank == (0 if late == size_late else size - 1)))
        for rank in range(size)
    ]
    assert together(*ranks) == [[rank * 10 for rank in range(size)]] * size
    assert names_in(tmp_path) == []


def stale(tmp_path: Path, *, with_rank_0: bool = True) -> None:
    """What a killed run of three leaves: its number, its words, and that one of it failed."""
    root = tmp_path / MEETING
    root.mkdir()
    (root / "open").write_text('"0123456789abcdef"')
    for rank in range(0 if with_rank_0 else 1, 3):
        (root / f"rank-{rank}").write_text("0123456789abcdef")
    (root / "0123456789abcdef-1-failed").write_text('{"message": "long ago", "exit": 3}')
    (root / "0123456789abcdef-0-word").write_text("77")
    (root / ".0123456789abcdef-2-word").write_text("[1, 2")


@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_an_earlier_run_left_is_not_believed(tmp_path: Path, late: int) -> None:
    stale(tmp_path)
    ranks = [session(tmp_path / "cut", rank, 3, exchange, 0.5 * (rank == late)) for rank in range(3)]
    assert together(*ranks) == [[0, 10, 20]] * 3
    assert names_in(tmp_path) == []


def test_two_runs_one_after_the_other(tmp_path: Path) -> None:
    for _ in range(3):
        found = together(*(session(tmp_path / "cut", rank, 2, exchange) for rank in range(2)))
        assert found == [[0, 10]] * 2


def fail(here: Rendezvous) -> None:
    raise InputError("a.safetensors: is damaged; restore it")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_fail_with_the_one_that_fails(tmp_path: Path, failing: int) -> None:
    ranks = [
        session(tmp_path / "cut", rank, 3, fail if rank == failing else lambda here: here.hear(failing, "word"))
        for rank in range(3)
    ]
    for rank, found in enumerate(together(*ranks)):
        assert found.exit_code == 3
        assert isinstance(found, InputError if rank == failing else PeerFailure)
        if rank != failing:
            assert str(found) == f"rank {failing}: a.safetensors: is damaged; restore it"
    assert names_in(tmp_path) == []


def test_progress_looks_after_the_others(tmp_path: Path) -> None:
    """A rank that waits for nobody notices too."""

    def busy(here: Rendezvous) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            here.check()
            time.sleep(0.01)

    first, second = together(session(tmp_path / "cut", 0, 2, busy), session(tmp_path / "cut", 1, 2, fail))
    assert isinstance(first, PeerFailure) and isinstance(second, InputError)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_without_a_word_is_noticed(tmp_path: Path, dying: int) -> None:
    def die() -> None:
        here = Rendezvous(tmp_path / "cut", dying, 2)
        here.hear(1 - dying, "word")
        os.close(here._lock)  # as the system does it

    def listen(here: Rendezvous) -> None:
        here.say("word", 1)
        here.hear(dying, "word")

    found = together(die, session(tmp_path / "cut", 1 - dying, 2, listen))[1]
    assert isinstance(found, PeerFailure)
    assert (found.exit_code, str(found)) == (70, f"rank {dying}: ended without a word; look at its output")


def test_a_rank_0_that_opens_and_dies_at_once_is_noticed(tmp_path: Path) -> None:
    """Another that waits from before, and looks too late to find it alive."""
    stale(tmp_path)

    def open_and_die() -> None:
        time.sleep(0.2)
        os.close(Rendezvous(tmp_path / "cut", 0, 2)._lock)

    found = together(open_and_die, lambda: Rendezvous(tmp_path / "cut", 1, 2).hear(0, "word"))[1]
    assert isinstance(found, PeerFailure)
    assert str(found) == "rank 0: ended without a word; look at its output"


def test_rank_0_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.2)
    stale(tmp_path)
    with pytest.raises(EnvironmentProblem, match="rank 0 did not come within 0 s"):
        Rendezvous(tmp_path / "cut", 1, 2)


def test_another_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.2)
    monkeypatch.setattr(rendezvous, "_FAREWELL", 0.1)
    stale(tmp_path)
    found = together(session(tmp_path / "cut", 0, 3, lambda here: here.hear(1, "word")))[0]
    assert isinstance(found, EnvironmentProblem)
    assert "rank 1 did not come within 0 s" in str(found)
    assert names_in(tmp_path) == []


def test_a_rank_cannot_be_there_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.2)
    first = Rendezvous(tmp_path / "cut", 0, 2)
    with pytest.raises(EnvironmentProblem, match="rank 0 is running already"):
        Rendezvous(tmp_path / "cut", 0, 2)
    os.close(first._lock)


@pytest.mark.parametrize(
    ("rank", "size", "is_meeting"),
    [(None, None, False), ("0", "1", False), ("0", "2", True), ("0", None, False), ("", "2", False), ("x", "2", False)],
)
def test_the_environment_says_whether_there_are_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str | None, size: str | None, is_meeting: bool
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    found = Rendezvous.from_environment(tmp_path / "cut")
    assert (found is not None) == is_meeting == (MEETING in names_in(tmp_path))
