"""What phases compare: of two checkpoints of a run, everything that the mesh does not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptx.errors import UnsupportedError
from ckptx.report.report import Log
from ckptx.robustness_suite import phases
from ckptx.robustness_suite.oracles import Verdict
from ckptx.robustness_suite.phases import _compare_state, _compare_tensors, check_other_layouts
from ckptx.robustness_suite.ranks import Ranks
from ckptx.robustness_suite.run_requests import RunResult
from ckptx.robustness_suite.session import Session
from ckptx.runtime.training.recipe_file import read_recipe

State = dict[str, Any]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")


def state() -> State:
    """A model of one tensor, as a save of the runtime names it and what belongs to it."""
    return {
        "model.weight": torch.arange(6.0).reshape(2, 3),
        "optim.state.weight.exp_avg": torch.ones(2, 3),
        "optim.state.weight.exp_avg_sq": torch.full((2, 3), 2.0),
        "optim.state.weight.step": torch.tensor(3.0),
        "optim.param_groups.weight.lr": 0.5,
        "optim.param_groups.weight.weight_decay": 0.25,
        "training_state.scheduler.last_epoch": 3,
        "training_state.sampler.samples": 24,
        "training_state.rng.rank_0.value.torch": torch.zeros(8, dtype=torch.uint8),
        "step": 3,
    }


def saved(path: Path, given: State) -> Path:
    dcp.save(given, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    return path


def set_to(name: str, value: Any) -> Callable[[State], None]:
    return lambda given: given.update({name: value})


@pytest.mark.parametrize(
    ("oracle", "item", "change"),
    [
        ("moments", "exp_avg", set_to("optim.state.weight.exp_avg", torch.ones(2, 3).nextafter(torch.zeros(2, 3)))),
        ("moments", "exp_avg_sq", lambda given: given.pop("optim.state.weight.exp_avg_sq")),
        ("adam step", "step", set_to("optim.state.weight.step", torch.tensor(4.0))),
        ("learning rate", "lr", set_to("optim.param_groups.weight.lr", 0.25)),
        ("param groups", "weight_decay", set_to("optim.param_groups.weight.weight_decay", 0.0)),
        ("scheduler", "last_epoch", set_to("training_state.scheduler.last_epoch", 2)),
        ("batch", "samples", set_to("training_state.sampler.samples", 16)),
        ("step", "step", set_to("step", 2)),
    ],
)
def test_a_checkpoint_that_lost_something_on_another_mesh_is_named(
    tmp_path: Path, oracle: str, item: str, change: Callable[[State], None]
) -> None:
    given = state()
    change(given)
    first, second = saved(tmp_path / "first", state()), saved(tmp_path / "second", given)
    assert _compare_tensors(first, second).ok
    found = {each.oracle: each for each in _compare_state(first, second, "tp2")}
    assert not found[oracle].ok
    assert [each.item.rpartition(".")[2] for each in found[oracle].differences] in ([item], [f"tp2: {item}"])
    assert all(each.item.startswith("tp2: ") for each in found[oracle].differences)


def test_random_numbers_are_of_ranks_and_not_compared_on_another_mesh(tmp_path: Path) -> None:
    given = state()
    given["training_state.rng.rank_1.value.torch"] = given.pop("training_state.rng.rank_0.value.torch") + 1
    first, second = saved(tmp_path / "first", state()), saved(tmp_path / "second", given)
    found = _compare_state(first, second, "tp2")
    assert all(each.ok for each in found)
    assert {each.oracle for each in found} == {
        "moments",
        "adam step",
        "param groups",
        "learning rate",
        "scheduler",
        "step",
        "batch",
    }


def test_a_model_of_other_bytes_is_named_by_its_tensor(tmp_path: Path) -> None:
    given = state()
    given["model.weight"] = given["model.weight"].clone()
    given["model.weight"][1, 2] = -5.0
    verdict: Verdict = _compare_tensors(saved(tmp_path / "first", state()), saved(tmp_path / "second", given), "tp2")
    assert [each.item for each in verdict.differences] == ["tp2: model.weight"]


def session_with(layouts: str, tmp_path: Path, stack: ExitStack, **others: Any) -> Session:
    """One whose runs are not run."""
    ranks = stack.enter_context(Ranks(device="cpu"))
    recipe = read_recipe("llama_tiny", [f"checks.layouts={layouts}"])
    return Session(recipe=recipe, source=tmp_path, out=tmp_path, ranks=ranks, is_exact=True, log=Log(), **others)


def test_meshes_that_need_more_devices_than_there_are_are_left_out(tmp_path: Path) -> None:
    with ExitStack() as stack:
        session = session_with("[{tp: 4}, {tp: 2, pp: 2}]", tmp_path, stack, devices=2)
        found = check_other_layouts(session)
    assert not found.verdicts  # nothing was compared, and so nothing passes
    said = "not run, requires 4 ranks, which are not available"
    assert found.skip_reason == f"tp 4: {said}; tp 2 x pp 2: {said}"


@pytest.mark.parametrize(
    ("layout", "mesh"), [("{tp: 2, dp_shard: 2}", "tp 2 x dp_shard 2"), ("{dp_shard: 1}", "one rank")]
)
def test_a_note_of_a_run_gives_its_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, mesh: str
) -> None:
    """The name of a run, `layout-1`, means nothing to the user."""
    note = "the checkpoint was saved with another number of ranks"
    result = RunResult(
        losses={}, log_lines=[], start_items=[], items={}, shard_digests={}, logits=None, sharded_counts=(0, 0),
        notes=[note], measured_memory=None,
    )  # fmt: skip
    with ExitStack() as stack:
        session = session_with(f"[{layout}]", tmp_path, stack)
        monkeypatch.setattr(Session, "run_task", lambda *args, **others: result)
        session.train("layout-1", session.make_request(layout=session.recipe.checks.layouts[0]))
        assert list(session.log.notes) == [f"run on {mesh}: {note}"]
        request = session.make_request(layout=session.recipe.checks.layouts[0])
        session.train("layout-2", session.make_request())
        session.train("layout-3", request)
    meshes = f"{mesh}, {session.layout_text(session.recipe.layout)}"
    assert list(session.log.notes) == [f"runs on 2 meshes ({meshes}): {note}"]


def test_a_mesh_that_the_model_cannot_have_is_named_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **others: Any) -> None:
        raise UnsupportedError("LlamaForCausalLM: tp=4 does not divide num_key_value_heads=2")

    with ExitStack() as stack:
        session = session_with("[{tp: 4}]", tmp_path, stack)
        monkeypatch.setattr(Session, "uninterrupted_checkpoint", lambda self, step: tmp_path)
        monkeypatch.setattr(Session, "train", refuse)
        with pytest.raises(UnsupportedError, match=r"^checks.layouts\[0\]: LlamaForCausalLM: tp=4 does not"):
            check_other_layouts(session)


@pytest.mark.parametrize(
    ("dropout", "config", "expected"),
    [
        ("0.1", {}, True),
        ("0", {"attention_dropout": 0.1}, False),
        ("null", {"attention_dropout": 0.1}, True),
        ("null", {"text_config": {"resid_pdrop": 0.2}}, True),
        ("null", {"attention_dropout": 0.0, "dropout_name": "none", "classifier_dropout": 0.1}, False),
    ],
)
def test_other_layouts_tell_that_they_train_without_dropout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: str, config: dict[str, Any], expected: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with ExitStack() as stack:
        ranks = stack.enter_context(Ranks(device="cpu"))
        recipe = read_recipe("llama_tiny", ["checks.layouts=[{tp: 2}]", f"training.dropout={dropout}"])
        session = Session(recipe=recipe, source=tmp_path, out=tmp_path, ranks=ranks, is_exact=True, log=Log())
        monkeypatch.setattr(Session, "uninterrupted_checkpoint", lambda *args: tmp_path)
        monkeypatch.setattr(Session, "train", lambda *args, **others: None)
        monkeypatch.setattr(phases, "_check_layout", lambda *args: [])
        found = check_other_layouts(session)
    assert ("without dropout" in (found.title or "")) is expected
    assert any("have dropout 0" in note for note in found.notes) is expected
