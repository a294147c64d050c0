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

from tests.support.catalog_tensors import read_checkpoint, read_safetensors

WRITER = Path(__file__).resolve().parents[2] / "tools" / "build_deepspeed_fixtures.py"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["stage1", "stage2", "stage2_elastic", "stage3"])
def test_values_are_those_of_the_engine(case: str, ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [*command, WRITER, case, tmp_path],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=600,
    )
    found = read_checkpoint(tmp_path / case)
    steps = {name for name in found if name.endswith(".step")}
    expected = read_safetensors(tmp_path, f"{case}.safetensors")
    assert {name: each for name, each in found.items() if name not in steps} == expected
    assert {np.frombuffer(found[name][2], np.float32).item() for name in steps} == {3}
