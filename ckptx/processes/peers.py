"""Peer processes that torchrun started to write one output together; they communicate through torch's key-value store.

    joined/R      number of processes that joined as rank R, which must be 1
    beat/R        number of heartbeats of rank R, one per second; negative once it has left
    R/TOPIC       number of parts of the message of rank R about a topic; each rank uses a topic once
    R/TOPIC/N     part N of this message, which is JSON; the parts fit the store
    failed        message, exit code and `is_reported` of the first failure of a rank, see `PeerFailure`

torch.distributed provides the store: that of torchrun's agent, or one in the process of rank 0. A conversion imports
torch only here, and only if there are several processes.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptx.errors import EnvironmentProblem, PeerFailure, Terminated, exit_code_of, missing_package
from ckptx.processes.rendezvous import START_TIMEOUT, open_store
from ckptx.processes.threads import thread_errors

if TYPE_CHECKING:
    from torch.distributed import Store

_logger = logging.getLogger(__name__)

_POLL_INTERVAL = 0.02  # seconds between two reads of the store
_BEAT_INTERVAL = 1.0  # seconds between two heartbeats, and between two checks of a waiting thread
_MAX_MISSED_BEATS = 20  # consecutive missed heartbeats after which a rank counts as dead
_MAX_MISSED_BEATS_AFTER_SIGTERM = 3  # the same after this process has received SIGTERM
_WAITING_NOTE_AFTER = 10.0  # seconds after which the ranks that have not joined are logged
_LEAVE_TIMEOUT = 60.0  # seconds that rank 0 waits for the others to learn the result
_PART_NBYTES = 4 << 20  # maximum size of a stored value; the store refuses 8 MiB
_DEAD_PEER = "ended without a message, or its connection was lost; look at its output"
_LEFT_BEAT = -(1 << 40)  # makes any number of heartbeats negative

# Number of rendezvous so far, equal on all ranks; part of the keys, so that runs do not read each other's messages.
_rendezvous_count = 0


class PeerProcesses:
    """Connection of this process to the other processes of the run.

    A thread handles the store: a connection that hangs blocks that thread only, and is noticed here.

    Attributes:
        rank: Global rank of this process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Store],
        address: str,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        """Start connecting; failures are raised by the methods that wait for others.

        Args:
            rank: Global rank of this process.
            world_size: Number of processes.
            connect: Function that opens the store.
            address: Address of the store, for messages.
            start_timeout: Seconds to wait until all processes have joined.

        Raises:
            EnvironmentProblem: The system cannot start another thread.
        """
        self.rank, self.world_size = rank, world_size
        self._connect, self._address, self._start_timeout = connect, address, start_timeout
        self._condition = threading.Condition()
        # State shared with the thread; guarded by `_condition`.
        self._outbox: deque[tuple[str, bytes]] = deque()  # keys and values that are not sent yet
        self._awaited_keys: set[str] = set()
        self._received: dict[str, Any] = {}
        # By rank: the value of `beat/R`, and the number of consecutive reads without a new heartbeat. Then that of all
        # reads.
        self._beats, self._missed_beats, self._beat_reads = [0] * world_size, [0] * world_size, 0
        self._leave_deadline = 0.0  # in the time of `time.monotonic`; 0 until rank 0 waits for the others to leave
        self._ignored_ranks: set[int] = set()  # ranks that were found dead or late; not watched any more
        self._failure: PeerFailure | None = None
        self._connection_error = self._start_error = ""
        self._is_waiting_logged = False
        self._is_connected = self._is_leaving = self._is_stopped = False
        self._last_exchange_at = self._started_at = time.monotonic()
        self._thread = threading.Thread(target=self._run_thread, daemon=True, name="processes")
        with thread_errors():
            self._thread.start()

    @classmethod
    def from_environment(cls, start_timeout: float = START_TIMEOUT) -> PeerProcesses | None:
        """Return the connection to the processes of the torchrun environment; None for a single process.

        Args:
            start_timeout: Seconds to wait until all of them have joined.

        Raises:
            EnvironmentProblem: The environment contradicts itself, or torch is not installed.
        """
        rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if not (rank.isdecimal() and world_size.isdecimal()) or int(world_size) < 2:
            return None
        if int(rank) >= int(world_size) or len(world_size) > 9:
            raise EnvironmentProblem(
                f"environment: RANK is {rank[:20]} and must be below WORLD_SIZE, which is {world_size[:20]}; start "
                "with torchrun, or unset both"
            )
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise EnvironmentProblem(
                f"environment: WORLD_SIZE is {world_size}, but MASTER_ADDR {host[:60]!a} and MASTER_PORT {port[:20]!a} "
                "are not the address of a store; start with torchrun, or unset RANK and WORLD_SIZE"
            )
        connect = _store_opener(host, int(port), int(rank), start_timeout)
        return cls(int(rank), int(world_size), connect, f"{host}:{port}", start_timeout)

    def send(self, topic: str, value: Any) -> None:
        """Send a message to all other ranks."""
        self._enqueue(f"{self.rank}/{topic}", json.dumps(value).encode())

    def receive(self, rank: int, topic: str) -> Any:
        """Wait for the message of a rank about a topic, and return it.

        Raises:
            PeerFailure: This or any other rank failed or died.
            EnvironmentProblem: The rank does not start, or the connection is lost.
        """
        key = f"{rank}/{topic}"
        with self._condition:
            self._awaited_keys.add(key)
            self._condition.notify_all()
            while key not in self._received:
                self._check()
                self._condition.wait(_BEAT_INTERVAL)
            return self._received.pop(key)

    def wait_for_store(self) -> None:
        """Wait until this process is connected to the store, and no other process has its rank.

        Raises:
            PeerFailure: A rank failed.
            EnvironmentProblem: There is no connection, or another process has this rank.
        """
        with self._condition:
            while not self._is_connected:
                self._check()
                self._condition.wait(_POLL_INTERVAL)

    def check(self) -> None:
        """Check the other ranks.

        Raises:
            PeerFailure: A rank failed or died.
            EnvironmentProblem: A rank does not start, or the connection is lost.
        """
        with self._condition:
            self._check()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Send errors in the block to all ranks, and let rank 0 leave last, as it may have the store.

        The connection cannot be used after the block.
        """
        try:
            with self.shared_failure():
                yield
        finally:
            if self.rank == 0:
                self._wait_for_peers_to_leave()
            with self._condition:
                self._is_leaving = True
                self._condition.notify_all()
            self._thread.join(_LEAVE_TIMEOUT if self._can_receive() else 0)

    @contextmanager
    def shared_failure(self) -> Iterator[None]:
        """Send a failure in the block to all ranks, which ends them; rank 0 raises it after the others have left.

        Raises:
            PeerFailure: SIGTERM arrived in the block because another rank failed.
        """
        try:
            yield
        except BaseException as error:  # any exception that ends this rank ends all ranks
            self._is_stopped = isinstance(error, Terminated)
            peer_failure = self._find_peer_failure() if self._is_stopped else None
            failure = peer_failure or error
            if not isinstance(failure, PeerFailure):
                self._send_failure(f"rank {self.rank}: {str(failure) or type(failure).__name__}", exit_code_of(failure))
            elif failure is not self._failure:
                self._send_failure(str(failure), failure.exit_code, is_reported=failure.is_reported)
            if self.rank == 0:
                self._wait_for_peers_to_leave()
            if peer_failure is not None:
                raise peer_failure from error
            raise

    # ------------------------------------------------------------------ checks of the other ranks

    def _check(self) -> None:
        """Do the same as `check`, while `_condition` is held."""
        if self._failure is not None:
            raise self._failure
        self._check_connection()
        waited = time.monotonic() - self._started_at
        if waited > _WAITING_NOTE_AFTER and not self._is_waiting_logged:
            self._log_missing_ranks(waited)
        is_late = waited > self._start_timeout
        for rank in self._watched_ranks():
            if self._missed_beats[rank] >= _MAX_MISSED_BEATS:
                raise _peer_failure(rank, _DEAD_PEER)
            if is_late and not self._beats[rank]:
                self._ignored_ranks.update(each for each in self._watched_ranks() if not self._beats[each])
                raise EnvironmentProblem(
                    f"rank {rank}: did not join within {self._start_timeout:.0f} s; check that it was started with the "
                    "same command and that no two processes have the same RANK, or pass a larger --timeout"
                )

    def _log_missing_ranks(self, waited: float) -> None:
        """Log which ranks have not joined, once."""
        missing = [rank for rank in self._watched_ranks() if not self._beats[rank]]
        self._is_waiting_logged = True
        if missing and self._is_connected:
            _logger.warning(
                "rank %d: still waiting for %s %s to join after %.0f s", self.rank,
                "rank" if len(missing) == 1 else "ranks", ", ".join(map(str, missing)), waited,
            )  # fmt: skip
        elif not self._is_connected:
            _logger.warning(
                "rank %d: still waiting for %s, the store of the processes, after %.0f s",
                self.rank,
                self._address,
                waited,
            )

    def _check_connection(self) -> None:
        """Raise an EnvironmentProblem if the store cannot be started or reached, or does not answer any more."""
        if self._start_error:
            raise EnvironmentProblem(self._start_error)
        if (
            not self._connection_error
            and self._is_connected
            and time.monotonic() - self._last_exchange_at > _MAX_MISSED_BEATS * _BEAT_INTERVAL
        ):
            # This process may have been stopped, and its thread not yet resumed.
            self._condition.wait(2 * _BEAT_INTERVAL)
            if time.monotonic() - self._last_exchange_at > _MAX_MISSED_BEATS * _BEAT_INTERVAL:
                self._connection_error = f"no answer for {_MAX_MISSED_BEATS * _BEAT_INTERVAL:.0f} s"
        if self._connection_error:
            raise EnvironmentProblem(
                f"rank {self.rank}: {'lost the' if self._is_connected else 'has no'} connection to {self._address}, "
                f"the store of the processes: {self._connection_error}; look at the output of rank 0 and "
                "check the network"
            )

    def _find_peer_failure(self) -> PeerFailure | None:
        """Return the failure of another rank after SIGTERM, which torchrun sends to all ranks when one fails.

        None if all ranks answer, or if the connection is lost and no failure was received.
        """
        with self._condition:
            self._wait_for_beat_reads(1)  # heartbeats sent just before a rank died do not count
            if not (self._is_connected or self._connection_error):
                message = (
                    f"rank {self.rank}: had no connection to {self._address} when the run was stopped; "
                    "look at the output of rank 0"
                )
                return PeerFailure(message, EnvironmentProblem.exit_code, is_reported=False)
            beats_before = list(self._beats)
            self._wait_for_beat_reads(_MAX_MISSED_BEATS_AFTER_SIGTERM)
            if self._failure is not None or self._connection_error:
                return self._failure
            dead = [rank for rank in self._watched_ranks() if self._beats[rank] == beats_before[rank] > 0]
            late = [rank for rank in self._watched_ranks() if not self._beats[rank]]
            self._ignored_ranks.update(dead, late)
        if dead:
            return _peer_failure(dead[0], _DEAD_PEER)
        return _peer_failure(late[0], "had not started when the run was stopped; look at its output") if late else None

    def _wait_for_beat_reads(self, count: int) -> None:
        """Wait until the thread has read the heartbeats `count` times, or there is a failure."""
        last = self._beat_reads + count
        deadline = time.monotonic() + 2 * count * _BEAT_INTERVAL
        while self._beat_reads < last and not (self._failure or self._connection_error or time.monotonic() > deadline):
            self._condition.wait(_BEAT_INTERVAL)

    def _can_receive(self) -> bool:
        """Return False if no more messages can arrive: the connection is lost, or missing while the run is stopped."""
        return not (self._connection_error or self._start_error) and (self._is_connected or not self._is_stopped)

    def _watched_ranks(self) -> Iterator[int]:
        """Yield the other ranks, without `_ignored_ranks`."""
        return (rank for rank in range(self.world_size) if rank != self.rank and rank not in self._ignored_ranks)

    def _send_failure(self, message: str, exit_code: int, is_reported: bool = True) -> None:
        """Send a failure to the others, unless another rank sent one before, and wait until it is sent."""
        self._enqueue("failed", json.dumps([message, exit_code, is_reported]).encode())
        deadline = time.monotonic() + _LEAVE_TIMEOUT
        with self._condition:
            while self._outbox and self._can_receive() and time.monotonic() < deadline:
                self._condition.wait(_BEAT_INTERVAL)

    def _wait_for_peers_to_leave(self) -> None:
        """Wait until all other ranks have left or are dead, at most for `_LEAVE_TIMEOUT` from the first call on."""
        self._leave_deadline = self._leave_deadline or time.monotonic() + _LEAVE_TIMEOUT
        with self._condition:
            while self._can_receive() and time.monotonic() < self._leave_deadline:
                if all(
                    self._beats[rank] < 0 or self._missed_beats[rank] >= _MAX_MISSED_BEATS
                    for rank in self._watched_ranks()
                ):
                    return
                self._condition.wait(_BEAT_INTERVAL)

    # ------------------------------------------------------------------ the thread that handles the store

    def _enqueue(self, key: str, data: bytes) -> None:
        """Let the thread write a value to the store."""
        with self._condition:
            self._outbox.append((key, data))
            self._condition.notify_all()

    def _run_thread(self) -> None:
        """Connect to the store, and exchange heartbeats and messages until this process leaves."""
        try:
            store = self._connect()
            if store.add(f"joined/{self.rank}", 1) > 1:
                self._refuse_duplicate(store)
                return
            self._is_connected = True
            next_beat_at = 0.0
            while not self._is_leaving or self._outbox:
                if time.monotonic() >= next_beat_at:
                    self._exchange_beats(store)
                    next_beat_at = time.monotonic() + _BEAT_INTERVAL
                self._exchange_messages(store)
            store.add(f"beat/{self.rank}", _LEFT_BEAT)
        except EnvironmentProblem as error:  # the store cannot be started
            with self._condition:
                self._start_error = str(error)
                self._condition.notify_all()
        except Exception as error:  # network errors; raised where a message is awaited
            with self._condition:
                self._connection_error = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
                self._condition.notify_all()

    def _refuse_duplicate(self, store: Store) -> None:
        """End all ranks, because two processes have the rank of this one."""
        message = f"rank {self.rank}: two processes have this RANK; give each process a RANK of its own"
        store.compare_set("failed", "", json.dumps([message, EnvironmentProblem.exit_code, self.rank != 0]))
        with self._condition:
            self._start_error = message
            self._condition.notify_all()

    def _exchange_beats(self, store: Store) -> None:
        """Send a heartbeat, and count those of the others since the last call."""
        beats = [store.add(f"beat/{rank}", int(rank == self.rank)) for rank in range(self.world_size)]
        with self._condition:
            for rank, count in enumerate(beats):
                is_silent = count == self._beats[rank] > 0
                self._missed_beats[rank] = self._missed_beats[rank] + 1 if is_silent else 0
            self._beats, self._beat_reads = beats, self._beat_reads + 1
            self._condition.notify_all()

    def _exchange_messages(self, store: Store) -> None:
        """Send the messages of the outbox, and receive the awaited messages that have arrived."""
        with self._condition:
            messages, awaited_keys = list(self._outbox), list(self._awaited_keys)
        for key, data in messages:
            if key == "failed":
                store.compare_set(key, "", data.decode())
            else:
                _set_value(store, key, data)
        failed = json.loads(store.get("failed")) if self._failure is None and store.check(["failed"]) else None
        received = {key: json.loads(_get_value(store, key)) for key in awaited_keys if store.check([key])}
        with self._condition:
            for _ in messages:
                self._outbox.popleft()
            if failed is not None:
                self._failure = PeerFailure(*failed)
            self._received |= received
            self._awaited_keys -= received.keys()
            self._last_exchange_at = time.monotonic()
            self._condition.notify_all()
            if not self._is_leaving:
                self._condition.wait(_POLL_INTERVAL)


def _peer_failure(rank: int, reason: str) -> PeerFailure:
    """Return the failure of a rank that does not answer. Rank 0 reports it; if rank 0 does not answer, all do."""
    return PeerFailure(f"rank {rank}: {reason}", EnvironmentProblem.exit_code, is_reported=rank != 0)


def _set_value(store: Store, key: str, data: bytes) -> None:
    """Store a value of any length in parts; the key itself, with the number of parts, is written last."""
    parts = range(0, len(data), _PART_NBYTES)
    for number, offset in enumerate(parts):
        store.set(f"{key}/{number}", data[offset : offset + _PART_NBYTES].decode("ascii"))
    store.set(key, str(len(parts)))


def _get_value(store: Store, key: str) -> bytes:
    """Return a value that `_set_value` has stored."""
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def _store_opener(host: str, port: int, rank: int, timeout: float) -> Callable[[], Store]:
    """Return a function that opens the store for the next rendezvous.

    Raises:
        EnvironmentProblem: torch is not installed.
    """
    global _rendezvous_count
    _rendezvous_count += 1
    name = str(_rendezvous_count)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # failures are reported here, in one line
    try:
        import torch.distributed  # noqa: F401  # the store is opened in a thread
    except ImportError as error:
        raise missing_package("several processes", error) from error
    return lambda: open_store(host, port, rank, name, timeout)
