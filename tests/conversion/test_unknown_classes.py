"""Conversions of a class that is neither in the tables nor in transformers: names, ties and notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptx
from ckptx.errors import UnsupportedError, UsageError
from ckptx.formats.registry import open_checkpoint
from ckptx.report.text import conversion_text, inspect_text
from tests.support import tied_remote_model
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf
from tests.support.remote_model import write_remote_model

WTE = "transformer.wte.weight"
CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}}
CONFIG = {"architectures": ["MineForCausalLM"], "model_type": "mine", "tie_word_embeddings": True, **CODE}
UNKNOWN = "MineForCausalLM is an unknown class: its tied weights, layers, names and shapes were not checked"


def model() -> dict[str, Value]:
    """A model whose head would be `unembed.weight`, which nothing but its code tells."""
    return {WTE: value("F32", 8, 4)} | {f"transformer.blocks.{at}.w": value("F32", 4, seed=at) for at in range(2)}


def write_model(root: Path, *, has_code: bool = True) -> Path:
    write_hf(root, model(), config=CONFIG)
    if has_code:
        (root / "modeling_mine.py").write_text("raise AssertionError('this must not run')\n")
    return root


def stored_in(root: Path) -> set[str]:
    return set(open_checkpoint(root).tensors)


@pytest.mark.parametrize("has_code", [True, False])
def test_no_name_of_a_tied_head_is_invented(has_code: bool, tmp_path: Path) -> None:
    report = ckptx.convert("hf2dcp", write_model(tmp_path / "hf", has_code=has_code), tmp_path / "dcp")
    assert stored_in(tmp_path / "dcp") == set(model()) and not report.aliases
    (unknown,) = [note for note in report.notes if note.startswith(UNKNOWN)]
    advice = "--trust-remote-code to use its code, modeling_mine.MineForCausalLM of auto_map"
    assert (advice in unknown) is has_code and ("put its Python code next to config.json" in unknown) is not has_code
    (tied,) = [note for note in report.notes if note.startswith("config.json ties the output head")]
    assert f"the other name of {WTE} is unknown" in tied and "--tie-missing if it is lm_head.weight" in tied


def test_a_head_that_the_user_asks_for_is_written(tmp_path: Path) -> None:
    report = ckptx.convert("hf2dcp", write_model(tmp_path / "hf"), tmp_path / "dcp", tie_missing=True)
    assert report.aliases == {"lm_head.weight": WTE} and any(note.startswith(UNKNOWN) for note in report.notes)


def test_the_llama_layout_keeps_its_alias_with_a_note(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(head=False), config={**LLAMA, **CONFIG})
    report = ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    assert report.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert any(note.startswith(UNKNOWN) for note in report.notes)


def test_a_single_head_keeps_its_name(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": value("F32", 8, 4), "transformer.wpe.weight": value("F32", 8, 4, seed=1)}
    saved = write_dcp(tmp_path / "dcp", tensors, config=CONFIG)
    ckptx.convert("dcp2hf", saved, tmp_path / "hf")
    assert stored_in(tmp_path / "hf") == set(tensors)


# Prefixes of a trainer


def write_trained(root: Path, prefix: str = "model.") -> Path:
    return write_dcp(root, {prefix + name: each for name, each in {**model(), "unembed.w": value("F32", 8)}.items()})


@pytest.mark.parametrize("prefix", ["model.", "app.model."])
def test_a_prefix_that_the_names_of_the_base_lack_is_removed(prefix: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    report = ckptx.convert("dcp2hf", write_trained(tmp_path / "dcp", prefix), tmp_path / "out", base=base)
    assert stored_in(tmp_path / "out") == {*model(), "unembed.w"} and report.prefix == prefix


def test_a_prefix_is_noted_if_the_base_has_no_names(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    (base / "model.safetensors").unlink()
    report = ckptx.convert("dcp2hf", write_trained(tmp_path / "dcp"), tmp_path / "out", base=base)
    assert stored_in(tmp_path / "out") == {f"model.{name}" for name in (*model(), "unembed.w")}
    assert any('pass --source-prefix "model."' in note for note in report.notes)
    report = ckptx.convert(
        "dcp2hf", write_trained(tmp_path / "dcp2"), tmp_path / "out2", base=base, source_prefix="model."
    )
    assert not any("--source-prefix" in note for note in report.notes)
    assert stored_in(tmp_path / "out2") == {*model(), "unembed.w"}


def test_a_prefix_that_the_names_of_the_base_have_stays(tmp_path: Path) -> None:
    base = write_hf(tmp_path / "base", {f"model.{name}": each for name, each in model().items()}, config=CONFIG)
    report = ckptx.convert("dcp2hf", write_trained(tmp_path / "dcp"), tmp_path / "out", base=base)
    assert f"model.{WTE}" in stored_in(tmp_path / "out")
    assert not any("--source-prefix" in note for note in report.notes)


def test_a_round_trip_has_no_note_on_a_prefix(tmp_path: Path) -> None:
    ckptx.convert("hf2dcp", write_hf(tmp_path / "hf", llama(head=False), config=CONFIG), tmp_path / "dcp")
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out")
    assert not any("--source-prefix" in note for note in report.notes)


# Code


def test_code_of_the_base_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = write_remote_model(tmp_path / "base")
    weights = {"lm_head.weight": value("F32", 64, 16), "model.embed_tokens.weight": value("F32", 64, 16)}
    saved = write_dcp(tmp_path / "dcp", {f"wrapped.{name}": each for name, each in weights.items()})
    report = ckptx.convert(
        "dcp2hf", saved, tmp_path / "out", base=base, trust_remote_code=True, allow_config_mismatch=True
    )
    assert report.architecture == {"class": "RemoteForCausalLM", "known_from": "meta model"}
    assert stored_in(tmp_path / "out") == set(weights)


# What commands state about a class that they do not know


@pytest.mark.parametrize("has_code", [True, False])
def test_inspect_states_that_nothing_was_checked(has_code: bool, tmp_path: Path) -> None:
    report = ckptx.inspect(write_model(tmp_path / "hf", has_code=has_code))
    (note,) = [each for each in report.notes if each.startswith(UNKNOWN)]
    assert ("--trust-remote-code" in note) is has_code
    assert "  not checked   names, layers and shapes" in inspect_text(report)
    write_hf(tmp_path / "llama", llama(), config={**LLAMA, "num_hidden_layers": 2})
    assert "not checked" not in inspect_text(ckptx.inspect(tmp_path / "llama"))


def test_stages_of_an_unknown_class_need_its_code(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"pass --trust-remote-code to use its code, modeling_mine.* or leave"):
        ckptx.reshard(write_model(tmp_path / "hf"), tmp_path / "out", pp=2)
    config = {key: value for key, value in CONFIG.items() if key != "auto_map"}
    write_hf(tmp_path / "plain", model(), config=config)
    with pytest.raises(UnsupportedError, match=r"put its Python code next to config\.json, with auto_map"):
        ckptx.reshard(tmp_path / "plain", tmp_path / "out", pp=2)


@pytest.mark.parametrize(
    ("style", "shape", "aligned"),
    [
        ("packed_colwise", (8, 4), True),
        ("packed_colwise", (4, 8, 4), True),
        ("packed_rowwise", (4, 8), True),
        ("packed_colwise", (2, 4), False),  # one rank has no part of either
        ("colwise", (8, 4), None),
        ("colwise", (4, 8, 4), None),
        ("rowwise", (4, 8), None),
        ("embedding_rowwise", (8, 4), True),
        ("replicate", (8, 4), True),
    ],
)
@pytest.mark.parametrize("has_class", [True, False])
def test_only_what_a_plan_declares_is_called_aligned(
    style: str, shape: tuple[int, ...], aligned: bool | None, has_class: bool, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"transformer.mix.w_in": style}))
    config = CONFIG if has_class else None
    source = write_hf(tmp_path / "hf", model() | {"transformer.mix.w_in": value("F32", *shape)}, config=config)
    report = ckptx.reshard(
        source, tmp_path / "out", tp=2, tp_plan=tmp_path / "plan.json", base=None if has_class else "none"
    )
    (rule,) = [each for each in report.rules or () if each["pattern"] == "transformer.mix.w_in"]
    assert rule["aligned"] is aligned
    assert bool(report.unaligned_tensors) is (aligned is False)
    notes = [each for each in report.notes if each.startswith("alignment unknown")]
    assert bool(notes) is (aligned is None and style == "colwise")
    assert not notes or ("1 tensor" in notes[0] and "packed_colwise" in notes[0])
    unaligned = [each for each in report.notes if each.startswith("not aligned")]
    assert all("does not know all heads, key/value groups and fused parts" in each for each in unaligned)


def test_a_pattern_of_fused_experts_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"transformer.blocks.*": "packed_colwise"}))
    with pytest.raises(UsageError, match=r'"transformer\.blocks\.\*\.w": "packed_colwise"'):
        ckptx.reshard(write_model(tmp_path / "hf"), tmp_path / "out", tp=2, tp_plan=tmp_path / "plan.json")


# A model whose tied names only its code tells


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers import the code of the model in a directory of the test."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize("tie_missing", [False, True])
def test_unknown_names_of_a_tie_are_noted_and_not_printed(tie_missing: bool, tmp_path: Path) -> None:
    source = tied_remote_model.write_model(tmp_path / "hf")
    report = ckptx.convert("hf2dcp", source, tmp_path / "dcp", tie_missing=tie_missing)
    assert stored_in(tmp_path / "dcp") == set(tied_remote_model.tensors())
    assert "tok_embeddings" not in conversion_text(report) and "not tied:" not in conversion_text(report)
    (note,) = [each for each in report.notes if each.startswith("config.json ties the output head")]
    advice = "pass --trust-remote-code to use its code, modeling_mine.MineForCausalLM of auto_map"
    assert "neither of their names is known" in note and note.endswith(advice)
    effects = [each for each in report.notes if each.startswith("--tie-missing has no effect")]
    assert len(effects) == tie_missing and all(each.endswith(advice) for each in effects)


@pytest.mark.usefixtures("modules")
def test_the_code_restores_the_original_files_and_a_note_names_it(tmp_path: Path) -> None:
    source = tied_remote_model.write_model(tmp_path / "hf")
    ckptx.convert("hf2dcp", source, tmp_path / "dcp", trust_remote_code=True)
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "without")
    (note,) = [each for each in report.notes if "writing new files" in each]
    assert "MineForCausalLM ties unembed.weight; to restore the original files, pass --trust-remote-code" in note
    assert not any("neither of their names" in each for each in report.notes)
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "with", trust_remote_code=True)
    name = "model.safetensors"
    assert (tmp_path / "with" / name).read_bytes() == (source / name).read_bytes()
    assert not any("writing new files" in each for each in report.notes)


def test_tie_missing_without_a_missing_name_is_noted(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", llama())
    report = ckptx.convert("hf2dcp", source, tmp_path / "dcp", tie_missing=True)
    assert "--tie-missing has no effect: no name of a tied weight is missing" in report.notes
