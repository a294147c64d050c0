"""URLs are refused in one sentence wherever a command, a function or a recipe takes a path; nothing is written."""

from __future__ import annotations

import inspect as introspection
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

import ckptx
from ckptx.cli.main import cli, commands
from ckptx.errors import UnsupportedError, exit_code_of
from ckptx.formats.hf.hub import resolve_source
from ckptx.options.commands import COMMANDS as CANONICAL
from ckptx.options.commands import tables_of
from ckptx.options.option import Argument, Options, settings_of
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.untrusted.remote_name import refuse_remote
from tests.support.checkpoint_writers import llama, names_in, write_dcp, write_hf
from tests.support.command_arguments import arguments_of
from tests.support.runner import CliRunner

COMMANDS = {words: each for words, each in commands().items() if words in CANONICAL}

URLS = (
    "s3://bucket/x", "S3://bucket/x", "gs://bucket/x", "az://c/x", "abfss://c@a.dfs.core.windows.net/x", "msc://p/x",
    "https://host/x", "hdfs://node:9000/x", "hf://org/name", "file:///x", "unheard-of+1.0://x", " s3://bucket/x",
    "s3://", "c://x", "https://huggingface.co/org/name",
)  # fmt: skip

BESIDE: Mapping[tuple[str, str], Sequence[str]] = {
    ("convert to-dcp", "--tp-plan"): ["--tp", "2"],
    ("reshard", "--tp-plan"): ["--tp", "2"],
    ("verify", "--tp-plan"): ["--run", "--tp", "2"],
    ("inspect", "--cache-dir"): [],
}


def path_params() -> list[tuple[str, str, int]]:
    """Every argument (by its position) and option (by its flag) of every command that takes a path."""
    found = []
    for words, command in COMMANDS.items():
        position = 0
        settings = {name: each for table in tables_of(CANONICAL[words]) for name, each in settings_of(table).items()}
        for param in command.params:
            if isinstance(param, click.Argument):
                assert settings[str(param.name)].is_path, (words, param.name)
                found.append((words, str(param.metavar), position))
                position += 1
            elif str(param.name) in settings and settings[str(param.name)].is_path:
                found.append((words, param.opts[0], -1))
    return found


PARAMS = path_params()


def test_every_path_is_found() -> None:
    for words, command in CANONICAL.items():
        for table in tables_of(command):
            for setting in settings_of(table).values():
                assert setting.is_path or setting.metavar not in ("DIR", "FILE", "PATH"), (words, setting.flag)
    assert len(PARAMS) >= 35
    assert {("inspect", "--html", -1), ("reshard", "--base", -1), ("diff", "B", 1)} <= {*PARAMS}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with sound checkpoints, offline."""
    write_hf(tmp_path / "hf", llama())
    write_dcp(tmp_path / "dcp", llama(), config={"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def invoke(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code and what is on stderr."""
    result = CliRunner().invoke(cli, list(arguments), standalone_mode=False)
    assert result.exception is None, result.exception
    assert isinstance(result.return_value, int)
    return result.return_value, result.stderr


@pytest.mark.sampled(150)
@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(("words", "param", "position"), PARAMS, ids=[f"{a} {b}" for a, b, _ in PARAMS])
def test_each_path_of_each_command(place: Path, words: str, param: str, position: int, url: str) -> None:
    before = names_in(place)
    arguments = arguments_of(words, "hf", "out")
    if (words, param) == ("forecast", "--recipe"):
        arguments = []
    if position >= 0:
        arguments[position] = url
    else:
        arguments += [*BESIDE.get((words, param), ()), param, url]
    code, said = invoke([*words.split(), *arguments])
    assert code == 4, said
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert lines == [f"error: {refusal(url)}"]
    assert names_in(place) == before


def refusal(name: str | Path) -> str:
    with pytest.raises(UnsupportedError) as refused:
        refuse_remote(name)
    return str(refused.value)


def function_params() -> list[tuple[str, type[Options], str]]:
    """Every parameter of every function of a command that takes a path, by its table."""
    return [
        (words, table, name)
        for words, command in CANONICAL.items()
        if command.function
        for table in command.option_tables
        for name, each in settings_of(table).items()
        if each.is_path
    ]


