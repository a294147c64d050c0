"""Saves a training run from all ranks, as stock `dcp.save` does, and loads its optimizer again.

    model.<name>                       parameters and persistent buffers, by their names without wrappers
    optim.state.<name>.exp_avg         torch's flattened form (`flatten_optimizer_state_dict`): every rank speaks of its
    optim.param_groups.<name>.lr       own parameters alone, so that pipeline stages add up to one checkpoint
    training_state.<name>              scheduler, random numbers, place in the data: see `training_state`
    step                               a number

Names that share a parameter share its bytes in the checkpoint, and those of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from ckptx.errors import CkptxError, Defect, InputError, UsageError
from ckptx.publishing.replacing import refuse_foreign
from ckptx.publishing.staging import Staging
from ckptx.runtime.checkpointing.save_planner import AliasWriter, SavePlanner
from ckptx.runtime.checkpointing.save_request import SaveOptions, SaveRequest
from ckptx.runtime.checkpointing.snapshot import GROUPS, STATE, Names, Snapshot, local_regions_of, parameters_of, take
from ckptx.runtime.checkpointing.stored_state import StoredState, open_state
from ckptx.runtime.parallel.distributed import raise_on_all_ranks
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.storage.files import unwritable
from ckptx.storage.staged import staged

if TYPE_CHECKING:  # Python 3.10 has it there alone
    from typing_extensions import Unpack


def save(
    model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | None, path: Path, **options: Unpack[SaveOptions]
) -> None:
    """Writes a DCP that stock torch and ckptx read. Every rank calls it, within a process group.

    It appears under its name in one step, when all of it is on the disk; a run that fails leaves nothing.

    Args:
        model: The model, or the pipeline stages of this rank.
        optimizer: Its optimizer; None saves the model alone.
        path: The directory to write.
        **options: `layout`, `step`, `beside`, `training_state`, `mesh`, `overwrite` and `then`, see `SaveRequest`.

    Raises:
        OutputError: `path` is not free, or cannot be written.
        SpaceError: The disk is full.
        UnsupportedError: There is optimizer state of which nobody can say where it belongs, or training state that
            could not be read again.
        UsageError: There is no process group, or the optimizer is of another model, or ranks differ in training state.
    """
    if not dist.is_initialized():
        raise UsageError("save: called outside of a process group, needed one; use distributed.process_group")
    request = SaveRequest(model, optimizer, path, **options)
    publish(take(request, copies=False), path, overwrite=request.overwrite, then=request.then)


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
    names = Names.of([model] if isinstance(model, nn.Module) else model)
    filled: list[tuple[Tensor, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    with open_state(path) as stored:
        keys: dict[str, list[str]] = {}
        for full in (*stored.tensors, *stored.objects):
            parent, _, key = full.rpartition(".")
            keys.setdefault(parent, []).append(key)
        for name, parameter, group in parameters_of(optimizer, names):
            of_group, of_state = f"{GROUPS}.{name}", f"{STATE}.{name}"
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
    names: Names,
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
    stored.fill(full, tensor, local_regions_of(full, tensor, parameter, names, layout))
    return tensor


# ------------------------------------------------------------------------------------------ writing


def publish(
    snapshot: Snapshot,
    path: Path,
    *,
    overwrite: bool = False,
    then: Callable[[], object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes what every rank has taken, and gives it its name.

    Args:
        snapshot: That of this rank.
        path: As in `save`.
        overwrite: As in `save`.
        then: As in `save`.
        group: Of all ranks; None is the default one, which no thread but the main one may use.

    Raises:
        OutputError, SpaceError: As in `save`.
        Defect: torch refuses what it was given.
    """
    with ExitStack() as stack:
        staging = None
        with raise_on_all_ranks(group):
            if dist.get_rank() == 0:
                may_replace = partial(refuse_foreign, kept_in=staged(path)[0])
                staging = stack.enter_context(Staging(path, overwrite=overwrite, may_replace=may_replace))
                staging.begin(b"", resume=False)
        with raise_on_all_ranks(group):
            _write(snapshot, staged(path)[0], group)
        with raise_on_all_ranks(group):
            if staging is not None:
                for name, data in snapshot.files.items():
                    staging.output.write(name, [data])
                staging.publish()
                if then is not None:
                    then()


def _write(snapshot: Snapshot, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Every rank writes its file, and rank 0 the metadata."""
    writer = AliasWriter(directory, snapshot.aliases)
    try:
        dcp.save(snapshot.tree, storage_writer=writer, planner=SavePlanner(), process_group=group)
    except CheckpointException as failed:  # no Exception: it would pass by everybody who cleans up
        errors = [error for error, _ in failed.failures.values()]
        error = next((each for each in errors if isinstance(each, (CkptxError, OSError))), errors[0])
        if isinstance(error, CkptxError):
            raise error from failed
        if isinstance(error, OSError):
            raise unwritable(directory, error) from failed
        raise Defect(f"{directory}: {type(error).__name__}: {error}; please report this") from failed
