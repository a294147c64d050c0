"""`inspect` and `diff` open every checkpoint that a command leaves, and a checkpoint equals itself."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptx.cli.main import cli
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf
from tests.support.runner import CliRunner

CONFIG = {
    **LLAMA, "vocab_size": 16, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
FORMS = {
    "to-dcp": [[], ["--files", "3"], ["--prefix", "model."], ["--names", "model"], ["--names", "torchtitan"],
               ["--dtype", "fp32"], ["--tp", "2"], ["--tp", "2", "--pp", "2", "--dp-shard", "2"]],
    "to-hf": [[], ["--max-shard-size", "1KB"], ["--index", "always"], ["--dtype", "fp16"], ["--names", "model"]],
    "reshard": [[*to, *mesh] for to, mesh in itertools.product(
        (["--to", "dcp"], ["--to", "safetensors"]),
        (["--tp", "2"], ["--pp", "2"], ["--dp-shard", "2"], ["--tp", "2", "--pp", "2", "--dp-shard", "2"]),
    )],
}  # fmt: skip
FILES = ("*.safetensors", "*.distcp", "*.pt", "*.pth", "*.bin")


def assert_opens(*paths: Path) -> None:
    """`inspect PATH` and `diff PATH PATH` end with 0."""
    for path in paths:
        for words in (["inspect", path], ["inspect", path, "--ranks", "--tensors"], ["diff", path, path]):
            result = CliRunner().invoke(cli, [*map(str, words)], standalone_mode=False)
            assert result.return_value == 0, (words, result.stderr)


def checkpoints_in(root: Path) -> list[Path]:
    """Return the outermost directories below `root` that have files of weights."""
    found = sorted({file.parent for pattern in FILES for file in root.rglob(pattern)})
    return [each for each in found if not any(other in each.parents for other in found)]


CASES = [
    (source, command, options)
    for source in ("hf", "dcp")
    for command, rows in FORMS.items()
    for options in rows
    if not (source == "dcp" and "--prefix" in options)  # a DCP keeps its names
]


@pytest.mark.parametrize(("source", "command", "options"), CASES)
def test_outputs_of_conversions(tmp_path: Path, source: str, command: str, options: list[str]) -> None:
    write = {"hf": write_hf, "dcp": write_dcp}[source]
    src, out = write(tmp_path / "src", llama(), config=CONFIG), tmp_path / "out"
    words = ["reshard"] if command == "reshard" else ["convert", command]
    result = CliRunner().invoke(cli, [*words, str(src), str(out), *options], standalone_mode=False)
    assert result.return_value == 0, result.stderr
    assert_opens(src, out)


SMALLER = ["training.steps=4", "training.save_at=[2]"]
RECIPES = {
    "llama_tiny": SMALLER, "qwen3_moe_tiny": SMALLER, "transformers_trainer": [],
    "accelerate": [], "fsdp2_script": [],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_of_robustness(tmp_path: Path, recipe: str) -> None:
    """Checkpoints of the runs, exported, resharded and saved again."""
    if recipe == "accelerate":
        pytest.importorskip("accelerate")
    overrides = [word for each in RECIPES[recipe] for word in ("--set", each)]
    out = tmp_path / "out"
    result = CliRunner().invoke(
        cli, ["robustness", recipe, *overrides, "--device", "cpu", "--out", str(out), "--json"], standalone_mode=False
    )
    assert json.loads(result.stdout)["exit"] == 0, result.stderr
    left = checkpoints_in(out)
    assert len(left) >= 4
    assert_opens(*left)


@pytest.mark.slow
def test_outputs_of_the_pytest_plugin(tmp_path: Path) -> None:
    """A test that keeps the output of the fixture."""
    (tmp_path / "test_run.py").write_text(
        "def test_run(checkpoint_robustness):\n"
        f"    assert checkpoint_robustness('llama_tiny', overrides={SMALLER!r}, device='cpu', out='out').ok\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    left = checkpoints_in(tmp_path / "out")
    assert len(left) >= 4
    assert_opens(*left)
