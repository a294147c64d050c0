"""Saves a training run from all ranks, as stock `dcp.save` does, and loads its optimizer again.

    model.<name>                       parameters and persistent buffers, by their names without wrappers
    optim.state.<name>.exp_avg         torch's flattened form (`flatten_optimizer_state_dict`): every rank speaks of its
    optim.param_groups.<name>.lr       own parameters alone, so that pipeline stages add up to one checkpoint
    training_state.<name>              scheduler, random numbers, place in the data: see `training_state`
    step                               a number

Names that share a parameter share its bytes in the checkpoint, and those of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptx.catalog.region import Region
from ckptx.errors import CkptxError, Defect, InputError, UnsupportedError, UsageError
from ckptx.formats.sidecars import look_around
from ckptx.publishing.staging import Staging
from ckptx.runtime.activation_checkpointing.wrap import configs_as_given
from ckptx.runtime.distributed import everywhere, together
from ckptx.runtime.layers import canonical_name
from ckptx.runtime.rectangles import AliasWriter, SavePlanner
from ckptx.runtime.stored_state import StoredState, open_state
from ckptx.runtime.tensor_parallel.apply import TensorParallelLayout
from ckptx.runtime.training_state import ROOT, collect
from ckptx.storage.files import read_small, unwritable
from ckptx.storage.held_directory import HeldDirectory
from ckptx.storage.staged import staged

_MODEL, _OPTIMIZER = "model", "optim"
_SIDECAR_BYTES = 1 << 30
_STATE, _GROUPS = f"{_OPTIMIZER}.state", f"{_OPTIMIZER}.param_groups"


def save(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | None,
    path: Path,
    *,
    layout: TensorParallelLayout | None = None,
    step: int | None = None,
    beside: Path | None = None,
    training_state: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Writes a DCP that stock torch and ckptx read. Every rank calls it, within a process group.

    It appears under its name in one step, when all of it is on the disk; a run that fails leaves nothing.

    Args:
        model: Plain, cut by TP, sharded by FSDP2, or a pipeline stage; of a rank that has several stages, all of them.
        optimizer: Of this model, or of all these stages, made after it was sharded; None saves the model alone.
        path: A directory that is not there yet, or is empty, on a file system that all ranks share.
        layout: What TP did to the model; needed where it did something. `TensorParallelLayout.together` makes one for
            several stages.
        step: Stored under "step".
        beside: A checkpoint whose config, tokenizer and the like are copied. None writes the model's own config.
        training_state: What else the run needs to go on, by name: things with a `state_dict`, or plain values (numbers,
            texts, tensors, in lists and dicts), alike on all ranks; `PerRank` around what is not.
        mesh: The mesh of the run, needed for a `PerRank`.

    Raises:
        OutputError: `path` is not free, or cannot be written.
        SpaceError: The disk is full.
        UnsupportedError: There is optimizer state of which nobody can say where it belongs, or training state that
            could not be read again.
        UsageError: There is no process group, or the optimizer is of another model, or ranks differ in training state.
    """
    if not dist.is_initialized():
        raise UsageError("save: called outside of a process group, needed one; use distributed.process_group")
    models = [model] if isinstance(model, nn.Module) else list(model)
    with together():
        state = _state_of(_Names.of(models), optimizer, layout)
    aliases = {alias: stored for each in everywhere(state.aliases) for alias, stored in each.items()}
    if step is not None:
        state.tree["step"] = step
    if collected := collect(training_state or {}, mesh):
        state.tree[ROOT] = collected
    with ExitStack() as stack:
        staging = None
        with together():
            if dist.get_rank() == 0:
                staging = stack.enter_context(Staging(path))
                staging.begin(b"", resume=False)
        with together():
            _write(state, staged(path)[0], aliases)
        with together():
            if staging is not None:
                _write_beside(models[0], staging.output, beside)
                staging.publish()


