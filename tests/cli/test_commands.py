"""The command line in-process: documents, quiet, options in any place and naming, exit codes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from ckptx.cli import main as main_module
from ckptx.cli.main import cli
from ckptx.options.commands import COMMANDS, GROUPS, tables_of
from ckptx.options.option import settings_of
from ckptx.options.output import JsonOutput
from ckptx.version import __version__
from tests.support.checkpoint_writers import LLAMA, llama, names_in, value, write_dcp, write_hf
from tests.support.runner import CliRunner

TOP_LEVEL = {
    "schema_version", "command", "exit", "ok", "error", "tensors", "bytes_read", "bytes_written", "aliases", "ties",
    "dropped", "config_edits", "dtypes", "ranks", "notes", "seconds", "written_gb_per_s", "peak_rss",
}  # fmt: skip


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", llama())


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "dst"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], standalone_mode=False)


def document(result: Result) -> dict[str, Any]:
    """The one JSON document on stdout."""
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    return parsed


def test_convert_says_what_it_did(hf: Path, dst: Path) -> None:
    result = run("convert", "hf2dcp", hf, dst)
    assert result.return_value == 0
    assert result.stdout.startswith("wrote 21 tensors, ")
    for said in (
        "architecture: LlamaForCausalLM",
        "dtypes: BF16 (21 tensors)",
        "source tensors: 21 (21 written)",
        "iB/s",
    ):
        assert said in result.stdout
    assert "tie" not in result.stdout, "it is not tied"
    assert result.stderr == ""


def test_dry_run_says_what_it_would_do(hf: Path, dst: Path) -> None:
    result = run("convert", "hf2dcp", hf, dst, "--dry-run", "--files", 3)
    assert result.return_value == 0
    assert result.stdout.startswith("would write 21 tensors, ")
    for file in ("__0_0.distcp", "__2_0.distcp", ".metadata"):
        assert file in result.stdout
    assert not dst.exists()


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_dry_run_says_that_nothing_could_be_written_there(hf: Path, dst: Path, options: list[str]) -> None:
    dst.mkdir(parents=True)
    (dst / "thesis.tex").write_text("mine")
    result = run("convert", "hf2dcp", hf, dst, "--dry-run", *options)
    assert result.return_value == 0
    assert f"a conversion would fail: {dst}: " in result.stderr
    assert run("convert", "hf2dcp", hf, dst, *options).return_value == 5


@pytest.mark.parametrize("command", ["convert", "inspect", "diff", "verify"])
def test_json_is_one_document_on_stdout(hf: Path, dst: Path, command: str) -> None:
    arguments: list[object] = {
        "convert": ["convert", "hf2dcp", hf, dst],
        "inspect": ["inspect", hf],
        "diff": ["diff", hf, hf],
        "verify": ["verify", hf, hf],
    }[command]
    result = run(*arguments, "--json")
    found = document(result)
    assert found.keys() >= TOP_LEVEL
    assert (found["exit"], found["ok"], found["error"], found["command"].split()[0]) == (0, True, None, command)
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["convert", "inspect", "diff", "verify"])
def test_json_is_one_document_on_failure_too(tmp_path: Path, hf: Path, dst: Path, command: str) -> None:
    gone = tmp_path / "gone"
    arguments: list[object] = {
        "convert": ["convert", "hf2dcp", gone, dst],
        "inspect": ["inspect", gone],
        "diff": ["diff", hf, gone],
        "verify": ["verify", hf, gone],
    }[command]
    result = run(*arguments, "--json")
    assert result.return_value == 3
    found = document(result)
    assert found.keys() >= TOP_LEVEL
    assert (found["exit"], found["ok"], found["error"]) == (3, False, f"{gone}: no such file or directory")
    assert result.stderr == f"error: {gone}: no such file or directory\n"


def test_json_of_a_refused_option_is_a_document_too(hf: Path, dst: Path) -> None:
    result = run("convert", "hf2dcp", hf, dst, "--dtype", "fp8", "--json")
    assert (result.return_value, document(result)["exit"]) == (2, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_report_writes_the_same_document(tmp_path: Path, hf: Path, dst: Path, fails: bool) -> None:
    source = tmp_path / "gone" if fails else hf
    result = run("convert", "hf2dcp", source, dst, "--json", "--report", tmp_path / "report.json")
    assert result.return_value == (3 if fails else 0)
    assert json.loads((tmp_path / "report.json").read_text()) == document(result)


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path, hf: Path, dst: Path) -> None:
    result = run("convert", "hf2dcp", hf, dst, "--report", tmp_path / "gone" / "report.json")
    assert result.return_value == 5
    assert "report.json: its directory does not exist" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert names_in(dst.parent) == ["hf"]


def test_verify_finds_a_difference_and_exits_with_1(tmp_path: Path, hf: Path) -> None:
    changed = llama() | {"model.norm.weight": value("BF16", 8, seed=99)}
    other = write_hf(tmp_path / "other", changed)
    result = run("verify", hf, other, "--json", "--report", tmp_path / "report.json")
    found = document(result)
    assert (result.return_value, found["exit"], found["ok"], found["compared"]) == (1, 1, False, 21)
    assert [row["name"] for row in found["differing"]] == ["model.norm.weight"]
    assert json.loads((tmp_path / "report.json").read_text()) == found
    said = run("verify", hf, other)
    assert said.stdout.startswith("model.norm.weight: content, first difference at [0]: 0x")
    assert "DIFFERENT: 1 of 21 tensors differ" in said.stdout
    assert "EQUAL: 21 tensors compared bit for bit" in run("verify", hf, hf).stdout


def test_diff_finds_names_shapes_and_dtypes(tmp_path: Path, hf: Path) -> None:
    changed = llama() | {"model.norm.weight": value("F32", 8), "lm_head.weight": value("BF16", 8, 16)}
    other = write_hf(tmp_path / "other", changed | {"extra": value("BF16", 1)})
    result = run("diff", hf, other, "--json")
    assert result.return_value == 1
    assert {row["name"]: row["what"] for row in document(result)["differing"]} == {
        "model.norm.weight": "dtype", "lm_head.weight": "shape", "extra": "missing",
    }  # fmt: skip
    assert "DIFFERENT: 3 of 22 tensors differ" in run("diff", hf, other).stdout
    assert run("diff", hf, hf).return_value == 0


def test_inspect_lists_what_matches(hf: Path) -> None:
    result = run("inspect", hf, "--match", "*norm*")
    assert result.stdout.count("layernorm") == 4
    assert "model.norm.weight" in result.stdout
    assert "lm_head.weight" not in result.stdout
    assert len(document(run("inspect", hf, "--tensors", "--json"))["selected_tensors"]) == 21


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_quiet_says_nothing_wherever_it_stands(hf: Path, dst: Path, place: str) -> None:
    arguments: list[object] = ["convert", "hf2dcp", hf, dst]
    arguments.insert({"before": 0, "between": 1, "after": 4}[place], "-q")
    result = run(*arguments)
    assert (result.return_value, result.stdout, result.stderr) == (0, "", "")


def test_quiet_still_says_errors_and_differences(tmp_path: Path, hf: Path) -> None:
    assert run("-q", "inspect", tmp_path / "gone").stderr.startswith("error: ")
    other = write_hf(tmp_path / "other", llama() | {"extra": value("BF16", 1)})
    assert "extra" in run("-q", "diff", hf, other).stdout


@pytest.mark.parametrize(("words", "placeholder"), [("robustness", "[RECIPE]"), ("forecast", "[MODEL]")])
def test_an_argument_that_may_be_omitted_is_in_brackets(words: str, placeholder: str) -> None:
    assert run(words, "--help").stdout.splitlines()[0].endswith(f" {words} [OPTIONS] {placeholder}")


@pytest.mark.parametrize("words", COMMANDS)
def test_help_shows_none_as_a_default_only_where_it_is_a_value(words: str) -> None:
    for table in tables_of(COMMANDS[words]):
        for setting in settings_of(table).values():
            if setting.option is not None and setting.default_text == "none":
                assert setting.check_value("none") == "none" and "none" in str(setting.metavar), setting.flag


def test_notes_go_to_stderr(hf: Path, dst: Path) -> None:
    (hf / "pytorch_model.bin").write_bytes(b"")
    result = run("convert", "hf2dcp", hf, dst)
    assert result.stderr.startswith("note: pytorch_model.bin ")
    assert "note" not in result.stdout


@pytest.mark.parametrize("naming", ["--max-memory", "--max_memory"])
def test_underscores_are_dashes(hf: Path, dst: Path, naming: str) -> None:
    assert run("convert", "hf2dcp", hf, dst, naming, "64MiB", "--dry_run", "--workers=2").return_value == 0


def test_options_may_stand_before_the_paths(hf: Path, dst: Path) -> None:
    assert run("convert", "hf2dcp", "--files", 2, hf, "--workers", 1, dst).return_value == 0
    assert "__1_0.distcp" in names_in(dst)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "hf2dcp", "HF", "DST", "--dtype", "fp8"], '--dtype: "fp8" must be one of'),
        (["convert", "hf2dcp", "HF", "DST", "--tied", "maybe"], '--tied: "maybe" must be one of'),
        (["convert", "hf2dcp", "HF", "DST", "--workers", "0"], "--workers: 0 must be between 1 and 1,024"),
        (["convert", "hf2dcp", "HF", "DST", "--files", "-1"], "--files: -1 must be between 1 and 65,536"),
        (["convert", "hf2dcp", "HF", "DST", "--max-memory", "many"], '--max-memory: "many" is not a size'),
        (["convert", "hf2dcp", "HF", "DST", "--max-memory", "1kB"], "must be at least 2 MiB per worker"),
        (["convert", "dcp2hf", "HF", "DST", "--max-shard-size", "0"], '--max-shard-size: "0" is not a size'),
        (["convert", "dcp2hf", "HF", "DST", "--tied", "alias"], "--tied alias requires DCP output"),
        (["verify", "HF", "HF", "--dtype", "fp8"], '--dtype: "fp8" must be one of'),
    ],
)
def test_values_out_of_range_are_usage(tmp_path: Path, hf: Path, dst: Path, arguments: list[str], said: str) -> None:
    write_dcp(tmp_path / "dcp", llama(), config=LLAMA)
    places = {"HF": hf, "DCP": tmp_path / "dcp", "DST": dst}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.return_value == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not dst.exists()


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """What the process would exit with."""
    monkeypatch.setattr("sys.argv", ["ckptx", *map(str, arguments)])
    with pytest.raises(SystemExit) as leave:
        main_module.main()
    assert isinstance(leave.value.code, int)
    return leave.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["convert"],
        ["convert", "hf2dcp"],
        ["convert", "hf2dcp", "a"],
        ["convert", "hf2dcp", "a", "b", "c"],
        ["convert", "hf2dcp", "a", "b", "--nonsense"],
        ["convert", "hf2dcp", "a", "b", "--index", "always"],
        ["convert", "hf2dcp", "a", "b", "--workers", "two"],
        ["inspect"],
        ["--nonsense"],
    ],
)
def test_usage_errors_exit_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert exit_code(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")


def test_exit_codes_by_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hf: Path, dst: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    dst.mkdir()
    assert exit_code(monkeypatch, "inspect", hf) == 0
    assert exit_code(monkeypatch, "inspect", tmp_path / "gone") == 3
    assert exit_code(monkeypatch, "inspect", tmp_path / "adapter") == 4
    (dst / "mine").write_text("")
    assert exit_code(monkeypatch, "convert", "hf2dcp", hf, dst) == 5


def test_a_defect_says_so_and_is_no_difference(monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    monkeypatch.setattr("ckptx.api.inspect.inspect", lambda *_, **__: 1 // 0)
    result = run("inspect", hf)
    assert result.return_value == 70
    assert result.stderr.startswith("error: internal error: ZeroDivisionError: ")
    assert "please report it" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in run("inspect", hf, "-v").stderr
    monkeypatch.setenv("CKPTX_DEBUG", "1")
    assert "Traceback" in run("inspect", hf).stderr


def test_an_interrupt_says_how_to_continue(monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptx.api.inspect.inspect", interrupt)
    result = run("inspect", hf, "--json")
    assert (result.return_value, document(result)["exit"]) == (130, 130)


@pytest.mark.parametrize("arguments", [["--version"], ["-q", "--version"]])
def test_version(arguments: list[str]) -> None:
    assert run(*arguments).stdout == f"ckptx {__version__}\n"


def test_env_says_versions() -> None:
    result = run("env")
    assert result.return_value == 0
    for name in ("ckptx", "python", "torch", "transformers", "safetensors", "cores"):
        assert re.search(rf"^{name} +\S", result.stdout, re.MULTILINE), name


def pages() -> dict[str, click.Command]:
    """Every command by its words."""
    found: dict[str, click.Command] = {"": cli}
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {below}": command.commands[below] for below in command.commands}
    return found


def test_every_command_is_listed() -> None:
    assert set(pages()) == {"", *COMMANDS, *GROUPS}
    listed = " ".join(run("--help").stdout.split())
    for words, summary in {**{words: each.summary for words, each in COMMANDS.items()}, **GROUPS}.items():
        assert " " in words or f" {words} {summary} " in listed


@pytest.mark.parametrize("page", pages())
def test_a_help_page_shows_every_option_in_a_section(page: str) -> None:
    for flag in ("-h", "--help"):
        result = run(*page.split(), flag)
        assert result.stdout.startswith("Usage: ")
    for param in pages()[page].params:
        if isinstance(param, click.Option) and not param.hidden:
            assert param.help, param.name
            assert param.opts[-1] in result.stdout, param.name
    assert "Examples:" in result.stdout
    assert "\nOptions:" not in result.stdout, "an option without a section"
    assert max(map(len, result.stdout.splitlines())) <= 120


@pytest.mark.parametrize("page", pages())
def test_examples_parse(page: str) -> None:
    examples = pages()[page].examples  # type: ignore[attr-defined]
    assert examples
    for example in examples:
        program, *words = shlex.split(example.partition("-m -- ")[2] or example)  # `torchrun -m -- ckptx` is one, too
        assert program == "ckptx"
        if page.split():
            assert words[: len(page.split())] == page.split()
        command: click.Command = cli
        context = click.Context(cli)
        while isinstance(command, click.Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None, example
            command = found
        command.make_context(command.name, words)


@pytest.mark.parametrize(("variable", "given"), [("CI", "1"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("RANK", "1")])
def test_progress_is_hidden_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, variable: str, given: str) -> None:
    from ckptx.cli import output

    for name in ("CI", "HF_HUB_DISABLE_PROGRESS_BARS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []
    monkeypatch.setattr(output.click, "echo", lambda text, **_: said.append(text))
    monkeypatch.setattr(output, "_SECONDS_BETWEEN_PROGRESS_LINES", 0.0)
    output.Output().progress(1 << 20, 4 << 20)
    assert said == ["1.00 MiB of 4.00 MiB"]
    output.Output(JsonOutput(as_json=True)).progress(1, 2)
    monkeypatch.setenv(variable, given)
    output.Output().progress(1, 2)
    assert len(said) == 1


def test_progress_lines_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptx.cli import output

    monkeypatch.delenv("CI", raising=False)
    said: list[str] = []
    monkeypatch.setattr(output.click, "echo", lambda text, **_: said.append(text))
    progress = output.Output().progress
    for done in range(100):
        progress(done, 100)
    assert said == []


def test_verbose_says_each_step_and_the_plan(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", {**llama(), "odd\nname": value("F32", 2)})
    quiet = run("reshard", hf, tmp_path / "a", "--tp", "2", "--to", "dcp")
    said = run("reshard", hf, tmp_path / "b", "--tp", "2", "--to", "dcp", "-v")
    assert (quiet.return_value, said.return_value) == (0, 0)
    steps = [line for line in said.stderr.splitlines() if " s  " in line]
    rooms = {line.split(" s  ")[1].partition(".")[0] for line in steps}
    assert rooms == {"conversion", "publishing", "transfer"}
    plan = [line for line in steps if "lm_head.weight" in line]
    assert len(plan) == 1 and "<- lm_head.weight model.safetensors:" in plan[0] and "and 1 more" in plan[0]
    assert any(r"odd\nname" in line for line in steps), "a name is one line"
    assert len(said.stderr.splitlines()) - len(steps) == len(quiet.stderr.splitlines())
    assert json.loads(run("inspect", tmp_path / "b", "--json", "-v").stdout)["ok"]
    after = run("inspect", tmp_path / "b").stderr.splitlines()
    assert [line for line in after if not line.startswith("note: ")] == [], "it ends with the command that asked for it"
