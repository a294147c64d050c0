"""A snapshot of the state that a rank saves: tensors by name, optimizer state, training state and the config.

A snapshot refers to the tensors of the run, or has copies of them on the CPU, so that training can continue while the
snapshot is written. Both write identical bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptx.catalog.region import Region
from ckptx.errors import UnsupportedError, UsageError
from ckptx.formats.sidecars import list_sidecars
from ckptx.runtime.checkpointing.save_planner import DTensorShards
from ckptx.runtime.checkpointing.save_request import SaveRequest
from ckptx.runtime.checkpointing.training_state import ROOT_KEY, STEP_KEY, collect_training_state
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.activation_checkpointing.wrap import use_cache_restored
from ckptx.runtime.parallel.distributed import all_gather_object, raise_on_all_ranks
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.storage.local import LocalSource

_MODEL_KEY, _OPTIMIZER_KEY = "model", "optim"
STATE_PREFIX, GROUPS_PREFIX = f"{_OPTIMIZER_KEY}.state", f"{_OPTIMIZER_KEY}.param_groups"
_MAX_SIDECAR_BYTES = 1 << 30  # maximum size of a config or tokenizer file, each of which is held in memory


class Snapshot(NamedTuple):
    """The state that this rank saves.

    Attributes:
        state_dict: State dict for `dcp.save`.
        aliases: Name in the checkpoint -> the name whose bytes it shares; those of all ranks.
        files: Contents of config and tokenizer files by name; empty except on rank 0.
    """

    state_dict: dict[str, Any]
    aliases: Mapping[str, str]
    files: Mapping[str, bytes]


def take_snapshot(request: SaveRequest, *, copy_tensors: bool) -> Snapshot:
    """Take a snapshot; every rank calls it.

    Args:
        request: Model, optimizer and options of the save.
        copy_tensors: Copy every tensor, so that the run may change its own.

    Raises:
        InputError, UnsupportedError, UsageError: See `save`.
    """
    models = request.models
    with raise_on_all_ranks():
        copy_value = _copy if copy_tensors else _identity
        state_dict, own_aliases = _build_state_dict(
            ModelState.from_models(models), request.optimizer, request.layout, copy_value
        )
        files = _read_sidecars(models[0], request.base) if dist.get_rank() == 0 else {}
    # Sorted by name: the order of an optimizer's state differs between a loaded and a trained one.
    aliases = dict(
        sorted({alias: stored for each in all_gather_object(own_aliases) for alias, stored in each.items()}.items())
    )
    if request.step is not None:
        state_dict[STEP_KEY] = request.step
    if extra_state := collect_training_state(request.training_state or {}, request.mesh):
        state_dict[ROOT_KEY] = extra_state
    return Snapshot(state_dict, aliases, files)


def _identity(value: Any) -> Any:
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, DTensorShards):
        return value.copy_to_cpu()
    if isinstance(value, Tensor):  # torch stores requires_grad
        return value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad)
    return deepcopy(value)


def _build_state_dict(
    model_state: ModelState,
    optimizer: Optimizer | None,
    layout: TensorParallelLayout | None,
    copy_value: Callable[[Any], Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the state dict of a model and its optimizer, and the aliases of its names."""
    aliases: dict[str, str] = {}

    def prepare_value(full_name: str, value: Any, parameter: Any) -> Any:
        regions = local_regions_of(full_name, value, parameter, model_state, layout)
        return copy_value(DTensorShards(full_name, value, regions) if isinstance(value, DTensor) else value)

    state_dict: dict[str, Any] = {_MODEL_KEY: {}}
    for name, value in model_state.values_by_name.items():
        other_names = model_state.names_by_id[id(value)][1:]
        aliases.update({f"{_MODEL_KEY}.{each}": f"{_MODEL_KEY}.{name}" for each in other_names})
        state_dict[_MODEL_KEY][name] = prepare_value(f"{_MODEL_KEY}.{name}", value, value)
    if optimizer is None:
        return state_dict, aliases
    optimizer_state: dict[str, Any] = {}
    for name, parameter, group in iter_optimizer_parameters(optimizer, model_state):
        other_names = model_state.parameter_names(parameter)[1:]
        for key, value in optimizer.state.get(parameter, {}).items():
            full_name = f"{STATE_PREFIX}.{name}.{key}"
            optimizer_state[full_name] = prepare_value(full_name, value, parameter)
            aliases.update({f"{STATE_PREFIX}.{each}.{key}": full_name for each in other_names})
        for key in group.keys() - {"params"}:
            optimizer_state[f"{GROUPS_PREFIX}.{name}.{key}"] = copy_value(group[key])
            aliases.update({f"{GROUPS_PREFIX}.{each}.{key}": f"{GROUPS_PREFIX}.{name}.{key}" for each in other_names})
    state_dict[_OPTIMIZER_KEY] = {
        full.removeprefix(f"{_OPTIMIZER_KEY}."): optimizer_state[full] for full in sorted(optimizer_state)
    }
    return state_dict, aliases


