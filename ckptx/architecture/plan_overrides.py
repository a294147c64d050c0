"""Tensor parallel rules for what the plans of transformers 5.23 leave out or get wrong, each with its reason.

Keyed by the model type of the text model, so that a composite has them for its text model too. Patterns are relative:
``@layers`` is a list of layers, ``@around`` the module that holds it. Expressions read the config of the text model.

A rule says which elements belong together, not how a forward pass would run: rows of ``[q|k|v]`` are three groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

from ckptx.architecture.expressions import keys_of
from ckptx.architecture.structure import Heads


class Override(NamedTuple):
    """One rule.

    Attributes:
        patterns: Of modules or parameters, alternatives in braces.
        style: As in `ckptx.layout.styles`.
        reason: Why the row is here.
        groups: Widths of what is fused along the cut dim, expressions.
        heads: Candidates for what the cut dim is made of, expressions.
        when: An expression; the row counts if it is not 0.
    """

    patterns: str
    style: str
    reason: str
    groups: tuple[str, ...] = ()
    heads: Heads = ()
    when: str = "1"


class Absent(NamedTuple):
    """Tensors that the layers from `first` on do not have, or do not use where they are on disk."""

    patterns: str
    first: str
    reason: str


_H = "num_attention_heads"
_KV = "num_key_value_heads ?? num_attention_heads"
_SIZE = "head_dim ?? hidden_size // num_attention_heads"
_PLAIN = "hidden_size // num_attention_heads"
_NO_PLAN = "transformers has no plan for it"
_NO_ATTENTION = "the plan of transformers leaves attention out"


def _attention(where: str, reason: str, out: str = "o_proj") -> tuple[Override, ...]:
    """Separate q, k, v and an output projection, with or without grouped keys."""
    return (
        Override(f"@layers.*.{where}.q_proj", "colwise", reason, heads=((_H, _SIZE),)),
        Override(f"@layers.*.{where}.{{k_proj,v_proj}}", "colwise", reason, heads=((_KV, _SIZE),)),
        Override(f"@layers.*.{where}.{out}", "rowwise", reason, heads=((_H, _SIZE),)),
    )


def _mlp(into: str, out: str, reason: str = _NO_PLAN) -> tuple[Override, ...]:
    return Override(f"@layers.*.{into}", "colwise", reason), Override(f"@layers.*.{out}", "rowwise", reason)


_LLAMA = (*_attention("self_attn", _NO_PLAN), *_mlp("mlp.{gate_proj,up_proj}", "mlp.down_proj"))
_LATENT = (
    Override(
        "@layers.*.self_attn.{q_proj,q_b_proj}", "colwise", _NO_ATTENTION,
        heads=((_H, "qk_nope_head_dim + qk_rope_head_dim"),),
    ),
    Override("@layers.*.self_attn.kv_b_proj", "colwise", _NO_ATTENTION, heads=((_H, "qk_nope_head_dim + v_head_dim"),)),
    Override("@layers.*.self_attn.o_proj", "rowwise", _NO_ATTENTION, heads=((_H, "v_head_dim"),)),
    Override(
        "@layers.*.self_attn.{q_a_proj,kv_a_proj_with_mqa}", "replicate", "every head reads the whole latent vector",
    ),
)  # fmt: skip
_CROSS_HEADS = tuple(
    (f"{side}_attention_heads", f"d_model // {side}_attention_heads") for side in ("decoder", "encoder")
)
_BART = (
    Override("@layers.*.{self_attn,encoder_attn}.{q_proj,k_proj,v_proj}", "colwise", _NO_PLAN, heads=_CROSS_HEADS),
    Override("@layers.*.{self_attn,encoder_attn}.out_proj", "rowwise", _NO_PLAN, heads=_CROSS_HEADS),
    *_mlp("fc1", "fc2"),
    Override("@around.embed_tokens", "embedding_rowwise", _NO_PLAN),
)
_OPT = (*_attention("{self_attn,encoder_attn}", _NO_PLAN, "out_proj"), *_mlp("fc1", "fc2"))
_T5_HEADS = ((_H, "d_kv"),)
_T5 = (
    Override("@layers.*.layer.*.{SelfAttention,EncDecAttention}.{q,k,v}", "colwise", _NO_PLAN, heads=_T5_HEADS),
    Override("@layers.*.layer.*.{SelfAttention,EncDecAttention}.o", "rowwise", _NO_PLAN, heads=_T5_HEADS),
    Override(
        "@layers.*.layer.*.SelfAttention.relative_attention_bias", "embedding_colwise", "one column for each head",
        heads=((_H, "1"),),
    ),
    *_mlp("layer.*.DenseReluDense.{wi,wi_0,wi_1}", "layer.*.DenseReluDense.wo"),
    Override("@around.embed_tokens", "embedding_rowwise", _NO_PLAN),
)  # fmt: skip
_BERT_HEADS = ((_H, _PLAIN),)
_BERT = (
    Override("@layers.*.{attention,crossattention}.self.{query,key,value}", "colwise", _NO_PLAN, heads=_BERT_HEADS),
    Override("@layers.*.{attention,crossattention}.output.dense", "rowwise", _NO_PLAN, heads=_BERT_HEADS),
    *_mlp("intermediate.dense", "output.dense"),
)
# [q1 k1 v1 | q2 k2 v2 | ...]: one head after the other
_BY_HEAD = (
    Override(
        "@layers.*.{self_attention,self_attn,attention}.query_key_value", "colwise",
        "q, k and v of one head lie together", heads=((_H, f"3 * ({_PLAIN})"),), when="1",
    ),
    Override(
        "@layers.*.{self_attention,self_attn,attention}.dense", "rowwise", _NO_PLAN, heads=((_H, _PLAIN),),
    ),
    *_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)  # fmt: skip
_GPT2 = (
    Override(
        "@layers.*.attn.c_attn", "colwise", "a Conv1D of [q|k|v]", ("hidden_size",) * 3, ((f"3 * {_H}", _PLAIN),)
    ),
    Override(
        "@layers.*.crossattention.c_attn", "colwise", "a Conv1D of [k|v]", ("hidden_size",) * 2,
        ((f"2 * {_H}", _PLAIN),),
    ),
    Override("@layers.*.crossattention.q_attn", "colwise", "a Conv1D", heads=((_H, _PLAIN),)),
    Override("@layers.*.{attn,crossattention}.c_proj", "rowwise", "a Conv1D", heads=((_H, _PLAIN),)),
    *_mlp("mlp.c_fc", "mlp.c_proj", "a Conv1D"),
)  # fmt: skip
_INNER = "expand * hidden_size"
_MAMBA = (
    Override("@layers.*.mixer.in_proj", "colwise", "fused [x|z]", (_INNER, _INNER)),
    # its weight is [channels, 1, width]: the first of three dims, as of an embedding
    Override("@layers.*.mixer.conv1d", "embedding_rowwise", "one filter for each channel"),
    Override("@layers.*.mixer.{dt_proj,D}", "colwise", "channels"),
    Override("@layers.*.mixer.A_log", "embedding_rowwise", "channels"),
    Override("@layers.*.mixer.{x_proj,out_proj}", "rowwise", "reads channels"),
)
_GPT_OSS_EXPERTS = "@layers.*.mlp.experts."
_GPT_OSS = (
    *_attention("self_attn", "the plan of transformers has only an expert parallel part"),
    Override("@layers.*.self_attn.sinks", "colwise", "one number for each head", heads=((_H, "1"),)),
    # experts are stored [experts, in, out], with the columns g0 u0 g1 u1 ...
    Override(
        _GPT_OSS_EXPERTS + "gate_up_proj", "rowwise", "stored [experts, in, out], gate and up interleaved",
        heads=(("intermediate_size", "2"),),
    ),
    Override(
        _GPT_OSS_EXPERTS + "gate_up_proj_bias", "colwise", "as the columns of its weight",
        heads=(("intermediate_size", "2"),),
    ),
    Override(_GPT_OSS_EXPERTS + "down_proj", "colwise", "stored [experts, in, out]: its input is the middle dim"),
    Override(_GPT_OSS_EXPERTS + "down_proj_bias", "replicate", "added once, after the sum over ranks"),
    # mxfp4: [experts, rows, groups of 32 inputs, 16 bytes], and a scale for each group
    Override(
        _GPT_OSS_EXPERTS + "{gate_up_proj_blocks,gate_up_proj_scales}", "embedding_colwise",
        "rows are output features, gate and up interleaved", heads=(("intermediate_size", "2"),),
    ),
    Override(_GPT_OSS_EXPERTS + "down_proj_blocks", "colwise", "groups of input features are the dim before the last"),
    Override(_GPT_OSS_EXPERTS + "down_proj_scales", "rowwise", "one for each group of input features"),
)  # fmt: skip
_GEMMA4_GLOBAL = "full attention layers have heads of another size and number"
_GEMMA4 = (
    Override(
        "@layers.*.self_attn.{k_proj,v_proj}", "colwise", _GEMMA4_GLOBAL,
        heads=((_KV, _SIZE), (f"num_global_key_value_heads ?? {_KV}", "global_head_dim ?? 512")),
    ),
    Override(
        "@layers.*.self_attn.q_proj", "colwise", _GEMMA4_GLOBAL, heads=((_H, _SIZE), (_H, "global_head_dim ?? 512")),
    ),
    Override(
        "@layers.*.self_attn.o_proj", "rowwise", _GEMMA4_GLOBAL, heads=((_H, _SIZE), (_H, "global_head_dim ?? 512")),
    ),
)  # fmt: skip

_OF_A_HEAD = "a rank has some of the heads, so that its gradient is a part; the plan of transformers leaves it out"
_HEAD_NORMS = "@layers.*.self_attn.{q_norm,k_norm}"

OVERRIDES: Mapping[str, tuple[Override, ...]] = {
    **dict.fromkeys(
        ("qwen3_omni_moe_text", "qwen3_vl_moe_text"),
        (Override(_HEAD_NORMS, "replicated_with_grad_allreduce", _OF_A_HEAD),),
    ),
    "glm4_moe": (Override(_HEAD_NORMS, "replicated_with_grad_allreduce", _OF_A_HEAD, when="use_qk_norm ?? 0"),),
    "phi": (
        Override(
            "@layers.*.self_attn.{q_layernorm,k_layernorm}", "replicated_with_grad_allreduce", _OF_A_HEAD,
            when="qk_layernorm ?? 0",
        ),
    ),
    **dict.fromkeys(("emu3_text_model", "hunyuan_v1_dense", "hunyuan_vl_text", "qwen3_vl_text", "stablelm"), _LLAMA),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared", "hunyuan_v1_moe", "phimoe"), _attention("self_attn", _NO_ATTENTION)
    ),
    **dict.fromkeys(("deepseek_v3", "mistral4", "axk1", "youtu"), _LATENT),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("biogpt", "opt", "xglm"), _OPT),
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp", "pegasus",
            "plbart", "speech_to_text", "trocr", "whisper",
        ),
        _BART,
    ),
    **dict.fromkeys(("mt5", "t5", "umt5"), _T5),
    **dict.fromkeys(
        (
            "bert", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "roberta", "roc_bert",
            "xlm-roberta", "xlm-roberta-xl",
        ),
        _BERT,
    ),
    **dict.fromkeys(("bloom", "persimmon"), _BY_HEAD),
    **dict.fromkeys(("falcon_mamba", "mamba"), _MAMBA),
    # the mixers beside attention stay whole: several parts are fused in them
    **dict.fromkeys(
        ("bamba", "falcon_h1"),
        (*_attention("self_attn", _NO_PLAN), *_mlp("feed_forward.{gate_proj,up_proj}", "feed_forward.down_proj")),
    ),
    "lfm2": (*_attention("self_attn", _NO_PLAN, "out_proj"), *_mlp("feed_forward.{w1,w3}", "feed_forward.w2")),
    "lfm3": _mlp("feed_forward.{w1,w3}", "feed_forward.w2"),  # gates of attention: attention stays whole
    "mllama_text_model": (
        *_attention("{self_attn,cross_attn}", _NO_PLAN), *_mlp("mlp.{gate_proj,up_proj}", "mlp.down_proj"),
    ),
    # norms of all heads in one, or heads taken in pairs: attention stays whole
    **dict.fromkeys(("chameleon", "diffllama"), _mlp("mlp.{gate_proj,up_proj}", "mlp.down_proj")),
    "recurrent_gemma": _mlp("mlp_block.{gate_proj,up_proj}", "mlp_block.down_proj"),
    "mamba2": (
        Override(
            "@layers.*.mixer.{in_proj,conv1d,out_proj,norm}", "replicate",
            "five parts are fused, and the gated norm spans all of them",
        ),
    ),
    # where it is sparse, each value is held against mean and deviation of the whole row
    "gemma3n_text": (
        Override("@layers.*.mlp.{gate_proj,up_proj}", "colwise_gather_output", "sparsity is of a whole row"),
        Override("@layers.*.mlp.down_proj", "rowwise_split_input", "its input is whole"),
    ),
    "gpt_oss": _GPT_OSS,
    "gpt2": _GPT2,
    "gptj": (*_attention("attn", _NO_PLAN, "out_proj"), *_mlp("mlp.fc_in", "mlp.fc_out")),
    "gpt_neo": (*_attention("attn.attention", _NO_PLAN, "out_proj"), *_mlp("mlp.c_fc", "mlp.c_proj")),
    "codegen": _mlp("mlp.fc_in", "mlp.fc_out"),
    "gpt_bigcode": (
        Override(
            "@layers.*.attn.c_attn", "colwise", "one key and one value head after the queries",
            ("hidden_size", _PLAIN, _PLAIN), ((f"{_H} + 2", _PLAIN),), "multi_query",
        ),
        Override(
            "@layers.*.attn.c_attn", "colwise", "q, k and v of one head lie together",
            heads=((_H, f"3 * ({_PLAIN})"),), when="1 - multi_query",
        ),
        Override("@layers.*.attn.c_proj", "rowwise", _NO_PLAN, heads=((_H, _PLAIN),)),
        *_mlp("mlp.c_fc", "mlp.c_proj"),
    ),
    "falcon": (
        Override(
            "@layers.*.self_attention.query_key_value", "colwise", "a key and a value head after its queries",
            heads=((f"num_kv_heads ?? {_H}", f"({_H} // (num_kv_heads ?? {_H}) + 2) * ({_PLAIN})"),),
            when="new_decoder_architecture ?? 0",
        ),
        Override(
            "@layers.*.self_attention.query_key_value", "colwise", "one key and one value head after the queries",
            ("hidden_size", _PLAIN, _PLAIN), ((f"{_H} + 2", _PLAIN),),
            "(1 - (new_decoder_architecture ?? 0)) * (multi_query ?? 0)",
        ),
        Override(
            "@layers.*.self_attention.query_key_value", "colwise", "q, k and v of one head lie together",
            heads=((_H, f"3 * ({_PLAIN})"),),
            when="(1 - (new_decoder_architecture ?? 0)) * (1 - (multi_query ?? 0))",
        ),
        Override("@layers.*.self_attention.dense", "rowwise", _NO_PLAN, heads=((_H, _PLAIN),)),
        *_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "mpt": (
        Override("@layers.*.attn.Wqkv", "colwise", "fused [q|k|v]", ("hidden_size",) * 3, ((f"3 * {_H}", _PLAIN),)),
        Override("@layers.*.attn.out_proj", "rowwise", _NO_PLAN, heads=((_H, _PLAIN),)),
        *_mlp("ffn.up_proj", "ffn.down_proj"),
    ),
}  # fmt: skip

_SHARED_KV = Absent(
    "@layers.*.self_attn.{k_norm,k_proj,v_norm,v_proj}",
    "num_hidden_layers - (num_kv_shared_layers ?? 0)",
    "the layer uses the keys and values of an earlier one",
)
ABSENT: Mapping[str, tuple[Absent, ...]] = dict.fromkeys(
    ("gemma3n_text", "gemma4_text", "gemma4_unified_text"), (_SHARED_KV,)
)


def spelled_out(patterns: str) -> list[str]:
    """Every pattern of a text with braces.

    Example:
        a.{b,c}.d -> a.b.d, a.c.d
    """
    front, brace, rest = patterns.partition("{")
    if not brace:
        return [patterns]
    choices, _, back = rest.partition("}")
    return [front + choice + ending for choice in choices.split(",") for ending in spelled_out(back)]


def override_keys() -> dict[str, frozenset[str]]:
    """Per model type, the config keys that its rows read."""
    found: dict[str, frozenset[str]] = {}
    for model_type, rows in OVERRIDES.items():
        each = chain.from_iterable((*row.groups, *chain.from_iterable(row.heads), row.when) for row in rows)
        found[model_type] = frozenset(chain.from_iterable(map(keys_of, each)))
    for model_type, absent in ABSENT.items():
        found[model_type] = found.get(model_type, frozenset()).union(*(keys_of(row.first) for row in absent))
    return found
