"""`ckptx forecast`: what it passes on, what it prints and writes, how it ends; some forecasts of a tiny model."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import ckptx
from ckptx.api import forecast as forecasting
from ckptx.cli import main as main_module
from ckptx.cli.main import cli, commands
from ckptx.errors import EnvironmentProblem, UnsupportedError
from ckptx.runtime.parallel.pipeline.schedules import can_split_backward
from tests.report.made import forecasted, searched
from tests.report.pages import Page, fault_of_page
from tests.support.runner import CliRunner

SCHEMA = Path(__file__).resolve().parent.parent.parent / "docs" / "report.schema.json"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The calls of a stand-in for `forecast`, which reports what was made."""
    found: list[tuple[Any, dict[str, Any]]] = []

    def stand_in(model: Any = None, **options: Any) -> Any:
        found.append((model, options))
        options["log"].note("a note")
        return forecasted(notes=["a note"])

    monkeypatch.setattr(forecasting, "forecast", stand_in)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def ran(*words: object) -> Any:
    return CliRunner().invoke(cli, ["forecast", *map(str, words)], standalone_mode=False)


# ------------------------------------------------------------------------------------------------------- what it runs

WORDS = [
    "MODEL", "--tp", 2, "--pp", 4, "--dp-shard", 3, "--dp-replicate", 5, "--pp-split", "vllm", "--batch", 8, "--seq",
    99, "--microbatches", 4, "--schedule", "gpipe", "--activation-checkpointing", "full", "--ac-scope", "language",
    "--dtype", "fp32", "--param-dtype", "bf16", "--reduce-dtype", "fp32", "--optimizer", "sgd", "--loss", "full",
    "--gpu_memory", "80GB", "--images", 2, "--revision", "v1", "--token", "secret", "--cache-dir", "here",
    "--trust-remote-code",
]  # fmt: skip


def test_options_are_passed_on(calls: list[tuple[Any, dict[str, Any]]]) -> None:
    assert ran(*WORDS).return_value == 0
    ((model, options),) = calls
    assert options.pop("log") is not None
    assert (model, options) == (
        "MODEL",
        {
            "tp": 2, "pp": 4, "dp_shard": 3, "dp_replicate": 5, "pp_split": "vllm", "batch": 8, "seq": 99,
            "microbatches": 4, "schedule": "gpipe", "activation_checkpointing": "full", "ac_scope": "language",
            "dtype": "fp32", "param_dtype": "bf16", "reduce_dtype": "fp32", "optimizer": "sgd", "loss": "full",
            "gpu_memory": "80GB", "images": 2, "revision": "v1", "token": "secret", "cache_dir": "here",
            "trust_remote_code": True,
        },
    )  # fmt: skip


def test_every_option_is_an_argument_of_the_function() -> None:
    of_command = {param.name for param in commands()["forecast"].params} - {"quiet", "verbose", "no_color"}
    of_command -= {"html", "as_json", "report_file", "loss__none", "loss__whole"}
    assert of_command | {"log"} == set(inspect.signature(ckptx.forecast).parameters)


def test_what_is_not_given_is_the_default(calls: list[tuple[Any, dict[str, Any]]]) -> None:
    assert ran("MODEL").return_value == 0
    assert set(calls[0][1]) == {"log"}


def test_the_defaults_that_help_says_are_those_of_the_function() -> None:
    defaults = {name: each.default for name, each in inspect.signature(ckptx.forecast).parameters.items()}
    checked = set()
    for param in commands()["forecast"].params:
        default = defaults.get(str(param.name))
        if isinstance(default, (str, int)) and not isinstance(default, bool):
            assert getattr(param, "show_default", None) == str(default), param.name
            checked.add(param.name)
    assert checked >= {"seq", "schedule", "dtype", "optimizer", "images"}


def test_losses_and_recipes_are_passed_on(calls: list[tuple[Any, dict[str, Any]]]) -> None:
    assert ran("MODEL", "--no-loss").return_value == 0
    words = ["--recipe", "llama_tiny", "--set", "layout.tp=2", "--set", "a.b=c=d", "--gpu-memory", "1GB"]
    assert ran(*words).return_value == 0
    assert calls[0][1]["loss"] == "none"
    model, options = calls[1]
    assert options.pop("log") is not None
    assert model is None
    assert options == {"recipe": "llama_tiny", "overrides": ("layout.tp=2", "a.b=c=d"), "gpu_memory": "1GB"}


