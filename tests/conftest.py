"""Fixtures for every test: one pool of gloo processes for the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.pool import GlooPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Processes to run functions under gloo; `pool.run(function, world_size, *args)`."""
    workers = GlooPool()
    yield workers
    workers.close()
