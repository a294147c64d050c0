"""The run_config.yaml of Megatron Bridge is compared with config.json, and nothing that it names is imported."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from torch import Tensor

import ckptx
from ckptx.errors import CkptxError
from tests.support.megatron_layout import to_megatron
from tests.support.megatron_models import config_of, save_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
BUILDER = "megatron.bridge.models.gpt.gpt_builder.GPTModelBuilder"
OUTER = ("vocab_size", "rotary_base", "rotary_percent", "share_embeddings_and_output_weights")  # of a built model


def fields_of(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Fields of the model provider that Bridge makes of a config, and some others that it writes."""
    fields = {
        "_target_": PROVIDER,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "rotary_base": config["rope_theta"],
        "rotary_percent": 1.0,
        "layernorm_epsilon": config["rms_norm_eps"],
        "layernorm_zero_centered_gamma": False,
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        "moe_router_topk": 2,
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "attention_backend": {
            "_target_": "megatron.core.transformer.enums.AttnBackend", "_call_": True, "_args_": [5], "_name_": "auto",
        },
        "swiglu_limits": [float("inf"), float("nan")],
        "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
    }  # fmt: skip
    return {**fields, **changes}


def run_config_of(model: Any) -> str:
    """The file as Bridge writes it, with other blocks that ckptx does not use."""
    tokenizer = {"_target_": "megatron.bridge.training.tokenizers.config.TokenizerConfig", "model_max_length": 10**30}
    return yaml.safe_dump({"_target_": "megatron.bridge.training.config.ConfigContainer", "tokenizer": tokenizer,
                           "mixed_precision": {"initial_loss_scale": 2**32}, "ft": None, "model": model})  # fmt: skip


def make_model(tmp_path: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Save a small Llama in `hf`, and in Megatron's layout in `megatron`, without arguments; return config, weights."""
    config = config_of("LlamaForCausalLM", **settings)
    weights = save_model(tmp_path / "hf", config)
    dcp.save(to_megatron(weights, config, rows=26), checkpoint_id=tmp_path / "megatron")
    (tmp_path / "megatron" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 7, "content_metadata": {}}, tmp_path / "megatron" / "common.pt")
    return config, weights


def write_run_config(tmp_path: Path, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / "megatron" / "run_config.yaml").write_bytes(data)


def convert(tmp_path: Path, **options: Any) -> Any:
    return ckptx.convert("to-hf", tmp_path / "megatron", tmp_path / "out", **{"base": tmp_path / "hf", **options})


def notes_on_the_run(report: Any) -> list[str]:
    return [note for note in report.notes if "training run" in note or "run_config" in note]


