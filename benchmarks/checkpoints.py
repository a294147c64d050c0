"""Generate checkpoints for the benchmarks: real shapes, headers and configs, written in constant memory.

The bytes are random or, for a checkpoint larger than the machine, zeros that occupy no disk space.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ckptx.catalog.dtype import DTYPES_BY_NAME, DType
from ckptx.catalog.region import Shape
from ckptx.formats.hf.reader import format_index
from ckptx.formats.hf.safetensors import format_header_text, frame_header, pad_header
from ckptx.transfer.cast import round_to_bf16

# Repeated with a shift, so that blocks have different checksums and gigabytes are written fast.
_BLOCK = os.urandom(8 << 20)
_BF16, _F32 = DTYPES_BY_NAME["BF16"], DTYPES_BY_NAME["F32"]

Shapes = Iterator[tuple[str, Shape]]  # name and shape of each tensor


class Model(NamedTuple):
    """Content of a checkpoint.

    Attributes:
        shapes: Names and shapes of the tensors, in the order of the files; can be read once.
        config: Content of config.json.
    """

    shapes: Shapes
    config: dict[str, Any]


def llama(layers: int = 20) -> Model:
    """Return a Llama with 9 tensors per layer; the default has 183 tensors and 1.92 GiB in bf16."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    }
    return Model(_llama_shapes(layers, config["hidden_size"], config["intermediate_size"], 8 * 64, 32000), config)


def _llama_shapes(num_layers: int, hidden_size: int, mlp_size: int, kv_size: int, vocab_size: int) -> Shapes:
    yield "model.embed_tokens.weight", (vocab_size, hidden_size)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", (hidden_size, hidden_size)
        yield prefix + "self_attn.k_proj.weight", (kv_size, hidden_size)
        yield prefix + "self_attn.v_proj.weight", (kv_size, hidden_size)
        yield prefix + "self_attn.o_proj.weight", (hidden_size, hidden_size)
        yield from _mlp(prefix + "mlp.", mlp_size, hidden_size)
        yield prefix + "input_layernorm.weight", (hidden_size,)
        yield prefix + "post_attention_layernorm.weight", (hidden_size,)
    yield "model.norm.weight", (hidden_size,)
    yield "lm_head.weight", (vocab_size, hidden_size)


def _mlp(prefix: str, inner: int, hidden: int) -> Shapes:
    yield prefix + "gate_proj.weight", (inner, hidden)
    yield prefix + "up_proj.weight", (inner, hidden)
    yield prefix + "down_proj.weight", (hidden, inner)


def experts(layers: int = 48, experts: int = 127) -> Model:
    """Return a Qwen3-MoE with small, separate experts; the default has 18,723 tensors and 2.95 GiB in bf16."""
    return _qwen3_moe(layers, experts, hidden=512, inner=160, heads=8, kv_heads=8, head_dim=64, vocab=32000)


def qwen3_moe(layers: int = 3) -> Model:
    """Return layers of Qwen3-30B-A3B with a smaller vocabulary; three have 1,182 tensors and 3.73 GiB in bf16."""
    return _qwen3_moe(layers, 128, hidden=2048, inner=768, heads=32, kv_heads=4, head_dim=128, vocab=32000)


def _qwen3_moe(
    layers: int, experts: int, *, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> Model:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": inner,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    return Model(_qwen3_moe_shapes(config), config)


def _qwen3_moe_shapes(config: dict[str, Any]) -> Shapes:
    hidden, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", (q, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, q)
        yield prefix + "self_attn.q_norm.weight", (head,)
        yield prefix + "self_attn.k_norm.weight", (head,)
        yield prefix + "mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", config["moe_intermediate_size"], hidden)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def deepseek(layers: int = 61, predictors: int = 1) -> Model:
    """Return DeepSeek-V3, dequantized from its fp8 release: 46,183 tensors, 684 B parameters, 1.25 TiB.

    The main model has 45,395 of the tensors and 671 B of the parameters. The rest is the multi-token prediction layer,
    stored as layer 61 with copies of the embedding and the output head. All are bf16, except the router biases.

    Args:
        layers: Number of hidden layers; the first three are dense.
        predictors: Number of multi-token prediction layers, `num_nextn_predict_layers`.
    """
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": predictors,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    return Model(_deepseek_shapes(config), config)


