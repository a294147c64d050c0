"""For every test: one thread, signals as by default, no note on the version, one pool of gloo processes a session."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.support.installed import IS_ASKED
from tests.support.memory import MemoryPath
from tests.support.pool import SELDOM, GlooPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny, and the tests themselves run side by side: more threads of torch would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Files go out in the order below; xdist would begin with those of the most tests, which are not the longest.

    What collecting imports is no garbage; to search it for some takes a third of that time.
    """
    gc.disable()
    if hasattr(config.option, "loadscopereorder"):  # xdist before 3.7 keeps the order
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what `sampled` leaves out: all but so many, evenly spread, of the cases that are not slow.

    Files that run functions under gloo come first: they are the longest, and one of them at the end would run alone.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for those in cases.values():
        keep = min(those[0].get_closest_marker("sampled").args[0], len(those))
        kept = {index * len(those) // keep for index in range(keep)}
        for index, item in enumerate(those):
            if index not in kept:
                item.add_marker("slow")
    of_pool = {item.path for item in items if "pool" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in of_pool)


def pytest_collection_finish() -> None:
    """Ten thousand tests and what they import are no garbage, and need not be looked at again and again.

    Nor need what a model is made of be searched each time that one is built: it goes when nobody refers to it.
    """
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """Children inherit what is ignored: SIGHUP under nohup, SIGINT in the background of a script."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def unchanged_process() -> Iterator[None]:
    """Check that the tests of a file leave logging and the working directory as they were, for the files after it."""
    before = logging.root.manager.disable, os.getcwd()
    yield
    assert (logging.root.manager.disable, os.getcwd()) == before


@pytest.fixture(scope="module", autouse=True)
def no_note_on_the_version() -> Iterator[None]:
    """That another transformers is installed is not said here: `architecture/test_model_files.py` has tests of it."""
    with pytest.MonkeyPatch.context() as patch:
        if not IS_ASKED:
            patch.setattr("ckptx.architecture.installed.version_note", lambda class_name: None)
        yield


@pytest.fixture
def place() -> MemoryPath:
    """An empty directory in memory, for tests of what reads or writes through the interface of a storage."""
    place = MemoryPath("/run/here")
    place.mkdir()
    return place


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Processes to run functions under gloo; `pool.run(function, world_size, *args)`."""
    workers = GlooPool()
    yield workers
    workers.close()
