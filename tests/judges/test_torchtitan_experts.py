"""The experts of each rank with `--ep` are those that torchtitan's own mesh and FSDP code give it.

`make judges` installs torchtitan and runs this folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np

from ckptx.layout.expert_parallel import ExpertPosition, InnerSharding, expert_blocks
from ckptx.layout.parallel_dims import ParallelDims

# [experts, out, in] and the mesh; in the last two, torchtitan divides rows, because there are more ranks than experts.
CASES = [
    ((8, 4, 6), 2, 2, 2),
    ((8, 4, 6), 2, 4, 4),
    ((16, 4, 2), 4, 2, 8),
    ((16, 2, 2), 2, 4, 2),
    ((12, 4, 2), 1, 6, 3),
    ((8, 4, 6), 2, 2, 4),
    ((4, 8, 6), 2, 4, 2),
    ((2, 8, 4), 2, 2, 2),
]


def test_each_rank_holds_what_torchtitan_gives_it(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps(CASES))
    subprocess.run(
        [sys.executable, "-m", "tests.judges.torchtitan_experts", tmp_path / "cases.json", tmp_path / "held.json"],
        check=True,
        capture_output=True,
        timeout=600,
    )
    answers = json.loads((tmp_path / "held.json").read_text())
    assert len(answers) == len(CASES)
    for (shape, tp, dp_shard, ep), ranks in zip(CASES, answers, strict=True):
        inner: InnerSharding = "rows" if tp * dp_shard > shape[0] else "experts"
        dims = ParallelDims(tp=tp, dp_shard=dp_shard, ep=ep)
        blocks = expert_blocks("w1_EFD", shape, ExpertPosition("moe.experts", None), shape[0], dims, inner)
        numbered = np.arange(prod(shape)).reshape(shape)
        held = {
            block.rank_in_stage: numbered[tuple(slice(a, a + n) for a, n in zip(*block.region, strict=True))]
            for block in blocks
        }
        assert {rank: held[rank].flatten().tolist() for rank in held} == dict(enumerate(ranks)), (
            shape,
            tp,
            dp_shard,
            ep,
        )
