"""`ckptx robustness` as a command: what it prints, writes and leaves, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import ckptx
from ckptx.cli.main import cli
from ckptx.errors import EnvironmentProblem, OutputError, SpaceError, UnsupportedError, UsageError
from ckptx.robustness_suite.faults import FAULTS
from ckptx.robustness_suite.memory import _forecast_step
from ckptx.robustness_suite.phases import PHASES, select_phases
from ckptx.robustness_suite.session import InjectedFault
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.runtime.training.source import prepare_source
from tests.support.import_tool import ROOT
from tests.support.runner import CliRunner

# Fewer steps and layers than the recipe has.
SMALLER = [
    word
    for each in ("training.steps=4", "training.save_at=[2]", "model.config.num_hidden_layers=2")
    for word in ("--set", each)
]
SCHEMA = json.loads((ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def ran(*arguments: str, code: int) -> tuple[dict[str, Any], str]:
    """The document of a run, and what it said; its ranks are forked from what the tests have imported."""
    words = ["robustness", *arguments, "--device", "cpu", "--json"]
    done = CliRunner().invoke(cli, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == code, done.stderr
    return document_of(done.stdout), done.stderr


def document_of(printed: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(printed)
    jsonschema.validate(document, SCHEMA)
    return document


def test_a_run_that_passes_leaves_nothing(temporary: Path) -> None:
    document, said = ran("llama_tiny", *SMALLER, "--phases", "2", code=0)
    (phase,) = document["phases"]
    assert (phase["name"], phase["ok"]) == ("replicas", True)
    assert phase["memory"]["threads"] <= phase["memory"]["baseline_threads"]
    assert [each["run"] for each in document["losses"]] == ["uninterrupted"]
    memory = document["step_memory"]
    # Mostly equal; one run in some was seen 2 to 3 % above, as if a thread of gloo kept what it sent a moment longer.
    assert 0.99 <= memory["measured_peak"] / memory["forecast_peak"] <= 1.05
    assert memory["measured_between_steps"] == pytest.approx(memory["forecast_between_steps"], rel=0.01)
    assert memory["measured_peak"] > memory["measured_between_steps"] > 0
    assert "Warning" not in said
    assert document["output_dir"] == ""
    assert not [*temporary.glob("ckptx-*")]


def test_a_fault_runs_the_phase_that_names_it_and_everything_stays(temporary: Path, tmp_path: Path) -> None:
    pages = [f"--{kind}={tmp_path / kind}" for kind in ("html", "junit", "report")]
    document, _ = ran("llama_tiny", *SMALLER, "--inject", "byte_changed", *pages, code=1)
    (phase,) = document["phases"]
    assert (phase["name"], phase["ok"], document["injected_fault"]) == ("load and save", False, "byte_changed")
    assert {each["check"] for each in document["differing"]} == {"readable"}
    assert (Path(document["output_dir"]) / "uninterrupted" / "step-2").is_dir()
    assert "byte_changed" in (tmp_path / "html").read_text(encoding="utf-8")
    assert "<failure" in (tmp_path / "junit").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "report").read_text(encoding="utf-8"))["exit"] == 1


def test_a_fault_that_no_check_detects_is_no_pass(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAULTS, "byte_changed", replace(FAULTS["byte_changed"], injection=InjectedFault()))
    junit = tmp_path / "junit"
    document, _ = ran("llama_tiny", *SMALLER, "--inject", "byte_changed", "--junit", str(junit), code=2)
    assert (document["ok"], [each["ok"] for each in document["phases"]]) == (False, [True])
    assert "--inject byte_changed: no check failed" in document["notes"][-1]
    assert "NOT DETECTED: llama_tiny, 1 phase; injected fault: byte_changed" in junit.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_phase_of_the_smallest_recipe_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptx", "robustness", "llama_tiny", "--device", "cpu", "--json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    document = document_of(done.stdout)
    assert "Warning" not in done.stderr, "of its ranks, too"
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(("ckptx-", "pymp-"))]
    assert [each["ok"] for each in document["phases"]] == [True] * len(PHASES)
    assert all(each["ok"] for each in document["kills"])
    assert document["noise"]["loss"]["repeated"] == 0.0 < document["noise"]["loss"]["perturbed"] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lama_tiny"], 'did you mean "llama_tiny"'),
        (["llama_tiny", "--set", "layout.tpp=2"], "layout.tp"),
        (["llama_tiny", "--phases", "9"], '--phases: "9" must be one of 0 (initial logits)'),
        (["llama_tiny", "--phases", "3-1"], '--phases: "3-1" must be one of'),
        (["llama_tiny", "--inject", "nothing"], "no such fault"),
        (
            ["llama_tiny", "--phases", "1,3", "--inject", "one_moment_lost"],
            "--inject one_moment_lost: the fault is detected in phase 6 (resume), which --phases does not select",
        ),
        (["llama_tiny", "--gpu-memory", "many"], "--gpu-memory"),
        (["llama_tiny", "--backend", "mpi"], '--backend: "mpi" must be one of auto, gloo, nccl'),
        (["llama_tiny", "--device", "tpu"], '--device: "tpu" must be one of auto, cpu, cuda'),
        (
            ["llama_tiny", "--set", "training.save_at=[]"],
            "training.save_at: [] has no step before the last step 6",
        ),
        (["llama_tiny", "--set", "training.save_at=[6]"], "training.save_at: [6] has no step before the last step 6"),
        (
            ["llama_tiny", "--set", "layout.dp_shard=1"],
            "checks.sharded: true requires sharded parameters, but layout.tp and layout.dp_shard are 1",
        ),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    names = {
        "--phases": "phases", "--inject": "inject", "--gpu-memory": "gpu_memory", "--backend": "backend",
        "--device": "device",
    }  # fmt: skip
    options = {"device": "cpu"} | {
        names[option]: value for option, value in zip(arguments[1::2], arguments[2::2], strict=True) if option in names
    }
    settings = [value for option, value in zip(arguments[1::2], arguments[2::2], strict=True) if option == "--set"]
    with pytest.raises(UsageError) as error:
        ckptx.robustness(arguments[0], overrides=settings, **options)  # type: ignore[arg-type]
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(OutputError, match="already contains files"):
        ckptx.robustness("llama_tiny", out=tmp_path, device="cpu")
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_that_fails_removes_the_folder_that_it_created_only(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OutputError("no space")

    monkeypatch.setattr("ckptx.robustness_suite.run._initial_report", fail)
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with pytest.raises(OutputError, match="no space"):
        ckptx.robustness("llama_tiny", out=out, device="cpu")
    assert out.exists() is exists


def test_another_rank_leaves_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --out it has no folder before rank 0 sends its own; its error must be the one that is raised."""
    monkeypatch.setattr("ckptx.robustness_suite.run.is_launched", lambda: True)
    monkeypatch.setattr("ckptx.robustness_suite.run.is_first_rank", lambda: False)
    monkeypatch.setattr("ckptx.robustness_suite.run.environment", lambda **others: 1 / 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        ckptx.robustness("llama_tiny", device="cpu")
    assert tmp_path.exists()


def test_phases_are_chosen_by_numbers_ranges_and_names() -> None:
    assert [each.number for each in select_phases("0-2,6")] == [0, 1, 2, 6]
    assert [each.number for each in select_phases("6, export")] == [4, 6]
    assert select_phases(None) == PHASES


def test_what_cannot_fit_is_refused_before_it_trains(temporary: Path) -> None:
    with pytest.raises(SpaceError, match=r"--gpu-memory: llama_tiny takes .* more than 1\.00 GiB"):
        ckptx.robustness("llama_tiny", overrides=SMALLER[1::2], gpu_memory="1GB", device="cpu")
    assert not [*temporary.glob("ckptx-*")]


def test_a_model_whose_code_fails_is_no_defect_of_ours(temporary: Path) -> None:
    with pytest.raises(UnsupportedError, match="Qwen3MoeForCausalLM: the code of the model failed: RuntimeError: "):
        ckptx.robustness("qwen3_moe_tiny", overrides=["model.config.num_experts_per_tok=99"], device="cpu")
    assert not [*temporary.glob("ckptx-*")]


def test_ranks_on_a_cpu_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe("llama_tiny")
    source = prepare_source(recipe, tmp_path)
    monkeypatch.setattr("ckptx.runtime.parity.memory.read_free_bytes", lambda device: 6 << 20)
    with pytest.raises(
        SpaceError, match=r"llama_tiny: its ranks take .* at the peak of a step, but only 6.00 MiB are free"
    ):
        _forecast_step(recipe, source, None, is_memory_shared=True)
    assert _forecast_step(recipe, source, None, is_memory_shared=False)[0] < 6 << 20  # of one rank


def test_what_a_command_printed_stays_when_it_fails(temporary: Path) -> None:
    failing = ["trainer.command='{python} -c \"exit(3)\" {resume}'"]
    with pytest.raises(EnvironmentProblem, match="uninterrupted: ended with exit code 3") as caught:
        ckptx.robustness("fsdp2_script", overrides=failing)
    (folder,) = temporary.glob("ckptx-robustness-*")
    assert (folder / "uninterrupted" / "output.log").is_file() and str(folder) in str(caught.value)
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match=r"trainer\.time_limit"):
        ckptx.robustness("fsdp2_script", overrides=["trainer.time_limit=0"])
    assert not any(temporary.iterdir())
