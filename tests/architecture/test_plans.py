"""What the table says about cutting tensors: plans, overrides, layers, conversions, in numbers of a config."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptx.architecture import class_table, model_files
from ckptx.architecture.architecture import Architecture
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.plans import layer_overrides
from ckptx.architecture.structure import LoadConversion, StackRule, Structure
from ckptx.architecture.structure_decoding import decode_structure
from ckptx.errors import InputError
from ckptx.layout.placement import Placement
from ckptx.layout.styles import STYLES
from ckptx.layout.tensor_parallel_plan import decide_placement
from ckptx.mapping.ops import Conversion, Op
from tests.support.import_tool import tool

writer = tool("model_file_writer")

ROOT = Path(__file__).parent.parent.parent


def known(class_name: str) -> Architecture:
    found = class_table.lookup(class_name)
    assert found is not None, class_name
    return found


def cut(
    class_name: str, name: str, shape: tuple[int, ...], tp: int = 2, **config: Any
) -> tuple[Placement | None, bool]:
    decision = decide_placement(known(class_name).tensor_parallel_plan(config), name, shape, tp)
    return decision.placement, decision.aligned


# ----------------------------------------------------------------------------------------- plans


def test_the_model_s_own_plan_names_its_version() -> None:
    plan = known("LlamaForCausalLM").tensor_parallel_plan({})
    pattern, rule = plan.find_rule("model.layers.3.self_attn.q_proj.weight") or ("", None)
    assert pattern == "model.layers.*.self_attn.q_proj"
    assert rule is not None and rule.style == "colwise" and rule.decided_by == "model plan (transformers 5.23.0)"
    assert plan.find_rule("model.norm.weight") is None
    assert {rule.style for rule in plan.rules.values()} == {
        "colwise", "rowwise", "embedding_rowwise", "colwise_gather_output",
    }  # fmt: skip


def test_rules_that_match_nothing_are_left_out() -> None:
    plan = known("Llama4ForConditionalGeneration").structure.plan
    assert any(pattern.startswith("language_model.model.layers.") for pattern in plan)
    assert not any(pattern.startswith("language_model.layers.") for pattern in plan), "dead in transformers itself"


def test_every_style_of_the_table_is_known() -> None:
    styles = set()
    for class_name in model_files.class_names():
        found = class_table.lookup(class_name)
        styles |= set(found.structure.plan.values()) if found else set()
    assert len(styles) > 10
    assert styles <= set(STYLES)


GQA = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 96}


@pytest.mark.parametrize(
    ("class_name", "name", "shape", "config", "placement", "aligned"),
    [
        ("LlamaForCausalLM", "q_proj.weight", (96, 96), GQA, Placement(0, (96,), 12), True),
        ("LlamaForCausalLM", "k_proj.weight", (24, 96), GQA, Placement(0, (24,), 12), True),
        ("LlamaForCausalLM", "k_proj.bias", (24,), GQA, Placement(0, (24,), 12), True),
        ("LlamaForCausalLM", "o_proj.weight", (96, 96), GQA, Placement(1, (96,), 12), True),
        (
            "LlamaForCausalLM",
            "k_proj.weight",
            (12, 96),
            {**GQA, "num_key_value_heads": 1},
            Placement(0, (12,), 12),
            False,
        ),
        ("LlamaForCausalLM", "k_proj.weight", (40, 96), {**GQA, "head_dim": 20}, Placement(0, (40,), 20), True),
        (
            "MistralForCausalLM",
            "k_proj.weight",
            (96, 96),
            {**GQA, "num_key_value_heads": None},
            Placement(0, (96,), 12),
            True,
        ),
        ("Qwen3ForCausalLM", "k_proj.weight", (256, 96), GQA, Placement(0, (256,), 128), True),
        ("Phi3ForCausalLM", "qkv_proj.weight", (144, 96), GQA, Placement(0, (144,)), False),
    ],
)
def test_heads_of_attention(
    class_name: str, name: str, shape: tuple[int, ...], config: dict[str, Any], placement: Placement, aligned: bool
) -> None:
    assert cut(class_name, f"model.layers.0.self_attn.{name}", shape, **config) == (placement, aligned)


def test_layers_of_gemma4_have_heads_of_two_sizes() -> None:
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    config = {"text_config": {**text, "num_global_key_value_heads": 3}}

    def found(name: str, rows: int) -> Placement | None:
        lead = "model.language_model.layers.0.self_attn."
        return cut("Gemma4ForConditionalGeneration", f"{lead}{name}.weight", (rows, 8), **config)[0]

    assert found("q_proj", 64) == Placement(0, (64,), 16) and found("q_proj", 128) == Placement(0, (128,), 32)
    assert found("k_proj", 32) == Placement(0, (32,), 16) and found("k_proj", 96) == Placement(0, (96,), 32)


def test_a_composite_has_the_plan_of_the_text_model_in_its_config() -> None:
    lead = "model.language_model.layers.0.self_attn."
    for model_type, pattern in (("llama", "q_proj"), ("qwen3", "q_norm"), ("phi3", "qkv_proj")):
        config = {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": {"model_type": model_type, "num_hidden_layers": 5},
        }
        found = find_architecture(config)
        assert found is not None and found.known_from == "table"
        plan = found.tensor_parallel_plan(config)
        assert plan.find_rule(f"{lead}{pattern}.weight") is not None, model_type
        assert found.stacks(config)[0].count == 5


def test_a_text_model_over_the_config_of_its_composite_reads_below_text_config() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 4}
    config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3", "text_config": text}
    found = find_architecture(config)
    assert found is not None
    assert found.stacks(config)[0].count == 3
    plan = found.tensor_parallel_plan(config)
    assert decide_placement(plan, "model.layers.0.self_attn.q_proj.weight", (8, 16), 2).placement == Placement(
        0, (8,), 4
    )


# ---------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize(
    ("class_name", "config", "expected"),
    [
        ("LlamaForCausalLM", {"num_hidden_layers": 7}, [("model.layers", 7, (), ("model.norm", "lm_head"))]),
        ("LlamaForCausalLM", {}, [("model.layers", 32, (), ("model.norm", "lm_head"))]),
        ("GPT2LMHeadModel", {"n_layer": 3}, [("transformer.h", 3, (), ("transformer.ln_f", "lm_head"))]),
        (
            "OPTForCausalLM",
            {},
            [
                (
                    "model.decoder.layers",
                    12,
                    (),
                    ("model.decoder.final_layer_norm", "lm_head", "model.decoder.project_out"),
                )
            ],
        ),
        (
            "T5ForConditionalGeneration",
            {"num_layers": 3},
            [
                ("encoder.block", 3, (), ("encoder.final_layer_norm",)),
                ("decoder.block", 3, ("decoder.embed_tokens",), ("decoder.final_layer_norm", "lm_head")),
            ],
        ),
        (
            "WhisperForConditionalGeneration",
            {"encoder_layers": 2, "decoder_layers": 3},
            [
                ("model.encoder.layers", 2, (), ("model.encoder.layer_norm",)),
                (
                    "model.decoder.layers",
                    3,
                    ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
                    ("model.decoder.layer_norm", "proj_out"),
                ),
            ],
        ),
        (
            "Gemma4ForConditionalGeneration",
            {"text_config": {"num_hidden_layers": 4}},
            [("model.language_model.layers", 4, (), ("model.language_model.norm", "lm_head"))],
        ),
        (
            "Gemma3nForCausalLM",
            {},
            [("model.layers", 35, (), ("model.norm", "model.altup_unembed_projections", "lm_head"))],
        ),
        (
            "Qwen2_5_VLForConditionalGeneration",
            {"num_hidden_layers": 6},
            [("model.language_model.layers", 6, (), ("model.language_model.norm", "lm_head"))],
        ),
        ("CamembertForCausalLM", {"num_hidden_layers": 2}, [("roberta.encoder.layer", 2, (), ("lm_head",))]),
        ("LlamaForSequenceClassification", {}, [("model.layers", 32, (), ("model.norm", "score"))]),
        ("ViTForImageClassification", {}, []),
        ("XLMWithLMHeadModel", {}, []),
    ],
)
def test_stacks(class_name: str, config: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    found = known(class_name).stacks(config)
    assert [(stack.path, stack.count, stack.before, set(stack.after)) for stack in found] == [
        (path, count, before, set(after)) for path, count, before, after in expected
    ]


def test_layers_may_be_counted_by_the_list_of_their_kinds() -> None:
    nemotron = known("NemotronHForCausalLM")
    assert nemotron.stacks({"layers_block_type": ["mlp", "moe", "mlp"]})[0].count == 3
    assert nemotron.stacks({"num_hidden_layers": 52, "hybrid_override_pattern": "M-" * 26})[0].count == 52


def test_a_number_of_layers_that_nothing_says_is_refused() -> None:
    bare = dataclasses.replace(known("LlamaForCausalLM"), structure=Structure(stacks=(StackRule("layers", "depth"),)))
    with pytest.raises(InputError, match=r"config\.json: depth"):
        bare.stacks({})


def test_layers_that_use_the_keys_of_others_lack_their_own() -> None:
    gemma = known("Gemma4ForConditionalGeneration")
    config = {"text_config": {"num_hidden_layers": 6, "num_kv_shared_layers": 2}}
    lead = "model.language_model.layers"
    assert gemma.is_unused(f"{lead}.4.self_attn.k_proj.weight", config)
    assert gemma.is_unused(f"{lead}.5.self_attn.k_norm.weight", config)
    assert not gemma.is_unused(f"{lead}.3.self_attn.k_proj.weight", config)
    assert not gemma.is_unused(f"{lead}.4.self_attn.q_proj.weight", config)
    assert not gemma.is_unused(f"{lead}.4.self_attn.k_proj.weight", {"text_config": {"num_hidden_layers": 6}})
    assert not known("LlamaForCausalLM").is_unused("model.layers.4.self_attn.k_proj.weight", {})


# ----------------------------------------------------------------------------------- conversions


def test_conversions_of_experts() -> None:
    found = known("MixtralForCausalLM").conversions({})
    lead = "model.layers.*."
    assert set(found) == {
        Conversion((lead + "block_sparse_moe.gate.weight",), (lead + "mlp.gate.weight",)),
        Conversion((lead + "block_sparse_moe.experts.*.w2.weight",), (lead + "mlp.experts.down_proj",), (Op("merge"),)),
        Conversion(
            (lead + "block_sparse_moe.experts.*.w1.weight", lead + "block_sparse_moe.experts.*.w3.weight"),
            (lead + "mlp.experts.gate_up_proj",),
            (Op("merge"), Op("concat", 1)),
        ),
    }


def test_conversions_of_every_dialect_and_of_towers() -> None:
    found = {(each.sources[0], each.targets[0]) for each in known("LlavaForConditionalGeneration").conversions({})}
    assert ("language_model.model.norm.weight", "model.language_model.norm.weight") in found
    assert ("language_model.lm_head.weight", "lm_head.weight") in found
    # with and without the level that hub originals have
    ending = "embeddings.class_embedding"
    assert (f"vision_tower.vision_model.{ending}", f"model.vision_tower.{ending}") in found
    assert (f"vision_tower.{ending}", f"model.vision_tower.{ending}") in found


def test_what_is_written_comes_first() -> None:
    """A vision tower is saved without the level that hub originals have."""
    ending = "vision_tower.embeddings.class_embedding"
    found = known("LlavaForConditionalGeneration").conversions({})
    sources = [each.sources[0] for each in found if each.targets == (f"model.{ending}",)]
    assert sources[0] == ending and "vision_tower.vision_model.embeddings.class_embedding" in sources
    base = known("LlavaModel").conversions({})
    assert Conversion((ending,), (ending,)) in base, "its own name is what is written"
    assert base.index(Conversion((ending,), (ending,))) < [each.sources[0] for each in base].index(
        "vision_tower.vision_model.embeddings.class_embedding"
    )


def test_conversions_take_numbers_from_the_config() -> None:
    config = {"text_config": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}}
    found = known("Molmo2ForConditionalGeneration").conversions(config)
    splits = {op for each in found for op in each.ops if op.kind == "split" and "language_model" in each.targets[0]}
    assert splits == {Op("split", args=(24, 12, 12))}
    config = {"text_config": {"hidden_size": 10, "moe_intermediate_size": 6}}
    ops = {
        each.targets[0].rpartition(".")[2]: each.ops
        for each in known("Qwen3VLMoeForConditionalGeneration").conversions(config)
    }
    assert ops == {"gate_up_proj": (Op("transpose", 1, 2, (1, 10)),), "down_proj": (Op("transpose", 1, 2, (1, 6)),)}


def test_what_cannot_be_converted_is_named() -> None:
    found = known("Ernie4_5_VLMoeForConditionalGeneration").conversions({})
    assert {op.kind for each in found for op in each.ops if ":" in op.kind} == {
        "unsupported:ErnieFuseAndSplitTextVisionExperts"
    }
    assert ("model.resampler_model.spatial_linear.0.bias",) in {each.sources for each in found}, (
        "an index that the model does not have"
    )


def test_model_names_are_told_from_names_on_disk() -> None:
    mixtral = known("MixtralForCausalLM")
    assert "model.layers.*.mlp.experts.gate_up_proj" in mixtral.model_name_patterns
    assert not any("block_sparse_moe" in name for name in mixtral.model_name_patterns)
    assert any("block_sparse_moe" in name for name in mixtral.name_patterns)


# ---------------------------------------------------------------------------------- text and back

STRUCTURE = Structure(
    text_config_path="text_config",
    text_type="llama",
    output_head="lm_head",
    embedding="model.embed",
    plan={"model.layers.*.q": "colwise", "lm_head": "rowwise", "model.a": "colwise"},
    stacks=(
        StackRule("model.enc", "n", (), ("model.norm",)),
        StackRule("dec.layers", "m - 1", ("dec.e",), ("lm_head",)),
    ),
    attention_heads={"model.layers.*.q": (("h", "d ?? s // h"), ("k", "d")), "model.a": (("h", "d"),)},
    transposed=frozenset({"model.layers.*.q", "other"}),
    conversions=frozenset(
        {
            LoadConversion(("model.old.w",), ("model.new.w",)),
            LoadConversion(("text.old.w",), ("model.new.b",)),
            LoadConversion(("w",), ("model.w",)),
            LoadConversion(("model.a.*.x", "model.a.*.y"), ("model.b",), ("merge 0", "concat 1")),
            LoadConversion(("q",), ("model.k", "model.v"), ("split 0 : h * d ; k * d",)),
        }
    ),
    other_conversions=frozenset(
        {
            LoadConversion(("model.older.w",), ("model.new.w",)),
            LoadConversion(("v",), ("model.v",), ("transpose 0 1 0",)),
        }
    ),
    defaults={"n": 3},
    aliases={"n": "n_layer"},
)


@pytest.mark.parametrize("lead", ["model.", ""])
def test_structures_survive_the_table(lead: str) -> None:
    lines: dict[str, str] = {}
    values = json.loads(json.dumps(writer.encode_structure(STRUCTURE, lead, lines, "Owner")))
    (text,) = lines
    assert values["body"] == "Owner"
    assert decode_structure(values, json.loads(text), lead) == STRUCTURE
    other = dataclasses.replace(STRUCTURE, embedding="model.other")
    assert decode_structure(values, json.loads(text), lead) != other


def test_classes_around_one_body_share_a_line() -> None:
    lines: dict[str, str] = {}
    whole = dataclasses.replace(STRUCTURE, stacks=(STRUCTURE.stacks[0],))
    writer.encode_structure(whole, "model.", lines, "Whole")
    writer.encode_structure(
        dataclasses.replace(whole, output_head="score", plan={**whole.plan, "score": "colwise"}),
        "model.",
        lines,
        "Other",
    )
    assert list(lines.values()) == ["Whole"]


def test_plans_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from ckptx.architecture.class_table import lookup\n"
        "found = lookup('Qwen3MoeForCausalLM')\n"
        "assert found.tensor_parallel_plan({}).rules and found.stacks({}) and found.conversions({})\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------ layers with other numbers

LAYERS_APART = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "per_layer_config": {"5": {"num_key_value_heads": 2, "head_dim": 16}},
}  # fmt: skip


def test_heads_of_single_layers_are_candidates() -> None:
    """Published with `num_global_key_value_heads`, saved again by transformers 5.23 with `per_layer_config`."""
    plan = known("Gemma4ForCausalLM").tensor_parallel_plan(LAYERS_APART)
    found = plan.find_rule("model.layers.5.self_attn.k_proj.weight")
    assert found is not None
    assert {(4, 8), (2, 16)} <= {*found[1].heads}
    for rows, align in ((32, 8), (2 * 16, 8), (2 * 24, 1)):
        decision = decide_placement(plan, "model.layers.5.self_attn.k_proj.weight", (rows, 64), 2)
        assert decision.placement is not None and decision.placement.align == align
    plain = known("Gemma4ForCausalLM").tensor_parallel_plan({**LAYERS_APART, "per_layer_config": {}})
    other = plain.find_rule("model.layers.5.self_attn.k_proj.weight")
    assert other is not None and (2, 16) not in other[1].heads


@pytest.mark.parametrize(
    "layers",
    [None, [], "5", 5, {"5": None}, {"5": []}, {"5": {"head_dim": "16"}}, {"5": {"head_dim": True}}, {"5": {}}],
)
def test_what_is_no_number_of_a_layer_counts_for_nothing(layers: Any) -> None:
    assert layer_overrides({"per_layer_config": layers}) == []


def test_layers_alike_are_one_kind() -> None:
    alike = {str(layer): {"head_dim": 16, "num_key_value_heads": 2} for layer in range(100)}
    assert layer_overrides({"per_layer_config": alike}) == [{"head_dim": 16, "num_key_value_heads": 2}]
    assert layer_overrides(None) == layer_overrides({}) == []
