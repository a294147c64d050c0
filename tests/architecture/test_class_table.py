"""What the generated files say of classes, and that they agree with transformers."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from types import ModuleType
from typing import Any

import pytest

from ckptx.architecture import class_table, model_files
from ckptx.architecture.architecture import TieFlag
from ckptx.architecture.class_table import lookup
from ckptx.architecture.patterns import regex_for_patterns
from ckptx.mapping.names import pattern_of
from tests.support.import_tool import ROOT, tool
from tests.support.slow import slow_but
from tests.support.tables import architecture_of
from tests.support.transformers_version import INSTALLED, TABLES_VERSION, requires_tables_version

FAST = ("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration")
SAMPLE = (
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "DeepseekV3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlamaForCausalLM",
    "LlamaModel",
    "MixtralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "T5ForConditionalGeneration",
    "ZambaForCausalLM",
)


@pytest.fixture(scope="module")
def build_tables() -> ModuleType:
    return tool("build_tables")


# -------------------------------------------------------------------- agreement with transformers


def test_table_was_made_from_the_transformers_that_make_test_has() -> None:
    pins = [
        re.search(r"^transformers==(\S+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name in ("constraints.txt", "constraints-oldest.txt")
    ]
    newest, oldest = (found[1] for found in pins if found)
    assert newest == TABLES_VERSION, "run `make tables`"
    assert INSTALLED in (newest, oldest), "neither `make test` nor `make test-oldest` made this environment"


@pytest.mark.sampled(4)
@requires_tables_version
@pytest.mark.parametrize("class_name", slow_but(SAMPLE, FAST))
def test_a_row_equals_the_meta_model(class_name: str, build_tables: ModuleType) -> None:
    assert build_tables.derive_row(class_name) == class_table.find_class_record(class_name)


def test_a_wrong_row_differs_from_the_meta_model(build_tables: ModuleType) -> None:
    row = class_table.find_class_record("LlamaForCausalLM")
    assert row is not None and row.architecture is not None
    wrong = dataclasses.replace(row, architecture=dataclasses.replace(row.architecture, base_prefix="other"))
    assert build_tables.derive_row("LlamaForCausalLM") != wrong


@pytest.mark.sampled(3)
@requires_tables_version
@pytest.mark.parametrize("class_name", [name for name in SAMPLE if lookup(name) is not None])
def test_variants_of_the_config_add_names_and_change_nothing_else(class_name: str) -> None:
    from ckptx.architecture.introspection import meta_model

    found = lookup(class_name)
    assert found is not None
    cls = meta_model.find_class(class_name)
    assert cls is not None
    default = meta_model.derive_architecture(cls, meta_model.default_config_builder(cls), {}, known_from="table")
    assert default.name_patterns <= found.name_patterns and set(default.ignored) <= set(found.ignored)
    ours, theirs = found.structure, default.structure
    assert theirs.plan.items() <= ours.plan.items() and theirs.attention_heads.items() <= ours.attention_heads.items()
    assert (
        theirs.conversions <= ours.conversions and theirs.other_conversions <= ours.conversions | ours.other_conversions
    )
    assert [(stack.path, stack.length) for stack in theirs.stacks] == [
        (stack.path, stack.length) for stack in ours.stacks
    ]
    assert meta_model.MetaModelNames.from_architecture(default).applied_to(found) == default


@requires_tables_version
@pytest.mark.slow
def test_every_class_equals_its_meta_model(build_tables: ModuleType) -> None:
    if importlib.util.find_spec("timm"):
        pytest.skip("the files are made without timm, whose towers are opaque in them")
    assert importlib.util.find_spec("scipy"), "the files are made with scipy, without which some classes are not built"
    names = build_tables.class_names()
    assert names == model_files.class_names()
    wrong = []
    for name in names:
        measured, source = build_tables.measure_class(name), model_files.source_of(name)
        assert source is not None
        if measured.row != class_table.find_class_record(name) or measured.directory not in source["directories"]:
            wrong.append(name)
    assert wrong == []


def test_the_table_holds_the_classes_that_matter() -> None:
    names = set(model_files.class_names())
    assert len(names) > 1600
    assert names >= set(SAMPLE)
    without = {name for name in names if not lookup(name)}
    assert without < set(names) and len(without) < 120
    assert {"ZambaForCausalLM", "Zamba2ForCausalLM"} <= without


# --------------------------------------------------------------------------------------- the rows


def test_disk_names_that_differ_from_model_names() -> None:
    def spelled(class_name: str) -> tuple[tuple[str, str], ...]:
        return architecture_of(class_name).ties[0].namings

    gemma = ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight")
    assert gemma in spelled("Gemma3ForConditionalGeneration")
    assert gemma in spelled("LlavaForConditionalGeneration")
    assert ("embed_out.weight", "gpt_neox.embed_in.weight") in spelled("GPTNeoXForCausalLM")
    assert ("lm_head.weight", "model.embed_tokens.weight") in spelled("Qwen2_5_VLForConditionalGeneration")
    assert spelled("Qwen2_5_VLForConditionalGeneration")[0][1] == "model.language_model.embed_tokens.weight"


def test_every_tied_name_is_there_not_only_the_head() -> None:
    t5 = {pair.namings[0] for pair in architecture_of("T5ForConditionalGeneration").ties}
    assert t5 == {
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("decoder.embed_tokens.weight", "shared.weight"),
        ("lm_head.weight", "shared.weight"),
    }
    bert = architecture_of("BertForMaskedLM").ties
    assert [pair.is_primary for pair in bert] == [True, False]
    assert bert[1].namings[0] == ("cls.predictions.decoder.bias", "cls.predictions.bias")


def test_nested_children_bring_their_ties_and_their_flag() -> None:
    (pair,) = architecture_of("Blip2ForConditionalGeneration").ties
    assert pair.namings[0][0] == "language_model.lm_head.weight"
    assert pair.flag.paths == (("text_config", "tie_word_embeddings"),)


def test_a_class_that_declares_no_tie_is_never_tied() -> None:
    (pair,) = architecture_of("NemotronHForCausalLM").ties
    assert pair.flag == TieFlag((), "0")


def test_no_source_is_a_target() -> None:
    for class_name in model_files.class_names():
        found = lookup(class_name)
        if found is not None:
            targets = {pair.namings[0][0] for pair in found.ties}
            assert not targets & {pair.namings[0][1] for pair in found.ties}, class_name
            assert all(found.expects(name) for pair in found.ties for each in pair.namings for name in each)


FLAGS: list[tuple[str, bool | None, bool | None, bool]] = [
    # class, tie_word_embeddings at the root, in text_config, what the model reads
    ("LlamaForCausalLM", None, None, False),
    ("LlamaForCausalLM", True, None, True),
    ("GPT2LMHeadModel", None, None, True),
    ("GPT2LMHeadModel", False, None, False),
    # text_config is forwarded
    ("LlavaForConditionalGeneration", None, None, False),
    ("LlavaForConditionalGeneration", None, True, True),
    ("LlavaForConditionalGeneration", False, True, True),
    ("Qwen2_5_VLForConditionalGeneration", False, True, True),
    # text_config is ignored
    ("Qwen3VLForConditionalGeneration", False, True, False),
    ("Qwen3VLForConditionalGeneration", True, False, True),
    ("Idefics3ForConditionalGeneration", None, True, False),
    # the root's default is true, and text_config is ignored
    ("Mistral3ForConditionalGeneration", None, False, True),
    ("PaliGemmaForConditionalGeneration", None, False, True),
    ("InternVLForConditionalGeneration", False, True, False),
    # forced
    ("T5ForConditionalGeneration", False, None, True),
    ("MT5ForConditionalGeneration", False, None, True),
    # the sub-model's own flag
    ("Llama4ForConditionalGeneration", True, False, False),
    ("Llama4ForConditionalGeneration", False, True, True),
]


@pytest.mark.parametrize(("class_name", "root", "nested", "expected"), FLAGS)
def test_the_effective_flag(class_name: str, root: bool | None, nested: bool | None, expected: bool) -> None:
    config: dict[str, Any] = {"text_config": {}}
    if root is not None:
        config["tie_word_embeddings"] = root
    if nested is not None:
        config["text_config"]["tie_word_embeddings"] = nested
    assert architecture_of(class_name).ties[0].flag.is_set(config) is expected


def test_renamed_key_of_the_flag() -> None:
    (pair,) = architecture_of("Lfm2ForCausalLM").ties
    assert not pair.flag.is_set({"tie_embedding": False})
    assert pair.flag.is_set({"tie_word_embeddings": False, "tie_embedding": True})


def test_the_flag_is_not_editable_where_forward_reads_it() -> None:
    for class_name in (
        "T5ForConditionalGeneration",
        "LongT5ForConditionalGeneration",
        "UMT5ForConditionalGeneration",
    ):
        assert not architecture_of(class_name).ties_flag_editable
    for class_name in (
        "LlamaForCausalLM",
        "Gemma3ForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
    ):
        assert architecture_of(class_name).ties_flag_editable


def test_precision_rules_depend_on_the_target() -> None:
    t5 = architecture_of("T5ForConditionalGeneration")
    name = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    assert t5.keeps_fp32(name, "fp16") and not t5.keeps_fp32(name, "bf16")
    deepseek = architecture_of("DeepseekV3ForCausalLM")
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert deepseek.keeps_fp32(name, "fp16") and deepseek.keeps_fp32(name, "bf16")
    assert not deepseek.keeps_fp32("lm_head.weight", "fp16")


def test_names_match_in_model_and_disk_spelling_with_and_without_prefix() -> None:
    mixtral = architecture_of("MixtralForCausalLM")
    assert mixtral.match_fraction(["model.layers.0.mlp.experts.gate_up_proj"]) == 1.0
    assert mixtral.match_fraction(["model.layers.0.block_sparse_moe.experts.7.w1.weight"]) == 1.0
    assert mixtral.match_fraction(["layers.0.block_sparse_moe.experts.7.w1.weight", "mtp.weight"]) == 0.5
    assert (
        architecture_of("BertModel").match_fraction(["bert.embeddings.LayerNorm.gamma", "embeddings.LayerNorm.beta"])
        == 1.0
    )
    assert mixtral.match_fraction([]) == 0.0


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("LlamaForCausalLM", "model.layers.0.self_attn.o_proj.bias"),
        ("LlamaForCausalLM", "model.layers.0.mlp.down_proj.bias"),
        ("DeepseekV3ForCausalLM", "model.layers.0.self_attn.q_proj.weight"),
        ("Qwen3MoeForCausalLM", "model.layers.0.mlp.gate_proj.weight"),
        ("T5ForConditionalGeneration", "encoder.block.0.layer.1.DenseReluDense.wi_1.weight"),
        ("OPTForCausalLM", "model.decoder.project_in.weight"),
        ("FalconForCausalLM", "transformer.h.0.ln_attn.weight"),
        ("Gemma4ForCausalLM", "model.layers.0.router.per_expert_scale"),
        ("Gemma4ForConditionalGeneration", "model.vision_tower.encoder.layers.0.mlp.gate_proj.linear.weight"),
        ("Gemma4ForConditionalGeneration", "model.vision_tower.std_scale"),
        ("PaliGemmaForConditionalGeneration", "vision_tower.vision_model.head.probe"),
        ("LlavaForConditionalGeneration", "vision_tower.transformer.layers.0.attention.q_proj.weight"),
        ("DebertaV2ForMaskedLM", "deberta.encoder.rel_embeddings.weight"),
        ("BertLMHeadModel", "bert.encoder.layer.0.crossattention.self.key.weight"),
        ("Wav2Vec2ForCTC", "wav2vec2.feature_extractor.conv_layers.3.layer_norm.weight"),
    ],
)
def test_names_that_a_config_switches_on_are_known(class_name: str, name: str) -> None:
    assert architecture_of(class_name).match_fraction([name]) == 1.0


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("BertModel", "embeddings.position_ids"),
        ("LlamaForCausalLM", "model.layers.3.self_attn.rotary_emb.inv_freq"),
        ("GPT2LMHeadModel", "transformer.h.0.attn.bias"),
        ("DeepseekV3ForCausalLM", "model.layers.61.eh_proj.weight"),
        ("DeepseekV3ForCausalLM", "model.layers.*.shared_head.norm.weight"),
        ("Qwen3NextForCausalLM", "mtp.layers.0.mlp.gate.weight"),
    ],
)
def test_names_that_transformers_ignores_are_known_and_prove_nothing(class_name: str, name: str) -> None:
    assert architecture_of(class_name).expects(name)
    assert architecture_of(class_name).match_fraction([name]) == 0.0


def test_a_layer_that_is_ignored_by_its_number_does_not_hide_other_layers() -> None:
    deepseek = architecture_of("DeepseekV3ForCausalLM")
    assert not deepseek.expects("model.layers.61.stray.weight") and not deepseek.expects("model.layers.3.stray.weight")
    assert not deepseek.expects("model.layers.3.mlp.down_proj.weight_packed")
    gemma = architecture_of("Gemma4ForCausalLM")
    assert not gemma.expects("model.layers.3.self_attn.k_proj.weight_packed")


def test_a_tower_of_a_missing_package_matches_any_name_below_it() -> None:
    gemma = architecture_of("Gemma3nForConditionalGeneration")
    assert gemma.expects("model.vision_tower.timm_model.blocks.0.1.conv.weight")
    assert not gemma.expects("model.other_tower.timm_model.blocks.0.1.conv.weight")


# --------------------------------------------------------------------------------------- patterns


def test_only_whole_components_of_digits_are_indices() -> None:
    assert pattern_of("h.12.ln_1.weight.0") == "h.*.ln_1.weight.*"


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        (r"^mtp.*", r"^mtp.*"),
        ("inv_freq", "inv_freq"),
        ("decoder.block.0.layer.1.bias", r"decoder.block.\*.layer.\*.bias"),
        (r"layers\.\d+\.shared_head\.", r"layers\.\*\.shared_head\."),
        (r"backbone\.layer\d+\.0\.bn", r"backbone\.layer\d+\.\*\.bn"),
    ],
)
def test_regexes_for_patterns(regex: str, expected: str) -> None:
    assert regex_for_patterns(regex) == expected


@pytest.mark.parametrize("regex", [r"model\.layers\.61.*", r"model\.layers\.42\..*", r"^model\.(a\.)?layers\.46\."])
def test_a_regex_for_a_whole_layer_is_one_for_what_only_a_predictor_has(regex: str) -> None:
    found = regex_for_patterns(regex)
    assert re.search(found, "model.layers.*.enorm.weight")
    assert not re.search(found, "model.layers.*.mlp.up_proj.weight")
