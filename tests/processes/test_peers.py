"""The processes of one run, played by threads on a real store: they hear each other, fail together, and end."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from ckptx.errors import EnvironmentProblem, InputError, PeerFailure, Terminated
from ckptx.processes import peers as processes
from ckptx.processes.peers import PeerProcesses
from tests.support.ranks import free_port


class Meeting:
    """Where the ranks of one run meet; `size` of them are expected."""

    def __init__(self, size: int) -> None:
        self.size, self.port = size, free_port()

    def come(self, rank: int, port: int | None = None, start_timeout: float = 300) -> PeerProcesses:
        """A rank that sets out; rank 0 brings the store."""

        def connect() -> Store:
            patience = timedelta(seconds=5)
            return PrefixStore(
                "test",
                TCPStore("127.0.0.1", port or self.port, None, rank == 0, patience, False, multi_tenant=True),
            )

        return PeerProcesses(rank, self.size, connect, f"127.0.0.1:{self.port}", start_timeout)

    def attend(
        self, rank: int, work: Callable[[PeerProcesses], Any], late: float = 0, start_timeout: float = 300
    ) -> Callable[[], Any]:
        """A rank that comes after `late` seconds, does its work, and leaves."""

        def attend() -> Any:
            time.sleep(late)
            here = self.come(rank, start_timeout=start_timeout)
            with here.session():
                return work(here)

        return attend


def together(*ranks: Callable[[], Any]) -> list[Any]:
    """Runs each in a thread; what they return, or raise."""
    results: list[Any] = [None] * len(ranks)

    def call(at: int) -> None:
        try:
            results[at] = ranks[at]()
        except BaseException as error:  # is the result
            results[at] = error

    threads = [threading.Thread(target=call, args=(at,), daemon=True) for at in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "still waiting"
    return results


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in earnest, twenty times as fast."""
    for name, seconds in (("_BEAT_INTERVAL", 0.05), ("_LEAVE_TIMEOUT", 3.0)):
        monkeypatch.setattr(processes, name, seconds)
    monkeypatch.setattr(processes, "_MAX_MISSED_BEATS", 20)
    monkeypatch.setattr(processes, "_MAX_MISSED_BEATS_AFTER_SIGTERM", 6)


def exchange(here: PeerProcesses) -> list[Any]:
    """Says something and hears all."""
    here.send("word", here.rank * 10)
    return [here.receive(rank, "word") for rank in range(here.world_size)]


def fail(here: PeerProcesses) -> None:
    raise InputError("a.safetensors: is damaged; restore it")


@pytest.mark.parametrize(("size", "late"), [(2, 0), (2, 1), (5, 0), (5, 4)])
def test_all_ranks_hear_each_other(size: int, late: int) -> None:
    """Whoever is late, rank 0 or the last one."""
    meeting = Meeting(size)
    ranks = [meeting.attend(rank, exchange, 0.2 * (rank == late)) for rank in range(size)]
    assert together(*ranks) == [[rank * 10 for rank in range(size)]] * size


@pytest.mark.parametrize(
    "nbytes", [0, 1, processes._PART_NBYTES - 2, processes._PART_NBYTES, 3 * processes._PART_NBYTES + 5]
)
def test_a_word_of_any_length_arrives(nbytes: int) -> None:
    """The store refuses values of 8 MiB; the digests of a hundred thousand tensors take more."""
    meeting, word = Meeting(2), "ä" + "x" * nbytes

    def speak(here: PeerProcesses) -> None:
        here.send("word", {"long": word})

    def listen(here: PeerProcesses) -> Any:
        return here.receive(0, "word")

    assert together(meeting.attend(0, speak), meeting.attend(1, listen))[1] == {"long": word}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_fail_with_the_one_that_fails(failing: int) -> None:
    meeting = Meeting(3)
    ranks = [
        meeting.attend(rank, fail if rank == failing else lambda here: here.receive(failing, "word"))
        for rank in range(3)
    ]
    for rank, found in enumerate(together(*ranks)):
        assert found.exit_code == 3
        assert isinstance(found, InputError if rank == failing else PeerFailure)
        if rank != failing:
            assert str(found) == f"rank {failing}: a.safetensors: is damaged; restore it"
            assert found.is_reported


def test_who_fails_later_does_not_cover_who_failed_first() -> None:
    meeting = Meeting(2)

    def fail_late(here: PeerProcesses) -> None:
        time.sleep(0.5)
        raise InputError("b.safetensors: is gone")

    found = together(meeting.attend(0, fail_late), meeting.attend(1, fail))
    assert [str(each).partition(":")[0] for each in found] == ["b.safetensors", "a.safetensors"]


