"""What a rank saves, at one moment of its run: tensors by name, optimizer state, the rest of the run, and the config.

A snapshot refers to the tensors of the run, or has copies of them on the CPU, so that the run may go on while it is
written. What is written is the same, to the byte.
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
from ckptx.formats.sidecars import look_around
from ckptx.runtime.checkpointing.save_planner import DTensorShards
from ckptx.runtime.checkpointing.save_request import SaveRequest
from ckptx.runtime.checkpointing.training_state import ROOT, STEP, collect
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.activation_checkpointing.wrap import configs_as_given
from ckptx.runtime.parallel.distributed import all_gather_object, raise_on_all_ranks
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.storage.local import LocalSource

_MODEL, _OPTIMIZER = "model", "optim"
STATE, GROUPS = f"{_OPTIMIZER}.state", f"{_OPTIMIZER}.param_groups"
_SIDECAR_BYTES = 1 << 30


class Snapshot(NamedTuple):
    """What this rank saves.

    Attributes:
        tree: What `dcp.save` gets.
        aliases: Name in the checkpoint -> the name whose bytes it shares; of all ranks.
        files: What lies beside it, by name; on rank 0 alone.
    """

    tree: dict[str, Any]
    aliases: Mapping[str, str]
    files: Mapping[str, bytes]


def take(request: SaveRequest, *, copies: bool) -> Snapshot:
    """Take a snapshot; every rank calls it.

    Args:
        request: The model and its optimizer, and what is saved beside them.
        copies: True copies every tensor, so that the run may change its own.
    """
    models = request.models
    with raise_on_all_ranks():
        keep = _copied if copies else _as_it_is
        tree, own = _of_model(Names.of(models), request.optimizer, request.layout, keep)
        files = _beside(models[0], request.beside) if dist.get_rank() == 0 else {}
    # In the order of names: that of an optimizer's state is another one when it was loaded than when it was trained.
    aliases = dict(sorted({alias: stored for each in all_gather_object(own) for alias, stored in each.items()}.items()))
    if request.step is not None:
        tree[STEP] = request.step
    if collected := collect(request.training_state or {}, request.mesh):
        tree[ROOT] = collected
    return Snapshot(tree, aliases, files)


def _as_it_is(value: Any) -> Any:
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, DTensorShards):
        return value.copied()
    if isinstance(value, Tensor):  # torch stores whether it has a gradient
        return value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad)
    return deepcopy(value)


def _of_model(
    names: Names, optimizer: Optimizer | None, layout: TensorParallelLayout | None, keep: Callable[[Any], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tree and aliases of a model and its optimizer."""
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


def _beside(model: Any, beside: Path | None) -> dict[str, bytes]:
    if beside is None:
        with configs_as_given(model):
            return {"config.json": model.config.to_json_string().encode()}
    source = LocalSource(beside)
    return {
        each.name: source.read_small(each.name, _SIDECAR_BYTES) for each in look_around(source, frozenset()).carried
    }


# ------------------------------------------------------------------------------------------ names


class Names(NamedTuple):
    """The tensors of a model, or of several stages of one, by name.

    Attributes:
        values: Each once, under the name that is stored; what modules say of themselves (`get_extra_state`), too.
        by_id: All names of each, that one first.
    """

    values: dict[str, Any]
    by_id: dict[int, list[str]]

    @classmethod
    def of(cls, models: Sequence[nn.Module]) -> Names:
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


def parameters_of(optimizer: Optimizer, names: Names) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Every parameter of an optimizer with the name it is stored under, and its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names.of_parameter(parameter)[0], parameter, group


def local_regions_of(
    full: str, value: Any, parameter: Tensor, names: Names, layout: TensorParallelLayout | None
) -> Sequence[Region] | None:
    """The rectangles that TP left of a tensor; None for one that says itself what it holds.

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
        return None
    known = map(layout.local_regions, names.of_parameter(parameter)) if layout is not None else ()
    found = next((each for each in known if each is not None), None)
    if found is None or value.shape == parameter.shape:
        return found
    if len(found) > 1:
        raise UnsupportedError(
            f"{full}: has shape {list(value.shape)}, its parameter {list(parameter.shape)} in fused groups; nobody "
            "can say which part this rank holds, so train without tensor parallel"
        )
    return None
