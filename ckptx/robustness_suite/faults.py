"""Faults to inject: each changes state or files as a real defect would, and nothing else.

They prove that oracles can fail. Oracles and phases must not depend on them, so they do not import this module.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import structs

from ckptx.errors import UsageError
from ckptx.robustness_suite.run_requests import RunRequest
from ckptx.robustness_suite.session import InjectedFault
from ckptx.runtime.training.recipe import Recipe

_leaked_objects: list[Any] = []  # objects that faults leak


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault to inject.

    Attributes:
        description: Description of the fault.
        oracle: Oracle that must detect the fault.
        phase: Number of the phase that must fail.
        run: Name of the run with the fault.
        min_mesh: Minimum sizes of the mesh for the fault to have an effect, by axis: "tp", "dp", "dp_shard" or "ranks".
        injection: Functions that a session calls to inject the fault.
    """

    description: str
    oracle: str
    phase: int
    run: str
    min_mesh: Mapping[str, int]
    injection: InjectedFault


FAULTS: dict[str, Fault] = {}  # name -> fault, in the order of this file
F = TypeVar("F", bound=Callable[..., Any])


def register_fault(
    description: str,
    *,
    oracle: str,
    target: Literal["trainer", "run", "files"] = "trainer",
    phase: int = 6,
    run: str = "resumed",
    event: str = "resumed",
    min_mesh: Mapping[str, int] | None = None,
) -> Callable[[F], F]:
    """Register a function as a fault with its name.

    Args:
        description: Description of the fault.
        oracle: Oracle that must detect the fault.
        target: Argument of the function: "trainer" gets the trainer at an event, on every rank; "run" gets the
            `RunRequest` before the run starts, and returns a changed one; "files" gets the folder of a run that has
            ended.
        phase: Number of the phase that must fail.
        run: Name of the run with the fault: uninterrupted, resumed (in new processes), resumed-2, layout-1, killed-1.
        event: Event of `Trainer` at which a function with the target "trainer" is called.
        min_mesh: See `Fault`; None for no minimum.
    """

    def register(function: F) -> F:
        injection = {
            "trainer": InjectedFault(events={run: {event: function}}),
            "run": InjectedFault(request_changes={run: function}),
            "files": InjectedFault(file_changes={run: function}),
        }[target]
        FAULTS[function.__name__] = Fault(
            description=description, oracle=oracle, phase=phase, run=run, min_mesh=min_mesh or {}, injection=injection
        )
        return function

    return register


# ------------------------------------------------------------------------------------------ the optimizer


def _optimizer_states(trainer: Any) -> list[dict[str, Any]]:
    return [trainer.optimizer.state[each] for each in _optimized_parameters(trainer) if each in trainer.optimizer.state]


def _optimized_parameters(trainer: Any) -> list[Any]:
    return [each for group in trainer.optimizer.param_groups for each in group["params"]]


def _local_values(tensor: Any) -> Any:
    from ckptx.runtime.torch_private import local_tensor

    return local_tensor(tensor).detach()


@register_fault("one first moment (exp_avg) is zero after a resume", oracle="moments")
def one_moment_lost(trainer: Any) -> None:
    _local_values(_optimizer_states(trainer)[-1]["exp_avg"]).zero_()


@register_fault("all Adam moments are zero after a resume", oracle="moments")
def all_moments_lost(trainer: Any) -> None:
    for state in _optimizer_states(trainer):
        _local_values(state["exp_avg"]).zero_()
        _local_values(state["exp_avg_sq"]).zero_()


@register_fault("optimizer state is empty after a resume", oracle="moments")
def optimizer_fresh(trainer: Any) -> None:
    trainer.optimizer.state.clear()


@register_fault("Adam step counts are reset to 0", oracle="adam step")
def adam_step_reset(trainer: Any) -> None:
    for state in _optimizer_states(trainer):
        state["step"].zero_()


@register_fault("Adam step counts are one too high", oracle="adam step")
def adam_step_off_by_one(trainer: Any) -> None:
    for state in _optimizer_states(trainer):
        state["step"].add_(1)


@register_fault("moments are rounded to bfloat16", oracle="moments")
def moments_through_bf16(trainer: Any) -> None:
    for state in _optimizer_states(trainer):
        for name in ("exp_avg", "exp_avg_sq"):
            _local_values(state[name]).copy_(_local_values(state[name]).bfloat16())


