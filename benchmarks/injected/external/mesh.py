"""Train on a mesh of 2 data-parallel x 2 tensor-parallel ranks, with unusual names of state (net, opt, ..., dice).

The script does not use ckptx. One process imports torch, and its ranks are forked from it. `mesh.yaml` runs it:

    python mesh.py --out DIR --steps 6 --horizon 8 --save-at 3 [--from DIR/ckpt-0003]
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS, WIDTH, BATCH, SAMPLES, RATE, BETAS = 4, 16, 4, 16, 1e-2, (0.9, 0.95)


class Block(nn.Module):
    """Two projections and dropout."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        drop = nn.functional.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.1, self.training)
        return x + drop


def work(rank, args):
    """Train on one rank."""
    store = dist.FileStore(str(args.out / ".meet"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block())
    for block in net:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    opt = torch.optim.AdamW(net.parameters(), lr=RATE, betas=BETAS)
    pace = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, args.horizon)
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    data_rank = mesh["data"].get_local_rank()
    torch.manual_seed(100 + data_rank)  # tensor-parallel ranks need the same dropout
    clock = 0

    def state():
        return {
            "net": get_model_state_dict(net),
            "opt": get_optimizer_state_dict(net, opt),
            "pace": pace.state_dict(),
            "clock": clock,
            "dice": {f"rank{rank}": torch.get_rng_state()},
        }

    if args.source:
        loaded = state()
        dcp.load(loaded, checkpoint_id=args.source)
        set_model_state_dict(net, loaded["net"])
        set_optimizer_state_dict(net, opt, loaded["opt"])
        pace.load_state_dict(loaded["pace"])
        torch.set_rng_state(loaded["dice"][f"rank{rank}"])
        clock = loaded["clock"]

    def save():
        dcp.save(state(), checkpoint_id=args.out / f"ckpt-{clock:04d}")

    saved = None
    while clock < args.steps:
        first = (clock * 2 + data_rank) * BATCH % SAMPLES
        loss = (net(data[first : first + BATCH]) - data[first : first + BATCH].roll(1, 1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        pace.step()
        clock += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            with open(args.out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"at": clock, "mse": mean.item()}) + "\n")
        if clock == args.save_at:
            save()
            saved = clock
    if saved != clock:
        save()
    dist.barrier()
    os._exit(0)  # a thread of gloo that drops a tensor while the interpreter ends would abort it


def main():
    """Fork the ranks, and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--horizon", type=int, required=True)
    parser.add_argument("--save-at", type=int, required=True)
    parser.add_argument("--from", dest="source")
    mp.start_processes(work, (parser.parse_args(),), RANKS, start_method="fork")


if __name__ == "__main__":
    main()
