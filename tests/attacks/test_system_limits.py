"""Limits of the system: each ends a command with its own exit code, and no staging directory remains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.cli import steps
from ckptx.errors import OutputError
from tests.support.checkpoint_writers import LLAMA, llama, write_hf

CONFIG = LLAMA | {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
ROOT = Path(__file__).parents[2]
CKPTX = f"{sys.executable} -P -m ckptx" if sys.version_info >= (3, 11) else f"{sys.executable} -m ckptx"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with a checkpoint `hf` and an empty directory `outputs`."""
    write_hf(tmp_path / "hf", llama(), shards=2, config=CONFIG)
    (tmp_path / "outputs").mkdir()
    return tmp_path


def shell(script: str, cwd: Path, *wrapper: str) -> subprocess.CompletedProcess[str]:
    """Run a script of bash, which finds ckptx in this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*wrapper, "bash", "-c", script]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_few_open_files(root: Path) -> None:
    """From a limit at which Python just starts to one at which the command succeeds."""
    codes = []
    for limit in range(6, 64):
        done = shell(f"ulimit -n {limit}; exec {CKPTX} convert hf2dcp hf outputs/out", root)
        codes.append(done.returncode)
        if done.returncode == 0:
            break
        assert done.returncode == 7 and "raise the limit (ulimit -n)" in done.stderr, (limit, done.stderr)
        assert list((root / "outputs").iterdir()) == [], (limit, done.stderr)
    assert codes[-1] == 0 and len(codes) > 5


def _may_drop_capabilities() -> bool:
    if os.geteuid() or shutil.which("setpriv") is None:
        return os.geteuid() != 0
    return subprocess.run([*_WITHOUT_OVERRIDE, "true"], capture_output=True, check=False).returncode == 0


# Root may enter directories without permission, unless it gives up these capabilities.
_WITHOUT_OVERRIDE = ("setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search")


@pytest.mark.skipif(not _may_drop_capabilities(), reason="root may read everything, and may not give that up here")
@pytest.mark.parametrize("mask", ["0777", "0577", "0677", "0377", "0333", "0222", "0177"])
def test_files_without_permission(root: Path, mask: str) -> None:
    wrapper = () if os.geteuid() else _WITHOUT_OVERRIDE
    done = shell(f"umask {mask}; exec {CKPTX} convert hf2dcp hf outputs/out", root, *wrapper)
    assert done.returncode == 5 and "Permission denied" in done.stderr, done.stderr
    assert list((root / "outputs").iterdir()) == []


def _may_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and not subprocess.run(command, capture_output=True).returncode


@pytest.mark.skipif(not _may_mount(), reason="mounting is not allowed here")
def test_no_inode_left(root: Path) -> None:
    codes = []
    for inodes in range(2, 16):
        script = (
            f"mount -t tmpfs -o size=10m,nr_inodes={inodes} tmpfs outputs && {CKPTX} convert hf2dcp hf outputs/out; "
            "code=$?; ls -A outputs; exit $code"
        )
        done = shell(script, root, "unshare", "-rm")
        codes.append(done.returncode)
        if done.returncode == 0:
            break
        assert done.returncode in (5, 6) and "No space left on device" in done.stderr, done.stderr
        assert done.stdout == "", "something is left in outputs"
    assert codes[-1] == 0 and len(codes) > 5


@pytest.mark.parametrize(
    "words",
    ["convert hf2dcp {root}/hf out", "convert to-hf {root}/hf out", "reshard {root}/hf out --tp 2",
     "convert hf2dcp {root}/hf {root}/outputs/out --report report.json", "verify {root}/hf {root}/hf --report x.json"],
)  # fmt: skip
def test_the_current_directory_was_removed(root: Path, words: str) -> None:
    done = shell(f"mkdir gone; cd gone; rmdir ../gone; exec {CKPTX} {words.format(root=root)}", root)
    assert done.returncode == 7, done.stderr
    assert "the current directory was removed; run ckptx in another directory" in done.stderr
    assert list((root / "outputs").iterdir()) == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_parent_of_the_output_is_moved(root: Path, is_replaced: bool) -> None:
    def move(done: int, total: int) -> None:
        if not (root / "moved").exists():
            (root / "outputs").rename(root / "moved")
            if is_replaced:
                (root / "outputs").mkdir()

    with pytest.raises(OutputError, match="outputs: was moved or replaced by another process; no output was created"):
        ckptx.convert("hf2dcp", root / "hf", root / "outputs" / "out", on_progress=move, workers=1)
    assert list((root / "moved").iterdir()) == []
    assert not is_replaced or list((root / "outputs").iterdir()) == []


def test_a_clock_that_is_set_back(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Times of `-v` and of the report come from a clock that is never set."""
    import logging
    import time

    now = [2e9]

    def time_set_back() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", time_set_back)
    monkeypatch.setattr(time, "time_ns", lambda: int(time_set_back() * 1e9))
    with steps.log_steps():
        logging.getLogger("ckptx").debug("first")
        assert ckptx.convert("hf2dcp", root / "hf", root / "outputs" / "out").seconds >= 0
    seconds = [float(line.split()[0]) for line in capsys.readouterr().err.splitlines()]
    assert len(seconds) > 3 and min(seconds) >= 0 and sorted(seconds) == seconds
