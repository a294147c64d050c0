"""The script of action.yml: annotations, summaries and exit codes from the reports of ckptx."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptx.report.report import SCHEMA_VERSION
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf
from tests.support.import_tool import tool

action = tool("github_action")

REPORT: dict[str, Any] = {"command": "verify", "ok": False, "exit": 1, "error": None, "notes": [], "seconds": 1.0}
ORACLE = {
    "ok": False,
    "compared": 36,
    "differing_count": 2,
    "differing": ["torch", "torch"],
    "value": None,
    "tolerance": None,
}
PHASE = {"name": "resume", "title": "t", "ok": False, "seconds": 2.0, "checks": [], "notes": []}


def missing(name: str) -> dict[str, Any]:
    return {"name": name, "what": "missing", "a": "BF16 [2]", "b": None}


def test_commands_in_names_are_escaped() -> None:
    line = action.annotation("error", "a:b,c", "x\n::error::100%\r", "d,e")
    assert line == "::error file=d%2Ce,title=a%3Ab%2Cc::x%0A::error::100%25%0D"


def test_markup_in_names_is_escaped() -> None:
    report = REPORT | {"differing": [missing("a|b\n<img src=x> [c](d) `e`")]}
    (row,) = [line for line in action.summary(report).splitlines() if "missing" in line]
    assert row.count("|") == 4 and not set("<>[]`") & set(row)


def test_ten_annotations_name_the_number_of_the_others(tmp_path: Path) -> None:
    lines = action.annotations(REPORT | {"differing": [missing(f"w{i}") for i in range(60)]}, tmp_path)
    assert len(lines) == 10 and "and 51 more" in lines[-1]
    assert len(action.annotations(REPORT | {"differing": [missing(f"w{i}") for i in range(10)]}, tmp_path)) == 10
    assert "10 more rows are in the report" in action.summary(
        REPORT | {"differing": [missing(f"w{i}") for i in range(60)]}
    )


def test_levels_of_a_run_and_inconclusive_results(tmp_path: Path) -> None:
    rows = [
        {"level": "config", "rank": 0, "name": "k", "reference": 1, "checkpoint": 2},
        {"level": "bytes", "rank": 0, "name": "v"},
        {"level": "gradients", "rank": 1, "name": "w", "max_abs": 0.5000001, "tolerance": 0.1},
        {"level": "gradients", "rank": 1, "name": "x", "max_abs": "inf", "limit": 0.1, "what": "not finite, reference"},
    ]
    report = REPORT | {
        "run": True,
        "compared": 9,
        "world_size": 2,
        "differing": rows,
        "inconclusive": [{"level": "forward", "name": "logits"}],
    }
    assert action.annotations(report, tmp_path) == [
        "::error title=ckptx verify::config: k: 1 in the reference, 2 in the checkpoint, rank 0",
        "::error title=ckptx verify::tensor bytes: v: differs from the reference, rank 0",
        "::error title=ckptx verify::gradients: w: max abs difference 0.5, tolerance 0.1, rank 1",
        "::error title=ckptx verify::gradients: x: not finite, reference, rank 1",
        "::warning title=ckptx verify::inconclusive: logits/loss: logits",
    ]
    assert action.verdict(report) == "different: config, tensor bytes, gradients"
    assert action.verdict(report | {"differing": []}) == "inconclusive"
    assert action.verdict(report | {"differing": [], "ok": True}) == "equal: 9 tensors per rank, 2 ranks"


def test_oracles_are_named_beside_the_recipe(tmp_path: Path) -> None:
    phases = [
        PHASE
        | {
            "checks": [
                ORACLE | {"name": "rng"},
                ORACLE | {"name": "loss", "differing_count": 0, "value": 0.5, "tolerance": 0},
            ]
        },
        PHASE | {"name": "export", "notes": ["out of memory"]},
        PHASE | {"name": "killed saves", "ok": None},
    ]
    cause = {"phase": "resume", "check": "rng", "cause": "RNG state differs"}
    report = REPORT | {
        "command": "robustness", "phases": phases, "first_failure": cause,
        "recipe_file": str(tmp_path / "ci/ours.yaml"),
        "kills": [{"operation": "rename", "ok": False}, {"operation": "write", "ok": True}],
    }  # fmt: skip
    head = "::error file=ci/ours.yaml,title=ckptx robustness::"
    assert action.annotations(report, tmp_path) == [
        f"{head}resume: rng: 2 of 36 items: torch; RNG state differs",
        f"{head}resume: loss: difference 0.5, tolerance 0",
        f"{head}export: phase: out of memory",
        f"{head}killed while saving: rename: the last good step cannot be loaded",
    ]
    text = action.summary(report)
    assert (
        "failed, exit 1" in text
        and "| resume | **failed** | 2.0 |" in text
        and "| killed saves | not run | 2.0 |" in text
    )
    assert "file=" not in action.annotations(report, tmp_path / "other")[0]


def test_a_failure_without_rows_still_has_an_error(tmp_path: Path) -> None:
    (line,) = action.annotations(REPORT | {"differing": []}, tmp_path)
    assert line == "::error title=ckptx verify::exit 1: no tensors to compare"
    passed = REPORT | {"ok": True, "exit": 0, "compared": 3, "differing": []}
    assert action.annotations(passed, tmp_path) == [] and "equal: 3 tensors compared bit" in action.summary(passed)
    assert "different: 1 of 4 tensors" in action.summary(REPORT | {"compared": 3, "differing": [missing("w")]})
    lost = passed | {"not_compared": {"optimizer": 117, "other": 0, "objects": 1}}
    lack = "117 optimizer tensors, 1 pickled object not compared"
    assert f"equal: 3 tensors compared bit for bit; {lack}" in action.summary(lost)
    (line,) = action.annotations(lost | {"ok": False, "exit": 1}, tmp_path)
    assert line.endswith(f"exit 1: incomplete: 3 tensors equal; {lack}")


def test_exit_codes_are_those_of_ckptx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = LLAMA | {
        "hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "vocab_size": 16,
    }  # fmt: skip
    tensors = llama()
    name, (dtype, shape, payload) = next(iter(tensors.items()))
    write_hf(tmp_path / "a b", tensors, config=config)
    write_dcp(tmp_path / "same", tensors, config=config)
    write_hf(tmp_path / "other", tensors | {name: (dtype, shape, payload[:-1] + b"\x01")}, config=config)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))

    def started(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["github_action.py", "--reports", str(tmp_path / "reports"), *words])
        return int(action.main())

    reference = f"'{tmp_path / 'a b'}'"
    assert started("--verify", f"{reference} {tmp_path / 'same'}") == 0
    assert "::error" not in capfd.readouterr().out
    assert started("--verify", f"{reference} {tmp_path / 'other'}", "--robustness", str(tmp_path / "none.yaml")) == 1
    printed = capfd.readouterr().out
    assert (
        f"::error title=ckptx verify::content: {name}" in printed and "::error title=ckptx robustness::exit" in printed
    )
    begin = printed.index("::stop-commands::")
    token = printed[begin:].split("\n")[0].removeprefix("::stop-commands::")
    assert printed.index("DIFFERENT") < printed.index(f"::{token}::") < printed.index("::error")
    assert json.loads((tmp_path / "reports/verify.json").read_bytes())["exit"] == 1
    assert started("--verify", f"{reference} {tmp_path / 'same'} --nonesuch") == 2
    printed = capfd.readouterr().out
    assert "::error title=ckptx verify::exit 2: verify does not take --nonesuch" in printed
    assert printed.index("error: verify does not take --nonesuch") < printed.index("::error"), "in the log, too"
    assert started() == 2
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert text.index("passed") < text.index("failed, exit 1") < text.index("No report was written")


def test_a_report_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setattr(sys, "argv", ["github_action.py", "--reports", str(tmp_path), "--verify", "a b"])
    monkeypatch.setattr(action, "run", lambda *_: (1, REPORT | {"schema_version": 2}, ""))
    assert action.main() == 1
    assert "schema_version 2, this action reads 3" in capfd.readouterr().out
    assert "use the action and ckptx of the same version" in (tmp_path / "summary.md").read_text(encoding="utf-8")


def test_the_script_reads_the_version_that_ckptx_writes() -> None:
    assert action.SCHEMA_VERSION == SCHEMA_VERSION