def test_progress_looks_after_the_others() -> None:
    """A rank that waits for nobody notices too."""

    def busy(here: PeerProcesses) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            here.check()
            time.sleep(0.01)

    meeting = Meeting(2)
    first, second = together(meeting.attend(0, busy), meeting.attend(1, fail))
    assert isinstance(first, PeerFailure) and isinstance(second, InputError)


def test_a_rank_that_dies_without_a_word_is_named_to_all() -> None:
    meeting, gone = Meeting(3), threading.Event()

    def dies() -> None:
        here = meeting.come(1)
        here.receive(0, "word")
        here._exchange_beats = lambda store: gone.set()  # type: ignore[method-assign]  # no more signs of life

    def listen(here: PeerProcesses) -> None:
        here.send("word", 1)
        here.receive(1, "word")

    first, _, last = together(meeting.attend(0, listen), dies, meeting.attend(2, lambda here: here.receive(1, "word")))
    assert gone.is_set()
    for found in (first, last):
        assert isinstance(found, PeerFailure)
        assert (found.exit_code, str(found)) == (7, f"rank 1: {processes._DEAD_PEER}")
        assert found.is_reported, "by rank 0"


def test_the_end_of_the_process_that_has_the_store_is_noticed() -> None:
    meeting = Meeting(2)
    store = TCPStore("127.0.0.1", meeting.port, None, True, timedelta(seconds=5), False)

    def listen() -> None:
        here = meeting.come(1)
        with here.session():
            here.send("word", 1)
            here.receive(0, "word")

    def end() -> None:
        nonlocal store
        time.sleep(0.3)
        del store

    found = together(listen, end)[0]
    assert isinstance(found, EnvironmentProblem)
    assert str(found).startswith(
        f"rank 1: lost the connection to 127.0.0.1:{meeting.port}, the store of the processes: "
    )


class Wire:
    """A connection to the store that can be cut without a word, as by a switch."""

    def __init__(self, port: int) -> None:
        self.to, self.is_cut = port, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            far = self._reach()
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _reach(self) -> socket.socket:
        """The store, which rank 0 may not have brought yet."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.to))
            except ConnectionRefusedError:
                time.sleep(0.02)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            if not self.is_cut:
                sink.sendall(data)


def test_a_lost_connection_ends_both_sides_and_names_the_rank() -> None:
    meeting = Meeting(2)

    def listen(here: PeerProcesses) -> None:
        here.send("word", 1)
        here.receive(1, "never")

    def cut() -> None:
        wire = Wire(meeting.port)
        here = meeting.come(1, wire.port)
        with here.session():
            here.receive(0, "word")
            wire.is_cut = True
            here.receive(0, "never")

    near, far = together(meeting.attend(0, listen), cut)
    assert isinstance(near, PeerFailure) and str(near) == f"rank 1: {processes._DEAD_PEER}"
    assert isinstance(far, EnvironmentProblem)
    assert str(far).startswith(f"rank 1: lost the connection to 127.0.0.1:{meeting.port}"), far


@pytest.mark.parametrize("is_dead", [True, False])
def test_after_sigterm_the_rank_that_died_is_named(is_dead: bool) -> None:
    """torchrun ends all processes when one fails; who was ended for another says which."""
    meeting, done = Meeting(2), threading.Event()

    def other() -> None:
        here = meeting.come(1)
        here.send("word", 1)
        here.receive(0, "word")
        if is_dead:
            here._exchange_beats = lambda store: None  # type: ignore[method-assign]  # no more signs of life
        done.wait(5)

    def ended(here: PeerProcesses) -> None:
        here.send("word", 0)
        here.receive(1, "word")
        time.sleep(0.2)
        raise Terminated

    def first() -> None:
        try:
            meeting.attend(0, ended)()
        finally:
            done.set()

    found = together(first, other)[0]
    if is_dead:
        assert isinstance(found, PeerFailure) and str(found) == f"rank 1: {processes._DEAD_PEER}"
    else:
        assert isinstance(found, Terminated)


def test_after_sigterm_a_rank_that_never_came_is_named() -> None:
    def ended(here: PeerProcesses) -> None:
        time.sleep(0.2)
        raise Terminated

    (found,) = together(Meeting(2).attend(0, ended))
    assert isinstance(found, PeerFailure)
    assert str(found) == "rank 1: had not started when the run was stopped; look at its output"


def test_who_is_told_to_end_before_there_is_a_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nobody brings the store, there is nobody to tell and nobody to wait for."""
    monkeypatch.setattr(processes, "_LEAVE_TIMEOUT", 15.0)

    def connect() -> Store:
        time.sleep(20)
        raise AssertionError

    def ended() -> None:
        with PeerProcesses(1, 2, connect, "nowhere").session():
            raise Terminated

    began = time.monotonic()
    (found,) = together(ended)
    assert isinstance(found, PeerFailure) and not found.is_reported
    words = "rank 1: had no connection to nowhere when the run was stopped; look at the output of rank 0"
    assert str(found) == words
    assert time.monotonic() - began < 10


