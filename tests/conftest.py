"""Fixtures for all tests: one thread, default signals, no version note, and one pool of gloo processes per session."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from tests.support.memory_storage import MemoryPath
from tests.support.pool import GC_THRESHOLDS, GlooPool
from tests.support.transformers_version import IS_TABLES_VERSION

# Compared with packages that only `make judges` installs.
_JUDGES = {
    "judges/test_automodel.py": "nemo_automodel",
    "judges/test_compressed_tensors.py": "compressed_tensors",
    "judges/test_deepspeed_engine.py": "deepspeed",
    "judges/test_megatron_core.py": "megatron",
    "judges/test_megatron_families.py": "megatron",
    "judges/test_torch_checkpointing_writer.py": "torch_checkpointing",
    "judges/test_torchtitan_experts.py": "torchtitan",
}
collect_ignore = [file for file, package in _JUDGES.items() if find_spec(package) is None]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny and tests run in parallel, so more torch threads would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests run in parallel on machines that others use too, so that a test may be slow without a fault of its own. Fixtures
# of one test function make directories, which the examples share.
settings.register_profile(
    "ckptx", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("ckptx")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of test files below; xdist would start with the files that have the most tests.

    Turn off garbage collection while tests are collected, because it takes a third of that time.
    """
    gc.disable()
    if hasattr(config.option, "loadscopereorder"):  # xdist before 3.7 keeps the order
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `sampled` does not select as slow; it selects a number of evenly spaced cases.

    Files that run functions under gloo come first, because they take longest and would run alone at the end.
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
    """Exclude collected tests and imported modules from garbage collection, and collect rarely.

    Models are freed by reference counts, so searches for cycles after each model would only take time.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """Restore default signal handlers, because child processes inherit ignored signals (nohup, background scripts)."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def unchanged_process() -> Iterator[None]:
    """Check that the tests of a file do not change the logging level or the working directory for later files."""
    before = logging.root.manager.disable, os.getcwd()
    yield
    assert (logging.root.manager.disable, os.getcwd()) == before


@pytest.fixture(scope="module", autouse=True)
def no_note_on_the_version() -> Iterator[None]:
    """Turn off the note about another transformers version; `architecture/test_model_files.py` tests it."""
    with pytest.MonkeyPatch.context() as patch:
        if not IS_TABLES_VERSION:
            patch.setattr("ckptx.architecture.transformers_version.version_note", lambda class_name: None)
        yield


@pytest.fixture
def place() -> MemoryPath:
    """An empty directory in memory, for tests of the storage interface."""
    place = MemoryPath("/run/here")
    place.mkdir()
    return place


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """A pool of processes that run functions under gloo: `pool.run(function, world_size, *args)`."""
    workers = GlooPool()
    yield workers
    workers.close()
