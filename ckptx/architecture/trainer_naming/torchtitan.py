"""torchtitan's names for Llama 3 and Qwen3, as in the state dict adapters of torchtitan 0.2.2 and 0.3.0.

Only its Llama rotates neighbouring rows (complex RoPE), where Hugging Face rotates halves of a head: there the rows of
the q and k projections are permuted. A tied head is a tensor of its own in torchtitan. The section `torchtitan` of the
corrections of a model type says which form of the names a class has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.architecture.configs import flag_at
from ckptx.architecture.correction_rows import of_class
from ckptx.architecture.correction_schema import FaultyCorrectionError
from ckptx.architecture.corrections import corrected_types, corrections_of, corrections_of_class
from ckptx.architecture.trainer_naming.scheme import TrainerScheme
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.ops import Conversion, Op

# What the names of a class are made of beside those that all have.
FORMS = ("complex_rope", "head_norms", "head_norms_and_experts")
_COMPLEX_ROPE, _, _WITH_EXPERTS = FORMS

# torchtitan's name, and that on the hub.
_PLAIN = (
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("layers.*.attention.qkv_linear.wv.weight", "model.layers.*.self_attn.v_proj.weight"),
    ("layers.*.attention.wo.weight", "model.layers.*.self_attn.o_proj.weight"),
    ("layers.*.feed_forward.w1.weight", "model.layers.*.mlp.gate_proj.weight"),
    ("layers.*.feed_forward.w3.weight", "model.layers.*.mlp.up_proj.weight"),
    ("layers.*.feed_forward.w2.weight", "model.layers.*.mlp.down_proj.weight"),
    ("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight"),
    ("layers.*.ffn_norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    ("norm.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
)
_ROTATED = (
    ("layers.*.attention.qkv_linear.wq.weight", "model.layers.*.self_attn.q_proj.weight"),
    ("layers.*.attention.qkv_linear.wk.weight", "model.layers.*.self_attn.k_proj.weight"),
)
_QK_NORMS = (
    ("layers.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight"),
    ("layers.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight"),
)
_ROUTER = (("layers.*.moe.router.gate.weight", "model.layers.*.mlp.gate.weight"),)
# The experts of a layer are one tensor each.
_EXPERTS = (
    ("layers.*.moe.routed_experts.inner_experts.w1_EFD", "model.layers.*.mlp.experts.*.gate_proj.weight"),
    ("layers.*.moe.routed_experts.inner_experts.w3_EFD", "model.layers.*.mlp.experts.*.up_proj.weight"),
    ("layers.*.moe.routed_experts.inner_experts.w2_EDF", "model.layers.*.mlp.experts.*.down_proj.weight"),
)
# What torchtitan 0.2.2 and earlier called otherwise.
_EARLIER = {
    "layers.*.attention.qkv_linear.wq.weight": "layers.*.attention.wq.weight",
    "layers.*.attention.qkv_linear.wk.weight": "layers.*.attention.wk.weight",
    "layers.*.attention.qkv_linear.wv.weight": "layers.*.attention.wv.weight",
    "layers.*.moe.routed_experts.inner_experts.w1_EFD": "layers.*.moe.experts.w1",
    "layers.*.moe.routed_experts.inner_experts.w3_EFD": "layers.*.moe.experts.w3",
    "layers.*.moe.routed_experts.inner_experts.w2_EDF": "layers.*.moe.experts.w2",
    "lm_head.weight": "output.weight",
}


def form_of(class_name: str) -> str | None:
    """Which of `FORMS` a class has; None for one that torchtitan has no model of."""
    rows = of_class(corrections_of_class(class_name).torchtitan, class_name)
    if not rows:
        return None
    form = rows[0].form
    if form not in FORMS:
        raise FaultyCorrectionError(f'{class_name}: "{form}" is no form of names, needed one of {", ".join(FORMS)}')
    return form


def conversions(class_name: str, config: Mapping[str, Any]) -> tuple[Conversion, ...]:
    """The conversions from torchtitan's names to those on the hub; backwards, current names are written.

    Args:
        class_name: As in `architectures` of `config.json`.
        config: The contents of `config.json`.

    Raises:
        UnsupportedError: torchtitan has no such model, or not with these biases.
        InputError: The config does not say how many heads there are.
    """
    form = form_of(class_name)
    if form is None:
        known = sorted(row.class_name for each in corrected_types() for row in corrections_of(each).torchtitan)
        raise UnsupportedError(
            f"{class_name}: has no names in torchtitan that ckptx knows, needed one of {', '.join(known)}; keep the "
            "names of the hub"
        )
    for key in ("attention_bias", "mlp_bias"):
        if flag_at(config, (key,)):
            raise UnsupportedError(
                f"config.json: {key} is true, but torchtitan's model has no biases there; keep the names of the hub"
            )
    found = [Conversion((name,), (hub,)) for name, hub in _PLAIN]
    if form == _COMPLEX_ROPE:
        found += [
            Conversion((name,), (hub,), (Op("permute_rope", args=(heads, 0)),))
            for (name, hub), heads in zip(_ROTATED, _heads(config), strict=True)
        ]
    else:
        found += [Conversion((name,), (hub,)) for name, hub in (*_ROTATED, *_QK_NORMS)]
    if form == _WITH_EXPERTS:
        found += [Conversion((name,), (hub,)) for name, hub in _ROUTER]
        found += [Conversion((name,), (hub,), (Op("unmerge"),)) for name, hub in _EXPERTS]
    earlier = [
        Conversion((_EARLIER[each.sources[0]],), each.targets, each.ops)
        for each in found
        if each.sources[0] in _EARLIER
    ]
    return (*found, *earlier)


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Heads of q, and of k."""
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise InputError(
            f"config.json: num_attention_heads is {heads!r}, needed the number of heads, whose rows torchtitan orders "
            "in another way; take config.json from the original model"
        )
    return heads, kv_heads


SCHEME = TrainerScheme(
    trainer="torchtitan",
    markers=frozenset({"tok_embeddings.weight"}),
    has_model=lambda class_name: form_of(class_name) is not None,
    conversions=conversions,
)
