"""Write `fixtures/dcp/`: small checkpoints of stock torch, and the same tensors as files of stock safetensors.

    python tools/build_fixtures.py

`torch.distributed.checkpoint.save` writes `fixtures/dcp/<name>/`; `fixtures/dcp/<name>.safetensors` contains the same
tensors as contiguous arrays. The script does not use ckptx, because tests compare the readers of ckptx with what torch
and safetensors write.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).resolve().parent.parent / "fixtures" / "dcp"
WORLD_SIZE = 3


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor of random numbers from a normal distribution."""
    return torch.randn(shape).to(dtype)


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random bytes as a tensor: every bit pattern is a valid value of the dtypes here, NaN included."""
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def single_process_states() -> dict[str, dict[str, Any]]:
    """Return the state dicts that one process saves, by name of the checkpoint."""
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64)
    return {
        "transposed": {
            "t": random(6, 4).t(),
            "permuted": random(2, 3, 4).permute(2, 0, 1),
            "plain": random(4, 6),
        },
        "channels_last": {
            "conv": random(4, 3, 5, 5, dtype=torch.float32).to(memory_format=torch.channels_last),
            "one_channel": random(4, 1, 3, 3).to(memory_format=torch.channels_last),
        },
        "sliced": {
            "rows": random(8, 4)[2:5],
            "columns": random(8, 4)[:, 1:3],
            "steps": random(12)[::3],
            "transposed_columns": random(6, 8)[:, ::2].t(),
        },
        "expanded": {
            "rows": random(1, 4).expand(3, 4),
            "columns": random(4, 1).expand(4, 3),
            "all": random().expand(2, 2),
        },
        "fp8": {str(dtype).removeprefix("torch."): random_bits(4, 6, dtype=dtype) for dtype in fp8},
        "kinds": {
            "bool": torch.tensor([[True, False, True]]),
            "complex64": torch.randn(3, 2, dtype=torch.complex64),
            "float64": random(5, dtype=torch.float64),
            "float16": random(2, 2, 2, 2, 2, dtype=torch.float16),
            **{str(dtype).removeprefix("torch."): random_bits(3, 5, dtype=dtype) for dtype in integers},
        },
        "empty": {
            "scalar": torch.tensor(3.5),
            "none": torch.empty(0),
            "no_columns": torch.empty(3, 0, dtype=torch.bfloat16),
            "no_rows": torch.empty(0, 70000),
            "one": torch.ones(1, 1, 1),
        },
        "objects": {
            "weight": random(2, 2),
            "step": 7,
            "rng": {"state": torch.arange(5, dtype=torch.uint8), "name": "philox"},
            "tensors": [random(2), random(3)],
        },
        "trainer": trainer_state(),
    }


def trainer_state() -> dict[str, Any]:
    """Return the state after one step of AdamW, as FSDP2 trainers save it."""
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 6), torch.nn.LayerNorm(6))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def flatten(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict by FQN, as DCP names them."""
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    flat = {}
    for key, value in items:
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def write_expected(name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write the expected tensors of a checkpoint as safetensors."""
    save_file({key: value.detach().clone().contiguous() for key, value in tensors.items()}, f"{name}.safetensors")
    os.chmod(f"{name}.safetensors", 0o644)


def save(name: str, state: dict[str, Any], threads: int = 1) -> None:
    """Save a state dict as a DCP with one file per thread, and its expected tensors."""
    dcp_save(state, storage_writer=FileSystemWriter(name, thread_count=threads), no_dist=True)
    write_expected(name, flatten(state))


def save_sharded(rank: int, store: str) -> None:
    """Save tensors with uneven shards, one of which a rank lacks; every rank of `WORLD_SIZE` runs this.

    Args:
        rank: Global rank of this process.
        store: File through which the processes find each other; it must not exist.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    torch.manual_seed(5)
    full = {"rows": random(7, 4), "columns": random(3, 8), "few": random(2, 3), "inner": random(2, 5, 3)}
    dims = {"rows": 0, "columns": 1, "few": 0, "inner": 1}
    state: dict[str, DTensor | torch.Tensor] = {
        name: distribute_tensor(tensor, mesh, [Shard(dims[name])]) for name, tensor in full.items()
    }
    state["replicated"] = full["replicated"] = torch.arange(4.0)
    dcp_save(state, storage_writer=FileSystemWriter("sharded"))
    if rank == 0:
        write_expected("sharded", full)
    dist.destroy_process_group()


def main() -> None:
    """Write all checkpoints."""
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    os.chdir(ROOT)  # torch stores the path of the checkpoint in it, and a relative path does not reveal the machine
    torch.manual_seed(0)
    for name, state in single_process_states().items():
        save(name, state)
    save("two_files", {f"layer.{i}": random(3, i + 1) for i in range(5)}, threads=2)
    with tempfile.TemporaryDirectory() as store:
        spawn(save_sharded, args=(f"{store}/store",), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]  # torch's


if __name__ == "__main__":
    main()
