"""Build the same model with fewer layers, from a config that describes the remaining layers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from ckptx.architecture.find import find_architecture
from ckptx.errors import CkptxError
from ckptx.layout.stages import StageMap
from ckptx.runtime.forecasting.repeated_layers import (
    RepeatedLayers,
    as_before,
    by_layer,
    config_parts,
    layer_kinds,
    lists_of_layers,
    repeat_in,
)
from ckptx.runtime.forecasting.task import Task
from ckptx.runtime.model.build import build_model
from ckptx.runtime.parallel.pipeline.schedules import find_schedule

_COUNTS = re.compile(r"layer|depth|block")  # names of config keys with a number of layers
_USUAL = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")


@dataclass(frozen=True, slots=True)
class ShorteningPlan:
    """Layers of a model that can be left out.

    Attributes:
        parameters: Number of parameters of the whole model.
        architecture: Name of the model class.
        counts: Number of layers of each list.
        axes: Groups of repeats that are lengthened together; each has at most one repeat per pipeline rank.
        ranks: For each axis, the pipeline rank of each repeat.
        stages: Assignment of layers to stages; None without a pipeline.
        config: Config of the whole model, from `to_dict()`.
        homes: For each list, the nested config and its key with the number of layers.
        kinds: Descriptions of the layers of each list.
    """

    parameters: int
    architecture: str
    counts: Mapping[str, int]
    axes: tuple[tuple[RepeatedLayers, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    stages: StageMap | None
    config: Mapping[str, Any]
    homes: Mapping[str, tuple[str, str]]
    kinds: Mapping[str, Sequence[Hashable]]

    def of_rank(self, rank: int) -> list[RepeatedLayers | None]:
        """Return the repeat of a pipeline rank on each axis; None where it has none."""
        return [
            next((each for each, owner in zip(axis, ranks, strict=True) if owner == rank), None)
            for axis, ranks in zip(self.axes, self.ranks, strict=True)
        ]

    def kept(self, extra: Sequence[int]) -> dict[str, list[int]]:
        """Return the layers that remain of each list.

        Args:
            extra: For each axis, the number of removable periods that stay.
        """
        out: dict[str, set[int]] = {path: set() for path in self.counts}
        for axis, number in zip(self.axes, extra, strict=True):
            for repeat in axis:
                out[repeat.path].update(repeat.left_out(number))
        return {path: [each for each in range(count) if each not in out[path]] for path, count in self.counts.items()}


def plan_of(task: Task, runs: int) -> ShorteningPlan | None:
    """Return the layers of a model that can be left out, or None if there are none.

    Args:
        task: Task with the whole model.
        runs: Number of models with fewer layers that will run.

    Raises:
        InputError, UnsupportedError: The model cannot be built.
    """
    if task.recipe.model.trust_remote_code:
        return None  # its custom code may depend on the config
    model = build_model(task.source, dtype=_dtype_of(task))
    values = {**model.config.to_dict(), "architectures": model.config.architectures}
    counts = {each.name: len(each.module) for each in lists_of_layers(model)}
    homes = {path: home for path, count in counts.items() if (home := _home_of(values, path, count)) is not None}
    kinds = {
        path: each
        for path, each in layer_kinds(model, {path: part for path, (part, _) in homes.items()}).items()
        if path in homes
    }
    layout = task.recipe.layout
    stages, spans = None, {path: [(0, 0, len(each))] for path, each in kinds.items()}
    if layout.pp > 1:
        schedule, stages = find_schedule(layout.schedule), stages_of_model(model, task)
        for stack in stages.stacks:
            spans[stack.path] = []
        for number in range(stages.count):
            for path, first, stop in stages.layers_of(number):
                spans[path].append((schedule.rank_of(number, layout.pp), first, stop))
    axes: dict[tuple[str, int], list[tuple[RepeatedLayers, int]]] = {}
    for path, each in kinds.items():
        of_rank: dict[int, int] = {}
        for rank, first, stop in spans[path]:
            repeat = repeat_in(path, each, first, stop, runs)
            if repeat is not None:
                turn = of_rank[rank] = of_rank.get(rank, -1) + 1
                axes.setdefault((path, turn), []).append((repeat, rank))
    if not axes:
        return None
    return ShorteningPlan(
        parameters=sum(each.numel() for each in model.parameters()),
        architecture=str(model.config.architectures[0]),
        counts={path: len(each) for path, each in kinds.items()},
        axes=tuple(tuple(repeat for repeat, _ in axis) for axis in axes.values()),
        ranks=tuple(tuple(rank for _, rank in axis) for axis in axes.values()),
        stages=stages,
        config=values,
        homes=homes,
        kinds=kinds,
    )


def stages_of_model(model: nn.Module, task: Task) -> StageMap:
    """Return the pipeline stages of the model of a task.

    Raises:
        UnsupportedError, UsageError: The model has no layers to split, or too few.
    """
    config: Any = model.config
    values = {**config.to_dict(), "architectures": config.architectures}
    architecture, layout = find_architecture(values), task.recipe.layout
    stacks = architecture.stacks(values) if architecture is not None else ()
    return StageMap(
        stacks, layout.pp * find_schedule(layout.schedule).stages, layout.pp_split, str(config.architectures[0])
    )


def shortened(task: Task, plan: ShorteningPlan, extra: Sequence[int], directory: Path) -> Task | None:
    """Return the task with a model of fewer layers, or None if no config builds it.

    Args:
        task: Task with the whole model.
        plan: Layers that can be left out.
        extra: For each axis, the number of removable periods that stay.
        directory: Directory to write the config to.
    """
    kept = plan.kept(extra)
    expected = {path: [plan.kinds[path][each] for each in layers] for path, layers in kept.items()}
    values = copy.deepcopy(dict(plan.config))
    for path, layers in kept.items():
        if len(layers) < plan.counts[path]:
            _shorten(values, plan.homes[path], plan.counts[path], layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values, default=str), encoding="utf-8")
    try:
        model = build_model(directory, dtype=_dtype_of(task))
    except CkptxError:
        return None  # the config refers to layers that do not exist
    found = layer_kinds(model, {path: part for path, (part, _) in plan.homes.items()})
    if {path: found.get(path) for path in expected} != expected:
        return None
    layout = task.recipe.layout
    if plan.stages is not None:
        counts = [
            sum(
                first <= each < stop
                for path, first, stop in plan.stages.layers_of(number)
                for each in kept.get(path, range(first, stop))
            )
            for number in range(plan.stages.count)
        ]
        layout = structs.replace(layout, pp_split=",".join(map(str, counts)))
    return replace(task, source=directory, recipe=structs.replace(task.recipe, layout=layout))


def _home_of(config: Mapping[str, Any], path: str, count: int) -> tuple[str, str] | None:
    """Return the nested config and its key with the length of a list of layers; None if it is ambiguous."""
    found = {
        name: [key for key, value in part.items() if type(value) is int and value == count and _COUNTS.search(key)]
        for name, part in config_parts(config)
    }
    found = {name: keys for name, keys in found.items() if keys}
    about = {name: keys for name, keys in found.items() if name and name.rpartition(".")[2].split("_")[0] in path}
    named = about or found
    if len(named) != 1:
        return None
    ((name, keys),) = named.items()
    usual = [each for each in _USUAL if each in keys]
    return (name, usual[0]) if usual else (name, keys[0]) if len(keys) == 1 else None


def _shorten(config: Mapping[str, Any], home: tuple[str, str], count: int, layers: Sequence[int]) -> None:
    """Edit a config in place so that a list has these layers only."""
    name, key = home
    values = dict(config_parts(config))[name]
    for other, by_number in by_layer(values, count).items():
        values[other] = as_before(values[other], [by_number[each] for each in layers], count)
    values[key] = len(layers)


def _dtype_of(task: Task) -> Any:
    return getattr(torch, task.recipe.model.dtype)
