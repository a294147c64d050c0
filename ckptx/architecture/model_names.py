"""Find the model among the names of a training checkpoint: its prefix and naming, and other models."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.shapes import expected_shapes, states_layer_count
from ckptx.architecture.trainer_naming.detect import find_buffers, find_trainer_conversions, with_trainer_names
from ckptx.errors import InputError
from ckptx.mapping.models import KnownNames, Models, find_models
from ckptx.mapping.names import UnwrappedNames, assign_roles, pattern_of, strip_wrappers, without_wrappers
from ckptx.mapping.ops import Conversion


class ModelNames(NamedTuple):
    """The model found in the names of a checkpoint.

    Attributes:
        unwrapped: Names without wrappers.
        models: The model and other models, by names without wrappers.
        architecture: Architecture under the names of the checkpoint; None if unknown.
        trainer_conversions: Conversions from trainer names to disk names, see `ModelView`.
        buffers: Names, without wrappers, of buffers of the trainer's model that the class does not have on the Hub;
            they have the role `other` in `models`.
    """

    unwrapped: UnwrappedNames
    models: Models
    architecture: Architecture | None = None
    trainer_conversions: tuple[Conversion, ...] = ()
    buffers: tuple[str, ...] = ()


def find_model_names(
    names: Collection[str],
    disk_architecture: Architecture | None,
    config: dict[str, Any] | None,
    prefix: str | None,
) -> ModelNames:
    """Find the model in the names of a training checkpoint.

    Args:
        names: Names of its tensors.
        disk_architecture: Architecture under disk names, those of the files on the Hub; None if unknown.
        config: Contents of `config.json`; None without one.
        prefix: Prefix of the model's names, with or without wrappers; None to detect it.

    Raises:
        InputError: No name has the prefix, or the config lacks a number that a conversion of a trainer needs.
        UnsupportedError: The names are those of a trainer that cannot hold this model; see `find_trainer_conversions`.
    """
    architecture, trainer_conversions = apply_trainer_naming(disk_architecture, config, names)
    known = known_names(architecture, config)
    unwrapped = strip_wrappers(names, frozenset() if known is None else known.disk_patterns)
    if prefix is not None and not any(name.startswith(prefix) for name in unwrapped.names.values()):
        prefix = without_wrappers(prefix)
    roles = assign_roles(unwrapped.names.values(), None if known is None else known.patterns, prefix)
    models = find_models(roles, known, is_user_prefix=prefix is not None)
    if disk_architecture is None or not trainer_conversions:
        return ModelNames(unwrapped, models, architecture, trainer_conversions)
    buffers = find_buffers(disk_architecture, trainer_conversions, models.roles.model)
    full_names = tuple(full for name, full in models.roles.model.items() if name in buffers)
    model = {name: full for name, full in models.roles.model.items() if name not in buffers}
    models = models._replace(roles=models.roles._replace(model=model, other=[*models.roles.other, *full_names]))
    return ModelNames(unwrapped, models, architecture, trainer_conversions, full_names)


def apply_trainer_naming(
    disk_architecture: Architecture | None, config: dict[str, Any] | None, names: Collection[str]
) -> tuple[Architecture | None, tuple[Conversion, ...]]:
    """Return the architecture under the names of a checkpoint, and the conversions to disk names.

    The conversions are empty if the names are not those of a trainer.

    Raises:
        InputError, UnsupportedError: See `find_trainer_conversions`.
    """
    if disk_architecture is None or config is None:
        return disk_architecture, ()
    trainer_conversions = find_trainer_conversions(disk_architecture, config, names)
    return (
        with_trainer_names(disk_architecture, trainer_conversions) if trainer_conversions else disk_architecture
    ), trainer_conversions


def known_names(architecture: Architecture | None, config: dict[str, Any] | None) -> KnownNames | None:
    """Return the names of the architecture under this config, and which of them a complete model may lack.

    None if the names are unknown, or there is no config.
    """
    if architecture is None or config is None or not architecture.name_patterns:
        return None
    optional: set[str] = set()
    layers: dict[str, int] = {}
    try:
        for pair in architecture.ties:
            if pair.flag.is_set(config):
                optional.update(pattern_of(name) for naming in pair.namings for name in naming)
        if states_layer_count(architecture, config):
            layers = {stack.path: stack.count for stack in architecture.stacks(config)}
        expected = expected_shapes(architecture, config)
    except InputError:  # reported by the code that requires the number
        expected = None
    if expected is not None:
        tied = {pattern_of(name) for pair in architecture.ties for naming in pair.namings for name in naming}
        optional |= architecture.name_patterns - expected.required - tied
    return KnownNames(architecture.name_patterns, architecture.base_prefix, frozenset(optional), layers)
