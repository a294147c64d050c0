"""The training state other than model and optimizer: scheduler, random numbers, position in the data, counters.

    training_state.<name>               identical on all ranks: stored once
    training_state.<name>.rank_<rank>   `PerRank`: one value per rank, with its mesh: {"mesh": {...}, "value": ...}

`save` writes it into the checkpoint of the model, which appears atomically. Each value is stored as one object of plain
values (see `stored_state`), which stock torch loads under these names.

Values that are identical on all ranks can be loaded on any mesh. A value per rank belongs to a pipeline stage and a
data rank: the TP ranks of one data rank draw the same random numbers and get the same data. So it can be loaded with
another number of TP ranks; with another number of data ranks or stages its owner is undefined, and it is refused. A
data rank is the index of a rank over the mesh dims dp_replicate and dp_shard.
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
from ckptx.runtime.checkpointing.stored_state import StoredState, compute_digest, open_state, to_plain
from ckptx.runtime.parallel.distributed import MESH_DIMS, all_gather_object, raise_on_all_ranks

ROOT_KEY, STEP_KEY = "training_state", "step"
_RANK_PREFIX = "rank_"


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks state that differs between ranks, such as random numbers or the position in a rank's data.

    Attributes:
        value: An object with `state_dict` and `load_state_dict`, or a plain value.
    """

    value: Any


