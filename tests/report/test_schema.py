"""The schema of reports: up to date, and every command prints documents that it allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ckptx.cli.main import cli, commands
from ckptx.options.commands import COMMANDS
from ckptx.report.schema import build_schema, report_classes
from tests.conversion.steps import CONFIG, TIED
from tests.support.checkpoint_writers import llama, value, write_dcp, write_hf, write_safetensors
from tests.support.command_arguments import arguments_of
from tests.support.runner import CliRunner

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = ROOT / "docs" / "report.schema.json"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    found = json.loads(SCHEMA.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


def test_the_file_says_what_the_dataclasses_say() -> None:
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == build_schema(), "run `python tools/build_schema.py`"


def test_every_command_has_a_report() -> None:
    words = {word for each in report_classes() for word in each.commands}
    assert words == set(commands())


def test_every_field_is_described() -> None:
    for name, made in build_schema()["$defs"].items():
        for field, described in made["properties"].items():
            assert field in ("schema_version", "ok") or described["description"], f"{name}.{field}"


def printed(*words: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        CliRunner().invoke(cli, [*map(str, words), "--json"], standalone_mode=False).stdout
    )
    return document


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_hf(root / "hf", {**llama(), "strange": value("F32", 2)}, shards=2, config=TIED)
    write_hf(root / "plain", llama(), config=CONFIG)
    model = {f"model.{name}": each for name, each in llama().items()}
    moments = {f"optimizer.state.{name}.exp_avg": each for name, each in llama().items()}
    moments["optimizer.state.model.norm.weight.factors"] = value("F32", 2)
    write_dcp(root / "dcp", {**model, **moments}, objects=["optimizer.param_groups"], config=CONFIG)
    (root / "empty").mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shape = dict(llama())["model.layers.0.self_attn.q_proj.weight"][1]
    factors = {
        f"{module}.lora_A.weight": value("F32", 1, shape[1]),
        f"{module}.lora_B.weight": value("F32", shape[0], 1),
    }
    settings = json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]})
    for name in ("adapter", "step"):
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text(settings)
    write_safetensors(root / "adapter" / "adapter_model.safetensors", factors)
    write_dcp(root / "step", factors)
    return root


CASES: dict[str, Callable[[Path, Path], list[object]]] = {
    "inspect ranks": lambda i, o: ["inspect", i / "dcp", "--ranks", "--tensors", "--html", o / "page.html"],
    "hf2dcp": lambda i, o: ["convert", "hf2dcp", i / "hf", o / "x", "--dtype", "fp32"],
    "hf2dcp cut": lambda i, o: ["convert", "hf2dcp", i / "hf", o / "x", "--tp", 3, "--pp", 2],
    "dry run": lambda i, o: ["convert", "hf2dcp", i / "hf", o / "x", "--dry-run"],
    "dcp2hf": lambda i, o: ["convert", "dcp2hf", i / "dcp", o / "x", "--base", i / "hf", "--dtype", "base"],
    "reshard": lambda i, o: ["reshard", i / "dcp", o / "x", "--tp", 2, "--dp-shard", 2],
    "safetensors": lambda i, o: ["reshard", i / "dcp", o / "x", "--to", "safetensors", "--tp", 2],
    "alone": lambda i, o: ["convert", "dcp2hf", i / "dcp", o / "x", "--base", "none"],
    "diff": lambda i, o: ["diff", i / "hf", i / "dcp"],
    "different": lambda i, o: ["verify", i / "hf", i / "dcp", "--dtype", "fp32"],
    "no source": lambda i, o: ["convert", "hf2dcp", i / "gone", o / "x"],
    "no checkpoint": lambda i, o: ["inspect", i / "empty"],
    "usage": lambda i, o: ["reshard", i / "hf", o / "x", "--tp", 0],
}


# These run a model: tests/cli/test_forecast_command.py and tests/robustness_suite/ hold their documents to the schema.
RUNNING = {"forecast", "robustness"}


@pytest.mark.parametrize("words", [words for words in COMMANDS if words not in RUNNING])
def test_the_document_of_each_command_is_as_the_schema_says(
    words: str, inputs: Path, tmp_path: Path, validator: Draft202012Validator
) -> None:
    # Megatron has no place for "strange", and an adapter is in a training checkpoint.
    checkpoint = inputs / {"convert to-megatron": "plain", "convert to-peft": "step"}.get(words, "hf")
    document = printed(*words.split(), *arguments_of(words, checkpoint, tmp_path / "out", inputs / "adapter"))
    assert [error.message for error in validator.iter_errors(document)] == []
    assert (document["command"], document["exit"], document["error"]) == (words, 0, None)


@pytest.mark.parametrize("case", CASES)
def test_documents_are_as_the_schema_says(
    case: str, inputs: Path, tmp_path: Path, validator: Draft202012Validator
) -> None:
    document = printed(*CASES[case](inputs, tmp_path))
    assert [error.message for error in validator.iter_errors(document)] == []
    assert (document["error"] is None) == (case not in ("no source", "no checkpoint", "usage"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("ledger"),
        lambda document: document.update(more=1),
        lambda document: document.update(tensors="7"),
        lambda document: document.update(command="verify"),
        lambda document: document.update(schema_version=2),
        lambda document: document.update(error="something"),
    ],
)
def test_a_document_that_is_none_is_refused(
    spoil: Callable[[dict[str, Any]], Any], inputs: Path, tmp_path: Path, validator: Draft202012Validator
) -> None:
    document = printed(*CASES["hf2dcp"](inputs, tmp_path))
    spoil(document)
    assert list(validator.iter_errors(document)) != []


def test_a_report_of_a_run_is_allowed(validator: Draft202012Validator) -> None:
    """As `verify --run` fills it; that itself is run by the oracle tests."""
    from ckptx.report.documents.verify_run import RunReport

    report = RunReport(
        command="verify", compared=1, differing=[{"level": "bytes"}], inconclusive=[],
        world_size=1, layout={"tp": 1}, stages=1,
        inputs=["text"], distinct_tokens=24, vocabulary_size=99, attention_windows={"sliding_window": [512, 5]},
        without_gradient=[{"name": "x", "experts": [1]}], compute_dtype="float32", checkpointed_layers=0,
            bubble_fraction=0.25, microbatches=3, reference_parts=1,
        gathered_modules=[], bytes_read_per_rank=[1], max_abs="nan",
        max_abs_tolerance=0.0, logits_std=1.0, kl=0.0,
        cosine=1.0, loss=1.5, loss_reference=1.5, loss_tolerance=0.0, gradients=None, grad_max_abs=None,
        grad_closest_to_tolerance=None, first_divergence=None, gradient_differences=[],
    )  # fmt: skip
    assert [error.message for error in validator.iter_errors(report.to_dict())] == []
