"""The files of corrections: what the reader refuses, and that every row is of a known model and changes something."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptx.architecture import class_table, corrections, model_files
from ckptx.architecture.correction_schema import InvalidCorrectionError, decode_corrections
from ckptx.architecture.correction_types import (
    Corrections,
    ForwardCorrection,
    PlanCorrection,
    SequenceParallelModules,
    TrainerNamingCorrection,
    expand_braces,
    filter_by_class,
)
from ckptx.architecture.corrections import (
    config_keys_of_corrections,
    corrections_of,
    corrections_of_class,
    plan_corrections,
)
from ckptx.architecture.trainer_naming import megatron, torchtitan
from tests.support.corrections import all_corrections, patched_corrections
from tests.support.import_tool import ROOT
from tests.support.slow import slow_but
from tests.support.transformers_version import requires_tables_version

ROW = {"modules": "@layers.*.mlp.fc", "style": "colwise", "reason": "for a test"}
INPUT = {"kind": "images", "form": "tiles", "reason": "for a test"}
LAYERS = {"class": "A", "language": ["model.layers"], "reason": "for a test"}


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


# ------------------------------------------------------------------------------------- the reader


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"plans": [ROW]}, 'x.json: section "plans" is unknown; use one of plan, absent'),
        ({"plan": [ROW, {**ROW, "module": "y"}]}, 'x.json: plan, entry 2: key "module" is unknown; use one of mod'),
        ({"plan": [without(ROW, "reason")]}, 'x.json: plan, entry 1: has no "reason"; add it'),
        ({"plan": [{**ROW, "reason": ""}]}, 'x.json: plan, entry 1: reason is "" and must be a string'),
        ({"plan": [{**ROW, "modules": 3}]}, "x.json: plan, entry 1: modules is 3 and must be a string"),
        ({"plan": [{**ROW, "style": "colwize"}]}, 'x.json: plan, entry 1: style is "colwize" and must be one of'),
        ({"plan": [{**ROW, "heads": [["a"]]}]}, "and must be pairs of a number of heads and their size"),
        ({"plan": [{**ROW, "groups": "hidden_size"}]}, 'groups is "hidden_size" and must be a list'),
        ({"plan": [{**ROW, "when": "a +"}]}, 'when is "a +" and must be an expression'),
        ({"plan": [3]}, "x.json: plan, entry 1: expected an object, found 3"),
        ({"plan": []}, "x.json: expected an object of sections, each a list of at least one entry"),
        ([ROW], "x.json: expected an object of sections"),
        ({"inputs": [{**INPUT, "kind": "smells"}]}, 'inputs, entry 1: kind is "smells" and must be one of images'),
        ({"inputs": [{**INPUT, "settings": [1]}]}, "settings is [1] and must be an object"),
        ({"inputs": [INPUT, INPUT]}, "x.json: inputs, entry 2: an earlier entry sets images already"),
        ({"layers": [without(LAYERS, "language")]}, 'x.json: layers, entry 1: has no "language"'),
        ({"layers": [LAYERS, LAYERS]}, "x.json: layers, entry 2: an earlier entry sets layers of A already"),
        ({"as_tower": [{"any_size": 1, "reason": "r"}]}, "any_size is 1 and must be true or false"),
        ({"forward": [{"class": "A", "sequence": {"layer": "x"}, "reason": "r"}]}, 'key "layer" is unknown'),
        (
            {"forward": [{"class": "A", "head": "h", "reason": "r"}, {"class": "A", "head": "g", "reason": "r"}]},
            "x.json: forward, entry 2: an earlier entry sets head of A already",
        ),
    ],
)  # fmt: skip
def test_what_is_no_row_is_refused_by_file_and_row(document: Any, message: str) -> None:
    with pytest.raises(InvalidCorrectionError) as caught:
        decode_corrections(json.dumps(document), "x.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "x.json: Expecting"), ('{"plan": [], "plan": []}', 'x.json: key "plan" appears twice')]
)
def test_what_is_no_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidCorrectionError, match=message):
        decode_corrections(text, "x.json")


def test_rows_are_what_the_file_says() -> None:
    document = {
        "plan": [{**ROW, "heads": [["num_heads", "head_dim ?? 4"]], "when": "gated ?? 0"}],
        "forward": [
            {
                "class": "A", "sequence": {"layers": "m.layers", "whole": ["attn"]}, "runs": ["m.{a,b}.q"],
                "styles": {"m.{a,b}.n": "replicate"}, "reason": "for a test",
            }
        ],
    }  # fmt: skip
    assert decode_corrections(json.dumps(document), "x.json") == Corrections(
        plan=(
            PlanCorrection(
                "@layers.*.mlp.fc", "colwise", "for a test", (), (("num_heads", "head_dim ?? 4"),), "gated ?? 0"
            ),
        ),
        forward=(
            ForwardCorrection(
                "A", "for a test", "", SequenceParallelModules("m.layers", ("attn",)), ("m.a.q", "m.b.q"),
                {"m.a.n": "replicate", "m.b.n": "replicate"},
            ),
        ),
    )  # fmt: skip


def test_alternatives_are_spelled_out() -> None:
    assert expand_braces("a.{b,c}.{d,e}") == ["a.b.d", "a.b.e", "a.c.d", "a.c.e"]


@pytest.mark.parametrize("said", ["../models/llama", "llama/../llama", "/etc/passwd", "", "llama\0", "LLAMA", "*"])
def test_what_a_checkpoint_calls_its_model_type_is_no_part_of_a_path(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was opened"))
    assert corrections_of(said) == Corrections()


def test_the_file_at_hand_is_opened_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    corrections._read_corrections.cache_clear()
    read: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    assert plan_corrections("gpt2", "gpt2") and config_keys_of_corrections("gpt2", "gpt2") >= {"hidden_size"}
    assert plan_corrections("olmo", "olmo") == ()
    assert read == ["gpt2.json"]


def test_reading_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from ckptx.architecture.corrections import corrections_of\n"
        "assert corrections_of('qwen3_vl').inputs\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_class_is_known_where_transformers_defines_it_and_nowhere_else() -> None:
    ours = corrections_of("gemma3")
    assert ours.layers and corrections_of_class("Gemma3ForConditionalGeneration") == ours
    module = "transformers.models.gemma3.modeling_gemma3"
    assert corrections_of_class("Gemma3ForConditionalGeneration", module) == ours
    for other in ("mine", "transformers.models.gemma3n.modeling_gemma3n", "transformers.models.gemma3_mine"):
        assert corrections_of_class("Gemma3ForConditionalGeneration", other) == Corrections()
    assert corrections_of_class("NoSuchClass") == Corrections()


def test_plan_rows_of_a_composite_may_lie_with_itself_or_with_its_text_model() -> None:
    row = PlanCorrection("@layers.*.mlp.fc", "colwise", "for a test", groups=("widths",))
    with patched_corrections("llava", plan=(row,)):
        assert plan_corrections("qwen2", "llava") == (row,)
        assert config_keys_of_corrections("qwen2", "llava") == {"widths"}
        assert plan_corrections("gpt2", "llava") == corrections_of("gpt2").plan
    assert plan_corrections("qwen2", "llava") == ()


# -------------------------------------------------------------------------------------- the files


def test_every_file_is_of_a_known_model_type_and_its_classes_are_of_that_type() -> None:
    types = model_files.read_index()["classes"]
    for model_type, rows in all_corrections().items():
        assert model_type in types.values(), model_type
        named = [
            *rows.forward,
            *rows.layers,
            *rows.torchtitan,
            *rows.megatron,
            *(row for row in rows.inputs if row.class_name),
        ]
        for row in named:
            assert types[row.class_name] == model_type, (model_type, row)


def test_rows_of_one_class_stand_in_one_file() -> None:
    rows = corrections_of("deepseek_v3").forward
    assert filter_by_class(rows, "DeepseekV3ForCausalLM") == rows and len(rows) == 2
    assert filter_by_class(rows, "DeepseekV3Model") == ()


def names_by_type() -> dict[str, set[str]]:
    """The patterns of names of all classes of a model type."""
    found: dict[str, set[str]] = {}
    for class_name, model_type in model_files.read_index()["classes"].items():
        architecture = class_table.lookup(class_name)
        found.setdefault(model_type, set()).update(architecture.model_name_patterns if architecture else ())
    return found


def test_every_layers_row_names_the_decoder_and_another_list_of_its_class() -> None:
    """The decoder of the transformers that was asked is among them, and no list of a group is a misprint."""
    for model_type, rows in all_corrections().items():
        for row in rows.layers:
            names = class_table.lookup(row.class_name).model_name_patterns  # type: ignore[union-attr]
            groups = {"language": row.language, "vision": row.vision, "audio": row.audio}
            found = {
                group for group, paths in groups.items()
                if any(name.startswith(f"{path}.*.") for path in paths for name in names)
            }  # fmt: skip
            wanted = {group for group, paths in groups.items() if paths}
            assert found == wanted - ({"vision"} if row.class_name in TIMM else set()), (model_type, row)


# Towers for images that are of timm, whose lists no row can name.
TIMM = {"Gemma3nForConditionalGeneration"}


def test_names_of_parts_are_those_of_one_model_type() -> None:
    """A name that several have belongs to `wrap`, one that none has to nobody."""
    of_type = {kind: {part for name in names for part in name.split(".")} for kind, names in names_by_type().items()}
    for model_type, rows in all_corrections().items():
        for part in (part for row in rows.layer_parts for part in (*row.attention, *row.mlp, *row.norms)):
            assert {kind for kind, parts in of_type.items() if part in parts} == {model_type}, part


def test_every_form_of_torchtitan_is_of_a_class() -> None:
    rows = [row for each in all_corrections().values() for row in each.torchtitan]
    assert {row.form for row in rows} == set(torchtitan.FORMS)
    row = TrainerNamingCorrection("MixtralForCausalLM", "none", "for a test")
    with (
        patched_corrections("mixtral", torchtitan=(row,)),
        pytest.raises(InvalidCorrectionError, match="is not a form of names"),
    ):
        torchtitan.form_of("MixtralForCausalLM")


def test_every_form_of_megatron_is_of_a_class() -> None:
    rows = [row for each in all_corrections().values() for row in each.megatron]
    assert {row.form for row in rows} == set(megatron.FORMS)
    row = TrainerNamingCorrection("GemmaForCausalLM", "none", "for a test")
    with (
        patched_corrections("gemma", megatron=(row,)),
        pytest.raises(InvalidCorrectionError, match="is not a form of names"),
    ):
        megatron.form_of("GemmaForCausalLM")


# ---------------------------------------------------------- what only a class itself can tell

FEW = ("dbrx", "rag")  # the others take a second or two each


@requires_tables_version  # how another version lays out a class is no judge of rows about this one
@pytest.mark.parametrize(
    "model_type", slow_but([kind for kind, rows in all_corrections().items() if rows.no_stacks or rows.defaults], FEW)
)
def test_rows_for_making_the_files_change_what_is_made(model_type: str) -> None:
    from ckptx.architecture.introspection import meta_model

    rows = corrections_of(model_type)
    classes = [meta_model.find_class(name) for name in model_files.classes_of(model_type)]
    assert not rows.defaults or any(not builds(cls, {}) and builds(cls, rows.defaults[0].config) for cls in classes)
    if rows.no_stacks:
        before = [stacks(cls) for cls in classes]
        with patched_corrections(model_type, no_stacks=()):
            assert [stacks(cls) for cls in classes] != before


def builds(cls: Any, values: Mapping[str, Any]) -> bool:
    from ckptx.architecture.introspection import meta_model

    try:
        return bool(meta_model.derive_architecture(cls, meta_model.default_config_builder(cls), values))
    except Exception:  # whatever the class raises
        return False


def stacks(cls: Any) -> tuple[Any, ...]:
    from ckptx.architecture.introspection import meta_model

    try:
        return meta_model.derive_architecture(cls, meta_model.default_config_builder(cls), {}).structure.stacks
    except Exception:  # whatever the class raises
        return ()
