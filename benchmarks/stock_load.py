"""Measure stock torch on one rank of a TP mesh that loads a DCP of a Llama: python stock_load.py DCP WORLD RANK.

The output is JSON: bytes that the rank needs, bytes that the kernel gave to the process during the load, seconds, and a
digest of the loaded weights. The plan is the one that transformers has for the model. Only this rank exists: a fake
process group stands for the others.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

# A weight is stored as (out, in), so that column-wise sharding splits dim 0.
_PLACEMENTS = {
    "colwise": Shard(0),
    "colwise_gather_output": Shard(0),
    "embedding_rowwise": Shard(0),
    "rowwise": Shard(1),
}


def plan_of_llama() -> dict[str, str]:
    """Return the TP plan of transformers for a Llama: module pattern -> style."""
    with torch.device("meta"):
        return dict(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1)).tp_plan)


def placement_of(name: str, plan: dict[str, str]) -> Placement:
    """Return the placement of a weight; weights that the plan does not match are replicated."""
    module = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))
    return _PLACEMENTS[plan[module]] if module in plan else Replicate()


def empty_state(path: str, mesh: DeviceMesh) -> dict[str, DTensor]:
    """Create an empty DTensor for each tensor of a DCP, by name."""
    plan, state = plan_of_llama(), {}
    for name, entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            placements = [placement_of(name, plan)]
            dtype = entry.properties.dtype
            state[name] = empty_dtensor(*entry.size, dtype=dtype, device_mesh=mesh, placements=placements)
    return state


def bytes_read() -> int:
    """Return the bytes that this process has read so far, from disk, page cache or RAM disk."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def load(path: str, state: dict[str, DTensor]) -> dict[str, object]:
    """Load a DCP into `state`.

    Returns:
        Bytes of the local shards ("needed"), bytes read, seconds, and a digest of the loaded shards.
    """
    before, start = bytes_read(), time.perf_counter()
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    seconds, after = time.perf_counter() - start, bytes_read()
    shards = [state[name].to_local() for name in sorted(state)]
    digest = xxhash.xxh3_128()
    for shard in shards:
        digest.update(shard.contiguous().view(torch.uint8).numpy().data)
    needed = sum(shard.nbytes for shard in shards)
    return {"needed": needed, "read": after - before, "seconds": round(seconds, 3), "digest": digest.hexdigest()}


def main(path: str, world: str, rank: str) -> None:
    """Load a DCP and print the figures; first load one small tensor, so that imports do not count."""
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=int(rank), world_size=int(world))
    state = empty_state(path, init_device_mesh("cpu", (int(world),)))
    smallest = min(state, key=lambda name: state[name].numel())
    load(path, {smallest: state[smallest].clone()})
    print(json.dumps(load(path, state)))


if __name__ == "__main__":
    main(*sys.argv[1:])
