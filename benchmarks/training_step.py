"""Build models with random weights for gpu.py, and measure a training step: memory, seconds, loss, gradients."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.llama.configuration_llama import LlamaConfig

_MAX_BYTES = 110e9  # bytes that a model without checkpointing may use on a GPU with 141 GB
_MAX_FRACTION = 0.85  # fraction of the memory that it may use on a smaller GPU
_STD = 0.02  # standard deviation of random weights, the default of most configs

_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_GEMMA4_31B = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "vocab_size": 262144,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,  # one of each kind
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
_TINY_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}


class Shape(NamedTuple):
    """A model and its batch.

    Attributes:
        name: Name in tables.
        config_class: Class of the config.
        values: Arguments of `config_class`.
        batch_size: Sequences per batch.
        sequence_length: Tokens per sequence.
        period: Number of layers after which the pattern of layer types repeats.
        unfused_layers: Layers per period whose heads may be too wide for fused attention, so that scores are stored.
    """

    name: str
    config_class: Callable[..., Any]
    values: dict[str, Any]
    batch_size: int
    sequence_length: int
    period: int = 1
    unfused_layers: int = 0

    @property
    def config(self) -> Any:
        """Return a new config object."""
        return self.config_class(**self.values)


def llama_from(values: dict[str, Any], *, is_tiny: bool) -> Shape:
    """Return a Llama shape with the config of a checkpoint."""
    config_values = {
        key: value for key, value in values.items() if key not in ("architectures", "head_dim", "model_type")
    }
    return Shape("tiny Llama" if is_tiny else "Llama", LlamaConfig, config_values | (_TINY if is_tiny else {}), 1, 12)


def llama_8b(batch_size: int, *, is_tiny: bool) -> Shape:
    """Return the shape of Llama 3.1 8B without RoPE scaling, which does not change memory or time."""
    if is_tiny:
        return Shape("tiny Llama", LlamaConfig, _TINY, 1, 128)
    return Shape("Llama 3.1 8B", LlamaConfig, _LLAMA_8B, batch_size, 4096)


def gemma4_31b(*, is_tiny: bool) -> Shape:
    """Return the shape of the text model of Gemma 4 31B: five sliding-window layers, then one with full attention."""
    if is_tiny:
        return Shape("tiny Gemma 4", Gemma4TextConfig, _GEMMA4_31B | _TINY | _TINY_GEMMA4, 1, 128)
    return Shape("Gemma 4 31B", Gemma4TextConfig, _GEMMA4_31B, 1, 4096, 6, 1)


def fit_layers(shape: Shape, device: torch.device) -> Shape:
    """Return the shape with as many layers as fit on the GPU without activation checkpointing."""
    if device.type != "cuda":
        return shape
    memory = min(
        _MAX_BYTES, _MAX_FRACTION * torch.cuda.get_device_properties(device).total_memory
    )  # the same for each mode
    return shape._replace(values=shape.values | {"num_hidden_layers": max_layers(shape, memory)})


def max_layers(shape: Shape, memory: float) -> int:
    """Estimate how many layers fit into `memory` bytes with their gradients and activations.

    Returns:
        A multiple of the shape's period, at least one period.
    """
    config = shape.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer_parameters = sum(each.numel() for name, each in model.named_parameters() if ".layers." in name)
    other_parameters = sum(each.numel() for each in model.parameters()) - layer_parameters
    tokens = shape.batch_size * shape.sequence_length
    # Saved bytes per token: 32 per hidden feature for norms (also in fp32) and attention, 10 per MLP feature.
    saved_bytes = tokens * (32 * config.hidden_size + 10 * config.intermediate_size)
    score_bytes = (
        shape.batch_size * config.num_attention_heads * shape.sequence_length**2 * 10
    )  # fp32, bf16, and the gradient
    layer_bytes = 4 * layer_parameters / config.num_hidden_layers + saved_bytes  # a parameter and its gradient in bf16
    group_bytes = shape.period * layer_bytes + shape.unfused_layers * score_bytes
    fixed_bytes = 4 * other_parameters + tokens * config.vocab_size * 18  # logits in bf16, and fp32 copies in the loss
    max_groups = config.num_hidden_layers // shape.period
    return shape.period * max(1, min(max_groups, int((memory - fixed_bytes) / group_bytes)))


def build_model(shape: Shape, device: torch.device) -> Any:
    """Build the stock model on a device in bf16, with the same random weights each time.

    The init of some classes leaves zeros, with which every comparison would pass, so weights are filled here.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _STD)
            else:
                parameter.fill_(1)
    return model.train()


def measure_step(model: nn.Module, shape: Shape, device: torch.device, repeats: int) -> dict[str, Any]:
    """Measure memory and time of forward and backward, after one warm-up step.

    Returns:
        Memory in GiB (weights, peak, and difference), the median of the seconds, the loss, the gradient norm, and the
        placement of the logits, "sharded" or "whole".
    """
    batch = _batch_of(shape, device)
    logits = ""

    def step() -> torch.Tensor:
        nonlocal logits
        output = model(**batch)
        logits = "sharded" if hasattr(output.logits, "placements") else "whole"
        output.loss.backward()
        loss: torch.Tensor = output.loss.detach()
        return loss

    step()
    model.zero_grad(set_to_none=True)
    before = _reset_peak(model, device)
    seconds = []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        _wait(device)
        start = time.perf_counter()
        loss = step()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    norm = _gradient_norm(model)
    if device.type != "cuda":
        model.zero_grad(set_to_none=True)
        peak = before + _peak_on_cpu(step)
    return {
        "layers": shape.values["num_hidden_layers"],
        "batch_size": shape.batch_size,
        "sequence_length": shape.sequence_length,
        "weights_gib": before / 2**30,
        "peak_gib": peak / 2**30,
        "step_gib": (peak - before) / 2**30,
        "seconds": statistics.median(seconds),
        "loss": float(loss),
        "gradient_norm": norm,
        "logits": logits,
    }


def _batch_of(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Return random tokens, which are also the labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(
        3, shape.values["vocab_size"], (shape.batch_size, shape.sequence_length), generator=generator
    ).to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(model: nn.Module, device: torch.device) -> int:
    """Reset the peak, and return the bytes in use, which are those of the weights."""
    gc.collect()
    if device.type != "cuda":
        return sum(local_of(each).nbytes for each in (*model.parameters(), *model.buffers()))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _peak_on_cpu(step: Callable[[], object]) -> int:
    """Return the peak bytes of a step, from the allocations that the profiler recorded."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def _gradient_norm(model: nn.Module) -> float:
    norms = [local_of(each.grad).float().norm() for each in model.parameters() if each.grad is not None]
    return float(torch.stack(norms).norm())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or any other tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