def test_a_search_is_passed_on(calls: list[tuple[Any, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--search", "--gpus", 8, "--gpu-memory", "80GB"]
    assert ran("MODEL", *words, "--tp", 1).return_value == 0
    assert ran("--recipe", "llama_tiny", *words).return_value == 0
    for (_, options), own in zip(calls, ({"tp": 1}, {"recipe": "llama_tiny"}), strict=True):
        assert {"search": True, "gpus": 8, "gpu_memory": "80GB", **own}.items() <= options.items()
    monkeypatch.setattr(forecasting, "forecast", lambda *_, **__: searched())
    result = ran("MODEL", *words)
    assert result.return_value == 0 and "BEST: --tp 2" in result.stdout
    document = json.loads(ran("MODEL", *words, "--json").stdout)
    assert [error.message for error in Draft202012Validator(json.loads(SCHEMA.read_text())).iter_errors(document)] == []


# --------------------------------------------------------------------------------------------------- a model of its own


def test_a_step_is_forecast_judged_and_drawn(model: Path, tmp_path: Path) -> None:
    """One run for all of it: it does not fit, so exit is 1; text, document, page and -q say the same."""
    html, report = tmp_path / "a.html", tmp_path / "a.json"
    words = [model, "--seq", 32, "--microbatches", 2, "--gpu-memory", "1GB", "--html", html, "--report", report]
    result = ran(*words)
    assert result.return_value == 1
    document = json.loads(report.read_text())
    assert [error.message for error in Draft202012Validator(json.loads(SCHEMA.read_text())).iter_errors(document)] == []
    assert (document["command"], document["exit"], document["ok"], document["fits"]) == ("forecast", 1, False, False)
    (row,) = document["by_pipeline_rank"]
    assert row["peak"] == sum(row["by_kind"].values()) > row["between_steps"] > 0
    assert row["by_kind"]["parameters"] == 2 * document["parameters"] + 2 * 8 * 4  # and frequencies, twice, in float32
    assert "LlamaForCausalLM" in result.stdout and "DOES NOT FIT: " in result.stdout.splitlines()[-3]
    assert result.stdout.splitlines()[-2].startswith(
        "other precision: float32 parameters and optimizer state, computed in bfloat16"
    )
    other = document["other_precision"]
    assert other["peak"] > row["peak"] and other["fits"] is False
    chosen = ran(*words[:5], "--dtype", "fp32", "--param-dtype", "bf16", "--reduce-dtype", "fp32", "--json")
    chosen_document = json.loads(chosen.stdout)
    assert chosen_document["by_pipeline_rank"][0]["peak"] == other["peak"], "what the options in that line say"
    assert chosen_document["other_precision"] is None
    assert fault_of_page(html.read_text(), has_script=False) is None
    (said,) = [each.text for each in Page(html.read_text()).all("p", "verdict")]
    assert said == result.stdout.splitlines()[-3].replace("DOES NOT FIT:", "DOES NOT FIT")


@pytest.mark.parametrize("schedule", ["zbvzerobubble", "interleavedzerobubble"])
def test_a_schedule_without_fsdp_has_no_other_precision(schedule: str, tmp_path: Path) -> None:
    """The other usual precision needs FSDP2, with which such a schedule is refused."""
    if not can_split_backward():
        pytest.skip("this torch cannot run schedules that split the backward pass")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    words = [tmp_path, "--seq", 16, "--pp", 2, "--schedule", schedule, "--json"]
    document = json.loads(ran(*words).stdout)
    assert (document["exit"], document["error"], document["other_precision"]) == (0, None, None)


def test_what_fits_ends_with_0(model: Path) -> None:
    result = ran(model / "config.json", "--seq", 16, "--gpu-memory", "80GB", "--optimizer", "none", "--json")
    assert result.return_value == 0
    document = json.loads(result.stdout)
    assert document["fits"] is True and document["settings"]["loss"] == "sharded"
    assert document["by_pipeline_rank"][0]["by_kind"]["optimizer"] == 0


def test_a_config_may_have_another_name(model: Path, tmp_path: Path) -> None:
    words = ["--seq", 16, "--dtype", "bf16", "--json"]
    expected = json.loads(ran(model, *words).stdout)
    (tmp_path / "llama-3b.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "queue.py").mkdir()  # not a file, so it is not copied with the config
    found = json.loads(ran(tmp_path / "llama-3b.json", *words).stdout)
    assert found["by_pipeline_rank"][0]["peak"] == expected["by_pipeline_rank"][0]["peak"]
    assert {each.name for each in tmp_path.iterdir()} == {"llama-3b.json", "queue.py"}


@pytest.mark.parametrize(
    ("name", "text", "code"), [("x.txt", "{}", 2), ("x.json", "{}", 2), ("x.json", "[]", 3), ("x.json", "{", 3)]
)
def test_another_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str, code: int
) -> None:
    (tmp_path / name).write_text(text)
    assert ended(monkeypatch, tmp_path / name) == code


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "none"), ("hidden_size", "64"), ("dtype", "float7")])
def test_errors_name_the_file_that_was_given(model: Path, tmp_path: Path, key: str, value: str) -> None:
    """A file of another name is copied for transformers; no message may show the copy."""
    path = tmp_path / "llama-3b.json"
    path.write_text(json.dumps({**json.loads((model / "config.json").read_text()), key: value}))
    result = ran(path)
    assert result.return_value != 0 and str(path) in result.stderr and "ckptx-forecast-" not in result.stderr


