"""Shard tensors of experts with torchtitan's own mesh and FSDP code, rank by rank under a fake process group.

    python -m tests.judges.torchtitan_experts CASES OUT

CASES is a JSON file with a list of [shape, tp, dp_shard, ep]. OUT gets, for each case and rank, the row-major indices
of the elements that the rank holds.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import fsdp, parallel_dims


class _Experts(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.num_experts = weight.shape[0]
        self.w1_EFD = nn.Parameter(weight)


def _decoder(experts: nn.Module) -> Any:
    """A decoder of one MoE layer, with nothing but what `apply_fsdp_to_decoder` looks at."""
    block, moe, routed = nn.Module(), nn.Module(), nn.Module()
    routed.inner_experts = experts
    moe.routed_experts = routed
    block.moe, block.moe_enabled = moe, True  # type: ignore[assignment]
    decoder = nn.Module()
    decoder.enable_weight_tying = False  # type: ignore[assignment]
    decoder.tok_embeddings = decoder.norm = decoder.lm_head = None  # type: ignore[assignment]
    decoder.layers = nn.ModuleDict({"0": block})
    return decoder


def held_by(rank: int, shape: tuple[int, ...], tp: int, dp_shard: int, ep: int) -> list[int]:
    """The elements of one rank after torchtitan's EP and FSDP."""
    dist.init_process_group("fake", rank=rank, world_size=tp * dp_shard, store=FakeStore())
    try:
        mesh = parallel_dims.ParallelDims(
            dp_replicate=1, dp_shard=dp_shard, cp=1, tp=tp, pp=1, ep=ep, world_size=tp * dp_shard,
            spmd_backend="partial_dtensor",
        )  # fmt: skip
        mesh.build_mesh()
        whole = torch.arange(prod(shape)).reshape(shape).double()
        experts = _Experts(distribute_tensor(whole, mesh.get_mesh("ep"), [Shard(0)], src_data_rank=None))
        fsdp.apply_fsdp_to_decoder(
            _decoder(experts), mesh.get_mesh("fsdp"), torch.float64, torch.float64, False, ep_degree=ep,
            edp_mesh=mesh.get_mesh("efsdp"),
        )  # fmt: skip
        weight: Any = experts.w1_EFD
        held: list[int] = weight.to_local().detach().long().flatten().tolist()
        return held
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parallel_dims.device_type = "cpu"
    cases = json.loads(Path(sys.argv[1]).read_text())
    answers = [
        [held_by(rank, tuple(shape), tp, dp_shard, ep) for rank in range(tp * dp_shard)]
        for shape, tp, dp_shard, ep in cases
    ]
    Path(sys.argv[2]).write_text(json.dumps(answers))
