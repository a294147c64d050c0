"""Load the shards of one rank of a TP mesh: python load_rank.py WORLD_SIZE RANK WARMUP {METHOD CHECKPOINT}...

METHOD is "ckptx" (`ckptx.runtime.load`), "stock" (`dcp.load` into the same DTensors) or "transformers"
(`from_pretrained` of the whole model, from which the rank takes its shards). Only this rank exists: a fake process
group stands for the others. Before each measurement, its method loads a tiny model at WARMUP, so that imports do
not count. The time is from a model on the meta device to a model with all its weights.

The output is a JSON list: tensors; bytes that the rank needs; bytes from read calls (mapped files do not count); files
that it opened; its largest growth of memory; seconds; a digest of the loaded weights.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM
from transformers.utils import logging

from ckptx.formats.hf.reader import read_json
from ckptx.runtime.checkpointing.load import load
from ckptx.runtime.model.build import build_model, materialize
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout, apply_tensor_parallel
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan

_opened_files: list[Path] = []


def _record_open(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _opened_files.append(Path(os.fsdecode(arguments[0])))


def read_proc(file: str, field: str) -> int:
    """Return the value of a field of a file of /proc/self; a value in kB is converted to bytes."""
    match = re.search(rf"^{field}:\s+(\d+)( kB)?$", Path("/proc/self", file).read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << (10 if match[2] else 0)


def load_with_ckptx(path: Path, model: nn.Module, layout: TensorParallelLayout) -> nn.Module:
    """Load the shards of this rank with `ckptx.runtime.load`."""
    materialize(model)
    load(model, path, regions=layout.local_regions)
    return model


def load_with_torch(path: Path, model: nn.Module, _: TensorParallelLayout) -> nn.Module:
    """Load the shards of this rank with stock `dcp.load`."""
    materialize(model)
    dcp.load(model.state_dict(), storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return model


def load_with_transformers(path: Path, model: nn.Module, layout: TensorParallelLayout) -> nn.Module:
    """Load the whole model with `from_pretrained`, which maps files, and copy the shards of this rank from it."""
    materialize(model)
    full_state = LlamaForCausalLM.from_pretrained(path, dtype="auto").state_dict()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            (region,) = layout.local_regions(name) or ()
            slices = tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))
            _local(tensor).copy_(full_state[name][slices])
    return model


METHODS: dict[str, Callable[[Path, nn.Module, TensorParallelLayout], nn.Module]] = {
    "ckptx": load_with_ckptx,
    "stock": load_with_torch,
    "transformers": load_with_transformers,
}


def load_and_measure(method: str, path: Path, mesh: DeviceMesh) -> dict[str, object]:
    """Load the shards of this rank with one method, and return its figures.

    Returns:
        Bytes needed and read, opened files, growth of the RSS in bytes, seconds, and a digest of the weights.
    """
    model = build_model(path, dtype=torch.bfloat16)
    layout = apply_tensor_parallel(model, mesh, find_plan(model, read_json(path / "config.json")))
    needed = sum(_local(each).nbytes for each in model.parameters())
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak RSS
    _opened_files.clear()
    resident_before, read, start = read_proc("status", "VmRSS"), read_proc("io", "rchar"), time.perf_counter()
    model = METHODS[method](path, model, layout)
    seconds, read, peak = time.perf_counter() - start, read_proc("io", "rchar") - read, read_proc("status", "VmHWM")
    files = sorted({each.name for each in _opened_files if each.parent == path and each.exists()})
    return {
        "method": method,
        "tensors": len(list(model.parameters())),
        "needed": needed,
        "read": read,
        "files": files,
        "memory_growth": peak - resident_before,
        "seconds": round(seconds, 3),
        "digest": digest_of(model),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def digest_of(model: nn.Module) -> str:
    """Return a digest of all local shards of a model."""
    digest = xxhash.xxh3_128()
    for _, tensor in sorted(model.named_parameters()):
        digest.update(_local(tensor).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main(world_size: str, rank: str, warmup: str, *jobs: str) -> None:
    """Load with each pair of method and checkpoint in `jobs`, in order, and print the figures."""
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    sys.addaudithook(_record_open)
    dist.init_process_group("fake", store=FakeStore(), rank=int(rank), world_size=int(world_size))
    mesh = init_device_mesh("cpu", (int(world_size),), mesh_dim_names=("tp",))
    rows = []
    for method, path in zip(jobs[::2], jobs[1::2], strict=True):
        load_and_measure(method, Path(warmup, "hf" if method == "transformers" else "dcp"), mesh)
        rows.append(load_and_measure(method, Path(path), mesh))
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
