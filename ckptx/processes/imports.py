"""Imports that a fork in another thread does not interrupt: the child would wait forever for the lock of a module."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from importlib import import_module
from pkgutil import iter_modules
from weakref import WeakSet

# A fork waits for the thread that holds this lock.
import_lock = threading.RLock()
os.register_at_fork(before=import_lock.acquire, after_in_parent=import_lock.release, after_in_child=import_lock.release)

threads_without_forks: WeakSet[threading.Thread] = WeakSet()  # threads of ckptx that never fork

# These need torch, or are imported before a command calls a function of the package.
_EXCLUDED = {
    "ckptx.__main__", "ckptx.architecture.introspection", "ckptx.cli", "ckptx.pytest_plugin", "ckptx.robustness_suite",
    "ckptx.runtime",
}  # fmt: skip
# These need a package that the base install does not include. If it is missing, the code that needs one of them reports
# that.
_OPTIONAL = {"ckptx.untrusted.yaml_text"}


def import_all_modules() -> None:
    """Import the modules that commands without torch import on first use, if another thread could fork meanwhile.

    Without such threads they stay lazy, because all of them take about half a second.
    """
    if {*threading.enumerate()} - {threading.current_thread(), *threads_without_forks}:
        with import_lock:
            for name in _walk_modules("ckptx"):
                with suppress(ModuleNotFoundError) if name in _OPTIONAL else nullcontext():
                    import_module(name)


def _walk_modules(package: str) -> Iterator[str]:
    """Yield the names of the modules in a package and its packages."""
    for module in iter_modules(import_module(package).__path__, f"{package}."):
        if module.name not in _EXCLUDED:
            yield module.name
            if module.ispkg:
                yield from _walk_modules(module.name)
