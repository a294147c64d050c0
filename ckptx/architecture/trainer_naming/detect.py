"""Detect the naming of a trainer in a checkpoint, and convert the architecture to it.

Only torchtitan's naming is detected here. `ckptx.model_view.megatron_names` gives Megatron checkpoints disk names
before their names are examined here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ckptx.architecture.architecture import Architecture, TiePair
from ckptx.architecture.trainer_naming import torchtitan
from ckptx.architecture.trainer_naming.scheme import TrainerScheme
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion

SCHEMES: Mapping[str, TrainerScheme] = {scheme.trainer: scheme for scheme in (torchtitan.SCHEME,)}  # by trainer


def detect_scheme(architecture: Architecture, names: Collection[str]) -> TrainerScheme | None:
    """Return the scheme that the names of a checkpoint follow.

    None if they are not a trainer's, or if the trainer has no model of this class.
    """
    for scheme in SCHEMES.values():
        if not scheme.markers.isdisjoint(names) and scheme.has_model(architecture.class_name):
            return scheme
    return None


def find_trainer_conversions(
    architecture: Architecture, config: Mapping[str, Any], names: Collection[str]
) -> tuple[Conversion, ...]:
    """Return the conversions from the names of a checkpoint to disk names; empty without a scheme, see `detect_scheme`.

    Raises:
        UnsupportedError: The model has biases that the model of the trainer lacks.
        InputError: The config lacks a number that a conversion needs.
    """
    scheme = detect_scheme(architecture, names)
    return () if scheme is None else scheme.conversions(architecture.class_name, config)


def find_buffers(architecture: Architecture, conversions: tuple[Conversion, ...], names: Collection[str]) -> set[str]:
    """Return the names of buffers of the trainer's model that the class does not have on the Hub.

    Args:
        architecture: Architecture under disk names.
        conversions: Result of `find_trainer_conversions`.
        names: Names of the tensors of the model, without wrappers and prefix.
    """
    scheme = detect_scheme(architecture, names) if conversions else None
    if scheme is None:
        return set()
    buffers = scheme.buffers.difference(source for each in conversions for source in each.sources)
    return {name for name in names if pattern_of(name) in buffers} if buffers else set()


def with_trainer_names(architecture: Architecture, conversions: tuple[Conversion, ...]) -> Architecture:
    """Return the architecture with the trainer's names, which are the sources of `conversions`.

    A tied pair is left out unless both of its tensors are only renamed.
    """
    namings: dict[str, list[str]] = {}  # disk name -> names that the trainer gives the tensor
    for conversion in conversions:
        if not conversion.ops:
            namings.setdefault(conversion.targets[0], []).append(conversion.sources[0])
    ties = []
    for pair in architecture.ties:
        target, source = pair.namings[0]
        renamed = tuple(
            (trainer_target, trainer_source)
            for trainer_source in namings.get(source, ())
            for trainer_target in namings.get(target, ())
        )
        if renamed:
            ties.append(TiePair(renamed, pair.flag, pair.is_primary))
    return dataclasses.replace(
        architecture,
        ties=tuple(ties),
        name_patterns=frozenset(name for conversion in conversions for name in conversion.sources),
        base_prefix="",
    )
