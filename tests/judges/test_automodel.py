"""Checkpoints of NeMo AutoModel: ckptx reads what it saves, and it loads what ckptx writes, both with optimizer state.

`make judges` installs AutoModel and runs this folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptx
from tests.support.torch_dcp import load

RANKS = Path(__file__).with_name("automodel_ranks.py")
STATE = (".exp_avg", ".exp_avg_sq", ".step")


def run_ranks(*arguments: str | Path) -> dict[str, torch.Tensor]:
    """Run `automodel_ranks.py` on two ranks, and return the values that it writes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", RANKS, *arguments]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert not done.returncode, done.stderr[-3000:]
    return load_file(arguments[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A step that AutoModel saved after two steps of AdamW, and its parameters and moments."""
    root = tmp_path_factory.mktemp("automodel")
    step = root / "epoch_0_step_2"
    return step, run_ranks("save", step, root / "values.safetensors")


def weights_of(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if not name.endswith(STATE)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_a_step_becomes_an_hf_checkpoint(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    step, values = saved
    ckptx.convert("to-hf", step, tmp_path / "hf")
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), weights_of(values))
    assert ckptx.verify(step, tmp_path / "hf").exit == 0


@pytest.mark.parametrize("form", ["hf", "sharded safetensors", "dcp"])
def test_training_starts_from_what_ckptx_writes(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, form: str
) -> None:
    step, values = saved
    ckptx.convert("to-hf", step, tmp_path / "hf")
    kind, path = "safetensors", tmp_path / "start" / "model"
    if form == "hf":
        path = tmp_path / "hf"
    elif form == "dcp":
        kind = "torch_save"
        ckptx.convert("to-dcp", tmp_path / "hf", path)
    else:
        ckptx.reshard(tmp_path / "hf", path, dp_shard=2)
    found = run_ranks("load", kind, path, tmp_path / "found.safetensors")
    assert_equal(found, weights_of(values))


@pytest.mark.parametrize("dp_shard", [1, 4])
def test_training_resumes_from_a_resharded_step(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, dp_shard: int
) -> None:
    step, values = saved
    ckptx.reshard(step, tmp_path / "step", to="dcp", dp_shard=dp_shard)
    moments = load(tmp_path / "step" / "optim")
    assert sum(name.endswith(STATE) for name in moments) == 3 * len(weights_of(values))
    assert_equal(run_ranks("resume", tmp_path / "step", tmp_path / "found.safetensors"), values)
