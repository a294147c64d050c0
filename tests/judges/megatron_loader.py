"""Load a checkpoint with megatron-core's own `dist_checkpointing` on the ranks of a mesh, and compare each parameter.

usage: python -m tests.judges.megatron_loader RANK WORLD STORE TP PP EP STYLE HF CHECKPOINT

Each rank builds its part of a GPTModel, loads it, and compares every parameter with its slice of the Hugging Face
weights, laid out by `tests/support/megatron_layout.py`. Rows that pad the vocabulary have to be zero. With experts, the
model is loaded a second time under the names that it has with TransformerEngine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.judges.megatron_writer import build_model, expected_values, initialize

VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def sharded_state(model: Any, checkpoint: str, *, with_transformer_engine: bool) -> dict[str, Any]:
    """The tensors that the model asks for, as Megatron-LM builds them from the metadata in the checkpoint."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    metadata = dist_checkpointing.load_content_metadata(checkpoint)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    if with_transformer_engine:
        for value in nested_values(state):
            value.key = value.key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    return state


def main() -> None:
    rank, world, store, tp, pp, ep, style, hf, checkpoint = sys.argv[1:]
    initialize(rank, world, store, tp, pp, ep)
    from megatron.core import dist_checkpointing, parallel_state

    config = json.loads((Path(hf) / "config.json").read_text())
    weights = load_file(Path(hf) / "model.safetensors")
    dtype = weights["model.norm.weight"].dtype
    first_layer = config["num_hidden_layers"] // int(pp) * parallel_state.get_pipeline_model_parallel_rank()
    has_experts = "num_experts_per_tok" in config
    for with_transformer_engine in (False, True)[: 1 + has_experts]:
        model = build_model(config, dtype, int(tp), int(pp), int(ep), style)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        state = sharded_state(model, checkpoint, with_transformer_engine=with_transformer_engine)
        loaded = dist_checkpointing.load({"model": state}, checkpoint, strict="log_unexpected")
        assert loaded["checkpoint_version"] == 3.0
        model.load_state_dict(loaded["model"])
        compared = 0
        for name, parameter, value in expected_values(model, weights, config, first_layer):
            if name.endswith(VOCABULARY):
                begin = parallel_state.get_tensor_model_parallel_rank() * len(value)
                value = value.clone()
                value[max(0, config["vocab_size"] - begin) :] = 0
            assert torch.equal(parameter, value), name
            compared += 1
        print(f"rank {rank}: {compared} parameters are equal", flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