def collect_training_state(training_state: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return the state that this rank stores under `ROOT_KEY`, for `SavePlanner`; every rank calls it.

    Args:
        training_state: State by name; see `SaveRequest`.
        mesh: Mesh of the run; required for a `PerRank`.

    Raises:
        UnsupportedError: A state contains a value that could not be read again.
        UsageError: A name is invalid, the mesh is missing, ranks have different names, or a value that is not a
            `PerRank` differs between ranks.
    """
    with raise_on_all_ranks():
        state, digests = _collect_local(training_state, mesh)
    _check_equal_on_ranks(all_gather_object(digests))
    return state


def _collect_local(training_state: Mapping[str, Any], mesh: DeviceMesh | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the state of this rank, and the digests that must be equal on all ranks."""
    state: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for name, each in training_state.items():
        if not isinstance(name, str) or not name or "." in name:
            raise UsageError(f"{ROOT_KEY}: invalid name {name!r}, must be a string without dots; rename it")
        subject = f"{ROOT_KEY}.{name}"
        value = to_plain(_get_state(each.value if isinstance(each, PerRank) else each), subject)
        if isinstance(each, PerRank):
            dims, position = _mesh_position(mesh, name)
            state[name] = {
                f"{_RANK_PREFIX}{dims.rank(*position)}": WholeObject({"mesh": _mesh_sizes(dims), "value": value})
            }
            digests[name] = "for each rank"  # no digest: values may differ, but all ranks must have the name
        else:
            state[name], digests[name] = WholeObject(value), compute_digest(value)
    return state, digests


def load_training_state(
    path: Path, state: Mapping[str, Any] | None = None, *, mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """Load the `training_state` of `save`. Each rank reads independently; nothing that it reads is executed.

    Load objects that draw random numbers first (`iter` of a DataLoader does), and the random number generators last.

    Args:
        path: The checkpoint.
        state: Objects with `load_state_dict` to fill, by name, in this order. Everything is read before the first is
            filled. None only returns the state.
        mesh: Mesh of this run; required for state in `state` that was saved as `PerRank`.

    Returns:
        Plain values and states by name, as they were saved, and the saved step under "step", None if no step was saved;
        a state that is named "step" replaces it. A `PerRank` value that is not in `state` is left out if `mesh` is
        None, or if it was saved with another number of data ranks or stages.

    Raises:
        InputError: A name of `state` is not in the checkpoint, or the checkpoint is damaged.
        UnsupportedError: The checkpoint is not a DCP, or a `PerRank` value in `state` was saved with another number of
            data ranks or stages.
        UsageError: `state` has a `PerRank` value, and the mesh is missing or has unknown dims.
    """
    targets = {name: each.value if isinstance(each, PerRank) else each for name, each in (state or {}).items()}
    with open_state(path) as stored:
        loaded_state: dict[str, Any] = {STEP_KEY: stored.read_value(STEP_KEY) if STEP_KEY in stored.objects else None}
        names = dict.fromkeys(full.split(".")[1] for full in stored.objects if full.startswith(f"{ROOT_KEY}."))
        for name in targets:
            if name not in names:
                available = ", ".join(names) or "none"
                raise InputError(
                    f'{path}: has no training state "{name}" (available: {available}); leave it out, or start it fresh'
                )
        for name in names:
            if f"{ROOT_KEY}.{name}" in stored.objects:
                loaded_state[name] = stored.read_value(f"{ROOT_KEY}.{name}")
            elif name in targets or mesh is not None:
                rank = _find_saved_rank(stored, name, mesh, is_required=name in targets)
                if rank is not None:
                    loaded_state[name] = stored.read_value(f"{ROOT_KEY}.{name}.{_RANK_PREFIX}{rank}")["value"]
    for name, each in targets.items():
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(_restore_types(each, loaded_state[name]))
    return loaded_state


# ------------------------------------------------------------------------------------------------ ranks


def _mesh_position(mesh: DeviceMesh | None, name: str) -> tuple[ParallelDims, tuple[int, int, int]]:
    """Return the sizes of a mesh, and (pipeline rank, data rank, TP rank) of this process.

    Raises:
        UsageError: `mesh` is None, or has no named dims or unknown ones.
    """
    if mesh is None:
        raise UsageError(f'{ROOT_KEY}: "{name}" is stored per rank, which requires the mesh; pass mesh=')
    names = mesh.mesh_dim_names or ()
    unknown = [each for each in names if each not in MESH_DIMS]
    if unknown or not names:
        raise UsageError(f"mesh: dims {list(names)} must be some of {', '.join(MESH_DIMS)}; use mesh_of")
    sizes = {each: mesh[each].size() if each in names else 1 for each in MESH_DIMS}
    position = {each: mesh.get_local_rank(each) if each in names else 0 for each in MESH_DIMS}
    dims = ParallelDims(sizes["tp"], sizes["pp"], sizes["dp_shard"], sizes["dp_replicate"])
    return dims, (position["pp"], position["dp_replicate"] * dims.dp_shard + position["dp_shard"], position["tp"])


def _mesh_sizes(dims: ParallelDims) -> dict[str, int]:
    return {each: getattr(dims, each) for each in MESH_DIMS}


def _find_saved_rank(stored: StoredState, name: str, mesh: DeviceMesh | None, *, is_required: bool) -> int | None:
    """Return the rank of the saved mesh whose value this rank loads.

    All values of a name were saved with one mesh, which is read from the first of them.

    Returns:
        None if the number of data ranks or stages differs, and the state is not required.

    Raises:
        InputError: The value of that rank, or the mesh of the values, is not in the checkpoint.
        UnsupportedError: The number of data ranks or stages differs, and the state is required.
    """
    dims, (pp, dp, tp) = _mesh_position(mesh, name)
    prefix = f"{ROOT_KEY}.{name}.{_RANK_PREFIX}"
    first = next(full for full in stored.objects if full.startswith(prefix))
    saved_dims = _read_saved_dims(stored.read_value(first), f'{stored.root}: object "{first}"')
    if (saved_dims.pp, saved_dims.dp) != (dims.pp, dims.dp):
        if not is_required:
            return None
        raise UnsupportedError(
            f'{stored.root}: training state "{name}" was saved with {saved_dims.dp} data-parallel ranks and '
            f"{saved_dims.pp} stages, this run has {dims.dp} and {dims.pp}; resume with the same numbers, or leave it "
            "out and start it fresh, for example with `randomness.seed(other_number, mesh)` and the data from the "
            "saved step on"
        )
    rank = saved_dims.rank(pp, dp, tp if tp < saved_dims.tp else 0)
    if f"{prefix}{rank}" not in stored.objects:
        raise InputError(f'{stored.root}: training state "{name}" has no value for rank {rank}; save it again')
    return rank


def _read_saved_dims(value: Any, subject: str) -> ParallelDims:
    """Return the mesh sizes in a stored `PerRank` value; `subject` is the subject of errors."""
    sizes = value.get("mesh") if isinstance(value, dict) and "value" in value else None
    if not isinstance(sizes, dict) or any(type(sizes.get(each)) is not int for each in MESH_DIMS):
        raise InputError(f"{subject}: does not contain its mesh, so ckptx did not write it; save it with ckptx")
    return ParallelDims(sizes["tp"], sizes["pp"], sizes["dp_shard"], sizes["dp_replicate"])


def _check_equal_on_ranks(digests: list[dict[str, str]]) -> None:
    for rank, other in enumerate(digests):
        for name in dict.fromkeys([*digests[0], *other]):
            if digests[0].get(name) != other.get(name):
                difference = "its value differs" if name in digests[0] and name in other else "only one has it"
                raise UsageError(
                    f'{ROOT_KEY}: "{name}" must be identical on all ranks, but on ranks 0 and {rank} {difference}; use '
                    "PerRank if it differs between ranks"
                )


# ------------------------------------------------------------------------------------------------ values


def _get_state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _restore_types(target: Any, state: Any) -> Any:
    """Return a state whose values are a Counter or OrderedDict where those of the target are.

    A checkpoint stores both as dicts. MultiStepLR requires a Counter of its milestones.
    """
    own_state = _get_state(target)
    if not isinstance(own_state, Mapping) or not isinstance(state, dict):
        return state
    return dict(_restore_dict_types(own_state, state))


def _restore_dict_types(own_state: Mapping[Any, Any], state: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in state.items():
        dict_type = type(own_state.get(key))
        yield key, dict_type(value) if dict_type in (Counter, OrderedDict) and isinstance(value, dict) else value
