"""The command line as a process: `python -m ckptx`, streams that end early, colour."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ckptx.version import __version__
from tests.support.checkpoint_writers import llama, names_in, write_hf
from tests.support.transformers_version import without_version_note


def ckptx(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptx", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_python_dash_m() -> None:
    done = ckptx("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ckptx {__version__}\n", "")


def test_a_conversion_from_end_to_end(tmp_path: Path) -> None:
    write_hf(tmp_path / "in" / "hf", llama(), shards=2)
    (tmp_path / "out").mkdir()
    done = ckptx("convert", "hf2dcp", tmp_path / "in" / "hf", tmp_path / "out" / "dcp")
    assert (done.returncode, without_version_note(done.stderr)) == (0, "")
    assert done.stdout.startswith("wrote 21 tensors")
    assert names_in(tmp_path / "out") == ["dcp"]
    assert ckptx("verify", tmp_path / "in" / "hf", tmp_path / "out" / "dcp").returncode == 0


def on_a_terminal(*arguments: object, **environment: str) -> str:
    """What a person sees: stderr is a terminal."""
    ours, theirs = pty.openpty()
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI")} | environment
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptx", *map(str, arguments)], stderr=theirs, stdout=subprocess.DEVNULL, env=clean
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:
        pass  # the other end was closed
    os.close(ours)
    process.wait()
    return seen.decode()


def test_colour_on_a_terminal_unless_it_is_not_wanted(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert "\x1b[31m" in on_a_terminal("inspect", gone)
    assert "\x1b" not in on_a_terminal("inspect", gone, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal("inspect", gone, "--no-color")
    assert "\x1b" not in ckptx("inspect", gone).stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_gone_is_no_error(tmp_path: Path, options: list[str]) -> None:
    write_hf(tmp_path / "hf", llama(layers=400))
    command = [sys.executable, "-m", "ckptx", "inspect", str(tmp_path / "hf"), "--tensors", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert without_version_note(process.stderr.read().decode()) == ""
    assert process.returncode == 0
