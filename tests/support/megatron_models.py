"""Small models, saved as Hugging Face checkpoints and by megatron-core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 26,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
}
_QWEN_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_experts": 4, "norm_topk_prob": True}
# Class -> model type, and settings in addition to `SIZES`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {}),
    "Qwen2ForCausalLM": ("qwen2", {"hidden_size": 32, "tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _QWEN_EXPERTS),
    "MixtralForCausalLM": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def config_of(class_name: str, **settings: Any) -> dict[str, Any]:
    """The contents of `config.json` of a small model."""
    model_type, own = MODELS[class_name]
    return {"architectures": [class_name], "model_type": model_type, "dtype": "bfloat16", **SIZES, **own, **settings}


def random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights of a model by the names of the Hub."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"] * head_dim, "k": config["num_key_value_heads"] * head_dim}
    rows["v"] = rows["k"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        attention, layer = f"model.layers.{i}.self_attn", f"model.layers.{i}"
        for x in "qkv":
            shapes[f"{attention}.{x}_proj.weight"] = (rows[x], hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{attention}.{x}_proj.bias"] = (rows[x],)
        if config["model_type"].startswith("qwen3"):
            shapes |= {f"{attention}.{x}_norm.weight": (head_dim,) for x in "qk"}
        shapes[f"{attention}.o_proj.weight"] = (hidden, rows["q"])
        shapes |= {f"{layer}.{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
        experts = config.get("num_experts") or config.get("num_local_experts")
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        mlp, names = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
        if config["model_type"] == "mixtral":
            mlp, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
        if experts:
            shapes[f"{mlp}.gate.weight"] = (experts, hidden)
        for module in [f"{mlp}.experts.{e}" for e in range(experts)] if experts else [mlp]:
            shapes |= {f"{module}.{name}.weight": (width, hidden) for name in names[:2]}
            shapes[f"{module}.{names[2]}.weight"] = (hidden, width)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    generator = torch.Generator().manual_seed(5)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes.items()
    }


def save_model(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Save a model with random weights, norms and biases included; return the weights."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: value.to(dtype) for name, value in random_weights(config).items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return weights


def write_with_megatron(hf: Path, out: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, style: str = "stacked") -> None:
    """Save a model with megatron-core on `tp * pp` or `ep * pp` ranks, see `tests/judges/megatron_writer.py`."""
    run_on_mesh("tests.judges.megatron_writer", hf, out, tp=tp, pp=pp, ep=ep, style=style)


def load_with_megatron(
    hf: Path, checkpoint: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, style: str = "stacked"
) -> list[str]:
    """Load and compare a checkpoint with megatron-core, see `tests/judges/megatron_loader.py`; return its output."""
    return run_on_mesh("tests.judges.megatron_loader", hf, checkpoint, tp=tp, pp=pp, ep=ep, style=style)


def run_on_mesh(module: str, hf: Path, checkpoint: Path, *, tp: int, pp: int, ep: int, style: str) -> list[str]:
    """Run a module on `tp * pp` or `ep * pp` ranks, and return what each printed."""
    world = pp * max(tp, ep)
    store = hf.parent / f"{checkpoint.name}.store"
    arguments = [str(store), *map(str, (tp, pp, ep)), style, str(hf), str(checkpoint)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, str(rank), str(world), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
    store.unlink(missing_ok=True)
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(output[-2000:] for output in outputs))
    return outputs
