"""What a command leaves running is found and ended, however it left the session of the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from ckptx.robustness_suite.commands import CommandResult, run_command
from tests.robustness_suite.test_foreign_trainer import failed, is_alive, notes, run, wait_for

# How a child leaves: each ends in a process that writes its number to a file and stays.
WAYS = {
    "same session": "child()",
    "setsid": "os.setsid() if not os.fork() else go(); child()",
    "double fork": "os.fork() and go(); os.setsid(); os.fork() and os._exit(0); child()",
    "own group": "os.fork() and go(); os.setpgid(0, 0); child()",
    "orphan of an orphan": "os.fork() and go(); [os.fork() and os._exit(0) for _ in range(3)]; os.setsid(); child()",
    "holds the output": "os.fork() and go(); os.setsid(); os.dup2(1, 7); child()",
    "keeps forking": "os.fork() and go(); os.setsid(); forks()",
}
ENDS = {"ends well": 0, "fails": 3, "is killed": -9, "hangs": None}
PROGRAM = """
import os, signal, sys, time
place, way, stubborn, end = sys.argv[1:]
def note():
    with open(place, "a") as file:
        file.write(f"{os.getpid()}\\n")
def child():
    if stubborn == "stubborn":
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    note()
    time.sleep(600)
def forks():
    if stubborn == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        note()
        time.sleep(0.05)
        if os.fork():
            os._exit(0)
def go():
    while not os.path.exists(place):
        time.sleep(0.01)
    if end == "hangs":
        time.sleep(600)
    if end == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3 if end == "fails" else 0)
if way == "child()":
    if os.fork():
        go()
    child()
exec(way)
"""
CASES = list(product(WAYS, (False, True), ENDS))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[CommandResult, list[int]]]:
    """How a command ended, and the numbers of its processes, for each case; several run at a time."""
    folder = tmp_path_factory.mktemp("left")

    def one(case: tuple[str, bool, str]) -> tuple[CommandResult, Path]:
        way, is_stubborn, end = case
        place = folder / f"{way} {is_stubborn} {end}"
        words = [sys.executable, "-ISc", PROGRAM, str(place), WAYS[way], "stubborn" if is_stubborn else "", end]
        return run_command(words, Path(f"{place}.log"), {}, 1.0 if end == "hangs" else 60.0), place

    with ThreadPoolExecutor(6) as pool:
        found = dict(zip(CASES, pool.map(one, CASES), strict=True))

    def of(*case: str | bool) -> tuple[CommandResult, list[int]]:
        found_one, place = found[case]  # type: ignore[index]
        return found_one, [int(each) for each in place.read_text().split()]

    return of


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("way", "is_stubborn", "end"), CASES)
def test_what_a_command_leaves_is_ended(
    way: str, is_stubborn: bool, end: str, ended: Callable[..., tuple[CommandResult, list[int]]]
) -> None:
    found, numbers = ended(way, is_stubborn, end)
    assert numbers and not any(map(is_alive, numbers))
    assert found.is_timed_out == (end == "hangs") and not found.unkillable
    if end != "hangs":
        assert found.code == ENDS[end]
        assert found.remaining_processes and any(
            f"(pid {number})" in each for number in numbers for each in found.remaining_processes
        )
        (said,) = found.notes()
        assert said.startswith("ckptx ended ") and " that the command had left running: " in said


def test_a_helper_that_ends_by_itself_is_not_named(tmp_path: Path) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '0.3'], start_new_session=True)"
    found = run_command([sys.executable, "-c", code], tmp_path / "log", {}, 60)
    assert found.code == 0 and not found.remaining_processes and not list(found.notes())


def test_the_texts_state_what_was_ended_and_what_was_not() -> None:
    assert CommandResult(0, 40.0, [], True).failure_text() == "was ended after 40 seconds, its time limit"
    assert CommandResult(None, 40.0, [], True).failure_text() == "could not be ended after 40 seconds, its time limit"
    result = CommandResult(1, 1.0, [], False, ["python a.py", "python b.py"], ["python c.py"])
    assert list(result.notes()) == [
        'ckptx ended 2 processes that the command had left running: "python a.py", "python b.py"',
        '1 process of the command could not be ended: "python c.py"; end it before the next run',
    ]
    (note,) = CommandResult(1, 1.0, [], False, (), [f"sleep {number}" for number in range(8)]).notes()
    assert note.endswith('"sleep 5" and 2 more; end them before the next run')


def test_other_children_of_this_process_live_on(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        run_command([sys.executable, "-c", "import os; os.setsid"], tmp_path / "log", {}, 60)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_ckptx_is_the_end_of_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """Also when nobody can clean up."""
    place = tmp_path / "pids"
    words = [sys.executable, "-ISc", PROGRAM, str(place), WAYS["double fork"], "", "hangs"]
    code = (
        "from pathlib import Path; from ckptx.robustness_suite.commands import run_command; "
        f"run_command({words!r}, Path({str(tmp_path / 'log')!r}), {{}}, 600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    wait_for(place.exists)
    os.kill(process.pid, number)
    process.wait(30)
    wait_for(lambda: not any(is_alive(int(each)) for each in place.read_text().split()))


def test_a_note_of_the_phase_names_it(tmp_path: Path) -> None:
    command = (
        "{python} {recipe}/stub_trainer.py --out {out} --steps {steps} --total {total_steps} --save-at {save_at} "
        "{resume} --fault 'leaves a child'"
    )
    begin = time.monotonic()
    outcome = run(tmp_path, command=command)
    assert outcome.ok and failed(outcome) == {} and time.monotonic() - begin < 60
    for name in ("uninterrupted", "rerun", "load and save", "resumed"):
        assert "ckptx ended 1 process that the command had left running: " in notes(
            outcome, name
        ) and "sleep 611" in notes(outcome, name)
