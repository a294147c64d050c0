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

_ROOM = 110e9  # bytes that a model without checkpointing may take, so that a card of 141 GB has some left
_SHARE = 0.85  # of a smaller card
_STD = 0.02  # of random weights, as most configs have it

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
        name: For tables.
        make: The class of its config.
        values: Of the config.
        rows: Of the batch.
        length: Tokens of a row.
        period: Layers come in groups of so many.
        unfused: How many of a group may have heads too wide for fused attention, and keep their scores.
    """

    name: str
    make: Callable[..., Any]
    values: dict[str, Any]
    rows: int
    length: int
    period: int = 1
    unfused: int = 0

    @property
    def config(self) -> Any:
        """A new config."""
        return self.make(**self.values)


def llama_of(values: dict[str, Any], *, is_tiny: bool) -> Shape:
    """A Llama with the config of a checkpoint."""
    kept = {key: value for key, value in values.items() if key not in ("architectures", "head_dim", "model_type")}
    return Shape("tiny Llama" if is_tiny else "Llama", LlamaConfig, kept | (_TINY if is_tiny else {}), 1, 12)


def llama_8b(rows: int, *, is_tiny: bool) -> Shape:
    """Llama 3.1 8B without the scaling of its rotary table, which costs nothing."""
    if is_tiny:
        return Shape("tiny Llama", LlamaConfig, _TINY, 1, 128)
    return Shape("Llama 3.1 8B", LlamaConfig, _LLAMA_8B, rows, 4096)


def gemma4_31b(*, is_tiny: bool) -> Shape:
    """The text model of Gemma 4 31B: five layers with sliding windows, one without, and so on."""
    if is_tiny:
        return Shape("tiny Gemma 4", Gemma4TextConfig, _GEMMA4_31B | _TINY | _TINY_GEMMA4, 1, 128)
    return Shape("Gemma 4 31B", Gemma4TextConfig, _GEMMA4_31B, 1, 4096, 6, 1)


def fitted(shape: Shape, device: torch.device) -> Shape:
    """The shape with as many layers as fit on a card without checkpointing."""
    if device.type != "cuda":
        return shape
    room = min(_ROOM, _SHARE * torch.cuda.get_device_properties(device).total_memory)  # the same for each mode
    return shape._replace(values=shape.values | {"num_hidden_layers": layers_within(shape, room)})


def layers_within(shape: Shape, room: float) -> int:
    """How many layers fit into so many bytes with their gradients and activations, by a rough upper estimate.

    Returns:
        A multiple of the shape's period, at least one.
    """
    config = shape.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = sum(each.numel() for name, each in model.named_parameters() if ".layers." in name)
    others = sum(each.numel() for each in model.parameters()) - layers
    tokens = shape.rows * shape.length
    # Bytes kept of a token: norms, which have it in fp32 too, and attention 32 a feature; the MLP five products.
    kept = tokens * (32 * config.hidden_size + 10 * config.intermediate_size)
    scores = shape.rows * config.num_attention_heads * shape.length**2 * 10  # in fp32, in bf16, and their gradient
    each = 4 * layers / config.num_hidden_layers + kept  # a parameter and its gradient in bf16
    group = shape.period * each + shape.unfused * scores
    fixed = 4 * others + tokens * config.vocab_size * 18  # logits in bf16, and what the loss makes of them in fp32
    most = config.num_hidden_layers // shape.period
    return shape.period * max(1, min(most, int((room - fixed) / group)))


def built(shape: Shape, device: torch.device) -> Any:
    """The stock model on a device, in bf16, the same weights each time.

    Weights are filled here: the init of some classes leaves zeros, with which every comparison would hold.
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


def measured(model: nn.Module, shape: Shape, device: torch.device, repeats: int) -> dict[str, Any]:
    """Memory and time of forward and backward, after a step that warms up.

    Returns:
        Memory in GiB (what the weights take, the peak, and the difference), the median of the seconds, loss and norm of
        the gradient, and whether the logits came "sharded" or "whole".
    """
    batch = _batch_of(shape, device)
    logits = ""

    def step() -> torch.Tensor:
        nonlocal logits
        output = model(**batch)
        logits = "sharded" if hasattr(output.logits, "placements") else "whole"
        output.loss.backward()
        found: torch.Tensor = output.loss.detach()
        return found

    step()
    model.zero_grad(set_to_none=True)
    before = _settled(model, device)
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
        "rows": shape.rows,
        "length": shape.length,
        "weights_gib": before / 2**30,
        "peak_gib": peak / 2**30,
        "step_gib": (peak - before) / 2**30,
        "seconds": statistics.median(seconds),
        "loss": float(loss),
        "gradient_norm": norm,
        "logits": logits,
    }


def _batch_of(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Random tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, shape.values["vocab_size"], (shape.rows, shape.length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _settled(model: nn.Module, device: torch.device) -> int:
    """Bytes in use, which are those of the weights; the peak counts from here."""
    gc.collect()
    if device.type != "cuda":
        return sum(local_of(each).nbytes for each in (*model.parameters(), *model.buffers()))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _peak_on_cpu(step: Callable[[], object]) -> int:
    """The most bytes that a step holds at once, from the profiler's list of allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _gradient_norm(model: nn.Module) -> float:
    norms = [local_of(each.grad).float().norm() for each in model.parameters() if each.grad is not None]
    return float(torch.stack(norms).norm())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that is here; any other tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
