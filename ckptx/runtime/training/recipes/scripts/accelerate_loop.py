"""A training loop as in the documentation of accelerate: prepare, save_state, load_state, skip_first_batches.

It is independent of ckptx. `accelerate.yaml` runs it:

    torchrun --nproc-per-node 2 accelerate_loop.py --out DIR --steps 6 --total-steps 8 --save-at 3 [--resume DIR/step-3]
"""

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

SAMPLES, BATCH, LENGTH, VOCABULARY = 64, 2, 16, 96


class Progress:
    """Counter of steps, which accelerate saves with the other state."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
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
    data = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    accelerator = Accelerator(cpu=True, dataloader_config=data, step_scheduler_with_optimizer=False)

    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    # A separate generator: iterators of the loader draw from it, not from the generator that load_state restores.
    loader = DataLoader(ids, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.total_steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    set_seed(0, device_specific=True)

    if args.resume:
        accelerator.load_state(args.resume)

    def save():
        accelerator.save_state(str(args.out / f"step-{progress.step}"))

    saved = None
    while progress.step < args.steps:
        epoch, batches_done = divmod(progress.step, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, batches_done) if batches_done else loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            mean = accelerator.gather(loss.detach()).mean().item()
            if accelerator.is_main_process:
                with open(args.out / "losses.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": progress.step, "loss": mean}) + "\n")
            if progress.step == args.save_at:
                save()
                saved = progress.step
            if progress.step == args.steps:
                break
    if saved != progress.step:
        save()
    accelerator.wait_for_everyone()  # not end_training: gloo groups that DDP still uses may wait forever there
    os._exit(0)  # a gloo thread that frees a tensor while the interpreter exits would abort it


if __name__ == "__main__":
    main()
