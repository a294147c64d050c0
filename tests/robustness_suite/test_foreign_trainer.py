"""A trainer that is not ours, run and judged: one of plain Python; real ones are in `test_recipes_of_trainers.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import EnvironmentProblem, InputError, OutputError, UsageError
from ckptx.report.report import Log
from ckptx.robustness_suite.causes import likely_causes
from ckptx.robustness_suite.commands import run_command, split_command
from ckptx.robustness_suite.external_trainer import run_external
from ckptx.robustness_suite.oracles import compare
from ckptx.robustness_suite.report_builder import ReportBuilder
from ckptx.runtime.training.recipe import ChecksBlock, Recipe, TrainerBlock, TrainingBlock

COMMAND = (
    "{python} {recipe}/stub_trainer.py --out {out} --steps {steps} --total {total_steps} --save-at {save_at} {resume}"
)


def recipe(fault: str = "", checks: dict[str, Any] | None = None, **keys: Any) -> Recipe:
    """That of the stub."""
    block = {"command": f"{COMMAND} --fault '{fault}'", "resume": "--resume {checkpoint}", "time_limit": 60.0}
    training = TrainingBlock(steps=5, total_steps=8, save_at=(2,))
    return Recipe(
        name="stub", trainer=TrainerBlock(**{**block, **keys}), training=training, checks=ChecksBlock(**(checks or {}))
    )


def run(tmp_path: Path, fault: str = "", **keys: Any) -> ReportBuilder:
    """Its outcome, in a folder whose name needs quotes."""
    return run_external(recipe(fault, **keys), tmp_path / "it's $HOME; out", folder=Path(__file__).parent)


def failed(outcome: ReportBuilder) -> dict[str, list[str]]:
    """The oracles that failed, by phase."""
    rows = {row["name"]: [each["name"] for each in row["checks"] if not each["ok"]] for row in outcome.phases}
    return {name: oracles for name, oracles in rows.items() if oracles}


def notes(outcome: ReportBuilder, name: str) -> str:
    """What a phase says."""
    return " ".join(next(row for row in outcome.phases if row["name"] == name)["notes"])


def test_one_that_is_right_passes(tmp_path: Path) -> None:
    seen: list[str] = []
    outcome = run_external(
        recipe(),
        tmp_path / "out",
        Log(),
        lambda found: seen.append(found.phases[-1]["name"]),
        folder=Path(__file__).parent,
    )
    assert outcome.ok and seen == ["uninterrupted", "rerun", "load and save", "resumed", "altered"]
    assert [row["run"] for row in outcome.losses] == ["uninterrupted", "rerun", "resumed"]
    assert outcome.losses[2]["steps"] == [3, 4, 5] and outcome.losses[2]["losses"] == outcome.losses[0]["losses"][2:]
    assert outcome.noise == {"loss": {"repeated": 0.0, "perturbed": None}} and outcome.differing == []
    assert all(row["seconds"] > 0 and row["memory"] is None for row in outcome.phases)


@pytest.mark.parametrize(
    ("fault", "oracle", "said"),
    [
        ("iterator", "rng", "random numbers were drawn after it was restored"),
        ("data", "batch", "data position differs (sampler.seen: 4 in the reference, 0 after the resume)"),
        ("moments", "moments", "optimizer state (exp_avg) differs (1 of 1"),
    ],
)
def test_what_was_not_restored_is_named(tmp_path: Path, fault: str, oracle: str, said: str) -> None:
    outcome = run(tmp_path, fault)
    assert failed(outcome)["load and save"] == [oracle] and not outcome.ok
    assert said in notes(outcome, "load and save")
    assert "loss" in failed(outcome)["resumed"]
    assert {row["check"] for row in outcome.differing if row["phase"] == "load and save"} == {oracle}


def test_without_zero_steps_the_ends_are_compared(tmp_path: Path) -> None:
    outcome = run(tmp_path, "data", can_save_without_step=False)
    row = next(row for row in outcome.phases if row["name"] == "load and save")
    assert row["ok"] is None and "cannot resume for zero steps" in row["notes"][0]
    assert {"model", "moments", "batch", "loss"} <= set(failed(outcome)["resumed"])
    said = notes(outcome, "resumed")
    assert (
        "not which state was not restored" in said
        and "check batch first: differences of weights and moments seldom cause these" in said
    )


def test_what_is_in_no_checkpoint_shows_at_the_end(tmp_path: Path) -> None:
    outcome = run(tmp_path, "late iterator")
    assert set(failed(outcome)) == {"resumed"}
    said = notes(outcome, "resumed")
    assert "some state is missing from the checkpoint" in said and "was saved at the wrong time" in said
    assert "check rng first: differences of weights and moments seldom cause these" in said
    named = run(tmp_path / "named", "iterator")  # by the run for no step, so that nothing more is said of the end
    assert not notes(named, "resumed")


@pytest.mark.parametrize("can_save", [True, False])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("scratch", {"load and save": ["resume"], "resumed": ["resume"]}),
        ("scratch, hidden", {"altered": ["resume"]}),
    ],
)
def test_a_trainer_that_never_resumes_fails(
    tmp_path: Path, fault: str, expected: dict[str, list[str]], can_save: bool
) -> None:
    """With its seed it reaches the same state from scratch, in all that it saves."""
    outcome = run(tmp_path, fault, can_save_without_step=can_save)
    assert failed(outcome) == {name: found for name, found in expected.items() if can_save or name != "load and save"}
    first = next(row for row in outcome.phases if row["ok"] is False)
    assert first["cause"].startswith("the trainer did not resume: it started from scratch; check that trainer.resume")
    if fault == "scratch":
        assert "it logged the loss of steps 1 to 2, but resumes after step 2" in first["cause"]
    else:
        assert {row["item"] for row in outcome.differing} == {"model.w"}


def test_losses_from_before_a_resume_are_allowed_in_a_trainer_state(tmp_path: Path) -> None:
    """The log of transformers' Trainer has them, so only the altered weights show a start from scratch."""
    keys = {"losses": "trainer_state.json", "losses_kind": "trainer_state", "can_save_without_step": False}
    assert run(tmp_path / "right", "history", **keys).ok
    assert failed(run(tmp_path / "scratch", "scratch, history", **keys)) == {"altered": ["resume"]}


