"""A TMPDIR of any length: the path of a socket has 107 bytes at most, and multiprocessing makes one below TMPDIR."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

START = """
import multiprocessing, os, sys
from ckptx.robustness_suite.short_sockets import shorten_socket_paths

def answer(pipe):
    pipe.send(os.getpid())

if __name__ == "__main__":
    if "used before" in sys.argv:
        multiprocessing.util.get_temp_dir()
    shorten_socket_paths()
    shorten_socket_paths()
    context = multiprocessing.get_context("forkserver")
    for _ in range(2):
        here, there = context.Pipe()
        process = context.Process(target=answer, args=(there,))
        process.start()
        there.close()
        assert here.recv() == process.pid
        process.join()
    print("fine")
"""


def long_directory(tmp_path: Path, length: int) -> Path:
    """A directory whose path has so many bytes, or as few as can be."""
    left = max(1, length - len(os.fsencode(tmp_path)) - 1)
    found = tmp_path / "/".join(["d" * min(left, 200), *(["e" * (left - 201)] if left > 201 else [])])
    found.mkdir(parents=True)
    return found


@pytest.fixture
def short_path() -> Iterator[Path]:
    """One that is short enough to be made longer."""
    root = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp", f"x{os.getpid()}")
    root.mkdir()
    yield root
    subprocess.run(["rm", "-rf", str(root)], check=True)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("before", ["", "used before"])
@pytest.mark.parametrize("length", [40, 60, 74, 75, 76, 77, 90, 95, 107, 120, 200, 300])
def test_a_fork_server_starts_wherever_temporary_files_are(short_path: Path, length: int, before: str) -> None:
    script = short_path / "start.py"
    script.write_text(START)
    directory = long_directory(short_path, length)
    assert len(os.fsencode(directory)) == length
    done = subprocess.run(
        [sys.executable, script, before], env={**os.environ, "TMPDIR": str(directory)}, capture_output=True, text=True
    )
    assert done.stdout == "fine\n", done.stderr
    assert not any(directory.iterdir()), "nothing is left there"


@pytest.mark.slow
@pytest.mark.parametrize("length", [95, 200])
def test_ranks_run_there(short_path: Path, length: int) -> None:
    directory = long_directory(short_path, length)
    done = subprocess.run(
        [sys.executable, "-m", "ckptx", "robustness", "llama_tiny", "--phases", "2", "-q"],
        env={**os.environ, "TMPDIR": str(directory)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "PASSED: llama_tiny, 1 phase\n"), done.stderr