def _deepseek_shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        yield from _deepseek_layer(f"model.layers.{layer}.", config, dense=layer < config["first_k_dense_replace"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for layer in range(layers, layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "embed_tokens.weight", (vocab, hidden)
        yield prefix + "enorm.weight", (hidden,)
        yield prefix + "hnorm.weight", (hidden,)
        yield prefix + "eh_proj.weight", (hidden, 2 * hidden)
        yield from _deepseek_layer(prefix, config, dense=False)
        yield prefix + "shared_head.norm.weight", (hidden,)
        yield prefix + "shared_head.head.weight", (vocab, hidden)


def _deepseek_layer(prefix: str, config: dict[str, Any], *, dense: bool) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "self_attn.q_a_proj.weight", (q_rank, hidden)
    yield prefix + "self_attn.q_a_layernorm.weight", (q_rank,)
    yield prefix + "self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield prefix + "self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield prefix + "self_attn.kv_a_layernorm.weight", (kv_rank,)
    yield prefix + "self_attn.kv_b_proj.weight", (heads * (nope + value), kv_rank)
    yield prefix + "self_attn.o_proj.weight", (hidden, heads * value)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    if dense:
        yield from _mlp(prefix + "mlp.", config["intermediate_size"], hidden)
        return
    routed, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    yield prefix + "mlp.gate.weight", (routed, hidden)
    yield prefix + "mlp.gate.e_score_correction_bias", (routed,)
    yield from _mlp(prefix + "mlp.shared_experts.", inner * config["n_shared_experts"], hidden)
    for expert in range(routed):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", inner, hidden)


def write_checkpoint(root: Path, model: Model, shards: int = 2, *, sparse: bool = False, normal: bool = False) -> int:
    """Write an HF checkpoint in safetensors files of about equal size.

    Args:
        root: Directory of the checkpoint; it must not exist.
        model: Tensors and config to write.
        shards: Number of safetensors files.
        sparse: Write holes instead of tensors; they read as zeros.
        normal: Write bf16 numbers of a normal distribution, as weights have it, instead of random bytes.

    Returns:
        Size of all tensors in bytes.
    """
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    tensors = [(name, dtype_of(name), shape) for name, shape in model.shapes]
    sizes = [dtype.nbytes(prod(shape)) for _, dtype, shape in tensors]
    total = sum(sizes)
    weight_map, written_bytes, tensors_by_file = {}, 0, [[] for _ in range(shards)]
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        tensors_by_file[min(shards - 1, written_bytes * shards // total)].append(tensor)
        written_bytes += nbytes
    write_payload = _write_hole if sparse else _write_normal if normal else _write_random
    for index, tensors_of_file in enumerate(tensors_by_file):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        _write_shard(root / file, tensors_of_file, write_payload)
        weight_map.update((name, file) for name, _, _ in tensors_of_file)
    (root / "model.safetensors.index.json").write_text(format_index(weight_map, {"total_size": total}))
    return total


def dtype_of(name: str) -> DType:
    """Return bf16, or fp32 for the router biases of DeepSeek, as in its release."""
    return _F32 if name.endswith("e_score_correction_bias") else _BF16


def _write_shard(
    path: Path, tensors: list[tuple[str, DType, Shape]], write_payload: Callable[[BinaryIO, int], None]
) -> None:
    offset, header = 0, []
    for name, dtype, shape in tensors:
        nbytes = dtype.nbytes(prod(shape))
        header.append((name, dtype, shape, offset, offset + nbytes))
        offset += nbytes
    with path.open("wb") as out:
        out.write(frame_header(pad_header(format_header_text(header, {"format": "pt"}))))
        write_payload(out, offset)


def _write_hole(out: BinaryIO, nbytes: int) -> None:
    out.truncate(out.tell() + nbytes)


def _write_random(out: BinaryIO, nbytes: int) -> None:
    for start in range(0, nbytes, len(_BLOCK)):
        shift = start // len(_BLOCK) * 4099 % len(_BLOCK)
        out.write((_BLOCK[shift:] + _BLOCK[:shift])[: nbytes - start])


def _write_normal(out: BinaryIO, nbytes: int) -> None:
    block = _normal_block()
    for start in range(0, nbytes, len(block)):
        shift = start // len(block) * 4098 % len(block)  # even, so that no number is cut
        out.write((block[shift:] + block[:shift])[: nbytes - start])


@cache
def _normal_block() -> bytes:
    """Return bf16 numbers of a normal distribution with a standard deviation of 0.02."""
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32) * np.float32(0.02)
    return round_to_bf16(values).tobytes()
