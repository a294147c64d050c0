"""torchtitan's names for Llama 3, Qwen3 and DeepSeek-V3, as in the state dict adapters of torchtitan 0.2.2 and 0.3.0.

Only its Llama rotates adjacent rows (complex RoPE), where Hugging Face rotates halves of a head: there the rows of the
q and k projections are permuted. A tied head is a separate tensor in torchtitan. Its MoE layers have a bias of each
expert for load balancing, which only DeepSeek-V3 has on the Hub. Disk names are those of the files on the Hub. The
section `torchtitan` of the corrections of a model type names the form of a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptx.architecture.configs import read_flag
from ckptx.architecture.trainer_naming.forms import find_form, list_classes
from ckptx.architecture.trainer_naming.mtp import mtp_layers
from ckptx.architecture.trainer_naming.scheme import TrainerScheme
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.ops import Conversion, Op

# Forms of the names, by what a class has in addition to the common names.
FORMS = ("complex_rope", "head_norms", "head_norms_and_experts", "latent_attention_and_experts")
_COMPLEX_ROPE, _, _WITH_EXPERTS, _LATENT_ATTENTION = FORMS

# (torchtitan name, disk name).
_COMMON_NAMES = (
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("layers.*.attention.wo.weight", "model.layers.*.self_attn.o_proj.weight"),
    ("layers.*.feed_forward.w1.weight", "model.layers.*.mlp.gate_proj.weight"),
    ("layers.*.feed_forward.w3.weight", "model.layers.*.mlp.up_proj.weight"),
    ("layers.*.feed_forward.w2.weight", "model.layers.*.mlp.down_proj.weight"),
    ("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight"),
    ("layers.*.ffn_norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    ("norm.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
)
# Names in the forms without latent attention. In the form "complex_rope", the rows of `_ROPE_NAMES` are permuted.
_VALUE_NAMES = (("layers.*.attention.qkv_linear.wv.weight", "model.layers.*.self_attn.v_proj.weight"),)
_ROPE_NAMES = (  # q before k, as in `_head_counts`
    ("layers.*.attention.qkv_linear.wq.weight", "model.layers.*.self_attn.q_proj.weight"),
    ("layers.*.attention.qkv_linear.wk.weight", "model.layers.*.self_attn.k_proj.weight"),
)
_QK_NORM_NAMES = (
    ("layers.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight"),
    ("layers.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight"),
)
_ROUTER_NAMES = (("layers.*.moe.router.gate.weight", "model.layers.*.mlp.gate.weight"),)
# The experts of a layer are one tensor per projection.
_EXPERT_NAMES = (
    ("layers.*.moe.routed_experts.inner_experts.w1_EFD", "model.layers.*.mlp.experts.*.gate_proj.weight"),
    ("layers.*.moe.routed_experts.inner_experts.w3_EFD", "model.layers.*.mlp.experts.*.up_proj.weight"),
    ("layers.*.moe.routed_experts.inner_experts.w2_EDF", "model.layers.*.mlp.experts.*.down_proj.weight"),
)
# Multi-head latent attention, and in MoE layers the shared experts and the bias of each expert.
_LATENT_ATTENTION_NAMES = (
    ("layers.*.attention.wq.weight", "model.layers.*.self_attn.q_proj.weight"),
    ("layers.*.attention.wq_a.weight", "model.layers.*.self_attn.q_a_proj.weight"),
    ("layers.*.attention.q_norm.weight", "model.layers.*.self_attn.q_a_layernorm.weight"),
    ("layers.*.attention.wq_b.weight", "model.layers.*.self_attn.q_b_proj.weight"),
    ("layers.*.attention.wkv_a.weight", "model.layers.*.self_attn.kv_a_proj_with_mqa.weight"),
    ("layers.*.attention.kv_norm.weight", "model.layers.*.self_attn.kv_a_layernorm.weight"),
    ("layers.*.attention.wkv_b.weight", "model.layers.*.self_attn.kv_b_proj.weight"),
    ("layers.*.moe.shared_experts.w1.weight", "model.layers.*.mlp.shared_experts.gate_proj.weight"),
    ("layers.*.moe.shared_experts.w3.weight", "model.layers.*.mlp.shared_experts.up_proj.weight"),
    ("layers.*.moe.shared_experts.w2.weight", "model.layers.*.mlp.shared_experts.down_proj.weight"),
    ("layers.*.moe.expert_bias_E", "model.layers.*.mlp.gate.e_score_correction_bias"),
)
# Names of an MTP layer besides those of any layer.
_MTP_NAMES = (
    ("layers.*.enorm.weight", "model.layers.*.enorm.weight"),
    ("layers.*.hnorm.weight", "model.layers.*.hnorm.weight"),
    ("layers.*.eh_proj.weight", "model.layers.*.eh_proj.weight"),
    ("layers.*.mtp_norm.weight", "model.layers.*.shared_head.norm.weight"),
)
# Names in torchtitan 0.2.2 and earlier.
_LEGACY_NAMES = {
    "layers.*.attention.qkv_linear.wq.weight": "layers.*.attention.wq.weight",
    "layers.*.attention.qkv_linear.wk.weight": "layers.*.attention.wk.weight",
    "layers.*.attention.qkv_linear.wv.weight": "layers.*.attention.wv.weight",
    "layers.*.moe.routed_experts.inner_experts.w1_EFD": "layers.*.moe.experts.w1",
    "layers.*.moe.routed_experts.inner_experts.w3_EFD": "layers.*.moe.experts.w3",
    "layers.*.moe.routed_experts.inner_experts.w2_EDF": "layers.*.moe.experts.w2",
    "layers.*.moe.expert_bias_E": "layers.*.moe.expert_bias",
    "lm_head.weight": "output.weight",
}
_BUFFERS = frozenset({"layers.*.moe.expert_bias_E", "layers.*.moe.expert_bias"})
_EXPERTS = re.compile(r"((?:mtp_)?layers\.\d+\.moe)\.routed_experts\.inner_experts\.w1_EFD")


def form_of(class_name: str) -> str | None:
    """Return the form of the names of a class, one of `FORMS`; None if torchtitan has no model of it."""
    return find_form("torchtitan", class_name, FORMS)


def conversions(class_name: str, config: Mapping[str, Any]) -> tuple[Conversion, ...]:
    """Return the conversions from torchtitan's names to disk names; in reverse, they give the names of torchtitan 0.3.

    Args:
        class_name: Name as in `architectures` of `config.json`.
        config: Contents of `config.json`.

    Raises:
        UnsupportedError: torchtitan has no such model, or has it without these biases.
        InputError: The config does not give the number of heads.
    """
    form = form_of(class_name)
    if form is None:
        known = ", ".join(list_classes("torchtitan"))
        raise UnsupportedError(f"{class_name}: torchtitan names are known for {known} only; keep the names of the Hub")
    for key in ("attention_bias", "mlp_bias"):
        if read_flag(config, (key,)):
            raise UnsupportedError(
                f"config.json: {key} is true, but torchtitan's model has no biases there; keep the names of the Hub"
            )
    current = [Conversion((name,), (hub,)) for name, hub in _COMMON_NAMES]
    if form == _LATENT_ATTENTION:
        current += [Conversion((name,), (hub,)) for name, hub in _LATENT_ATTENTION_NAMES]
    elif form == _COMPLEX_ROPE:
        current += [Conversion((name,), (hub,)) for name, hub in _VALUE_NAMES]
        current += [
            Conversion((name,), (hub,), (Op("permute_rope", args=(heads, 0)),))
            for (name, hub), heads in zip(_ROPE_NAMES, _head_counts(config), strict=True)
        ]
    else:
        current += [Conversion((name,), (hub,)) for name, hub in (*_VALUE_NAMES, *_ROPE_NAMES, *_QK_NORM_NAMES)]
    if form in (_WITH_EXPERTS, _LATENT_ATTENTION):
        current += [Conversion((name,), (hub,)) for name, hub in _ROUTER_NAMES]
        current += [Conversion((name,), (hub,), (Op("unmerge"),)) for name, hub in _EXPERT_NAMES]
    legacy = [
        Conversion((_LEGACY_NAMES[each.sources[0]],), each.targets, each.ops)
        for each in current
        if each.sources[0] in _LEGACY_NAMES
    ]
    # On the Hub, MTP layers are layers after the last one, whose names the conversions of layers match, too. So those
    # of MTP layers come first: in reverse, the first conversion that matches is used.
    return (*(_mtp_conversions(current, config) if form == _LATENT_ATTENTION else ()), *current, *legacy)


def _mtp_conversions(model_conversions: list[Conversion], config: Mapping[str, Any]) -> Iterator[Conversion]:
    """Yield the conversions of the MTP layers: layer k in `mtp_layers` is layer `num_hidden_layers` + k on the Hub.

    Args:
        model_conversions: Conversions of the model itself; the tensors of its layers are also those of MTP layers.
        config: Contents of `config.json`.

    Raises:
        InputError: See `mtp_layers`.
    """
    conversions = [*model_conversions, *(Conversion((name,), (hub,)) for name, hub in _MTP_NAMES)]
    for index, layer in enumerate(mtp_layers(config)):
        for each in conversions:
            name, hub = each.sources[0], each.targets[0]
            if name.startswith("layers.*."):
                name = name.replace("layers.*", f"mtp_layers.{index}", 1)
                yield Conversion((name,), (hub.replace("layers.*", f"layers.{layer}", 1),), each.ops)


def buffers_to_add(tensors: Mapping[str, TensorEntry]) -> Iterator[TensorEntry]:
    """Yield an entry without chunks for `expert_bias_E`, F32 of shape [experts], of each MoE layer that lacks it.

    torchtitan's models have it unless `load_balance_coeff` is None, and load no checkpoint without it.

    Args:
        tensors: Tensors under torchtitan's names.
    """
    for name, entry in tensors.items():
        found = _EXPERTS.fullmatch(name)
        if found is not None and f"{found[1]}.expert_bias_E" not in tensors:
            yield TensorEntry(f"{found[1]}.expert_bias_E", DTYPES_BY_NAME["F32"], entry.shape[:1], ())


def _head_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of heads of q, and of k.

    Raises:
        InputError: The config does not give them.
    """
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise InputError(
            f"config.json: num_attention_heads is {heads!r} and must be the number of heads, which torchtitan's order "
            "of rows depends on; take config.json from the original model"
        )
    return heads, kv_heads


SCHEME = TrainerScheme(
    trainer="torchtitan",
    markers=frozenset({"tok_embeddings.weight"}),
    has_model=lambda class_name: form_of(class_name) is not None,
    conversions=conversions,
    buffers=_BUFFERS,
    buffers_to_add=buffers_to_add,
)
