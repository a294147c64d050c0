"""Work in processes of its own: in the order it was asked for, with its errors, and after a backward pass, too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptx.errors import InputError, InternalError, PeerFailure
from ckptx.processes.fork import Flow, run_flow, run_flows, run_in_child, run_in_children


def late(seconds: float) -> tuple[float, int]:
    """A number, later, and the process."""
    time.sleep(seconds)
    return seconds, os.getpid()


def refuse(number: int) -> int:
    """What only one of several does."""
    if number == 1:
        raise InputError("number 1: found, needed another")
    time.sleep(30)
    return number


def backward(size: int) -> float:
    """Fails in a fork of a process that has run a backward pass, under another error that has it for its cause."""
    value = torch.ones(size, requires_grad=True)
    try:
        value.sum().backward()
    except RuntimeError as error:
        raise RuntimeError("failed to run a stage") from error
    assert value.grad is not None
    return float(value.grad.sum())


def test_answers_come_in_the_order_of_the_calls() -> None:
    found = run_in_children(late, [(0.3,), (0.0,), (0.1,)], max_processes=3)
    assert [seconds for seconds, _ in found] == [0.3, 0.0, 0.1]
    assert len({process for _, process in found} | {os.getpid()}) == 4


def test_no_more_run_than_may() -> None:
    begin = time.perf_counter()
    run_in_children(late, [(0.2,)] * 3, max_processes=1)
    assert time.perf_counter() - begin > 0.6


def test_an_error_ends_the_others() -> None:
    begin = time.perf_counter()
    with pytest.raises(InputError, match="number 1: found"):
        run_in_children(refuse, [(0,), (1,), (2,)], max_processes=3)
    assert time.perf_counter() - begin < 20


def test_a_process_that_dies_is_a_defect() -> None:
    with pytest.raises(InternalError, match="ended with code 9"):
        run_in_child(os._exit, 9)


def lose_a_peer() -> None:
    raise PeerFailure("rank 1: is gone", 5)


def test_the_failure_of_a_peer_comes_back_as_one() -> None:
    with pytest.raises(PeerFailure, match=r"^rank 1: is gone$") as error:
        run_in_child(lose_a_peer)
    assert error.value.exit_code == 5


def test_a_result_that_cannot_be_sent_is_a_defect_with_its_cause() -> None:
    with pytest.raises(InternalError, match=r"lambda.*please report this"):
        run_in_child(unsendable)


def unsendable() -> Any:
    return lambda: None


def nested(path: Path) -> None:
    """Starts a process that says who it is, and waits for it."""
    run_in_child(wait_long, path)


def wait_long(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(60)


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def when_it_waits() -> None:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    threading.Thread(target=when_it_waits, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_child(nested, tmp_path / "pid")
    finally:
        signal.signal(signal.SIGALRM, before)
    process = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"process {process} is still there")


def write_pid(directory: Path, seconds: float) -> None:
    """Write a file that is named as this process, and wait."""
    (directory / str(os.getpid())).touch()
    time.sleep(seconds)


def run_until_killed(directory: Path, seconds: tuple[float, ...]) -> None:
    """Run calls in a process each, and be killed by SIGKILL when all have started and one has ended."""

    def on_wait(ended_count: int, _: int) -> None:
        if ended_count and len(list(directory.iterdir())) == len(seconds):
            os.kill(os.getpid(), signal.SIGKILL)

    run_flows([call_in_flow(write_pid, directory, each) for each in seconds], len(seconds), on_wait)


@pytest.mark.parametrize("seconds", [(0.0, 4.0), (4.0, 0.0), (4.0, 0.0, 4.0)])
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, seconds: tuple[float, ...]) -> None:
    """Idle workers and busy ones end, in whatever order they were forked."""
    parent = multiprocessing.get_context("fork").Process(target=run_until_killed, args=(tmp_path, seconds))
    parent.start()
    parent.join(60)
    assert parent.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while left := [int(each.name) for each in tmp_path.iterdir() if Path("/proc", each.name).exists()]:
        if time.monotonic() > deadline:
            for process in left:
                os.kill(process, signal.SIGKILL)
            pytest.fail(f"workers outlived their parent: {left}")
        time.sleep(0.1)


def test_nothing_to_do_is_nothing() -> None:
    assert run_in_children(late, []) == []


def test_a_process_that_has_gone_backward_asks_new_ones() -> None:
    torch.ones(2, requires_grad=True).sum().backward()
    assert run_in_children(backward, [(3,), (5,)]) == [3.0, 5.0]
    assert run_in_child(backward, 2) == 2.0


def add_up(numbers: list[int], rounds: int) -> Flow[list[tuple[int, int]]]:
    """Double numbers round by round; each round needs the results of the previous one."""
    found = [(each, 0) for each in numbers]
    for _ in range(rounds):
        found = yield [(double, (number,)) for number, _ in found]
    return found


def double(number: int) -> tuple[int, int]:
    """Return twice a number, and the process."""
    return 2 * number, os.getpid()


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_flows_share_a_few_processes(processes: int) -> None:
    flows = [add_up([1, 2, 3], 3), add_up([10], 2), add_up([], 2), add_up([7], 0)]
    found = run_flows(flows, processes)
    assert [[number for number, _ in each] for each in found] == [[8, 16, 24], [40], [], [7]]
    used = {process for each in found[:2] for _, process in each}
    assert os.getpid() not in used and len(used) <= processes


def test_a_flow_runs_in_this_process_in_the_same_way() -> None:
    assert run_flow(add_up([1, 2, 3], 3)) == [(8, os.getpid()), (16, os.getpid()), (24, os.getpid())]


def call_in_flow(function: Any, *args: Any) -> Flow[Any]:
    """Call a function once, and return its result."""
    return (yield [(function, args)])[0]


def test_an_error_in_a_flow_ends_the_others() -> None:
    begin = time.perf_counter()
    with pytest.raises(InputError, match="number 1: found"):
        run_flows([call_in_flow(refuse, each) for each in range(3)], 3)
    assert time.perf_counter() - begin < 20


def test_a_process_of_a_flow_that_dies_is_a_defect() -> None:
    with pytest.raises(InternalError, match="ended with code 9"):
        run_flows([call_in_flow(os._exit, 9)])


def test_flows_of_a_process_that_has_gone_backward_ask_new_ones() -> None:
    torch.ones(2, requires_grad=True).sum().backward()
    flows = [call_in_flow(backward, 3), call_in_flow(backward, 5), call_in_flow(double, 4)]
    first, second, (third, _) = run_flows(flows, 2)
    assert (first, second, third) == (3.0, 5.0, 8)
