"""Write `fixtures/megatron/`: a small `torch_dist` checkpoint of megatron-core, and its tensors as safetensors.

    pip install megatron-core==0.16.1 psutil
    torchrun --nproc-per-node 2 tools/build_megatron_fixture.py

Two tensor-parallel ranks save `fixtures/megatron/torch_dist/`; `fixtures/megatron/torch_dist.safetensors` contains the
tensors that megatron-core reads from it. The script does not use ckptx. It runs without a GPU: it replaces the two CUDA
functions that megatron's writer calls.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent / "fixtures" / "megatron"
TARGET = "torch_dist"
WORLD_SIZE = 2


def build_state() -> dict[str, Any]:
    """Return the sharded state dict of a GPT with two layers, the `exp_avg` of one parameter, and an iteration."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        num_query_groups=2,
        tensor_model_parallel_size=WORLD_SIZE,
        gated_linear_unit=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocab_size=16, max_sequence_length=4, share_embeddings_and_output_weights=False)
    state = model.sharded_state_dict()
    weight = state["output_layer.weight"]
    data = weight.data.detach().float() / 8
    moment = replace(weight, key=f"optimizer.state.exp_avg.{weight.key}", data=data, dtype=data.dtype)
    return {"model": state, "optimizer": {"exp_avg": moment}, "iteration": 3}


def main() -> None:
    """Save the checkpoint on two ranks, and its tensors as safetensors on rank 0."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD_SIZE)
    torch.manual_seed(dist.get_rank())
    ROOT.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)  # .metadata stores the path as passed
    if dist.get_rank() == 0:
        shutil.rmtree(TARGET, ignore_errors=True)
        os.mkdir(TARGET)
    dist.barrier()
    dist_checkpointing.save(build_state(), TARGET)
    dist.barrier()
    tensors = dist_checkpointing.load_plain_tensors(TARGET)
    if dist.get_rank() == 0:
        plain = {name: value.contiguous() for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        save_file(plain, f"{TARGET}.safetensors")  # without the objects in common.pt
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
