"""Text of `robustness`: verdicts, differences, noise, widened tolerances, kills; one line with -q."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import ckptx
from ckptx.report.documents.robustness import FaultsReport, RobustnessReport
from ckptx.report.environment import environment
from ckptx.report.junit import junit_xml
from ckptx.report.robustness import faults_text, robustness_text, robustness_verdict
from ckptx.report.robustness_html import robustness_page
from ckptx.report.robustness_phrases import (
    CAUSES,
    kill_text,
    kills_text,
    measured_noise,
    number_text,
    parse_number,
    phase_notes,
    verdict,
)
from ckptx.robustness_suite.oracles import ORACLE_ORDER, Difference, Verdict
from ckptx.untrusted.printable import escape_strings
from tests.report.made import broken, oracle, phase, robust
from tests.report.pages import Page

SCHEMA = Path(__file__).resolve().parent.parent.parent / "docs" / "report.schema.json"
EVIL = ["\x1b[2J\rgone", "a\nPASSED: forged", "\u202eright to left", "\ud800", "<b>&amp;]]></b>", "\x00", ""]


def hostile(text: str) -> RobustnessReport:
    """A report with the same text wherever a name can stand."""
    rows = [oracle(text, [text, text]), oracle("model", [text])]
    return broken(
        recipe=text,
        recipe_file=text,
        output_dir=text or "x",
        trainer=text,
        injected_fault=text or "x",
        overrides={text: text},
        environment={text: text},
        notes=[text],
        phases=[phase(text, False, *rows, title=text, notes=[text]), phase(text + "2", None, notes=[text])],
        losses=[{"run": text, "steps": [1, 2], "losses": [1.0, 2.0]}, {"run": text, "steps": [2], "losses": [2.5]}],
        differing=[
            {"phase": text, "check": text, "item": text, "rank": 0, "reference": text, "actual": text},
            {"phase": text, "check": "model", "item": text},
        ],
        kills=[{"operation": text, "ranks": text, "is_async": True, "latest_step": text, "ok": False}],
    )


def test_a_fault_that_was_not_detected_is_no_pass() -> None:
    text = "NOT DETECTED: small, 2 phases; injected fault: rng_stale"
    undetected = robust(exit=2, injected_fault="rng_stale")
    assert verdict(undetected) == robustness_verdict(undetected) == text
    assert f'<failure message="{text}"' in junit_xml(undetected, "small")
    assert "NOT DETECTED" in robustness_page(undetected, "small")


def test_a_line_for_each_phase_and_the_verdict_at_the_end() -> None:
    lines = robustness_text(robust(seconds=3.5)).splitlines()
    assert lines[0] == "small on dp_shard 2, 2 ranks"
    assert lines[1].split() == ["uninterrupted", "ok", "1.2", "s", "what", "uninterrupted", "proves"]
    assert lines[-4] == "noise of loss: 4.8e-07 (identical rerun: 0; embedding perturbed by 1 ULP: 4.8e-07)"
    assert lines[-3:] == [
        "output: /runs/out",
        "PASSED: small, 2 phases",
        "3.50 s, peak memory 0 B",
    ]


def test_what_fails_is_named_below_its_phase() -> None:
    text = robustness_text(broken())
    assert "rng: 2 of 185 items differ\n          torch on ranks 0, 1: expected 9c3d, got 1f2a\n" in text
    assert "          python on rank 1: missing\n" in text
    assert f"          diagnosis: {CAUSES['rng']}\n" in text
    assert "loss: difference 0.003, tolerance 4.8e-05 (100 x noise 4.8e-07)" in text
    assert "memory: 14 threads after the phase, baseline 8 (a process group has 6)" in text
    assert "memory: 4.00 KiB of tensors retained after the phase, baseline 0 B" in text
    assert re.search("layouts +not run +--phases left it out\n", text)
    assert "FAILED rank 1 killed at fsync 2 (asynchronous save): no step can be loaded" in text
    assert "FAILED: small: replicas (memory); resume (rng, loss); injected fault: stale_rng" in text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"operation": "write __0_0.distcp #250", "ranks": [0], "is_async": False, "latest_step": 2, "ok": True},
            (
                "rank 0 killed at write 250 of __0_0.distcp (synchronous save): "
                "step 2 is the latest that can be loaded, as expected"
            ),
        ),
        (
            {"operation": "rename a -> b", "ranks": [0, 1], "is_async": True, "latest_step": None, "ok": False},
            "ranks 0, 1 killed at rename a -> b (asynchronous save): no step can be loaded",
        ),
    ],
)
def test_a_kill_in_words(row: dict[str, Any], said: str) -> None:
    assert kill_text(row) == said


def test_kills_are_counted() -> None:
    said = "the last complete step could be loaded"
    assert kills_text([{"ok": True}] * 3) == f"3 times; {said} each time"
    assert kills_text([{"ok": True}, {"ok": False}]).endswith("could be loaded after 1 of them")


def test_a_widened_limit_is_red_even_where_all_passed() -> None:
    wide = oracle("loss", ok=True, value=1e-5, tolerance=4.8e-5, noise_factor=100.0, is_widened=True)
    text = robustness_text(robust(phases=[phase("resume", True, wide)]), lambda said: f"<{said}>")
    assert "<WIDENED by the recipe: resume: loss tolerance 4.8e-05 (100 x noise)>" in text
    assert "<PASSED" not in text and "PASSED" in text


def test_more_items_than_a_line_names_are_counted() -> None:
    names = [f"layers.{layer}" for layer in range(8)]
    rows = [{"phase": "resume", "check": "model", "item": f"layers.{layer}", "rank": 0} for layer in range(20)]
    report = robust(exit=1, phases=[phase("resume", False, oracle("model", names, differing_count=20))], differing=rows)
    assert "          layers.3 on rank 0\n          and 16 more\n" in robustness_text(report)


def test_several_things_at_one_place_are_each_said() -> None:
    said = ["step-3: is no complete step", "the next save: step-3 is there"]
    rows = [
        {
            "phase": "killed saves",
            "check": "readable",
            "item": "write a",
            "rank": None,
            "reference": "none",
            "actual": found,
        }
        for found in said
    ]
    text = robustness_text(
        broken(phases=[phase("killed saves", False, oracle("readable", ["write a"]))], differing=rows)
    )
    assert all(f"write a: expected none, got {each}" in text for each in said)


def test_items_come_from_the_oracle_where_the_report_has_no_rows() -> None:
    report = robust(exit=1, phases=[phase("resume", False, oracle("model", ["a", "b"]))], differing=[])
    assert "          a\n          b\n" in robustness_text(report)


def test_a_phase_is_called_by_its_number_where_it_has_one() -> None:
    rows = [{"phase": 6, "check": "rng", "item": "torch", "rank": 1, "reference": "a", "actual": "b"}]
    judged = phase("resume", False, oracle("rng", ["torch"]), oracle("memory", ["threads"]), number=6)
    judged["memory"]["threads"] = 14
    text = robustness_text(robust(exit=1, phases=[judged], differing=rows))
    assert "  6 resume             FAILED" in text and "torch on rank 1: expected a, got b" in text
    assert text.count("memory: ") == 1, "an oracle says it"


def test_quiet_is_one_line_with_the_first_item() -> None:
    assert robustness_verdict(robust()) == "PASSED: small, 2 phases"
    assert robustness_verdict(broken()) == (
        "FAILED: small: replicas (memory); resume (rng, loss); injected fault: stale_rng; "
        "resume: rng: 2 of 185 items differ; torch on ranks 0, 1: expected 9c3d, got 1f2a; "
        f"cause: replicas, check memory: {CAUSES['memory']}"
    )


def test_a_failure_without_a_phase_is_one() -> None:
    assert verdict(robust(exit=1, phases=[])) == "FAILED: small: see the notes"
    assert verdict(robust(phases=[])) == "PASSED: small, 0 phases"
    assert "PASSED: small, 1 phase, 1 not run" in verdict(robust(phases=[phase("a"), phase("b", None)]))


def test_numbers_that_are_none() -> None:
    assert [number_text(each) for each in (None, "nan", "inf", 1e-3)] == ["none", "nan", "inf", "0.001"]
    assert parse_number("x") != parse_number("x")
    noise = {"loss": {"repeated": "nan", "perturbed": 1.0}, "logits": {"repeated": 1.0, "perturbed": None}}
    found = [measured_noise(robust(noise=noise), what) for what in ("loss", "logits", "other")]
    assert found[0] != found[0] and found[1:] == [1.0, None]
    assert "noise of loss: nan (identical rerun: nan; " in robustness_text(robust(noise=noise))
    assert phase_notes({"notes": "one"}) == ["one"] and phase_notes({}) == []


@pytest.mark.parametrize("text", EVIL)
def test_no_name_starts_a_line_or_moves_the_cursor(text: str) -> None:
    """As the command line prints it: every text of the report as one line."""
    said = robustness_text(escape_strings(hostile(text)))
    assert not {"\x1b", "\r", "\x00", "\u202e", "\ud800"} & set(said)
    assert len(said.splitlines()) == len(robustness_text(hostile("plain")).splitlines())
    assert "\n" not in robustness_verdict(escape_strings(hostile(text)))


def test_ranks_that_are_not_known_are_not_counted() -> None:
    report = robust(layout={}, world_size=None, trainer="torchrun train.py")
    lines = robustness_text(report).splitlines()
    assert lines[:2] == [report.recipe, "  trainer: torchrun train.py"]
    assert "mesh" not in [each.text for each in Page(robustness_page(report, "r")).all("dt")]
    assert 'name="mesh"' not in junit_xml(report, "r")


def test_every_oracle_has_a_cause() -> None:
    assert set(CAUSES) >= set(ORACLE_ORDER)


def test_rows_of_the_oracles_are_understood() -> None:
    """What `oracles.Verdict` makes of a difference is what the text reads."""
    row = Verdict("rng", 3, [Difference("rng", "torch", 1, "a", "b")]).row()
    loss = Verdict("loss", 2, value=float("nan"), limit=1e-6, noise_factor=8.0, noise=1.25e-7).row()
    text = robustness_text(robust(exit=1, phases=[phase("resume", False, row, loss)]))
    assert "rng: 1 of 3 items differs\n          torch\n" in text
    assert "loss: difference nan, tolerance 1e-06 (8 x noise 1.25e-07)" in text


def test_an_environment_is_texts_without_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment(device="cpu")
    assert found["ckptx"] == ckptx.__version__ and found["device"] == "cpu" and int(found["cores"]) >= 1
    assert all(isinstance(each, str) for each in found.values())
    monkeypatch.setattr("ckptx.report.environment._PACKAGES", ("no-such-package",))
    assert "no-such-package" not in environment()


def test_faults_are_listed() -> None:
    report = FaultsReport(command="robustness", faults={"nan": "a row is NaN", "stale_rng": "an old state"})
    assert faults_text(report) == "nan        a row is NaN\nstale_rng  an old state"
    assert faults_text(dataclasses.replace(report, faults={})) == ""


@pytest.mark.parametrize(
    "made", [robust(), broken(), hostile("x"), FaultsReport(command="robustness", faults={"a": "b"})]
)
def test_documents_are_as_the_schema_says(made: Any) -> None:
    validator = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert [error.message for error in validator.iter_errors(json.loads(made.to_json()))] == []


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("form", ["text", "page", "junit"])
def test_only_settings_that_differ_are_named(first: int, count: int, form: str) -> None:
    """In text, on the page and in JUnit XML."""
    settings = ["lr", "initial_lr", "weight_decay", "betas", "eps", "amsgrad"]
    words = {"lr": "learning rate", "initial_lr": "initial learning rate", "weight_decay": "weight decay"}
    keys = [settings[(first + index) % len(settings)] for index in range(count)]
    row = oracle("param groups", [f"o.param_groups.0.{key}" for key in keys])
    rows = [{"phase": "resume", "check": "param groups", "item": item, "rank": 0} for item in row["differing"]]
    report = robust(exit=1, phases=[phase("resume", False, row)], differing=rows)
    forms = {
        "text": robustness_text,
        "page": lambda each: robustness_page(each, "r"),
        "junit": lambda each: junit_xml(each, "r"),
    }
    said = forms[form](report)
    names = ", ".join(words.get(key, key) for key in keys)
    (line,) = re.findall(r"[^\n<>]*in the optimizer.{1,6}s param groups", said)[:1]
    assert names in line
    assert not any(re.search(rf"(?<!initial ){words.get(key, key)}", line) for key in settings if key not in keys)
