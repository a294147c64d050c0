"""Find the model among the names of a training checkpoint: its prefix and naming, and other models."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.shapes import expected_shapes, states_layer_count
from ckptx.architecture.trainer_naming.detect import find_buffers, find_trainer_conversions, with_trainer_names
from ckptx.errors import InputError, UsageError
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
        UsageError: The prefix ends in the middle of a name, before a dot, or the names of the class begin with the end
            of the prefix themselves.
        UnsupportedError: The names are those of a trainer that cannot hold this model; see `find_trainer_conversions`.
    """
    architecture, trainer_conversions = apply_trainer_naming(disk_architecture, config, names)
    known = known_names(architecture, config)
    unwrapped = strip_wrappers(names, frozenset() if known is None else known.disk_patterns)
    is_stored = prefix is not None and any(name.startswith(prefix) for name in names)
    if prefix is not None and is_stored and not any(name.startswith(prefix) for name in unwrapped.names.values()):
        prefix = without_wrappers(prefix)
    roles = assign_roles(unwrapped.names.values(), None if known is None else known.patterns, prefix)
    if prefix and any(name.startswith(".") for name in roles.model):
        raise UsageError(f'--source-prefix "{prefix}": the names continue with "."; pass --source-prefix "{prefix}."')
    if prefix and prefix.endswith(".") and architecture is not None:
        _refuse_prefix_of_class(prefix, roles.model, architecture)
    models = find_models(roles, known, is_user_prefix=prefix is not None)
    if disk_architecture is None or not trainer_conversions:
        return ModelNames(unwrapped, models, architecture, trainer_conversions)
    buffers = find_buffers(disk_architecture, trainer_conversions, models.roles.model)
    full_names = tuple(full for name, full in models.roles.model.items() if name in buffers)
    model = {name: full for name, full in models.roles.model.items() if name not in buffers}
    models = models._replace(roles=models.roles._replace(model=model, other=[*models.roles.other, *full_names]))
    return ModelNames(unwrapped, models, architecture, trainer_conversions, full_names)


def _refuse_prefix_of_class(prefix: str, names: Collection[str], architecture: Architecture) -> None:
    """Refuse a prefix that ends with components which the names of the class have themselves.

    Without them, the names would be those of another class, and a head outside of them would be lost.

    Args:
        prefix: Prefix that the user passed.
        names: Names of the model without it.
        architecture: Architecture under the names of the checkpoint.

    Raises:
        UsageError: The prefix ends with such components.
    """
    patterns = {pattern_of(name) for name in names}
    known_count = len(patterns & architecture.name_patterns)
    components = prefix.split(".")[:-1]
    for first in range(len(components)):
        own = ".".join(components[first:]) + "."
        own_count = sum(own + pattern in architecture.name_patterns for pattern in patterns)
        if own_count > known_count and 2 * own_count > len(patterns):
            shorter = prefix.removesuffix(own)
            advice = f'pass --source-prefix "{shorter}"' if shorter else "leave out --source-prefix"
            raise UsageError(
                f'--source-prefix "{prefix}": the names of {architecture.class_name} begin with "{own}" themselves; '
                f"{advice}"
            )


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