def test_a_rank_that_does_not_join(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once after a while, and ends the run after the timeout."""
    monkeypatch.setattr(processes, "_WAITING_NOTE_AFTER", 0.2)
    (found,) = together(Meeting(3).attend(0, lambda here: here.receive(1, "word"), start_timeout=0.6))
    assert isinstance(found, EnvironmentProblem)
    words = (
        "rank 1: did not join within 1 s; check that it was started with the same command and that no two processes "
        "have the same RANK, or pass a larger --timeout"
    )
    assert str(found) == words
    assert [each.getMessage() for each in caplog.records] == ["rank 0: still waiting for ranks 1, 2 to join after 0 s"]


def test_a_store_that_does_not_come_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_WAITING_NOTE_AFTER", 0.1)

    def connect() -> Store:
        time.sleep(1)
        raise RuntimeError("refused")

    here = PeerProcesses(1, 2, connect, "nowhere")
    with pytest.raises(EnvironmentProblem, match="rank 1: has no connection to nowhere"):
        here.receive(0, "word")
    (record,) = caplog.records
    assert record.getMessage() == "rank 1: still waiting for nowhere, the store of the processes, after 0 s"


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank(rank: int) -> None:
    """All ranks end, with the same message, and the process that noticed it, the last one to join, reports it."""
    meeting = Meeting(2)
    words = f"rank {rank}: two processes have this RANK; give each process a RANK of its own"

    def connect() -> Store:
        patience = timedelta(seconds=5)
        return PrefixStore("test", TCPStore("127.0.0.1", meeting.port, None, False, patience, False))

    def duplicate() -> Any:
        time.sleep(0.5)
        here = PeerProcesses(rank, 2, connect, "there")
        with here.session():
            return here.receive(1 - rank, "word")

    others = [meeting.attend(each, lambda here: here.receive(1 - here.rank, "never")) for each in range(2)]
    results = together(*others, duplicate)
    assert [str(each) for each in results] == [words] * 3
    assert Counter(map(type, results)) == {PeerFailure: 2, EnvironmentProblem: 1}


def test_a_store_that_nobody_brings_is_named() -> None:
    meeting = Meeting(2)

    def connect() -> Store:
        return TCPStore("127.0.0.1", meeting.port, None, False, timedelta(seconds=0.2), False)

    here = PeerProcesses(1, 2, connect, f"127.0.0.1:{meeting.port}")
    with pytest.raises(EnvironmentProblem, match=rf"rank 1: has no connection to 127.0.0.1:{meeting.port}"):
        here.receive(0, "word")


def clear(monkeypatch: pytest.MonkeyPatch, **given: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "given",
    [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}, {"RANK": "", "WORLD_SIZE": "2"},
     {"RANK": "x", "WORLD_SIZE": "2"}],
)  # fmt: skip
def test_a_process_on_its_own_meets_nobody(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    clear(monkeypatch, **given)
    assert PeerProcesses.from_environment() is None


@pytest.mark.parametrize(
    "given",
    [{}, {"MASTER_ADDR": "localhost"}, {"MASTER_PORT": "29500"}, {"MASTER_ADDR": "a", "MASTER_PORT": "70000"},
     {"MASTER_ADDR": "a", "MASTER_PORT": "0"}, {"MASTER_ADDR": "a", "MASTER_PORT": "x"}],
)  # fmt: skip
def test_several_processes_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    clear(monkeypatch, RANK="0", WORLD_SIZE="2", **given)
    with pytest.raises(EnvironmentProblem, match="are not the address of a store"):
        PeerProcesses.from_environment()


def test_the_environment_says_where_to_meet_and_runs_do_not_hear_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clear(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2")
    for run in range(2):
        monkeypatch.setattr(processes, "_rendezvous_count", run)
        monkeypatch.setenv("RANK", "0")
        first = PeerProcesses.from_environment()
        monkeypatch.setattr(processes, "_rendezvous_count", run)
        monkeypatch.setenv("RANK", "1")
        second = PeerProcesses.from_environment()
        assert first is not None and second is not None

        def attend(here: PeerProcesses, run: int = run) -> Any:
            with here.session():
                here.send("word", [here.rank, run])
                return here.receive(1 - here.rank, "word")

        found = together(lambda first=first: attend(first), lambda second=second: attend(second))
        assert found == [[1, run], [0, run]]
