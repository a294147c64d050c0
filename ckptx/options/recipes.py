"""Recipes that come with ckptx, by name."""

from __future__ import annotations

from pathlib import Path

RECIPES_DIR = Path(__file__).parents[1] / "runtime" / "training" / "recipes"


# What built-in recipes run on -> their names, in the order of the help text.
_RECIPES_BY_DEVICE = {
    "on a CPU": ("llama_tiny", "llama_lora_tiny", "gemma3_tiny", "qwen3_moe_tiny", "gemma4_vlm_tiny"),
    "on a CPU, each with a training script that is included": ("fsdp2_script", "accelerate", "transformers_trainer"),
    "on 8 GPUs with torchrun; model and dataset come from the Hub, which requires pip install 'ckptx[data]'": (
        "phi_4_squad",
        "gemma4_31b",
        "gemma4_31b_tp4_pp2",
    ),
    "the same on 4 nodes of 8 GPUs": ("gemma4_31b_tp4_pp4",),
    "on 2 GPUs, in a checkout of version 0.2.2 of the framework": ("torchtitan",),
}


def list_shipped_recipes() -> tuple[str, ...]:
    """Return the names of the recipes that come with ckptx."""
    return tuple(sorted(each.stem for each in RECIPES_DIR.glob("*.yaml")))


def shipped_recipes_text() -> str:
    """Return the names of the recipes that come with ckptx, by what they run on: `llama_tiny, ... (on a CPU); ...`."""
    return "; ".join(f"{', '.join(names)} ({device})" for device, names in _RECIPES_BY_DEVICE.items())
