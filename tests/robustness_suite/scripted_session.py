"""A session whose runs are computed in place of trained: what phases ask for, and what they compare, without ranks.

The "training" is a function of the step: state, losses and logits of a step are the same in every run that does nothing
wrong. Checkpoints are real ones, of a Llama with one layer, so that phases convert, reshard, read and compare files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from ckptx.report.report import Log
from ckptx.robustness_suite.kills import operation_kind
from ckptx.robustness_suite.run_requests import KillPoint, Logits, RunRequest, RunResult
from ckptx.robustness_suite.session import Session
from ckptx.robustness_suite.stored_items import read_items
from ckptx.robustness_suite.surviving_steps import SurvivingSteps, check_steps
from ckptx.runtime.training.checkpoints import LATEST, StepDirectories
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.recipe_file import read_recipe

State = dict[str, Any]
RANKS = 2
SIZES = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (8, 8), "model.norm.weight": (8,), "lm_head.weight": (8, 8),
    "model.layers.0.input_layernorm.weight": (8,), "model.layers.0.post_attention_layernorm.weight": (8,),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj.weight": (8, 8) for name in ("gate", "up", "down")},
}  # fmt: skip
TRAINED = "model.layers.0.mlp.up_proj.weight"  # the parameter with optimizer state
SETTINGS = (
    *(f"model.config.{key}={value}" for key, value in SIZES.items()), "model.config.num_key_value_heads=2",
    "training.steps=4", "training.save_at=[2]", "checks.layouts=[{tp: 2, dp_shard: 1}, {dp_shard: 1}]",
)  # fmt: skip
OPERATIONS = (
    "open __0_0.distcp", "write __0_0.distcp", "rename .metadata.tmp -> .metadata",
    "rename .step-N.ckptx-partial/tree -> step-N", "rename .latest.ckptx-new -> latest",
)  # fmt: skip


def model_tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        name: (torch.arange(np.prod(shape)).float() + len(name)).reshape(shape) / 64 + step
        for name, shape in SHAPES.items()
    }


def saved_state(step: int) -> State:
    """Everything in the checkpoint of a step, by the names of the runtime."""
    return {
        **{f"model.{name}": value for name, value in model_tensors(step).items()},
        f"optim.state.{TRAINED}.exp_avg": torch.full(SHAPES[TRAINED], 1.0 + step),
        f"optim.state.{TRAINED}.exp_avg_sq": torch.full(SHAPES[TRAINED], 2.0 + step),
        f"optim.state.{TRAINED}.step": torch.tensor(float(step)),
        f"optim.param_groups.{TRAINED}.lr": 0.5**step,
        f"optim.param_groups.{TRAINED}.weight_decay": 0.25,
        "training_state.scheduler.last_epoch": step,
        "training_state.sampler.samples": 8 * step,
        "training_state.rng.rank_0.value.torch": torch.full((8,), step, dtype=torch.uint8),
        "step": step,
    }


@cache
def _saved_bytes(step: int) -> Mapping[str, bytes]:
    """The files of a DCP of a step; stock torch writes an id of the save to them, so each is saved only once."""
    with TemporaryDirectory() as folder:
        _save(Path(folder, "dcp"), saved_state(step))
        return {each.name: each.read_bytes() for each in Path(folder, "dcp").iterdir()}


def _save(path: Path, state: State) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def memory_items(step: int, rank: int) -> dict[tuple[str, str], str]:
    """Return the values of a rank in memory after a step, by oracle and item."""
    return {
        ("model", "w"): f"{step}", ("finite", "w"): "finite", ("names", "w"): "present",
        ("moments", "w.exp_avg"): f"{step}", ("finite", "w.exp_avg"): "finite", ("adam step", "w"): f"{step}",
        ("param groups", "w.betas"): "[0.9, 0.95]", ("learning rate", "lr"): f"{0.5**step}",
        ("scheduler", "last_epoch"): f"{step}", ("step", "step"): f"{step}", ("samples", "of the next step"): f"{step}",
        ("rng", "torch"): f"{step} {rank}", ("batch", "microbatch 0: input_ids"): f"{step} {rank}",
    }  # fmt: skip


def held_shards(step: int, rank: int) -> dict[tuple[str, str], str]:
    """Return digests like those of `shard_digests`, of a replicated and a sharded tensor."""
    return {("norm", "whole"): f"{step}", ("w", f"half {rank}"): f"{step} {rank}"}


def final_logits(step: int) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    return [np.full((1, 2, 3), step + sample, dtype=np.float32) for sample in range(2)]


Change = Callable[[Any], Any]  # from the result that is right to the result that the phase gets


class ScriptedSession(Session):
    """A session whose tasks are functions of this file.

    Attributes:
        changes: Name of a run, or of a task that trains nothing -> change of its result.
        requests: Name of a run -> its request, and whether it had new interpreters.
        kill_points: Request and kill point of each save that was killed.
    """

    def __init__(
        self, folder: Path, changes: Mapping[str, Change] | None = None, *settings: str, **fields: Any
    ) -> None:
        recipe = read_recipe("llama_tiny", [*SETTINGS, *settings])
        ranks: Any = SimpleNamespace(is_launched=False, supports_world_size=lambda size: True)
        fields = {"is_exact": True, **fields}
        super().__init__(recipe=recipe, source=folder / "source", out=folder / "out", ranks=ranks, log=Log(), **fields)
        self.changes, self.requests = dict(changes or {}), dict[str, tuple[RunRequest, bool]]()
        self.kill_points: list[tuple[RunRequest, KillPoint]] = []
        assert isinstance(recipe.model.config, Mapping)
        self.config = {**recipe.model.config, "dtype": "float32"}
        self.source.mkdir(parents=True)
        (self.source / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file(model_tensors(0), self.source / "model.safetensors", metadata={"format": "pt"})

    def run_task(self, task: str, *args: Any, world_size: int | None = None, ranks: Any = None) -> Any:
        if task == "train":
            return self._train(*args, world_size=world_size or self.world_size, ranks=ranks)
        result = {
            "compute_source_logits": self._compute_source_logits,
            "compute_runtime_logits": self._compute_runtime_logits,
            "save_and_record": self._save_and_record,
            "check_surviving_steps": self._check_surviving_steps,
        }[task](*args)
        return self.changes[task](result) if task in self.changes else result

    def run_until_killed(self, task: str, *args: Any) -> list[int]:
        request, point = args
        assert task == "save_and_record" and point.operation in OPERATIONS
        self.kill_points.append((request, point))
        (point.root / f".step-{self.resume_step + 1}.ckptx-partial").mkdir()
        killed = [*range(RANKS)] if point.kills_all_ranks else [point.rank]
        name = f"kill-{len(self.kill_points)}"
        return self.changes[name](killed) if name in self.changes else killed

    @contextmanager
    def fresh_ranks(self) -> Iterator[Any]:
        yield SimpleNamespace(are_new=True)

    def state_of(self, checkpoint: Path) -> int:
        """Return the step of a checkpoint."""
        return int(read_items(checkpoint)["step", "step"])

    def write(self, path: Path, step: int, change: Callable[[State], object] | None = None) -> None:
        """Write the checkpoint of a step; each of a step has the same bytes, unless it is changed."""
        shutil.rmtree(path, ignore_errors=True)
        if change is None:
            path.mkdir(parents=True)
            for name, content in _saved_bytes(step).items():
                (path / name).write_bytes(content)
        else:
            state = saved_state(step)
            change(state)
            _save(path, state)
        (path / "config.json").write_text(json.dumps(self.config), encoding="utf-8")

    def _train(self, request: RunRequest, world_size: int, ranks: Any) -> RunResult:
        assert request.log_file is not None
        name = request.log_file.stem
        self.requests[name] = request, ranks is not None
        first = 0 if request.resume_from is None else self.state_of(request.resume_from)
        steps = range(first, max(first, request.last_step) + 1)
        dropout = request.recipe.training.dropout or 0.0
        shift = 0.0 if request.perturbation_seed is None else 1e-6 * (1 + request.perturbation_seed)
        for step, path in request.saves.items():
            assert step in steps
            self.write(path, step)
        looks = [step for step in steps if step in request.snapshot_steps]
        result = RunResult(
            # With dropout, another mesh draws other random numbers.
            losses={step: 5 - step / 8 + shift + dropout * world_size for step in steps[1:]},
            log_lines=[],
            start_items=[memory_items(first, rank) for rank in range(world_size)] if request.snapshot_steps else [],
            items={step: [memory_items(step, rank) for rank in range(world_size)] for step in looks},
            shard_digests={step: [held_shards(step, rank) for rank in range(world_size)] for step in looks},
            logits=[each + shift for each in final_logits(steps[-1])] if request.computes_logits else None,
            sharded_counts=(3, 4),
            notes=[],
        )
        return self.changes[name](result) if name in self.changes else result

    def _compute_source_logits(self, recipe: Recipe, path: Path, perturbations: int) -> tuple[Logits, float]:
        assert perturbations == 3
        tensors = load_file(path / "model.safetensors")
        step = round(float(tensors[TRAINED].sum() - model_tensors(0)[TRAINED].sum()) / tensors[TRAINED].numel())
        return final_logits(step), 1e-6

    def _compute_runtime_logits(self, request: RunRequest) -> Logits:
        return final_logits(0 if request.resume_from is None else self.state_of(request.resume_from))

    def _save_and_record(self, request: RunRequest, point: KillPoint) -> Sequence[Sequence[str]]:
        assert point.operation is None and request.resume_from is not None
        step = self.state_of(request.resume_from) + 1
        name = point.root.name.replace("killed", "next-save")
        shutil.rmtree(point.root / f".step-{step}.ckptx-partial", ignore_errors=True)
        self.write(StepDirectories(point.root).path(step), step)
        (point.root / LATEST).write_text(f"step-{step}\n", encoding="utf-8")
        if name in self.changes:
            self.changes[name](point.root)
        return [OPERATIONS, OPERATIONS[:2]]

    def _check_surviving_steps(self, root: Path, good_step: int, digests: Mapping[int, str]) -> SurvivingSteps:
        return check_steps(root, good_step=good_step, expected_digests=digests)


assert len({operation_kind(each) for each in OPERATIONS}) == 4


# ------------------------------------------------------------------------------------------------------- changes


def change_items(field: str, step: int | None, rank: int, keys: Sequence[tuple[str, str]]) -> Change:
    """Change items of one rank: of `items` or `shard_digests` of a step, or of `start_items`."""

    def change(result: RunResult) -> RunResult:
        values = getattr(result, field)
        by_rank = values if step is None else values[step]
        changed = [
            {**each, **dict.fromkeys(keys, "1 NaN")} if index == rank else each for index, each in enumerate(by_rank)
        ]
        return replace(result, **{field: changed if step is None else {**values, step: changed}})

    return change


def change_loss(step: int, value: float | None) -> Change:
    """Set the loss of a step, or remove it."""

    def change(result: RunResult) -> RunResult:
        losses = {each: loss for each, loss in result.losses.items() if each != step}
        return replace(result, losses=losses if value is None else {**losses, step: value})

    return change
