"""The install without extras: what it can do without torch, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf
from tests.support.slow import slow_but

# Python runs a `sitecustomize` before anything else, in processes that ckptx starts, too.
_BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
WHOLE = LLAMA | {
    "hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "vocab_size": 16,
}  # fmt: skip
EXTRA = ("torch", "transformers")
NOT_REQUIRED = ("torch", "transformers", "safetensors", "accelerate", "scipy")


class Bare:
    """Runs ckptx where packages are not installed."""

    def __init__(self, root: Path, blocked: tuple[str, ...]) -> None:
        root.mkdir()
        (root / "sitecustomize.py").write_text(_BLOCKER.format(blocked=set(blocked)))
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(Path.cwd())])}

    def python(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=self._environment)

    def ckptx(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "ckptx", *arguments)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return Bare(tmp_path_factory.mktemp("bare") / "site", NOT_REQUIRED)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    write_hf(root / "hf", llama(), shards=2, config=WHOLE)
    write_dcp(root / "dcp", llama(), config=WHOLE)
    for name, config in CLASSES.items():
        write_hf(root / name, llama(), config=config)
    (root / "remote" / "modeling.py").write_text("import torch\n")
    return root


# Classes that the table does not answer for: unknown to it, with code of their own, with a config that changes names.
CLASSES = {
    "unknown": WHOLE | {"architectures": ["NonesuchForCausalLM"], "model_type": "nonesuch"},
    "remote": WHOLE
    | {
        "architectures": ["NonesuchForCausalLM"],
        "model_type": "nonesuch",
        "auto_map": {"AutoModelForCausalLM": "modeling.NonesuchForCausalLM"},
    },
    "by config": WHOLE | {"architectures": ["ZambaForCausalLM"], "model_type": "zamba"},
}
RUN_OPTIONS = ([], ["--tp", "2"], ["--dp-shard", "2"], ["--device", "cpu"], ["--no-backward"])


def test_the_blocker_blocks(bare: Bare) -> None:
    for package in NOT_REQUIRED:
        done = bare.python("-c", f"import {package}")
        assert f"No module named '{package}'" in done.stderr
    assert bare.python("-c", "import numpy, xxhash, isal, click, tqdm, huggingface_hub").returncode == 0


@pytest.mark.parametrize("source", slow_but(("hf", "dcp"), ("hf",)))
def test_known_classes_need_no_extra(bare: Bare, here: Path, tmp_path: Path, source: str) -> None:
    src, out = here / source, tmp_path
    other = here / {"hf": "dcp", "dcp": "hf"}[source]
    convert = {"hf": "hf2dcp", "dcp": "dcp2hf"}[source]
    html = ["--ranks", "--html", out / "page.html"]
    for words in (
        ["inspect", src, "--tensors"],
        ["inspect", src, *html],
        ["diff", src, other],
        ["verify", src, other],
        ["convert", convert, src, out / "a"],
        ["convert", convert, src, out / "b", "--dtype", "fp32"],
        ["convert", convert, src, out / "c", "--names", "model", "--dry-run"],
        ["reshard", src, out / "d", "--tp", 2, "--pp", 1, "--to", "dcp"],
        ["reshard", src, out / "e", "--tp", 2, "--to", "safetensors"],
        ["verify", src, out / "a"],
        ["verify", src, out / "d"],
        ["verify", src, out / "e"],
        ["env"],
        ["--help"],
        ["verify", "--help"],
    ):
        done = bare.ckptx(*words)
        assert done.returncode == 0, (words, done.stderr)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "blocked",
    [
        pytest.param(EXTRA, id="both absent"),
        pytest.param(("transformers",), id="transformers absent", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("options", RUN_OPTIONS, ids=lambda options: " ".join(options) or "alone")
def test_running_models_says_which_extra(
    tmp_path: Path, here: Path, blocked: tuple[str, ...], options: list[str]
) -> None:
    done = Bare(tmp_path / "site", blocked).ckptx("verify", here / "hf", here / "dcp", "--run", *options)
    refused(done, blocked[0])


CONVERSIONS = ("convert hf2dcp", "reshard --tp 2")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "words"),
    [(name, words) for name in CLASSES for words in (*CONVERSIONS, *(("diff", "verify") if name != "remote" else ()))],
)
def test_classes_to_be_built_say_which_extra(bare: Bare, here: Path, tmp_path: Path, name: str, words: str) -> None:
    second = tmp_path / "out" if words in CONVERSIONS else here / "hf"
    trust = ["--trust-remote-code"] if name == "remote" else []
    done = bare.ckptx(*words.split(), here / name, second, *trust)
    refused(done, "torch")
    assert CLASSES[name]["architectures"][0] in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CLASSES)
def test_inspect_does_without_the_class(bare: Bare, here: Path, name: str) -> None:
    done = bare.ckptx("inspect", here / name, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["tensors"] == len(llama())
    if name != "remote":  # whose code nobody asked to run
        assert "pip install 'ckptx[run]'" in said["notes"][0]


def refused(done: subprocess.CompletedProcess[str], package: str) -> None:
    """Exit 7 and one line: the package, and the extra that brings it."""
    assert done.returncode == 7, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.search(rf"requires {package}, which is not installed; pip install 'ckptx\[run\]'$", line), line
    assert done.stdout == ""