@register_fault("one element of a moment is NaN", oracle="finite")
def nan_in_a_moment(trainer: Any) -> None:
    value = next(
        each for each in (_local_values(state["exp_avg"]) for state in _optimizer_states(trainer)) if each.numel()
    )
    value.view(-1)[0] = float("nan")


@register_fault("weight decay is 0 after a resume", oracle="param groups")
def weight_decay_lost(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0


@register_fault("the next learning rate is 5% too high", oracle="learning rate")
def rate_wrong(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 1.05


@register_fault("the scheduler is one step ahead", oracle="scheduler")
def scheduler_off_by_one(trainer: Any) -> None:
    trainer.scheduler.last_epoch += 1


@register_fault("the scheduler is reset", oracle="scheduler")
def scheduler_reset(trainer: Any) -> None:
    trainer.scheduler.last_epoch = 0


# -------------------------------------------------------------------------------------------- the counters


@register_fault("the step counter is reset to 0", oracle="step")
def step_reset(trainer: Any) -> None:
    trainer.completed_steps = 0


@register_fault("the data restarts from the first sample", oracle="samples")
def data_restarted(trainer: Any) -> None:
    trainer.sampler.samples_seen = 0


class _ShiftedDataset:
    """Dataset whose samples are shifted by an offset."""

    def __init__(self, dataset: Any, offset: int) -> None:
        self._dataset, self._offset = dataset, offset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[(index + self._offset) % len(self._dataset)]


@register_fault("every sample is replaced by the next one", oracle="batch")
def data_off_by_one(trainer: Any) -> None:
    trainer.dataset = _ShiftedDataset(trainer.dataset, 1)


@register_fault("data-parallel ranks get each other's samples", oracle="batch", min_mesh={"dp": 2})
def data_ranks_swapped(trainer: Any) -> None:
    """Give each data-parallel rank the samples of the next one."""
    trainer.data_rank = (trainer.data_rank + 1) % trainer.recipe.layout.dims.dp


# -------------------------------------------------------------------------------------------- random numbers


@register_fault("RNG state is that of the first step", oracle="rng")
def rng_stale(trainer: Any) -> None:
    """Reset RNG state to that of the first step."""
    from ckptx.runtime.parallel.randomness import seed

    seed(trainer.recipe.training.seed, trainer.rank_model.mesh)


@register_fault("every rank has the RNG state of rank 0", oracle="rng", min_mesh={"dp": 2})
def rng_of_rank_0(trainer: Any) -> None:
    from ckptx.runtime.parallel.distributed import broadcast_object

    trainer.random_state.load_state_dict(broadcast_object(trainer.random_state.state_dict()))


@register_fault("a DataLoader iterator is created after RNG state was restored", oracle="rng")
def rng_before_the_iterator(trainer: Any) -> None:
    """Draw once after RNG state was restored, as `iter` of a DataLoader does."""
    import torch

    torch.empty((), dtype=torch.int64).random_()


# -------------------------------------------------------------------------------------------- the model


def _parameters(trainer: Any) -> list[tuple[str, Any]]:
    return list(trainer.rank_model.parameters())


def _middle_matrix(trainer: Any) -> Any:
    """Return the local shard of a matrix in the middle of the model, which has at least two rows."""
    matrices = [
        _local_values(each) for _, each in _parameters(trainer) if each.dim() == 2 and len(_local_values(each)) > 1
    ]
    return matrices[len(matrices) // 2]


@register_fault("two rows of a matrix are swapped", oracle="model")
def rows_swapped(trainer: Any) -> None:
    values = _middle_matrix(trainer)
    values[[0, 1]] = values[[1, 0]].clone()


@register_fault("two ranks have each other's shard of a matrix", oracle="model", min_mesh={"ranks": 2})
def shards_swapped(trainer: Any) -> None:
    """Exchange the shards of one matrix between neighboring ranks."""
    from ckptx.runtime.parallel.distributed import all_gather_object

    values = _middle_matrix(trainer)
    others = all_gather_object(values.cpu().clone())
    other = others[trainer.rank_context.rank ^ 1] if trainer.rank_context.rank ^ 1 < len(others) else values
    if other.shape == values.shape:
        values.copy_(other)


def _load_parameters(trainer: Any, path: Path, is_selected: Callable[[str], bool]) -> None:
    """Load the parameters whose names `is_selected` accepts from another checkpoint."""
    originals = [(name, _local_values(each), _local_values(each).clone()) for name, each in _parameters(trainer)]
    trainer.rank_model.load(path)
    for name, values, original in originals:
        if not is_selected(name):
            values.copy_(original)


@register_fault("one rank has the initial weights", oracle="model")
def one_rank_old(trainer: Any) -> None:
    is_last_rank = trainer.rank_context.rank == trainer.rank_context.world_size - 1
    _load_parameters(trainer, trainer.source, lambda _: is_last_rank)


@register_fault("one rank has the weights of an earlier step", oracle="model", run="resumed-2")
def one_rank_one_step_old(trainer: Any) -> None:
    steps = sorted(trainer.resumed_from.parent.glob("step-*"), key=lambda each: int(each.name.partition("-")[2]))
    previous = steps[steps.index(trainer.resumed_from) - 1]
    is_last_rank = trainer.rank_context.rank == trainer.rank_context.world_size - 1
    _load_parameters(trainer, previous, lambda _: is_last_rank)


@register_fault("the output head has its initial weights", oracle="model")
def head_stale(trainer: Any) -> None:
    names = [name for name, each in _parameters(trainer) if each.dim() == 2]
    heads = [name for name in names if "lm_head" in name] or names[-1:]
    _load_parameters(trainer, trainer.source, lambda name: name in heads)


@register_fault("one norm has its initial weights", oracle="model")
def norm_stale(trainer: Any) -> None:
    norms = [name for name, each in _parameters(trainer) if each.dim() == 1 and "norm" in name]
    _load_parameters(trainer, trainer.source, lambda name: name in norms[-1:])


@register_fault("weights are rounded to bfloat16", oracle="model")
def weights_through_bf16(trainer: Any) -> None:
    for _, each in _parameters(trainer):
        _local_values(each).copy_(_local_values(each).bfloat16())


@register_fault("a row of a matrix is NaN", oracle="finite")
def nan_in_a_row(trainer: Any) -> None:
    _middle_matrix(trainer)[0] = float("nan")


@register_fault(
    "replicated parameters drift apart between TP ranks",
    oracle="replicas",
    phase=2,
    run="uninterrupted",
    event="stepped",
    min_mesh={"tp": 2},
)
def replicas_drifted(trainer: Any) -> None:
    """Scale norm weights on all TP ranks but the first, after each step."""
    if trainer.rank_model.mesh["tp"].get_local_rank():
        for name, each in _parameters(trainer):
            if each.dim() == 1 and "norm" in name:
                _local_values(each).mul_(1 + 1e-3)


# -------------------------------------------------------------------------------------------- files


def _data_files(folder: Path) -> list[Path]:
    """Return the tensor files of all steps in the folder of a run, the largest first."""
    steps = sorted(folder.glob("step-*"), key=lambda each: int(each.name.partition("-")[2]))
    return sorted((each for step in steps for each in step.glob("*.distcp")), key=lambda each: -each.stat().st_size)


@register_fault("tensor files are truncated", oracle="readable", target="files", phase=3, run="uninterrupted")
def shard_truncated(folder: Path) -> None:
    for each in _data_files(folder):
        os.truncate(each, each.stat().st_size // 2)


@register_fault(
    "one bit in each tensor file is flipped", oracle="readable", target="files", phase=3, run="uninterrupted"
)
def byte_changed(folder: Path) -> None:
    """Flip one bit in the middle of each file of tensors."""
    for each in _data_files(folder):
        with each.open("r+b") as stream:
            stream.seek(each.stat().st_size // 2)
            byte = stream.read(1)
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte[0] ^ 1]))


@register_fault("saved steps lack their metadata", oracle="readable", target="files", phase=3, run="uninterrupted")
def metadata_missing(folder: Path) -> None:
    for each in folder.glob("step-*/.metadata"):
        each.unlink()


@register_fault(
    "the data position is wrong with another number of data-parallel ranks", oracle="samples", phase=5, run="layout-1"
)
def data_counted_by_rank(trainer: Any) -> None:
    """Halve the sample count, as a loader that counts samples of its own rank would."""
    trainer.sampler.samples_seen //= 2


def _find_killed_save(root: Path) -> tuple[Path, int]:
    """Return the hidden folder of a killed save, and the number of its step."""
    hidden = next(root.glob(".step-*.ckptx-partial"))
    return hidden, int(hidden.name.split(".")[1].partition("-")[2])


@register_fault(
    "latest is updated before the step is complete", oracle="readable", target="files", phase=7, run="killed-1"
)
def latest_too_early(root: Path) -> None:
    """Write the step that was being saved into `latest`."""
    (root / "latest").write_text(f"step-{_find_killed_save(root)[1]}\n", encoding="utf-8")


@register_fault(
    "an incomplete step has the name of a complete one", oracle="readable", target="files", phase=7, run="killed-1"
)
def half_published(root: Path) -> None:
    """Publish the incomplete step under its final name."""
    hidden, step = _find_killed_save(root)
    shutil.copytree(hidden / "tree", root / f"step-{step}")


@register_fault("retention removes the only complete step", oracle="readable", target="files", phase=7, run="killed-1")
def only_good_step_removed(root: Path) -> None:
    shutil.rmtree(next(root.glob("step-*")))


@register_fault(
    "overwriting an existing step in place is interrupted",
    oracle="readable",
    target="files",
    phase=7,
    run="killed-1",
)
def overwritten_in_part(root: Path) -> None:
    """Replace one file of the last good step by that of the next step, which is valid and of the same size."""
    step = next(root.glob("step-*"))
    next_step = root.parent / "uninterrupted" / f"step-{int(step.name.partition('-')[2]) + 1}"
    file = sorted(step.glob("*.distcp"))[0]
    shutil.copyfile(next_step / file.name, file)


# -------------------------------------------------------------------------------------------- the mesh, the process


@register_fault(
    "every rank trains the whole model",
    oracle="sharded",
    target="run",
    phase=1,
    run="uninterrupted",
    min_mesh={"dp_shard": 2},
)
def unsharded(request: RunRequest) -> RunRequest:
    """Replicate all parameters on every rank."""
    layout = request.recipe.layout
    replicated = structs.replace(layout, dp_shard=1, dp_replicate=(layout.dp_shard or 1) * layout.dp_replicate)
    return replace(request, layout=replicated)


@register_fault(
    "a reference keeps the model alive after its release",
    oracle="memory",
    phase=1,
    run="uninterrupted",
    event="stepped",
)
def model_pinned(trainer: Any) -> None:
    _leaked_objects.append((trainer.rank_model.models, [each.detach() for _, each in _parameters(trainer)]))


@register_fault("a process group is never destroyed", oracle="memory", phase=1, run="uninterrupted", event="loaded")
def group_leaked(trainer: Any) -> None:
    """Create a process group that is never destroyed."""
    import torch.distributed as dist

    from ckptx.runtime.torch_private import default_store

    store = dist.PrefixStore("leaked", default_store())
    _leaked_objects.append(dist.ProcessGroupGloo(store, trainer.rank_context.rank, trainer.rank_context.world_size))


def find_fault(name: str, recipe: Recipe) -> Fault:
    """Return a fault by its name.

    Raises:
        UsageError: The name is unknown, or the mesh is too small for the fault.
    """
    if name not in FAULTS:
        matches = difflib.get_close_matches(name, FAULTS, 1, 0.5)
        suggestion = f"did you mean {matches[0]}? " if matches else ""
        raise UsageError(f"--inject {name}: no such fault; {suggestion}--inject list shows all")
    dims = recipe.layout.dims
    sizes = {"tp": dims.tp, "dp": dims.dp, "dp_shard": dims.dp_shard, "ranks": dims.world_size}
    for axis, min_size in FAULTS[name].min_mesh.items():
        if sizes[axis] < min_size:
            override = {"tp": "layout.tp=2", "ranks": "layout.dp_shard=2"}.get(axis, "layout.dp_shard=2")
            raise UsageError(f"--inject {name}: {axis} {sizes[axis]} must be at least {min_size}; use --set {override}")
    return FAULTS[name]
