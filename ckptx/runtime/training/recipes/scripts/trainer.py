"""Minimal use of the Trainer of transformers, independent of ckptx. `transformers_trainer.yaml` runs it:

torchrun --nproc-per-node 2 trainer.py --out DIR --steps 6 --save-at 3 [--resume DIR/checkpoint-3]
"""

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SAMPLES, BATCH, LENGTH, VOCABULARY = 64, 2, 16, 96


def main():
    """Train a small Llama on random tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-at", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        save_steps=args.save_at,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=1,
        seed=0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        LlamaForCausalLM(config), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # a gloo thread that frees a tensor while the interpreter exits would abort it


if __name__ == "__main__":
    main()
