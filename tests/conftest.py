"""Fixtures for every test: signals as they are by default, and one pool of gloo processes for the session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.pool import GlooPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """Children inherit what is ignored: SIGHUP under nohup, SIGINT in the background of a script."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Processes to run functions under gloo; `pool.run(function, world_size, *args)`."""
    workers = GlooPool()
    yield workers
    workers.close()
