"""URLs are refused in one sentence wherever a command, a function or a recipe takes a path; nothing is written."""

from __future__ import annotations

import inspect as introspection
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

import ckptx
from ckptx.cli.command import ChoiceParam, Words
from ckptx.cli.main import cli, commands
from ckptx.errors import UnsupportedError, exit_code_of
from ckptx.formats.hf.hub import resolve
from ckptx.options.commands import COMMANDS as CANONICAL
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.untrusted.remote_name import refuse_remote
from tests.support.runner import CliRunner
from tests.support.writers import llama, names_in, write_dcp, write_hf

COMMANDS = {words: each for words, each in commands().items() if words in CANONICAL}

URLS = (
    "s3://bucket/x", "S3://bucket/x", "gs://bucket/x", "az://c/x", "abfss://c@a.dfs.core.windows.net/x", "msc://p/x",
    "https://host/x", "hdfs://node:9000/x", "hf://org/name", "file:///x", "unheard-of+1.0://x", " s3://bucket/x",
    "s3://", "c://x", "https://huggingface.co/org/name",
)  # fmt: skip

# String options that are no path. A new option is of type click.Path, or is added here.
NO_PATHS = {
    "--ac-scope", "--activation-checkpointing", "--backend", "--compute-dtype", "--device", "--dtype", "--gpu-memory",
    "--index", "--inject", "--loss", "--match", "--max-memory", "--max-shard-size", "--names", "--optimizer",
    "--param-dtype", "--phases", "--pp-split", "--prefix", "--source-prefix", "--reduce-dtype", "--reference-memory",
    "--revision", "--schedule", "--set", "--tied", "--to", "--token",
}  # fmt: skip

# What else a command needs, so that nothing but the URL is wrong with the call.
ARGUMENTS: Mapping[str, Sequence[str]] = {
    "inspect": ["hf"],
    "convert to-dcp": ["hf", "out"],
    "convert to-hf": ["dcp", "out"],
    "reshard": ["hf", "out"],
    "diff": ["hf", "hf"],
    "verify": ["hf", "hf"],
    "forecast": ["hf"],
    "robustness": ["llama_tiny"],
    "env": [],
}
BESIDE: Mapping[tuple[str, str], Sequence[str]] = {
    ("convert to-dcp", "--tp-plan"): ["--tp", "2"],
    ("reshard", "--tp-plan"): ["--tp", "2"],
    ("verify", "--tp-plan"): ["--run", "--tp", "2"],
    ("inspect", "--cache-dir"): [],
}


def is_path(param: click.Parameter) -> bool:
    return isinstance(param.type, click.Path) or "--base" in param.opts


def path_params() -> list[tuple[str, str, int]]:
    """Every argument (by its position) and option (by its flag) of every command that takes a path."""
    found = []
    for words, command in COMMANDS.items():
        position = 0
        for param in command.params:
            if isinstance(param, click.Argument):
                assert is_path(param), (words, param.name)
                found.append((words, str(param.metavar), position))
                position += 1
            elif is_path(param):
                found.append((words, param.opts[0], -1))
    return found


PARAMS = path_params()


def test_each_string_option_is_known_to_be_a_path_or_not() -> None:
    for words, command in COMMANDS.items():
        for param in command.params:
            is_text = isinstance(param.type, Words | ChoiceParam)
            if isinstance(param, click.Option) and is_text and not is_path(param):
                assert param.opts[0] in NO_PATHS, f"{words} {param.opts[0]}: a path, or one for NO_PATHS?"
    assert set(ARGUMENTS) == set(COMMANDS)
    assert len(PARAMS) >= 35


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
    arguments = list(ARGUMENTS[words])
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


FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "convert src": lambda name: ckptx.convert("hf2dcp", name, "out"),
    "convert dst": lambda name: ckptx.convert("hf2dcp", "hf", name),
    "convert dst, resumed": lambda name: ckptx.convert("hf2dcp", "hf", name, resume=True),
    "convert dst, dry": lambda name: ckptx.convert("hf2dcp", "hf", name, dry_run=True),
    "convert base": lambda name: ckptx.convert("dcp2hf", "dcp", "out", base=name),
    "convert cache_dir": lambda name: ckptx.convert("hf2dcp", "org/name", "out", cache_dir=name),
    "convert tp_plan": lambda name: ckptx.convert("hf2dcp", "hf", "out", tp=2, tp_plan=name),
    "convert report_file": lambda name: ckptx.convert("hf2dcp", "hf", "out", report_file=name),
    "reshard src": lambda name: ckptx.reshard(name, "out"),
    "reshard dst": lambda name: ckptx.reshard("hf", name),
    "reshard base": lambda name: ckptx.reshard("dcp", "out", base=name),
    "reshard cache_dir": lambda name: ckptx.reshard("org/name", "out", cache_dir=name),
    "reshard tp_plan": lambda name: ckptx.reshard("hf", "out", tp=2, tp_plan=name),
    "reshard report_file": lambda name: ckptx.reshard("hf", "out", report_file=name),
    "inspect path": lambda name: ckptx.inspect(name),
    "inspect html": lambda name: ckptx.inspect("hf", html=name),
    "inspect cache_dir": lambda name: ckptx.inspect("hf", cache_dir=name),
    "diff a": lambda name: ckptx.diff(name, "hf"),
    "diff cache_dir": lambda name: ckptx.diff("org/name", "hf", cache_dir=name),
    "diff b": lambda name: ckptx.diff("hf", name),
    "verify reference": lambda name: ckptx.verify(name, "hf"),
    "verify checkpoint": lambda name: ckptx.verify("hf", name),
    "verify checkpoint, run": lambda name: ckptx.verify("hf", name, run=True),
    "verify cache_dir": lambda name: ckptx.verify("org/name", "hf", cache_dir=name),
    "verify tp_plan": lambda name: ckptx.verify("hf", "hf", run=True, tp=2, tp_plan=name),
    "open_checkpoint": lambda name: ckptx.open_checkpoint(name),
    "forecast model": lambda name: ckptx.forecast(name),
    "forecast cache_dir": lambda name: ckptx.forecast("org/name", cache_dir=name),
    "forecast recipe": lambda name: ckptx.forecast(recipe=name),
    "robustness recipe": lambda name: ckptx.robustness(name),
    "robustness out": lambda name: ckptx.robustness("llama_tiny", out=name),
    "resolve": lambda name: resolve(str(name)),
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


def test_each_function_with_a_path_is_among_them() -> None:
    """Parameters that are annotated as paths, of every function that ckptx offers."""
    for name in ("convert", "reshard", "inspect", "diff", "verify", "open_checkpoint", "forecast", "robustness"):
        function = getattr(ckptx, name)
        target = function if introspection.isfunction(function) else function.robustness
        for parameter in introspection.signature(target).parameters.values():
            if "Path" in str(parameter.annotation):
                label = name if name == "open_checkpoint" else f"{name} {parameter.name}"
                assert label in FUNCTIONS


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
    file.write_text(f"train:\n  command: 'true'\n  {key}: '{url}'\n")
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
