"""Checkpoints that DeepSpeed writes: ckptx reads the weights, masters and moments that its engine returns.

`make judges` installs DeepSpeed and runs this folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.catalog_tensors import read_checkpoint, read_safetensors
from tests.support.checkpoint_writers import Value

WRITER = Path(__file__).resolve().parents[2] / "tools" / "build_deepspeed_fixtures.py"
TENSOR_PARALLEL_WRITER = Path(__file__).with_name("deepspeed_tensor_parallel.py")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["stage1", "stage2", "stage2_elastic", "stage3"])
def test_values_are_those_of_the_engine(case: str, ranks: int, tmp_path: Path) -> None:
    run_on_ranks(ranks, WRITER, case, tmp_path)
    found = read_checkpoint(tmp_path / case)
    assert_equal(found, case, tmp_path)
    universal = make_universal(tmp_path / case)
    if universal is not None:
        in_stage_3 = case == "stage3"  # ds_to_universal does not write its steps
        assert read_checkpoint(universal) == {
            name: each for name, each in found.items() if not (in_stage_3 and name.endswith(".step"))
        }


@pytest.mark.parametrize(
    ("model", "tp", "stage", "ranks"),
    [
        ("llama", 2, 0, 2),
        ("llama", 2, 1, 4),
        ("llama_uneven", 4, 2, 4),
        ("llama", 2, 3, 4),
        ("llama_uneven", 2, 2, 2),
        ("llama_one_kv_head", 2, 2, 2),
        ("qwen2_tied", 2, 0, 2),
        ("qwen2_tied", 2, 2, 4),
        ("qwen2_tied", 2, 3, 2),
        ("phi3", 2, 1, 4),
        ("phi3", 2, 3, 2),
    ],
)
def test_tensor_parallel_values_are_those_of_the_engine(
    model: str, tp: int, stage: int, ranks: int, tmp_path: Path
) -> None:
    """AutoTP shards transformers' models: rows, columns, fused parts, tied names and unequal shards."""
    case = f"{model}-{stage}"
    run_on_ranks(ranks, TENSOR_PARALLEL_WRITER, model, tp, stage, tmp_path / case)
    found = read_checkpoint(tmp_path / case)
    assert_equal(found, case, tmp_path)
    universal = make_universal(tmp_path / case) if stage else None
    if universal is not None:
        assert read_checkpoint(universal) == {
            name: each for name, each in found.items() if stage < 3 or not name.endswith(".step")
        }
    for path in (tmp_path / case).glob("global_step*/*mp_rank_00_model_states.pt"):
        states = torch.load(path, weights_only=False)
        assert states["universal_checkpoint_info"].pop("affine_map")
        torch.save(states, path)
    assert_equal(read_checkpoint(tmp_path / case), case, tmp_path)  # by the patterns alone, as in older releases


def run_on_ranks(ranks: int, *command: object) -> None:
    """Run a program on several ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [*launcher, *map(str, command)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=600,
    )


def make_universal(checkpoint: Path) -> Path | None:
    """Convert a checkpoint with DeepSpeed's own script; None for those that it does not support."""
    (step,) = checkpoint.glob("global_step*")
    output = checkpoint.parent / "universal" / f"{step.name}_universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(
        [*command, *workers, "--input_folder", step, "--output_folder", output],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if checkpoint.name in ("stage2_elastic", "llama_one_kv_head-2"):  # the second one has a shard without elements
        assert done.returncode
        return None
    assert not done.returncode, done.stderr
    return output.parent


def assert_equal(found: dict[str, Value], case: str, tmp_path: Path) -> None:
    """Compare the tensors of a checkpoint with those of the engine."""
    steps = {name for name in found if name.endswith(".step")}
    expected = read_safetensors(tmp_path, f"{case}.safetensors")
    assert {name: each for name, each in found.items() if name not in steps} == expected
    has_state = any(name.startswith("optimizer.") for name in expected)
    assert {np.frombuffer(found[name][2], np.float32).item() for name in steps} == ({3} if has_state else set())