def call_function(words: str, table: type[Options], name: str, value: str | Path) -> object:
    """Call the Python function of a command with one other argument."""
    settings = settings_of(table)
    arguments = [each.name for each in settings.values() if isinstance(each.annotation, Argument) and each.is_path]
    given: dict[str, Any] = dict(zip(arguments, arguments_of(words, "hf", "out"), strict=True))
    needed = {each.name: each.choices[0] for each in settings.values() if each.is_required and each.choices}
    return getattr(ckptx, words.split()[0])(**{**needed, **given, name: value})


FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    **{
        f"{words} {table.__name__} {name}": partial(call_function, words, table, name)
        for words, table, name in function_params()
    },
    "convert dst, resumed": lambda name: ckptx.convert("hf2dcp", "hf", name, resume=True),
    "convert dst, dry": lambda name: ckptx.convert("hf2dcp", "hf", name, dry_run=True),
    "open_checkpoint": lambda name: ckptx.open_checkpoint(name),
    "resolve": lambda name: resolve_source(str(name)),
}


@pytest.mark.sampled(80)
@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("url", ["s3://bucket/x", "GS://bucket/x", "hf://org/name", "file:///x", "https://host/x"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_path_of_each_function(place: Path, function: str, url: str, kind: Callable[[str], Any]) -> None:
    """A `pathlib.Path` has lost a slash; it is refused all the same."""
    before = names_in(place)
    with pytest.raises(UnsupportedError) as refused:
        FUNCTIONS[function](kind(url))
    assert exit_code_of(refused.value) == 4
    assert str(refused.value) == refusal(kind(url))
    assert names_in(place) == before


def test_each_parameter_that_is_annotated_as_a_path_is_refused() -> None:
    assert {"reshard ReshardOptions tp_plan", "convert to-dcp ToDcpOptions report_file"} <= FUNCTIONS.keys()
    for name in {command.function.partition(":")[2] for command in CANONICAL.values() if command.function}:
        for parameter in introspection.signature(getattr(ckptx, name)).parameters.values():
            if "Path" in str(parameter.annotation):
                assert any(each.startswith(f"{name} ") and each.endswith(f" {parameter.name}") for each in FUNCTIONS)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("key", ["model.pretrained", "data.path"])
def test_each_path_of_a_recipe(key: str, url: str) -> None:
    sets = [f"{key}='{url}'"] + (["data.dataset=squad"] if key == "data.path" else [])
    with pytest.raises(UnsupportedError) as refused:
        read_recipe("llama_tiny", sets)
    assert str(refused.value) == refusal(url)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("key", ["checkpoint", "losses"])
def test_each_path_of_a_third_party_trainer(tmp_path: Path, key: str, url: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"trainer:\n  command: 'true'\n  {key}: '{url}'\n")
    with pytest.raises(UnsupportedError) as refused:
        read_recipe(file)
    assert str(refused.value) == refusal(url)


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_cache_in_the_environment(place: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "s3://bucket/cache")
    with pytest.raises(UnsupportedError, match="is a URL"):
        ckptx.inspect("org/name")
    assert ckptx.inspect("hf").exit == 0  # a local path needs no cache


LOCAL = (
    "s3", "s3/x", "./s3:/bucket", "a/s3://b", "org/name", "c:/x", "x:/y", "unknown:/x", "a:b", "http", "file", "s3:x",
    "", "model@main", "~/x", "/abs/s3:/x", "step:100/x",
)  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_local_names_are_let_through(name: str) -> None:
    refuse_remote(name, None, *([] if name.startswith("./") else [Path(name)]))


def test_a_local_path_that_looks_like_a_collapsed_url_is_read(place: Path) -> None:
    """It is there, so it is what was meant; with two slashes it is a URL to everybody."""
    os.makedirs("s3:/bucket")
    (place / "hf").rename("s3:/bucket/x")
    assert ckptx.inspect("s3:/bucket/x").exit == 0
    assert ckptx.inspect(Path("s3://bucket/x")).exit == 0
    assert ckptx.inspect("./s3://bucket/x").exit == 0
    with pytest.raises(UnsupportedError, match="is a URL"):
        ckptx.inspect("s3://bucket/x")
