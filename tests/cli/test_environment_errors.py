"""Full disks, little memory, --quiet and unknown CKPTX_* variables: exit codes and lines as the pages state them."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptx.errors import EnvironmentProblem, SpaceError, find_environment_problem
from ckptx.options import defaults
from ckptx.publishing import report_file
from tests.support.checkpoint_writers import llama, write_hf


def call(*words: str, variables: Mapping[str, str] | None = None, prefix: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPTX_")}
    command = [sys.executable, "-m", "ckptx", *words]
    return subprocess.run(
        ["bash", "-c", f'{prefix} exec "$@"', "bash", *command],
        capture_output=True, text=True, env=environment | dict(variables or {}), check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "\n\nIMPORTANT: PLEASE READ\n\nOriginal error was: libblas.so: failed to map segment from shared object\n",
        "libtorch.so: cannot allocate memory in static TLS block",
    ],
)
def test_a_library_that_does_not_fit_in_memory_is_one_line(text: str) -> None:
    problem = find_environment_problem(ImportError(text))
    assert isinstance(problem, EnvironmentProblem) and problem.exit_code == 7
    assert "not enough memory to load this library; raise the limit (ulimit -v)" in str(problem)
    assert "\n" not in str(problem)
    assert find_environment_problem(ImportError("No module named x")) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_not_enough_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    class FullFile(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(report_file.os, "fdopen", lambda descriptor, mode: os.close(descriptor) or FullFile())
    with pytest.raises(SpaceError, match=r"report\.json: cannot be written: .*; free some space, or choose a file"):
        report_file.write_text(tmp_path / "report.json", "{}")
    assert not list(tmp_path.iterdir())


def test_stdout_on_a_full_disk_exits_with_6(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "model", llama())
    done = call("inspect", str(path), prefix="exec > /dev/full;")
    assert done.returncode == 6
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]  # of other transformers
    assert error == "error: stdout: cannot be written: No space left on device; free some space and run again"


def test_env_is_printed_although_quiet() -> None:
    for done in (call("env", "-q"), call("env", variables={"CKPTX_QUIET": "1"})):
        assert done.returncode == 0 and "python" in done.stdout and not done.stderr


def test_a_dry_run_that_does_not_fit_is_one_line_if_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_hf(tmp_path / "model", llama())
    code = (
        "import sys; from ckptx.conversion.steps import summary; summary.free_space = lambda path: 10; "
        "from ckptx.cli.main import main; main()"
    )
    words = ["-q", "convert", "to-dcp", str(path), str(tmp_path / "out"), "--dry-run", "--allow-config-mismatch"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 6 and done.stdout == ""
    assert done.stderr.startswith("error: not enough space: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("CKPTX_STRICTT", "CKPTX_STRICTT is not an option; did you mean CKPTX_STRICT?"),
        ("CKPTX_WORKER", "CKPTX_WORKER is not an option; did you mean CKPTX_WORKERS?"),
        ("CKPTX_FLUX_CAPACITOR", "CKPTX_FLUX_CAPACITOR is not an option; unset it"),
    ],
)
def test_an_unknown_variable_is_noted(tmp_path: Path, name: str, note: str) -> None:
    path = write_hf(tmp_path / "model", llama())
    done = call("verify", str(path), str(path), variables={name: "1"})
    assert done.returncode == 0 and f"note: {note}\n" in done.stderr
    assert f"{name:<16} not an option of ckptx" in call("env", variables={name: "1"}).stdout


def test_no_variable_of_ckptx_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option, its other names, and every variable that the sources name."""
    import re

    root = Path(defaults.__file__).parents[1]
    found = {name for path in root.rglob("*.py") for name in re.findall(r'"(CKPTX_[A-Z_]*[A-Z])"', path.read_text())}
    assert {"CKPTX_DEBUG", "CKPTX_LAUNCHED"} <= found
    for name in {*found, "CKPTX_WORKERS", "CKPTX_STRICT", "CKPTX_ALLOW_MISFIT", "CKPTX_QUIET", "CKPTX_NO_COLOR"}:
        monkeypatch.setenv(name, "1")
    assert defaults.unknown_variables() == []
