"""Each phase compares all that its runs return and save: what is changed in one of them is named by its oracle.

The runs are computed, see `scripted_session.py`; `test_faults.py` injects faults into real ones.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptx.api.convert import convert
from ckptx.api.reshard import reshard
from ckptx.errors import InputError, OutputError, UnsupportedError
from ckptx.robustness_suite.oracles import Difference, Verdict
from ckptx.robustness_suite.phases import (
    PHASES,
    Phase,
    _merge_verdicts,
    check_export,
    check_kills,
    check_load_and_save,
    check_other_layouts,
    check_replicas,
    check_resume,
    check_uninterrupted_run,
)
from ckptx.robustness_suite.report_builder import Findings
from ckptx.robustness_suite.run_requests import RunResult
from ckptx.robustness_suite.session import InjectedFault
from ckptx.robustness_suite.stored_items import read_items
from ckptx.runtime.training.checkpoints import LATEST
from tests.robustness_suite.scripted_session import (
    OPERATIONS,
    RANKS,
    SHAPES,
    TRAINED,
    Change,
    ScriptedSession,
    State,
    change_items,
    change_loss,
    held_shards,
    memory_items,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
ITEMS = [*memory_items(0, 0)]
STEPS = [2, 3, 4]  # that the uninterrupted run saves
RANK_INDEPENDENT = ("scheduler", "step", "samples", "learning rate")
MESH_INDEPENDENT = ("moments", "adam step", "param groups", "learning rate", "scheduler", "step", "batch", "samples")


def failed(findings: Findings) -> dict[str, list[tuple[str, int | None]]]:
    """The items that differ and their ranks, by oracle; a measurement has none."""
    return {
        each.oracle: [(one.item, one.rank) for one in each.differences]
        for each in findings.verdicts
        if each.ok is False
    }


def damaged(name: str, change: Callable[[Path], object]) -> InjectedFault:
    """A change of the folder of a run when it has ended."""
    return InjectedFault(file_changes={name: change})


# ------------------------------------------------------------------------------------------------ nothing is wrong


def expected_counts(session: ScriptedSession, phase: int) -> Mapping[str, int]:
    """Each oracle of a phase compares the right runs and steps; two ranks save steps 2, 3 and 4 of 4."""
    in_memory = Counter(oracle for oracle, _ in ITEMS)
    stored = Counter(oracle for oracle, _ in read_items(session.uninterrupted_checkpoint(2)))
    files, tensors = len([*session.uninterrupted_checkpoint(2).iterdir()]), len(SHAPES)

    def snapshots(count: int) -> Counter[str]:
        """Items of snapshots of both ranks."""
        return Counter({oracle: count * RANKS * items for oracle, items in in_memory.items()})

    def finite(count: int) -> Counter[str]:
        return Counter(finite=count * RANKS * in_memory["finite"])

    layouts = 2
    return {
        0: Counter(logits=2),
        1: Counter(sharded=4, loss=4) + snapshots(3) + finite(1 + 3) + Counter(finite=4),
        2: Counter(replicas=3, readable=1, logits=2),
        3: Counter(readable=2, model=2 * files) + snapshots(2),
        4: Counter(readable=1, names=tensors, model=tensors, logits=2),
        5: Counter(readable=layouts, model=layouts * 2 * tensors, loss=layouts * 2)
        + Counter({oracle: layouts * in_memory[oracle] for oracle in RANK_INDEPENDENT})
        + Counter({oracle: layouts * 2 * stored[oracle] for oracle in MESH_INDEPENDENT}),
        # From step 2: at the start and at 3 and 4; from step 3: at the start and at 4.
        6: Counter(readable=2, loss=2 + 1) + snapshots(3 + 2) + finite(3 + 2) + Counter(finite=2 + 1),
        7: Counter(readable=3),
    }[phase]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_phase_of_equal_runs_compares_everything_and_passes(tmp_path: Path, phase: Phase) -> None:
    session = ScriptedSession(tmp_path)
    findings = phase.run(session)
    assert failed(findings) == {} and findings.skip_reason is None
    found = {each.oracle: each.compared for each in findings.verdicts}
    assert len(found) == len(findings.verdicts), "one verdict for each oracle"
    assert found == expected_counts(session, phase.number)


# --------------------------------------------------------------------------------------- what runs have in memory

Snapshot = tuple[str, int | None]  # name of a run, and the step of a snapshot, or None for its start
SNAPSHOTS: Mapping[int, list[Snapshot]] = {
    1: [("uninterrupted", step) for step in STEPS] + [("rerun", step) for step in STEPS],
    3: [("saved-again", 2), ("saved-again-async", 2)],
    6: [("resumed", None), ("resumed", 3), ("resumed", 4), ("resumed-2", None), ("resumed-2", 4)],
}


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("number", "run", "step"), [(number, *each) for number, snapshots in SNAPSHOTS.items() for each in snapshots]
)
def test_each_item_of_each_snapshot_and_rank_is_compared(
    tmp_path: Path, number: int, run: str, step: int | None, rank: int
) -> None:
    change = change_items("start_items" if step is None else "items", step, rank, ITEMS)
    found = failed(PHASES[number].run(ScriptedSession(tmp_path, {run: change})))
    assert {(oracle, *each) for oracle, items in found.items() for each in items} == {(*key, rank) for key in ITEMS}


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(("run", "number"), [("uninterrupted", 1), ("resumed", 6), ("resumed-2", 6)])
def test_the_start_of_a_run_has_to_be_finite(tmp_path: Path, run: str, number: int, rank: int) -> None:
    change = change_items("start_items", None, rank, [("finite", "w")])
    assert ("w", rank) in failed(PHASES[number].run(ScriptedSession(tmp_path, {run: change})))["finite"]


@pytest.mark.parametrize("step", STEPS)
def test_replicas_of_each_saved_step_are_compared(tmp_path: Path, step: int) -> None:
    for key in held_shards(step, 0):
        change = change_items("shard_digests", step, 0, [key])
        found = failed(check_replicas(ScriptedSession(tmp_path / key[0], {"uninterrupted": change})))
        assert found == ({"replicas": [("norm", 1)]} if key[1] == "whole" else {})


@pytest.mark.parametrize("layout", [1, 2])
def test_on_another_mesh_the_items_of_rank_0_that_no_mesh_changes_are_compared(tmp_path: Path, layout: int) -> None:
    changes = {f"layout-{layout}": change_items("start_items", None, 0, ITEMS)}
    assert failed(check_other_layouts(ScriptedSession(tmp_path, changes))) == {
        oracle: [(item, 0)] for oracle, item in ITEMS if oracle in RANK_INDEPENDENT
    }


def test_what_follows_from_another_start_is_not_named_again(tmp_path: Path) -> None:
    """Each item after it differs as well, and would hide which were not restored."""
    at_start = change_items("start_items", None, 1, [("rng", "torch")])
    later = change_items("items", 4, 0, [("model", "w")])
    changes: Mapping[str, Change] = {"resumed": lambda result: later(at_start(result))}
    assert failed(check_resume(ScriptedSession(tmp_path, changes))) == {"rng": [("torch", 1)]}


def test_on_a_device_with_noise_the_items_of_later_steps_are_not_compared(tmp_path: Path) -> None:
    for number, run in ((1, "rerun"), (6, "resumed")):
        changes = {run: change_items("items", 4, 0, [("model", "w")])}
        session = ScriptedSession(tmp_path / run, changes, is_exact=False)
        findings = PHASES[number].run(session)
        assert failed(findings) == {}
        assert number != 1 or "may differ in bits on this device" in findings.notes[0]
    changes = {"resumed": change_items("start_items", None, 0, [("model", "w")])}
    session = ScriptedSession(tmp_path / "start", changes, is_exact=False)
    assert failed(check_resume(session)) == {"model": [("w", 0)]}, "what was saved is loaded without noise"


@pytest.mark.parametrize(("expected", "sharded"), product((True, False, None), (0, 1, 4)))
def test_parameters_are_sharded_as_the_recipe_says(tmp_path: Path, expected: bool | None, sharded: int) -> None:
    changes: Mapping[str, Change] = {"uninterrupted": lambda result: replace(result, sharded_counts=(sharded, 4))}
    said = {True: "true", False: "false", None: "null"}[expected]
    findings = check_uninterrupted_run(ScriptedSession(tmp_path, changes, f"checks.sharded={said}"))
    verdicts = [each for each in findings.verdicts if each.oracle == "sharded"]
    assert len(verdicts) == (expected is not None)
    is_wrong = expected is not None and expected != (sharded > 0)
    assert failed(findings) == ({"sharded": [(f"{sharded} of 4 parameters", None)]} if is_wrong else {})
    if is_wrong:
        (difference,) = verdicts[0].differences
        words = ("sharded", "not sharded")
        assert (difference.reference, difference.actual) == (words if expected else words[::-1])


# -------------------------------------------------------------------------------------------- losses and logits

LOSSES = [
    (1, "uninterrupted", 1), (1, "rerun", 1), (1, "rerun", 4), (6, "resumed", 3), (6, "resumed", 4),
    (6, "resumed-2", 4), (5, "layout-1", 3), (5, "layout-2", 4), (5, "without-dropout", 4),
]  # fmt: skip


# A loss that is missing is None; the noise needs those of both runs of phase 1.
VALUES = [(*each, value) for each in LOSSES for value in ("other", nan, inf, None) if each[0] != 1 or value is not None]


@pytest.mark.parametrize(("number", "run", "step", "value"), VALUES)
def test_each_loss_is_compared(tmp_path: Path, number: int, run: str, step: int, value: Any) -> None:
    change = change_loss(step, 7.0 if value == "other" else value)
    found = failed(PHASES[number].run(ScriptedSession(tmp_path, {run: change})))
    is_checked = number != 5 and run != "rerun" and value in (nan, inf)
    assert found == {"loss": []} | ({"finite": [(f"loss of step {step}", None)]} if is_checked else {})


@pytest.mark.parametrize("number", [1, 5, 6])
@pytest.mark.parametrize("is_exact", [True, False])
def test_losses_of_a_resume_may_differ_by_noise_on_another_mesh_or_device_only(
    tmp_path: Path, number: int, is_exact: bool
) -> None:
    run = {1: "rerun", 5: "layout-1", 6: "resumed"}[number]

    def change(result: RunResult) -> RunResult:
        return replace(result, losses={step: loss + 2e-6 for step, loss in result.losses.items()})

    found = failed(PHASES[number].run(ScriptedSession(tmp_path, {run: change}, is_exact=is_exact)))
    assert found == ({"loss": []} if is_exact and number != 5 else {})


@pytest.mark.parametrize(
    ("number", "task", "is_exact"),
    [
        (0, "compute_runtime_logits", True),
        (0, "compute_source_logits", True),
        (2, "compute_runtime_logits", True),
        (2, "compute_runtime_logits", False),
        (4, "compute_source_logits", True),
    ],
)
@pytest.mark.parametrize("difference", [1e-7, 1.0, nan, inf])
@pytest.mark.parametrize("sample", [0, 1])
def test_the_logits_of_each_sample_are_compared(
    tmp_path: Path, number: int, task: str, is_exact: bool, difference: float, sample: int
) -> None:
    def change(result: Any) -> Any:
        logits = [*(result[0] if task == "compute_source_logits" else result)]
        logits[sample] = logits[sample].astype(np.float64) + difference
        return (logits, result[1]) if task == "compute_source_logits" else logits

    found = failed(PHASES[number].run(ScriptedSession(tmp_path, {task: change}, is_exact=is_exact)))
    has_noise = number != 2 or not is_exact  # in phase 2 the same model runs twice
    assert found == ({} if has_noise and difference == 1e-7 else {"logits": []})


# -------------------------------------------------------------------------------------------------- what is saved

# A change of each kind of stored state, the oracle that compares it on another mesh, and its item.
STORED: Mapping[str, tuple[Any, str, str]] = {
    f"model.{TRAINED}": (torch.zeros(SHAPES[TRAINED]), "model", TRAINED),
    f"optim.state.{TRAINED}.exp_avg": (torch.zeros(SHAPES[TRAINED]), "moments", f"{TRAINED}.exp_avg"),
    f"optim.state.{TRAINED}.exp_avg_sq": (torch.zeros(SHAPES[TRAINED]), "moments", f"{TRAINED}.exp_avg_sq"),
    f"optim.state.{TRAINED}.step": (torch.tensor(9.0), "adam step", f"{TRAINED}.step"),
    f"optim.param_groups.{TRAINED}.lr": (9.0, "learning rate", f"{TRAINED}.lr"),
    f"optim.param_groups.{TRAINED}.weight_decay": (9.0, "param groups", f"{TRAINED}.weight_decay"),
    "training_state.scheduler.last_epoch": (9, "scheduler", "last_epoch"),
    "training_state.sampler.samples": (9, "batch", "samples"),
}  # fmt: skip


def with_changes(state: State) -> None:
    state.update({name: value for name, (value, _, _) in STORED.items()})


@pytest.mark.parametrize(("layout", "text"), [(1, "tp 2"), (2, "one rank")])
@pytest.mark.parametrize("which", ["resharded", "saved"])
def test_all_that_a_reshard_writes_and_another_mesh_saves_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: int, text: str, which: str
) -> None:
    session = ScriptedSession(tmp_path)

    def reshard_wrongly(source: Path, output: Path, **options: Any) -> Any:
        report = reshard(source, output, **options)
        if output.name == f"layout-{layout}-resharded":
            session.write(output, 2, with_changes)
        return report

    if which == "resharded":
        monkeypatch.setattr("ckptx.robustness_suite.phases.reshard", reshard_wrongly)
    else:
        session.injection = damaged(
            f"layout-{layout}", lambda folder: session.write(folder / "step-2", 2, with_changes)
        )
    found = failed(check_other_layouts(session))
    items = {(oracle, item, rank) for oracle, each in found.items() for item, rank in each}
    expected = {(oracle, item) for _, oracle, item in STORED.values()}
    assert {oracle for oracle, _, _ in items} == {oracle for oracle, _ in expected}
    assert all(item.startswith(f"{text}: ") and rank is None for _, item, rank in items)
    for oracle, item in expected:
        assert any(each == oracle and name.endswith(item) for each, name, _ in items), items
    assert len(items) == len(expected) + 1, "the learning rate is one of the param groups, too"


FILE_CHANGES: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "one byte": ("__0_0.distcp", lambda folder: flip_last_bit(folder / "__0_0.distcp")),
    "a file less": ("config.json", lambda folder: (folder / "config.json").unlink()),
    "a file more": ("more", lambda folder: (folder / "more").touch()),
}


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("run", ["saved-again", "saved-again-async"])
@pytest.mark.parametrize("change", FILE_CHANGES)
def test_a_file_that_is_saved_again_with_other_bytes_is_named(tmp_path: Path, run: str, change: str) -> None:
    name, act = FILE_CHANGES[change]
    session = ScriptedSession(tmp_path, injection=damaged(run, lambda folder: act(folder / "step-2")))
    assert failed(check_load_and_save(session)) == {"model": [(name, None)]}


def test_a_file_that_is_no_longer_there_and_one_that_is_new_are_told_apart(tmp_path: Path) -> None:
    for change, values in (("a file less", ("present", "missing")), ("a file more", ("missing", "present"))):
        act = FILE_CHANGES[change][1]
        injection = damaged("saved-again", lambda folder, act=act: act(folder / "step-2"))
        findings = check_load_and_save(ScriptedSession(tmp_path / change, injection=injection))
        (difference,) = next(each for each in findings.verdicts if each.oracle == "model").differences
        assert (difference.reference, difference.actual) == values


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6])
def test_a_checkpoint_that_cannot_be_read_is_a_finding_of_each_phase_that_reads_it(tmp_path: Path, number: int) -> None:
    step = 4 if number in (2, 4) else 2
    injection = damaged("uninterrupted", lambda folder: (folder / f"step-{step}" / ".metadata").write_bytes(b"x"))
    found = failed(PHASES[number].run(ScriptedSession(tmp_path, injection=injection)))
    assert {item.partition(" ")[0] for item, _ in found["readable"]} == {f"step-{step}"}
    assert set(found) == {"readable"}


NORM = "model.norm.weight"
EXPORTS: Mapping[str, tuple[Callable[[dict[str, Any]], object], Mapping[str, Any]]] = {
    "other numbers": (lambda tensors: tensors[NORM].add_(1), {"model": [(NORM, None)]}),
    "a tensor less": (lambda tensors: tensors.pop(NORM), {"names": [(NORM, None)], "model": [(NORM, None)]}),
    "a tensor more": (
        lambda tensors: tensors.update(_fsdp=torch.zeros(1)), {"names": [("_fsdp", None)], "model": [("_fsdp", None)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", EXPORTS)
def test_an_export_of_other_names_or_numbers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    act, expected = EXPORTS[change]

    def convert_wrongly(direction: str, source: Path, output: Path, **options: Any) -> None:
        assert (direction, options["base"]) == ("dcp2hf", str(tmp_path / "source"))
        convert("dcp2hf", source, output, **options)
        tensors = load_file(output / "model.safetensors")
        act(tensors)
        save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr("ckptx.robustness_suite.phases.convert", convert_wrongly)
    assert failed(check_export(ScriptedSession(tmp_path))) == expected


# -------------------------------------------------------------------------------------------------- what is asked


def test_runs_are_asked_for_as_the_heads_of_the_phases_say(tmp_path: Path) -> None:
    session = ScriptedSession(tmp_path)
    for phase in PHASES[:7]:
        phase.run(session)
    saved = {step: session.out / "uninterrupted" / f"step-{step}" for step in STEPS}
    asked = {
        name: (each.resume_from, each.last_step, dict(each.saves), [*each.snapshot_steps], has_new_interpreters)
        for name, (each, has_new_interpreters) in session.requests.items()
    }
    again = {name: {2: session.out / name / "step-2"} for name in ("saved-again", "saved-again-async")}
    layouts = {number: session.out / f"layout-{number}" for number in (1, 2)}
    assert asked == {
        "uninterrupted": (None, 4, saved, STEPS, False),
        "rerun": (None, 4, {}, STEPS, False),
        **{f"perturbed-{seed}": (None, 4, {}, [], False) for seed in range(3)},
        **{name: (saved[2], 0, saves, [2], False) for name, saves in again.items()},
        "without-dropout": (saved[2], 4, {}, [2], False),
        **{
            name.name: (session.out / f"layout-{number}-resharded", 4, {2: name / "step-2"}, [2], False)
            for number, name in layouts.items()
        },
        "resumed": (saved[2], 4, {}, [3, 4], True),
        "resumed-2": (saved[3], 4, {}, [4], False),
    }
    requests = {name: request for name, (request, _) in session.requests.items()}
    assert {name for name, each in requests.items() if each.recipe.checkpoint.asynchronous} == {"saved-again-async"}
    assert {name for name, each in requests.items() if not each.recipe.training.dropout} == {
        "without-dropout", "layout-1", "layout-2",
    }  # fmt: skip
    assert {name: each.layout for name, each in requests.items() if each.layout is not None} == {
        f"layout-{number}": each for number, each in enumerate(session.recipe.checks.layouts, 1)
    }
    assert {name for name, each in requests.items() if each.computes_logits} == {
        "uninterrupted", "rerun", "perturbed-0", "perturbed-1", "perturbed-2",
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------- kills


def test_saves_are_killed_at_three_operations_in_each_way(tmp_path: Path) -> None:
    session = ScriptedSession(tmp_path)
    check_kills(session)
    assert [
        (request.recipe.checkpoint.asynchronous, point.kills_all_ranks, point.operation, point.root.name)
        for request, point in session.kill_points
    ] == [
        (False, False, OPERATIONS[1], "killed-1"),
        (False, True, OPERATIONS[2], "killed-2"),
        (True, False, OPERATIONS[3], "killed-3"),
    ]
    assert all(request.resume_from == session.uninterrupted_checkpoint(2) for request, _ in session.kill_points)
    assert session.kills == [
        {"operation": operation, "ranks": ranks, "is_async": is_async, "latest_step": 2, "ok": True}
        for operation, ranks, is_async in zip(OPERATIONS[1:4], ([0], [0, 1], [0]), (False, False, True), strict=True)
    ]  # fmt: skip


def write_other(session: ScriptedSession, root: Path, step: int) -> None:
    """Replace a step by one that is complete and has other numbers."""
    session.write(root / f"step-{step}", step, lambda state: state[f"model.{NORM}"].add_(1))


def raise_error(error: Exception) -> Any:
    raise error


AFTER_KILL: Mapping[str, tuple[Callable[[ScriptedSession, Path], object], str]] = {
    "other numbers": (lambda session, root: write_other(session, root, 2), "step-2: contents differ"),
    "removed": (lambda session, root: shutil.rmtree(root / "step-2"), "step-2: was complete, but no step is now"),
    "half a step": (lambda session, root: (root / "step-3").mkdir(), "step-3: is incomplete, but loaders may load it"),
    "latest": (lambda session, root: (root / LATEST).write_text("step-3"), "latest: names step-3"),
}
AFTER_NEXT_SAVE: Mapping[str, tuple[Callable[[ScriptedSession, Path], object], str]] = {
    "InputError": (lambda session, root: raise_error(InputError("x")), "the next save: x"),
    "OutputError": (lambda session, root: raise_error(OutputError("x")), "the next save: x"),
    "unpublished": (lambda session, root: shutil.rmtree(root / "step-3"), "after the next save: step-3: was complete"),
    "other numbers": (
        lambda session, root: write_other(session, root, 2), "after the next save: step-2: contents differ",
    ),
    "half a step": (
        lambda session, root: (root / "step-4").mkdir(), "after the next save: step-4: is incomplete",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [1, 2, 3])
@pytest.mark.parametrize("fault", AFTER_KILL)
def test_what_a_killed_save_leaves_is_checked(tmp_path: Path, case: int, fault: str) -> None:
    act, said = AFTER_KILL[fault]
    session = ScriptedSession(tmp_path)
    session.injection = damaged(f"killed-{case}", lambda root: act(session, root))
    check_violation(session, case, said)


@pytest.mark.parametrize("case", [1, 2, 3])
@pytest.mark.parametrize("fault", AFTER_NEXT_SAVE)
def test_the_save_after_a_kill_is_checked(tmp_path: Path, case: int, fault: str) -> None:
    act, said = AFTER_NEXT_SAVE[fault]
    session = ScriptedSession(tmp_path)
    session.changes = {f"next-save-{case}": lambda root: act(session, root)}
    check_violation(session, case, said)


@pytest.mark.parametrize("case", [1, 2, 3])
def test_a_kill_that_no_rank_felt_is_a_finding(tmp_path: Path, case: int) -> None:
    session = ScriptedSession(tmp_path, {f"kill-{case}": lambda ranks: []})
    check_violation(session, case, f"{OPERATIONS[case]}: no rank was killed at this operation")


def check_violation(session: ScriptedSession, case: int, said: str) -> None:
    """One of three kills has a finding, which names it and its operation."""
    findings = check_kills(session)
    (verdict,) = findings.verdicts
    assert (verdict.oracle, verdict.ok, verdict.compared) == ("readable", False, 3)
    assert {each.item for each in verdict.differences} == {OPERATIONS[case]}
    assert any((each.actual or "").startswith(said) for each in verdict.differences), verdict.differences
    assert [each["ok"] for each in session.kills] == [number != case for number in (1, 2, 3)]


# ------------------------------------------------------------------------------------------------------- merging

MEASURES = [
    Verdict("loss", compared, value=value, limit=limit, noise_factor=factor, noise=1.0)
    for compared, value, limit, factor in [
        (2, 0.5, 1.0, 1.0), (1, 3.0, 4.0, 4.0), (4, 2.0, 1.0, 1.0), (3, nan, 1.0, 1.0)
    ]
]  # fmt: skip
EXACT = [Verdict("model", 2), Verdict("model", 0), Verdict("model", 1, [Difference("model", "a", 0, "1", "2")])]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_verdicts_of_an_oracle_are_merged_into_the_worst(count: int) -> None:
    for group in (*product(MEASURES, repeat=count), *product(EXACT, repeat=count)):
        (merged,) = _merge_verdicts(Findings([*group])).verdicts
        results = [each.ok for each in group]
        assert merged.ok is (False if False in results else True if True in results else None)
        assert merged.compared == sum(each.compared for each in group)
        assert [*merged.differences] == [one for each in group for one in each.differences]
        if merged.oracle == "loss":
            measured = (merged.value, merged.limit, merged.noise_factor)
            candidates = [each for each in group if each.ok is False] or group
            worst = max(candidates, key=lambda each: inf if isnan(each.value) else each.value)
            assert measured == (worst.value, worst.limit, worst.noise_factor)


def test_verdicts_of_several_oracles_stay_apart() -> None:
    merged = _merge_verdicts(Findings([EXACT[0], MEASURES[0], EXACT[2]], ["a note"]))
    assert [each.oracle for each in merged.verdicts] == ["model", "loss"] and merged.notes == ["a note"]
    assert [each.ok for each in merged.verdicts] == [False, True]


# ------------------------------------------------------------------------------------------------ what does not run


def test_a_recipe_without_other_layouts_says_how_to_add_them(tmp_path: Path) -> None:
    findings = check_other_layouts(ScriptedSession(tmp_path, None, "checks.layouts=[]"))
    assert findings.ok is None and findings.skip_reason == "the recipe has no other layouts; add checks.layouts"


def test_the_layouts_that_there_are_ranks_for_are_checked(tmp_path: Path) -> None:
    session = ScriptedSession(tmp_path, devices=1)
    findings = check_other_layouts(session)
    first, second = findings.notes
    assert findings.ok and first == "tp 2: not run, requires 2 ranks, which are not available"
    assert second.startswith("these runs, and the run that they are compared with (without-dropout), have dropout 0")
    assert {name for name in session.requests if name.startswith("layout")} == {"layout-2"}


def test_an_error_of_a_layout_names_its_key(tmp_path: Path) -> None:
    changes: Mapping[str, Change] = {"layout-2": lambda result: raise_error(UnsupportedError("no such mesh"))}
    with pytest.raises(UnsupportedError, match=r"^checks.layouts\[1\]: no such mesh"):
        check_other_layouts(ScriptedSession(tmp_path, changes))
