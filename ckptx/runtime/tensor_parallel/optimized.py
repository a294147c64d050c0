"""What is known about classes of transformers beyond their plans, as data keyed by module and qualified name.

A class that was wrapped with ``type(name, (Mixin, cls), ...)`` and kept both attributes is found; a class of somebody
else that has the same bare name is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn


class Sequence(NamedTuple):
    """Where the sequence is cut; see `ckptx.runtime.tensor_parallel.sequence`.

    What a model is asked to give of the inside of its layers, such as their hidden states, are slices.

    Attributes:
        layers: The list of decoder layers.
        whole: Modules of every layer that need the whole sequence [B, S, H].
        experts: Modules of some layers that need all tokens [B * S, H], and what goes with each, in any order.
        tokenwise: Modules of some layers that compute each token by itself, as norms do everywhere.
        arguments: Arguments of a layer [B, S, ...] that go with the hidden states.
    """

    layers: str
    whole: tuple[str, ...] = ("self_attn", "mlp")
    experts: tuple[str, ...] = ()
    tokenwise: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Optimized:
    """What the runtime may do with a class; all of it is held by tests.

    Attributes:
        head: The module whose output stays sharded over the vocabulary, empty for none.
        sequence: Where norms and residuals may run on a slice of the sequence; None for nowhere.
        runs: Patterns of overrides, made to cut files, with which the forward pass runs on shards, too.
        styles: Styles that the forward pass needs beside them; they cut nothing.
        reads_weight: Modules whose forward reads a weight of another module: that weight is gathered around it.
        reads_when: A key of the text model's config; `reads_weight` counts only where it is not zero.
        reason: Of `runs`, `styles` and `reads_weight`.
    """

    head: str = ""
    sequence: Sequence | None = None
    runs: tuple[str, ...] = ()
    styles: Mapping[str, str] = field(default_factory=dict)
    reads_weight: Mapping[str, str] = field(default_factory=dict)
    reads_when: str = ""
    reason: str = ""


_TEXT, _VLM = "model.layers", "model.language_model.layers"
_SEQUENCE = Optimized("lm_head", Sequence(_TEXT))
_VL = "model.language_model.layers.*."
_QWEN3_VL = Optimized(
    "lm_head",  # no sequence: features of images are added to whole hidden states between layers
    runs=tuple(
        _VL + leaf
        for leaf in (
            *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        )
    ),
    styles={_VL + f"self_attn.{norm}": "replicated_with_grad_allreduce" for norm in ("q_norm", "k_norm")},
    reason="built as Qwen3, for which there is a plan",
)
_LATENT = tuple(
    f"model.layers.*.self_attn.{leaf}"
    for leaf in ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa")
)
_DEEPSEEK_V3 = Optimized(
    sequence=Sequence(_TEXT),
    runs=_LATENT,
    styles={
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        **dict.fromkeys(
            (f"model.layers.*.self_attn.{norm}" for norm in ("q_a_layernorm", "kv_a_layernorm")), "replicate"
        ),
    },
    reason="heads are viewed with -1; latent norms see no head, the rotary part of the key goes to all of them",
)
_GEMMA4 = Sequence(
    _TEXT,
    experts=("experts",),
    tokenwise=("router", "per_layer_input_gate", "per_layer_projection"),
    arguments=("per_layer_input",),
)
_GEMMA4_VLM = Optimized(
    "lm_head",
    _GEMMA4._replace(layers=_VLM),
    reads_weight={"model": "model.language_model.embed_tokens"},
    reads_when="hidden_size_per_layer_input",
    reason="the embedding of the padding token is read for inputs of the layers",
)

OPTIMIZED: Mapping[str, Optimized] = {
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": _SEQUENCE,
    "transformers.models.mistral.modeling_mistral.MistralForCausalLM": _SEQUENCE,
    "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM": _SEQUENCE,
    "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM": _SEQUENCE,
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM": _SEQUENCE,
    "transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM": _SEQUENCE,
    "transformers.models.phi3.modeling_phi3.Phi3ForCausalLM": _SEQUENCE,
    "transformers.models.gemma2.modeling_gemma2.Gemma2ForCausalLM": _SEQUENCE,
    "transformers.models.gemma3.modeling_gemma3.Gemma3ForCausalLM": _SEQUENCE,
    "transformers.models.gemma3.modeling_gemma3.Gemma3ForConditionalGeneration": Optimized("lm_head", Sequence(_VLM)),
    "transformers.models.gemma4.modeling_gemma4.Gemma4ForCausalLM": Optimized("lm_head", _GEMMA4),
    "transformers.models.gemma4.modeling_gemma4.Gemma4ForConditionalGeneration": _GEMMA4_VLM,
    "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    # Of these nothing else is known: their heads give whole logits, as their plans say.
    **{
        f"transformers.models.{name}": Optimized(sequence=Sequence(_TEXT))
        for name in (
            *("granite.modeling_granite.GraniteForCausalLM", "olmo2.modeling_olmo2.Olmo2ForCausalLM"),
            *("cohere.modeling_cohere.CohereForCausalLM", "glm4.modeling_glm4.Glm4ForCausalLM"),
            "starcoder2.modeling_starcoder2.Starcoder2ForCausalLM",
            *("qwen2_moe.modeling_qwen2_moe.Qwen2MoeForCausalLM", "glm4_moe.modeling_glm4_moe.Glm4MoeForCausalLM"),
            "gpt_oss.modeling_gpt_oss.GptOssForCausalLM",
        )
    },
}


def qualified_name(cls: type) -> str:
    """How `OPTIMIZED` names a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def optimized_for(model: nn.Module) -> Optimized:
    """The row of the model's class, an empty one where there is none."""
    return OPTIMIZED.get(qualified_name(type(model)), Optimized())


def is_stock(model: nn.Module) -> bool:
    """True when the forward pass is one of transformers, also in a class that was wrapped: its plan speaks of it."""
    return str(type(model).forward.__module__).startswith("transformers.")
