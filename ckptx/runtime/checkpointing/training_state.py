"""What a training run needs besides model and optimizer: scheduler, random numbers, place in the data, counters.

    training_state.<name>               alike on all ranks: stored once
    training_state.<name>.rank_<rank>   `PerRank`: what each rank has, with its mesh: {"mesh": {...}, "value": ...}

`save` stores it in the same publish as the model. Each is one object of plain values (see `stored_state`), which stock
torch loads under these names.

On another mesh, what is alike is what it was. What each rank has belongs to a pipeline stage and a data rank: the TP
ranks of one data rank draw the same numbers and see the same data. So another number of TP ranks takes it over, and
with another number of data ranks or stages nobody can say whose it is: it is refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ckptx.errors import InputError, UnsupportedError, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.checkpointing.save_planner import WholeObject
from ckptx.runtime.checkpointing.stored_state import StoredState, digest_of, open_state, plain
from ckptx.runtime.parallel.distributed import MESH_DIMS, all_gather_object, raise_on_all_ranks

ROOT, STEP = "training_state", "step"
_RANK = "rank_"


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks what each rank has for itself: random numbers, a place in its data.

    Attributes:
        value: Something with `state_dict` and `load_state_dict`, or a plain value.
    """

    value: Any


def collect(training_state: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """What this rank stores below `ROOT`, for `SavePlanner`. Every rank calls it.

    Args:
        training_state: By name; see `save`.
        mesh: Needed for a `PerRank`.

    Raises:
        UnsupportedError: There is something in it that could not be read again.
        UsageError: A name is none, or the mesh is missing, or ranks have different names, or different values of what
            is no `PerRank`.
    """
    with raise_on_all_ranks():
        found, common = _collected(training_state, mesh)
    _check_alike(all_gather_object(common))
    return found


def _collected(training_state: Mapping[str, Any], mesh: DeviceMesh | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The same without a look at other ranks, and what has to be alike on them."""
    found: dict[str, Any] = {}
    common: dict[str, str] = {}
    for name, each in training_state.items():
        if not isinstance(name, str) or not name or "." in name:
            raise UsageError(f"{ROOT}: found the name {name!r}, needed a text without dots; rename it")
        where = f"{ROOT}.{name}"
        value = plain(_state_of(each.value if isinstance(each, PerRank) else each), where)
        if isinstance(each, PerRank):
            dims, place = _place_in(mesh, name)
            found[name] = {f"{_RANK}{dims.rank(*place)}": WholeObject({"mesh": _sizes_of(dims), "value": value})}
            common[name] = "for each rank"
        else:
            found[name], common[name] = WholeObject(value), digest_of(value)
    return found, common


def load_training_state(
    path: Path, state: Mapping[str, Any] | None = None, *, mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """Gives back what `save` got as `training_state`. Each rank reads for itself; nothing it reads is executed.

    Load what draws random numbers first (`iter` of a DataLoader does), and give the random numbers last.

    Args:
        path: The checkpoint.
        state: What to fill, by name, in this order: things with `load_state_dict`. Everything is read before the first
            is filled.
        mesh: Of this run, needed for what was saved as `PerRank`.

    Returns:
        Plain values and states by name, as they were saved, and "step": None where no step was.

    Raises:
        InputError: A name of `state` is not in the checkpoint, or the checkpoint is damaged.
        UnsupportedError: What each rank has was saved with another number of data ranks or stages. Only of names in
            `state`: others are left out.
        UsageError: The mesh is missing.
    """
    wanted = {name: each.value if isinstance(each, PerRank) else each for name, each in (state or {}).items()}
    with open_state(path) as stored:
        found: dict[str, Any] = {STEP: stored.value(STEP) if STEP in stored.objects else None}
        names = dict.fromkeys(full.split(".")[1] for full in stored.objects if full.startswith(f"{ROOT}."))
        for name in wanted:
            if name not in names:
                known = ", ".join(names) or "none"
                raise InputError(
                    f'{path}: has no training state "{name}", found {known}; leave it out, or start it anew'
                )
        for name in names:
            if f"{ROOT}.{name}" in stored.objects:
                found[name] = stored.value(f"{ROOT}.{name}")
            elif name in wanted or mesh is not None:
                rank = _rank_of(stored, name, mesh, is_wanted=name in wanted)
                if rank is not None:
                    found[name] = stored.value(f"{ROOT}.{name}.{_RANK}{rank}")["value"]
    for name, each in wanted.items():
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(_in_types_of(each, found[name]))
    return found


# ------------------------------------------------------------------------------------------------ ranks


def _place_in(mesh: DeviceMesh | None, name: str) -> tuple[ParallelDims, tuple[int, int, int]]:
    """The sizes of a mesh, and where this rank is: stage, data rank, TP rank."""
    if mesh is None:
        raise UsageError(f'{ROOT}: "{name}" is kept for each rank, needed the mesh, too; pass mesh=')
    names = mesh.mesh_dim_names or ()
    unknown = [each for each in names if each not in MESH_DIMS]
    if unknown or not names:
        raise UsageError(f"mesh: found the dims {list(names)}, needed some of {', '.join(MESH_DIMS)}; use mesh_of")
    size = {each: mesh[each].size() if each in names else 1 for each in MESH_DIMS}
    at = {each: mesh.get_local_rank(each) if each in names else 0 for each in MESH_DIMS}
    dims = ParallelDims(size["tp"], size["pp"], size["dp_shard"], size["dp_replicate"])
    return dims, (at["pp"], at["dp_replicate"] * dims.dp_shard + at["dp_shard"], at["tp"])


def _sizes_of(dims: ParallelDims) -> dict[str, int]:
    return {each: getattr(dims, each) for each in MESH_DIMS}


def _rank_of(stored: StoredState, name: str, mesh: DeviceMesh | None, *, is_wanted: bool) -> int | None:
    """Which rank had then what this one goes on with; None where nobody can say and nobody asks."""
    dims, (pp, dp, tp) = _place_in(mesh, name)
    prefix = f"{ROOT}.{name}.{_RANK}"
    first = next(full for full in stored.objects if full.startswith(prefix))
    then = _dims_of(stored.value(first), f'{stored.root}: object "{first}"')
    if (then.pp, then.dp) != (dims.pp, dims.dp):
        if not is_wanted:
            return None
        raise UnsupportedError(
            f'{stored.root}: training state "{name}" is that of {then.dp} data ranks in {then.pp} stages, found '
            f"{dims.dp} in {dims.pp}; go on with as many, or leave it out and start it anew (randomness.seed with "
            "another number, data from the step on)"
        )
    rank = then.rank(pp, dp, tp if tp < then.tp else 0)
    if f"{prefix}{rank}" not in stored.objects:
        raise InputError(f'{stored.root}: training state "{name}" lacks that of rank {rank}; save it again')
    return rank


def _dims_of(value: Any, where: str) -> ParallelDims:
    sizes = value.get("mesh") if isinstance(value, dict) and "value" in value else None
    if not isinstance(sizes, dict) or any(type(sizes.get(each)) is not int for each in MESH_DIMS):
        raise InputError(f"{where}: does not say of which mesh it is; it was not written by ckptx")
    return ParallelDims(sizes["tp"], sizes["pp"], sizes["dp_shard"], sizes["dp_replicate"])


def _check_alike(common: list[dict[str, str]]) -> None:
    for rank, other in enumerate(common):
        for name in dict.fromkeys([*common[0], *other]):
            if common[0].get(name) != other.get(name):
                what = "another value" if name in common[0] and name in other else "no such name"
                raise UsageError(
                    f'{ROOT}: of "{name}" ranks 0 and {rank} have {what}, needed the same on all ranks; mark it '
                    "PerRank if each rank has its own"
                )


# ------------------------------------------------------------------------------------------------ values


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _in_types_of(target: Any, state: Any) -> Any:
    """A state whose dicts are counters or ordered where the target has such: MultiStepLR counts its milestones."""
    own = _state_of(target)
    if not isinstance(own, Mapping) or not isinstance(state, dict):
        return state
    return dict(_typed(own, state))


def _typed(own: Mapping[Any, Any], state: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in state.items():
        kind = type(own.get(key))
        yield key, kind(value) if kind in (Counter, OrderedDict) and isinstance(value, dict) else value
