"""Each run of a custom trainer is compared in all that it saves and logs; the trainer is a function, not a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckptx.robustness_suite import command_runs
from ckptx.robustness_suite.commands import CommandResult
from ckptx.robustness_suite.external_trainer import run_external
from ckptx.robustness_suite.report_builder import ReportBuilder
from ckptx.runtime.training.recipe import ChecksBlock, Recipe, TrainerBlock, TrainingBlock
from tests.robustness_suite.test_foreign_trainer import failed, notes

SAVE_AT, LAST = 2, 4
Act = Callable[[Path], object]  # changes the folder of a run


def loss_of(step: int) -> float:
    return 8 - step / 4


def write_step(folder: Path, step: int, source: Path | None = None) -> None:
    """Save the state after a step, which no run can get wrong; what is altered in its source stays altered."""
    folder.mkdir(parents=True)
    w, v = np.full(3, float(step)), np.ones(2)
    if source is not None:
        loaded = load_file(source / "model.safetensors")
        w, v = loaded["w"] + (step - int(source.name.rpartition("-")[2])), loaded["v"]
    save_file({"w": w, "v": v}, folder / "model.safetensors")
    save_file({"exp_avg": np.full(3, step / 2)}, folder / "optimizer.safetensors")
    state = {"step": step, "sampler": {"seen": 8 * step}, "rng": [step, 7], "note": "x"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "cursor").write_text(f"{step}")


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ReportBuilder]:
    """Compares four runs, the folders of some of which are changed when they have ended."""

    def run(
        changes: Mapping[str, Act] | None = None, trainer: Mapping[str, Any] | None = None, **checks: Any
    ) -> ReportBuilder:
        def train(words: Sequence[str], output: Path, environment: Mapping[str, str], time_limit: float) -> Any:
            out, last, first = Path(words[1]), int(words[2]), int(words[3].rpartition("-")[2]) if words[3:] else 0
            output.write_text("")
            for step in {SAVE_AT, last} - set(range(first)):
                write_step(out / f"step-{step}", step, Path(words[3]) if words[3:] else None)
            write_losses(out, {step: loss_of(step) for step in range(first + 1, last + 1)})
            if changes and out.name in changes:
                changes[out.name](out)
            return CommandResult(0, 0.1, [], False)

        monkeypatch.setattr(command_runs, "run_command", train)
        block = TrainerBlock(command="train {out} {steps} {resume}", resume="{checkpoint}", **(trainer or {}))
        training = TrainingBlock(steps=LAST, save_at=(SAVE_AT,))
        recipe = Recipe(name="function", trainer=block, training=training, checks=ChecksBlock(**checks))
        return run_external(recipe, tmp_path / "out")

    return run


def test_runs_that_do_nothing_wrong_pass(judge: Callable[..., ReportBuilder]) -> None:
    outcome = judge()
    assert [row["ok"] for row in outcome.phases] == [True] * 5 and not outcome.differing
    compared = {row["name"]: {each["name"]: each["compared"] for each in row["checks"]} for row in outcome.phases}
    items = {"model": 2, "moments": 1, "finite": 3, "step": 1, "batch": 1, "rng": 1, "other": 2}
    assert compared["uninterrupted"]["finite"] == 3 + LAST
    assert compared["load and save"].items() >= items.items()
    assert compared["resumed"].items() >= {**items, "loss": LAST - SAVE_AT}.items()
    assert compared["rerun"].items() >= {**items, "loss": LAST}.items()


# ------------------------------------------------------------------------------------------- items of checkpoints


class ItemChange(NamedTuple):
    """A change of a checkpoint, the oracle that it belongs to and the end of the name of its item."""

    act: Act
    oracle: str
    item: str


def tensors_of(name: str, change: Callable[[dict[str, Any]], object]) -> Act:
    def act(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return act


def state_of(change: Callable[[dict[str, Any]], object]) -> Act:
    def act(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        change(state)
        (folder / "state.json").write_text(json.dumps(state))

    return act


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
CHANGED = {
    "a parameter": ItemChange(tensors_of(MODEL, lambda found: found["w"].put(2, 9)), "model", "w"),
    "a moment": ItemChange(tensors_of(OPTIMIZER, lambda found: found["exp_avg"].put(0, 9)), "moments", "exp_avg"),
    "the step": ItemChange(state_of(lambda found: found.update(step=9)), "step", "step"),
    "the position": ItemChange(state_of(lambda found: found["sampler"].update(seen=9)), "batch", "sampler.seen"),
    "random numbers": ItemChange(state_of(lambda found: found.update(rng=[9, 9])), "rng", "rng"),
    "a string": ItemChange(state_of(lambda found: found.update(note="y")), "other", "note"),
    "a file": ItemChange(lambda folder: (folder / "cursor").write_text("9"), "other", "cursor"),
}
MISSING = {
    "a parameter less": ItemChange(tensors_of(MODEL, lambda found: found.pop("v")), "model", "v"),
    "a key less": ItemChange(state_of(lambda found: found.pop("note")), "other", "note"),
    "a file less": ItemChange(lambda folder: (folder / "cursor").unlink(), "other", "cursor"),
}
NEW = {
    "a parameter more": ItemChange(tensors_of(MODEL, lambda found: found.update(u=np.ones(1))), "model", "u"),
    "a moment more": ItemChange(
        tensors_of(OPTIMIZER, lambda found: found.update(exp_avg_sq=np.ones(1))), "moments", "exp_avg_sq"
    ),
    "a key more": ItemChange(state_of(lambda found: found.update(more=1)), "other", "more"),
    "a file more": ItemChange(lambda folder: (folder / "new").write_text("9"), "other", "new"),
}
ITEM_CHANGES = {**CHANGED, **MISSING, **NEW}


@pytest.mark.parametrize(("run", "phase", "step"), [("load-and-save", "load and save", 2), ("resumed", "resumed", 4)])
@pytest.mark.parametrize("change", ITEM_CHANGES)
def test_each_item_of_a_resumed_run_is_compared(
    judge: Callable[..., ReportBuilder], run: str, phase: str, step: int, change: str
) -> None:
    """An item that only the resumed run has, too."""
    act, oracle, item = ITEM_CHANGES[change]
    outcome = judge({run: lambda out: act(out / f"step-{step}")})
    oracles = failed(outcome)
    assert set(oracles) == {phase} and oracle in oracles[phase]
    (row,) = [each for each in outcome.differing if each["check"] == oracle]
    assert row["phase"] == phase and row["item"].endswith(item)
    present = {"reference": row["reference"] is not None, "actual": row["actual"] is not None}
    assert present == {"reference": change not in NEW, "actual": change not in MISSING}


@pytest.mark.parametrize("runs", [("rerun",), ("rerun", "resumed")])
@pytest.mark.parametrize("change", ITEM_CHANGES)
def test_what_differs_between_equal_runs_is_not_compared_at_the_end(
    judge: Callable[..., ReportBuilder], change: str, runs: tuple[str, ...]
) -> None:
    """But it is named, and all other items are compared."""
    act, _, item = ITEM_CHANGES[change]
    outcome = judge(dict.fromkeys(runs, lambda out: act(out / f"step-{LAST}")))
    assert failed(outcome) == {}
    said = notes(outcome, "rerun")
    assert "end in different states: 1 item" in said or ("not compared" in said and item in said)
    (resumed,) = [row for row in outcome.phases if row["name"] == "resumed"]
    assert sum(each["compared"] for each in resumed["checks"]) > 8


@pytest.mark.parametrize("change", ITEM_CHANGES)
def test_noise_of_one_item_hides_no_other(judge: Callable[..., ReportBuilder], change: str) -> None:
    act, oracle, item = ITEM_CHANGES[change]
    noisy = CHANGED["random numbers" if oracle != "rng" else "a moment"]
    outcome = judge(
        {
            "rerun": lambda out: noisy.act(out / f"step-{LAST}"),
            "resumed": lambda out: (act(out / f"step-{LAST}"), noisy.act(out / f"step-{LAST}")),
        }
    )
    assert failed(outcome) == {"resumed": [oracle]}
    assert [row["item"].rpartition("/")[2].endswith(item) for row in outcome.differing] == [True]


# ------------------------------------------------------------------------------------------------------- finite


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize(("file", "name"), [(MODEL, "w"), (MODEL, "v"), (OPTIMIZER, "exp_avg")])
def test_the_last_checkpoint_of_the_uninterrupted_run_has_to_be_finite(
    judge: Callable[..., ReportBuilder], file: str, name: str, value: float
) -> None:
    """Also if every run ends there, so that all of them are equal."""

    def act(out: Path) -> None:
        tensors_of(file, lambda found: found[name].put(1, value))(out / f"step-{LAST}")

    for runs in (["uninterrupted"], ["uninterrupted", "rerun", "resumed"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command_runs.CommandRuns, "run_folder", _folder_below(f"{len(runs)}"))
            outcome = judge(dict.fromkeys(runs, act))
        assert failed(outcome)["uninterrupted"] == ["finite"]
        (row,) = [each for each in outcome.differing if each["phase"] == "uninterrupted"]
        assert row["item"].endswith(name)
        assert (row["reference"], row["actual"]) == ("finite", "1 element not finite")


def _folder_below(name: str) -> Callable[[Any, str], Path]:
    """Folders of runs of their own, for a second comparison in one test."""

    def run_folder(runs: Any, run: str) -> Path:
        folder: Path = runs._out.parent / name / run.replace(" ", "-")
        return folder

    return run_folder


# ------------------------------------------------------------------------------------------------------- losses


def write_losses(out: Path, losses: Mapping[int, float]) -> None:
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    (out / "losses.jsonl").write_text("\n".join(lines))


def expected_failures(by_run: Mapping[str, Mapping[int, float]], factor: float) -> dict[str, list[str]]:
    """The oracles that fail for the losses of three runs, by their definitions."""
    uninterrupted, rerun, resumed = (by_run[run] for run in ("uninterrupted", "rerun", "resumed"))

    def largest(other: Mapping[int, float], first: int) -> float:
        pairs = [(uninterrupted[step], other[step]) for step in uninterrupted.keys() & other.keys() if step > first]
        return max((abs(a - b) if isfinite(a) and isfinite(b) else inf for a, b in pairs), default=0.0)

    def later(losses: Mapping[int, float]) -> set[int]:
        return {step for step in losses if step > SAVE_AT}

    noise = largest(rerun, -1)
    tolerance = factor * noise if isfinite(noise) else -1.0  # noise that is not finite allows nothing
    first_of_resumed = SAVE_AT + (min(uninterrupted) > 0)  # a trainer that counts from 0 may log step N after it
    failures = ["resume"] if min(resumed) < first_of_resumed else []
    if later(uninterrupted) != later(resumed) or not largest(resumed, SAVE_AT) <= tolerance:
        failures.append("loss")
    return {
        **({} if all(map(isfinite, uninterrupted.values())) else {"uninterrupted": ["finite"]}),
        **({} if uninterrupted.keys() == rerun.keys() and isfinite(noise) else {"rerun": ["loss"]}),
        **({"resumed": failures} if failures else {}),
    }


@pytest.mark.parametrize("step", range(LAST + 2))  # some trainers log a loss before the first step
@pytest.mark.parametrize("value", [None, 1e-6, 1.0, nan, inf])
@pytest.mark.parametrize("run", ["uninterrupted", "rerun", "resumed"])
@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_each_loss_is_compared(
    judge: Callable[..., ReportBuilder], run: str, value: float | None, step: int, noise: float
) -> None:
    """One that is missing, new, other or not finite; up to the resume only between equal runs."""
    by_run = {
        name: {each: loss_of(each) + (noise if name == "rerun" else 0) for each in range(first, LAST + 1)}
        for name, first in (("uninterrupted", 1), ("rerun", 1), ("resumed", SAVE_AT + 1))
    }
    by_run[run].pop(step, None)
    if value is not None:
        by_run[run][step] = loss_of(step) + value
    outcome = judge({name: partial(write_losses, losses=losses) for name, losses in by_run.items()})
    assert failed(outcome) == expected_failures(by_run, ChecksBlock().loss_noise_factor)
    for name, first in (("rerun", -1), ("resumed", SAVE_AT)):
        steps = [{each for each in by_run[one] if each > first} for one in ("uninterrupted", name)]
        found = [row["item"] for row in outcome.differing if row["phase"] == name and row["check"] == "loss"]
        assert found == [f"loss of step {each}" for each in sorted(steps[0] ^ steps[1])]


def test_the_tolerance_is_that_of_the_recipe(judge: Callable[..., ReportBuilder]) -> None:
    by_run = {
        name: {each: loss_of(each) + shift for each in range(first, LAST + 1)}
        for name, first, shift in (("uninterrupted", 1, 0.0), ("rerun", 1, 0.125), ("resumed", SAVE_AT + 1, 0.25))
    }
    changes = {name: partial(write_losses, losses=losses) for name, losses in by_run.items()}
    outcome = judge(changes, loss_noise_factor=1.5)
    assert failed(outcome) == expected_failures(by_run, 1.5) == {"resumed": ["loss"]}


@pytest.mark.parametrize("value", [loss_of(0), loss_of(0) + 0.5, nan, inf])
def test_a_loss_before_the_first_step_is_compared_between_equal_runs(
    judge: Callable[..., ReportBuilder], value: float
) -> None:
    by_run = {name: {step: loss_of(step) for step in range(LAST + 1)} for name in ("uninterrupted", "rerun")}
    by_run |= {"resumed": {step: loss_of(step) for step in range(SAVE_AT + 1, LAST + 1)}}
    by_run["rerun"][0] = value
    outcome = judge({name: partial(write_losses, losses=losses) for name, losses in by_run.items()})
    assert failed(outcome) == expected_failures(by_run, ChecksBlock().loss_noise_factor)
    assert outcome.noise["loss"]["repeated"] == (value - loss_of(0) if isfinite(value) else "nan")


# ------------------------------------------------------------------------------------------------------- altered


@pytest.mark.parametrize("can_save", [True, False])
@pytest.mark.parametrize("item", ["w", "v"])
def test_one_altered_tensor_that_is_loaded_is_enough(
    judge: Callable[..., ReportBuilder], can_save: bool, item: str
) -> None:
    """A trainer may recompute a buffer, but not all of its weights."""

    def recompute(*names: str) -> Act:
        step = SAVE_AT if can_save else LAST
        values = {"w": np.full(3, float(step)), "v": np.ones(2)}
        change = tensors_of(MODEL, lambda found: found.update({name: values[name] for name in names}))
        return lambda out: change(out / f"step-{step}")

    kept = "v" if item == "w" else "w"
    outcome = judge({"altered": recompute(item)}, trainer={"can_save_without_step": can_save})
    assert outcome.ok and kept not in str(outcome.differing)


@pytest.mark.parametrize("can_save", [True, False])
def test_a_run_without_the_alteration_did_not_load(judge: Callable[..., ReportBuilder], can_save: bool) -> None:
    def start_from_scratch(out: Path) -> None:
        step = SAVE_AT if can_save else LAST
        values = {"w": np.full(3, float(step)), "v": np.ones(2)}
        tensors_of(MODEL, lambda found: found.update(values))(out / f"step-{step}")

    outcome = judge({"altered": start_from_scratch}, trainer={"can_save_without_step": can_save})
    assert failed(outcome) == {"altered": ["resume"]}
    assert [row["item"] for row in outcome.differing] == ["model.v", "model.w"]


@pytest.mark.parametrize(
    ("act", "trainer", "said"),
    [
        (lambda out: None, {"can_load_altered": False}, "trainer.can_load_altered is false in the recipe"),
        (
            lambda out: (out / "step-2").rename(out / "step-3"),
            {},
            "the trainer does not run from a copy of its checkpoint: it saved no checkpoint of step 2",
        ),
    ],
)
def test_an_alteration_that_cannot_be_tested_is_a_note(
    judge: Callable[..., ReportBuilder], act: Act, trainer: dict[str, Any], said: str
) -> None:
    outcome = judge({"altered": act}, trainer=trainer)
    assert outcome.ok and outcome.phases[-1]["ok"] is None
    assert f"not checked with altered weights: {said}" in notes(outcome, "altered")


def test_the_altered_copy_is_removed(judge: Callable[..., ReportBuilder], tmp_path: Path) -> None:
    assert judge().ok
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert names == {"uninterrupted", "rerun", "load-and-save", "resumed", "altered"}
