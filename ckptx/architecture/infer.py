"""The class of a model whose config says its model type and not its class: the one whose names the tensors have.

That is what `model.config.save_pretrained` leaves of a model that was built from a config and never saved as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ckptx.architecture.model_files import classes_of
from ckptx.architecture.spec import Architecture
from ckptx.architecture.table import lookup
from ckptx.mapping.names import assign_roles, is_optimizer, is_trainer_state, pattern_of

# Of classes whose names fit alike: the one that more checkpoints are of.
_PREFERRED = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining",
    "ForSequenceClassification", "Model",
)  # fmt: skip
_MASKED = "ForMaskedLM"


class InferredClass(NamedTuple):
    """A class that was found by its names.

    Attributes:
        class_name: It.
        note: Says so, and which other classes have the same names.
    """

    class_name: str
    note: str


class _Fit(NamedTuple):
    """How well a class fits, the best first; fewer of each is better.

    Attributes:
        unknown: Patterns on disk that the class does not have.
        missing: Patterns of its head that are not on disk, and not tied to one that is.
        respelled: Patterns on disk that are not spelled as in the model.
        rank: Of its kind of class.
        class_name: For an order among equals.
    """

    unknown: int
    missing: int
    respelled: int
    rank: int
    class_name: str


def infer_class(config: Mapping[str, Any], names: Collection[str]) -> InferredClass | None:
    """The class of the config's model type that has the names of a checkpoint.

    A head decides: a class with one is chosen where its tensors are there, or where the config ties them to some that
    are. Of classes that fit alike, the one whose own names are spelled as on disk comes first, then a causal language
    model, and the note names the others.

    Args:
        config: The contents of `config.json`; it names no class.
        names: Of all tensors, with whatever a trainer put in front of them.

    Returns:
        None where the model type is unknown, or no class of it has half of the names.

    Raises:
        InputError: A key that decides a tie holds something else than true or false.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return None
    patterns = {pattern_of(name) for name in names}
    patterns = {each for each in patterns if not (is_optimizer(each) or is_trainer_state(each))}
    candidates = (lookup(name, model_type) for name in classes_of(model_type))
    fits = sorted(_fit(known, config, patterns) for known in candidates if known is not None)
    if not fits or (2 * fits[0].unknown > len(patterns) and not _is_held_several_times(fits[0], patterns, model_type)):
        return None
    best = fits[0]
    equal = [each.class_name for each in fits[1:] if each[:3] == best[:3]]
    said = f'config.json names no architecture: taken for {best.class_name}, a "{model_type}" with these names'
    if equal:
        said += f"; as good: {', '.join(equal[:5])}{', ...' if len(equal) > 5 else ''}; say in config.json which it is"
    return InferredClass(best.class_name, said)


def _is_held_several_times(fit: _Fit, patterns: set[str], model_type: str) -> bool:
    """True when what is unknown are mostly the names of the class once more, below other prefixes."""
    known = lookup(fit.class_name, model_type)
    if known is None or fit.unknown == len(patterns):
        return False
    parts = (pattern.split(".") for pattern in patterns)
    named = sum(any(".".join(each[at:]) in known.name_patterns for at in range(len(each))) for each in parts)
    return 2 * named >= len(patterns)


def _fit(known: Architecture, config: Mapping[str, Any], patterns: set[str]) -> _Fit:
    there = set(assign_roles(patterns, known.name_patterns).model)
    owned = {each for each in there if known.owns(each)}
    return _Fit(
        len(patterns) - len(owned),
        len(_missing_head(known, config, owned)),
        len(owned - known.model_names),
        _rank(known.class_name, config.get("is_decoder") is True),
        known.class_name,
    )


def _rank(class_name: str, is_decoder: bool) -> int:
    """The place of a kind of class; an encoder is a masked language model unless it is made a decoder."""
    if class_name.endswith(_MASKED) and not is_decoder:
        return -1
    return next((at for at, end in enumerate(_PREFERRED) if class_name.endswith(end)), len(_PREFERRED))


def _missing_head(known: Architecture, config: Mapping[str, Any], owned: set[str]) -> set[str]:
    """Modules beside the base model that have no tensor on disk, and none that is tied to one.

    A part of the base model is no head, also where another kind of it has names on disk that begin with that part.
    """
    lead = f"{known.base_prefix}."
    below = [each for each in known.model_names if known.base_prefix and each.startswith(lead)]
    heads = known.model_names - set(below) if below else frozenset[str]()
    modules = _first_parts(heads) - _first_parts(each.removeprefix(lead) for each in below)
    tied = {
        name.partition(".")[0]
        for pair in known.ties
        if pair.flag.effective(config)
        for naming in pair.namings
        if any(pattern_of(each) in owned for each in naming)
        for name in naming
    }
    return modules - tied - _first_parts(owned)


def _first_parts(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}
