"""The model in the names of a training checkpoint: what it is called there, and which other models there are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ckptx.architecture.shapes import expected_of, says_layers
from ckptx.architecture.spec import Architecture
from ckptx.architecture.trainer_naming.detect import in_trainer_naming, trainer_naming_of
from ckptx.errors import InputError
from ckptx.mapping.models import KnownNames, Models, find_models
from ckptx.mapping.names import UnwrappedNames, assign_roles, pattern_of, strip_wrappers
from ckptx.mapping.ops import Conversion


class ModelNames(NamedTuple):
    """The model that the names of a checkpoint show.

    Attributes:
        unwrapped: Names without wrappers.
        models: The model among them, by names without wrappers.
        architecture: Under the names of the checkpoint; None when it is unknown.
        trainer_naming: Conversions to published names, see `ModelView`.
    """

    unwrapped: UnwrappedNames
    models: Models
    architecture: Architecture | None = None
    trainer_naming: tuple[Conversion, ...] = ()


def find_names(
    names: Collection[str],
    published: Architecture | None,
    config: dict[str, Any] | None,
    prefix: str | None,
) -> ModelNames:
    """Finds the model in the names of a training checkpoint.

    Args:
        names: Names of its tensors.
        published: The architecture under published names.
        config: The contents of `config.json`.
        prefix: Prefix of the model's names; None finds it.

    Raises:
        InputError: No name has the prefix.
    """
    architecture, trainer_naming = in_naming_of(published, config, names)
    known = known_names(architecture, config)
    unwrapped = strip_wrappers(names, frozenset() if known is None else known.spellings)
    roles = assign_roles(unwrapped.names.values(), None if known is None else known.patterns, prefix)
    return ModelNames(unwrapped, find_models(roles, known, is_given=prefix is not None), architecture, trainer_naming)


def in_naming_of(
    published: Architecture | None, config: dict[str, Any] | None, names: Collection[str]
) -> tuple[Architecture | None, tuple[Conversion, ...]]:
    """The architecture under the names of a checkpoint, and the conversions from these names to published ones."""
    if published is None or config is None:
        return published, ()
    trainer_naming = trainer_naming_of(published, config, names)
    return (in_trainer_naming(published, trainer_naming) if trainer_naming else published), trainer_naming


def known_names(architecture: Architecture | None, config: dict[str, Any] | None) -> KnownNames | None:
    """The names of the architecture under this config; None where none are known."""
    if architecture is None or config is None or not architecture.name_patterns:
        return None
    optional: set[str] = set()
    layers: dict[str, int] = {}
    try:
        for pair in architecture.ties:
            if pair.flag.effective(config):
                optional.update(pattern_of(name) for naming in pair.namings for name in naming)
        if says_layers(architecture, config):
            layers = {stack.path: stack.count for stack in architecture.stacks(config)}
        expected = expected_of(architecture, config)
    except InputError:  # said by whoever needs the number
        expected = None
    if expected is not None:
        tied = {pattern_of(name) for pair in architecture.ties for naming in pair.namings for name in naming}
        optional |= architecture.name_patterns - expected.required - tied
    return KnownNames(architecture.name_patterns, architecture.base_prefix, frozenset(optional), layers)
