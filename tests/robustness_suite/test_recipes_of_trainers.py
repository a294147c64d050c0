"""The shipped recipes of other trainers, under torchrun on two ranks: passing as they are, and each fault named.

A mistake is a line of the script that is another one; nothing else is changed, no script knows of ckptx. A run takes
ten seconds of one core, most of them imports, so that a mistake is tried without the runs that it does not touch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.injected.trainers import MISTAKES, SCRIPTS, Mistake, inject
from ckptx.report.report import Log
from ckptx.robustness_suite import external_trainer as foreign
from ckptx.robustness_suite.external_trainer import BUILT_IN_RECIPES
from ckptx.robustness_suite.report_builder import ReportBuilder
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.recipe_file import read_recipe

NEEDS_ACCELERATE = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


def read(name: str) -> Recipe:
    """A recipe that is shipped."""
    return read_recipe(BUILT_IN_RECIPES / f"{name}.yaml")


def phases_of(recipe: Recipe, out: Path, folder: Path = BUILT_IN_RECIPES) -> Any:
    """What runs the phases, one by one."""
    return foreign._CommandPhases(recipe, out, Log(), lambda row: None, folder)


Straight = Callable[[str], Any]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The run of a script that is right and does not stop: once for all of its faults."""
    made: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in made:
            made[name] = phases_of(read(name), tmp_path_factory.mktemp(name) / "out")
            made[name].run_uninterrupted()
        return made[name]

    return run


def with_mistake(uninterrupted: Any, tmp_path: Path, name: str, mistake: Mistake) -> Any:
    """The phases of a script with a mistake, after the uninterrupted run of the script without it."""
    shutil.copytree(BUILT_IN_RECIPES, tmp_path / "recipes")
    inject(name, mistake, tmp_path / "recipes")
    shutil.copytree(uninterrupted._runs._out, tmp_path / "out")
    phases = phases_of(read(name), tmp_path / "out", tmp_path / "recipes")
    phases._final_items, phases._saved_items = uninterrupted._final_items, uninterrupted._saved_items
    phases._reference_losses, phases._loss_noise = uninterrupted._reference_losses, 0.0
    return phases


def failed(outcome: ReportBuilder) -> dict[str, list[str]]:
    """The oracles that failed, by phase."""
    rows = {row["name"]: [each["name"] for each in row["checks"] if each["ok"] is False] for row in outcome.phases}
    return {name: oracles for name, oracles in rows.items() if oracles}


def test_every_recipe_has_what_its_command_names() -> None:
    for name in (*SCRIPTS, "torchtitan"):
        recipe = read(name)
        assert recipe.name == name and recipe.description
        phases_of(recipe, Path("/nonexistent")).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fsdp2_script",
        pytest.param("accelerate", marks=NEEDS_ACCELERATE),
        pytest.param("transformers_trainer", marks=NEEDS_ACCELERATE),
    ],
)
def test_a_trainer_that_is_right_passes(name: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    outcome = foreign.run_external(read(name), tmp_path / "out")
    assert outcome.ok and failed(outcome) == {} and outcome.world_size == 2
    assert outcome.noise["loss"]["repeated"] == 0
    assert time.monotonic() - begin < 240  # two minutes on idle cores
    (end,) = (row for row in outcome.phases if row["name"] == "resumed")
    assert {"model", "moments", "adam step", "param groups", "scheduler", "rng", "loss"} <= {
        each["name"] for each in end["checks"]
    }


RNG_OF_RANK_0 = Mistake(
    "random numbers of rank 0 everywhere",
    [(
        'torch.set_rng_state(state["rng"][f"rank{self.rank}"])',
        'dist.broadcast(rng := state["rng"][f"rank{self.rank}"], 0)\n        torch.set_rng_state(rng)',
    )],
    "load and save", frozenset({"rng"}),
)  # fmt: skip
OF_THE_SCRIPT = MISTAKES["fsdp2_script"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (OF_THE_SCRIPT["iterator"], "make the iterator first"),
        (OF_THE_SCRIPT["scheduler"], "scheduler state differs"),
        (OF_THE_SCRIPT["data"], "state of the sampler or data loader was not restored"),
        (OF_THE_SCRIPT["optimizer"], "the param groups of the optimizer were not restored"),
        (RNG_OF_RANK_0, "RNG state of another rank was restored (rank 1 has that of rank 0)"),
    ],
    ids=lambda each: each.description if isinstance(each, Mistake) else "",
)
def test_a_mistake_of_a_plain_script_is_named(
    mistake: Mistake, said: str, uninterrupted: Straight, tmp_path: Path
) -> None:
    phases = with_mistake(uninterrupted("fsdp2_script"), tmp_path, "fsdp2_script", mistake)
    phases.run_load_and_save()
    (row,) = phases.report_builder.phases
    assert set(failed(phases.report_builder)["load and save"]) == mistake.oracles
    assert said in " ".join(row["notes"])


@pytest.mark.slow
def test_an_unsharded_run_is_named(tmp_path: Path) -> None:
    name = "fsdp2_script"
    shutil.copytree(BUILT_IN_RECIPES, tmp_path / "recipes")
    script = tmp_path / "recipes" / "scripts" / SCRIPTS[name]
    text = script.read_text(encoding="utf-8")
    text = text.replace("fully_shard(layer)", "pass").replace("    fully_shard(model)\n", "")
    script.write_text(text, encoding="utf-8")
    phases = phases_of(read(name), tmp_path / "out", tmp_path / "recipes")
    phases.run_uninterrupted()
    phases.check_sharding()
    assert failed(phases.report_builder) == {"sharded": ["sharded"]}
    assert "0 of 21 parameters are stored as several shards" in phases.report_builder.phases[-1]["notes"][0]


@pytest.mark.slow
@NEEDS_ACCELERATE
def test_a_scheduler_that_accelerate_was_not_given_is_named(uninterrupted: Straight, tmp_path: Path) -> None:
    phases = with_mistake(uninterrupted("accelerate"), tmp_path, "accelerate", MISTAKES["accelerate"]["scheduler"])
    phases.run_load_and_save()
    assert failed(phases.report_builder) == {"load and save": ["scheduler"]}


@pytest.mark.slow
@NEEDS_ACCELERATE
def test_data_that_accelerate_does_not_skip_shows_at_the_end(uninterrupted: Straight, tmp_path: Path) -> None:
    """Its checkpoint has no place in the data, so that only what was trained on it differs."""
    phases = with_mistake(uninterrupted("accelerate"), tmp_path, "accelerate", MISTAKES["accelerate"]["data"])
    phases.run_resumed()
    assert {"model", "moments", "loss"} <= set(failed(phases.report_builder)["resumed"])


@pytest.mark.slow
@NEEDS_ACCELERATE
def test_data_that_the_trainer_does_not_skip_shows_at_the_end(uninterrupted: Straight, tmp_path: Path) -> None:
    mistake = MISTAKES["transformers_trainer"]["data"]
    phases = with_mistake(uninterrupted("transformers_trainer"), tmp_path, "transformers_trainer", mistake)
    phases.run_resumed()
    assert {"model", "moments", "loss"} <= set(failed(phases.report_builder)["resumed"])
    notes = phases.report_builder.phases[-1]["notes"]
    assert any(each.startswith("check ") and each.endswith("not restored") for each in notes)
