"""Plan rows for what transformers leaves out or gets wrong: every row changes something, and cuts what it says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import pytest

from ckptx.architecture import class_table, model_files
from ckptx.architecture.architecture import Architecture
from ckptx.architecture.correction_types import PlanCorrection, expand_braces
from ckptx.architecture.corrections import config_keys_of_corrections, corrections_of
from ckptx.architecture.expressions import keys_of
from ckptx.layout.placement import Placement
from ckptx.layout.tensor_parallel_plan import PlacementDecision, decide_placement
from tests.support.corrections import all_corrections, patched_corrections

QUANTIZED = ("_blocks", "_scales")


def known(class_name: str) -> Architecture:
    found = class_table.lookup(class_name)
    assert found is not None, class_name
    return found


def decision(class_name: str, name: str, shape: tuple[int, ...], config: dict[str, Any]) -> PlacementDecision:
    return decide_placement(known(class_name).tensor_parallel_plan(config), name, shape, 2)


def classes_by_text_type() -> dict[str, list[Architecture]]:
    found: dict[str, list[Architecture]] = {}
    for class_name in model_files.class_names():
        architecture = class_table.lookup(class_name)
        if architecture is not None:
            found.setdefault(architecture.structure.text_type, []).append(architecture)
    return found


def cuts(architecture: Architecture, config: dict[str, Any], names: Iterable[str]) -> list[Any]:
    """How a plan cuts tensors, whoever says so; a forward pass gathers what no rule speaks of."""
    plan = architecture.tensor_parallel_plan(config)
    rules = [found[1] if (found := plan.find_rule(name)) else None for name in names]
    return [rule and (rule.style, rule.groups, rule.heads) for rule in rules]


def configs(architecture: Architecture, row: PlanCorrection) -> Iterator[dict[str, Any]]:
    """Configs of which one at least meets the condition of a row, with another number for every other key it reads."""
    keys = sorted(keys_of(row.when))
    read = keys_of(" + ".join(("1", *row.groups, *(each for pair in row.heads for each in pair))))
    numbers = {key: 840 * (at + 1) for at, key in enumerate(sorted(read - set(keys)))}  # they divide by most
    for values in product((0, 1), repeat=len(keys)):
        config = {**numbers, **dict(zip(keys, values, strict=True))}
        yield {**config, architecture.structure.text_config_path: config}


def changes(row: PlanCorrection, architecture: Architecture) -> bool:
    """Whether a class is cut otherwise without a row."""
    text = architecture.structure.text_type
    # quantized forms are names that no class has by itself
    names = [*architecture.name_patterns, *(path for path in placed(row, architecture) if path.endswith(QUANTIZED))]
    others = tuple(each for each in corrections_of(text).plan if each is not row)
    for config in configs(architecture, row):
        before = cuts(architecture, config, names)
        with patched_corrections(text, plan=others):
            if cuts(architecture, config, names) != before:
                return True
    return False


def placed(row: PlanCorrection, architecture: Architecture) -> list[str]:
    return [
        path for stack in architecture.structure.stacks
        for path in expand_braces(row.patterns.replace("@layers", stack.path))
    ]  # fmt: skip


def unused_rows(rows: Mapping[str, Iterable[PlanCorrection]]) -> list[tuple[str, PlanCorrection]]:
    classes = classes_by_text_type()
    return [
        (kind, row) for kind, each in rows.items() for row in each
        if not any(changes(row, architecture) for architecture in classes.get(kind, ()))
    ]  # fmt: skip


def test_patterns_are_relative_to_the_layers() -> None:
    rows = [(kind, row) for kind, each in all_corrections().items() for row in (*each.plan, *each.absent)]
    assert len({kind for kind, _ in rows}) > 30
    for kind, row in rows:
        assert all(each.startswith(("@layers.*.", "@around.")) for each in expand_braces(row.patterns)), (kind, row)


def test_every_plan_row_changes_how_a_class_is_cut() -> None:
    assert unused_rows({kind: each.plan for kind, each in all_corrections().items()}) == []


@pytest.mark.parametrize(
    "row",
    [
        PlanCorrection("@layers.*.mlp.nowhere", "colwise", "for a test"),
        PlanCorrection("@layers.*.mlp.c_fc", "colwise", "for a test"),  # as another row says
        PlanCorrection("@layers.*.mlp.c_fc", "rowwise", "for a test", when="n_head * 0"),
    ],
)
def test_a_row_that_changes_nothing_is_reported(row: PlanCorrection) -> None:
    with patched_corrections("gpt2", plan=(*corrections_of("gpt2").plan, row)):
        assert unused_rows({"gpt2": (row,)}) == [("gpt2", row)]


def test_every_absent_row_names_tensors_of_its_model_type() -> None:
    classes = classes_by_text_type()
    for kind, rows in all_corrections().items():
        for row in rows.absent:
            config = dict.fromkeys(keys_of(row.first_layer), 1)
            assert any(
                architecture.is_unused(
                    f"{module.replace('*', '7')}.weight",
                    {architecture.structure.text_config_path or "": config, **config},
                )
                for architecture in classes[kind]
                for stack in architecture.structure.stacks
                for module in expand_braces(row.patterns.replace("@layers", stack.path))
            ), (kind, row)


def test_keys_of_plan_rows_have_defaults_in_the_table() -> None:
    assert {"hidden_size", "num_attention_heads"} <= config_keys_of_corrections("gpt2", "gpt2")
    assert known("GPT2LMHeadModel").structure.defaults["hidden_size"] == 768


GPT2 = {"n_embd": 12, "n_head": 2, "n_layer": 3}
FALCON = {"hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("class_name", "name", "shape", "config", "placement"),
    [
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_attn.weight", (12, 36), GPT2, Placement(1, (12, 12, 12), 6)),
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_attn.bias", (36,), GPT2, Placement(0, (12, 12, 12), 6)),
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_proj.weight", (12, 12), GPT2, Placement(0, (12,), 6)),
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_proj.bias", (12,), GPT2, None),
        ("GPT2LMHeadModel", "transformer.h.0.mlp.c_fc.weight", (12, 48), GPT2, Placement(1, (48,))),
        ("GPT2LMHeadModel", "transformer.h.0.mlp.c_proj.weight", (48, 12), GPT2, Placement(0, (48,))),
        ("GPT2LMHeadModel", "transformer.wte.weight", (101, 12), GPT2, Placement(0, (101,))),
        ("GPT2LMHeadModel", "lm_head.weight", (101, 12), GPT2, Placement(0, (101,))),
        ("GPT2LMHeadModel", "transformer.wpe.weight", (64, 12), GPT2, None),
        (
            "FalconForCausalLM",
            "transformer.h.0.self_attention.query_key_value.weight",
            (48, 32),
            {**FALCON, "multi_query": True},
            Placement(0, (32, 8, 8), 8),
        ),
        (
            "FalconForCausalLM",
            "transformer.h.0.self_attention.query_key_value.weight",
            (96, 32),
            {**FALCON, "multi_query": False},
            Placement(0, (96,), 24),
        ),
        (
            "FalconForCausalLM",
            "transformer.h.0.self_attention.query_key_value.weight",
            (64, 32),
            {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
            Placement(0, (64,), 32),
        ),
        (
            "BloomForCausalLM",
            "transformer.h.0.self_attention.query_key_value.weight",
            (96, 32),
            {"hidden_size": 32, "n_head": 4},
            Placement(0, (96,), 24),
        ),
        (
            "MptForCausalLM",
            "transformer.blocks.0.attn.Wqkv.weight",
            (96, 32),
            {"d_model": 32, "n_heads": 4},
            Placement(0, (32, 32, 32), 8),
        ),
        ("OPTForCausalLM", "model.decoder.layers.0.fc2.weight", (8, 32), {}, Placement(1, (32,))),
        (
            "Qwen3VLForConditionalGeneration",
            "model.language_model.layers.0.mlp.down_proj.weight",
            (8, 32),
            {},
            Placement(1, (32,)),
        ),
        ("Qwen3VLForConditionalGeneration", "model.visual.blocks.0.attn.qkv.weight", (96, 32), {}, None),
        ("GptOssForCausalLM", "model.layers.0.self_attn.sinks", (64,), {}, Placement(0, (64,))),
        (
            "GptOssForCausalLM",
            "model.layers.0.mlp.experts.gate_up_proj",
            (4, 8, 20),
            {"intermediate_size": 10},
            Placement(2, (20,), 2),
        ),
        (
            "GptOssForCausalLM",
            "model.layers.0.mlp.experts.gate_up_proj_bias",
            (4, 20),
            {"intermediate_size": 10},
            Placement(1, (20,), 2),
        ),
        ("GptOssForCausalLM", "model.layers.0.mlp.experts.down_proj", (4, 10, 8), {}, Placement(1, (10,))),
        ("GptOssForCausalLM", "model.layers.0.mlp.experts.down_proj_bias", (4, 8), {}, None),
        (
            "GptOssForCausalLM",
            "model.layers.0.mlp.experts.gate_up_proj_blocks",
            (4, 20, 2, 16),
            {"intermediate_size": 10},
            Placement(1, (20,), 2),
        ),
        (
            "GptOssForCausalLM",
            "model.layers.0.mlp.experts.gate_up_proj_scales",
            (4, 20, 2),
            {"intermediate_size": 10},
            Placement(1, (20,), 2),
        ),
        ("GptOssForCausalLM", "model.layers.0.mlp.experts.down_proj_blocks", (4, 8, 6, 16), {}, Placement(2, (6,))),
        ("GptOssForCausalLM", "model.layers.0.mlp.experts.down_proj_scales", (4, 8, 6), {}, Placement(2, (6,))),
        (
            "DeepseekV3ForCausalLM",
            "model.layers.0.self_attn.kv_b_proj.weight",
            (96, 8),
            {"num_attention_heads": 4, "qk_nope_head_dim": 16, "v_head_dim": 8},
            Placement(0, (96,), 24),
        ),
        ("DeepseekV3ForCausalLM", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (96, 8), {}, None),
        (
            "MambaForCausalLM",
            "backbone.layers.0.mixer.in_proj.weight",
            (64, 16),
            {"hidden_size": 16},
            Placement(0, (32, 32)),
        ),
        (
            "MambaForCausalLM",
            "backbone.layers.0.mixer.conv1d.weight",
            (32, 1, 4),
            {"hidden_size": 16},
            Placement(0, (32,)),
        ),
        ("MambaForCausalLM", "backbone.layers.0.mixer.A_log", (32, 16), {"hidden_size": 16}, Placement(0, (32,))),
        (
            "T5ForConditionalGeneration",
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            (32, 8),
            {},
            Placement(1, (8,)),
        ),
        (
            "T5ForConditionalGeneration",
            "decoder.block.1.layer.1.EncDecAttention.o.weight",
            (8, 24),
            {"num_heads": 6, "d_kv": 4},
            Placement(1, (24,), 4),
        ),
        (
            "WhisperForConditionalGeneration",
            "model.encoder.layers.0.self_attn.out_proj.weight",
            (8, 8),
            {},
            Placement(1, (8,)),
        ),
        (
            "BertForMaskedLM",
            "bert.encoder.layer.0.attention.self.query.weight",
            (8, 8),
            {"hidden_size": 8, "num_attention_heads": 2},
            Placement(0, (8,), 4),
        ),
    ],
)
def test_rows(
    class_name: str, name: str, shape: tuple[int, ...], config: dict[str, Any], placement: Placement | None
) -> None:
    assert decision(class_name, name, shape, config).placement == placement


def test_a_row_says_so_and_why() -> None:
    found = decision("GPT2LMHeadModel", "transformer.h.0.attn.c_attn.weight", (12, 36), GPT2)
    assert found.decided_by == "override" and "Conv1D with fused [q|k|v]" in found.reason


def test_heads_that_do_not_divide_are_told() -> None:
    config = {**FALCON, "multi_query": True}
    name = "transformer.h.0.self_attention.query_key_value.weight"
    assert not decision("FalconForCausalLM", name, (48, 32), config).aligned, "the one key head is cut in two"
    assert decision("FalconForCausalLM", name, (96, 32), {**FALCON, "multi_query": False}).aligned


def test_the_ends_of_a_class_without_a_plan_are_cut_by_vocabulary() -> None:
    found = decision("OPTForCausalLM", "model.decoder.embed_tokens.weight", (101, 8), {})
    assert found.placement == Placement(0, (101,)) and found.decided_by == "override"
    assert decision("OPTForCausalLM", "model.decoder.embed_positions.weight", (101, 8), {}).placement is None
    llama = known("LlamaForCausalLM").tensor_parallel_plan({})
    assert llama.fallback is None, "its own plan names both"
