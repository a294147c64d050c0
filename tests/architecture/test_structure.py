"""The table's plans, layers, heads and conversions against transformers itself: its plans, its models, its files."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ckptx.architecture import class_table
from ckptx.architecture.architecture import Architecture
from ckptx.architecture.corrections import corrections_of_class
from ckptx.architecture.introspection import meta_model
from ckptx.architecture.introspection.meta_model_names import disk_names_by_scheme, function_to_model_name
from ckptx.architecture.lookup import find_architecture
from ckptx.layout.stages import Stack, StageMap
from ckptx.layout.tensor_parallel_plan import TensorParallelPlan
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion, Op
from tests.architecture.small_models import SMALL, TEXT, VISION, small_model
from tests.support.transformers_version import IS_TABLES_VERSION, style_of

SAMPLE = (
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "MixtralForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
)
LANGUAGE = tuple(
    sorted(
        {
            name
            for mapping in (
                modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
                modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            )
            for names in mapping.values()
            for name in (names if isinstance(names, (list, tuple)) else (names,))
            if class_table.lookup(name) is not None
        }
    )
)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LANGUAGE if name not in SAMPLE]
EVERY = [*SAMPLE, *SLOW]


# Some of their layers have heads of a number and size that no key of the config says: those cuts are not checked.
TWO_KINDS = {
    "Dots3NoteForCausalLM",
    "Dots3NoteForConditionalGeneration",
    "Glm5NextForConditionalGeneration",
    "MiMoV2FlashForCausalLM",
}


def known(class_name: str) -> Architecture:
    found = class_table.lookup(class_name)
    assert found is not None, class_name
    return found


def default_model(class_name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A meta model of the class's defaults, and the config it was asked for."""
    cls = meta_model.find_class(class_name)
    assert cls is not None
    seeds: list[dict[str, Any]] = [{}, *(dict(row.config) for row in corrections_of_class(class_name).defaults)]
    for seed in seeds:
        try:
            return meta_model.build_on_meta(cls, meta_model.default_config_builder(cls)(copy.deepcopy(seed))), seed
        except Exception:  # the class cannot be built from its default config
            continue
    raise AssertionError(class_name)


def asked(class_name: str, config: dict[str, Any]) -> Architecture:
    """What is known of the class: by the table, and under another transformers than the table's by asking that one."""
    if IS_TABLES_VERSION:
        return known(class_name)
    cls = meta_model.find_class(class_name)
    assert cls is not None
    return meta_model.derive_architecture(cls, meta_model.default_config_builder(cls), config)


def own_plan(plan: TensorParallelPlan) -> TensorParallelPlan:
    """The model's own plan, below the overrides."""
    return plan.fallback or plan


# ----------------------------------------------------------------------------------------- plans


