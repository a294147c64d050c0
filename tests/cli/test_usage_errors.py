"""Usage errors of every command are found before torch is imported: cases are generated from the tables of options."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptx.options.commands import COMMANDS, Command, tables_of
from ckptx.options.option import Argument, Option, Setting, settings_of

# Runs every case in one process in which torch cannot be imported, and prints the exit code, the message and whether a
# case has tried to import it.
_RUN_CASES = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from ckptx.cli.main import cli, main

class Refuse:
    attempts = 0
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            self.attempts += 1
            raise ImportError(f"{name} was imported")

refuse = Refuse()
sys.meta_path.insert(0, refuse)
for words in json.load(sys.stdin):
    refuse.attempts, out, error, code = 0, io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(error):
        try:
            main(lambda: cli.main(words, standalone_mode=False))
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([words, code, error.getvalue(), refuse.attempts]))
"""


def usage_errors(directory: Path) -> Iterator[list[str]]:
    """Yield calls that cannot run, for every command and option."""
    for name, command in COMMANDS.items():
        settings = {each: setting for table in tables_of(command) for each, setting in settings_of(table).items()}
        words = [*name.split(), *arguments_of(command, directory)]
        switches = [[], ["--run"]] if name == "verify" else [[]]
        for switch in switches:
            yield [*words, *switch, "--no-such-option"]
            for setting in settings.values():
                if isinstance(setting.annotation, Option):
                    for value in invalid_values(setting, setting.annotation):
                        yield [*words, *switch, *value]
            yield [*words, *switch, "one", "argument", "too", "many"]
        if len(words) > len(name.split()):
            yield name.split()  # without its arguments
    model = str(directory / "model")
    missing = str(directory / "missing")
    recipe = str(directory / "recipe.yaml")
    for words in (
        ["forecast", missing], ["forecast", str(directory)], ["forecast", "--recipe", missing],
        ["forecast", "--recipe", "no_such_recipe"], ["forecast", "--recipe", recipe],
        ["forecast", model, "--recipe", "llama_tiny"], ["forecast", model, "--search"],
        ["forecast", model, "--search", "--gpus", "8"], ["forecast", model, "--gpus", "8"],
        ["forecast", model, "--pp", "2", "--pp-split", "nonsense"], ["forecast", model, "--pp", "2", "--batch", "3"],
        ["forecast", model, "--schedule", "nonsense", "--pp", "2"], ["forecast", model, "--schedule", "gpipe"],
        ["forecast", model, "--tp", "2", "--tp-plan", missing], ["forecast", model, "--ac-scope", "vision"],
        ["forecast", "--recipe", "llama_tiny", "--set", "layout.no_such_key=2"],
        ["forecast", "--recipe", "llama_tiny", "--tp", "2"], ["forecast", model, "--set", "layout.tp=2"],
        ["robustness", missing], ["robustness", "no_such_recipe"], ["robustness", recipe],
        ["robustness", "llama_tiny", "--set", "layout.no_such_key=2"],
        ["robustness", "llama_tiny", "--inject", "no_such_fault"],
        ["verify", model, missing], ["verify", missing, model, "--run"], ["verify", model, missing, "--run"],
        ["verify", model, missing, "--run", "--tp", "2"], ["verify", model, model, "--tp", "2"],
        ["verify", model, model, "--run", "--tp", "2", "--tp-plan", missing],
        ["inspect", missing], ["diff", model, missing], ["reshard", missing, "out", "--tp", "2"],
        ["convert", "to-dcp", missing, "out"], ["convert", "to-hf", missing, "out"], ["no-such-command"], ["convert"],
    ):  # fmt: skip
        yield words


def arguments_of(command: Command, directory: Path) -> list[str]:
    """Return valid positional arguments."""
    settings = [each for table in command.option_tables[:1] for each in settings_of(table).values()]
    if command is COMMANDS["robustness"]:
        return ["llama_tiny"]
    return [
        str(directory / ("model" if number == 0 else f"other{number}"))
        for number, each in enumerate(each for each in settings if isinstance(each.annotation, Argument))
        if isinstance(each.annotation, Argument) and each.annotation.metavar
    ]


def invalid_values(setting: Setting, option: Option) -> Iterator[list[str]]:
    """Yield words with an option that no command accepts."""
    flag = setting.flag
    if setting.kind is bool:
        yield [f"{flag}=maybe"]
        return
    yield [flag]  # its value is missing
    if setting.choices:
        yield [flag, "no-such-choice"]
    elif setting.kind is int or option.is_size:
        yield [flag, "many"]
        if option.minimum is not None:
            yield [flag, str(option.minimum - 1)]
        if option.maximum is not None:
            yield [flag, str(option.maximum + 1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], int, str, int]]:
    directory = tmp_path_factory.mktemp("usage")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4}
    for name in ("model", "other1"):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
    (directory / "recipe.yaml").write_text("model: {no_such_key: 1}\n")
    run = subprocess.run(
        [sys.executable, "-c", _RUN_CASES],
        input=json.dumps(list(usage_errors(directory))),
        capture_output=True, text=True, check=True, cwd=directory,
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in run.stdout.splitlines()]


def test_usage_errors_come_before_torch(results: list[tuple[list[str], int, str, int]]) -> None:
    assert len(results) > 250
    assert {words[0] for words, *_ in results} >= {name.split()[0] for name in COMMANDS}
    assert [words for words, _, _, attempts in results if attempts] == []


def test_usage_errors_are_one_line_and_end_with_a_code(results: list[tuple[list[str], int, str, int]]) -> None:
    wrong = [
        (words, code, error)
        for words, code, error, _ in results
        if not (code == 2 or (code == 3 and any("missing" in each or words[0] == "forecast" for each in words)))
        or not error.startswith("error: ")
        or "internal error" in error
    ]
    assert wrong == []
