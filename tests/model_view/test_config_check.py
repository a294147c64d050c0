"""A checkpoint held against its config: every recipe fits, and whatever is taken away, cut or exchanged is found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.architecture.class_table import shape_rules
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, full_region
from ckptx.errors import InputError
from ckptx.model_view.config_check import match_config
from ckptx.model_view.config_match import ConfigMatch, OtherVocabulary
from ckptx.model_view.view import view_model
from ckptx.report.text import conversion_text
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf
from tests.support.models import EVERY, RECIPES, VOCAB, assert_same_outputs, load, outputs, write
from tests.support.popular_models import LANGUAGE, OTHERS, build
from tests.support.slow import slow_but

EACH = slow_but(EVERY, RECIPES)
# Of the others at least three of ten tensors are known. These switch on what was not measured together with the rest:
# keys and values that layers share, ears, convolutions of a text model behind a tower, heads that do not follow from
# the width.
LEAST = {"gemma4-shared-kv": 0.0, "gemma4-audio": 0.2, "lfm2-vl": 0.2, "mamba2": 0.05}
UNMEASURED = {"Zamba2ForCausalLM", "ZambaForCausalLM"}  # layers share modules: no row of shapes, layers are counted
SIZES = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIG = {**LLAMA, **SIZES}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_experts": 4,
    "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip


def fit(config: Mapping[str, Any], shapes: Mapping[str, Shape], dtype: str = "BF16") -> ConfigMatch:
    """Of tensors without bytes."""
    tensors = {
        name: TensorEntry(name, DTYPES_BY_NAME[dtype], shape, (Chunk(full_region(shape), name, 0, 8),))
        for name, shape in shapes.items()
    }
    return match_config(view_model(Catalog(Path("/nowhere"), "huggingface", tensors, config=dict(config))))


def recipe(name: str) -> tuple[dict[str, Any], dict[str, Shape]]:
    """The config of a recipe and the shapes of its tensors, in the names of the model."""
    with torch.device("meta"):
        model = EVERY[name].model()
    model.config.architectures = [type(model).__name__]
    config = json.loads(model.config.to_json_string())
    return config, {name: tuple(each.shape) for name, each in model.state_dict().items()}


def popular(name: str) -> tuple[dict[str, Any], dict[str, Shape]]:
    """Likewise of a popular class."""
    with torch.device("meta"):
        model = build(name)
    model.config.architectures = [name]
    return json.loads(model.config.to_json_string()), {
        each: tuple(value.shape) for each, value in model.state_dict().items()
    }


def published_experts() -> dict[str, Shape]:
    """A Qwen3-MoE with every expert apart, as it is published."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16), "model.norm.weight": (16,),
    }  # fmt: skip
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (16,), f"{at}.post_attention_layernorm.weight": (16,),
            f"{at}.self_attn.q_proj.weight": (24, 16), f"{at}.self_attn.k_proj.weight": (12, 16),
            f"{at}.self_attn.v_proj.weight": (12, 16), f"{at}.self_attn.o_proj.weight": (16, 24),
            f"{at}.self_attn.q_norm.weight": (6,), f"{at}.self_attn.k_norm.weight": (6,),
            f"{at}.mlp.gate.weight": (4, 16),
        }  # fmt: skip
        for expert in range(4):
            lead = f"{at}.mlp.experts.{expert}"
            shapes |= {f"{lead}.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
            shapes[f"{lead}.down_proj.weight"] = (16, 24)
    return shapes


def llama_shapes(**sizes: int) -> dict[str, Shape]:
    return {name: shape for name, (_, shape, _) in llama(**sizes).items()}


# ---------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize("name", EACH)
def test_every_recipe_fits(name: str) -> None:
    config, shapes = recipe(name)
    found = fit(config, shapes)
    assert found.mismatches == ()
    assert found.checked == "names and shapes"


@pytest.mark.parametrize("name", [*LANGUAGE, *OTHERS])
def test_every_popular_class_fits(name: str) -> None:
    config, shapes = popular(name)
    found = fit(config, shapes)
    assert found.mismatches == ()
    assert found.checked == ("layers" if name in UNMEASURED else "names and shapes")


@pytest.mark.parametrize("name", [name for name in (*LANGUAGE, *OTHERS) if name not in UNMEASURED])
def test_half_an_embedding_of_any_popular_class_is_found(name: str) -> None:
    config, shapes = popular(name)
    tables = (each for each, shape in shapes.items() if len(shape) == 2 and ("embed" in each or "wte" in each))
    table = next(each for each in tables if "vision" not in each)
    assert fit(config, {**shapes, table: (shapes[table][0] // 2, *shapes[table][1:])}).mismatches


LAYERS, MILLION = {"num_hidden_layers": 65_536}, {"num_experts": 1 << 20}
HOSTILE = list(product((LAYERS, MILLION, LAYERS | MILLION), (None, 4, 65_535, 999_999_999)))


@pytest.mark.parametrize(("counts", "index"), HOSTILE)
@pytest.mark.parametrize("form", ["apart", "fused", "none"])
def test_whatever_counts_a_config_has_no_more_is_looked_for_than_is_named(
    counts: dict[str, int], index: int | None, form: str
) -> None:
    """A million experts in each of 65,536 layers are found missing without being counted through."""
    shapes = published_experts()
    if form != "apart":
        shapes = {name: shape for name, shape in shapes.items() if "experts" not in name}
    if form == "fused":
        shapes["model.layers.0.mlp.experts.gate_up_proj"] = (4, 48, 16)
    if index is not None:
        shapes[f"model.layers.0.mlp.experts.{index}.up_proj.weight"] = (24, 16)
        shapes[f"model.layers.{index}.input_layernorm.weight"] = (16,)
    found = fit({**EXPERTS, **counts}, shapes)
    assert 0 < len(found.mismatches) < 1100
    if "num_hidden_layers" in counts:
        assert found.is_truncated and "; and over " in found.summary("x")


# Lists of which the number does not follow from the config: towers of Gemma 4, a projector of two linear layers.
UNCOUNTED = re.compile(
    r"(model\.)?(vision_tower\.encoder|audio_tower)\.layers|model\.visual\.(merger\.mlp|deepstack_\w+)"
)


@pytest.mark.parametrize("name", EACH)
def test_a_layer_of_any_recipe_that_is_wholly_gone_is_found(name: str) -> None:
    """The last of each list, and the first."""
    config, shapes = recipe(name)
    lists: dict[str, set[int]] = {}
    for each in shapes:
        if found := re.match(r"(\D+)\.(\d+)\.", each):
            lists.setdefault(found[1], set()).add(int(found[2]))
    assert lists
    for path, indices in lists.items():
        for index in {min(indices), max(indices)}:
            rest = {each: shape for each, shape in shapes.items() if not each.startswith(f"{path}.{index}.")}
            is_uncounted = config["model_type"].startswith(("gemma4", "qwen")) and UNCOUNTED.fullmatch(path)
            assert fit(config, rest).mismatches or is_uncounted, f"{path}.{index}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EACH)
def test_half_a_tensor_of_any_recipe_is_found(name: str) -> None:
    """One tensor at a time, cut along its first dim: all that the table knows the size of are found."""
    config, shapes = recipe(name)
    assert shape_rules(config["architectures"][0]) is not None
    large = [each for each, shape in shapes.items() if shape and shape[0] > 1]
    found = [
        each for each in large if fit(config, {**shapes, each: (shapes[each][0] // 2, *shapes[each][1:])}).mismatches
    ]
    assert len(found) >= LEAST.get(name, 0.3) * len(large), set(large) - set(found)


def test_experts_fit_as_they_are_published_and_as_the_model_has_them() -> None:
    assert fit(EXPERTS, published_experts()) == ConfigMatch("names and shapes")


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_base_model_without_its_prefix_fits(prefix: str) -> None:
    shapes = {name.removeprefix("model."): shape for name, shape in llama_shapes().items() if name != "lm_head.weight"}
    config = {**CONFIG, "architectures": ["LlamaModel"]}
    assert fit(config, {prefix + name: shape for name, shape in shapes.items()}).mismatches == ()


def test_names_that_the_model_does_not_have_are_no_misfit() -> None:
    shapes = {**llama_shapes(), "mtp.head.weight": (3, 3), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    assert fit(CONFIG, shapes).mismatches == ()


def test_a_config_that_names_the_class_alone_is_not_held_against_anything() -> None:
    assert fit(LLAMA, llama_shapes()).checked == "nothing"


@pytest.mark.parametrize("leaf", ["qweight", "weight_packed", "weight.absmax"])
def test_quantized_modules_have_forms_of_their_own(leaf: str) -> None:
    shapes = llama_shapes()
    at = "model.layers.1.mlp.up_proj"
    shapes = {name: shape for name, shape in shapes.items() if name != f"{at}.weight"}
    assert fit(CONFIG, {**shapes, f"{at}.{leaf}": (3, 24), f"{at}.scales": (1, 24)}).mismatches == ()
    assert fit(CONFIG, shapes).mismatches[0].name == f"{at}.weight"


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3"])
def test_the_shape_of_what_is_no_plain_float_is_not_judged(dtype: str) -> None:
    assert fit(CONFIG, dict.fromkeys(llama_shapes(), (3, 3)), dtype).mismatches == ()


# ------------------------------------------------------------------------------- what does not


@given(data=st.data())
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("model", ["llama", "experts"])
def test_a_tensor_that_is_gone_is_named(model: str, data: st.DataObject) -> None:
    config, shapes = (CONFIG, llama_shapes()) if model == "llama" else (EXPERTS, published_experts())
    names = sorted(set(shapes) - {"lm_head.weight", "model.embed_tokens.weight"})  # those are for whoever decides ties
    gone = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    found = {each.name for each in fit(config, {name: s for name, s in shapes.items() if name not in gone}).mismatches}
    assert found == set(gone) or {name.replace("gate_proj", "up_proj") for name in found} >= {
        name.replace("gate_proj", "up_proj") for name in gone
    }


@given(data=st.data())
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("model", ["llama", "experts"])
def test_a_tensor_of_another_shape_is_named(model: str, data: st.DataObject) -> None:
    config, shapes = (CONFIG, llama_shapes()) if model == "llama" else (EXPERTS, published_experts())
    name = data.draw(st.sampled_from(sorted(shapes)))
    shape = list(shapes[name])
    change = data.draw(st.sampled_from(("halve", "add", "drop", "turn")))
    dim = data.draw(st.integers(0, len(shape) - 1))
    if change == "halve":
        shape[dim] //= 2
    elif change == "add":
        shape[dim] += 1
    elif change == "drop":
        del shape[dim]
    else:
        shape = [*shape, 1]
    found = fit(config, {**shapes, name: tuple(shape)}).mismatches
    assert [each.name for each in found] == [name]
    assert str(shape) in found[0].found
    assert str(list(shapes[name])) in found[0].needed


@given(key=st.sampled_from(sorted(SIZES)), other=st.integers(1, 64))
@settings(deadline=None)
def test_another_number_in_the_config_does_not_fit(key: str, other: int) -> None:
    found = fit({**CONFIG, key: other}, llama_shapes())
    same = other == SIZES[key] or (key == "num_attention_heads" and 8 // other * other == 8 and 8 // other * 2 == 8)
    if same:
        assert found.mismatches == ()
    elif key != "num_attention_heads" and key != "num_key_value_heads":
        assert found.mismatches


@pytest.mark.parametrize("layers", [1, 3, 4, 8])
def test_layers_are_counted(layers: int) -> None:
    found = fit({**CONFIG, "num_hidden_layers": layers}, llama_shapes(layers=2))
    assert found.mismatches
    assert all(each.name.startswith("model.layers.") for each in found.mismatches)


def test_a_layer_that_predicts_further_tokens_is_not_one_too_many() -> None:
    extra = {name: shape for name, shape in llama_shapes(layers=3).items() if ".2." in name}
    shapes = llama_shapes(layers=2)
    assert fit(CONFIG, {**shapes, **extra}).mismatches
    assert fit(CONFIG, {**shapes, **extra, "model.layers.2.eh_proj.weight": (8, 16)}).mismatches == ()
    assert fit({**CONFIG, "num_nextn_predict_layers": 1}, {**shapes, **extra}).mismatches == ()


def test_one_expert_more_or_less_is_named() -> None:
    shapes = published_experts()
    last = "model.layers.1.mlp.experts.3."
    fewer = {name: shape for name, shape in shapes.items() if not name.startswith(last)}
    assert {each.name for each in fit(EXPERTS, fewer).mismatches} == {name for name in shapes if name.startswith(last)}
    more = {**shapes, "model.layers.1.mlp.experts.4.up_proj.weight": (24, 16)}
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in {each.name for each in fit(EXPERTS, more).mismatches}


def test_a_class_without_rows_has_its_layers_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptx.architecture.shapes.shape_rules", lambda name: None)
    found = fit({**CONFIG, "num_hidden_layers": 4}, llama_shapes())
    assert found.checked == "layers"
    assert [each.name for each in found.mismatches] == ["model.layers.2", "model.layers.3"]
    assert "shapes not checked" in str(replace(found, mismatches=()).note)


@pytest.mark.parametrize("rows", [15, 16, 17])
def test_a_class_without_rows_has_the_rows_of_its_embeddings_counted(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("ckptx.architecture.shapes.shape_rules", lambda name: None)
    found = fit(CONFIG, {**llama_shapes(), "model.embed_tokens.weight": (rows, 8)})
    assert [each.name for each in found.mismatches] == ["model.embed_tokens.weight"] * (rows < 16)


# --------------------------------------------------------------------------------- the commands


def _other_base(here: Path, **changes: Any) -> Path:
    return write_hf(here / "base", llama(), config={**CONFIG, **changes})


def _half(tensors: Mapping[str, Value], name: str) -> dict[str, Value]:
    dtype, shape, _ = tensors[name]
    return {**tensors, name: value(dtype, shape[0] // 2, *shape[1:])}


CASES: dict[str, tuple[dict[str, Value], dict[str, Any], str]] = {
    "another size": (llama(), {"hidden_size": 16}, "expected shape"),
    "another vocabulary": (llama(), {"vocab_size": 17}, "the vocabulary has 16 rows, fewer than vocab_size 17"),
    "an incomplete model": (llama(), {"num_hidden_layers": 4}, "model.layers.2"),
    "a shorter config": (llama(layers=4), {}, "model.layers.2"),
    "a half tensor": (
        _half(llama(), "model.layers.0.mlp.up_proj.weight"), {},
        "expected shape [24, 8] by config.json, found shape [12, 8]",
    ),
    "another architecture": (llama(), {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "q_norm"),
    "norms that the class does not have": (
        {**llama(), "model.layers.1.self_attn.q_norm.weight": value("BF16", 4)}, {}, "q_norm.weight\" is in",
    ),
    "biases that the config switches off": (
        {**llama(), "model.layers.1.self_attn.q_proj.bias": value("BF16", 8)}, {}, "depends on attention_bias",
    ),
    "biases that the config switches on": (llama(), {"attention_bias": True}, "because of attention_bias"),
    "an index with a zero in front": (
        {name.replace("layers.1.", "layers.01."): each for name, each in llama().items()}, {}, "layers.01.",
    ),
    "a tensor of a layer after the last": (
        {**llama(), "model.layers.5.strange.weight": value("BF16", 4)}, {}, "found layer 5",
    ),
    "a tensor that is gone": (
        {name: each for name, each in llama().items() if "layers.1.input" not in name}, {}, "layers.1.input_layernorm",
    ),
}  # fmt: skip
LACKING = {
    "an incomplete model", "another architecture", "biases that the config switches on",
    "an index with a zero in front", "a tensor that is gone",
}  # fmt: skip
COMMANDS: dict[str, Callable[..., Any]] = {
    "hf2dcp": lambda here, **options: ckptx.convert("hf2dcp", here / "hf", here / "out", **options),
    "dcp2hf": lambda here, **options: ckptx.convert("dcp2hf", here / "dcp", here / "out", **options),
    "dcp2hf --base": lambda here, **options: ckptx.convert(
        "dcp2hf", here / "bare", here / "out", base=here / "base", **options
    ),
    "reshard": lambda here, **options: ckptx.reshard(here / "dcp", here / "out", tp=2, **options),
    "reshard --base": lambda here, **options: ckptx.reshard(
        here / "bare", here / "out", tp=2, base=here / "base", **options
    ),
    "reshard HF": lambda here, **options: ckptx.reshard(here / "hf", here / "out", tp=2, **options),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_unless_allowed(tmp_path: Path, case: str, command: str) -> None:
    tensors, changes, said = CASES[case]
    config = {**CONFIG, **changes}
    write_hf(tmp_path / "hf", tensors, config=config)
    write_hf(tmp_path / "base", llama(), config=config)
    write_dcp(tmp_path / "dcp", tensors, config=config)
    write_dcp(tmp_path / "bare", tensors, config=None)
    with pytest.raises(InputError) as caught:
        COMMANDS[command](tmp_path)
    assert "does not match its config" in str(caught.value)
    assert said in str(caught.value)
    assert ("; add the missing files, pass --base" in str(caught.value)) == (case in LACKING)
    assert "; pass --base" in str(caught.value) or case in LACKING
    assert "--allow-config-mismatch" in str(caught.value)
    assert not (tmp_path / "out").exists()
    report = COMMANDS[command](tmp_path, allow_config_mismatch=True)
    assert report.ok
    assert report.config_check["mismatches"]
    assert any("does not match its config" in each for each in report.notes)


def _lower_vocab_size(config: Any, by: int) -> Any:
    """The config of a model whose vocabulary was padded by a number of rows."""
    if not isinstance(config, dict):
        return config
    return {
        key: value - by if (key, value) == ("vocab_size", VOCAB) else _lower_vocab_size(value, by)
        for key, value in config.items()
    }


UNKNOWN_VOCABULARY = {"gemma4-shared-kv", "opt"}  # classes whose embeddings have no rule


@pytest.mark.parametrize("name", EACH)
def test_a_padded_vocabulary_is_found_in_each_class(name: str) -> None:
    config, shapes = recipe(name)
    vocabulary = fit(_lower_vocab_size(config, 5), shapes).padded_vocabulary
    if name in UNKNOWN_VOCABULARY:
        assert vocabulary is None
        return
    assert vocabulary is not None
    assert (vocabulary.vocab_size, vocabulary.rows) == (VOCAB - 5, VOCAB)
    changed = {edit["key"]: edit["after"] for edit in vocabulary.edits()}
    assert changed in ({"vocab_size": VOCAB}, {"text_config.vocab_size": VOCAB})


def padded(rows: int = 20, **others: Value) -> dict[str, Value]:
    """A Llama with more rows than its vocab_size of 16."""
    return {**llama(), EMBEDDING: value("BF16", rows, 8), HEAD: value("BF16", rows, 8, seed=1), **others}


OTHER_CAUSES: dict[str, dict[str, Value]] = {
    "embedding and head of different sizes": padded(**{HEAD: value("BF16", 24, 8)}),
    "a head of the size of the config": padded(**{HEAD: value("BF16", 16, 8)}),
    "fewer rows": padded(12),
    "another tensor of a wrong shape": padded(**{"model.norm.weight": value("BF16", 9)}),
    "a surplus layer": padded(**{"model.layers.2.mlp.up_proj.weight": value("BF16", 24, 8)}),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_padded_vocabulary_is_written_into_the_config(tmp_path: Path, command: str) -> None:
    write_hf(tmp_path / "hf", padded(), config=CONFIG)
    write_hf(tmp_path / "base", llama(), config=CONFIG)
    write_dcp(tmp_path / "dcp", padded(), config=CONFIG)
    write_dcp(tmp_path / "bare", padded(), config=None)
    with pytest.raises(InputError) as caught:
        COMMANDS[command](tmp_path)
    finding = "does not match its config: the vocabulary is padded from 16 to 20 rows"
    assert f"{finding}; pass --allow-config-mismatch to write vocab_size 20 into the config" in str(caught.value)
    report = COMMANDS[command](tmp_path, allow_config_mismatch=True)
    assert {"key": "vocab_size", "before": 16, "after": 20} in report.config_edits
    assert "config.json: vocab_size: 16 -> 20" in conversion_text(report).splitlines()
    assert any(note.endswith(finding) for note in report.notes)
    assert {each["name"] for each in report.config_check["mismatches"]} == {EMBEDDING, HEAD}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 20
    output = ckptx.inspect(tmp_path / "out")
    assert output.config_check is not None and output.config_check["mismatches"] == []


@pytest.mark.parametrize("case", OTHER_CAUSES)
def test_a_config_with_another_mismatch_is_not_edited(tmp_path: Path, case: str) -> None:
    write_hf(tmp_path / "hf", OTHER_CAUSES[case], config=CONFIG)
    with pytest.raises(InputError, match="to convert it anyway") as caught:
        ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "out")
    assert "padded" not in str(caught.value)
    report = ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "out", allow_config_mismatch=True)
    assert report.config_edits == []
    assert any(note.endswith("; loaders that use this config may reject the output") for note in report.notes)


def test_a_vocabulary_that_is_too_small_is_named(tmp_path: Path) -> None:
    """Its config is not edited: the tokenizer may have ids beyond the rows."""
    write_hf(tmp_path / "hf", llama(), config={**CONFIG, "vocab_size": 19})
    expected = "does not match its config: the vocabulary has 16 rows, fewer than vocab_size 19"
    with pytest.raises(InputError, match=f"{expected}; pass --base PATH with the config that it was trained with, or"):
        ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "out")
    assert any(note.endswith(expected) for note in ckptx.inspect(tmp_path / "hf").notes)
    report = ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "out", allow_config_mismatch=True)
    assert report.config_edits == []
    assert any(note.endswith("; loaders that use this config may reject the output") for note in report.notes)


def test_only_the_vocab_size_of_the_padded_model_changes() -> None:
    config, shapes = recipe("gemma3-vlm")
    padded_config = _lower_vocab_size(config, 5)
    size = VOCAB - 5
    two_keys = fit({**padded_config, "vocab_size": size}, shapes).padded_vocabulary
    assert two_keys == OtherVocabulary(size, VOCAB, tuple(sorted(("text_config.vocab_size", "vocab_size"))))
    other_size = fit({**padded_config, "vocab_size": 7}, shapes).padded_vocabulary
    assert other_size == OtherVocabulary(size, VOCAB, ("text_config.vocab_size",))


@pytest.mark.parametrize("name", ["llama-tied", "llama-untied", "gemma3-vlm", "bart"])
def test_transformers_loads_a_model_with_a_padded_vocabulary(tmp_path: Path, name: str) -> None:
    write(EVERY[name], tmp_path / "padded")
    ckptx.convert("hf2dcp", tmp_path / "padded", tmp_path / "dcp")
    config = json.loads((tmp_path / "padded" / "config.json").read_text())
    (tmp_path / "dcp" / "config.json").unlink()
    (tmp_path / "dcp" / "ckptx.json").unlink()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(_lower_vocab_size(config, 5)))
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=tmp_path / "base", allow_config_mismatch=True)
    made, reference = load(tmp_path / "out"), load(tmp_path / "padded")
    assert_same_outputs(outputs(made, EVERY[name].inputs()), outputs(reference, EVERY[name].inputs()))
    made.resize_token_embeddings(VOCAB - 5)
    assert made.get_input_embeddings().weight.shape[0] == VOCAB - 5


@pytest.mark.parametrize("case", CASES)
def test_inspect_diff_and_verify_only_note_it(tmp_path: Path, case: str) -> None:
    tensors, changes, said = CASES[case]
    write_hf(tmp_path / "a", tensors, config={**CONFIG, **changes})
    report = ckptx.inspect(tmp_path / "a")
    assert report.ok
    assert report.config_check["mismatches"]
    compared, verified = ckptx.diff(tmp_path / "a", tmp_path / "a"), ckptx.verify(tmp_path / "a", tmp_path / "a")
    for each in (report, compared, verified):
        assert each.ok
        assert any("does not match its config" in note and said in note for note in each.notes)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_lies_outside_of_the_class_passes_with_a_warning(tmp_path: Path, command: str) -> None:
    tensors = {**llama(), "vision_tower.blocks.0.weight": value("BF16", 4), "v_head.bias": value("BF16", 1)}
    write_hf(tmp_path / "hf", tensors, config=CONFIG)
    write_hf(tmp_path / "base", llama(), config=CONFIG)
    write_dcp(tmp_path / "dcp", tensors, config=CONFIG)
    write_dcp(tmp_path / "bare", tensors, config=None)
    report = COMMANDS[command](tmp_path)
    assert report.ok and report.config_check["mismatches"] == []
    assert [row["tensors"] for row in report.config_check["extra_tensors"]] == [2]
    (note,) = (each for each in report.notes if "not defined by" in each)
    assert note.startswith(
        '2 tensors not defined by LlamaForCausalLM, written unchanged: "vision_tower.blocks.0.weight"'
    )


def test_inspect_and_verify_do_not_claim_to_write_extra_tensors(tmp_path: Path) -> None:
    tensors = {**llama(), "vision_tower.blocks.0.weight": value("BF16", 4)}
    hf = write_hf(tmp_path / "hf", tensors, config=CONFIG)
    for report in (ckptx.inspect(hf), ckptx.verify(hf, hf)):
        (note,) = {each for each in report.notes if "vision_tower" in each}
        assert note.startswith(f'{hf}: 1 tensor not defined by LlamaForCausalLM: "vision_tower.blocks.0.weight" (')


def test_an_error_about_config_json_names_its_directory(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    base = write_hf(tmp_path / "base", llama(), config={**CONFIG, "num_hidden_layers": -1})
    message = re.escape(f"{base}/config.json: num_hidden_layers is -1 and must be between 0 and")
    for src, options in ((source, {"base": base}), (base, {})):
        with pytest.raises(InputError, match=message):
            ckptx.reshard(src, tmp_path / "out", tp=2, **options)
    assert re.match(message, ckptx.inspect(base).notes[0])
