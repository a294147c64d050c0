"""Checkpoints that torch_checkpointing writes: ckptx reads the tensors that it saved, and what it consolidates.

`make judges` installs torch_checkpointing and runs this folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.catalog_tensors import read_checkpoint, read_safetensors

WRITER = Path(__file__).resolve().parents[2] / "tools" / "build_torch_checkpointing_fixtures.py"


def save(case: str, root: Path) -> Path:
    """Save a case with the writer of the library, on four ranks; returns the checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run(
        [*command, WRITER, case, root],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=600,
    )
    return root / case


@pytest.mark.parametrize("case", ["archives", "safetensors", "rank_directories", "pipeline"])
def test_tensors_are_those_that_ranks_saved(case: str, tmp_path: Path) -> None:
    assert read_checkpoint(save(case, tmp_path)) == read_safetensors(tmp_path, f"{case}.safetensors")


def test_consolidated_files_hold_the_same_tensors(tmp_path: Path) -> None:
    from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    root = save("safetensors", tmp_path)
    consolidate_hf_safetensors_checkpoint(
        str(root), output_dir=str(tmp_path / "whole"), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
    )
    assert read_checkpoint(root) == read_checkpoint(tmp_path / "whole")
