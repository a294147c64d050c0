"""Threads that cannot start, several conversions in one process, and processes that are forked beside them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import EnvironmentProblem
from ckptx.processes.threads import lazy_property, short_switch_interval
from tests.support.checkpoint_writers import LLAMA, llama, write_hf

CONFIG = LLAMA | {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
ROOT = Path(__file__).parents[2]

COMMANDS: dict[str, Callable[[Path, int], Any]] = {
    "hf2dcp": lambda at, count: ckptx.convert("hf2dcp", at / "hf", at / "out", workers=count),
    "dcp2hf": lambda at, count: ckptx.convert("dcp2hf", at / "dcp", at / "out", workers=count),
    "from torchtitan": lambda at, count: ckptx.convert("dcp2hf", at / "titan", at / "out", workers=count),
    "reshard": lambda at, count: ckptx.reshard(at / "hf", at / "out", tp=2, workers=count),
    "verify": lambda at, count: ckptx.verify(at / "hf", at / "dcp", workers=count),
}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """One model in three forms."""
    write_hf(tmp_path / "hf", llama(), shards=2, config=CONFIG)
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "titan", names="torchtitan")
    return tmp_path


def run_with_threads(monkeypatch: pytest.MonkeyPatch, command: Callable[[], Any], limit: int | None) -> int:
    """Return how many threads a command tries to start; the system starts `limit` (None: all)."""
    start, count = threading.Thread.start, [0]

    def limited(thread: threading.Thread) -> None:
        count[0] += 1
        if limit is not None and count[0] > limit:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        command()
    return count[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_thread_that_cannot_start(checkpoints: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With the first thread, and after others run already: the others stop, and no staging directory remains."""
    before, running = set(checkpoints.iterdir()), threading.active_count()

    def command() -> None:
        COMMANDS[name](checkpoints, 4)

    total = run_with_threads(monkeypatch, command, None)
    shutil.rmtree(checkpoints / "out", ignore_errors=True)
    failures = 0
    for limit in range(total):
        try:
            tried = run_with_threads(monkeypatch, command, limit)
        except EnvironmentProblem as error:
            failures += 1
            assert re.search(r"cannot start another thread; raise its limits .* --workers", str(error))
            assert threading.active_count() == running and set(checkpoints.iterdir()) == before
        else:  # a pool starts a thread only if none is idle, so that a run can need fewer
            assert tried <= limit
            shutil.rmtree(checkpoints / "out", ignore_errors=True)
    assert failures


def test_another_runtime_error_is_not_one_of_threads() -> None:
    from ckptx.processes.threads import thread_errors

    with pytest.raises(RuntimeError, match="other") as caught, thread_errors():
        raise RuntimeError("other")
    assert not isinstance(caught.value, EnvironmentProblem)


def test_the_switch_interval_is_restored_by_the_last_thread() -> None:
    before = sys.getswitchinterval()
    with short_switch_interval():
        shorter = sys.getswitchinterval()
        assert shorter < before
        other = short_switch_interval()
        other.__enter__()
    assert sys.getswitchinterval() == shorter, "another thread still copies"
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_a_lazy_property_is_computed_once_and_not_shared() -> None:
    calls = []

    class Owner:
        @lazy_property
        def value(self) -> int:
            """Documented."""
            calls.append(self)
            return len(calls)

    first, second = Owner(), Owner()
    assert (first.value, first.value, second.value, calls) == (1, 1, 2, [first, second])
    assert Owner.value.__doc__ == "Documented."


_PROGRAM = """
# Python 3.10 releases locks of these two without having acquired them if a fork meets their import in a thread.
import concurrent.futures.thread, logging
import os, signal, sys, threading, time
from pathlib import Path
import ckptx

root, stop, interval = Path(sys.argv[1]), threading.Event(), sys.getswitchinterval()

def convert(worker):
    count = 0
    while not stop.is_set():
        ckptx.convert("hf2dcp", root / "hf", root / f"thread-{worker}-{count}")
        count += 1

threads = [threading.Thread(target=convert, args=(worker,)) for worker in range(2)]
for thread in threads:
    thread.start()
results = []
for count in range(12):
    time.sleep(0.01 * (count % 4))  # the first fork is during the imports
    child = os.fork()
    if not child:
        ckptx.convert("hf2dcp", root / "hf", root / f"child-{count}", workers=2)
        restored = sys.getswitchinterval() == interval
        os._exit(0 if restored and ckptx.verify(root / "hf", root / f"child-{count}").ok else 1)
    deadline, pid = time.monotonic() + 60, 0
    while not pid and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)
    if not pid:
        os.kill(child, signal.SIGKILL)
    results.append(os.waitstatus_to_exitcode(status) if pid else "hangs")
stop.set()
for thread in threads:
    thread.join()
print(results, sys.getswitchinterval() == interval)
"""


def test_a_process_forked_while_threads_convert(tmp_path: Path) -> None:
    """The child converts and verifies by itself, whatever the threads of its parent were doing."""
    write_hf(tmp_path / "hf", llama(), shards=2, config=CONFIG)
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.stdout == f"{[0] * 12} True\n", done.stderr


_IMPORTS = """
import sys, threading
from pathlib import Path
import ckptx

def loaded():
    return {name for name in sys.modules if name.startswith("ckptx.")}

root, stop = Path(sys.argv[1]), threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
ckptx.inspect(root / "hf")
before = loaded()
ckptx.convert("hf2dcp", root / "hf", root / "dcp", workers=2)
ckptx.convert("dcp2hf", root / "dcp", root / "again", base=root / "hf", dtype="fp16")
ckptx.reshard(root / "dcp", root / "ranks", tp=2, pp=2, to="safetensors")
ckptx.verify(root / "hf", root / "ranks")
ckptx.diff(root / "hf", root / "again")
stop.set()
print(sorted(loaded() - before))
"""


def test_a_command_imports_all_modules_at_once_beside_other_threads(tmp_path: Path) -> None:
    """A fork during a later import would leave its lock held in the child."""
    write_hf(tmp_path / "hf", llama(), shards=2, config=CONFIG)
    command = [sys.executable, "-c", _IMPORTS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.stdout == "[]\n", done.stdout + done.stderr