def test_noise_is_measured_and_not_compared(tmp_path: Path) -> None:
    outcome = run(tmp_path, "noise")
    assert 0 < outcome.noise["loss"]["repeated"] < 1e-8
    assert "two runs of the same command end in different states: 1 item (model)" in notes(outcome, "rerun")
    assert outcome.ok


def test_a_nan_fails(tmp_path: Path) -> None:
    outcome = run(tmp_path, "nan")
    assert failed(outcome) == {"uninterrupted": ["finite"], "rerun": ["loss"], "resumed": ["loss"]}


def test_sharded_is_asked_of_what_it_wrote(tmp_path: Path) -> None:
    outcome = run(tmp_path, checks={"sharded": True})
    assert failed(outcome) == {"sharded": ["sharded"]}
    assert "model.safetensors has whole parameters" in notes(outcome, "sharded")


def test_losses_may_be_in_what_it_prints(tmp_path: Path) -> None:
    keys = {"losses": "output.log", "losses_kind": "regex", "pattern": r"step (?P<step>\d+) loss (?P<loss>\S+)"}
    outcome = run(tmp_path, "no losses", **keys)
    assert outcome.ok and len(outcome.losses[0]["steps"]) == 5


def test_files_with_times_and_settings_are_no_fault(tmp_path: Path) -> None:
    outcome = run(tmp_path, "files")
    assert outcome.ok, outcome.differing
    said = notes(outcome, "load and save")
    assert "not compared: log.txt, trace-" in said and "as files that contain times or paths do" in said
    assert "not compared: steps: are the number of steps given to the command" in said
    assert "two runs of the same command end in different states" not in notes(outcome, "rerun")


