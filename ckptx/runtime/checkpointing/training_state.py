"""The training state besides model and optimizer: scheduler, random numbers, position in the data, counters.

    training_state.<name>               identical on all ranks: stored once
    training_state.<name>.rank_<rank>   `PerRank`: one value per rank, with its mesh: {"mesh": {...}, "value": ...}

`save` stores it in the same publish as the model. Each is one object of plain values (see `stored_state`), which stock
torch loads under these names.

Values that are identical on all ranks can be loaded on any mesh. A value per rank belongs to a pipeline stage and a
data rank: the TP ranks of one data rank draw the same random numbers and get the same data. So it can be loaded with
another number of TP ranks; with another number of data ranks or stages its owner is undefined, and it is refused.
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
from ckptx.runtime.checkpointing.stored_state import StoredState, digest_of, open_state, to_plain
from ckptx.runtime.parallel.distributed import MESH_DIMS, all_gather_object, raise_on_all_ranks

ROOT, STEP = "training_state", "step"
_RANK = "rank_"


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks state that differs between ranks, such as random numbers or the position in a rank's data.

    Attributes:
        value: An object with `state_dict` and `load_state_dict`, or a plain value.
    """

    value: Any


def collect(training_state: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return the state that this rank stores under `ROOT`, for `SavePlanner`; every rank calls it.

    Args:
        training_state: State by name; see `save`.
        mesh: Mesh of the run; required for a `PerRank`.

    Raises:
        UnsupportedError: Something in it could not be read again.
        UsageError: A name is invalid, the mesh is missing, ranks have different names, or a value that is not a
            `PerRank` differs between ranks.
    """
    with raise_on_all_ranks():
        found, common = _collect_local(training_state, mesh)
    _check_equal_on_ranks(all_gather_object(common))
    return found


def _collect_local(training_state: Mapping[str, Any], mesh: DeviceMesh | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the state of this rank, and the digests that must be equal on all ranks."""
    found: dict[str, Any] = {}
    common: dict[str, str] = {}
    for name, each in training_state.items():
        if not isinstance(name, str) or not name or "." in name:
            raise UsageError(f"{ROOT}: invalid name {name!r}, must be a string without dots; rename it")
        where = f"{ROOT}.{name}"
        value = to_plain(_state_of(each.value if isinstance(each, PerRank) else each), where)
        if isinstance(each, PerRank):
            dims, place = _position_in(mesh, name)
            found[name] = {f"{_RANK}{dims.rank(*place)}": WholeObject({"mesh": _sizes_of(dims), "value": value})}
            common[name] = "for each rank"
        else:
            found[name], common[name] = WholeObject(value), digest_of(value)
    return found, common


def load_training_state(
    path: Path, state: Mapping[str, Any] | None = None, *, mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """Load the `training_state` of `save`. Each rank reads independently; nothing that it reads is executed.

    Load objects that draw random numbers first (`iter` of a DataLoader does), and the random number generators last.

    Args:
        path: The checkpoint.
        state: Objects with `load_state_dict` to fill, by name, in this order. Everything is read before the first is
            filled. None only returns the state.
        mesh: Mesh of this run; required for state that was saved as `PerRank`.

    Returns:
        Plain values and states by name, as they were saved, and "step": None if no step was saved.

    Raises:
        InputError: A name of `state` is not in the checkpoint, or the checkpoint is damaged.
        UnsupportedError: A `PerRank` value was saved with another number of data ranks or stages, and its name is in
            `state`; otherwise it is left out.
        UsageError: The mesh is missing.
    """
    targets = {name: each.value if isinstance(each, PerRank) else each for name, each in (state or {}).items()}
    with open_state(path) as stored:
        found: dict[str, Any] = {STEP: stored.value(STEP) if STEP in stored.objects else None}
        names = dict.fromkeys(full.split(".")[1] for full in stored.objects if full.startswith(f"{ROOT}."))
        for name in targets:
            if name not in names:
                known = ", ".join(names) or "none"
                raise InputError(
                    f'{path}: has no training state "{name}" (available: {known}); leave it out, or start it fresh'
                )
        for name in names:
            if f"{ROOT}.{name}" in stored.objects:
                found[name] = stored.value(f"{ROOT}.{name}")
            elif name in targets or mesh is not None:
                rank = _rank_of(stored, name, mesh, is_wanted=name in targets)
                if rank is not None:
                    found[name] = stored.value(f"{ROOT}.{name}.{_RANK}{rank}")["value"]
    for name, each in targets.items():
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(_in_types_of(each, found[name]))
    return found


# ------------------------------------------------------------------------------------------------ ranks


def _position_in(mesh: DeviceMesh | None, name: str) -> tuple[ParallelDims, tuple[int, int, int]]:
    """Return the sizes of a mesh, and the stage, data rank and TP rank of this process."""
    if mesh is None:
        raise UsageError(f'{ROOT}: "{name}" is stored per rank, which requires the mesh; pass mesh=')
    names = mesh.mesh_dim_names or ()
    unknown = [each for each in names if each not in MESH_DIMS]
    if unknown or not names:
        raise UsageError(f"mesh: dims {list(names)} must be some of {', '.join(MESH_DIMS)}; use mesh_of")
    size = {each: mesh[each].size() if each in names else 1 for each in MESH_DIMS}
    at = {each: mesh.get_local_rank(each) if each in names else 0 for each in MESH_DIMS}
    dims = ParallelDims(size["tp"], size["pp"], size["dp_shard"], size["dp_replicate"])
    return dims, (at["pp"], at["dp_replicate"] * dims.dp_shard + at["dp_shard"], at["tp"])


def _sizes_of(dims: ParallelDims) -> dict[str, int]:
    return {each: getattr(dims, each) for each in MESH_DIMS}


def _rank_of(stored: StoredState, name: str, mesh: DeviceMesh | None, *, is_wanted: bool) -> int | None:
    """Return the saved rank whose value this rank loads; None if it is undefined and not requested."""
    dims, (pp, dp, tp) = _position_in(mesh, name)
    prefix = f"{ROOT}.{name}.{_RANK}"
    first = next(full for full in stored.objects if full.startswith(prefix))
    saved_dims = _dims_of(stored.value(first), f'{stored.root}: object "{first}"')
    if (saved_dims.pp, saved_dims.dp) != (dims.pp, dims.dp):
        if not is_wanted:
            return None
        raise UnsupportedError(
            f'{stored.root}: training state "{name}" was saved with {saved_dims.dp} data ranks and {saved_dims.pp} '
            f"stages, this run has {dims.dp} and {dims.pp}; resume with the same numbers, or leave it out and start it "
            "fresh (randomness.seed with another number, data from the saved step)"
        )
    rank = saved_dims.rank(pp, dp, tp if tp < saved_dims.tp else 0)
    if f"{prefix}{rank}" not in stored.objects:
        raise InputError(f'{stored.root}: training state "{name}" has no value for rank {rank}; save it again')
    return rank


def _dims_of(value: Any, where: str) -> ParallelDims:
    sizes = value.get("mesh") if isinstance(value, dict) and "value" in value else None
    if not isinstance(sizes, dict) or any(type(sizes.get(each)) is not int for each in MESH_DIMS):
        raise InputError(f"{where}: does not contain its mesh, so ckptx did not write it; save it with ckptx")
    return ParallelDims(sizes["tp"], sizes["pp"], sizes["dp_shard"], sizes["dp_replicate"])


def _check_equal_on_ranks(common: list[dict[str, str]]) -> None:
    for rank, other in enumerate(common):
        for name in dict.fromkeys([*common[0], *other]):
            if common[0].get(name) != other.get(name):
                difference = "its value differs" if name in common[0] and name in other else "only one has it"
                raise UsageError(
                    f'{ROOT}: "{name}" must be identical on all ranks, but on ranks 0 and {rank} {difference}; use '
                    "PerRank if it differs between ranks"
                )


# ------------------------------------------------------------------------------------------------ values


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _in_types_of(target: Any, state: Any) -> Any:
    """Return a state whose dicts are counters or ordered if the target's are: MultiStepLR counts its milestones."""
    own = _state_of(target)
    if not isinstance(own, Mapping) or not isinstance(state, dict):
        return state
    return dict(_restore_dict_types(own, state))


def _restore_dict_types(own: Mapping[Any, Any], state: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in state.items():
        kind = type(own.get(key))
        yield key, kind(value) if kind in (Counter, OrderedDict) and isinstance(value, dict) else value
