"""Several processes that make one output together, as torchrun starts them: they meet in a directory beside the target.

    parent/.NAME.ckptx-ranks/place-R       held by flock while rank R lives: nobody else is rank R
                             rank-R        held by flock while rank R lives; says which meeting it came to
                             open          written by rank 0: a number that tells this meeting from an earlier one
                             N-R-TOPIC     what rank R has to say about a topic, as JSON; N is that number
                             N-R-failed    rank R gave up, and why

There is nothing but files in it, because nodes may share no more than a file system; torch is not imported.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckptx.errors import CkptxError, Defect, EnvironmentProblem, OutputError, PeerFailure, exit_code_of
from ckptx.storage.files import take_lock, unwritable
from ckptx.storage.held_directory import PROBE, HeldDirectory

_POLL = 0.02  # seconds
_PATIENCE = 300.0  # seconds that ranks may start apart
_SETTLE = 0.2  # seconds after which what rank 0 wrote is not of an earlier meeting
_FAREWELL = 60.0  # seconds that rank 0 waits for the others to hear how it ended
_MOST = 1 << 30  # bytes that a rank may have to say
_NAMES = re.compile(rf"(rank|place)-\d+|\.?open|\.?[0-9a-f]{{16}}-\d+-\w+|{PROBE}")


def _death(rank: int) -> PeerFailure:
    return PeerFailure(f"rank {rank}: ended without a word; look at its output", Defect.exit_code, rank != 0)


class Rendezvous:
    """The meeting of the ranks of one run.

    Attributes:
        rank: Of this process.
        world_size: Processes in all.
    """

    def __init__(self, target: Path, rank: int, world_size: int) -> None:
        """Joins, and waits for rank 0.

        Raises:
            OutputError: The place beside the target is not writable.
            EnvironmentProblem: Rank 0 does not come.
            PeerFailure: It came and is gone.
        """
        self.rank, self.world_size = rank, world_size
        resolved = Path(os.path.realpath(target))
        self._root = resolved.parent / f".{resolved.name}.ckptx-ranks"
        try:
            self._root.parent.mkdir(parents=True, exist_ok=True)
            self._root.mkdir(exist_ok=True)
        except FileExistsError:
            pass  # something that is no directory: said by who opens it
        except OSError as error:
            raise unwritable(self._root, error) from error
        self._held = HeldDirectory.at(self._root)
        try:
            self._refuse_foreign()
            self._place = self._held.create(f"place-{rank}", keep=True)
        except BaseException:  # what was opened is closed, and it is raised again
            self._held.close()
            raise
        try:
            self._take_lock(self._place)
            self._lock = self._signed_by_nobody()
        except BaseException:  # what was opened is closed, and it is raised again
            os.close(self._place)
            self._remove_if_bare()
            self._held.close()
            raise
        self._number = self._open() if rank == 0 else self._wait_for_opening()
        self._all_here_by, self._gone_by = time.monotonic() + _PATIENCE, 0.0
        if rank:
            self._sign(self._number)

    @classmethod
    def from_environment(cls, target: Path) -> Rendezvous | None:
        """The meeting that torchrun's environment speaks of; None for a process on its own.

        Raises:
            EnvironmentProblem: The environment contradicts itself.
        """
        rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if not (rank.isdecimal() and world_size.isdecimal()) or int(world_size) < 2:
            return None
        if int(rank) >= int(world_size) or len(world_size) > 9:
            raise EnvironmentProblem(
                f"environment: RANK is {rank[:20]} and WORLD_SIZE {world_size[:20]}, needed one below the other; "
                "start with torchrun, or unset both"
            )
        return cls(target, int(rank), int(world_size))

    def _refuse_foreign(self) -> None:
        foreign = [name for name in self._held.names() if not _NAMES.fullmatch(name)]
        if foreign:
            raise OutputError(f"{self._root}: is no meeting place of ckptx, it holds {foreign[0]!a}; move it elsewhere")
        if not self._held.is_own():
            raise OutputError(f"{self._root}: is the meeting place of another user; remove it, or choose another DST")

    def _remove_if_bare(self) -> None:
        """Takes away the directory of a rank that could not even come."""
        with suppress(OSError):
            if self._held.names() == [f"place-{self.rank}"]:
                self._held.remove(f"place-{self.rank}")
                self._root.rmdir()

    def _take_lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not take_lock(descriptor, self._root / f"rank-{self.rank}"):
            # Somebody looks whether this rank lives, or the same rank of an earlier run is not quite gone.
            if time.monotonic() > deadline:
                raise EnvironmentProblem(
                    f"{self._root}: rank {self.rank} is running already; wait for that run or stop it"
                )
            time.sleep(_POLL)

    def _signed_by_nobody(self) -> int:
        """The file that says that this rank lives; what an earlier rank signed in it is gone before it is locked."""
        lock = self._held.create(f"rank-{self.rank}", keep=True)
        try:
            os.ftruncate(lock, 0)
            self._take_lock(lock)
        except BaseException:  # what was opened is closed, and it is raised again
            os.close(lock)
            raise
        return lock

    def _open(self) -> str:
        """Clears away what an earlier meeting left, and opens this one."""
        for name in self._held.names():
            if not name.startswith(("rank-", "place-")):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._held.descriptor)
        number = os.urandom(8).hex()
        self._sign(number)
        self._write("open", number)
        return number

    def _sign(self, number: str) -> None:
        os.pwrite(self._lock, number.encode(), 0)

    def _wait_for_opening(self) -> str:
        deadline = time.monotonic() + _PATIENCE
        found = self._read("open")  # of an earlier meeting, or of this one
        while time.monotonic() < deadline:
            number = self._read("open")
            if isinstance(number, str) and not self._is_gone(0, number):
                time.sleep(_SETTLE)
                if self._read("open") == number and self._has_come(0, number):
                    return number
            elif number is not None and number != found:
                raise _death(0)
            time.sleep(_POLL)
        raise EnvironmentProblem(
            f"{self._root}: rank 0 did not come within {_PATIENCE:.0f} s; do all nodes see the same directory?"
        )

    def say(self, topic: str, what: Any) -> None:
        """Tells all others."""
        self._write(f"{self._number}-{self.rank}-{topic}", what)

    def hear(self, rank: int, topic: str) -> Any:
        """Waits for what a rank says.

        Raises:
            PeerFailure: It, or any other rank, failed.
        """
        while True:
            said = self._read(f"{self._number}-{rank}-{topic}")
            if said is not None:
                return said
            self.check()
            time.sleep(_POLL)

    def check(self) -> None:
        """Looks after the others.

        Raises:
            PeerFailure: One failed or is gone.
            EnvironmentProblem: One does not come.
        """
        is_late = time.monotonic() > self._all_here_by
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            failure = self._read(f"{self._number}-{rank}-failed")
            if failure is not None:
                raise PeerFailure(f"rank {rank}: {failure['message']}", failure["exit"])
            # What it said last it said before it went, so look for that afterwards.
            if self._is_gone(rank, self._number) and self._read(f"{self._number}-{rank}-end") is None:
                raise _death(rank)
            if is_late and not self._has_come(rank, self._number):
                raise EnvironmentProblem(
                    f"{self._root}: rank {rank} did not come within {_PATIENCE:.0f} s; was it started, and do all "
                    "nodes see the same directory?"
                )

    @contextmanager
    def session(self) -> Iterator[None]:
        """The work of this rank: whatever it raises, the others learn of; then they all leave."""
        try:
            with self.failing_together():
                yield
        finally:
            self.say("end", True)
            self._leave()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Work whose failure ends that of all: when it is raised here, no other rank writes any more."""
        try:
            yield
        except BaseException as error:  # whatever ends this rank ends the others
            if not isinstance(error, PeerFailure):
                self.say("failed", {"message": str(error) or type(error).__name__, "exit": exit_code_of(error)})
            if self.rank == 0:
                self._await_ends()
            raise

    def _leave(self) -> None:
        """Rank 0 waits until all have heard the end, and removes the directory."""
        if self.rank == 0:
            self._await_ends()
            with suppress(OSError):
                for name in self._held.names():
                    os.unlink(name, dir_fd=self._held.descriptor)
                self._root.rmdir()
        os.close(self._lock)
        os.close(self._place)
        self._held.close()

    def _await_ends(self) -> None:
        self._gone_by = self._gone_by or time.monotonic() + _FAREWELL
        while time.monotonic() < self._gone_by and not all(
            self._read(f"{self._number}-{rank}-end") is not None or self._is_gone(rank, self._number)
            for rank in range(1, self.world_size)
        ):
            time.sleep(_POLL)

    def _has_come(self, rank: int, number: str) -> bool:
        try:
            return self._held.read(f"rank-{rank}") == number.encode()
        except CkptxError:
            return False

    def _is_gone(self, rank: int, number: str) -> bool:
        """True when a rank came to the meeting with that number and does not live any more."""
        try:
            descriptor = self._held.open(f"rank-{rank}", write=True)  # some file systems lock what is open for writing
        except (CkptxError, FileNotFoundError):
            return False
        try:
            if os.pread(descriptor, 64, 0) != number.encode():
                return False
            return take_lock(descriptor, self._root / f"rank-{rank}")
        finally:
            os.close(descriptor)

    def _write(self, name: str, what: Any) -> None:
        """In one step, so that nobody reads half of it."""
        temporary, descriptor = f".{name}", self._held.descriptor
        try:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=descriptor)
            self._held.write(temporary, [json.dumps(what).encode()])
            os.replace(temporary, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        except FileNotFoundError:
            return  # rank 0 has closed the meeting
        except OutputError:
            if not self._root.exists():
                return
            raise
        except OSError as error:
            raise unwritable(self._root, error) from error

    def _read(self, name: str) -> Any:
        try:
            said = self._held.read(name, _MOST)
            return None if said is None else json.loads(said)
        except (OSError, CkptxError, ValueError):
            return None