def load_optimizer(
    optimizer: Optimizer,
    model: nn.Module | Sequence[nn.Module],
    path: Path,
    *,
    layout: TensorParallelLayout | None = None,
) -> None:
    """Fills an optimizer from a checkpoint of `save`, whatever its mesh was. Each rank reads what it needs, by itself.

    Args:
        optimizer: Of this model, with parameters grouped as they were. It need not have taken a step.
        model: Cut in any way; of a rank that has several stages, all of them.
        path: The checkpoint.
        layout: As in `save`.

    Raises:
        InputError: A parameter of the optimizer is not in the checkpoint.
        UsageError: The optimizer is of another model.
    """
    names = _Names.of([model] if isinstance(model, nn.Module) else model)
    filled: list[tuple[Tensor, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    with open_state(path) as stored:
        keys: dict[str, list[str]] = {}
        for full in (*stored.tensors, *stored.objects):
            parent, _, key = full.rpartition(".")
            keys.setdefault(parent, []).append(key)
        for name, parameter, group in _parameters_of(optimizer, names):
            of_group, of_state = f"{_GROUPS}.{name}", f"{_STATE}.{name}"
            if of_group not in keys:
                raise InputError(
                    f'{path}: holds no optimizer state of "{name}"; use a checkpoint that was saved with an optimizer'
                )
            settings = {key: _read(stored, f"{of_group}.{key}") for key in keys[of_group]}
            state = {
                key: _read_state(stored, f"{of_state}.{key}", parameter, group, names, layout)
                for key in keys.get(of_state, ())
            }
            filled.append((parameter, group, settings, state))
    for parameter, group, settings, state in filled:
        group.update(settings)
        if state:
            optimizer.state[parameter] = state


def _read(stored: StoredState, full: str) -> Any:
    """A value, or a tensor that every rank has whole, such as a learning rate."""
    if full in stored.objects:
        return stored.value(full)
    entry = stored.tensors[full]
    tensor = torch.zeros(entry.shape, dtype=getattr(torch, str(entry.dtype.torch)))
    stored.fill(full, tensor)
    return tensor


def _read_state(
    stored: StoredState,
    full: str,
    parameter: Tensor,
    group: Mapping[str, Any],
    names: _Names,
    layout: TensorParallelLayout | None,
) -> Any:
    """What this rank has of a state, cut as its parameter is if it has the shape of it."""
    if full in stored.objects:
        return stored.value(full)
    key, entry = full.rpartition(".")[2], stored.tensors[full]
    dtype = getattr(torch, str(entry.dtype.torch))
    if entry.shape == tuple(parameter.shape):
        tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    else:
        # As torch.optim has it: steps are counted on the CPU, unless a kernel counts them.
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        tensor = torch.zeros(entry.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    stored.fill(full, tensor, _local_regions(full, tensor, parameter, names, layout).get(full))
    return tensor


# ------------------------------------------------------------------------------------------ what there is


class _Names(NamedTuple):
    """The tensors of a model, or of several stages of one, by name.

    Attributes:
        values: Each once, under the name that is stored; what modules say of themselves (`get_extra_state`), too.
        by_id: All names of each, that one first.
    """

    values: dict[str, Any]
    by_id: dict[int, list[str]]

    @classmethod
    def of(cls, models: Sequence[nn.Module]) -> _Names:
        """Asks for state dicts: that also has FSDP shard again what it left gathered."""
        tied = {name for each in models for name in getattr(each, "all_tied_weights_keys", None) or ()}
        states = [each.state_dict(keep_vars=True) for each in models]
        found: dict[int, tuple[Any, list[str]]] = {}
        for full, value in (item for state in states for item in state.items()):
            found.setdefault(id(value), (value, []))[1].append(canonical_name(full))
        by_id = {key: sorted(names, key=lambda name: name in tied) for key, (_, names) in found.items()}
        return cls({by_id[key][0]: value for key, (value, _) in found.items()}, by_id)

    def of_parameter(self, parameter: Tensor) -> list[str]:
        """All names of a parameter.

        Raises:
            UsageError: The model does not have it.
        """
        if id(parameter) not in self.by_id:
            raise UsageError(
                f"optimizer: has a parameter of shape {list(parameter.shape)} that is not of the model; make it from "
                "model.parameters() when the model is parallel and loaded"
            )
        return self.by_id[id(parameter)]


def _parameters_of(optimizer: Optimizer, names: _Names) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Every parameter of an optimizer with the name it is stored under, and its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names.of_parameter(parameter)[0], parameter, group


class _State(NamedTuple):
    """What this rank saves.

    Attributes:
        tree: What `dcp.save` gets.
        aliases: Name in the checkpoint -> the name whose bytes it shares.
        local_regions: The rectangles that TP left of a tensor, by its name in the checkpoint.
    """

    tree: dict[str, Any]
    aliases: dict[str, str]
    local_regions: dict[str, Sequence[Region]]


def _state_of(names: _Names, optimizer: Optimizer | None, layout: TensorParallelLayout | None) -> _State:
    state = _State({_MODEL: names.values}, {}, {})
    for name, value in names.values.items():
        others = names.by_id[id(value)][1:]
        state.aliases.update({f"{_MODEL}.{each}": f"{_MODEL}.{name}" for each in others})
        state.local_regions.update(_local_regions(f"{_MODEL}.{name}", value, value, names, layout))
    if optimizer is None:
        return state
    flat: dict[str, Any] = {}
    for name, parameter, group in _parameters_of(optimizer, names):
        others = names.of_parameter(parameter)[1:]
        for key, value in optimizer.state.get(parameter, {}).items():
            full = f"{_STATE}.{name}.{key}"
            flat[full] = value
            state.local_regions.update(_local_regions(full, value, parameter, names, layout))
            state.aliases.update({f"{_STATE}.{each}.{key}": full for each in others})
        for key in group.keys() - {"params"}:
            flat[f"{_GROUPS}.{name}.{key}"] = group[key]
            state.aliases.update({f"{_GROUPS}.{each}.{key}": f"{_GROUPS}.{name}.{key}" for each in others})
    state.tree[_OPTIMIZER] = {full.removeprefix(f"{_OPTIMIZER}."): flat[full] for full in sorted(flat)}
    return state


def _local_regions(
    full: str, value: Any, parameter: Tensor, names: _Names, layout: TensorParallelLayout | None
) -> dict[str, Sequence[Region]]:
    """The rectangles of a tensor by name in the checkpoint; empty for one that says itself what it holds.

    Raises:
        UnsupportedError: It is optimizer state that would be stored as something else than it is.
    """
    if isinstance(value, dict):
        raise UnsupportedError(f"{full}: is nested, needed one value; train with another optimizer")
    if not isinstance(value, DTensor):
        if isinstance(value, Tensor) and value.dim() and isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{full}: is a plain tensor of shape {list(value.shape)}, needed a DTensor as its parameter is one; "
                "each rank may have another, and one alone would be saved"
            )
        return {}
    known = map(layout.local_regions, names.of_parameter(parameter)) if layout is not None else ()
    found = next((each for each in known if each is not None), None)
    if found is None or value.shape == parameter.shape:
        return {} if found is None else {full: found}
    if len(found) > 1:
        raise UnsupportedError(
            f"{full}: has shape {list(value.shape)}, its parameter {list(parameter.shape)} in fused groups; nobody "
            "can say which part this rank holds, so train without tensor parallel"
        )
    return {}


# ------------------------------------------------------------------------------------------ writing


def _write(state: _State, directory: Path, aliases: Mapping[str, str]) -> None:
    """Every rank writes its file, and rank 0 the metadata.

    Raises:
        OutputError, SpaceError: One of them could not.
        Defect: torch refuses what it was given.
    """
    try:
        dcp.save(state.tree, storage_writer=AliasWriter(directory, aliases), planner=SavePlanner(state.local_regions))
    except CheckpointException as failed:  # no Exception: it would pass by everybody who cleans up
        errors = [error for error, _ in failed.failures.values()]
        error = next((each for each in errors if isinstance(each, (CkptxError, OSError))), errors[0])
        if isinstance(error, CkptxError):
            raise error from failed
        if isinstance(error, OSError):
            raise unwritable(directory, error) from failed
        raise Defect(f"{directory}: {type(error).__name__}: {error}; please report this") from failed


def _write_beside(model: nn.Module, output: HeldDirectory, beside: Path | None) -> None:
    if beside is None:
        with configs_as_given(model):
            output.write("config.json", [model.config.to_json_string().encode()])
        return
    for sidecar in look_around(beside, frozenset()).carried:
        output.write(sidecar.name, [read_small(beside / sidecar.name, _SIDECAR_BYTES)])