def _read_sidecars(model: Any, base: Path | None) -> dict[str, bytes]:
    """Return the config, tokenizer and similar files of `base`; without one, the config of the model."""
    if base is None:
        with use_cache_restored(model):
            return {"config.json": model.config.to_json_string().encode()}
    source = LocalSource(base)
    return {
        each.name: source.read_small(each.name, _MAX_SIDECAR_BYTES)
        for each in list_sidecars(source, frozenset()).copied
    }


# ------------------------------------------------------------------------------------------ names


class ModelState(NamedTuple):
    """The tensors of a model, or of several stages of one, by name.

    Attributes:
        values_by_name: Each tensor once, under the name that is stored; also extra state of modules
            (`get_extra_state`).
        names_by_id: All names of each tensor by its id, the stored one first.
    """

    values_by_name: dict[str, Any]
    names_by_id: dict[int, list[str]]

    @classmethod
    def from_models(cls, models: Sequence[nn.Module]) -> ModelState:
        """Collect the state dicts of the models, which also makes FSDP reshard gathered parameters."""
        tied = {name for each in models for name in getattr(each, "all_tied_weights_keys", None) or ()}
        states = [each.state_dict(keep_vars=True) for each in models]
        values_by_id: dict[int, tuple[Any, list[str]]] = {}
        for full_name, value in (item for state in states for item in state.items()):
            values_by_id.setdefault(id(value), (value, []))[1].append(canonical_name(full_name))
        names_by_id = {key: sorted(names, key=lambda name: name in tied) for key, (_, names) in values_by_id.items()}
        return cls({names_by_id[key][0]: value for key, (value, _) in values_by_id.items()}, names_by_id)

    def parameter_names(self, parameter: Tensor) -> list[str]:
        """Return all names of a parameter.

        Raises:
            UsageError: The parameter is not in the model.
        """
        if id(parameter) not in self.names_by_id:
            raise UsageError(
                f"optimizer: a parameter of shape {list(parameter.shape)} is not in the model; create the optimizer "
                "from model.parameters() after the model is parallelized and loaded"
            )
        return self.names_by_id[id(parameter)]


def iter_optimizer_parameters(
    optimizer: Optimizer, model_state: ModelState
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield every parameter of an optimizer with the name that it is stored under, and its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield model_state.parameter_names(parameter)[0], parameter, group


def local_regions_of(
    full_name: str, value: Any, parameter: Tensor, model_state: ModelState, layout: TensorParallelLayout | None
) -> Sequence[Region] | None:
    """Return the regions of a whole tensor that TP left on this rank; None if its own placements show them.

    Args:
        full_name: Name of the value in the checkpoint, for error messages.
        value: The parameter or buffer itself, or a value of its optimizer state. None is returned for one that is not a
            DTensor.
        parameter: The parameter or buffer.
        model_state: Names of `parameter`.
        layout: TP layout with the regions of parameters; None without TP.

    Raises:
        UnsupportedError: The shard of some optimizer state is unknown.
    """
    if isinstance(value, dict):
        raise UnsupportedError(f"{full_name}: nested optimizer state is not supported; train with another optimizer")
    if not isinstance(value, DTensor):
        if isinstance(value, Tensor) and value.dim() and isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{full_name}: is a plain tensor of shape {list(value.shape)}, expected a DTensor like its parameter, "
                "as only one rank's values would be saved; train with another optimizer"
            )
        return None
    candidates = map(layout.local_regions, model_state.parameter_names(parameter)) if layout is not None else ()
    regions = next((each for each in candidates if each is not None), None)
    if regions is None or value.shape == parameter.shape:
        return regions
    if len(regions) > 1:
        raise UnsupportedError(
            f"{full_name}: has shape {list(value.shape)}, its parameter {list(parameter.shape)} in fused groups, so "
            "the shard of this rank is unknown; train without tensor parallelism"
        )
    return None