def test_a_tp_plan_shards_what_it_names(model: Path, tmp_path: Path) -> None:
    words = ["--seq", 16, "--tp", 2, "--json"]
    replicated = {f"model.layers.*.mlp.{name}_proj": "replicate" for name in ("gate", "up", "down")}
    plans = {"none": {}, "whole": replicated, "one": {"model.layers.1.mlp.gate_proj": "colwise"}}
    for name, plan in plans.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(plan))
    default, none, whole, one = (
        json.loads(ran(model, *words, *given).stdout)["by_pipeline_rank"][0]["by_kind"]["parameters"]
        for given in ([], *(["--tp-plan", tmp_path / f"{name}.json"] for name in plans))
    )
    mlp = 2 * 3 * CONFIG["hidden_size"] * CONFIG["intermediate_size"] * 2  # layers, matrices, bytes
    assert (none, whole, one) == (default, default + mlp // 2, default)
    (tmp_path / "other.json").write_text('{"nothing.*": "colwise"}')
    refused = ran(model, *words[:-1], "--tp-plan", tmp_path / "other.json")
    assert refused.return_value == 2 and "matches a parameter" in refused.stderr


def test_a_recipe_is_forecast_with_dropout_and_tp() -> None:
    result = ran("--recipe", "llama_tiny", "--set", "layout.tp=2", "--set", "layout.dp_shard=1", "--json")
    assert result.return_value == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["layout"]["tp"], document["settings"]["seq"], document["fits"]) == (2, 32, None)


def test_a_recipe_of_a_shrunk_model_is_forecast_at_its_size() -> None:
    result = ran("--recipe", "phi_4_squad", "--set", "model.shrunk=true", "--set", "data.sequence_length=32", "--json")
    assert result.return_value == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["architecture"], document["parameters"]) == ("Phi3ForCausalLM", 209_760)


# ------------------------------------------------------------------------------------------------- what it ends without


