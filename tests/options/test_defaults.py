"""Defaults of options from files and the environment: which one holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import ckptx
from ckptx.cli.main import cli
from ckptx.errors import UsageError
from ckptx.options.defaults import applicable_defaults, read_defaults
from tests.support.checkpoint_writers import llama, write_hf
from tests.support.runner import CliRunner


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without defaults, and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "hf", llama())
    return tmp_path


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)], standalone_mode=False)


def document(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json").stdout)
    return found


def files(*, project: str = "", own: str = "") -> None:
    """Write the two files of defaults."""
    Path("pyproject.toml").write_text(f'[project]\nname = "x"\n{project}')
    Path("ckptx.toml").write_text(own)


def test_the_strongest_source_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["reshard", "hf", "out", "--dry-run"]

    def memory(*more: str) -> Any:
        return document(*words, *more)["buffer_bytes"]

    assert memory() == 256 * 10**6
    files(project='[tool.ckptx]\nmax-memory = "101MB"')
    assert memory() == 101 * 10**6
    files(project='[tool.ckptx]\nmax-memory = "101MB"', own='max_memory = "102MB"')
    assert memory() == 102 * 10**6
    files(own='max-memory = "102MB"\n[reshard]\nmax-memory = 103000000\n[convert]\nmax-memory = "1GB"')
    assert memory() == 103 * 10**6
    monkeypatch.setenv("CKPTX_MAX_MEMORY", "104MB")
    assert memory() == 104 * 10**6
    assert memory("--max-memory", "105MB") == 105 * 10**6
    assert ckptx.reshard("hf", "out", dry_run=True).buffer_bytes == 256 * 10**6, (
        "Python functions have no such defaults"
    )


@pytest.mark.parametrize(
    "table",
    [
        "[tool.ckptx]\nworkers = 3", "[tool . ckptx]\nworkers = 3", "[tool.'ckptx']\nworkers = 3",
        '["tool"."ckptx"]\nworkers = 3', "[tool]\nckptx = {workers = 3}", "[tool]\nckptx={ workers = 3 }",
        "[tool]\nckptx.workers = 3", "[tool]\n'ckptx' = {workers = 3}", '[tool]\n"ckptx".workers = 3',
        "[tool]\nckptx\t=\t{reshard = {workers = 3}}", "[tool]\nckptx.reshard = {workers = 3}",
        "[tool.ckptx.reshard]\nworkers = 3", "[tool.other]\nx = 1\n[tool]\nckptx = {workers = 3}",
    ],
)  # fmt: skip
def test_every_form_of_the_table_in_pyproject_is_read(table: str) -> None:
    files(project=table)
    assert read_defaults("reshard")["workers"].value == 3
    Path("pyproject.toml").write_text("tool = {ckptx = {workers = 3}}")
    assert read_defaults("reshard")["workers"].value == 3


@pytest.mark.parametrize("project", ['dependencies = ["ckptx>=0.1"]', "[tool.ckptxx]\nworkers = 3", "# ckptx"])
def test_a_pyproject_that_only_mentions_ckptx_is_not_read(project: str) -> None:
    files(project=f"{project}\nbroken = ")
    assert read_defaults("reshard") == {}


@pytest.mark.parametrize("table", ["[tool.ckptx]\nwokers = 2", "[tool]\nckptx = {wokers = 2}"])
def test_a_wrong_key_in_either_form_is_one_line(table: str) -> None:
    files(project=table)
    assert run("reshard", "hf", "out").stderr.startswith(
        "error: pyproject.toml: tool.ckptx.wokers: ckptx does not take"
    )


def test_a_table_is_for_one_command_or_a_group() -> None:
    files(own="[convert]\nworkers = 2\n[convert.hf2dcp]\nworkers = 3\n[convert.to-hf]\nindex = 'always'")
    assert read_defaults("convert hf2dcp")["workers"].value == read_defaults("convert to-dcp")["workers"].value == 3
    assert {name: each.value for name, each in read_defaults("convert dcp2hf").items()} == {
        "workers": 2,
        "index": "always",
    }
    assert not read_defaults("reshard")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TP", "4", 4), ("TENSOR_PARALLEL_SIZE", "4", 4), ("RUN", "1", True), ("RUN", "no", False),
        ("BACKWARD", "off", False), ("REFERENCE_MEMORY", "8GB", "8GB"), ("COMPUTE_DTYPE", "bfloat16", "bf16"),
        ("JSON", "true", True), ("QUIET", "yes", True), ("REPORT", "r.json", "r.json"),
    ],
)  # fmt: skip
def test_variables_are_read_as_their_option(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    monkeypatch.setenv(f"CKPTX_{name}", text)
    (found,) = read_defaults("verify").values()
    assert (found.value, found.origin) == (value, f"CKPTX_{name}")


def test_a_repeatable_option_and_what_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"SET": "a.b=1 c=2", "DEBUG": "1", "LAUNCHED": "1", "VERSION": "3", "TP": ""}.items():
        monkeypatch.setenv(f"CKPTX_{name}", text)
    assert {name: each.value for name, each in read_defaults("robustness").items()} == {"overrides": ("a.b=1", "c=2")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wokers = 2", "ckptx.toml: wokers: ckptx does not take --wokers; did you mean --workers?"),
        (
            "[reshard]\nindex = 'auto'",
            "ckptx.toml: reshard.index: reshard does not take --index (convert to-hf and merge do)",
        ),
        ("[diff]\nprefix = 'x'", "ckptx.toml: diff.prefix: diff does not take --prefix; use --source-prefix"),
        ("[resherd]\ntp = 2", "ckptx.toml: resherd: unknown command; did you mean reshard?"),
        ("[convert.zzz]\ntp = 2", "ckptx.toml: convert.zzz: unknown command"),
        ("workers = 'many'", 'ckptx.toml: workers: "many" must be an integer'),
        ("workers = true", "ckptx.toml: workers: True must be an integer"),
        ("[reshard]\ntp = 0", "ckptx.toml: reshard.tp: 0 must be between 1 and"),
        ("[reshard]\noverwrite = 'yes'", 'ckptx.toml: reshard.overwrite: "yes" must be true or false'),
        ("max-memory = 'much'", 'ckptx.toml: max-memory: "much" is not a size'),
        ("tied = ['auto']", "ckptx.toml: tied: ['auto'] must be one of auto, alias, copy, drop"),
        ("workers = ", "ckptx.toml: is not valid TOML: "),
    ],
)
def test_a_file_that_is_wrong_is_one_line(text: str, message: str) -> None:
    files(own=text)
    result = run("reshard", "hf", "out")
    assert result.return_value == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert not Path("out").exists()
    assert document("reshard", "hf", "out")["exit"] == 2
    files(project="[tool.ckptx]\nworkers = 'many'")
    assert run("reshard", "hf", "out").stderr.startswith('error: pyproject.toml: tool.ckptx.workers: "many"')


def test_a_variable_that_is_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTX_WORKERS", "many")
    assert run("reshard", "hf", "out").stderr == 'error: CKPTX_WORKERS: "many" must be an integer\n'


@pytest.mark.parametrize("kind", ["directory", "link", "no text"])
def test_a_file_that_cannot_be_read(kind: str) -> None:
    path = Path("ckptx.toml")
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("gone")
    else:
        path.write_bytes(b"\xff")
    result = run("inspect", "hf")
    assert result.return_value == 2 and result.stderr.startswith("error: ckptx.toml: ")
    path.rmdir() if kind == "directory" else path.unlink()
    Path("pyproject.toml").write_text("[project")
    assert run("inspect", "hf").return_value == 0, "a file of other programs, which says nothing of ckptx"


def test_a_default_without_meaning_in_a_call_is_left_out() -> None:
    files(
        own="[verify]\ntp = 2\ndtype = 'bf16'\ntp-plan = 'p.json'\nmicrobatches = 4\n"
        "[forecast]\nseq = 64\nset = ['a=b']\npp-split = 'vllm'\ngpu-memory = '80GB'\ngpus = 8"
    )
    assert set(applicable_defaults("verify", {})) == {"dtype"}
    assert set(applicable_defaults("verify", {"run": True})) == {"tp", "tp_plan"}
    assert set(applicable_defaults("verify", {"run": True, "tp": 1})) == set()
    assert set(applicable_defaults("verify", {"run": True, "pp": 2})) == {"tp", "tp_plan", "microbatches"}
    assert set(applicable_defaults("forecast", {})) == {"seq", "gpu_memory"}
    assert set(applicable_defaults("forecast", {"recipe": "r"})) == {"overrides", "gpu_memory"}
    assert set(applicable_defaults("forecast", {"search": True})) == {"seq", "gpu_memory", "gpus"}
    assert run("verify", "hf", "hf").return_value == 0


def test_a_refusal_names_the_defaults_of_the_call() -> None:
    files(own="workers = 3")
    result = run("reshard", "hf", "out", "--max-memory", "2MB")
    assert result.return_value == 2
    assert result.stderr.splitlines()[1] == "note: settings in use: --workers (ckptx.toml: workers)"


def test_env_lists_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    assert document("env")["settings"] == []
    files(project="[tool.ckptx]\nworkers = 5\nseq = 7", own="token = 'secret'\n[reshard]\nworkers = 6")
    monkeypatch.setenv("CKPTX_SEQ", "8")
    rows = {row["origin"]: row for row in document("env")["settings"]}
    project, own = "pyproject.toml: tool.ckptx.workers", "ckptx.toml: reshard.workers"
    assert rows.keys() == {project, own, "ckptx.toml: token", "CKPTX_SEQ"}
    assert rows[own] == {
        "option": "--workers", "value": "6", "origin": "ckptx.toml: reshard.workers", "commands": ["reshard"],
    }  # fmt: skip
    assert rows[project]["commands"] == [
        "convert to-dcp",
        "convert to-hf",
        "convert to-megatron",
        "convert to-peft",
        "merge",
        "verify",
    ]
    assert "secret" not in json.dumps(rows) + run("env").stdout
    assert "--seq            8  (CKPTX_SEQ; for forecast)" in run("env").stdout


def test_global_options_and_outputs_have_defaults() -> None:
    files(own="quiet = true\nreport = 'report.json'")
    result = run("reshard", "hf", "out")
    assert (result.return_value, result.stdout) == (0, "")
    assert json.loads(Path("report.json").read_text())["command"] == "reshard"


def test_a_launched_rank_reads_no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its document has them already; a second time they would come before what the call says."""
    from ckptx.api import verify_run as running
    from ckptx.cli import rank
    from ckptx.options.document import to_json
    from ckptx.options.verify import VerifyRunOptions

    files(own="tp = 3\nworkers = 'many'")
    Path("options.json").write_text(to_json(VerifyRunOptions("hf", "hf", run=True, tp=2, strict=True)))
    heard: list[VerifyRunOptions] = []

    def run_here(options: VerifyRunOptions) -> Any:
        heard.append(options)
        raise UsageError("enough")

    monkeypatch.setattr(running, "verify_models", run_here)
    monkeypatch.setattr("sys.argv", ["rank", "options.json", "report.json"])
    assert rank.run_rank() == 2
    assert (heard[0].dims.tp, heard[0].strict) == (2, True)
    assert json.loads(Path("report.json").read_text())["error"] == "enough"


