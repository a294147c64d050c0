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

from ckptx.architecture.lookup import find_architecture
from ckptx.errors import CkptxError
from ckptx.layout.stages import StageMap
from ckptx.model_view.sharder import read_plan
from ckptx.runtime.forecasting.repeated_layers import (
    RepeatedLayers,
    collect_per_layer_values,
    describe_layers,
    find_repeat,
    iter_config_dicts,
    iter_layer_lists,
    to_config_form,
)
from ckptx.runtime.forecasting.task import ForecastTask
from ckptx.runtime.model.build import build_model
from ckptx.runtime.parallel.pipeline.schedules import find_schedule

_LAYER_COUNT_KEYS = re.compile(r"layer|depth|block")  # names of config keys with a number of layers
_USUAL_COUNT_KEYS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
)


@dataclass(frozen=True, slots=True)
class ShorteningPlan:
    """Layers of a model that can be left out.

    Attributes:
        parameter_count: Number of parameters of the whole model.
        architecture: Name of the model class.
        layer_counts: Path of a list of layers -> its number of layers.
        axes: Groups of repeats (`RepeatedLayers`: layers of one list and one stage) that get the same number of
            periods; each has at most one repeat per pipeline rank.
        repeat_ranks: For each axis, the pipeline rank of each repeat.
        stages: Assignment of layers to stages; None without a pipeline.
        config: Config of the whole model, from `to_dict()`.
        count_keys: Path of a list -> (nested config, as named by `iter_config_dicts`; its key with the number of
            layers).
        layer_descriptions: Path of a list -> descriptions of its layers; see `describe_layers`.
    """

    parameter_count: int
    architecture: str
    layer_counts: Mapping[str, int]
    axes: tuple[tuple[RepeatedLayers, ...], ...]
    repeat_ranks: tuple[tuple[int, ...], ...]
    stages: StageMap | None
    config: Mapping[str, Any]
    count_keys: Mapping[str, tuple[str, str]]
    layer_descriptions: Mapping[str, Sequence[Hashable]]

    def repeats_of_rank(self, rank: int) -> list[RepeatedLayers | None]:
        """Return the repeat of a pipeline rank on each axis; None where it has none."""
        return [
            next((each for each, owner in zip(axis, ranks, strict=True) if owner == rank), None)
            for axis, ranks in zip(self.axes, self.repeat_ranks, strict=True)
        ]

    def remaining_layers(self, extra_periods: Sequence[int]) -> dict[str, list[int]]:
        """Return path of a list -> numbers in the whole model of the layers that remain.

        Args:
            extra_periods: For each axis, the number of removable periods that stay.
        """
        removed: dict[str, set[int]] = {path: set() for path in self.layer_counts}
        for axis, number in zip(self.axes, extra_periods, strict=True):
            for repeat in axis:
                removed[repeat.path].update(repeat.removed_layers(number))
        return {
            path: [each for each in range(count) if each not in removed[path]]
            for path, count in self.layer_counts.items()
        }


def plan_shortening(task: ForecastTask, model_count: int) -> ShorteningPlan | None:
    """Return the layers of a model that can be left out, or None if there are none, or if this cannot be known.

    Args:
        task: Task with the whole model.
        model_count: Number of models with fewer layers that will run.

    Raises:
        InputError, UnsupportedError: The model cannot be built.
    """
    if task.recipe.model.trust_remote_code:
        return None  # its custom code may depend on the config
    tp_plan = task.recipe.layout.tp_plan
    if tp_plan is not None and any(part.isdecimal() for pattern in read_plan(tp_plan) for part in pattern.split(".")):
        return None  # the plan has rules for single layers, by their numbers in the whole model
    model = build_model(task.source, dtype=_model_dtype(task))
    config = {**model.config.to_dict(), "architectures": model.config.architectures}
    counts = {each.name: len(each.module) for each in iter_layer_lists(model)}
    count_keys = {
        path: count_key
        for path, count in counts.items()
        if (count_key := _find_count_key(config, path, count)) is not None
    }
    descriptions = {
        path: each
        for path, each in describe_layers(model, {path: part for path, (part, _) in count_keys.items()}).items()
        if path in count_keys
    }
    layout = task.recipe.layout
    # Path of a list -> (pipeline rank, first layer, end) of its part in each stage.
    stages, spans = None, {path: [(0, 0, len(each))] for path, each in descriptions.items()}
    if layout.pp > 1:
        schedule, stages = find_schedule(layout.schedule), assign_stages(model, task)
        for stack in stages.stacks:
            spans[stack.path] = []
        for number in range(stages.count):
            for path, first, stop in stages.layers_of(number):
                spans[path].append((schedule.rank_of(number, layout.pp), first, stop))
    axes: dict[tuple[str, int], list[tuple[RepeatedLayers, int]]] = {}
    for path, each in descriptions.items():
        last_indices: dict[int, int] = {}  # pipeline rank -> index of its last repeat in this list
        for rank, first, stop in spans[path]:
            repeat = find_repeat(path, each, first, stop, model_count)
            if repeat is not None:
                index = last_indices[rank] = last_indices.get(rank, -1) + 1
                axes.setdefault((path, index), []).append((repeat, rank))
    if not axes:
        return None
    return ShorteningPlan(
        parameter_count=sum(each.numel() for each in model.parameters()),
        architecture=str(model.config.architectures[0]),
        layer_counts={path: len(each) for path, each in descriptions.items()},
        axes=tuple(tuple(repeat for repeat, _ in axis) for axis in axes.values()),
        repeat_ranks=tuple(tuple(rank for _, rank in axis) for axis in axes.values()),
        stages=stages,
        config=config,
        count_keys=count_keys,
        layer_descriptions=descriptions,
    )


