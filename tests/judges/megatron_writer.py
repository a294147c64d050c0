"""Save a Hugging Face model with megatron-core's own `dist_checkpointing`, on the ranks of a mesh, on a CPU.

usage: python -m tests.judges.megatron_writer RANK WORLD STORE TP PP EP STYLE HF OUT

Each rank builds its part of a GPTModel, fills it with its slices of `tests/support/megatron_layout.py`, and saves it.
STYLE is "stacked" or "layers" (one tensor for each layer). With "+optimizer" after it, the state of AdamW is saved as
well, by Megatron's own functions, with the values of `optimizer_values`. On a single rank, the logits of Megatron's own
forward pass are saved, to OUT.logits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.megatron_layout import LOCAL_NORMS, layer_tensors, to_megatron

TOKENS = torch.arange(12).reshape(1, 12) * 5 % 26
PADDED_ROWS = 32


def replace_cuda() -> None:
    """Replace the calls that only move a device pointer, which Megatron makes on a CPU as well."""
    stream = type("Stream", (), {name: (lambda *_, **__: None) for name in ("__init__", "synchronize", "wait_stream")})
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.set_device = lambda *_, **__: None
    cuda.device_count = lambda: 1
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    cuda.Stream = stream
    cuda.current_stream = lambda *_, **__: stream()


def build_model(config: dict[str, Any], dtype: torch.dtype, tp: int, pp: int, ep: int, style: str) -> Any:
    """Return this rank's part of the model that a Hugging Face config describes."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    has_head_norms = config["model_type"].startswith("qwen3")
    values: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": head_dim,
        "ffn_hidden_size": config["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config["model_type"] == "qwen2",
        "qk_layernorm": has_head_norms,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "hetereogenous_dist_checkpoint": style == "layers" and not experts,
    }
    if experts:
        values |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": config.get("moe_intermediate_size") or config["intermediate_size"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
        }
    if experts and style == "layers":
        values["moe_layer_freq"] = [1] * config["num_hidden_layers"]
    megatron_config = TransformerConfig(**values)
    spec: Any
    if experts and style == "layers":
        spec = get_gpt_decoder_block_spec(megatron_config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(experts, False, has_head_norms, normalization="RMSNorm")
    return GPTModel(
        megatron_config,
        spec,
        vocab_size=PADDED_ROWS,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(config.get("rope_theta", 10000)),
    ).to(dtype)


def local_slice(name: str, weight: Tensor, rank: int, tp: int) -> Tensor:
    """Return the slice of a weight that a tensor-parallel rank has."""
    if name.endswith(("linear_fc1.weight",)):
        gate, up = weight.chunk(2)
        return torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return weight.chunk(tp, 1)[rank]
    if name.endswith(("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")):
        return weight.chunk(tp)[rank]
    return weight


def fill(model: Any, weights: dict[str, Tensor], config: dict[str, Any], first_layer: int) -> None:
    """Set every parameter of this rank to its slice."""
    with torch.no_grad():
        for _, parameter, value in expected_values(model, weights, config, first_layer):
            parameter.copy_(value)


def expected_values(
    model: Any, weights: dict[str, Tensor], config: dict[str, Any], first_layer: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, parameter and expected value of every parameter of this rank."""
    from megatron.core import parallel_state

    tp, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    expert_rank, expert_ranks = (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    whole = to_megatron(weights, config, rows=PADDED_ROWS, stacked=False, norms=LOCAL_NORMS)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            layer = layer_tensors(weights, config, first_layer + int(parts[2]), LOCAL_NORMS)
            below = ".".join(parts[3:])
            if "local_experts" in parts:
                per_rank = len(layer["mlp.experts.experts.linear_fc1.weight"]) // expert_ranks
                expert = expert_rank * per_rank + int(parts[parts.index("local_experts") + 1])
                value = layer[f"mlp.experts.experts.{'.'.join(parts[-2:])}"][expert]
            else:
                value = layer[below]
        else:  # a tied head is a copy on the last stage
            value = whole[name] if name in whole else whole["embedding.word_embeddings.weight"]
        yield name, parameter, local_slice(name, value, rank, tp)


def optimizer_values(weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return moments and fp32 masters by kind and by the names of the Hub."""
    return {
        kind: {
            name: torch.randn(value.shape, generator=torch.Generator().manual_seed(index * 1000 + len(name)))
            for name, value in weights.items()
        }
        for index, kind in enumerate(("exp_avg", "exp_avg_sq", "fp32_param"))
    }


def optimizer_state(
    model: Any, state: Any, weights: dict[str, Tensor], config: dict[str, Any], first_layer: int
) -> dict[str, Any]:
    """Return the sharded state of an AdamW after 7 steps, as Megatron's optimizers make it."""
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        make_sharded_optimizer_tensor,
        optim_state_to_sharding_state,
    )

    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    masters: dict[int, Tensor] = {}
    for kind, values in optimizer_values(weights).items():
        expected = {id(parameter): value for _, parameter, value in expected_values(model, values, config, first_layer)}
        for number, parameter in enumerate(parameters):
            if kind == "fp32_param":
                masters[number] = expected[id(parameter)].clone()
            else:
                optimizer.state[parameter] |= {"step": torch.tensor(7.0), kind: expected[id(parameter)].clone()}
    sharded_parameters = get_param_id_to_sharded_param_map(state, iter(parameters))
    result: dict[str, Any] = optimizer.state_dict()
    optim_state_to_sharding_state(result, sharded_parameters, exclude_keys=("step",))
    result["state"]["common_step"] = 7
    sharded_masters = [
        make_sharded_optimizer_tensor(sharded_parameters[number], master, prefix="optimizer.state.fp32_param")
        for number, master in masters.items()
    ]
    return {"optimizer": result, "fp32_from_fp16_params": [sharded_masters]}


def save_logits(model: Any, out: Path) -> None:
    """Save the logits of Megatron's own forward pass."""
    length = TOKENS.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model.eval()(TOKENS, torch.arange(length)[None], mask)
    save_file({"logits": logits.float().contiguous()}, f"{out}.logits")


def initialize(rank: str, world: str, store: str, tp: str, pp: str, ep: str) -> None:
    """Join the other ranks, and create Megatron's process groups."""
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    torch.set_num_threads(1)
    replace_cuda()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()  # no dropout: random numbers are not used
    moe_utils.te_general_gemm = None  # as TransformerEngine is absent, which 0.16.1 fails to state
    parallel_state.initialize_model_parallel(
        int(tp), int(pp), expert_model_parallel_size=int(ep), create_gloo_process_groups=True
    )


def main() -> None:
    rank, world, store, tp, pp, ep, style, hf, out = sys.argv[1:]
    initialize(rank, world, store, tp, pp, ep)
    from megatron.core import dist_checkpointing, parallel_state

    config = json.loads((Path(hf) / "config.json").read_text())
    weights = load_file(Path(hf) / "model.safetensors")
    dtype = weights["model.norm.weight"].dtype
    style, _, extra = style.partition("+")
    model = build_model(config, dtype, int(tp), int(pp), int(ep), style)
    layers_per_stage = config["num_hidden_layers"] // int(pp)
    first_layer = layers_per_stage * parallel_state.get_pipeline_model_parallel_rank()
    fill(model, weights, config, first_layer)
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state = model.sharded_state_dict(metadata=metadata)
    optimizer = {"optimizer": optimizer_state(model, state, weights, config, first_layer)} if extra else {}
    arguments = argparse.Namespace(num_layers=config["num_hidden_layers"], padded_vocab_size=PADDED_ROWS)
    os.makedirs(out, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(
        {"model": state, "args": arguments, "checkpoint_version": 3.0, "iteration": 1, **optimizer},
        out,
        content_metadata={"singleton_local_shards": False},
    )
    if tp == pp == ep == "1":
        save_logits(model, Path(out))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
