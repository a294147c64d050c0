"""Tiny quantized models of published classes, with the floats that they decode to.

Shapes are written down here as in the config of each class, so that making one takes neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoint_writers import Value, value
from tests.support.quantized import (
    SCHEMES,
    PublishedScheme,
    QuantizedWeight,
    float_value,
    rng_of,
    with_block,
    write_quantized,
)

Shapes = dict[str, tuple[int, ...]]
_COMMON: dict[str, Any] = {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def llama_shapes(layers: int = 2) -> tuple[dict[str, Any], Shapes]:
    hidden, inner, vocab, heads, kv_heads, head = 64, 96, 40, 4, 2, 16
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= _attention(at, hidden, heads, kv_heads, head)
        shapes |= _mlp(f"{at}mlp.", hidden, inner)
        shapes |= _norms(at, hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    config = {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head,
    }  # fmt: skip
    return config, shapes


def qwen3_moe_shapes(layers: int = 2) -> tuple[dict[str, Any], Shapes]:
    hidden, inner, vocab, heads, kv_heads, head, experts = 64, 32, 40, 4, 2, 16, 4
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= _attention(at, hidden, heads, kv_heads, head)
        shapes |= {f"{at}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes[f"{at}mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            shapes |= _mlp(f"{at}mlp.experts.{expert}.", hidden, inner)
        shapes |= _norms(at, hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    config = {
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "intermediate_size": 96, "moe_intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head, "num_experts": experts,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    return config, shapes


def deepseek_shapes(
    layers: int = 2, mtp: int = 1, q_rank: int = 48, kv_rank: int = 40, rope: int = 8
) -> tuple[dict[str, Any], Shapes]:
    """Return a DeepSeek-V3 with its ragged `kv_a_proj_with_mqa` and a layer for multi-token prediction."""
    hidden, inner, vocab, heads, experts = 64, 32, 40, 4, 4
    nope, v_head = 8, 16
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers + mtp):
        at = f"model.layers.{layer}."
        attention = f"{at}self_attn."
        shapes |= {
            f"{attention}q_a_proj.weight": (q_rank, hidden), f"{attention}q_a_layernorm.weight": (q_rank,),
            f"{attention}q_b_proj.weight": (heads * (nope + rope), q_rank),
            f"{attention}kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
            f"{attention}kv_a_layernorm.weight": (kv_rank,),
            f"{attention}kv_b_proj.weight": (heads * (nope + v_head), kv_rank),
            f"{attention}o_proj.weight": (hidden, heads * v_head),
        }  # fmt: skip
        if layer == 0:
            shapes |= _mlp(f"{at}mlp.", hidden, 96)
        else:
            shapes |= {
                f"{at}mlp.gate.weight": (experts, hidden),
                f"{at}mlp.gate.e_score_correction_bias": (experts,),
            }
            for expert in range(experts):
                shapes |= _mlp(f"{at}mlp.experts.{expert}.", hidden, inner)
            shapes |= _mlp(f"{at}mlp.shared_experts.", hidden, inner)
        shapes |= _norms(at, hidden)
        if layer >= layers:
            shapes |= {
                f"{at}embed_tokens.weight": (vocab, hidden), f"{at}enorm.weight": (hidden,),
                f"{at}hnorm.weight": (hidden,), f"{at}eh_proj.weight": (hidden, 2 * hidden),
                f"{at}shared_head.norm.weight": (hidden,), f"{at}shared_head.head.weight": (vocab, hidden),
            }  # fmt: skip
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    config = {
        **_COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": hidden,
        "intermediate_size": 96, "moe_intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "n_routed_experts": experts, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "q_lora_rank": q_rank, "kv_lora_rank": kv_rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope,
        "v_head_dim": v_head, "num_nextn_predict_layers": mtp,
    }  # fmt: skip
    return config, shapes


def gpt_oss_shapes(layers: int = 2) -> tuple[dict[str, Any], Shapes]:
    hidden, inner, vocab, heads, kv_heads, head, experts = 64, 32, 40, 4, 2, 16, 4
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= _attention(at, hidden, heads, kv_heads, head)
        shapes |= {
            f"{at}self_attn.{name}_proj.bias": (size,)
            for name, size in (("q", 64), ("k", 32), ("v", 32), ("o", hidden))
        }
        shapes |= {
            f"{at}self_attn.sinks": (heads,), f"{at}mlp.router.weight": (experts, hidden),
            f"{at}mlp.router.bias": (experts,), f"{at}mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
            f"{at}mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
            f"{at}mlp.experts.down_proj": (experts, inner, hidden),
            f"{at}mlp.experts.down_proj_bias": (experts, hidden),
        }  # fmt: skip
        shapes |= _norms(at, hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    config = {
        **_COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": hidden,
        "intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "num_local_experts": experts, "num_experts_per_tok": 2,
        "attention_bias": True, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"][:layers],
    }  # fmt: skip
    return config, shapes


def _attention(at: str, hidden: int, heads: int, kv_heads: int, head: int) -> Shapes:
    sizes = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
    shapes: Shapes = {f"{at}self_attn.{name}_proj.weight": (size, hidden) for name, size in sizes.items()}
    return shapes | {f"{at}self_attn.o_proj.weight": (hidden, heads * head)}


def _mlp(at: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{at}gate_proj.weight": (inner, hidden),
        f"{at}up_proj.weight": (inner, hidden),
        f"{at}down_proj.weight": (hidden, inner),
    }


def _norms(at: str, hidden: int) -> Shapes:
    return {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}


def _is_projection(name: str) -> bool:
    return name.endswith(("proj.weight", "proj_with_mqa.weight")) and "eh_proj" not in name


def _is_routed_expert(name: str) -> bool:
    return ".experts." in name and name.endswith(("_proj", "_proj.weight"))


@dataclass(frozen=True)
class QuantizedModel:
    """A quantized model.

    Attributes:
        config: Config of the class, without the quantization.
        scheme: Scheme that the config declares.
        tensors: Stored tensors.
        weights: Quantized weights by name.
        plain: Tensors that are not quantized.
    """

    config: Mapping[str, Any]
    scheme: PublishedScheme
    tensors: dict[str, Value]
    weights: dict[str, QuantizedWeight]
    plain: dict[str, Value]

    def truth(self, dtype: str = "BF16") -> dict[str, Value]:
        """Return the tensors of the decoded model."""
        return {**self.plain, **{name: weight.stored_truth(dtype) for name, weight in self.weights.items()}}

    @property
    def activation_scales(self) -> set[str]:
        suffixes = (".activation_scale", ".input_scale", ".input_global_scale")
        return {name for name in self.tensors if name.endswith(suffixes)}

    @property
    def decoded(self) -> dict[str, str]:
        """Return the name of each companion -> weight that it is decoded into."""
        return {
            part: name
            for name, weight in self.weights.items()
            for part in list(weight.parts)[1:]
            if part not in self.activation_scales
        }

    def write(self, root: Path, shards: int = 1) -> Path:
        return write_quantized(root, self.tensors, self.scheme, self.config, shards)


@dataclass(frozen=True)
class ModelCase:
    """Class, scheme and quantized weights of a model.

    Attributes:
        shapes: Function that returns config and shapes.
        scheme: Key of `SCHEMES`.
        is_quantized: Function that returns True for the name of a quantized weight.
        block: Size of fp8 blocks.
        others: Scheme of the weights for which `is_other` is True.
        is_other: See `others`.
    """

    shapes: Callable[[], tuple[dict[str, Any], Shapes]]
    scheme: str
    is_quantized: Callable[[str], bool] = _is_projection
    block: tuple[int, int] = (32, 32)
    others: str | None = None
    is_other: Callable[[str], bool] = field(default=lambda name: False)


MODELS: dict[str, ModelCase] = {
    **{
        f"llama, {label}": ModelCase(llama_shapes, label, block=(24, 40))
        for label in SCHEMES
        if label not in ("mxfp4 blocks", "mxfp4 deepseek", "mxfp4 f4")
    },
    "qwen3_moe, fp8 blocks": ModelCase(qwen3_moe_shapes, "fp8 blocks, bf16 scales"),
    "qwen3_moe, ragged fp8 blocks": ModelCase(qwen3_moe_shapes, "fp8 blocks", block=(24, 40)),
    "qwen3_moe, nvfp4": ModelCase(qwen3_moe_shapes, "nvfp4", _is_routed_expert),
    "qwen3_moe, fp8 rows": ModelCase(qwen3_moe_shapes, "fp8 rows"),
    "deepseek, fp8 blocks": ModelCase(deepseek_shapes, "fp8 blocks"),
    "deepseek, fp8 blocks of published sizes": ModelCase(
        partial(deepseek_shapes, q_rank=2112, kv_rank=512, rope=64), "fp8 blocks", block=(128, 128)
    ),
    "deepseek, fp8 and mxfp4": ModelCase(
        deepseek_shapes, "fp8 blocks, e8m0 scales", others="mxfp4 deepseek", is_other=_is_routed_expert
    ),
    "deepseek, int4 experts": ModelCase(deepseek_shapes, "int4", _is_routed_expert),
    "gpt_oss, mxfp4": ModelCase(gpt_oss_shapes, "mxfp4 blocks", _is_routed_expert),
    "llama, nvfp4 and fp8": ModelCase(
        llama_shapes, "nvfp4", others="fp8 tensor, ModelOpt", is_other=lambda name: ".self_attn." in name
    ),
}


def make_model(label: str, seed: int = 0) -> QuantizedModel:
    """Return the model `label` of `MODELS`, with random codes."""
    case = MODELS[label]
    config, shapes = case.shapes()
    scheme = with_block(SCHEMES[case.scheme], case.block)
    rng = rng_of(label, seed)
    tensors: dict[str, Value] = {}
    weights: dict[str, QuantizedWeight] = {}
    plain: dict[str, Value] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if case.is_quantized(name):
            own = SCHEMES[case.others] if case.others is not None and case.is_other(name) else scheme
            weights[name] = own.coder.make(name, shape, rng)
            tensors |= weights[name].parts
        else:
            plain[name] = value("F32" if name.endswith("correction_bias") else "BF16", *shape, seed=number + seed)
            tensors[name] = plain[name]
    if case.others == "fp8 tensor, ModelOpt":
        layers = {
            name.removesuffix(".weight"): {"quant_algo": "FP8"}
            if case.is_other(name)
            else {"quant_algo": "NVFP4", "group_size": 16}
            for name in weights
        }
        document = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
        scheme = PublishedScheme(scheme.coder, None, document)
    return QuantizedModel(config, scheme, tensors, weights, plain)


def encode_model(label: str, model: QuantizedModel, values: Mapping[str, np.ndarray[Any, Any]]) -> QuantizedModel:
    """Return a model with these weights encoded in its schemes; others keep their codes."""
    case = MODELS[label]
    weights = dict(model.weights)
    for name, own in values.items():
        scheme = with_block(SCHEMES[case.scheme], case.block)
        if case.others is not None and case.is_other(name):
            scheme = SCHEMES[case.others]
        weights[name] = scheme.coder.encode(name, own)
    tensors = dict(model.tensors)
    for weight in weights.values():
        tensors |= {name: part for name, part in weight.parts.items() if name not in model.activation_scales}
    return QuantizedModel(model.config, model.scheme, tensors, weights, model.plain)


def make_trained_model(label: str) -> QuantizedModel:
    """Return a quantized model whose values have the size of those of an initialized one."""
    model, rng = make_model(label), rng_of("run", label)
    values = {name: rng.normal(0, 0.05, each.truth.shape).astype(np.float32) for name, each in model.weights.items()}
    model = encode_model(label, model, values)
    plain: dict[str, Value] = {}
    for name, tensor in model.plain.items():
        numbers = np.ones(tensor[1]) if name.endswith("norm.weight") else rng.normal(0, 0.05, tensor[1])
        plain[name] = float_value(numbers, tensor[0])
    return replace(model, plain=plain, tensors=model.tensors | plain)