def assign_stages(model: nn.Module, task: ForecastTask) -> StageMap:
    """Return the pipeline stages of the model of a task.

    Raises:
        UnsupportedError, UsageError: The layers of the model are unknown, or too few for the stages.
    """
    config: Any = model.config
    config_dict = {**config.to_dict(), "architectures": config.architectures}
    is_trusted, layout = task.recipe.model.trust_remote_code, task.recipe.layout
    code_directory = task.source if is_trusted else None
    architecture = find_architecture(config_dict, config_dir=code_directory, trust_remote_code=is_trusted)
    stacks = architecture.stacks(config_dict) if architecture is not None else ()
    return StageMap(
        stacks,
        layout.pp * find_schedule(layout.schedule).stages_per_rank,
        layout.pp_split,
        str(config.architectures[0]),
    )


def shorten(
    task: ForecastTask, plan: ShorteningPlan, extra_periods: Sequence[int], directory: Path
) -> ForecastTask | None:
    """Return the task with a model of fewer layers, or None if no config gives exactly the layers that remain.

    Args:
        task: Task with the whole model.
        plan: Layers that can be left out.
        extra_periods: For each axis, the number of removable periods that stay.
        directory: Directory to write the config to.
    """
    remaining_layers = plan.remaining_layers(extra_periods)
    expected = {
        path: [plan.layer_descriptions[path][each] for each in layers] for path, layers in remaining_layers.items()
    }
    config = copy.deepcopy(dict(plan.config))
    for path, layers in remaining_layers.items():
        if len(layers) < plan.layer_counts[path]:
            _shorten_config(config, plan.count_keys[path], plan.layer_counts[path], layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    try:
        model = build_model(directory, dtype=_model_dtype(task))
    except CkptxError:
        return None  # the config refers to layers that do not exist
    descriptions = describe_layers(model, {path: part for path, (part, _) in plan.count_keys.items()})
    if {path: descriptions.get(path) for path in expected} != expected:
        return None
    layout = task.recipe.layout
    if plan.stages is not None:  # keep each remaining layer on its stage
        counts = [
            sum(
                first <= each < stop
                for path, first, stop in plan.stages.layers_of(number)
                for each in remaining_layers.get(path, range(first, stop))
            )
            for number in range(plan.stages.count)
        ]
        layout = structs.replace(layout, pp_split=",".join(map(str, counts)))
    return replace(task, source=directory, recipe=structs.replace(task.recipe, layout=layout))


def _find_count_key(config: Mapping[str, Any], path: str, count: int) -> tuple[str, str] | None:
    """Return the nested config and its key with the length of a list of layers; None if it is ambiguous."""
    keys_by_config = {
        name: [
            key
            for key, value in part.items()
            if type(value) is int and value == count and _LAYER_COUNT_KEYS.search(key)
        ]
        for name, part in iter_config_dicts(config)
    }
    keys_by_config = {name: keys for name, keys in keys_by_config.items() if keys}
    named_after_path = {
        name: keys for name, keys in keys_by_config.items() if name and name.rpartition(".")[2].split("_")[0] in path
    }
    candidates = named_after_path or keys_by_config
    if len(candidates) != 1:
        return None
    ((name, keys),) = candidates.items()
    usual_keys = [each for each in _USUAL_COUNT_KEYS if each in keys]
    return (name, usual_keys[0]) if usual_keys else (name, keys[0]) if len(keys) == 1 else None


def _shorten_config(config: Mapping[str, Any], count_key: tuple[str, str], count: int, layers: Sequence[int]) -> None:
    """Edit a config in place so that a list has these layers only."""
    name, key = count_key
    values = dict(iter_config_dicts(config))[name]
    for other, by_number in collect_per_layer_values(values, count).items():
        values[other] = to_config_form(values[other], [by_number[each] for each in layers], count)
    values[key] = len(layers)


def _model_dtype(task: ForecastTask) -> Any:
    return getattr(torch, task.recipe.model.dtype)