GPU, MEMORY = 'gpu = "h100"', 'gpu-memory = "1GB"'


@pytest.mark.parametrize(
    ("project", "own", "variables", "arguments", "used"),
    [
        (f"[tool.ckptx]\n{GPU}", MEMORY, {}, {}, "gpu_memory"),
        (f"[tool.ckptx]\n{MEMORY}", GPU, {}, {}, "gpu"),
        ("", f"{GPU}\n[forecast]\n{MEMORY}", {}, {}, "gpu_memory"),
        ("", f"{MEMORY}\n[forecast]\n{GPU}", {}, {}, "gpu"),
        ("", f"[forecast]\n{GPU}", {"CKPTX_GPU_MEMORY": "1GB"}, {}, "gpu_memory"),
        ("", f"[forecast]\n{MEMORY}", {"CKPTX_GPU": "h100"}, {}, "gpu"),
        ("", GPU, {}, {"gpu_memory": "1GB"}, None),
        ("", MEMORY, {}, {"gpu": "h100"}, None),
        ("", "", {"CKPTX_GPU": "h100"}, {"gpu_memory": "1GB"}, None),
        ("", "", {"CKPTX_GPU_MEMORY": "1GB"}, {"gpu": "h100"}, None),
    ],
)
def test_of_two_that_exclude_each_other_the_strongest_source_holds(
    project: str, own: str, variables: dict[str, str], arguments: dict[str, str], used: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    files(project=project, own=own)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert [*applicable_defaults("forecast", arguments)] == ([] if used is None else [used])


@pytest.mark.parametrize(
    ("own", "variables", "origin"),
    [
        (f"{GPU}\n{MEMORY}", {}, "ckptx.toml: gpu-memory"),
        (f"[forecast]\n{GPU}\n{MEMORY}", {}, "ckptx.toml: forecast.gpu-memory"),
        ("", {"CKPTX_GPU": "h100", "CKPTX_GPU_MEMORY": "1GB"}, "CKPTX_GPU_MEMORY"),
    ],
)
def test_two_of_one_source_that_exclude_each_other_are_refused(
    own: str, variables: dict[str, str], origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(own=own)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{origin}: --gpu-memory cannot be combined with --gpu "):
        applicable_defaults("forecast", {})
    assert [*applicable_defaults("forecast", {"gpu_memory": "2GB"})] == []
