"""Quantized weights keep what lies beside them under every name: kinds of quantization by recipes of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.architecture.lookup import find_architecture
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, full_region
from ckptx.errors import InputError
from ckptx.mapping.destinations import add_scale_destinations
from ckptx.mapping.ops import Conversion, Op
from ckptx.mapping.quantization_scales import add_scale_conversions, find_parent
from ckptx.mapping.rules import NameRules

BLOCK = 4
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}


class Kind(NamedTuple):
    """One way to quantize a weight: what lies in the place of `module.weight`, by the rest of the name."""

    tensors: Callable[[Shape], Mapping[str, tuple[str, Shape]]]
    config: dict[str, Any]
    is_fused: bool = False


def blocks(shape: Shape) -> Shape:
    return tuple(-(-size // BLOCK) for size in shape)


KINDS = {
    "fp8 in blocks": Kind(
        lambda s: {"weight": ("F8_E4M3", s), "weight_scale_inv": ("F32", blocks(s))}, FP8, is_fused=True
    ),
    "fp8 in blocks, static": Kind(
        lambda s: {"weight": ("F8_E4M3", s), "weight_scale_inv": ("F32", blocks(s)), "activation_scale": ("F32", ())},
        FP8 | {"activation_scheme": "static"},
    ),
    "fp8 whole": Kind(
        lambda s: {"weight": ("F8_E4M3", s), "weight_scale_inv": ("F32", ())}, FP8 | {"weight_block_size": None}
    ),
    "fp8 as .scale": Kind(lambda s: {"weight": ("F8_E4M3", s), "scale": ("F8_E8M0", blocks(s))}, FP8),
    "fp8 by row": Kind(
        lambda s: {"weight": ("F8_E4M3", s), "weight_scale": ("BF16", (s[0], 1)), "input_scale": ("F32", (1,))},
        {"quant_method": "compressed-tensors"},
    ),
    "int4 packed": Kind(
        lambda s: {
            "weight_packed": ("I32", (s[0], s[1] // 4)),
            "weight_scale": ("BF16", (s[0], 1)),
            "weight_shape": ("I64", (2,)),
        },
        {"quant_method": "compressed-tensors"},
    ),
    "GPTQ": Kind(
        lambda s: {
            "qweight": ("I32", (s[1] // 4, s[0])),
            "qzeros": ("I32", (1, s[0])),
            "scales": ("F16", (1, s[0])),
            "g_idx": ("I32", (s[1],)),
        },
        {"quant_method": "gptq"},
    ),
    "AWQ": Kind(
        lambda s: {"qweight": ("I32", (s[1], s[0] // 4)), "qzeros": ("I32", (1, s[0])), "scales": ("F16", (1, s[0]))},
        {"quant_method": "awq"},
    ),
    "bitsandbytes 4": Kind(
        lambda s: {
            "weight": ("U8", (s[0] * s[1] // 2, 1)),
            "weight.absmax": ("U8", (s[0],)),
            "weight.quant_map": ("F32", (16,)),
            "weight.nested_absmax": ("F32", (1,)),
            "weight.quant_state.bitsandbytes__nf4": ("U8", (90,)),
        },
        {"quant_method": "bitsandbytes"},
    ),
    "bitsandbytes 8": Kind(
        lambda s: {"weight": ("I8", s), "SCB": ("F32", (s[0],)), "weight_format": ("U8", ())},
        {"quant_method": "bitsandbytes"},
    ),
    "nvfp4": Kind(
        lambda s: {
            "weight": ("U8", (s[0], s[1] // 2)),
            "weight_scale": ("F8_E4M3", (s[0], 1)),
            "weight_scale_2": ("F32", ()),
            "input_scale": ("F32", ()),
        },
        {"quant_method": "modelopt"},
    ),
    "mxfp4": Kind(
        lambda s: {"weight_blocks": ("U8", (*s[:-1], 1, s[-1] // 2)), "weight_scales": ("U8", (*s[:-1], 1))},
        {"quant_method": "mxfp4"},
    ),
    "quanto": Kind(
        lambda s: {"weight._data": ("I8", s), "weight._scale": ("F32", (s[0], 1)), "input_scale": ("F32", ())},
        {"quant_method": "quanto"},
    ),
    "none": Kind(lambda s: {"weight": ("BF16", s)}, {}),
}


class Recipe(NamedTuple):
    """A class, and the modules of one of its layers with the shapes of their weights; `*` for an expert."""

    architecture: str
    model_type: str
    modules: dict[str, Shape]


def experts(at: str, gate: str, down: str, up: str) -> dict[str, Shape]:
    return {f"{at}.experts.*.{gate}": (8, 4), f"{at}.experts.*.{up}": (8, 4), f"{at}.experts.*.{down}": (4, 8)}


_ATTENTION: dict[str, Shape] = {"self_attn.q_proj": (8, 4), "self_attn.o_proj": (4, 8)}
_SPLIT = ("gate_proj", "down_proj", "up_proj")
RECIPES = {
    recipe.model_type: recipe
    for recipe in (
        Recipe("Qwen3MoeForCausalLM", "qwen3_moe", _ATTENTION | experts("mlp", *_SPLIT)),
        Recipe("DeepseekV3ForCausalLM", "deepseek_v3", experts("mlp", *_SPLIT)),
        Recipe("Glm4MoeForCausalLM", "glm4_moe", _ATTENTION | experts("mlp", *_SPLIT)),
        Recipe("JambaForCausalLM", "jamba", experts("feed_forward", *_SPLIT)),
        Recipe("MixtralForCausalLM", "mixtral", _ATTENTION | experts("block_sparse_moe", "w1", "w2", "w3")),
        Recipe("MiniMaxM2ForCausalLM", "minimax_m2", experts("block_sparse_moe", "w1", "w2", "w3")),
        Recipe(
            "GraniteMoeForCausalLM",
            "granitemoe",
            _ATTENTION | {"block_sparse_moe.input_linear": (16, 4), "block_sparse_moe.output_linear": (4, 8)},
        ),
        Recipe("Qwen2VLForConditionalGeneration", "qwen2_vl", _ATTENTION | {"mlp.down_proj": (4, 8)}),
        Recipe("LlamaForCausalLM", "llama", _ATTENTION),
    )
}

LAYERS = 2


def rules_of(recipe: Recipe, kind: Kind) -> NameRules:
    config = {"architectures": [recipe.architecture], "model_type": recipe.model_type, "num_hidden_layers": LAYERS}
    if kind.config:
        config["quantization_config"] = kind.config
    architecture = find_architecture(config)
    conversions = add_scale_conversions(architecture.conversions(config), config)
    return NameRules(conversions, architecture.base_prefix, architecture.model_name_patterns)


def modules_of(recipe: Recipe, count: int, prefix: str = "model.") -> dict[str, Shape]:
    found = {}
    for layer in range(LAYERS):
        for module, shape in recipe.modules.items():
            for expert in range(count if "*" in module else 1):
                found[f"{prefix}layers.{layer}.{module.replace('*', str(expert))}"] = shape
    return found


def stored(tensors: Mapping[str, tuple[str, Shape]]) -> dict[str, TensorEntry]:
    """Entries of their own files, so that a chunk says which tensor it is of."""
    found = {}
    for name, (dtype, shape) in tensors.items():
        nbytes = DTYPES_BY_NAME[dtype].nbytes(prod(shape))
        found[name] = TensorEntry(name, DTYPES_BY_NAME[dtype], shape, (Chunk(full_region(shape), name, 0, nbytes),))
    return found


def checkpoint(recipe: Recipe, kinds: Mapping[str, Kind], count: int) -> dict[str, TensorEntry]:
    """A checkpoint in which modules whose names hold a key of `kinds` are quantized like that."""
    tensors: dict[str, tuple[str, Shape]] = {"model.embed_tokens.weight": ("BF16", (4, 4))}
    for module, shape in modules_of(recipe, count).items():
        kind = next((kind for key, kind in kinds.items() if key in module), KINDS["none"])
        tensors |= {f"{module}.{tail}": row for tail, row in kind.tensors(shape).items()}
    return stored(tensors)


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(sorted(RECIPES)), st.sampled_from(sorted(KINDS)), st.integers(1, 12), st.sampled_from(["", "self"])
)
def test_what_lies_beside_a_weight_stays_with_it(recipe_name: str, kind_name: str, count: int, only: str) -> None:
    recipe, kind = RECIPES[recipe_name], KINDS[kind_name]
    rules = rules_of(recipe, kind)
    tensors = checkpoint(recipe, {only: kind}, count)
    renamed = rules.to_model(tensors)

    assert sorted(old for sources in renamed.sources.values() for old in sources) == sorted(tensors), "all accounted"
    assert renamed.tensors.keys() == renamed.sources.keys()
    became: dict[str, set[str]] = {}
    for new, sources in renamed.sources.items():
        for old in sources:
            became.setdefault(old, set()).add(new)
    for module, shape in modules_of(recipe, count).items():
        if only not in module:
            continue
        news = {tail: became[f"{module}.{tail}"] for tail in kind.tensors(shape)}
        flat = {tail: next(iter(names)) for tail, names in news.items()}
        assert all(len(names) == 1 for names in news.values())
        if any(not name.endswith(f".{tail}") for tail, name in flat.items()):  # one parameter of its own
            homes = {name.removesuffix(tail.removeprefix("weight")) for tail, name in flat.items()}
        else:
            homes = {name.removesuffix(f".{tail}") for tail, name in flat.items()}
        assert len(homes) == 1, "one module or parameter holds them all"
    back = rules.to_disk(renamed.tensors, disk_names=tensors)
    assert back.tensors.keys() == tensors.keys()
    for name, entry in tensors.items():
        assert (back.tensors[name].dtype, back.tensors[name].shape) == (entry.dtype, entry.shape)
        assert [chunk.file for chunk in back.tensors[name].chunks] == [name]


@pytest.mark.parametrize("recipe_name", [name for name, recipe in RECIPES.items() if "*" in "".join(recipe.modules)])
@pytest.mark.parametrize("count", [1, 3, 11])
def test_scales_of_blocks_are_fused_as_their_weights_are(recipe_name: str, count: int) -> None:
    recipe = RECIPES[recipe_name]
    rules = rules_of(recipe, KINDS["fp8 in blocks"])
    renamed = rules.to_model(checkpoint(recipe, {"": KINDS["fp8 in blocks"]}, count))
    fused = [name for name in renamed.tensors if name.endswith("experts.gate_up_proj")]
    assert len(fused) == LAYERS and not renamed.unconverted
    for name in fused:
        scales = renamed.tensors[f"{name}_scale_inv"]
        assert (renamed.tensors[name].shape, scales.shape) == ((count, 16, 4), (count, 16 // BLOCK, 1))
        assert [f"{old}_scale_inv" for old in renamed.sources[name]] == list(renamed.sources[f"{name}_scale_inv"])
        assert {region.offsets: file for region, file, *_ in scales.chunks} == {
            (offsets[0], offsets[1] // BLOCK, offsets[2] // BLOCK): f"{file}_scale_inv"
            for (offsets, _), file, *_ in renamed.tensors[name].chunks
        }


OPS_FOR_BLOCKS = [
    Op("merge"), Op("merge", 1), Op("unmerge"), Op("concat"), Op("concat", 1), Op("chunk"), Op("chunk", args=(3,)),
    Op("same"), Op("transpose", 0, 1),
]  # fmt: skip
OTHER_OPS = [
    Op("concat", args=(8, 4)), Op("split", args=(8, 4)), Op("split"), Op("transpose", 0, 1, (1,)), Op("interleave"),
    Op("interleave", args=(1,)), Op("permute_rope", args=(2, 0)), Op("unsupported:Conv3dToLinear"),
]  # fmt: skip


@pytest.mark.parametrize("op", [*OPS_FOR_BLOCKS, *OTHER_OPS], ids=str)
@pytest.mark.parametrize("others", [(), (Op("merge"),)], ids=["alone", "after merge"])
def test_scales_go_only_through_ops_that_mean_the_same_for_blocks(op: Op, others: tuple[Op, ...]) -> None:
    """Sizes count elements of weights, not blocks, and a shape or a head of the weights is none of the scales."""
    conversion = Conversion(("a.*.weight",), ("b.weight",), (*others, op))
    scales = Conversion(("a.*.weight_scale_inv",), ("b.weight_scale_inv",), conversion.ops)
    found = add_scale_conversions([conversion], {"quantization_config": FP8})
    assert found == ((conversion, scales) if op in OPS_FOR_BLOCKS else (conversion,))


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.config and not kind.is_fused])
def test_other_kinds_keep_their_names_and_it_is_said(kind: str) -> None:
    recipe = RECIPES["qwen3_moe"]
    tensors = checkpoint(recipe, {"experts": KINDS[kind]}, 3)
    renamed = rules_of(recipe, KINDS[kind]).to_model(tensors)
    assert renamed.tensors.keys() == tensors.keys()
    weights = [name for name in tensors if ".experts." in name and name.endswith(".weight")]
    assert {*renamed.unconverted} >= {*weights}
    assert bool(weights) == any("quantized, names unchanged" in note for note in renamed.notes)


@pytest.mark.parametrize("kind", ["fp8 in blocks", "fp8 by row"])
def test_layers_that_are_not_quantized_are_fused(kind: str) -> None:
    recipe = RECIPES["qwen3_moe"]
    renamed = rules_of(recipe, KINDS[kind]).to_model(checkpoint(recipe, {"layers.0.mlp": KINDS[kind]}, 3))
    assert "model.layers.1.mlp.experts.gate_up_proj" in renamed.tensors
    assert ("model.layers.0.mlp.experts.gate_up_proj" in renamed.tensors) == KINDS[kind].is_fused


@pytest.mark.parametrize("lost", ["experts.1.gate_proj.weight_scale_inv", "experts.2.up_proj.weight_scale_inv"])
def test_a_lost_scale_is_named(lost: str) -> None:
    recipe, kind = RECIPES["qwen3_moe"], KINDS["fp8 in blocks"]
    tensors = checkpoint(recipe, {"": kind}, 3)
    del tensors[f"model.layers.0.mlp.{lost}"]
    with pytest.raises(InputError, match=f"{lost}.*missing, but required for"):
        rules_of(recipe, kind).to_model(tensors)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("a.q_proj.weight_scale_inv", "a.q_proj.weight"),
        ("a.q_proj.weight_scale_2", "a.q_proj.weight"),
        ("a.q_proj.qweight", "a.q_proj.weight"),
        ("a.q_proj.weight.quant_state.bitsandbytes__nf4", "a.q_proj.weight"),
        ("a.experts.gate_up_proj_blocks", "a.experts.gate_up_proj"),
        ("a.experts.other_blocks", None),
        ("rotary.inv_freq", None),
        ("weight_scale", None),
        ("", None),
    ],
)
def test_the_weight_that_something_belongs_to(name: str, weight: str | None) -> None:
    found = find_parent(name, {"a.q_proj.weight", "a.experts.gate_up_proj"}.__contains__)
    assert (None if found is None else found.weight) == weight


def test_names_of_one_pattern_are_looked_up_once_where_no_weight_can_lie_beside_them() -> None:
    names = [f"c.{expert}.up_proj.weight" for expert in range(9)] + [f"a.{layer}.qweight" for layer in range(3)]
    weights = {"a.1.weight", "a.2.weight"}
    asked: list[str] = []

    def place_of(weight: str) -> str | None:
        asked.append(weight)
        return f"b{weight[1:]}" if weight in weights else None

    settled = add_scale_destinations(
        dict.fromkeys(names), (), place_of, lambda place: "", lambda weight: weight == "a.*.weight"
    )
    assert {name: new for name, new in settled.destinations.items() if new} == {
        "a.1.qweight": "b.1.qweight",
        "a.2.qweight": "b.2.qweight",
    }
    assert not any("up_proj" in weight for weight in asked)
