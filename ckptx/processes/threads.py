"""Run threads in a program that has threads and forks of its own.

A thread that the system cannot start is an error with advice, the switch interval of the interpreter is restored, and
properties are computed without locks that a forked process would inherit.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, overload

from ckptx.errors import find_environment_problem

T = TypeVar("T")

# Seconds after which a thread that waits for the GIL, such as after a system call, makes the running thread release it.
# The default of Python, 0.005, is as long as ten system calls.
_SWITCH_INTERVAL = 0.0002


@contextmanager
def thread_errors() -> Iterator[None]:
    """Raise the error of a thread that the system cannot start as EnvironmentProblem."""
    try:
        yield
    except RuntimeError as error:
        problem = find_environment_problem(error)
        if problem is None:
            raise
        raise problem from error


def run_threads(
    work: Callable[[int], None], count: int, *, stop: Callable[[], None], on_wait: Callable[[], None] = lambda: None
) -> None:
    """Run a function in threads, and return when all of them have ended.

    Args:
        work: Called with the number of the thread, from 0; it stores its own errors.
        count: Number of threads.
        stop: Makes `work` return soon. It is called if a thread cannot start, if `on_wait` raises an exception, or if
            the wait is interrupted.
        on_wait: Called ten times per second while threads run.

    Raises:
        EnvironmentProblem: The system cannot start another thread.
    """
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    try:
        with thread_errors():
            for thread in threads:
                thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                on_wait()
    except BaseException:  # raised again when the threads have ended
        stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise


class _SwitchInterval:
    """The switch interval of the interpreter (`sys.setswitchinterval`), which several threads may shorten at a time.

    Attributes:
        lock: Guards the other attributes.
        users: Number of contexts that have shortened the interval and not ended.
        original: Interval in seconds to restore.
    """

    def __init__(self) -> None:
        self.lock, self.users, self.original = threading.Lock(), 0, 0.0

    def enter(self) -> None:
        with self.lock:
            if not self.users:
                self.original = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_INTERVAL)
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                sys.setswitchinterval(self.original)

    def reset_in_child(self) -> None:
        """Restore the interval in a forked process, which has none of the other threads."""
        if self.users:
            sys.setswitchinterval(self.original)
        self.lock, self.users = threading.Lock(), 0


_switch_interval = _SwitchInterval()
os.register_at_fork(after_in_child=_switch_interval.reset_in_child)


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let threads that mostly copy switch often; the interval is restored when the last context ends."""
    _switch_interval.enter()
    try:
        yield
    finally:
        _switch_interval.leave()


class lazy_property(Generic[T]):  # noqa: N801, named like `functools.cached_property`
    """A property that is computed on first access, like `functools.cached_property` of Python 3.12 and newer.

    That of Python 3.10 and 3.11 computes under a lock of the class. A process that is forked while another thread
    computes has a lock that nobody releases, and waits forever.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self._name, self.__doc__ = function, "", function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> lazy_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._function(instance)
        return value
