"""Train in a plain loop with averaged weights and a custom sampler, and save everything with `torch.save`.

The script does not use ckptx. `averaged.yaml` runs it:

    python averaged.py --out DIR --steps 6 --horizon 8 --save-at 3 [--from DIR/iter_0000003.pt]
"""

import argparse
import copy
import json
import random
from pathlib import Path

import torch
from torch import nn

WIDTH, BATCH, SAMPLES, KEEP = 8, 4, 10, 0.9


class Deck:
    """Shuffled samples, a new order in each epoch."""

    def __init__(self):
        self.epoch, self.drawn = 0, 0

    def draw(self):
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        batch = order[self.drawn : self.drawn + BATCH]
        self.drawn += BATCH
        if self.drawn + BATCH > SAMPLES:
            self.epoch, self.drawn = self.epoch + 1, 0
        return batch


def main():
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--horizon", type=int, required=True)
    parser.add_argument("--save-at", type=int, required=True)
    parser.add_argument("--from", dest="source")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.horizon)
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    deck, step = Deck(), 0
    if args.source:
        state = torch.load(args.source)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        deck.epoch = state["deck"]["epoch"]
        deck.drawn = state["deck"]["drawn"]
        torch.set_rng_state(state["torch_rng"])
        step = state["step"]

    def save():
        state = {
            "model": model.state_dict(),
            "ema": ema.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "deck": {"epoch": deck.epoch, "drawn": deck.drawn},
            "torch_rng": torch.get_rng_state(),
            "step": step,
        }
        torch.save(state, args.out / f"iter_{step:07d}.pt")

    saved = None
    while step < args.steps:
        x = data[deck.draw()]
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(weight, 1 - KEEP)
        step += 1
        print(f"iteration {step:7d} | lm loss {loss.item()!r} |", flush=True)
        if step == args.save_at:
            save()
            saved = step
    if saved != step:
        save()
    (args.out / "done.json").write_text(json.dumps({"finished": True}))


if __name__ == "__main__":
    main()
