"""Train a small transformers model with DeepSpeed's AutoTP on gloo ranks of a CPU, and save it.

usage: torchrun --nproc-per-node=N tests/judges/deepspeed_tensor_parallel.py MODEL TP STAGE OUT

OUT.safetensors receives the weights, and the fp32 masters and moments, that the engine has for each parameter:
DeepSpeed returns those of a shard, and its own layers gather the shards. The rules in the checkpoint are not used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

STEPS = 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 67}
FUSED = {"num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FUSED_RULES = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [".*down_proj.weight$"], "partition_type": "row"},
        {"patterns": [".*gate_up_proj.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
    ],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "num_key_value_heads": 2}),
    "llama_uneven": ("Llama", {**SIZES, "num_key_value_heads": 4, "num_attention_heads": 4, "intermediate_size": 50}),
    "qwen2_tied": ("Qwen2", {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {**SIZES, **FUSED}),
    "llama_one_kv_head": ("Llama", {**SIZES, "num_key_value_heads": 1}),
}  # fmt: skip


def train(model_name: str, tp: int, stage: int) -> Any:
    """Return DeepSpeed's engine after a few steps."""
    import deepspeed
    import transformers

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # compiles C++
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(7)
    family, sizes = MODELS[model_name]
    rules = {"partition_config": FUSED_RULES} if family == "Phi3" else {}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp, **rules},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank() // tp)
        tokens = torch.randint(0, 67, (2, 5), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return engine


def engine_values(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """Return the weights, masters and moments of an engine under the names that ckptx gives them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    values: dict[str, torch.Tensor] = {}
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        shards = {name: {"": parameter.detach().clone()} for name, parameter in parameters.items()}
        for name, parameter in parameters.items() if stage else ():
            empty = parameter.detach().float()  # the optimizer does not know a shard without elements
            is_empty = stage < 3 and not parameter.numel()
            shards[name]["master_param"] = empty if is_empty else safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                shards[name][key] = empty if is_empty else safe_get_full_optimizer_state(parameter, key)
        if stage == 3:  # its weights are the masters
            shards = {
                name: {"": each.pop("master_param")} | {k: v for k, v in each.items() if k}
                for name, each in shards.items()
            }
        for key in next(iter(shards.values())):
            whole = gather(module, {name: each[key] for name, each in shards.items()})
            for name, value in whole.items():
                full_name = f"{prefix}.{name}" if prefix else name
                values[f"optimizer.state.{full_name}.{key}" if key else full_name] = value
    tied = [name for name in values if ".lm_head.weight" in name and is_tied(engine.module)]
    return {name: value for name, value in values.items() if name not in tied}


def is_tied(model: Any) -> bool:
    """Return True if the optimizer state of the output head has the name of the embedding."""
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def gather(module: Any, shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the whole tensors of one layer of DeepSpeed; those of other layers are whole on each rank."""
    if not hasattr(module, "gather_params"):
        return {name: shard.clone() for name, shard in shards.items()}
    stored = {name: getattr(module, name).data for name in shards}
    for name, shard in shards.items():
        getattr(module, name).data = shard.clone()
    module.gather_params([module.weight, getattr(module, "bias", None)])
    whole = {name: getattr(module, name).data.clone() for name in shards}
    for name, data in stored.items():
        getattr(module, name).data = data
    return whole


def main(model_name: str, tp: int, stage: int, out: Path) -> None:
    """Save the checkpoint on all ranks, and the values of the engine on rank 0."""
    os.environ.setdefault("CROSS_RANK", "0")
    os.environ.setdefault("CROSS_SIZE", "1")
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    engine = train(model_name, tp, stage)
    engine.save_checkpoint(str(out))
    values = engine_values(engine, stage)
    if dist.get_rank() == 0:
        save_file({name: value.contiguous() for name, value in values.items()}, f"{out}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
