"""Derive the stage boundaries of a model with fewer layers from those of another one, without running either.

The values that stages send each other are found by running small models, which takes seconds. If stages receive values
only in their first layers, as in most decoders, a model with another number of the same layers has the same boundaries,
except for the names of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptx.layout.stages import StageMap
from ckptx.runtime.forecasting.short_models import ShorteningPlan
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.boundary_slots import BoundarySlot
from ckptx.runtime.parallel.pipeline.stage import OutputStructure

_SlotsByStage = tuple[tuple[BoundarySlot, ...], ...]


def derive_boundaries(
    boundaries: StageBoundaries, plan: ShorteningPlan, source_periods: Sequence[int], periods: Sequence[int]
) -> StageBoundaries | None:
    """Return the stage boundaries of a model with fewer layers; None if they have to be discovered.

    Args:
        boundaries: Boundaries of another model with fewer layers.
        plan: Layers that can be left out of the whole model.
        source_periods: For each axis, the removable periods that stay in the model of `boundaries`.
        periods: The same for the model whose boundaries are returned.
    """
    assert plan.stages is not None
    source_layers, layers = plan.remaining_layers(source_periods), plan.remaining_layers(periods)
    first_names = _name_first_layers(plan.stages, source_layers, layers)
    slots = _rename_slots(boundaries.slots, first_names, source_layers)
    slots_by_kind = {
        kind: _rename_slots(each, first_names, source_layers) for kind, each in boundaries.slots_by_kind.items()
    }
    output_structures = _rename_structures(boundaries.output_structures, plan, source_layers, layers)
    if slots is None or output_structures is None:
        return None
    renamed_by_kind = {kind: each for kind, each in slots_by_kind.items() if each is not None}
    if len(renamed_by_kind) < len(slots_by_kind):
        return None
    return StageBoundaries(slots, output_structures, renamed_by_kind)


def _name_first_layers(
    stages: StageMap, source_layers: Mapping[str, Sequence[int]], layers: Mapping[str, Sequence[int]]
) -> list[dict[str, str]]:
    """Return, for each stage, the names of its first layer in each list: name in the source -> name in the other model.

    Args:
        stages: Stages of the whole model.
        source_layers: Layers that remain in the source; see `ShorteningPlan.remaining_layers`.
        layers: Layers that remain in the other model.
    """
    names: list[dict[str, str]] = []
    for number in range(stages.count):
        firsts = [(path, first) for path, first, _ in stages.layers_of(number) if path in layers]
        names.append(
            {
                f"{path}.{source_layers[path].index(first)}": f"{path}.{layers[path].index(first)}"
                for path, first in firsts
                if first in source_layers[path] and first in layers[path]
            }
        )
    return names


def _rename_slots(
    slots: _SlotsByStage, first_names: Sequence[Mapping[str, str]], source_layers: Mapping[str, Sequence[int]]
) -> _SlotsByStage | None:
    """Return slots with the names of layers in the other model; None if a slot is in another layer than the first."""
    renamed: list[tuple[BoundarySlot, ...]] = []
    for slots_of_stage, names in zip(slots, first_names, strict=True):
        if any(_is_in_layer(each.module, source_layers) and each.module not in names for each in slots_of_stage):
            return None
        renamed.append(tuple(each._replace(module=names.get(each.module, each.module)) for each in slots_of_stage))
    return tuple(renamed)


def _rename_structures(
    structures: Mapping[str, OutputStructure],
    plan: ShorteningPlan,
    source_layers: Mapping[str, Sequence[int]],
    layers: Mapping[str, Sequence[int]],
) -> dict[str, OutputStructure] | None:
    """Return the output structures of the other model; each layer has that of a layer with the same description."""
    renamed = {name: each for name, each in structures.items() if not _is_in_layer(name, source_layers)}
    source_names: set[str] = set()
    for path, numbers in layers.items():
        descriptions = plan.layer_descriptions[path]
        name_by_description = {
            descriptions[number]: f"{path}.{index}" for index, number in enumerate(source_layers[path])
        }
        source_names.update(
            name_by_description.values(), (f"{path}.{index}" for index in range(len(source_layers[path])))
        )
        for index, number in enumerate(numbers):
            structure = structures.get(name_by_description.get(descriptions[number], ""))
            if structure is not None:
                renamed[f"{path}.{index}"] = structure
    if any(_is_in_layer(name, source_layers) and name not in source_names for name in structures):
        return None  # a structure of a module inside a layer cannot be derived
    return renamed


def _is_in_layer(module: str, layers: Mapping[str, Sequence[int]]) -> bool:
    """Return True if a module is a layer of one of these lists, or inside one."""
    return any(module.startswith(f"{path}.") for path in layers)
