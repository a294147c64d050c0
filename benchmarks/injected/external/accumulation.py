"""Train with accelerate in one process, and accumulate gradients over two batches.

The script does not use ckptx. `accumulation.yaml` runs it:

    python accumulation.py --out DIR --steps 4 --horizon 8 --save-at 3 [--from DIR/step_3]
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

WIDTH, BATCH, SAMPLES, EVERY = 8, 2, 10, 2


class Counter:
    """Optimizer steps, and batches of this epoch; accelerate saves it as a custom object."""

    def __init__(self):
        self.step, self.epoch, self.batch = 0, 0, 0

    def state_dict(self):
        return {"step": self.step, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.batch = state["batch"]


def main():
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--horizon", type=int, required=True)
    parser.add_argument("--save-at", type=int, required=True)
    parser.add_argument("--from", dest="source")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=EVERY, step_scheduler_with_optimizer=False)
    set_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.horizon)
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    # A separate generator: an iterator of the loader draws from it, not from the generator that load_state restored.
    loader = DataLoader(data, batch_size=BATCH, generator=torch.Generator())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    set_seed(7)
    if args.source:
        accelerator.load_state(args.source)

    def save():
        accelerator.save_state(str(args.out / f"step_{counter.step}"))

    saved, micro = None, 0.0
    while counter.step < args.steps:
        rest = accelerator.skip_first_batches(loader, counter.batch)
        for x in rest:
            with accelerator.accumulate(model):
                loss = (model(x) - x.roll(1, 1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            micro += loss.item()
            counter.batch += 1
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            counter.step += 1
            with open(args.out / "losses.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": counter.step, "loss": micro}) + "\n")
            micro = 0.0
            if counter.step == args.save_at:
                save()
                saved = counter.step
            if counter.step == args.steps:
                break
        else:
            counter.epoch += 1
            counter.batch = 0
    if saved != counter.step:
        save()


if __name__ == "__main__":
    main()
