"""`aligned` in the report of `reshard` is what the files say: every rank holds whole heads or groups of every part.

The parts of each projection are written down here from the config values and the modeling code of the class. Every
element of a tensor has its flat index as its value, so the shards themselves tell which rows and columns they hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptx
from ckptx.layout.composition import Composition, Compositions, holds_whole_parts
from ckptx.layout.placement import Placement
from tests.support.checkpoint_writers import array, write_hf

Parts = Sequence[tuple[int, int]]  # number of heads or features, size of one


class Tensor(NamedTuple):
    """A tensor, and what lies along its dims where that is more than plain features."""

    shape: tuple[int, ...]
    parts: Mapping[int, Parts] = {}


class Sample(NamedTuple):
    """A class with one layer: the projections of interest, and plans of a user for them."""

    architecture: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    plans: dict[str, dict[str, str]]


def linear(out: Parts, inner: Parts | int) -> Tensor:
    """An nn.Linear of these output and input features."""
    inputs: Parts = [(inner, 1)] if isinstance(inner, int) else inner
    return Tensor((sum(a * b for a, b in out), sum(a * b for a, b in inputs)), {0: out, 1: inputs})


H, INNER, V = 32, 48, 33  # hidden, intermediate and vocabulary size; 33 divides by 3 alone
GQA = [(8, 4)], [(2, 4)]  # query heads, key or value heads
SIZES = {
    "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 1, "vocab_size": V, "tie_word_embeddings": False,
}  # fmt: skip
ENDS = {"model.embed_tokens.weight": Tensor((V, H)), "lm_head.weight": Tensor((V, H))}
LAYER = "model.layers.0."
ANY = "model.layers.*."


def variants(fused: Mapping[str, Sequence[str]], prefix: str = ANY) -> dict[str, dict[str, str]]:
    """A plan for each style of a module, all modules at once: the n-th plan has the n-th style of each."""
    longest = max(map(len, fused.values()))
    return {
        f"user {number}": {f"{prefix}{module}": styles[number % len(styles)] for module, styles in fused.items()}
        for number in range(longest)
    }


STYLES = ("colwise", "packed_colwise", "rowwise", "colwise_gather_output", "packed_rowwise", "replicate")
QUERY, KEY = GQA
LINEAR_K, LINEAR_V = (4, 4), (8, 2)  # heads of gated linear attention
STATE = [(8, 8), (8, 8), (4, 2), (4, 2), (8, 1)]  # Mamba-2: gate, x, B, C, dt

SAMPLES: dict[str, Sample] = {
    "Llama": Sample(
        "LlamaForCausalLM",
        {"model_type": "llama", **SIZES},
        {
            **ENDS,
            f"{LAYER}self_attn.q_proj.weight": linear(QUERY, H),
            f"{LAYER}self_attn.k_proj.weight": linear(KEY, H),
            f"{LAYER}self_attn.v_proj.weight": linear(KEY, H),
            f"{LAYER}self_attn.o_proj.weight": linear([(H, 1)], QUERY),
            f"{LAYER}mlp.gate_proj.weight": linear([(INNER, 1)], H),
            f"{LAYER}mlp.down_proj.weight": linear([(H, 1)], INNER),
        },
        variants({f"self_attn.{name}_proj": STYLES for name in "qkvo"} | {"mlp.gate_proj": STYLES}),
    ),
    "Llama with 6 and 3 heads": Sample(
        "LlamaForCausalLM",
        {"model_type": "llama", **SIZES, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
        {
            **ENDS,
            f"{LAYER}self_attn.q_proj.weight": linear([(6, 4)], H),
            f"{LAYER}self_attn.q_proj.bias": Tensor((24,), {0: [(6, 4)]}),
            f"{LAYER}self_attn.k_proj.weight": linear([(3, 4)], H),
            f"{LAYER}self_attn.k_proj.bias": Tensor((12,), {0: [(3, 4)]}),
            f"{LAYER}self_attn.o_proj.weight": linear([(H, 1)], [(6, 4)]),
        },
        {"embedding only": {"model.embed_tokens": "embedding_rowwise"} | {
            f"{ANY}self_attn.{name}_proj": "replicate" for name in "qko"
        }},
    ),
    "OLMo 2, whose plan gathers queries": Sample(
        "Olmo2ForCausalLM",
        {"model_type": "olmo2", **SIZES},
        {
            f"{LAYER}self_attn.q_proj.weight": linear(QUERY, H),
            f"{LAYER}self_attn.k_proj.weight": linear(KEY, H),
            f"{LAYER}self_attn.o_proj.weight": linear([(H, 1)], QUERY),
        },
        {},
    ),
    "Phi-3": Sample(
        "Phi3ForCausalLM",
        {"model_type": "phi3", **SIZES},
        {
            **ENDS,
            f"{LAYER}self_attn.qkv_proj.weight": linear([*QUERY, *KEY, *KEY], H),
            f"{LAYER}self_attn.o_proj.weight": linear([(H, 1)], QUERY),
            f"{LAYER}mlp.gate_up_proj.weight": linear([(INNER, 1), (INNER, 1)], H),
            f"{LAYER}mlp.down_proj.weight": linear([(H, 1)], INNER),
        },
        variants(dict.fromkeys(("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"), STYLES)),
    ),
    "Phi-3 of 3 equal parts": Sample(
        "Phi3ForCausalLM",
        {"model_type": "phi3", **SIZES, "num_key_value_heads": 8},
        {f"{LAYER}self_attn.qkv_proj.weight": linear([*QUERY, *QUERY, *QUERY], H)},
        variants({"self_attn.qkv_proj": STYLES}),
    ),
    "GLM-4": Sample(
        "Glm4ForCausalLM",
        {"model_type": "glm4", **SIZES, "attention_bias": True},
        {
            f"{LAYER}self_attn.q_proj.weight": linear(QUERY, H),
            f"{LAYER}self_attn.q_proj.bias": Tensor((32,), {0: QUERY}),
            f"{LAYER}self_attn.k_proj.bias": Tensor((8,), {0: KEY}),
            f"{LAYER}mlp.gate_up_proj.weight": linear([(INNER, 1), (INNER, 1)], H),
        },
        variants({"mlp.gate_up_proj": STYLES}),
    ),
    "GPT-2, a Conv1D": Sample(
        "GPT2LMHeadModel",
        {"model_type": "gpt2", "n_embd": H, "n_head": 8, "n_layer": 1, "vocab_size": V, "n_positions": 8},
        {
            "transformer.h.0.attn.c_attn.weight": Tensor((H, 3 * H), {1: [*QUERY] * 3}),
            "transformer.h.0.attn.c_attn.bias": Tensor((3 * H,), {0: [*QUERY] * 3}),
            "transformer.h.0.attn.c_proj.weight": Tensor((H, H), {0: QUERY}),
            "transformer.h.0.mlp.c_fc.weight": Tensor((H, 4 * H)),
            "transformer.h.0.mlp.c_proj.weight": Tensor((4 * H, H)),
        },
        variants({"attn.c_attn": STYLES, "attn.c_proj": STYLES, "mlp.c_fc": ("colwise",)}, "transformer.h.*."),
    ),
    "Bloom, fused by head": Sample(
        "BloomForCausalLM",
        {"model_type": "bloom", "hidden_size": H, "n_head": 4, "n_layer": 1, "vocab_size": V},
        {
            "transformer.h.0.self_attention.query_key_value.weight": linear([(4, 24)], H),
            "transformer.h.0.self_attention.query_key_value.bias": Tensor((96,), {0: [(4, 24)]}),
            "transformer.h.0.self_attention.dense.weight": linear([(H, 1)], [(4, 8)]),
        },
        variants({"self_attention.query_key_value": STYLES}, "transformer.h.*."),
    ),
    "Falcon, one key head": Sample(
        "FalconForCausalLM",
        {"model_type": "falcon", "hidden_size": H, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": V,
         "multi_query": True, "new_decoder_architecture": False},
        {"transformer.h.0.self_attention.query_key_value.weight": linear([(4, 8), (1, 8), (1, 8)], H)},
        variants({"self_attention.query_key_value": STYLES}, "transformer.h.*."),
    ),
    "MPT": Sample(
        "MptForCausalLM",
        {"model_type": "mpt", "d_model": H, "n_heads": 8, "n_layers": 1, "vocab_size": V},
        {"transformer.blocks.0.attn.Wqkv.weight": linear([*QUERY] * 3, H)},
        variants({"attn.Wqkv": STYLES}, "transformer.blocks.*."),
    ),
    "ModernBERT, without a plan": Sample(
        "ModernBertForMaskedLM",
        {"model_type": "modernbert", "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": 8,
         "num_hidden_layers": 1, "vocab_size": V},
        {
            "model.layers.0.attn.Wqkv.weight": linear([*QUERY] * 3, H),
            "model.layers.0.mlp.Wi.weight": linear([(INNER, 1), (INNER, 1)], H),
        },
        variants({"attn.Wqkv": STYLES, "mlp.Wi": STYLES}),
    ),
    "LFM2, fused convolution": Sample(
        "Lfm2ForCausalLM",
        {"model_type": "lfm2", **SIZES, "layer_types": ["conv"], "conv_L_cache": 3},
        {"model.layers.0.conv.in_proj.weight": linear([(H, 1)] * 3, H)},
        variants({"conv.in_proj": STYLES}),
    ),
    "Mamba": Sample(
        "MambaForCausalLM",
        {"model_type": "mamba", "hidden_size": H, "num_hidden_layers": 1, "vocab_size": V, "expand": 2,
         "state_size": 4, "time_step_rank": 2, "conv_kernel": 4},
        {
            "backbone.layers.0.mixer.in_proj.weight": linear([(64, 1), (64, 1)], H),
            "backbone.layers.0.mixer.conv1d.weight": Tensor((64, 1, 4)),
            "backbone.layers.0.mixer.conv1d.bias": Tensor((64,)),
            "backbone.layers.0.mixer.x_proj.weight": linear([(2, 1), (4, 1), (4, 1)], 64),
            "backbone.layers.0.mixer.A_log": Tensor((64, 4)),
            "backbone.layers.0.mixer.out_proj.weight": linear([(H, 1)], 64),
        },
        variants({"mixer.in_proj": STYLES}, "backbone.layers.*."),
    ),
    "Mamba-2, which stays whole": Sample(
        "Mamba2ForCausalLM",
        {"model_type": "mamba2", "hidden_size": H, "num_hidden_layers": 1, "vocab_size": V, "expand": 2,
         "num_heads": 8, "head_dim": 8, "n_groups": 4, "state_size": 2, "conv_kernel": 4},
        {
            "backbone.layers.0.mixer.in_proj.weight": linear(STATE, H),
            "backbone.layers.0.mixer.conv1d.weight": Tensor((80, 1, 4), {0: [(8, 8), (4, 2), (4, 2)]}),
            "backbone.layers.0.mixer.conv1d.bias": Tensor((80,), {0: [(8, 8), (4, 2), (4, 2)]}),
            "backbone.layers.0.mixer.out_proj.weight": linear([(H, 1)], [(8, 8)]),
        },
        variants(
            {"mixer.in_proj": STYLES, "mixer.conv1d": ("embedding_rowwise",), "mixer.out_proj": ("rowwise",)},
            "backbone.layers.*.",
        ),
    ),
    "Qwen3-Next, gated linear attention": Sample(
        "Qwen3NextForCausalLM",
        {"model_type": "qwen3_next", **SIZES, "layer_types": ["linear_attention"], "linear_num_key_heads": 4,
         "linear_key_head_dim": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 2,
         "linear_conv_kernel_dim": 4, "num_experts": 0},
        {
            f"{LAYER}linear_attn.in_proj_qkvz.weight": linear([(4, 16)], H),
            f"{LAYER}linear_attn.in_proj_ba.weight": linear([(4, 4)], H),
            f"{LAYER}linear_attn.conv1d.weight": Tensor((48, 1, 4), {0: [LINEAR_K, LINEAR_K, LINEAR_V]}),
            f"{LAYER}linear_attn.out_proj.weight": linear([(H, 1)], [LINEAR_V]),
        },
        variants({
            "linear_attn.in_proj_qkvz": STYLES, "linear_attn.in_proj_ba": STYLES,
            "linear_attn.conv1d": ("embedding_rowwise",),
        }),
    ),
    "DeepSeek-V3, latent attention": Sample(
        "DeepseekV3ForCausalLM",
        {"model_type": "deepseek_v3", **SIZES, "num_attention_heads": 4, "num_key_value_heads": 4,
         "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8},
        {
            f"{LAYER}self_attn.q_b_proj.weight": linear([(4, 6)], 8),
            f"{LAYER}self_attn.kv_b_proj.weight": linear([(4, 8)], 8),
            f"{LAYER}self_attn.kv_a_proj_with_mqa.weight": linear([(8, 1), (2, 1)], H),
            f"{LAYER}self_attn.o_proj.weight": linear([(H, 1)], [(4, 4)]),
        },
        variants({f"self_attn.{name}_proj": STYLES for name in ("q_b", "kv_b")} | {
            "self_attn.kv_a_proj_with_mqa": STYLES
        }),
    ),
    "gpt-oss, gate and up interleaved": Sample(
        "GptOssForCausalLM",
        {"model_type": "gpt_oss", **SIZES, "num_local_experts": 4},
        {
            f"{LAYER}mlp.experts.gate_up_proj": Tensor((4, H, 2 * INNER), {2: [(INNER, 2)]}),
            f"{LAYER}mlp.experts.gate_up_proj_bias": Tensor((4, 2 * INNER), {1: [(INNER, 2)]}),
            f"{LAYER}mlp.experts.down_proj": Tensor((4, INNER, H)),
            f"{LAYER}self_attn.sinks": Tensor((8,)),
        },
        variants({"mlp.experts.gate_up_proj": ("packed_rowwise", "rowwise", "embedding_rowwise", "grouped_gemm")}),
    ),
    "Llama 4, experts [gate|up] in columns": Sample(
        "Llama4ForCausalLM",
        {"model_type": "llama4_text", **SIZES, "num_local_experts": 4, "interleave_moe_layer_step": 1,
         "intermediate_size_mlp": INNER, "moe_layers": [0]},
        {
            f"{LAYER}feed_forward.experts.gate_up_proj": Tensor((4, H, 2 * INNER), {2: [(INNER, 1), (INNER, 1)]}),
            f"{LAYER}feed_forward.experts.down_proj": Tensor((4, INNER, H)),
        },
        variants({"feed_forward.experts.gate_up_proj": ("rowwise", "packed_rowwise", "colwise", "embedding_rowwise")}),
    ),
    "a class that nothing is known about": Sample(
        "NovelForCausalLM",
        {"model_type": "novel", **SIZES},
        {
            f"{LAYER}self_attn.qkv_proj.weight": linear([*QUERY, *KEY, *KEY], H),
            f"{LAYER}self_attn.q_proj.weight": linear(QUERY, H),
            f"{LAYER}mlp.gate_up_proj.weight": linear([(INNER, 1), (INNER, 1)], H),
            f"{LAYER}mlp.up_proj.weight": linear([(INNER, 1)], H),
        },
        variants({
            "self_attn.qkv_proj": STYLES, "self_attn.q_proj": ("colwise", "rowwise", "packed_colwise"),
            "mlp.gate_up_proj": STYLES, "mlp.up_proj": ("colwise", "rowwise"),
        }),
    ),
}  # fmt: skip


def held_by_rank(root: Path, name: str, shape: tuple[int, ...], tp: int) -> tuple[int | None, list[list[int]]]:
    """The dim along which the files shard a tensor, and the indices along it that each rank holds, in file order."""
    by_rank: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(tp)]
    for file in sorted(root.glob("shard-*.safetensors")):
        rank = int(file.name.split("-")[1]) - 1
        found = load_file(file).get(name)
        if found is not None and found.size:
            by_rank[rank].append(found)
    coordinates = [[np.unravel_index(block.astype(np.int64), shape) for block in blocks] for blocks in by_rank]
    whole = prod(shape)
    if all(sum(map(np.size, blocks)) == whole for blocks in by_rank):
        return None, []
    (dim,) = {
        dim
        for dim, n in enumerate(shape)
        if any(
            blocks and len(np.unique(np.concatenate([each[dim].ravel() for each in blocks]))) < n
            for blocks in coordinates
        )
    }
    ordered = []
    for blocks in coordinates:
        along: list[int] = []
        for each in blocks:
            along += np.moveaxis(each[dim], dim, 0).reshape(each[dim].shape[dim], -1)[:, 0].tolist()
        ordered.append(along)
    return dim, ordered


def is_usable(held: Sequence[Sequence[int]], parts: Parts) -> bool:
    """Whether each rank has whole heads of every part, in order, and ranks continue where the one before ended."""
    starts = np.cumsum([0, *(count * size for count, size in parts)])
    has_structure = len(parts) > 1 or parts[0][1] > 1
    following = [0] * len(parts)
    for indices in held:
        if list(indices) != sorted(set(indices)):
            return False
        for number, (_, size) in enumerate(parts):
            begin, end = int(starts[number]), int(starts[number + 1])
            own = [index - begin for index in indices if begin <= index < end]
            heads = sorted({index // size for index in own})
            if len(own) != len(heads) * size or (has_structure and not heads):
                return False
            if heads and heads != list(range(following[number], following[number] + len(heads))):
                return False
            following[number] += len(heads)
    return following == [count for count, _ in parts]


def cases() -> list[Any]:
    return [
        pytest.param(sample, plan, tp, id=f"{sample}, {plan or 'plan of the class'}, tp {tp}")
        for sample, each in SAMPLES.items()
        for plan in ("", *each.plans)
        for tp in (2, 3, 4, 8)
    ]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("sample", "plan", "tp"), cases())
def test_aligned_says_what_the_files_hold(tmp_path: Path, sample: str, plan: str, tp: int) -> None:
    architecture, config, tensors, plans = SAMPLES[sample]
    values = {
        name: array(np.arange(prod(each.shape), dtype=np.float32).reshape(each.shape)) for name, each in tensors.items()
    }
    src = write_hf(tmp_path / "src", values, config={**config, "architectures": [architecture]})
    options: dict[str, Any] = {}
    if plan:
        (tmp_path / "plan.json").write_text(json.dumps(plans[plan]))
        options["tp_plan"] = str(tmp_path / "plan.json")
    if architecture != "NovelForCausalLM":
        options["names"] = "hf"
    report = ckptx.reshard(src, tmp_path / "dst", tp=tp, to="safetensors", allow_config_mismatch=True, **options)
    found, expected = {}, {}
    for name, (shape, parts) in tensors.items():
        dim, held = held_by_rank(tmp_path / "dst", name, shape, tp)
        if dim is not None:
            expected[name] = is_usable(held, parts.get(dim, [(shape[dim], 1)]))
            found[name] = name not in (report.unaligned_tensors or ())
    assert found == expected
    assert {row["aligned"] is not False for row in report.rules or ()} >= {*found.values()}
    assert any(note.startswith("not aligned:") for note in report.notes) is (False in found.values())


def test_the_samples_reach_both_answers() -> None:
    """A class whose own plan is aligned, one whose plan is not, and plans of users of either kind."""
    assert not is_usable([[0, 1, 2, 3], [4, 5, 6, 7]], [(2, 2), (1, 2), (1, 2)]), "a plain chunk of [q|k|v]"
    assert not is_usable([[0, 1], [2, 3], [4, 5]], [(2, 1), (2, 1), (2, 1)]), "rank 0 has q, rank 1 k, rank 2 v"
    assert not is_usable([[0, 1, 2], [3, 4, 5]], [(3, 2)]), "inside a head"
    assert not is_usable([[0, 1], [2, 3], []], [(2, 2)]), "a rank without a head"
    assert not is_usable([[2, 3], [0, 1]], [(2, 2)]), "in another order"
    assert is_usable([[0, 1, 4], [2, 3, 5]], [(2, 2), (2, 1)])
    assert is_usable([[0, 1], [2], []], [(3, 1)]), "features may be uneven"


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "parts", [[(8, 4)], [(8, 4), (2, 4), (2, 4)], [(24, 1), (24, 1)], [(3, 4)], [(5, 2), (7, 2)], [(4, 8), (8, 1)]]
)
def test_parts_that_a_placement_names_one_by_one_are_the_ones_that_count(parts: list[tuple[int, int]], tp: int) -> None:
    """Sharded part by part, a tensor is aligned if the heads of each divide; as one part it is only by chance."""
    widths = tuple(count * size for count, size in parts)
    by_part = holds_whole_parts((sum(widths), 3), Placement(0, widths), parts, tp)
    chunks = [-(-count * size // tp) for count, size in parts]
    is_whole = all(chunk % size == 0 for chunk, (_, size) in zip(chunks, parts, strict=True))
    is_held_by_all = all(chunk * (tp - 1) < width for chunk, width in zip(chunks, widths, strict=True))
    assert by_part is (is_whole and is_held_by_all)
    if len(parts) > 1:
        assert not holds_whole_parts((sum(widths), 3), Placement(0, (sum(widths),)), parts, tp)


@pytest.mark.parametrize(
    ("parts", "groups", "tp", "whole"),
    [
        ([(3, 1)], (3,), 4, True),  # plain features may leave a rank without any
        ([(3, 1), (3, 1)], (3, 3), 4, False),  # a part may not
        ([(3, 2)], (6,), 4, False),  # nor heads, even if the others are whole
        ([(2, 1), (2, 1)], (4,), 1, True),  # one rank has everything
        ([(2, 4), (3, 1), (1, 2)], (13,), 1, True),
    ],
)
def test_a_rank_may_lack_only_plain_features(
    parts: list[tuple[int, int]], groups: tuple[int, ...], tp: int, whole: bool
) -> None:
    shape = (sum(count * size for count, size in parts), 3)
    assert holds_whole_parts(shape, Placement(0, groups), parts, tp) is whole


def test_a_module_outside_the_layers_has_no_composition_by_default() -> None:
    found = Compositions({"proj": Composition("out", ())}, stacks=("model.layers",))
    assert found.find("model.layers.0.proj.weight") is not None
    assert found.find("tower.proj.weight") is None


def test_the_names_of_modules_find_their_composition() -> None:
    out, inner = Composition("out", (((2, 4),),)), Composition("in", (), 2)
    found = Compositions({"attn.proj": out, "proj": inner}, {"proj": out}, ("model.layers",))
    assert found.find("model.layers.0.attn.proj.weight") is out
    assert found.find("model.layers.0.mlp.proj.bias") is inner
    assert found.find("model.layers.0.experts.proj") is inner, "a fused expert is a parameter of its own"
    assert found.find("model.layers.0.experts.proj_bias") is inner
    assert found.find("tower.attn.proj.weight") is out
    assert found.find("model.layers.0.norm.weight") is None
    assert (out.parts(8), out.parts(9), inner.parts(6), inner.parts(7)) == (((2, 4),), None, ((3, 1), (3, 1)), None)