def ended(monkeypatch: pytest.MonkeyPatch, *words: object) -> object:
    monkeypatch.setattr("sys.argv", ["ckptx", "forecast", *map(str, words)])
    with pytest.raises(SystemExit) as leave:
        main_module.main()
    return leave.value.code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "forecast requires a model: a config.json, a directory that contains one, a Hub id, or --recipe NAME"),
        (["M", "--set", "a=b"], "--set requires --recipe"),
        (["M", "--recipe", "r"], "M and --recipe both name a model"),
        (
            ["--recipe", "r", "--tp", "2"],
            "--tp cannot be combined with --recipe; change the recipe with --set",
        ),
        (["--recipe", "r", "--no-loss"], "--loss cannot be combined with --recipe"),
        (["M", "--no-loss", "--loss", "full"], "--loss is given as both none and full; leave out one of them"),
        (["M", "--html", "x", "--report", "x"], "x is given for both --report and --html"),
        (["M", "--tp", "two"], '--tp: "two" must be an integer'),
    ],
)
def test_contradictions_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert ended(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dtype", "int8"], '--dtype: "int8" must be one of auto, bf16, fp16, fp32'),
        (["--optimizer", "lion"], '--optimizer: "lion" must be one of'),
        (["--seq", 1], "--seq: 1 must be between 2 and"),
        (
            ["--batch", 3, "--microbatches", 2],
            "--batch: 3 sequences cannot be divided into 2 microbatches; use a multiple of 2",
        ),
        (["--ac-scope", "language"], "--ac-scope requires --activation-checkpointing"),
        (["--schedule", "gpipe"], "--schedule requires --pp 2 or more"),
        (["--gpu-memory", "much"], '--gpu-memory: "much" is not a size'),
        (["--pp", 2, "--schedule", "round"], '--schedule: "round" must be one of gpipe'),
        (["--tp", 0], "--tp: 0 must be between 1 and"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(model: Path, words: list[object], said: str) -> None:
    result = ran(model, *words)
    assert result.return_value == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert result.stdout == ""


def test_a_recipe_of_another_trainer_is_one_line() -> None:
    result = ran("--recipe", "fsdp2_script")
    assert result.return_value == 2
    (line,) = result.stderr.splitlines()
    assert "fsdp2_script: trains with its own command" in line


def broken(path: Path) -> None:
    (path / "config.json").write_text("{")


def unknown(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["NoSuchLM"], "model_type": "no_such"}))


def endless(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2_000_000}))


@pytest.mark.parametrize(
    ("write", "code", "said"),
    [
        (broken, 3, "config.json"),
        (lambda path: None, 3, "has no config.json"),
        (unknown, 4, "NoSuchLM"),
        (endless, 3, "num_hidden_layers is 2000000 and must be"),
    ],
    ids=["broken", "absent", "unknown", "endless"],
)
def test_a_model_that_cannot_be_is_one_line(
    tmp_path: Path, write: Callable[[Path], None], code: int, said: str
) -> None:
    write(tmp_path)
    html, report = tmp_path / "a.html", tmp_path / "a.json"
    result = ran(tmp_path, "--html", html, "--report", report)
    assert result.return_value == code, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert json.loads(report.read_text())["exit"] == code
    assert "<b>ERROR</b>" in html.read_text() and fault_of_page(html.read_text(), has_script=False) is None


def test_a_refusal_of_the_runtime_is_exit_4(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any, **__: Any) -> Any:
        raise UnsupportedError("x: found y, needed z; do w")

    monkeypatch.setattr(forecasting, "forecast", refusing)
    result = ran(model)
    assert (result.return_value, result.stderr) == (4, "error: x: found y, needed z; do w\n")


def test_a_package_that_is_missing_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptx.runtime.forecasting.ranks", None)
    result = ran(model)
    assert result.return_value == 7
    assert result.stderr.startswith("error: forecast: ") and len(result.stderr.splitlines()) == 1


def test_other_words_of_python_need_the_package_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptx.runtime.forecasting.ranks", None)
    with pytest.raises(EnvironmentProblem, match=r"^forecast: "):
        ckptx.forecast(model)


def test_quiet_is_the_verdict(calls: list[Any]) -> None:
    (line,) = ran("-q", "MODEL").stdout.splitlines()
    assert line.startswith("FITS: ")


def test_a_quantized_config_is_forecast_as_dequantized(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    reports = {}
    for name, more in {"plain": {}, "quantized": {"quantization_config": quantization}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, **more}))
        reports[name] = ckptx.forecast(tmp_path / name, seq=16, dtype="bf16")
        is_noted = any("forecast of the dequantized model" in note for note in reports[name].notes)
        assert is_noted == (name == "quantized")
    assert reports["plain"].by_pipeline_rank == reports["quantized"].by_pipeline_rank
