"""Read the tensors of one EP rank: python expert_rank.py METHOD CHECKPOINT EP RANK.

METHOD is "mapped" (single tensors with `safe_open`), "files" (full files with a needed tensor), or "dcp" (stock
`dcp.load` of the experts). The output is JSON: number of weight files, of those that were read, bytes needed and read,
seconds, and a digest of the tensors.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from safetensors.torch import load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
Result = tuple[dict[str, torch.Tensor], set[str], int]  # tensors, files that were read, bytes that were read


def _needed_files(path: Path, ep: int, rank: int) -> dict[str, list[str]]:
    """Return file -> names of the tensors in it that the rank needs: all dense ones, and its own experts."""
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    indices = {int(found[1]) for name in weight_map if (found := _EXPERT.search(name))}
    per_rank = len(indices) // ep
    needed: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        found = _EXPERT.search(name)
        if found is None or int(found[1]) // per_rank == rank:
            needed.setdefault(file, []).append(name)
    return needed


def read_mapped(path: Path, ep: int, rank: int) -> Result:
    """Read single tensors from mapped files."""
    tensors = {}
    needed = _needed_files(path, ep, rank)
    for file, names in needed.items():
        with safe_open(path / file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name).clone() for name in names}
    return tensors, set(needed), sum(each.nbytes for each in tensors.values())


def read_files(path: Path, ep: int, rank: int) -> Result:
    """Read every file with a needed tensor in full."""
    tensors, nbytes = {}, 0
    needed = _needed_files(path, ep, rank)
    for file, names in needed.items():
        data = (path / file).read_bytes()
        nbytes += len(data)
        loaded = load(data)
        tensors |= {name: loaded[name] for name in names}
    return tensors, set(needed), nbytes


def read_dcp(path: Path, ep: int, rank: int) -> Result:
    """Load the rank's experts of each layer with stock `dcp.load`."""
    mesh = init_device_mesh("cpu", (ep,), mesh_dim_names=("ep",))
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: distribute_tensor(
            torch.empty(entry.size, dtype=entry.properties.dtype), mesh, [Shard(0)], src_data_rank=None
        )
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and ".mlp.experts." in name
    }
    opened: set[str] = set()
    sys.addaudithook(
        lambda event, arguments: (
            opened.add(Path(str(arguments[0])).name)
            if event == "open" and str(arguments[0]).endswith(".distcp")
            else None
        )
    )
    before = _read_bytes()
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {name: each.to_local() for name, each in state.items()}, opened, _read_bytes() - before


def _read_bytes() -> int:
    """Return the bytes that read calls of this process returned so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


METHODS: dict[str, Callable[[Path, int, int], Result]] = {"mapped": read_mapped, "files": read_files, "dcp": read_dcp}


def main(method: str, path: Path, ep: int, rank: int) -> None:
    """Read with one method, and print the figures."""
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ep)
    with tempfile.TemporaryDirectory() as warmup:
        dcp.save({"w": torch.zeros(2)}, checkpoint_id=warmup, no_dist=True)
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=warmup, no_dist=True)
    start = time.perf_counter()
    tensors, opened, nbytes = METHODS[method](path, ep, rank)
    seconds = time.perf_counter() - start
    digest = xxhash.xxh3_128()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    suffix = ".distcp" if method == "dcp" else ".safetensors"
    print(json.dumps({
        "files": sum(file.name.endswith(suffix) for file in path.iterdir()), "opened": len(opened),
        "needed": sum(each.nbytes for each in tensors.values()), "read": nbytes, "seconds": round(seconds, 3),
        "digest": digest.hexdigest(),
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