def styles_of(class_name: str, plan: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Per parameter whose style differs: what transformers says and what is known here."""
    model, config = default_model(class_name)
    ours = own_plan(asked(class_name, config).tensor_parallel_plan(config))
    wrong = {}
    for name, _ in model.named_parameters():
        theirs = style_of(name, plan)
        found = ours.find_rule(name)
        if theirs != (found[1].style if found else None):
            wrong[name] = (theirs, found[1].style if found else None)
    return wrong


@pytest.mark.parametrize("class_name", EVERY)
def test_every_parameter_has_the_style_that_transformers_gives_it(class_name: str) -> None:
    assert not styles_of(class_name, default_model(class_name)[0].tp_plan or {})


def test_another_plan_would_be_told_from_it() -> None:
    plan = dict(default_model("LlamaForCausalLM")[0].tp_plan)
    plan["model.layers.*.mlp.up_proj"] = "rowwise"
    assert len(styles_of("LlamaForCausalLM", plan)) == 32


# ----------------------------------------------------------------------------------------- heads


@pytest.mark.sampled(1)
@pytest.mark.parametrize("class_name", EVERY)
@pytest.mark.parametrize("is_spelled_out", [False, True], ids=["config without its defaults", "whole config"])
def test_attention_is_cut_into_heads(class_name: str, is_spelled_out: bool) -> None:
    model, config = default_model(class_name)
    config = json.loads(model.config.to_json_string(use_diff=False)) if is_spelled_out else config
    plan = own_plan(known(class_name).tensor_parallel_plan(config))
    cuts = {"colwise": -2, "rowwise": -1}
    wrong = {}
    for name, value in model.named_parameters():
        found = plan.find_rule(name)
        if found is None or not found[1].heads or not name.endswith(".weight"):
            continue
        size = value.shape[cuts[found[1].style]]
        if not any(count * each == size for count, each in found[1].heads):
            wrong[found[0]] = (size, found[1].heads)
    assert not wrong or class_name in TWO_KINDS


@pytest.mark.parametrize(
    "class_name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM"]
)
def test_the_size_of_a_head_is_the_one_that_the_model_computes_with(class_name: str) -> None:
    config = {**TEXT, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    model, _ = small_model(class_name, **config)
    plan = known(class_name).tensor_parallel_plan(config)
    for leaf, count in (("q_proj", 6), ("k_proj", 3), ("v_proj", 3), ("o_proj", 6)):
        name = f"model.layers.0.self_attn.{leaf}.weight"
        found = plan.find_rule(name)
        assert found is not None
        size = model.get_parameter(name).shape[1 if leaf == "o_proj" else 0]
        assert next(pair for pair in found[1].heads if pair[0] * pair[1] == size) == (count, 8)


# ---------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("class_name", EVERY)
def test_stacks_are_the_lists_that_the_model_has(class_name: str) -> None:
    model, config = default_model(class_name)
    stacks = known(class_name).stacks(config)
    names = list(model.state_dict(keep_vars=True))
    for stack in stacks:
        assert len(model.get_submodule(stack.path)) == stack.count
        for path in (*stack.before, *stack.after):
            own = pattern_of(path)
            patterns = known(class_name).name_patterns
            assert any(name == own or name.startswith(own + ".") for name in patterns), path
    planned = [path for path in model.pp_plan or {} if path.endswith("layers")]
    planned = [path for path in planned if isinstance(_submodule(model, path), nn.ModuleList)]
    if len(planned) == 1 and stacks:
        assert [stack.path for stack in stacks] == planned
        ends = [path for path in model.pp_plan or {} if path.endswith("norm") or path == "lm_head"]
        ends = [path for path in ends if any(name.startswith(path + ".") for name in names)]
        assert set(ends) <= set(stacks[-1].after)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


@pytest.mark.slow
def test_nearly_every_language_model_has_its_layers() -> None:
    without = {name for name in LANGUAGE if not known(name).structure.stacks}
    assert without <= {
        "BltForCausalLM",
        "HrmTextForCausalLM",
        "IdeficsForVisionText2Text",
        "PI0ForConditionalGeneration",
        "ReformerModelWithLMHead",
        "UdopForConditionalGeneration",
        "XLMWithLMHeadModel",
    }


@pytest.mark.parametrize(
    "class_name", ["LlamaForCausalLM", "T5ForConditionalGeneration", "Gemma4ForConditionalGeneration"]
)
def test_the_stage_of_every_tensor(class_name: str) -> None:
    model, config = default_model(class_name)
    stacks = known(class_name).stacks(config)
    stages = StageMap(stacks, 2)
    head = "lm_head.weight"
    assert stages.stage_of(head) == 1
    for name in model.state_dict(keep_vars=True):
        in_layer = next((stack for stack in stacks if name.startswith(stack.path + ".")), None)
        if "embed" in name and in_layer is None and "decoder" not in name:
            assert stages.stage_of(name) == 0, name


def test_a_class_that_the_table_cannot_answer_is_asked_itself() -> None:
    text = {"model_type": "mixtral", **TEXT}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": {"model_type": "clip_vision_model", **VISION},
    }
    found = find_architecture(config)
    assert found is not None and found.known_from == "meta model"
    assert found.stacks(config) == (
        Stack("model.language_model.layers", 2, (), ("model.language_model.norm", "lm_head")),
    )
    lead = "model.language_model.layers.0."
    rule = found.tensor_parallel_plan(config).find_rule(lead + "self_attn.k_proj.weight")
    assert rule is not None and rule[1].heads == ((2, 10),)
    targets = {name for each in found.conversions(config) for name in each.targets if each.ops}
    assert targets == {f"model.language_model.layers.*.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")}


# ----------------------------------------------------------------------------------- conversions


@pytest.mark.sampled(5)
@pytest.mark.parametrize("class_name", EVERY)
def test_every_name_on_disk_is_one_of_the_model_or_converted(class_name: str) -> None:
    model, config = default_model(class_name)
    own = set(model.state_dict(keep_vars=True))
    conversions = known(class_name).conversions(config)
    sources = {pattern_of(name) for each in conversions for name in each.sources}
    targets = {pattern_of(name) for each in conversions for name in each.targets}
    written, *others = disk_names_by_scheme(model)
    load = function_to_model_name(model)
    for names in (written, *([name for name in each if load(name) in own] for each in others)):
        assert not {pattern_of(name) for name in names if name not in own} - sources
    assert targets <= known(class_name).model_name_patterns


def converted(tensors: Mapping[str, torch.Tensor], conversions: tuple[Conversion, ...]) -> dict[str, torch.Tensor]:
    """What loading makes of tensors on disk, by the conversions and nothing else."""
    result = dict(tensors)
    for conversion in conversions:
        groups: dict[tuple[str, ...], dict[str, list[tuple[int, torch.Tensor]]]] = {}
        stars = conversion.targets[0].count("*")
        for name, value in tensors.items():
            for source in conversion.sources:
                found = _match(source, name)
                if found is not None:
                    rest = int(found[stars]) if len(found) > stars else 0
                    groups.setdefault(found[:stars], {}).setdefault(source, []).append((rest, value))
                    result.pop(name, None)
        for indices, parts in groups.items():
            columns = [
                [value for _, value in sorted(parts[source], key=lambda p: p[0])] for source in conversion.sources
            ]
            for op in conversion.ops:
                columns = _applied(op, columns, len(conversion.targets))
            assert [len(column) for column in columns] == [1] * len(conversion.targets)
            for target, (value,) in zip(conversion.targets, columns, strict=True):
                pieces = iter(indices)
                result[".".join(next(pieces) if part == "*" else part for part in target.split("."))] = value
    return result


def _match(pattern: str, name: str) -> tuple[str, ...] | None:
    parts, others = pattern.split("."), name.split(".")
    if len(parts) != len(others) or any(a not in ("*", b) for a, b in zip(parts, others, strict=True)):
        return None
    found = tuple(b for a, b in zip(parts, others, strict=True) if a == "*")
    return found if all(each.isdecimal() for each in found) else None


def _applied(op: Op, columns: list[list[torch.Tensor]], targets: int) -> list[list[torch.Tensor]]:
    """One operation as torch does it; written for this test."""
    if op.kind == "merge":
        return [[torch.stack(column, op.dim)] for column in columns]
    if op.kind == "concat":
        return [[torch.cat([value for column in columns for value in column], op.dim)]]
    ((value,),) = columns
    if op.kind == "chunk":
        return [[part] for part in value.chunk(targets, op.dim)]
    if op.kind == "split":
        return [[part] for part in value.split(list(op.args), op.dim)]
    if op.kind == "interleave":
        order = [part for half in (0, 1) for part in range(half, value.shape[op.dim], 2)]
        return [[value.index_select(op.dim, torch.tensor(order))]]
    assert op.kind == "transpose"
    is_transposed = not op.args or value.shape[op.other_dim] != op.args[1]
    return [[value.transpose(op.dim, op.other_dim) if is_transposed else value]]


def saved(class_name: str, folder: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor], dict[str, Any]]:
    model, _ = small_model(class_name, **copy.deepcopy(SMALL[class_name]))
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a file cannot be iterated over)
    return model, tensors, json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("class_name", SMALL)
def test_what_transformers_saves_becomes_the_model_by_the_conversions_alone(class_name: str, tmp_path: Path) -> None:
    model, tensors, config = saved(class_name, tmp_path)
    loaded = converted(tensors, known(class_name).conversions(config))
    wanted = model.state_dict()
    aliases = {pair.namings[0][0] for pair in known(class_name).ties}
    assert loaded.keys() <= wanted.keys() and wanted.keys() - loaded.keys() <= aliases
    for name, value in loaded.items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize(
    ("class_name", "injected"),
    [
        ("MixtralForCausalLM", lambda each: Conversion(each.sources[::-1], each.targets, each.ops)),
        ("GPTNeoXForCausalLM", lambda each: Conversion(each.sources, each.sources, each.ops)),
    ],
)
def test_a_wrong_conversion_would_be_seen(class_name: str, injected: Any, tmp_path: Path) -> None:
    model, tensors, config = saved(class_name, tmp_path)
    loaded = converted(tensors, tuple(map(injected, known(class_name).conversions(config))))
    wanted = model.state_dict()
    assert any(name not in wanted or not torch.equal(value, wanted[name]) for name, value in loaded.items())
