"""Several processes that make one output together, as torchrun starts them: they meet in torch's key-value store.

    beat/R        signs of life of rank R, one a second; below zero once it has taken its leave
    R/TOPIC/N     what rank R has to say about a topic, as JSON, in parts that the store takes
    failed        the rank that failed first, and why

torch.distributed brings the store: that of torchrun's agent, or one in the process of rank 0. Only here, and only when
there are several processes, a conversion imports torch.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptx.errors import EnvironmentProblem, PeerFailure, Terminated, exit_code_of, missing_package
from ckptx.processes.rendezvous import PATIENCE, open_store

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL = 0.02  # seconds between two looks into the store
_BEAT = 1.0  # seconds between two signs of life
_SILENCE = 30  # signs of life missed in a row after which a rank is taken for dead
_LAST_LOOKS = 3  # the same, once this process was told to end
_FAREWELL = 60.0  # seconds that rank 0 waits for the others to hear how it ended
_PART = 4 << 20  # bytes of a value; the store refuses 8 MiB
_GONE = "ended without a word, or its connection was lost; look at its output"
_LEFT = -(1 << 40)  # makes any number of signs of life negative

_meetings = 0  # of this process; all ranks hold as many, so that no word of one is heard in the next


class PeerProcesses:
    """The processes of one run, as one of them sees the others.

    All dealings with the store are a thread's: a connection that hangs holds up that thread, and is noticed here.

    Attributes:
        rank: Of this process.
        world_size: Processes in all.
    """

    def __init__(self, rank: int, world_size: int, connect: Callable[[], Store], place: str) -> None:
        """Sets out; whether the others come is seen by whoever waits for them.

        Args:
            rank: Of this process.
            world_size: Processes in all.
            connect: Opens the store.
            place: Where that is, for messages.
        """
        self.rank, self.world_size = rank, world_size
        self._connect, self._place = connect, place
        self._changed = threading.Condition()
        # Below, what the thread and the others share; held by `_changed`.
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._wanted: set[str] = set()
        self._heard: dict[str, Any] = {}
        self._beats, self._missed, self._looks = [0] * world_size, [0] * world_size, 0
        self._ends_by = 0.0
        self._given_up: set[int] = set()
        self._failure: PeerFailure | None = None
        self._problem = ""
        self._is_connected = self._is_leaving = self._is_stopped = False
        self._round_at = self._began = time.monotonic()
        self._thread = threading.Thread(target=self._talk, daemon=True, name="processes")
        self._thread.start()

    @classmethod
    def from_environment(cls) -> PeerProcesses | None:
        """The processes that torchrun's environment speaks of; None for a process on its own.

        Raises:
            EnvironmentProblem: The environment contradicts itself, or torch is not installed.
        """
        rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if not (rank.isdecimal() and world_size.isdecimal()) or int(world_size) < 2:
            return None
        if int(rank) >= int(world_size) or len(world_size) > 9:
            raise EnvironmentProblem(
                f"environment: RANK is {rank[:20]} and WORLD_SIZE {world_size[:20]}, needed one below the other; "
                "start with torchrun, or unset both"
            )
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise EnvironmentProblem(
                f"environment: WORLD_SIZE is {world_size}, MASTER_ADDR {host[:60]!a} and MASTER_PORT {port[:20]!a}, "
                "needed where the processes meet; start with torchrun, or unset RANK and WORLD_SIZE"
            )
        return cls(int(rank), int(world_size), _store_at(host, int(port), int(rank)), f"{host}:{port}")

    def say(self, topic: str, what: Any) -> None:
        """Tells all others."""
        self._post(f"{self.rank}/{topic}", json.dumps(what).encode())

    def hear(self, rank: int, topic: str) -> Any:
        """Waits for what a rank says.

        Raises:
            PeerFailure: It, or any other rank, failed or is gone.
            EnvironmentProblem: It does not come, or the connection is lost.
        """
        key = f"{rank}/{topic}"
        with self._changed:
            self._wanted.add(key)
            self._changed.notify_all()
            while key not in self._heard:
                self._check()
                self._changed.wait(_BEAT)
            return self._heard.pop(key)

    def check(self) -> None:
        """Looks after the others.

        Raises:
            PeerFailure: One failed or is gone.
            EnvironmentProblem: One does not come, or the connection is lost.
        """
        with self._changed:
            self._check()

    @contextmanager
    def session(self) -> Iterator[None]:
        """The work of this rank: whatever it raises, the others learn of; then they all leave."""
        try:
            with self.failing_together():
                yield
        finally:
            if self.rank == 0:
                self._await_ends()
            with self._changed:
                self._is_leaving = True
                self._changed.notify_all()
            self._thread.join(_FAREWELL if self._is_worth_waiting() else 0)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Work whose failure ends that of all: when it is raised here, no other rank writes any more."""
        try:
            yield
        except BaseException as error:  # whatever ends this rank ends the others
            self._is_stopped = isinstance(error, Terminated)
            found = self._what_ended_us() if self._is_stopped else None
            told = found or error
            if not isinstance(told, PeerFailure):
                self._tell_of(f"rank {self.rank}: {str(told) or type(told).__name__}", exit_code_of(told))
            elif told is not self._failure:
                self._tell_of(str(told), told.exit_code, is_said=told.is_said)
            if self.rank == 0:
                self._await_ends()
            if found is not None:
                raise found from error
            raise

    # ------------------------------------------------------------------ what this rank makes of what it sees

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._check_connection()
        is_late = time.monotonic() - self._began > PATIENCE
        for rank in self._expected():
            if self._missed[rank] >= _SILENCE:
                raise _silent(rank, _GONE)
            if is_late and not self._beats[rank]:
                self._given_up.update(each for each in self._expected() if not self._beats[each])
                raise EnvironmentProblem(f"rank {rank}: did not come within {PATIENCE:.0f} s; was it started?")

    def _check_connection(self) -> None:
        if not self._problem and self._is_connected and time.monotonic() - self._round_at > _SILENCE * _BEAT:
            self._changed.wait(2 * _BEAT)  # this process itself may have been stopped, and its thread not yet gone on
            if time.monotonic() - self._round_at > _SILENCE * _BEAT:
                self._problem = f"nothing came back for {_SILENCE * _BEAT:.0f} s"
        if self._problem:
            raise EnvironmentProblem(
                f"rank {self.rank}: {'lost' if self._is_connected else 'found no'} connection to {self._place}, where "
                f"the processes meet: {self._problem}; look at the output of rank 0 and at the network"
            )

    def _what_ended_us(self) -> PeerFailure | None:
        """After SIGTERM, which torchrun sends to all when a rank fails: the rank that did, if there is one."""
        with self._changed:
            self._await_looks(1)  # what a rank said just before it died counts for nothing
            if not (self._is_connected or self._problem):
                message = (
                    f"rank {self.rank}: had found no connection to {self._place} when the run was stopped; "
                    "look at the output of rank 0"
                )
                return PeerFailure(message, EnvironmentProblem.exit_code, is_said=False)
            before = list(self._beats)
            self._await_looks(_LAST_LOOKS)
            if self._failure is not None or self._problem:
                return self._failure
            dead = [rank for rank in self._expected() if self._beats[rank] == before[rank] > 0]
            late = [rank for rank in self._expected() if not self._beats[rank]]
            self._given_up.update(dead, late)
        if dead:
            return _silent(dead[0], _GONE)
        return _silent(late[0], "had not come when the run was stopped; look at its output") if late else None

    def _await_looks(self, count: int) -> None:
        """Waits until the thread has looked so often for signs of life, or there is something else to say."""
        last = self._looks + count
        until = time.monotonic() + 2 * count * _BEAT
        while self._looks < last and not (self._failure or self._problem or time.monotonic() > until):
            self._changed.wait(_BEAT)

    def _is_worth_waiting(self) -> bool:
        """False where nothing can come any more: the connection was lost, or is not there and the run is to end."""
        return not self._problem and (self._is_connected or not self._is_stopped)

    def _expected(self) -> Iterator[int]:
        return (rank for rank in range(self.world_size) if rank != self.rank and rank not in self._given_up)

    def _tell_of(self, message: str, exit_code: int, is_said: bool = True) -> None:
        """Tells the others of a failure, unless somebody told them of one before, and waits until it is told."""
        self._post("failed", json.dumps([message, exit_code, is_said]).encode())
        until = time.monotonic() + _FAREWELL
        with self._changed:
            while self._outbox and self._is_worth_waiting() and time.monotonic() < until:
                self._changed.wait(_BEAT)

    def _await_ends(self) -> None:
        self._ends_by = self._ends_by or time.monotonic() + _FAREWELL
        with self._changed:
            while self._is_worth_waiting() and time.monotonic() < self._ends_by:
                if all(self._beats[rank] < 0 or self._missed[rank] >= _SILENCE for rank in self._expected()):
                    return
                self._changed.wait(_BEAT)

    # ------------------------------------------------------------------------------------ the thread

    def _post(self, key: str, data: bytes) -> None:
        with self._changed:
            self._outbox.append((key, data))
            self._changed.notify_all()

    def _talk(self) -> None:
        try:
            store = self._connect()
            self._is_connected = True
            beat_at = 0.0
            while not self._is_leaving or self._outbox:
                if time.monotonic() >= beat_at:
                    self._count(store)
                    beat_at = time.monotonic() + _BEAT
                self._exchange(store)
            store.add(f"beat/{self.rank}", _LEFT)
        except Exception as error:  # of the network; said by whoever waits for something
            with self._changed:
                self._problem = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
                self._changed.notify_all()

    def _count(self, store: Store) -> None:
        """Gives a sign of life, and looks who gave one since the last look."""
        found = [store.add(f"beat/{rank}", int(rank == self.rank)) for rank in range(self.world_size)]
        with self._changed:
            for rank, count in enumerate(found):
                silent = count == self._beats[rank] > 0
                self._missed[rank] = self._missed[rank] + 1 if silent else 0
            self._beats, self._looks = found, self._looks + 1
            self._changed.notify_all()

    def _exchange(self, store: Store) -> None:
        """Says what there is to say, and hears what others wait for."""
        with self._changed:
            said, wanted = list(self._outbox), list(self._wanted)
        for key, data in said:
            if key == "failed":
                store.compare_set(key, "", data.decode())
            else:
                _put(store, key, data)
        failed = json.loads(store.get("failed")) if self._failure is None and store.check(["failed"]) else None
        heard = {key: json.loads(_take(store, key)) for key in wanted if store.check([key])}
        with self._changed:
            for _ in said:
                self._outbox.popleft()
            if failed is not None:
                self._failure = PeerFailure(*failed)
            self._heard |= heard
            self._wanted -= heard.keys()
            self._round_at = time.monotonic()
            self._changed.notify_all()
            if not self._is_leaving:
                self._changed.wait(_POLL)


def _silent(rank: int, words: str) -> PeerFailure:
    """That a rank does not answer. Rank 0 tells the user; of rank 0 itself all others do."""
    return PeerFailure(f"rank {rank}: {words}", EnvironmentProblem.exit_code, is_said=rank != 0)


def _put(store: Store, key: str, data: bytes) -> None:
    """Puts a value of any length; the key itself, which says in how many parts, comes last."""
    parts = range(0, len(data), _PART)
    for number, at in enumerate(parts):
        store.set(f"{key}/{number}", data[at : at + _PART].decode("ascii"))
    store.set(key, str(len(parts)))


def _take(store: Store, key: str) -> bytes:
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def _store_at(host: str, port: int, rank: int) -> Callable[[], Store]:
    """Return what opens the store at which the processes meet for the next time.

    Raises:
        EnvironmentProblem: torch is not installed.
    """
    global _meetings
    _meetings += 1
    name = str(_meetings)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what goes wrong is said here, in one line
    try:
        import torch.distributed  # noqa: F401  # the store is opened in a thread
    except ImportError as error:
        raise missing_package("several processes", error) from error
    return lambda: open_store(host, port, rank, name)