def built(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields of a model that a builder makes: those of the transformer are nested."""
    inner = {name: value for name, value in fields.items() if name not in (*OUTER, "_target_")}
    outer = {name: value for name, value in fields.items() if name in OUTER}
    return {"_builder_": BUILDER, **outer, "transformer": inner}


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"provider": dict, "builder": built}


@pytest.mark.parametrize("form", FORMS)
def test_equal_arguments_are_no_news(form: str, tmp_path: Path) -> None:
    config, weights = make_model(tmp_path)
    write_run_config(tmp_path, run_config_of(FORMS[form](fields_of(config))))
    report = convert(tmp_path)
    assert notes_on_the_run(report) == []
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert notes_on_the_run(ckptx.verify(tmp_path / "hf", tmp_path / "megatron")) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 16}, "num_attention_heads 2, but config.js"),
        ({"num_query_groups": 4}, "num_query_groups 4, but config.json has num_key_value_heads 2"),
        ({"num_query_groups": None}, "num_query_groups 4, but config.json has num_key_value_heads 2"),
        ({"kv_channels": 4}, "kv_channels 4, but config.json has head_dim 8"),
    ],
)
def test_a_config_with_other_heads_is_refused(changes: dict[str, Any], message: str, form: str, tmp_path: Path) -> None:
    config, _ = make_model(tmp_path)
    write_run_config(tmp_path, run_config_of(FORMS[form](fields_of(config, **changes))))
    with pytest.raises(CkptxError) as caught:
        convert(tmp_path)
    assert message in str(caught.value) and "pass --base PATH with the config" in str(caught.value)
    assert str(tmp_path / "megatron" / "run_config.yaml") in str(caught.value)
    assert caught.value.exit_code == 3 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["layernorm_zero_centered_gamma", "rotary_interleaved"])
def test_values_with_another_meaning_are_refused(name: str, form: str, tmp_path: Path) -> None:
    config, _ = make_model(tmp_path)
    write_run_config(tmp_path, run_config_of(FORMS[form](fields_of(config, **{name: True}))))
    with pytest.raises(CkptxError, match=f"the training run had {name}, so .* which is not converted") as caught:
        convert(tmp_path)
    assert caught.value.exit_code == 4 and not (tmp_path / "out").exists()
    assert convert(tmp_path, base="none").exit == 0


def test_latent_attention_has_no_groups_of_heads(tmp_path: Path) -> None:
    config, _ = make_model(tmp_path)
    changes = {"num_query_groups": 1, "kv_channels": 999, "rotary_interleaved": True, "multi_latent_attention": True}
    write_run_config(tmp_path, run_config_of(fields_of(config, **changes)))
    assert notes_on_the_run(convert(tmp_path)) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"num_layers": 5}, "config.json has num_hidden_layers 4, but the training run had num_layers 5"),
        ({"hidden_size": 32}, "config.json has hidden_size 16, but the training run had hidden_size 32"),
        ({"vocab_size": 27}, "config.json has vocab_size 26, but the training run had vocab_size 27"),
        ({"rotary_base": 5e5}, "config.json has rope_theta 10000.0, but the training run had rotary_base 500000.0"),
        ({"layernorm_epsilon": 1e-5}, "has rms_norm_eps 1e-06, but the training run had layernorm_epsilon 1e-05"),
        ({"rotary_percent": 0.25}, "has partial_rotary_factor 0.5, but the training run had rotary_percent 0.25"),
        (
            {"share_embeddings_and_output_weights": True},
            "tie_word_embeddings false, but the training run had share_embeddings_and_output_weights True",
        ),
        ({"moe_router_topk": 8}, "config.json has num_experts_per_tok 2, but the training run had moe_router_topk 8"),
    ],
)
def test_arguments_that_change_the_computation_are_noted(
    changes: dict[str, Any], note: str, form: str, tmp_path: Path
) -> None:
    config, _ = make_model(tmp_path, partial_rotary_factor=0.5, num_experts_per_tok=2)
    write_run_config(tmp_path, run_config_of(FORMS[form](fields_of(config, rotary_percent=0.5) | changes)))
    report = convert(tmp_path)
    (found,) = notes_on_the_run(report)
    assert report.exit == 0 and note in found
    assert [each for each in ckptx.verify(tmp_path / "hf", tmp_path / "megatron").notes if note in each]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("num_attention_heads", "2", "a positive integer"),
        ("num_attention_heads", True, "a positive integer"),
        ("num_attention_heads", 2.0, "a positive integer"),
        ("num_query_groups", 0, "a positive integer"),
        ("kv_channels", [16], "a positive integer"),
        ("rotary_base", {"a": 1}, "a number"),
        ("layernorm_epsilon", False, "a number"),
        ("rotary_interleaved", "true", "true or false"),
        ("layernorm_zero_centered_gamma", 1, "true or false"),
    ],
)
def test_a_field_of_another_type_is_noted(name: str, value: Any, kind: str, tmp_path: Path) -> None:
    config, _ = make_model(tmp_path)
    write_run_config(tmp_path, run_config_of(fields_of(config, **{name: value})))
    report = convert(tmp_path)
    (note,) = notes_on_the_run(report)
    assert report.exit == 0
    assert note.endswith(f": {name} is {value!r}, which must be {kind}; it is not compared with config.json")


def test_fields_that_are_null_or_absent_are_not_compared(tmp_path: Path) -> None:
    config, _ = make_model(tmp_path)
    for model in ({"_target_": PROVIDER}, fields_of(config, num_attention_heads=None, rotary_base=None)):
        write_run_config(tmp_path, run_config_of(model))
        assert notes_on_the_run(convert(tmp_path, overwrite=True)) == []


def bomb() -> str:
    """Nine levels of ten aliases each: 10 ** 9 strings for a parser that expands them."""
    levels = [f"  b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join(["model:", "  b0: &b0 [x]", *levels, "  num_attention_heads: *b9"])


DAMAGED = {
    "empty": (b"", "has no mapping under model"),
    "no model": (b"train: {}", "has no mapping under model"),
    "a list": (b"- model", "has no mapping under model"),
    "a model that is a list": (b"model: [1]", "has no mapping under model"),
    "no YAML": (b"model: {num_layers: 4", "invalid YAML"),
    "no text": (b"model: \xff", "not valid UTF-8"),
    "a null byte": (b"model: {a: \x00}", "not valid YAML"),
    "a tag": (b"model: !!python/object/apply:os.system ['touch ran']", "a tag"),
    "a tag on a field": (b"model: {num_attention_heads: !!int '2'}", "a tag"),
    "aliases": (bomb().encode(), "an alias"),
    "deep": (b"model: " + b"[" * 100_000, "nested deeper"),
    "twice": (b"model: {kv_channels: 8, kv_channels: 16}", '"kv_channels" appears twice'),
    "two models": (b"model: {}\nmodel: {}", '"model" appears twice'),
    "no key": (b"model: {8: 9}", "a key that is not a string"),
    "a huge number": (b"model: {num_attention_heads: " + b"9" * 100_000 + b"}", "more than 63 bits"),
    "not a number": (b"model: {rotary_base: .nan}", "must be finite"),
    "two documents": (b"model: {}\n---\nmodel: {}", "another document"),
    "large": (b"model: {}\n" + b"#" * (512 << 10), "more than 524,288; restore the file"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_cannot_be_read_is_noted(case: str, tmp_path: Path) -> None:
    make_model(tmp_path)
    content, reason = DAMAGED[case]
    write_run_config(tmp_path, content)
    report = convert(tmp_path)
    (note,) = notes_on_the_run(report)
    path = tmp_path / "megatron" / "run_config.yaml"
    assert note.startswith(f"arguments of the training run not compared with config.json: {path}: ")
    assert reason in note and report.exit == 0 and len(note) < 1000 and note.isprintable()
    assert not Path("ran").exists()


def test_nothing_that_the_file_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = make_model(tmp_path)
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    hostile = {"_target_": "evil.run", "_call_": True, "_args_": ["x"]}
    write_run_config(tmp_path, run_config_of(fields_of(config, _target_="evil.run", kv_channels=hostile)))
    (note,) = notes_on_the_run(convert(tmp_path))
    assert "kv_channels is {" in note
    assert not (tmp_path / "ran").exists() and "evil" not in sys.modules


def test_escape_sequences_are_not_printed(tmp_path: Path) -> None:
    config, _ = make_model(tmp_path)
    write_run_config(tmp_path, run_config_of(fields_of(config, kv_channels="\x1b[2J\nfine" * 100)))
    (note,) = notes_on_the_run(convert(tmp_path))
    assert note.isprintable() and "characters omitted" in note


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    make_model(tmp_path)
    os.mkfifo(tmp_path / "megatron" / "run_config.yaml")
    assert notes_on_the_run(convert(tmp_path)) == []  # reading it would wait forever


def test_without_ruamel_a_note_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = make_model(tmp_path)
    write_run_config(tmp_path, run_config_of(fields_of(config, num_query_groups=4)))
    monkeypatch.delitem(sys.modules, "ckptx.untrusted.yaml_text", raising=False)
    for name in [each for each in sys.modules if each.partition(".")[0] == "ruamel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ruamel", None)
    report = convert(tmp_path)
    (note,) = notes_on_the_run(report)
    path = tmp_path / "megatron" / "run_config.yaml"
    assert note == (
        f"arguments of the training run not compared with config.json: {path}: requires ruamel, which is not "
        "installed; pip install 'ckptx[run]'"
    )
    monkeypatch.undo()
    with pytest.raises(CkptxError, match="num_query_groups 4, but"):
        convert(tmp_path, overwrite=True)


def test_arguments_of_both_files_are_compared(tmp_path: Path) -> None:
    config, _ = make_model(tmp_path)
    torch.save({"args": Namespace(norm_epsilon=1e-5)}, tmp_path / "megatron" / "common.pt")
    write_run_config(tmp_path, run_config_of(fields_of(config, rotary_base=5e5)))
    notes = notes_on_the_run(convert(tmp_path))
    assert len(notes) == 2 and "norm_epsilon" in notes[0] and "rotary_base" in notes[1]


def test_a_wrong_base_whose_shapes_are_equal_is_refused(tmp_path: Path) -> None:
    """Without run_config.yaml, the rows of q, k and v would be moved to wrong heads, with exit 0."""
    config, _ = make_model(tmp_path)
    other = {**config, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(other))
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert convert(tmp_path).exit == 0
    write_run_config(tmp_path, run_config_of(fields_of(config)))
    with pytest.raises(CkptxError, match=r"num_attention_heads 4, but config\.json has num_attention_heads 2"):
        convert(tmp_path, overwrite=True)
