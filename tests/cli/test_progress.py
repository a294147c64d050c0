"""On a terminal, commands show their current step and its duration; elsewhere they show nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.support.measured_steps import CONFIGS
from tests.support.remote_model import write_remote_model


def run_on_terminal(*words: str | Path) -> tuple[str, str, int]:
    """Run ckptx with a terminal as its stderr; return stdout, what the terminal got, and the exit code."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    hidden = ("CI", "HF_HUB_DISABLE_PROGRESS_BARS")
    with subprocess.Popen(
        [sys.executable, "-m", "ckptx", *map(str, words)],
        env={name: value for name, value in os.environ.items() if name not in hidden},
        stdout=subprocess.PIPE, stderr=terminal, text=True,
    ) as process:  # fmt: skip
        os.close(terminal)
        shown = b""
        while True:
            try:
                shown += os.read(controller, 65536)
            except OSError:  # the process has closed its end
                break
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(controller)
    return out, shown.decode(), process.returncode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "num_hidden_layers": 2}))
    return path


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["--dtype", "fp32"], ["importing torch", "importing transformers", "building the model",
         "running the step without storage, 0 of 1 runs done"]),
        (["--search", "--gpus", "2", "--gpu-memory", "8GB"], ["importing torch", "searching layouts, 0 of 3 done",
         "forecasting every stage of the best layout"]),
    ],
    ids=["forecast", "search"],
)  # fmt: skip
def test_a_forecast_shows_what_it_does(words: list[str], steps: list[str], model: Path) -> None:
    out, shown, code = run_on_terminal("forecast", model, "--seq", "64", *words)
    assert code == 0 and "done in" in out
    for step in steps:
        assert re.search(rf"{re.escape(step)} *\[\d\d:\d\d\]", shown), step


def test_imports_of_remote_code_are_shown(tmp_path: Path) -> None:
    model = write_remote_model(tmp_path / "remote")
    _, shown, code = run_on_terminal("forecast", model, "--seq", "16", "--trust-remote-code", "--dtype", "fp32")
    assert code == 0
    assert "building the model from its own code" in shown


@pytest.mark.parametrize("words", [["--json"], ["-q"], ["-v"]], ids=str)
def test_without_progress_there_is_none(words: list[str], model: Path) -> None:
    _, shown, code = run_on_terminal("forecast", model, "--seq", "64", "--dtype", "fp32", *words)
    assert code == 0
    assert not re.search(r"\[\d\d:\d\d\]", shown)


def test_a_file_gets_no_progress(model: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "ckptx", "forecast", model, "--seq", "64", "--dtype", "fp32"],
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_a_comparison_of_models_shows_what_it_does(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, pad_token_id=0
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    _, shown, code = run_on_terminal("verify", tmp_path / "model", tmp_path / "model", "--run")
    assert code == 0
    steps = ["importing torch and transformers", "reading the checkpoints", "running the reference",
             "loading the checkpoint", "running the checkpoint", "comparing the outputs and gradients"]  # fmt: skip
    for step in steps:
        assert re.search(rf"{re.escape(step)} *\[\d\d:\d\d\]", shown), step
