"""Tensors that a class does not have: every kind of the table is accepted for every class, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_table import find_class_record, lookup
from ckptx.architecture.extra_tensors import (
    EXTRA_TENSOR_KINDS,
    IGNORED_REASON,
    OUTSIDE_REASON,
    QUANTIZED_REASON,
    ExtraTensor,
    ExtraTensorKind,
    ExtraTensors,
)
from ckptx.architecture.model_files import class_names
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, full_region
from ckptx.mapping.names import pattern_of
from tests.support.checkpoint_writers import LLAMA, llama
from tests.support.extra_tensors import EXAMPLES

KNOWN = [found for name in class_names() if (found := lookup(name)) is not None and found.name_patterns]
IGNORING = [each for each in KNOWN if each.ignored]
# Where a row needs a weight beside the tensor, or another tensor of the class.
CLASS = lookup("LlamaForCausalLM")
assert CLASS is not None


def entry(name: str, shape: Shape = (2,), dtype: str = "BF16") -> TensorEntry:
    return TensorEntry(name, DTYPES_BY_NAME[dtype], shape, (Chunk(full_region(shape), name, 0, 8),))


def found(
    architecture: Architecture, shapes: Mapping[str, Shape], config: Mapping[str, Any] = LLAMA, dtype: str = "BF16"
) -> dict[str, ExtraTensor]:
    """What is known of tensors without bytes."""
    return ExtraTensors(architecture, config, {name: entry(name, s, dtype) for name, s in shapes.items()}).by_name


def names_of(architecture: Architecture, index: int = 0) -> list[str]:
    """A tensor of each pattern; nothing of what stands for everything below a tower."""
    return [each.replace("*", str(index)) for each in sorted(architecture.name_patterns) if not each.endswith("**")]


def modules_of(architecture: Architecture) -> list[str]:
    """The modules of the layers, in which a tensor must be one of the class."""
    modules = {name.rpartition(".")[0] for name in architecture.name_patterns if "*." in name}
    opaque = tuple(each.removesuffix("**") for each in architecture.name_patterns if each.endswith("**"))
    return sorted(each.replace("*", "0") for each in modules if not (opaque and each.startswith(opaque)))


CASES = [(kind, *example) for kind, examples in EXAMPLES.items() for example in examples]


@pytest.mark.parametrize(("kind", "name", "shape"), CASES)
def test_every_kind_of_the_table_is_accepted_with_its_reason(kind: str, name: str, shape: Shape) -> None:
    assert CLASS is not None
    row = next(row for row in EXTRA_TENSOR_KINDS if row.name == kind)
    extra = found(CLASS, {**dict.fromkeys(llama(), (2, 2)), name: shape})[name]
    assert (extra.reason, extra.is_expected, extra.is_computed) == (row.reason, True, row.is_computed)


def test_every_row_has_examples_and_a_reason() -> None:
    kinds = {row.name for row in EXTRA_TENSOR_KINDS}
    assert kinds == set(EXAMPLES) | {"weight norm"}
    assert all(row.reason and re.compile(row.pattern) for row in EXTRA_TENSOR_KINDS)


@pytest.mark.parametrize(
    "row", [row for row in EXTRA_TENSOR_KINDS if row.name == "weight norm"], ids=lambda row: row.pattern
)
def test_a_weight_norm_has_older_names_where_the_class_has_one(row: ExtraTensorKind) -> None:
    known, leaf = lookup("Wav2Vec2ForCTC"), row.pattern.strip("\\.$")
    assert known is not None and CLASS is not None
    name = f"wav2vec2.encoder.pos_conv_embed.conv.{leaf}"
    assert found(known, {name: (2,)})[name].reason == row.reason
    other = f"model.layers.0.self_attn.q_proj.{leaf}"
    assert not found(CLASS, {**dict.fromkeys(llama(), (2, 2)), other: (2,)})[other].reason


def test_no_class_of_the_tables_lacks_a_tensor_of_its_own() -> None:
    """All 1,642 classes that the tables answer for, with and without the prefix of the base model."""
    assert len(KNOWN) > 1600
    for known in KNOWN:
        for index in (0, 17):
            names = names_of(known, index)
            assert found(known, dict.fromkeys(names, (2, 2))) == {}, known.class_name
        lead = f"{known.base_prefix}."
        bare = [name.removeprefix(lead) for name in names_of(known)]
        assert found(known, dict.fromkeys(bare, (2, 2))) == {}, known.class_name


def test_a_strange_tensor_in_any_module_of_any_class_is_of_another_model() -> None:
    """One tensor in each module of the layers of every class: some ten thousand."""
    tried = 0
    for known in KNOWN:
        names = [f"{module}.strange_norm.weight" for module in modules_of(known)]
        for name, extra in found(known, dict.fromkeys(names, (2,)), {}).items():
            tried += 1
            if any(re.search(each, pattern_of(name)) for each in known.ignored):
                assert extra == ExtraTensor(IGNORED_REASON, is_expected=True)
            else:
                assert not extra.reason and extra.module, (known.class_name, name)
    assert tried > 10_000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("padding", ["0", "00"])
def test_an_index_with_zeros_in_front_is_no_name_of_any_class(padding: str) -> None:
    for known in KNOWN:
        names = [each for each in known.name_patterns if each.count("*") and not each.endswith("**")]
        names = [each.replace("*", f"{padding}1", 1).replace("*", "1") for each in sorted(names)[:4]]
        for name, extra in found(known, dict.fromkeys(names, (2, 2)), {}).items():
            assert not extra.reason or extra.is_expected, (known.class_name, name)
        assert found(known, dict.fromkeys(names, (2, 2)), {}).keys() == set(names)


@given(data=st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_what_a_class_of_transformers_ignores_is_accepted(data: st.DataObject) -> None:
    """Names that fit `_keys_to_ignore_on_load_unexpected` of any class."""
    known = data.draw(st.sampled_from(IGNORING), label="class")
    regex = data.draw(st.sampled_from(known.ignored), label="regex")
    alphabet = st.characters(codec="ascii", categories=("Lu", "Ll", "Nd"), include_characters="._*")
    name = data.draw(st.from_regex(regex, alphabet=alphabet), label="name").replace("*", "0")
    assume(re.search(regex, pattern_of(name)) and not known.owns(name) and "" not in name.split("."))
    assert found(known, {name: (2, 2)}, {})[name].is_expected


# --------------------------------------------------------------------------------- what lies beside it


QUANTIZED = {**LLAMA, "quantization_config": {"quant_method": "gptq"}}


@pytest.mark.parametrize("leaf", ["input_bias", "foo", "weight_of_some_package", "a.b"])
@pytest.mark.parametrize("form", ["packed", "fp8", "config", "plain"])
def test_anything_may_lie_beside_a_quantized_weight_and_nothing_beside_a_plain_one(leaf: str, form: str) -> None:
    assert CLASS is not None
    module = "model.layers.0.self_attn.q_proj"
    tensors = {name: entry(name, (2, 2)) for name in llama()}
    tensors[f"{module}.{leaf}"] = entry("x")
    if form in ("packed", "config"):
        del tensors[f"{module}.weight"]
    if form == "packed":
        tensors[f"{module}.qweight"] = entry("qweight", (2, 2), "I32")
    if form == "fp8":
        tensors[f"{module}.weight"] = entry("weight", (2, 2), "F8_E4M3")
    extras = ExtraTensors(CLASS, QUANTIZED if form == "config" else LLAMA, tensors).by_name
    assert extras[f"{module}.{leaf}"].reason == ("" if form == "plain" else QUANTIZED_REASON)


@pytest.mark.parametrize("module", ["q_norm", "sinks", "o_proj.sub"])
def test_a_quantized_model_has_no_tensors_of_other_models_either(module: str) -> None:
    assert CLASS is not None
    tensors = {name: entry(name, (2, 2), "F8_E4M3" if "proj" in name else "BF16") for name in llama()}
    name = f"model.layers.0.self_attn.{module}.weight"
    extra = ExtraTensors(CLASS, QUANTIZED, {**tensors, name: entry(name)}).by_name[name]
    assert bool(extra.reason) is module.startswith("o_proj")


@pytest.mark.parametrize("name", ["vision_tower.blocks.0.weight", "model.visual.blocks.0.weight", "v_head.weight"])
def test_what_lies_outside_of_all_modules_is_accepted_and_may_not_be_left_out(name: str) -> None:
    assert CLASS is not None
    extra = found(CLASS, {**dict.fromkeys(llama(), (2, 2)), name: (2, 2)})[name]
    assert extra == ExtraTensor(OUTSIDE_REASON)


# bert-base-uncased: config of BertForMaskedLM, and the heads of BertForPreTraining and BertModel
OTHER_HEADS = [
    ("BertForMaskedLM", "bert.pooler.dense.weight"),
    ("BertForMaskedLM", "cls.seq_relationship.bias"),
    ("RobertaForMaskedLM", "roberta.pooler.dense.bias"),
    ("AlbertForMaskedLM", "sop_classifier.classifier.weight"),
    ("ViTForImageClassification", "vit.pooler.dense.weight"),
    ("LlamaModel", "lm_head.weight"),
    ("LlamaModel", "score.weight"),
    ("GPT2LMHeadModel", "score.weight"),
]


@pytest.mark.parametrize(("class_name", "name"), OTHER_HEADS)
def test_the_head_of_another_class_may_lie_beside_a_whole_model(class_name: str, name: str) -> None:
    known = lookup(class_name)
    assert known is not None
    extra = found(known, dict.fromkeys([*names_of(known), name], (2, 2)), {})[name]
    assert "another class of this model type" in extra.reason and not extra.is_expected


TEXT = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "MistralForCausalLM"]


@pytest.mark.parametrize("class_name", TEXT)
def test_a_classifier_is_no_language_model_whose_head_is_tied(class_name: str) -> None:
    known = lookup(class_name)
    assert known is not None
    names = [name for name in names_of(known) if name != "lm_head.weight"]
    assert not found(known, dict.fromkeys([*names, "score.weight"], (2, 2)), {})["score.weight"].reason
    assert found(known, dict.fromkeys([*names, "lm_head.weight", "score.weight"], (2, 2)), {})["score.weight"].reason


def test_every_class_is_decoded() -> None:
    assert all(find_class_record(name) is not None for name in class_names())
