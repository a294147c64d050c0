"""Infer the class of a model whose config has a model type but no class, from the names of its tensors.

`model.config.save_pretrained` writes such a config for a model that was built from a config and never saved as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_table import lookup
from ckptx.architecture.model_files import classes_of
from ckptx.mapping.names import assign_roles, is_optimizer, is_trainer_state, pattern_of

# Order among classes whose names fit equally: the more common ones first.
_PREFERRED_ENDINGS = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining",
    "ForSequenceClassification", "Model",
)  # fmt: skip
_MASKED_LM = "ForMaskedLM"


class InferredClass(NamedTuple):
    """A class that was inferred from tensor names.

    Attributes:
        class_name: Name of the class.
        note: Note for the user about the choice, with other classes that have the same names.
    """

    class_name: str
    note: str


class _ClassFit(NamedTuple):
    """Quality of the fit of a class; the best sorts first, because lower is better in every field.

    Attributes:
        unknown_patterns: Number of patterns on disk that the class does not have.
        missing_head_modules: Number of modules of its head that have no tensor on disk, and are not tied to one.
        renamed_patterns: Number of patterns on disk that have another name in the model.
        rank: Result of `_class_rank`.
        class_name: Name of the class, to order equal fits.
    """

    unknown_patterns: int
    missing_head_modules: int
    renamed_patterns: int
    rank: int
    class_name: str


def infer_class(config: Mapping[str, Any], names: Collection[str]) -> InferredClass | None:
    """Return the class of the config's model type that has the names of a checkpoint.

    The head decides: a class with one is chosen if its tensors are present, or tied by the config to some that are.
    Among equal fits, a class whose own names are spelled as on disk comes first, then a causal language model, and the
    note lists the others.

    Args:
        config: Contents of `config.json`, which names no class.
        names: Names of all tensors, including any prefix of a trainer.

    Returns:
        The class, or None if the model type is unknown, or no class of it has half of the names. The prefix of the
        model, or those of several copies of it, is removed from the names first.

    Raises:
        InputError: A key that determines a tie is not a boolean.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return None
    patterns = {pattern_of(name) for name in names}
    patterns = {each for each in patterns if not (is_optimizer(each) or is_trainer_state(each))}
    candidates = (lookup(name, model_type) for name in classes_of(model_type))
    fits = sorted(_fit_class(architecture, config, patterns) for architecture in candidates if architecture is not None)
    if not fits or (
        2 * fits[0].unknown_patterns > len(patterns) and not _is_stored_several_times(fits[0], patterns, model_type)
    ):
        return None
    best = fits[0]
    equal = [each.class_name for each in fits[1:] if each[:3] == best[:3]]  # in all counts
    note = f'config.json names no architecture: assuming {best.class_name}, a "{model_type}" with these names'
    if equal:
        note += f"; equally likely: {', '.join(equal[:5])}{', ...' if len(equal) > 5 else ''}; name it in config.json"
    return InferredClass(best.class_name, note)


def _is_stored_several_times(fit: _ClassFit, patterns: set[str], model_type: str) -> bool:
    """Return True if at least half of the names end in a name of the class, after prefixes that may differ."""
    architecture = lookup(fit.class_name, model_type)
    if architecture is None or fit.unknown_patterns == len(patterns):
        return False
    parts = (pattern.split(".") for pattern in patterns)
    matching = sum(
        any(".".join(each[start:]) in architecture.name_patterns for start in range(len(each))) for each in parts
    )
    return 2 * matching >= len(patterns)


def _fit_class(architecture: Architecture, config: Mapping[str, Any], patterns: set[str]) -> _ClassFit:
    """Return how well a class fits the patterns on disk, after the prefix of the model is removed from them."""
    present = set(assign_roles(patterns, architecture.name_patterns).model)
    owned = {each for each in present if architecture.owns(each)}
    return _ClassFit(
        len(patterns) - len(owned),
        len(_missing_head_modules(architecture, config, owned)),
        len(owned - architecture.model_name_patterns),
        _class_rank(architecture.class_name, config.get("is_decoder") is True),
        architecture.class_name,
    )


def _class_rank(class_name: str, is_decoder: bool) -> int:
    """Return the rank of a class among classes whose names fit equally; the lowest is preferred.

    It is the index of the ending of its name in `_PREFERRED_ENDINGS`. But a masked language model has rank -1 unless
    the config sets `is_decoder`, because an encoder is usually one.
    """
    if class_name.endswith(_MASKED_LM) and not is_decoder:
        return -1
    positions = (index for index, ending in enumerate(_PREFERRED_ENDINGS) if class_name.endswith(ending))
    return next(positions, len(_PREFERRED_ENDINGS))


def _missing_head_modules(architecture: Architecture, config: Mapping[str, Any], owned: set[str]) -> set[str]:
    """Return the top-level modules outside of the base model that have no tensor on disk, their own or a tied one.

    A module that is also a child of the base model is not a head: some patterns of the base model omit its prefix.

    Args:
        architecture: Architecture of the class.
        config: Contents of `config.json`.
        owned: Patterns on disk that belong to the class.
    """
    prefix = f"{architecture.base_prefix}."
    base_names = [
        each for each in architecture.model_name_patterns if architecture.base_prefix and each.startswith(prefix)
    ]
    heads = architecture.model_name_patterns - set(base_names) if base_names else frozenset[str]()
    modules = _first_parts(heads) - _first_parts(each.removeprefix(prefix) for each in base_names)
    tied = {
        name.partition(".")[0]
        for pair in architecture.ties
        if pair.flag.is_set(config)
        for naming in pair.namings
        if any(pattern_of(each) in owned for each in naming)
        for name in naming
    }
    return modules - tied - _first_parts(owned)


def _first_parts(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}
