"""The same model with fewer layers: a config that builds what is left when layers are taken out of some lists."""

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

_COUNTS = re.compile(r"layer|depth|block")  # in names of config keys that say how many layers there are
_USUAL = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")


@dataclass(frozen=True, slots=True)
class ShorteningPlan:
    """What of a model can be left out.

    Attributes:
        parameters: Of the whole model.
        architecture: Its class.
        counts: Layers of each list.
        axes: Repeats that are lengthened together: of every pipeline rank at most one.
        ranks: Of each axis, the pipeline rank of each repeat.
        stages: Where the layers of the pipeline lie; None without one.
        config: Of the whole model, as transformers writes it.
        homes: Of each list, the nested config and the key in it that say how many layers it has.
        kinds: Of the layers of each list.
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
        """Of each axis, the repeat of a pipeline rank."""
        return [
            next((each for each, owner in zip(axis, ranks, strict=True) if owner == rank), None)
            for axis, ranks in zip(self.axes, self.ranks, strict=True)
        ]

    def kept(self, extra: Sequence[int]) -> dict[str, list[int]]:
        """The layers of each list that stay.

        Args:
            extra: Of each axis, how many periods more than necessary.
        """
        out: dict[str, set[int]] = {path: set() for path in self.counts}
        for axis, number in zip(self.axes, extra, strict=True):
            for repeat in axis:
                out[repeat.path].update(repeat.left_out(number))
        return {path: [each for each in range(count) if each not in out[path]] for path, count in self.counts.items()}


def plan_of(task: Task, runs: int) -> ShorteningPlan | None:
    """What of the model of a task can be left out; None where nothing can.

    Args:
        task: With the whole model.
        runs: How many models with fewer layers will run in place of the whole one.

    Raises:
        InputError, UnsupportedError: The model cannot be built.
    """
    if task.recipe.model.trust_remote_code:
        return None  # its config goes with its code
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
        for number in range(stages.pp):
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
    """The pipeline stages of the model of a task.

    Raises:
        UnsupportedError, UsageError: It has no layers to split, or too few.
    """
    config: Any = model.config
    values = {**config.to_dict(), "architectures": config.architectures}
    architecture, layout = find_architecture(values), task.recipe.layout
    stacks = architecture.stacks(values) if architecture is not None else ()
    return StageMap(
        stacks, layout.pp * find_schedule(layout.schedule).stages, layout.pp_split, str(config.architectures[0])
    )


def shortened(task: Task, plan: ShorteningPlan, extra: Sequence[int], directory: Path) -> Task | None:
    """The task with a model that has fewer layers; None where no config builds it.

    Args:
        task: With the whole model.
        plan: What can be left out.
        extra: Of each axis, how many periods more than necessary stay.
        directory: Where the config is written to.
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
        return None  # the config says something of layers that are not there
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
            for number in range(plan.stages.pp)
        ]
        layout = structs.replace(layout, pp_split=",".join(map(str, counts)))
    return replace(task, source=directory, recipe=structs.replace(task.recipe, layout=layout))


def _home_of(config: Mapping[str, Any], path: str, count: int) -> tuple[str, str] | None:
    """The nested config and the key in it that say how long a list of layers is; None where several could."""
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
    """Lets a config, in place, say that a list has these layers alone."""
    name, key = home
    values = dict(config_parts(config))[name]
    for other, said in by_layer(values, count).items():
        values[other] = as_before(values[other], [said[each] for each in layers], count)
    values[key] = len(layers)


def _dtype_of(task: Task) -> Any:
    return getattr(torch, task.recipe.model.dtype)