def test_state_in_a_file_of_no_known_format_is_named(tmp_path: Path) -> None:
    outcome = run(tmp_path, "position")
    assert failed(outcome) == {"load and save": ["other"], "resumed": ["other"]}
    assert {row["item"] for row in outcome.differing} == {"some/where/deep/position"}


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_command_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        run(tmp_path, "fails")
    said = str(caught.value)
    assert (
        "uninterrupted: ended with exit code 1" in said
        and "ValueError: no such key: optim" in said
        and "\n" not in said
    )
    assert "output.log" in said
    with pytest.raises(EnvironmentProblem, match="exit code 3"):
        run(tmp_path / "b", "exits")


def test_a_resume_that_fails_is_a_phase_that_fails(tmp_path: Path) -> None:
    outcome = run(tmp_path, "fails to resume")
    assert [row["ok"] for row in outcome.phases] == [True, True, False, False, None]
    assert "no such key: optim" in notes(outcome, "resumed")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no losses", r"losses\.jsonl: the command wrote no losses; its folder has output\.log, step-2"),
        (
            "no checkpoint",
            r"step-5: the command saved no checkpoint of step 5; its folder has losses\.jsonl, output\.log, step-2",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_is_there(tmp_path: Path, fault: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(tmp_path, fault)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"command": "x {step_count}"}, r"trainer.command: the placeholder {step_count} is unknown"),
        ({"command": "x {totl_steps}"}, r"did you mean {total_steps}\?"),
        ({"command": "x 'y"}, "is not a valid command: No closing quotation; close the quote"),
        ({"command": "x y\\"}, "No escaped character; close the quote, or remove a backslash at the end"),
        ({"command": "  "}, "is empty"),
        ({"resume": "--from {checkpont}"}, r"trainer.resume: .* did you mean {checkpoint}\?"),
        ({"environment": {"A": "{otu}"}}, r"trainer.environment.A: .* did you mean {out}\?"),
        ({"checkpoint": "{stp}"}, r"trainer.checkpoint: .* did you mean {step}\?"),
        (
            {"checkpoint": "last"},
            r"trainer.checkpoint: last is the same for every step; save each step in its own folder, with {step}",
        ),
        (
            {"checkpoint": "/all/step-{step}"},
            r"trainer.checkpoint: /all/step-{step} must be a path relative to {out} and inside it",
        ),
        ({"checkpoint": "../step-{step}"}, r"trainer.checkpoint: .* must be a path relative to {out} and inside it"),
        ({"losses": "/all/losses"}, r"trainer.losses: /all/losses must be a path relative to {out} and inside it"),
        ({"losses_kind": "regex"}, r"trainer.pattern: losses_kind: regex requires a pattern with the groups"),
        ({"losses_kind": "regex", "pattern": "("}, r"trainer.pattern: .* is not a valid regular expression"),
        ({"time_limit": 0.0}, r"trainer.time_limit: 0 must be more than 0 seconds"),
        ({"environment": {"A=B": "1"}}, r"trainer.environment: 'A=B' is not a valid variable"),
        ({"environment": {"A": "x\0"}}, r"trainer.environment: 'A' is not a valid variable"),
        ({"command": "x {resume} '\0'"}, r"trainer.command: contains a NUL character"),
        ({"command": "x {steps}"}, r"trainer.command: does not receive {checkpoint}, .*; use {resume}"),
        ({"resume": "--continue"}, r"trainer.command: does not receive {checkpoint}"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused_before_anything_is(tmp_path: Path, keys: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(tmp_path, **keys)
    assert not any(tmp_path.iterdir())


def test_without_tensorboard_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "tensorboard.compat.proto.event_pb2", raising=False)
    with pytest.raises(EnvironmentProblem, match=r"requires tensorboard.*pip install 'ckptx\[tensorboard\]'"):
        run(tmp_path, losses_kind="tensorboard")
    assert not any(tmp_path.iterdir())


def test_steps_that_leave_nothing_to_compare(tmp_path: Path) -> None:
    for save_at in ((), (5,), (0,)):
        training = TrainingBlock(steps=5, save_at=save_at)
        with pytest.raises(UsageError, match="is not before the last step 5"):
            run_external(Recipe(name="x", trainer=TrainerBlock(command="x"), training=training), tmp_path / "o")
    with pytest.raises(UsageError, match=r"has no trainer\.command"):
        run_external(Recipe(name="x"), tmp_path / "o")


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "x").touch()
    with pytest.raises(OutputError, match="is not empty, and a trainer may resume from its files"):
        run_external(recipe(), tmp_path / "o", folder=Path(__file__).parent)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="no-such-program cannot be started"):
        run(tmp_path, command="no-such-program {steps} {resume}")


