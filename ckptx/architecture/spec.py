"""The nouns of an architecture: which names a model class has, which of them are tied, and when."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptx.architecture.configs import flag_at
from ckptx.architecture.plans import conversions_of, lacks, plan_of, stacks_of
from ckptx.architecture.structure import Structure
from ckptx.layout.stages import Stack
from ckptx.layout.tensor_parallel_plan import TensorParallelPlan
from ckptx.mapping.names import LEGACY_LEAVES, pattern_of
from ckptx.mapping.ops import Conversion

_STATES = ("absent", "false", "true")


@dataclass(frozen=True, slots=True)
class TieFlag:
    """How the effective ``tie_word_embeddings`` of a pair's own sub-model follows from ``config.json``.

    A config class may have its own default, forward a nested value to the root, ignore it, rename the key or
    force a value. So the rule is data: the config class was asked once for every combination of
    absent, false and true of the keys that matter.

    Attributes:
        paths: The config keys that matter, each as the keys to follow from the root. Empty: nothing matters.
        truth: One ``0`` or ``1`` per combination, the last path varying fastest, absent before false before
            true.
    """

    paths: tuple[tuple[str, ...], ...]
    truth: str

    def __post_init__(self) -> None:
        assert len(self.truth) == 3 ** len(self.paths), (self.paths, self.truth)

    def effective(self, config: Mapping[str, Any]) -> bool:
        """The flag that the model reads, given the contents of ``config.json``.

        Raises:
            InputError: A key that decides it holds something else than true or false.
        """
        index = 0
        for path in self.paths:
            index = 3 * index + _state(config, path)
        return self.truth[index] == "1"

    def evidence(self, config: Mapping[str, Any]) -> str:
        """The reason for ``effective``, for a report."""
        if not self.paths:
            return "the class always ties" if self.truth == "1" else "the class never ties"
        said = [(".".join(path), _STATES[_state(config, path)]) for path in self.paths]
        if all(state == "absent" for _, state in said):
            default = "true" if self.effective(config) else "false"
            return f"{said[0][0]} absent from config.json, class default {default}"
        return ", ".join(f"{key}={state}" for key, state in said if state != "absent") + " (config.json)"

    @property
    def is_constant(self) -> bool:
        """Whether nothing in ``config.json`` changes the flag."""
        return len(set(self.truth)) == 1


ALWAYS = TieFlag((), "1")
NEVER = TieFlag((), "0")


@dataclass(frozen=True, slots=True)
class TiePair:
    """Two names of one tensor: ``target`` is an alias of ``source`` when ``flag`` says so.

    Attributes:
        namings: ``(target, source)`` per naming dialect. The first holds the names of the model's own
            parameters; the others are what loads into them from disk (hub originals, ``save_pretrained``
            output, with and without the base model's prefix).
        flag: When the pair is declared.
        is_primary: Whether the pair holds the output embedding or the input embedding. The others (biases,
            shared layers) may be missing together: a head that was never saved.
    """

    namings: tuple[tuple[str, str], ...]
    flag: TieFlag
    is_primary: bool = True


@dataclass(frozen=True, slots=True)
class Architecture:
    """What ckptx knows about one model class without building it.

    Attributes:
        class_name: As in ``architectures`` of ``config.json``.
        model_type: Of the class's own config.
        ties: Candidate pairs, chains flattened: no source is a target of another pair.
        name_patterns: Every persistent tensor name, on disk or in the model, indices replaced by ``*``. In the
            table, also the names that other configs of the class switch on (biases, experts, towers). A
            pattern that ends in ``**`` stands for everything below: a tower whose package was missing.
        base_prefix: The name of the base model inside the class (``model``, ``transformer``); names may come
            with or without it.
        keep_in_fp32: transformers' ``_keep_in_fp32_modules``: kept in fp32 when the target is fp16.
        keep_in_fp32_strict: ``_keep_in_fp32_modules_strict``: kept for fp16 and for bf16.
        ties_flag_editable: False where writing ``tie_word_embeddings: false`` would change what forward
            computes (T5 scales its decoder output by it), or where the config class ignores it.
        has_output_embeddings: Whether the class maps hidden states back to the vocabulary.
        known_from: ``table``, ``meta model`` or ``suffix table``.
        transformers_version: Of the library that was asked.
        ignored: Regular expressions, searched in a name whose indices are replaced by ``*``: names that published
            checkpoints hold and the class does not want (old buffers, heads for speculative decoding).
        structure: How the class is built: plan, layers, heads, conversions. Empty for an unknown class.
    """

    class_name: str
    model_type: str
    ties: tuple[TiePair, ...]
    name_patterns: frozenset[str]
    base_prefix: str
    keep_in_fp32: tuple[str, ...]
    keep_in_fp32_strict: tuple[str, ...]
    ties_flag_editable: bool
    has_output_embeddings: bool
    known_from: str
    transformers_version: str
    ignored: tuple[str, ...] = ()
    structure: Structure = field(default_factory=Structure)

    def knows(self, name: str) -> bool:
        """Whether a tensor of this name, as found on disk, is no surprise: it belongs to the class or is ignored."""
        if self.owns(name):
            return True
        pattern = pattern_of(name)
        return any(re.search(each, pattern) for each in self.ignored)

    def owns(self, name: str) -> bool:
        """Whether a tensor of this name, as found on disk, belongs to the class."""
        pattern = pattern_of(name)
        for old, new in LEGACY_LEAVES.items():
            if pattern.endswith(old):
                pattern = pattern.removesuffix(old) + new
        if self._has(pattern):
            return True
        if not self.base_prefix:
            return False
        prefix = self.base_prefix + "."
        return self._has(prefix + pattern) or (pattern.startswith(prefix) and self._has(pattern.removeprefix(prefix)))

    def _has(self, pattern: str) -> bool:
        if pattern in self.name_patterns:
            return True
        parts = pattern.split(".")
        return any(".".join(parts[:end]) + ".**" in self.name_patterns for end in range(1, len(parts)))

    def match(self, names: Iterable[str]) -> float:
        """The fraction of ``names`` that belong to the class, 0.0 for no names."""
        owned = [self.owns(name) for name in names]
        return sum(owned) / len(owned) if owned else 0.0

    def tensor_parallel_plan(self, config: Mapping[str, Any]) -> TensorParallelPlan:
        """How TP cuts the tensors of the class under a ``config.json``; a plan of the user's goes on top of it."""
        return plan_of(self.structure, self.model_type, config, self.name_patterns, self.transformers_version)

    def stacks(self, config: Mapping[str, Any]) -> tuple[Stack, ...]:
        """The lists of layers in the order they run, none where the class has no such list.

        Raises:
            InputError: The config does not say how many layers there are.
        """
        return stacks_of(self.structure, config)

    def conversions(self, config: Mapping[str, Any]) -> tuple[Conversion, ...]:
        """What loading does to names on disk that are no names of the model, and to tensors that it puts together.

        Every naming that loads is in it, the one that `save_pretrained` writes first; a name that is written as the
        model has it, and that has another naming, is there with itself. Names without the base model's prefix are not
        there: see `base_prefix`.

        Raises:
            InputError: The config lacks a number that an operation needs.
        """
        return conversions_of(self.structure, config)

    def lacks(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether the model has no use for this tensor, as one that another layer's tensor stands for."""
        return lacks(self.structure, self.model_type, name, config)

    @property
    def model_names(self) -> frozenset[str]:
        """The patterns of `name_patterns` that are names of the model itself."""
        changes = self.structure.changes | self.structure.variants
        disk = {pattern_of(name) for change in changes for name in change.sources}
        own = {pattern_of(name) for change in changes for name in change.targets}
        return (self.name_patterns - disk) | own

    def keeps_fp32(self, name: str, target_dtype: Literal["fp16", "bf16"]) -> bool:
        """Whether transformers keeps this parameter in fp32 when the model is loaded in ``target_dtype``.

        The rule of transformers 5.23 ``_get_dtype_plan``: each entry is a regular expression, with ``*`` for
        anything, searched anywhere in the model's parameter name.
        """
        patterns = self.keep_in_fp32_strict
        if target_dtype == "fp16":
            patterns = patterns + self.keep_in_fp32
        return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _state(config: Mapping[str, Any], path: tuple[str, ...]) -> int:
    flag = flag_at(config, path)
    return 0 if flag is None else 1 + flag
