"""A training script as in the tutorials of torch: FSDP2, one Stateful object for all state, dcp.save.

It is independent of ckptx. `fsdp2_script.yaml` runs it:

    torchrun --nproc-per-node 2 fsdp2.py --out DIR --steps 6 --total-steps 6 --save-at 3 [--resume DIR/step-3]
"""

import argparse
import json
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import LlamaConfig, LlamaForCausalLM

SAMPLES, BATCH, LENGTH, VOCABULARY = 64, 2, 16, 96


class Tokens(Dataset):
    """Random tokens from a fixed seed."""

    def __init__(self):
        self.ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.ids[index]


class ShuffledSampler(Sampler):
    """Samples of this rank, in another order in each epoch; its state is the number of samples seen on all ranks."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.seen = rank, world_size, 0

    def __iter__(self):
        while True:
            epoch, begin = divmod(self.seen, SAMPLES)
            order = random.Random(epoch).sample(range(SAMPLES), SAMPLES)
            for index in range(begin, SAMPLES, self.world_size):
                self.seen += self.world_size
                yield order[index + self.rank]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class App(Stateful):
    """All state that is saved."""

    def __init__(self, model, optimizer, scheduler, sampler, rank):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.sampler, self.rank, self.step = sampler, rank, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optim": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "rng": {f"rank{self.rank}": torch.get_rng_state()},
            "step": self.step,
        }

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["rng"][f"rank{self.rank}"])
        self.step = state["step"]


def main():
    """Train a small Llama on random tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--total-steps", type=int, required=True)
    parser.add_argument("--save-at", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(100 + rank)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.total_steps)
    sampler = ShuffledSampler(rank, world_size)
    loader = DataLoader(Tokens(), batch_size=BATCH, sampler=sampler)
    app = App(model, optimizer, scheduler, sampler, rank)

    batches = iter(loader)  # draws a random number, so create it before the generators are restored
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=args.resume)

    def save():
        dcp.save({"app": app}, checkpoint_id=args.out / f"step-{app.step}")

    saved = None
    while app.step < args.steps:
        ids = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        app.step += 1
        dist.all_reduce(mean := loss.detach() / world_size)
        if rank == 0:
            with open(args.out / "losses.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": app.step, "loss": mean.item()}) + "\n")
        if app.step == args.save_at:
            save()
            saved = app.step
    if saved != app.step:
        save()
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that frees a tensor while the interpreter exits would abort it


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
