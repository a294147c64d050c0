"""Tables of Megatron's names, by form. A row has a Megatron name, an operation, and the name or names on the Hub.

They follow the mappings of Megatron Bridge (`mapping_registry` in `src/megatron/bridge/models/*/*_bridge.py`) with the
names that megatron-core stores: experts of a layer are one tensor, and norms are where the spec of the layer has them.
The section `megatron` of the corrections of a model type names the form of a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Operations of the tables, from Megatron to the Hub; `megatron` describes the order of rows.
# SAME: only the name differs. VOCABULARY_ROWS: drop the padding rows. QKV, GATE_UP: split the fused projection.
# EXPERTS: split the tensor of all experts into one for each. GATE_UP_OF_EXPERTS: GATE_UP and EXPERTS together.
SAME, VOCABULARY_ROWS, QKV, GATE_UP = "same", "vocabulary", "q, k and v", "gate and up"
EXPERTS, GATE_UP_OF_EXPERTS = "experts", "gate and up of experts"

# (Megatron name, operation, name on the Hub). Some tensors have two Megatron names: the layer norm before a linear
# layer is part of that layer with TransformerEngine, and a module of its own without. ckptx writes the first of them.
_EMBEDDING = (
    ("embedding.word_embeddings.weight", VOCABULARY_ROWS, "model.embed_tokens.weight"),
    ("decoder.final_layernorm.weight", SAME, "model.norm.weight"),
)
_OUTER = (*_EMBEDDING, ("output_layer.weight", VOCABULARY_ROWS, "lm_head.weight"))
_OUTPUT_PROJECTION = (
    ("decoder.layers.*.self_attention.linear_proj.weight", SAME, "model.layers.*.self_attn.o_proj.weight"),
)
_LAYER = (
    *_OUTPUT_PROJECTION,
    ("decoder.layers.*.mlp.linear_fc1.layer_norm_weight", SAME, "model.layers.*.post_attention_layernorm.weight"),
    ("decoder.layers.*.pre_mlp_layernorm.weight", SAME, "model.layers.*.post_attention_layernorm.weight"),
)
_QKV_WEIGHT = (
    ("decoder.layers.*.self_attention.linear_qkv.weight", QKV, "model.layers.*.self_attn.{q,k,v}_proj.weight"),
)
_ATTENTION = (*_OUTPUT_PROJECTION, *_QKV_WEIGHT)
COMMON = (
    *_OUTER,
    *_LAYER,
    ("decoder.layers.*.self_attention.linear_qkv.layer_norm_weight", SAME, "model.layers.*.input_layernorm.weight"),
    ("decoder.layers.*.input_layernorm.weight", SAME, "model.layers.*.input_layernorm.weight"),
    *_QKV_WEIGHT,
)
# Multi-head latent attention: q and kv each have a projection down, a norm, and a projection up. In some models, q has
# a single projection (`q_proj`) instead.
_LATENT_PROJECTIONS = (
    ("decoder.layers.*.input_layernorm.weight", SAME, "model.layers.*.input_layernorm.weight"),
    ("decoder.layers.*.self_attention.linear_q_proj.weight", SAME, "model.layers.*.self_attn.q_proj.weight"),
    ("decoder.layers.*.self_attention.linear_q_down_proj.weight", SAME, "model.layers.*.self_attn.q_a_proj.weight"),
    ("decoder.layers.*.self_attention.linear_q_up_proj.weight", SAME, "model.layers.*.self_attn.q_b_proj.weight"),
    (
        "decoder.layers.*.self_attention.linear_kv_down_proj.weight",
        SAME,
        "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
    ),
    ("decoder.layers.*.self_attention.linear_kv_up_proj.weight", SAME, "model.layers.*.self_attn.kv_b_proj.weight"),
)
_FUSED_LATENT_NORMS = (
    (
        "decoder.layers.*.self_attention.linear_q_up_proj.layer_norm_weight",
        SAME,
        "model.layers.*.self_attn.q_a_layernorm.weight",
    ),
    (
        "decoder.layers.*.self_attention.linear_kv_up_proj.layer_norm_weight",
        SAME,
        "model.layers.*.self_attn.kv_a_layernorm.weight",
    ),
)
_LATENT_NORMS = (
    ("decoder.layers.*.self_attention.q_layernorm.weight", SAME, "model.layers.*.self_attn.q_a_layernorm.weight"),
    ("decoder.layers.*.self_attention.kv_layernorm.weight", SAME, "model.layers.*.self_attn.kv_a_layernorm.weight"),
)
# The indexer of sparse attention (DSA) selects the tokens of each layer, or of several. It reads q after its norm, so
# that this norm is no part of a linear layer, also with TransformerEngine.
_INDEXER = tuple(
    (
        f"decoder.layers.*.self_attention.core_attention.indexer.{name}",
        SAME,
        f"model.layers.*.self_attn.indexer.{name.removeprefix('linear_')}",
    )
    for name in ("linear_wq_b.weight", "linear_wk.weight", "linear_weights_proj.weight", "k_norm.weight", "k_norm.bias")
)
_DENSE_MLP = (
    ("decoder.layers.*.mlp.linear_fc1.weight", GATE_UP, "model.layers.*.mlp.{gate,up}_proj.weight"),
    ("decoder.layers.*.mlp.linear_fc2.weight", SAME, "model.layers.*.mlp.down_proj.weight"),
)
_QKV_BIAS = (("decoder.layers.*.self_attention.linear_qkv.bias", QKV, "model.layers.*.self_attn.{q,k,v}_proj.bias"),)
_HEAD_NORMS = (
    ("decoder.layers.*.self_attention.q_layernorm.weight", SAME, "model.layers.*.self_attn.q_norm.weight"),
    ("decoder.layers.*.self_attention.k_layernorm.weight", SAME, "model.layers.*.self_attn.k_norm.weight"),
)
# Norms that follow attention and MLP, in place of preceding them: each is part of the linear layer before it.
_POST_NORMS = (
    (
        "decoder.layers.*.self_attention.linear_proj.post_layernorm.weight",
        SAME,
        "model.layers.*.post_attention_layernorm.weight",
    ),
    (
        "decoder.layers.*.mlp.linear_fc2.post_layernorm.weight",
        SAME,
        "model.layers.*.post_feedforward_layernorm.weight",
    ),
)
_ROUTER = (("decoder.layers.*.mlp.router.weight", SAME, "model.layers.*.mlp.gate.weight"),)
_ROUTED_EXPERTS = (
    (
        "decoder.layers.*.mlp.experts.experts.linear_fc1.weight",
        GATE_UP_OF_EXPERTS,
        "model.layers.*.mlp.experts.*.{gate,up}_proj.weight",
    ),
    (
        "decoder.layers.*.mlp.experts.experts.linear_fc2.weight",
        EXPERTS,
        "model.layers.*.mlp.experts.*.down_proj.weight",
    ),
)
# Experts for every token, next to those that the router selects.
_SHARED_EXPERTS = (
    (
        "decoder.layers.*.mlp.shared_experts.linear_fc1.weight",
        GATE_UP,
        "model.layers.*.mlp.shared_experts.{gate,up}_proj.weight",
    ),
    (
        "decoder.layers.*.mlp.shared_experts.linear_fc2.weight",
        SAME,
        "model.layers.*.mlp.shared_experts.down_proj.weight",
    ),
)
# Shared experts and router under other names on the Hub, and the bias of each expert for load balancing.
_SHARED_MLP = (
    ("decoder.layers.*.mlp.router.weight", SAME, "model.layers.*.mlp.router.gate.weight"),
    ("decoder.layers.*.mlp.router.expert_bias", SAME, "model.layers.*.mlp.expert_bias"),
    (
        "decoder.layers.*.mlp.shared_experts.linear_fc1.weight",
        GATE_UP,
        "model.layers.*.mlp.shared_mlp.{gate,up}_proj.weight",
    ),
    ("decoder.layers.*.mlp.shared_experts.linear_fc2.weight", SAME, "model.layers.*.mlp.shared_mlp.down_proj.weight"),
)
_BLOCK_SPARSE_EXPERTS = (
    ("decoder.layers.*.mlp.router.weight", SAME, "model.layers.*.block_sparse_moe.gate.weight"),
    (
        "decoder.layers.*.mlp.experts.experts.linear_fc1.weight",
        GATE_UP_OF_EXPERTS,
        "model.layers.*.block_sparse_moe.experts.*.{w1,w3}.weight",
    ),
    (
        "decoder.layers.*.mlp.experts.experts.linear_fc2.weight",
        EXPERTS,
        "model.layers.*.block_sparse_moe.experts.*.w2.weight",
    ),
)


def _expert_bias(module: str) -> tuple[tuple[str, str, str], ...]:
    """Return the row of the bias of each expert for load balancing, which is in this module of a layer on the Hub."""
    hub = f"model.layers.*.{module}.e_score_correction_bias"
    return (("decoder.layers.*.mlp.router.expert_bias", SAME, hub),)


_LATENT_ATTENTION = (*_OUTER, *_LAYER, *_LATENT_PROJECTIONS, *_FUSED_LATENT_NORMS, *_LATENT_NORMS)
_SPARSE_ATTENTION = (*_OUTER, *_LAYER, *_LATENT_PROJECTIONS, *_LATENT_NORMS, *_FUSED_LATENT_NORMS, *_INDEXER)
_EXPERT_MLP = (*_DENSE_MLP, *_ROUTER, *_ROUTED_EXPERTS)  # some layers can be dense
_SHARED_EXPERT_MLP = (*_EXPERT_MLP, *_SHARED_EXPERTS)

# Tables by form, which the corrections of a model type name.
FORMS = {
    "plain": (*COMMON, *_DENSE_MLP),
    "qkv_bias": (*COMMON, *_QKV_BIAS, *_DENSE_MLP),
    "head_norms": (*COMMON, *_HEAD_NORMS, *_DENSE_MLP),
    "post_norms": (*_EMBEDDING, *_ATTENTION, *_HEAD_NORMS, *_POST_NORMS, *_DENSE_MLP),  # with a tied output head
    "head_norms_and_experts": (*COMMON, *_HEAD_NORMS, *_EXPERT_MLP),
    "block_sparse_moe": (*COMMON, *_BLOCK_SPARSE_EXPERTS),
    "head_norms_and_block_sparse_moe": (
        *COMMON,
        *_HEAD_NORMS,
        *_BLOCK_SPARSE_EXPERTS,
        *_expert_bias("block_sparse_moe"),
    ),
    "shared_experts": (*COMMON, *_QKV_BIAS, *_HEAD_NORMS, *_SHARED_EXPERT_MLP, *_expert_bias("mlp.gate")),
    "shared_experts_and_mtp_module": (*COMMON, *_HEAD_NORMS, *_SHARED_EXPERT_MLP, *_expert_bias("mlp")),
    "shared_mlp": (*COMMON, *_HEAD_NORMS, *_DENSE_MLP, *_ROUTED_EXPERTS, *_SHARED_MLP),
    "latent_attention_and_experts": (*_LATENT_ATTENTION, *_SHARED_EXPERT_MLP, *_expert_bias("mlp.gate")),
    "sparse_attention_and_experts": (*_SPARSE_ATTENTION, *_SHARED_EXPERT_MLP, *_expert_bias("mlp.gate")),
}

# Module with the decoder layer of an MTP layer; it has another name in megatron-core 0.16 and earlier.
MTP_LAYER, OLD_MTP_LAYER = "mtp_model_layer", "transformer_layer"


class MtpForm(NamedTuple):
    """Names on the Hub of layers for multi-token prediction (MTP).

    In these names, `K` stands for the index of the layer among the MTP layers, from 0, and `L` for `num_hidden_layers`
    + `K`.

    Attributes:
        modules: Module of `mtp.layers.K` in Megatron -> name of the module on the Hub; both without `.weight`.
        layer: Name of the decoder layer on the Hub.
        decoder: Table with the names in the decoder layer; None for the table of the form.
        max_count: Largest number of MTP layers whose names are known; None for no limit.
        has_copies: True if each layer on the Hub has copies of the embedding and the output head.
    """

    modules: Mapping[str, str]
    layer: str = "model.layers.L"
    decoder: tuple[tuple[str, str, str], ...] | None = None
    max_count: int | None = None
    has_copies: bool = False


_MTP_OF_LAYERS = MtpForm(
    {
        "enorm": "model.layers.L.enorm",
        "hnorm": "model.layers.L.hnorm",
        "eh_proj": "model.layers.L.eh_proj",
        "final_layernorm": "model.layers.L.shared_head.norm",
    },
    has_copies=True,
)
MTP_FORMS = {
    "shared_experts": _MTP_OF_LAYERS,
    "latent_attention_and_experts": _MTP_OF_LAYERS,
    "sparse_attention_and_experts": _MTP_OF_LAYERS,
    "shared_mlp": MtpForm(
        {name: f"model.layers.L.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
    ),
    # On the Hub, all MTP layers share `modules`, whose names have no index; so only one layer can be mapped.
    "shared_experts_and_mtp_module": MtpForm(
        {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "final_layernorm": "mtp.norm",
        },
        layer="mtp.layers.K",
        decoder=(*COMMON, *_HEAD_NORMS, *_DENSE_MLP),
        max_count=1,
    ),
}
