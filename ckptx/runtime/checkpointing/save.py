"""Saves a training run from all ranks, like stock `dcp.save`, and loads its optimizer.

    model.<name>                       parameters and persistent buffers, by their names without wrappers
    optim.state.<name>.exp_avg         torch's flattened form (`flatten_optimizer_state_dict`): every rank has entries
    optim.param_groups.<name>.lr       for its own parameters only, so that pipeline stages form one checkpoint
    training_state.<name>              scheduler, random numbers, position in the data: see `training_state`
    step                               number of the training step

Tied names share the bytes of the parameter in the checkpoint, and those of its optimizer state.
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

from ckptx.errors import CkptxError, InputError, InternalError, UsageError
from ckptx.publishing.overwrite_checks import refuse_unrelated_files
from ckptx.publishing.staging import Staging
from ckptx.runtime.checkpointing.save_planner import AliasWriter, SavePlanner
from ckptx.runtime.checkpointing.save_request import SaveOptions, SaveRequest
from ckptx.runtime.checkpointing.snapshot import (
    GROUPS_PREFIX,
    STATE_PREFIX,
    ModelState,
    Snapshot,
    iter_optimizer_parameters,
    local_regions_of,
    take_snapshot,
)
from ckptx.runtime.checkpointing.stored_state import StoredState, open_state
from ckptx.runtime.parallel.distributed import raise_on_all_ranks
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.storage.files import write_error
from ckptx.storage.staging_paths import staging_paths

if TYPE_CHECKING:  # Python 3.10 has it only there
    from typing_extensions import Unpack


def save(
    model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | None, path: Path, **options: Unpack[SaveOptions]
) -> None:
    """Write a DCP that stock torch and ckptx read. Every rank calls it, within a process group.

    The checkpoint appears at `path` atomically, when all of it is on disk; a save that fails before that leaves `path`
    as it was.

    Args:
        model: The model, or the pipeline stages of this rank.
        optimizer: Its optimizer; None saves no optimizer state.
        path: Directory to write.
        **options: `layout`, `step`, `base`, `training_state`, `mesh`, `overwrite` and `on_published`; see
            `SaveRequest`.

    Raises:
        InputError: `base` cannot be read.
        OutputError: `path` exists, or cannot be written.
        SpaceError: The disk is full.
        UnsupportedError: The shard of some optimizer state is unknown, or training state could not be read again.
        UsageError: There is no process group, the optimizer belongs to another model, or training state differs between
            ranks.
    """
    if not dist.is_initialized():
        raise UsageError("save: requires a process group; use distributed.process_group")
    request = SaveRequest(model, optimizer, path, **options)
    publish(
        take_snapshot(request, copy_tensors=False), path, overwrite=request.overwrite, on_published=request.on_published
    )


def load_optimizer(
    optimizer: Optimizer,
    model: nn.Module | Sequence[nn.Module],
    path: Path,
    *,
    layout: TensorParallelLayout | None = None,
) -> None:
    """Fill an optimizer from a checkpoint of `save` on any mesh. Each rank reads its own shards independently.

    Args:
        optimizer: Optimizer of this model, with the same parameter groups. It need not have taken a step; state of a
            parameter that has none in the checkpoint is removed.
        model: Model with any sharding; on a rank with several stages, all of them.
        path: The checkpoint.
        layout: See `SaveRequest`.

    Raises:
        InputError: The checkpoint has no settings (`optim.param_groups`) for a parameter of the optimizer.
        UnsupportedError: The checkpoint is not a DCP, or the shard of some optimizer state is unknown.
        UsageError: The optimizer belongs to another model.
    """
    model_state = ModelState.from_models([model] if isinstance(model, nn.Module) else model)
    loaded_states: list[tuple[Tensor, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    with open_state(path) as stored:
        keys_by_parent: dict[str, list[str]] = {}
        for full_name in (*stored.tensors, *stored.objects):
            parent, _, key = full_name.rpartition(".")
            keys_by_parent.setdefault(parent, []).append(key)
        for name, parameter, group in iter_optimizer_parameters(optimizer, model_state):
            group_prefix, state_prefix = f"{GROUPS_PREFIX}.{name}", f"{STATE_PREFIX}.{name}"
            if group_prefix not in keys_by_parent:
                raise InputError(
                    f'{path}: has no optimizer state for "{name}"; use a checkpoint that was saved with an optimizer'
                )
            settings = {key: _read_value(stored, f"{group_prefix}.{key}") for key in keys_by_parent[group_prefix]}
            state = {
                key: _read_state(stored, f"{state_prefix}.{key}", parameter, group, model_state, layout)
                for key in keys_by_parent.get(state_prefix, ())
            }
            loaded_states.append((parameter, group, settings, state))
    for parameter, group, settings, state in loaded_states:
        group.update(settings)
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def _read_value(stored: StoredState, full_name: str) -> Any:
    """Return a plain value (see `stored_state`), or a tensor that is whole on every rank, such as a learning rate."""
    if full_name in stored.objects:
        return stored.read_value(full_name)
    entry = stored.tensors[full_name]
    tensor = torch.zeros(entry.shape, dtype=getattr(torch, str(entry.dtype.torch_name)))
    stored.fill(full_name, tensor)
    return tensor


def _read_state(
    stored: StoredState,
    full_name: str,
    parameter: Tensor,
    group: Mapping[str, Any],
    model_state: ModelState,
    layout: TensorParallelLayout | None,
) -> Any:
    """Return one value of a parameter's optimizer state.

    A tensor with the shape of the parameter is sharded like it; any other tensor is whole on every rank.
    """
    if full_name in stored.objects:
        return stored.read_value(full_name)
    key, entry = full_name.rpartition(".")[2], stored.tensors[full_name]
    dtype = getattr(torch, str(entry.dtype.torch_name))
    if entry.shape == tuple(parameter.shape):
        tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    else:
        # As in torch.optim: steps are counted on the CPU, unless a kernel counts them.
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        tensor = torch.zeros(entry.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    stored.fill(full_name, tensor, local_regions_of(full_name, tensor, parameter, model_state, layout))
    return tensor


# ------------------------------------------------------------------------------------------ writing


def publish(
    snapshot: Snapshot,
    path: Path,
    *,
    overwrite: bool = False,
    on_published: Callable[[], object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the snapshots of all ranks to a staging directory, and then move it to `path`; every rank calls it.

    Args:
        snapshot: Snapshot of this rank.
        path: See `SaveRequest`.
        overwrite: See `SaveRequest`.
        on_published: See `SaveRequest`.
        group: Group of all ranks; None is the default one, which only the main thread may use.

    Raises:
        OutputError, SpaceError: See `save`.
        InternalError: torch refuses the state dict.
    """
    with ExitStack() as stack:
        staging = None
        with raise_on_all_ranks(group):
            if dist.get_rank() == 0:
                check_replaceable = partial(refuse_unrelated_files, backup=staging_paths(path)[0])
                staging = stack.enter_context(Staging(path, overwrite=overwrite, check_replaceable=check_replaceable))
                staging.begin(b"", resume=False)
        with raise_on_all_ranks(group):
            _write_files(snapshot, staging_paths(path)[0], group)
        with raise_on_all_ranks(group):
            if staging is not None:
                for name, data in snapshot.files.items():
                    staging.output.write(name, [data])
                staging.publish()
                if on_published is not None:
                    on_published()


def _write_files(snapshot: Snapshot, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write the `.distcp` file of this rank, and on rank 0 `.metadata`; every rank calls it."""
    writer = AliasWriter(directory, snapshot.aliases)
    try:
        dcp.save(snapshot.state_dict, storage_writer=writer, planner=SavePlanner(), process_group=group)
    except CheckpointException as failure:  # not an Exception: handlers that clean up would miss it
        errors = [error for error, _ in failure.failures.values()]
        error = next((each for each in errors if isinstance(each, (CkptxError, OSError))), errors[0])
        if isinstance(error, CkptxError):
            raise error from failure
        if isinstance(error, OSError):
            raise write_error(directory, error) from failure
        raise InternalError(f"{directory}: {type(error).__name__}: {error}; please report this") from failure
