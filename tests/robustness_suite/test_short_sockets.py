"""A TMPDIR of any length: the path of a socket has 107 bytes at most, and multiprocessing makes one below TMPDIR."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path

import pytest

from ckptx.errors import EnvironmentProblem
from ckptx.robustness_suite import short_sockets

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


def socket_path_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error with this TMPDIR if /proc is not available; empty if there is none."""

    def refuse(*_: object) -> bool:
        raise FileNotFoundError("/proc")

    with monkeypatch.context() as patch:
        config = process.current_process()._config  # type: ignore[attr-defined]  # as multiprocessing does
        patch.setitem(config, "tempdir", tempfile.mkdtemp(prefix="pymp-", dir=directory))
        patch.setattr(short_sockets, "_descriptors", {})
        patch.setattr(os.path, "samefile", refuse)
        try:
            short_sockets.shorten_socket_paths()
        except EnvironmentProblem as error:
            return str(error)
    return ""


def test_the_limit_in_the_error_is_the_longest_tmpdir_that_is_possible(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {}
    for length in range(30, 121):
        directory = long_directory(short_path, length)
        assert len(os.fsencode(directory)) == length
        errors[length] = socket_path_error(directory, monkeypatch)
        shutil.rmtree(directory)
    longest = max(length for length, error in errors.items() if not error)
    assert 30 < longest < 120 and not any(errors[length] for length in range(30, longest + 1))
    for length in range(longest + 1, 121):
        assert re.search(rf"^TMPDIR: \S+ has {length} bytes, .* at most {longest} are possible", errors[length])


@pytest.mark.slow
@pytest.mark.parametrize("length", [95, 200])
def test_ranks_run_there(short_path: Path, length: int) -> None:
    directory = long_directory(short_path, length)
    done = subprocess.run(
        [sys.executable, "-m", "ckptx", "robustness", "llama_tiny", "--phases", "2", "-q"],
        env={**os.environ, "TMPDIR": str(directory)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "PASSED: llama_tiny, 1 phase\n"), done.stderr
