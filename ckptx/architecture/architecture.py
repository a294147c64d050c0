"""Facts about an architecture: the names of a model class, the tied ones among them, and when they are tied.

Disk names are those in HF checkpoint files, as on the Hub; model names are those of the parameters in the transformers
class. A naming is one complete set of names, such as either of these. A pattern is a name with `*` for each index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptx.architecture.configs import read_flag
from ckptx.architecture.plans import conversions_of, is_unused, plan_of, stacks_of
from ckptx.architecture.structure import Structure
from ckptx.layout.stages import Stack
from ckptx.layout.tensor_parallel_plan import TensorParallelPlan
from ckptx.mapping.names import pattern_of, replace_legacy_leaf
from ckptx.mapping.ops import Conversion

_FLAG_STATES = ("absent", "false", "true")
FROM_SUFFIX_TABLE = "suffix table"


@dataclass(frozen=True, slots=True)
class TieFlag:
    """Rule by which the effective ``tie_word_embeddings`` of a sub-model follows from ``config.json``.

    A config class may have its own default, forward a nested value to the root, ignore it, rename the key or force a
    value. So the rule is data: the config class was evaluated for every combination of absent, false and true of the
    keys that matter.

    Attributes:
        paths: Keys that matter, each as its path from the root of the config; empty if none matters.
        truth: One character per combination of values, ``1`` if the model ties under it and ``0`` if not. The last path
            varies fastest, and each takes the values absent, false, true in this order.
    """

    paths: tuple[tuple[str, ...], ...]
    truth: str

    def __post_init__(self) -> None:
        assert len(self.truth) == 3 ** len(self.paths), (self.paths, self.truth)

    def is_set(self, config: Mapping[str, Any]) -> bool:
        """Return the flag that the model reads, given the contents of ``config.json``.

        Raises:
            InputError: A key that determines it is not a boolean.
        """
        index = 0
        for path in self.paths:
            index = 3 * index + _flag_state(config, path)
        return self.truth[index] == "1"

    def explain(self, config: Mapping[str, Any]) -> str:
        """Return the reason for the result of ``is_set``, for a report.

        Raises:
            InputError: See ``is_set``.
        """
        if not self.paths:
            return "the class always ties" if self.truth == "1" else "the class never ties"
        states = [(".".join(path), _FLAG_STATES[_flag_state(config, path)]) for path in self.paths]
        if all(state == "absent" for _, state in states):
            default = "true" if self.is_set(config) else "false"
            return f"{states[0][0]} absent from config.json, class default {default}"
        return ", ".join(f"{key}={state}" for key, state in states if state != "absent") + " (config.json)"

    @property
    def is_constant(self) -> bool:
        """Return True if nothing in ``config.json`` changes the flag."""
        return len(set(self.truth)) == 1


ALWAYS_TIED = TieFlag((), "1")
NEVER_TIED = TieFlag((), "0")


@dataclass(frozen=True, slots=True)
class TiePair:
    """Two names that are one tensor if ``flag`` is true for the config: an alias, and the name that it is tied to.

    Attributes:
        namings: ``(target, source)`` per naming: the alias, such as the output head, and the name that it is tied to,
            such as the input embedding. The first has the names of the model's own parameters; the others are names on
            disk that load into them (hub originals, ``save_pretrained`` output, with and without the base model's
            prefix).
        flag: Rule for when the pair is tied.
        is_primary: True if the pair has the output or the input embedding. A checkpoint may lack both names of any
            other pair (biases, shared layers), for example those of a head that was never saved.
    """

    namings: tuple[tuple[str, str], ...]
    flag: TieFlag
    is_primary: bool = True


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts about a model class that are known without building it.

    Attributes:
        class_name: Name as in ``architectures`` of ``config.json``.
        model_type: Model type of the class's own config; empty if it is unknown.
        ties: Candidate pairs with chains flattened: no source is a target of another pair.
        name_patterns: Names of all persistent tensors, on disk or in the model, with ``*`` for indices. In the table,
            also names that other configs of the class enable (biases, experts, towers). A pattern that ends in ``**``
            matches everything below: a tower whose package was missing. Empty for an unknown class.
        base_prefix: Name of the base model in the class (``model``, ``transformer``), without a dot; names on disk may
            have it or not. Empty if there is none.
        keep_in_fp32: transformers' ``_keep_in_fp32_modules``: kept in fp32 when the target is fp16.
        keep_in_fp32_strict: ``_keep_in_fp32_modules_strict``: kept for fp16 and for bf16.
        ties_flag_editable: True if ``tie_word_embeddings: false`` in ``config.json`` unties the pairs and changes
            nothing else. False if the forward pass reads the flag (T5 scales its decoder output by it), if the config
            class ignores it, and for a class that never ties.
        has_output_embeddings: True if the class maps hidden states back to the vocabulary.
        known_from: Source of the facts: ``table`` (classes that ckptx ships), ``meta model`` (the class was built on
            the meta device) or ``suffix table`` (usual names of tied weights, for a class that cannot be built).
        transformers_version: Version of transformers from whose code the facts were read; empty for an unknown class.
        ignored: Regular expressions, searched in a name with ``*`` for indices: names in published checkpoints that the
            class does not load (old buffers, heads for speculative decoding).
        structure: Plan, layers, heads and conversions; empty for an unknown class.
        is_in_table: True if ckptx ships facts about the class; False for a class that was only built, such as one with
            custom code, and for an unknown class. If False, it is not known which projections of the class are fused.
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
    is_in_table: bool = True

    @property
    def is_unknown_class(self) -> bool:
        """Return True for a class that cannot be looked up or built: only usual names of tied weights are known."""
        return self.known_from == FROM_SUFFIX_TABLE

    def expects(self, name: str) -> bool:
        """Return True if a name or pattern on disk is expected: it belongs to the class or is ignored."""
        return self.owns(name) or self.ignores(name)

    def ignores(self, name: str) -> bool:
        """Return True if loading ignores a name or pattern on disk, see `ignored`."""
        pattern = pattern_of(name)
        return any(re.search(each, pattern) for each in self.ignored)

    def owns(self, name: str) -> bool:
        """Return True if a name or pattern, on disk or in the model, belongs to the class."""
        pattern = replace_legacy_leaf(pattern_of(name))
        if self._has_pattern(pattern):
            return True
        if not self.base_prefix:
            return False
        prefix = self.base_prefix + "."
        return self._has_pattern(prefix + pattern) or (
            pattern.startswith(prefix) and self._has_pattern(pattern.removeprefix(prefix))
        )

    def _has_pattern(self, pattern: str) -> bool:
        if pattern in self.name_patterns:
            return True
        parts = pattern.split(".")
        return any(".".join(parts[:end]) + ".**" in self.name_patterns for end in range(1, len(parts)))

    def match_fraction(self, names: Iterable[str]) -> float:
        """Return the fraction of ``names`` that belong to the class; 0.0 without names."""
        owned = [self.owns(name) for name in names]
        return sum(owned) / len(owned) if owned else 0.0

    def tensor_parallel_plan(self, config: Mapping[str, Any]) -> TensorParallelPlan:
        """Return the TP plan of the class under a ``config.json``; a plan of the user takes precedence over it.

        Raises:
            InputError: A number that a rule reads is a string or a fraction in the config.
        """
        return plan_of(
            self.structure,
            self.model_type,
            config,
            self.name_patterns,
            self.transformers_version,
            is_in_table=self.is_in_table,
        )

    def stacks(self, config: Mapping[str, Any]) -> tuple[Stack, ...]:
        """Return the lists of layers in the order they run; empty if the class has no such list.

        Raises:
            InputError: The config does not give a number of layers, or one that is out of range.
        """
        return stacks_of(self.structure, config)

    def conversions(self, config: Mapping[str, Any]) -> tuple[Conversion, ...]:
        """Return the conversions of tensors whose name or form on disk differs from that in the model.

        All namings that can be loaded are included, that of `save_pretrained` first; a name that is written unchanged
        and has another naming is mapped to itself. Names without the base model's prefix are not included: see
        `base_prefix`.

        Raises:
            InputError: The config lacks a number that an operation needs.
        """
        return conversions_of(self.structure, config)

    def is_unused(self, name: str, config: Mapping[str, Any]) -> bool:
        """Return True if the model does not use a tensor although its class has others of the same pattern.

        An example is `k_proj` of a layer that uses the keys of another layer. `name` is the model name of the tensor.

        Raises:
            InputError: The config lacks a number that decides it.
        """
        return is_unused(self.structure, self.model_type, name, config)

    @property
    def model_name_patterns(self) -> frozenset[str]:
        """Return the patterns of the model's own names: `name_patterns` without those that are only on disk."""
        changes = self.structure.conversions | self.structure.other_conversions
        disk = {pattern_of(name) for change in changes for name in change.sources}
        own = {pattern_of(name) for change in changes for name in change.targets}
        return (self.name_patterns - disk) | own

    def keeps_fp32(self, name: str, target_dtype: Literal["fp16", "bf16"]) -> bool:
        """Return True if transformers keeps this parameter in fp32 when the model is loaded in ``target_dtype``.

        This is the rule of ``_get_dtype_plan`` in transformers 5.23: each entry is a regular expression, with ``*`` for
        anything, searched in the model's parameter name.
        """
        patterns = self.keep_in_fp32_strict
        if target_dtype == "fp16":
            patterns = patterns + self.keep_in_fp32
        return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _flag_state(config: Mapping[str, Any], path: tuple[str, ...]) -> int:
    """Return the index in `_FLAG_STATES` of the flag at a path of keys."""
    flag = read_flag(config, path)
    return 0 if flag is None else 1 + flag