# ---------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a {x} b", ["a", "1 2; rm", "b"]),
        ("a --k={x} '{x}'", ["a", "--k=1 2; rm", "1 2; rm"]),
        ("a {resume} b", ["a", "--from", "x y", "b"]),
        ("a $HOME `id` {0} {} {{", ["a", "$HOME", "`id`", "{0}", "{}", "{{"]),
        ("a '{\"k\": 1}'", ["a", '{"k": 1}']),
    ],
)
def test_values_are_parts_of_words(template: str, words: list[str]) -> None:
    assert split_command(template, {"x": "1 2; rm", "resume": "--from 'x y'"}, "trainer.command") == words


def test_nothing_is_left_of_an_empty_resume() -> None:
    assert split_command("a {resume}", {"resume": ""}, "trainer.command") == ["a"]


def test_variables_of_a_launcher_are_not_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    code = "import os, re; print([k for k in os.environ if re.search('RANK|WORLD|MASTER|TORCHELASTIC', k)])"
    run_command([sys.executable, "-c", code], tmp_path / "log", {"MY_RANK": "1"}, 30)
    assert (tmp_path / "log").read_text() == "['MY_RANK']\n"


def is_alive(pid: int) -> bool:
    """False of a process that is gone, or only waits to be counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SPAWNS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1] + ".new", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """Its child has a session of its own, as ranks have below torchrun."""
    ended = run_command([sys.executable, "-c", SPAWNS, str(tmp_path / "pids")], tmp_path / "log", {}, 2.0)
    assert ended.is_timed_out and "its time limit" in ended.failure_text()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any(map(is_alive, pids)))


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_interruption_ends_what_runs(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ckptx.robustness_suite.commands import run_command; "
        f"words = [sys.executable, '-c', {SPAWNS!r}, {str(tmp_path / 'pids')!r}]; "
        f"run_command(words, Path({str(tmp_path / 'log')!r}), {{}}, 600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    wait_for((tmp_path / "pids").exists)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in error
    wait_for(lambda: not any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split()))


# ------------------------------------------------------------------------------------------------------------ causes


def test_random_numbers_of_one_rank_everywhere_are_told_from_a_draw() -> None:
    before = {("rng", f"app.rng.rank{rank}"): f"{rank}" for rank in range(3)}
    alike = dict.fromkeys(before, "0")
    drawn = {key: f"{value}x" for key, value in before.items()}
    for after, said in ((alike, "RNG state of another rank was restored"), (drawn, "RNG state differs on ranks 0-2")):
        assert likely_causes(compare([before], [after]), before, after)[0].startswith(said)
    assert likely_causes(compare([before], [before]), before, before) == []


@pytest.mark.parametrize(("number", "said"), [(2, "and 1 other change"), (3, "and 2 other changes")])
def test_other_changes_of_a_setting_are_counted(number: int, said: str) -> None:
    before = {("param groups", f"optimizer.param_groups.{index}.weight_decay"): "0.1" for index in range(number)}
    after = {key: f"0.{index + 2}" for index, key in enumerate(before)}
    (cause,) = likely_causes(compare([before], [after]), before, after)
    assert f"0.1 in the reference, 0.2 after the resume, {said})" in cause
