"""A snapshot of the state that a rank saves: tensors by name, optimizer state, training state and the config.

A snapshot refers to the tensors of the run, or has copies of them on the CPU, so that training can continue while it is
written. The written bytes are identical.
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
from ckptx.runtime.checkpointing.training_state import ROOT, STEP, collect
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.activation_checkpointing.wrap import original_configs
from ckptx.runtime.parallel.distributed import all_gather_object, raise_on_all_ranks
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.storage.local import LocalSource

_MODEL, _OPTIMIZER = "model", "optim"
STATE, GROUPS = f"{_OPTIMIZER}.state", f"{_OPTIMIZER}.param_groups"
_SIDECAR_BYTES = 1 << 30


class Snapshot(NamedTuple):
    """The state that this rank saves.

    Attributes:
        tree: State dict for `dcp.save`.
        aliases: Name in the checkpoint -> the name whose bytes it shares; those of all ranks.
        files: Contents of config and tokenizer files by name; empty except on rank 0.
    """

    tree: dict[str, Any]
    aliases: Mapping[str, str]
    files: Mapping[str, bytes]


def take_snapshot(request: SaveRequest, *, copies: bool) -> Snapshot:
    """Take a snapshot; every rank calls it.

    Args:
        request: Model, optimizer and options of the save.
        copies: Copy every tensor, so that the run may change its own.
    """
    models = request.models
    with raise_on_all_ranks():
        keep = _copy if copies else _identity
        tree, own = _model_tree(Names.of(models), request.optimizer, request.layout, keep)
        files = _sidecars(models[0], request.beside) if dist.get_rank() == 0 else {}
    # Sorted by name: the order of an optimizer's state differs between a loaded and a trained one.
    aliases = dict(sorted({alias: stored for each in all_gather_object(own) for alias, stored in each.items()}.items()))
    if request.step is not None:
        tree[STEP] = request.step
    if collected := collect(request.training_state or {}, request.mesh):
        tree[ROOT] = collected
    return Snapshot(tree, aliases, files)


def _identity(value: Any) -> Any:
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, DTensorShards):
        return value.copy_to_cpu()
    if isinstance(value, Tensor):  # torch stores requires_grad
        return value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad)
    return deepcopy(value)


def _model_tree(
    names: Names, optimizer: Optimizer | None, layout: TensorParallelLayout | None, keep: Callable[[Any], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tree and aliases of a model and its optimizer."""
    aliases: dict[str, str] = {}

    def stored(full: str, value: Any, parameter: Any) -> Any:
        regions = local_regions_of(full, value, parameter, names, layout)
        return keep(DTensorShards(full, value, regions) if isinstance(value, DTensor) else value)

    tree: dict[str, Any] = {_MODEL: {}}
    for name, value in names.values.items():
        others = names.by_id[id(value)][1:]
        aliases.update({f"{_MODEL}.{each}": f"{_MODEL}.{name}" for each in others})
        tree[_MODEL][name] = stored(f"{_MODEL}.{name}", value, value)
    if optimizer is None:
        return tree, aliases
    flat: dict[str, Any] = {}
    for name, parameter, group in parameters_of(optimizer, names):
        others = names.of_parameter(parameter)[1:]
        for key, value in optimizer.state.get(parameter, {}).items():
            full = f"{STATE}.{name}.{key}"
            flat[full] = stored(full, value, parameter)
            aliases.update({f"{STATE}.{each}.{key}": full for each in others})
        for key in group.keys() - {"params"}:
            flat[f"{GROUPS}.{name}.{key}"] = keep(group[key])
            aliases.update({f"{GROUPS}.{each}.{key}": f"{GROUPS}.{name}.{key}" for each in others})
    tree[_OPTIMIZER] = {full.removeprefix(f"{_OPTIMIZER}."): flat[full] for full in sorted(flat)}
    return tree, aliases


def _sidecars(model: Any, beside: Path | None) -> dict[str, bytes]:
    if beside is None:
        with original_configs(model):
            return {"config.json": model.config.to_json_string().encode()}
    source = LocalSource(beside)
    return {
        each.name: source.read_small(each.name, _SIDECAR_BYTES) for each in list_sidecars(source, frozenset()).copied
    }


# ------------------------------------------------------------------------------------------ names


class Names(NamedTuple):
    """The tensors of a model, or of several stages of one, by name.

    Attributes:
        values: Each tensor once, under the name that is stored; also extra state of modules (`get_extra_state`).
        by_id: All names of each tensor by its id, the stored one first.
    """

    values: dict[str, Any]
    by_id: dict[int, list[str]]

    @classmethod
    def of(cls, models: Sequence[nn.Module]) -> Names:
        """Collect the state dicts of the models, which also makes FSDP reshard gathered parameters."""
        tied = {name for each in models for name in getattr(each, "all_tied_weights_keys", None) or ()}
        states = [each.state_dict(keep_vars=True) for each in models]
        found: dict[int, tuple[Any, list[str]]] = {}
        for full, value in (item for state in states for item in state.items()):
            found.setdefault(id(value), (value, []))[1].append(canonical_name(full))
        by_id = {key: sorted(names, key=lambda name: name in tied) for key, (_, names) in found.items()}
        return cls({by_id[key][0]: value for key, (value, _) in found.items()}, by_id)

    def of_parameter(self, parameter: Tensor) -> list[str]:
        """Return all names of a parameter.

        Raises:
            UsageError: The parameter is not in the model.
        """
        if id(parameter) not in self.by_id:
            raise UsageError(
                f"optimizer: a parameter of shape {list(parameter.shape)} is not in the model; create the optimizer "
                "from model.parameters() after the model is parallelized and loaded"
            )
        return self.by_id[id(parameter)]


def parameters_of(optimizer: Optimizer, names: Names) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield every parameter of an optimizer with the name that it is stored under, and its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names.of_parameter(parameter)[0], parameter, group


def local_regions_of(
    full: str, value: Any, parameter: Tensor, names: Names, layout: TensorParallelLayout | None
) -> Sequence[Region] | None:
    """Return the rectangles that TP left of a tensor; None if its own layout is sufficient.

    Raises:
        UnsupportedError: Optimizer state would be stored wrongly.
    """
    if isinstance(value, dict):
        raise UnsupportedError(f"{full}: nested optimizer state is not supported; train with another optimizer")
    if not isinstance(value, DTensor):
        if isinstance(value, Tensor) and value.dim() and isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{full}: is a plain tensor of shape {list(value.shape)}, expected a DTensor like its parameter, as "
                "only one rank's values would be saved; train with another optimizer"
            )
        return None
    known = map(layout.local_regions, names.of_parameter(parameter)) if layout is not None else ()
    found = next((each for each in known if each is not None), None)
    if found is None or value.shape == parameter.shape:
        return found
    if len(found) > 1:
        raise UnsupportedError(
            f"{full}: has shape {list(value.shape)}, its parameter {list(parameter.shape)} in fused groups, so the "
            "shard of this rank is unknown; train without tensor parallel"
        )
    return None
