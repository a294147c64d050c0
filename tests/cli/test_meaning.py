"""Options over all commands: defaults in the help, refusals where one has no meaning, completion in a shell."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import ckptx
from ckptx.cli import main as main_module
from ckptx.cli.main import cli, commands
from ckptx.errors import CkptxError, UsageError
from ckptx.options.commands import COMMANDS as CANONICAL
from ckptx.options.commands import Command, tables_of
from ckptx.options.option import settings_of
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf
from tests.support.command_arguments import arguments_of
from tests.support.runner import CliRunner

GLOBAL = {"quiet", "verbose", "no_color"}


def names_of(command: Command) -> set[str]:
    """Return the options in the tables of a command, and a name for each flag that is short for a value."""
    options = {
        name: each.option
        for table in (*command.option_tables, command.output_table)
        for name, each in settings_of(table).items()
        if each.option is not None
    }
    shorthands = {f"{name}__{value}" for name, each in options.items() for value in each.shorthands.values()}
    return options.keys() | shorthands


MEANING = {words: names_of(command) for words, command in CANONICAL.items()}
COMMANDS = {words: command for words, command in commands().items() if words in CANONICAL}
OPTIONS = {
    param.name: param
    for command in COMMANDS.values()
    for param in command.params
    if isinstance(param, click.Option) and param.name not in GLOBAL and not param.hidden
}


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """What the process would exit with."""
    monkeypatch.setattr("sys.argv", ["ckptx", *map(str, arguments)])
    with pytest.raises(SystemExit) as leave:
        main_module.main()
    assert isinstance(leave.value.code, int)
    return leave.value.code


def flag_of(option: str) -> str:
    return next(flag for flag in OPTIONS[option].opts if flag.startswith("--"))


# ---------------------------------------------------------------------------------------------- help


def options_of(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option) and not param.hidden]


@pytest.mark.parametrize("words", COMMANDS)
def test_help_says_every_default(words: str) -> None:
    """A flag is off unless given; every other option says what holds without it."""
    context = click.Context(COMMANDS[words])
    for option in options_of(COMMANDS[words]):
        if option.is_flag and not option.secondary_opts:
            continue
        record = option.get_help_record(context)
        assert record is not None
        assert "[default: " in record[1], f"{words} {option.opts[0]}: its help names no default; give it show_default"
        assert not re.search(r"\((\d+|\w+)\)\.?( \[|$)", record[1]), f"{words} {option.opts[0]}: two defaults"


def test_a_help_page_shows_a_default_as_it_is_written() -> None:
    shown = CliRunner().invoke(cli, ["convert", "dcp2hf", "--help"], standalone_mode=False).stdout
    assert (
        "[default: as the HF files that SRC was converted from, if its ckptx.json records them, else 5GB]"
        in " ".join(shown.split())
    )
    assert "default: (" not in " ".join(shown.split())


@pytest.mark.parametrize("words", COMMANDS)
def test_the_default_that_help_names_is_that_of_the_table(words: str) -> None:
    """Giving the default is giving nothing."""
    settings = {name: each for table in tables_of(CANONICAL[words]) for name, each in settings_of(table).items()}
    expected = {
        name: str(each.default)
        for name, each in settings.items()
        if each.option is not None and not each.is_required and each.default not in (None, False, True, "", ())
    }
    shown = {str(option.name): str(option.show_default) for option in options_of(COMMANDS[words])}
    assert {name: shown[name] for name in expected} == expected


# ------------------------------------------------------------------------------------------- former names


@pytest.mark.parametrize("words", ["convert to-dcp", "convert to-hf", "reshard"])
def test_a_former_name_works_and_is_not_shown(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**llama(), "model.layers.0.self_attn.q_norm.weight": llama()["model.norm.weight"]}
    hf = write_hf(tmp_path / "hf", changed)
    call = [*words.split(), str(hf), str(tmp_path / "out"), "--dry-run"]

    def code(*more: str) -> object:
        return CliRunner().invoke(cli, [*call, *more], standalone_mode=False).return_value

    monkeypatch.chdir(tmp_path)
    assert code() == 3
    assert code("--allow-config-mismatch") == code("--allow-misfit") == code("--allow_misfit") == 0
    assert code("--allow-misfit", "--allow-config-mismatch") == 0
    assert "misfit" not in CliRunner().invoke(cli, [*words.split(), "--help"], standalone_mode=False).stdout
    monkeypatch.setenv("CKPTX_ALLOW_MISFIT", "1")
    assert code() == 0
    monkeypatch.delenv("CKPTX_ALLOW_MISFIT")
    (tmp_path / "ckptx.toml").write_text("allow-misfit = true")
    assert code() == 0


def test_a_former_name_of_an_argument(tmp_path: Path) -> None:
    changed = {**llama(), "model.layers.0.self_attn.q_norm.weight": llama()["model.norm.weight"]}
    hf = write_hf(tmp_path / "hf", changed)
    given: dict[str, Any] = {"tp": 2, "dry_run": True}
    with pytest.raises(CkptxError, match="--allow-config-mismatch"):
        ckptx.reshard(hf, tmp_path / "out", **given)
    for name in ("allow_misfit", "allow_config_mismatch"):
        assert ckptx.reshard(hf, tmp_path / "out", **given, **{name: True}).exit == 0
    both = {"allow_misfit": True, "allow_config_mismatch": False}
    with pytest.raises(UsageError, match="allow_config_mismatch is given as both True and False"):
        ckptx.reshard(hf, tmp_path / "out", **given, **both)


# ------------------------------------------------------------------------------------------- meaning


@pytest.mark.parametrize("words", COMMANDS)
def test_each_command_has_the_options_of_its_tables(words: str) -> None:
    hidden = {"optimizer"} if words == "convert to-hf" else set()  # accepted, with a single valid value
    assert {option.name for option in options_of(COMMANDS[words])} - GLOBAL == MEANING[words] - hidden


MEANINGLESS = [(words, option) for words in MEANING for option in sorted(OPTIONS.keys() - MEANING[words])]
GIVEN: dict[str, Any] = {"tp": 2, "pp": 2, "dp_shard": 2, "files": 2, "workers": 2}


def test_there_are_options_without_meaning() -> None:
    assert len(MEANINGLESS) > 60
    assert {("convert to-dcp", "index"), ("inspect", "tp"), ("diff", "dtype"), ("verify", "prefix")} <= {*MEANINGLESS}


@pytest.mark.parametrize(("words", "option"), MEANINGLESS)
def test_an_option_without_meaning_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: str,
    option: str,
) -> None:
    hf = write_hf(tmp_path / "hf", llama())
    flag = flag_of(option)
    value = [] if OPTIONS[option].is_flag else [str(GIVEN.get(option, "1"))]
    paths = arguments_of(words, hf, tmp_path / "out")
    assert exit_code(monkeypatch, *words.split(), *paths, flag, *value) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    has_other = option == "prefix" and "source_prefix" in MEANING[words]
    assert line.startswith(f"error: {words} does not take {flag}{'; use --source-prefix' if has_other else ' ('}")
    assert said.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (words, option)
        for words, option in MEANINGLESS
        if CANONICAL[words].function and "__" not in option and (words, option) != ("robustness", "recipe")
    ],
)
def test_python_refuses_the_same_options(tmp_path: Path, words: str, option: str) -> None:
    hf = write_hf(tmp_path / "hf", llama())
    given = {option: GIVEN.get(option, "1")}
    name = CANONICAL[words].function.partition(":")[2]
    direction = words.split()[1:] if name == "convert" else []
    paths = [*direction, *arguments_of(words, hf, tmp_path / "out")]
    with pytest.raises(UsageError, match=f"^{words} does not take --{option.replace('_', '-')}") as caught:
        getattr(ckptx, name)(*paths, **given)
    assert isinstance(caught.value, TypeError)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (words, options)
        for words, options in itertools.product(
            ["convert to-dcp", "convert to-hf", "reshard", "verify --run"],
            [
                ["--pp-split", "vllm"],
                ["--tp-plan", "plan.json"],
                ["--base", "none", "--tie-missing"],
                ["--base", "none", "--tied", "drop"],
                ["--ac-scope", "language"],
            ],
        )
        if {flag[2:].replace("-", "_") for flag in options if flag.startswith("--")} <= MEANING[words.split(" --")[0]]
    ],
)
def test_an_option_that_would_be_ignored_beside_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, options: list[str]
) -> None:
    src = {"convert to-hf": write_dcp(tmp_path / "dcp", llama(), config=LLAMA)}.get(words) or write_hf(
        tmp_path / "hf", llama()
    )
    second = src if words == "verify --run" else tmp_path / "out"
    assert exit_code(monkeypatch, *words.split(), src, second, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --")


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("source", ["hf", "dcp", "sharded"])
@pytest.mark.parametrize(
    "options", [{"prefix": "app."}, {"source_prefix": "app."}, {"optimizer": "keep"}, {"optimizer": "drop"}]
)
def test_resharding_refuses_what_its_source_has_no_use_for(
    tmp_path: Path, source: str, to: str, options: dict[str, str]
) -> None:
    config = LLAMA | {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "vocab_size": 16,
        "intermediate_size": 24,
    }
    hf = write_hf(tmp_path / "hf", llama(), config=config)
    if source != "hf":
        ckptx.reshard(hf, tmp_path / source, to={"sharded": "safetensors"}.get(source, source), tp=2)
    refused = source != "dcp" and ("optimizer" in options or "source_prefix" in options)
    refused |= options.get("optimizer") == "keep" and to == "safetensors"
    refused |= "prefix" in options and (to == "safetensors" or source == "dcp")
    said = {"to": to, "tp": 2, **options}
    if refused:
        with pytest.raises(UsageError):
            ckptx.reshard(tmp_path / source, tmp_path / "out", **said)
        assert not (tmp_path / "out").exists()
    elif "source_prefix" in options:
        with pytest.raises(ckptx.errors.InputError, match=r'no tensor name begins with "app\."'):
            ckptx.reshard(tmp_path / source, tmp_path / "out", **said)
    else:
        assert ckptx.reshard(tmp_path / source, tmp_path / "out", **said).ok


@pytest.mark.parametrize("words", ["convert", "convert -v"])
def test_a_group_without_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert exit_code(monkeypatch, *words.split()) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "convert requires a command: to-dcp, to-hf" in line
    assert said.out == ""


@pytest.mark.parametrize("words", ["", "-q", "help", "--help"])
def test_the_program_alone_prints_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert exit_code(monkeypatch, *words.split()) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Usage: ") and "\nCommands:\n" in said.out and said.err == ""


@pytest.mark.parametrize("words", [*commands(), "help"])
def test_help_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str) -> None:
    pages = []
    for call in (["help", *words.split()], [*words.split(), "--help"]):
        assert exit_code(monkeypatch, *call) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] and f" {words} [OPTIONS]" in pages[0].splitlines()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reshrad a b", "unknown command: reshrad; did you mean reshard?"),
        ("to-hf a b", "unknown command: to-hf; did you mean convert to-hf?"),
        ("to-dcp a b", "unknown command: to-dcp; did you mean convert to-dcp?"),
        ("to-megatron a b", "unknown command: to-megatron; did you mean convert to-megatron?"),
        ("hf2dcp a b", "unknown command: hf2dcp; did you mean convert hf2dcp?"),
        ("dcp2hf a b", "unknown command: dcp2hf; did you mean convert dcp2hf?"),
        ("convert reshard a b", "unknown command: reshard; did you mean ckptx reshard?"),
        ("convert to-hc a b", "unknown command: to-hc; did you mean to-hf?"),
        ("convert hf2dpc a b", "unknown command: hf2dpc; did you mean hf2dcp?"),
        ("zzz", "unknown command: zzz; the commands are inspect, convert, reshard, merge, diff, verify,"),
        ("help zzz", "unknown command: zzz; the commands are inspect, convert, reshard, merge, diff, verify,"),
        ("reshard a b --wokers 2", "reshard does not take --wokers; did you mean --workers?"),
        ("reshard a b --zzz 2", "reshard does not take --zzz"),
        ("--zzz", "ckptx does not take --zzz"),
        ("--tp 2", "ckptx does not take --tp (convert to-dcp, reshard, merge, verify --run and forecast do"),
        ("reshard a b --dp 2", "reshard does not take --dp; use --dp-shard"),
        ("reshard a b --tensor-model-parallel-size=2", "reshard does not take --tensor-model-parallel-size; use --tp"),
        ("convert to-hf a b --force", "convert to-hf does not take --force; use --overwrite"),
        ("forecast a --seq-len 2", "forecast does not take --seq-len; use --seq"),
        ("forecast a --world-size 2", "forecast does not take --world-size; use --gpus"),
        (
            "verify a",
            "Missing argument 'CHECKPOINT'. verify compares two checkpoints; to read every byte of one, pass it",
        ),
        ("diff a b --prefix x", "diff does not take --prefix; use --source-prefix"),
        ("verify a b --run --prefix x", "verify does not take --prefix; use --source-prefix"),
    ],
)
def test_a_misspelled_word_gets_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert exit_code(monkeypatch, *words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_other_names_are_the_same_commands(tmp_path: Path) -> None:
    found = commands()
    assert found["convert hf2dcp"] is found["convert to-dcp"] and found["convert dcp2hf"] is found["convert to-hf"]
    hf = write_hf(tmp_path / "hf", llama())
    for name in ("hf2dcp", "to-dcp"):
        words = ["convert", name, str(hf), str(tmp_path / name), "--json", "--tensor-parallel-size", "2"]
        document = json.loads(CliRunner().invoke(cli, words, standalone_mode=False).stdout)
        assert (document["command"], document["exit"], document["layout"]["tp"]) == (f"convert {name}", 0, 2)


# ----------------------------------------------------------------------------------------------- hub


@pytest.mark.parametrize("command", ["diff", "verify"])
def test_hub_options_count_for_both_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    import huggingface_hub

    asked: list[tuple[str, Any, Any, Any]] = []

    def snapshot(name: str, *, revision: Any, token: Any, cache_dir: Any, **_: Any) -> str:
        asked.append((name, revision, token, cache_dir))
        return str(write_hf(tmp_path / name.replace("/", "-"), llama()))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    hub = ["--revision", "v1", "--token", "secret", "--cache-dir", "cache"]
    result = CliRunner().invoke(cli, [command, "one/a", "two/b", *hub], standalone_mode=False)
    assert result.return_value == 0
    assert asked == [(name, "v1", "secret", "cache") for name in ("one/a", "two/b")]
    assert "secret" not in result.output
    assert getattr(ckptx, command)("one/a", "two/b", revision="v2").ok
    assert asked[-1][1] == "v2"


# ------------------------------------------------------------------------------------- env and quiet


def test_env_is_a_document_with_json() -> None:
    result = CliRunner().invoke(cli, ["env", "--json"], standalone_mode=False)
    found = json.loads(result.stdout)
    assert (found["command"], found["exit"], found["ok"]) == ("env", 0, True)
    assert found["ckptx"] == ckptx.__version__
    assert found["packages"]["click"] and set(found["tested_with"]) <= set(found["packages"])
    assert {"torch", "click", "huggingface-hub", "numpy"} <= set(found["tested_with"])
    assert found["cores"] >= 1


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("command", ["verify"])
def test_quiet_leaves_one_line_of_verify(tmp_path: Path, command: str, differs: bool) -> None:
    hf = write_hf(tmp_path / "hf", llama())
    other = write_hf(tmp_path / "other", llama() | ({"extra": llama()["model.norm.weight"]} if differs else {}))
    result = CliRunner().invoke(cli, ["-q", command, str(hf), str(other)], standalone_mode=False)
    assert result.return_value == int(differs)
    (line,) = result.stdout.splitlines()
    assert line.startswith("DIFFERENT: 1 of 22 tensors differ; extra: " if differs else "EQUAL: 21 tensors")


@pytest.mark.parametrize(
    ("tied", "head", "lines"), [(False, True, 0), (True, True, 1), (True, False, 1)], ids=["untied", "both", "tied"]
)
def test_ties_are_spoken_of_where_there_are_some(tmp_path: Path, tied: bool, head: bool, lines: int) -> None:
    config = LLAMA | {"tie_word_embeddings": tied}
    hf = write_hf(tmp_path / "hf", llama(head=head), config=config)
    said = CliRunner().invoke(cli, ["convert", "hf2dcp", str(hf), str(tmp_path / "dcp")], standalone_mode=False).stdout
    assert len(re.findall(r"^(?:not )?tied: ", said, re.MULTILINE)) == lines


# ---------------------------------------------------------------------------------------- completion


def complete(*words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    environment = os.environ | {
        "_CKPTX_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    program = "import sys; sys.argv[0] = 'ckptx'; from ckptx.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_shell_completes_commands_options_values_and_paths() -> None:
    assert complete("ckptx", "conv") == ["plain,convert"]
    assert complete("ckptx", "convert", "to-d") == ["plain,to-dcp"]
    assert complete("ckptx", "reshard", "--pp-") == ["plain,--pp-split"]
    assert complete("ckptx", "reshard", "--pp-split", "") == [
        "plain,even",
        "plain,vllm",
        "plain,torchtitan",
        "plain,hf",
    ]
    assert complete("ckptx", "inspect", "mod") == ["file,mod"]
    assert complete("ckptx", "verify", "a", "mod") == ["file,mod"]


@pytest.mark.parametrize("words", COMMANDS)
def test_every_choice_is_completed(words: str) -> None:
    settings = {name: each for table in tables_of(CANONICAL[words]) for name, each in settings_of(table).items()}
    for option in options_of(COMMANDS[words]):
        setting = settings.get(str(option.name))
        if setting is None or setting.option is None or setting.kind is bool:
            continue
        offered = [item.value for item in option.shell_complete(click.Context(COMMANDS[words]), "")]
        if setting.choices:
            assert isinstance(option.type, click.Choice) and offered == [*setting.main_choices]
        elif setting.kind is int and not setting.option.is_size:
            assert isinstance(option.type, click.IntRange)
            assert (option.type.min, option.type.max) == (setting.option.minimum, setting.option.maximum)
        elif setting.option.keywords:
            assert offered == [*setting.option.keywords]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell: str, tmp_path: Path) -> None:
    environment = os.environ | {"_CKPTX_COMPLETE": f"{shell}_source"}
    program = "import sys; sys.argv[0] = 'ckptx'; from ckptx.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "_CKPTX_COMPLETE" in done.stdout
    assert f"{shell}_source" in Path("docs/options.md").read_text(encoding="utf-8")
    if shell == "bash":
        (tmp_path / "script").write_text(done.stdout)
        assert subprocess.run(["bash", "-n", str(tmp_path / "script")]).returncode == 0
