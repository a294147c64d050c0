"""Decide, pair by pair, which names of a checkpoint are one tensor.

The config flag is not sufficient: checkpoints with ``tie_word_embeddings: true`` may have two different tensors, and T5
forces the flag for all. The stored tensors decide, exactly as in ``from_pretrained``; where that would silently leave a
parameter with random values, an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptx.architecture.architecture import Architecture, TiePair
from ckptx.architecture.disk_names import CheckpointNames, tie_names
from ckptx.errors import InputError

StoredNames = Literal[
    "tied-to-only",  # the source was stored, the alias was not: the usual form of a tied checkpoint
    "name-only",  # the alias was stored, the source was not
    "third-name",  # neither, but another alias of the same source
    "equal",  # both, with the same bytes
    "different",  # both, with equal shape and dtype and different bytes
    "mismatched",  # both, with different shape or dtype
    "undeclared",  # both, and the config does not tie them: two separate tensors
    "base-model",  # not tied, and the files hold a base model without its head
    "other-form",  # the missing tensor is present in another form, as a quantized module
    "guessed",  # one of them, and the name of the other is only a guess, because the class is unknown
    "missing",  # neither
]

# With a smaller fraction of known names, the checkpoint is not one of the class, and an absent name proves nothing.
_MIN_MATCH_FRACTION = 0.5


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Header of a stored tensor.

    Attributes:
        shape: Shape in elements.
        dtype: Name of the safetensors dtype, such as "BF16".
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TieDecision:
    """Decision about one candidate pair.

    Attributes:
        target: Name of the alias, in the naming of the checkpoint.
        source: Name that a HF checkpoint stores, in the naming of the checkpoint.
        stored: Names of the pair that the checkpoint stores, and how their tensors compare; see `StoredNames`.
        action: ``alias``: one tensor, stored as ``stored_name``. ``keep-both``: two tensors. ``none``: nothing to tie.
        stored_name: For ``alias``, the name on disk with the data, possibly a third name of the same tie; else None.
        declared: True if the config ties the pair. An undeclared alias (``--tie-missing``) must be stored under both
            names in a HF checkpoint, because no loader would tie it.
        evidence: Phrase for the report: what is stored, and what the config states about the pair.
    """

    target: str
    source: str
    stored: StoredNames
    action: Literal["alias", "keep-both", "none"]
    stored_name: str | None
    declared: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class UntyingEdits:
    """Changes to ``config.json`` so that it no longer declares different tensors as tied.

    Attributes:
        values: New value, always false, by path of keys in ``config.json``; empty if nothing changes.
        note: Sentence about the edits, or why there are none; empty if there is nothing to report.
    """

    values: Mapping[tuple[str, ...], bool] = field(default_factory=dict)
    note: str = ""


def resolve_ties(
    architecture: Architecture,
    config: Mapping[str, Any],
    stored_tensors: Mapping[str, StoredTensor],
    are_equal: Callable[[str, str], bool],
    *,
    tie_missing: bool = False,
    accepted_problems: list[str] | None = None,
) -> list[TieDecision]:
    """Return one decision per pair of ``architecture.ties``, in that order.

    Args:
        architecture: Architecture of the checkpoint's class.
        config: Contents of ``config.json``.
        stored_tensors: Tensors of the checkpoint by name.
        are_equal: Compares the bytes of two names. Called only for declared pairs whose names are both on disk with
            equal shape and dtype.
        tie_missing: Treat a pair as tied if one name is missing, whatever the config declares.
        accepted_problems: List that receives a sentence for each missing name that no stored tensor can replace; None
            to raise an error instead.

    Raises:
        InputError: There is such a name, and ``accepted_problems`` is None; or a tie flag in the config is not a
            boolean.
    """
    names = CheckpointNames(architecture, stored_tensors)
    pair_names = tie_names(architecture.ties, names)
    stored_names = _stored_names(architecture.ties, pair_names, config, stored_tensors, tie_missing)
    resolver = _TieResolver(architecture, config, stored_tensors, names, are_equal, tie_missing)
    decisions = [
        resolver.decide(pair, target, source, stored_names.get(pair.namings[0][1]))
        for pair, (target, source) in zip(architecture.ties, pair_names, strict=True)
    ]
    if resolver.problems and accepted_problems is None:
        raise InputError("; ".join(resolver.problems))
    if accepted_problems is not None:
        accepted_problems += resolver.problems
    return decisions


def untying_edits(
    architecture: Architecture, config: Mapping[str, Any], decisions: Sequence[TieDecision]
) -> UntyingEdits:
    """Return the edits for pairs that the config ties although their tensors differ.

    Args:
        architecture: Architecture passed to ``resolve_ties``.
        config: Config passed to ``resolve_ties``.
        decisions: Result of ``resolve_ties``.
    """
    decided_pairs = list(zip(architecture.ties, decisions, strict=True))
    untied = [pair for pair, decision in decided_pairs if decision.declared and decision.action == "keep-both"]
    if not untied:
        return UntyingEdits()
    if not architecture.ties_flag_editable:
        return UntyingEdits(note=f"tie_word_embeddings is unchanged: {architecture.class_name} computes with it")
    paths: set[tuple[str, ...]] = {("tie_word_embeddings",)}
    if isinstance(config.get("text_config"), Mapping):
        paths.add(("text_config", "tie_word_embeddings"))
    for pair in untied:
        paths.update(pair.flag.paths)
    edited = _with_flags_off(config, paths)
    aliases = [
        decision
        for pair, decision in decided_pairs
        if decision.declared and decision.action == "alias" and not pair.flag.is_set(edited)
    ]
    if aliases:
        return UntyingEdits(note=f"tie_word_embeddings is unchanged: {aliases[0].target} still needs it")
    listed = ", ".join(sorted(".".join(path) for path in paths))
    return UntyingEdits(dict.fromkeys(sorted(paths), False), f"{listed} written as false: the tensors differ")


def _with_flags_off(config: Mapping[str, Any], paths: set[tuple[str, ...]]) -> dict[str, Any]:
    result = dict(config)
    for path in paths:
        node = result
        for key in path[:-1]:
            nested = node.get(key)
            node[key] = dict(nested) if isinstance(nested, Mapping) else {}
            node = node[key]
        node[path[-1]] = False
    return result


def _stored_names(
    ties: Sequence[TiePair],
    pair_names: Sequence[tuple[str, str]],
    config: Mapping[str, Any],
    stored_tensors: Mapping[str, StoredTensor],
    tie_missing: bool,
) -> dict[str, str]:
    """Return, for each source (model name), its name on disk: itself, or the first target tied to it."""
    stored_names: dict[str, str] = {}
    for pair, (_, source) in zip(ties, pair_names, strict=True):
        if source in stored_tensors:
            stored_names[pair.namings[0][1]] = source
    for pair, (target, _) in zip(ties, pair_names, strict=True):
        if target in stored_tensors and (tie_missing or pair.flag.is_set(config)):
            stored_names.setdefault(pair.namings[0][1], target)
    return stored_names


@dataclass(slots=True)
class _TieResolver:
    """Decides one tied pair at a time, and collects problems to report all of them together.

    Attributes:
        names: Names of the checkpoint, for queries.
        problems: A sentence for each missing tensor that no other tensor can replace.
        architecture, config, stored_tensors, are_equal, tie_missing: Arguments of `resolve_ties`.
    """

    architecture: Architecture
    config: Mapping[str, Any]
    stored_tensors: Mapping[str, StoredTensor]
    names: CheckpointNames
    are_equal: Callable[[str, str], bool]
    tie_missing: bool
    problems: list[str] = field(default_factory=list)

    def decide(self, pair: TiePair, target: str, source: str, stored_name: str | None) -> TieDecision:
        """Return the decision about one pair; a missing tensor is added to `problems`.

        Args:
            pair: The pair.
            target: Name of the alias in the naming of the checkpoint.
            source: Name of the source in the naming of the checkpoint.
            stored_name: Name on disk of the tensor that all names of the source share, see `_stored_names`; None if
                there is none.
        """
        is_declared = pair.flag.is_set(self.config)
        reason = pair.flag.explain(self.config)
        has_target, has_source = target in self.stored_tensors, source in self.stored_tensors

        def make_decision(stored: StoredNames, action: Literal["alias", "keep-both", "none"], fact: str) -> TieDecision:
            shared_name = stored_name if action == "alias" else None
            return TieDecision(target, source, stored, action, shared_name, is_declared, f"{fact}, {reason}")

        if has_target and has_source and not is_declared:
            return make_decision("undeclared", "keep-both", f"{target} and {source} both present")
        absent = [name for name, is_present in ((target, has_target), (source, has_source)) if not is_present]
        for name in absent:
            if self.names.has_other_form(name):
                return make_decision("other-form", "none", f"{name} present in another form")
        if not is_declared and not self.tie_missing:
            return self._decide_untied(pair, target, source, make_decision)
        if stored_name is None:
            return self._decide_absent(pair, target, source, make_decision)
        if self._is_guess(pair, target, source):
            present, missing = (target, source) if has_target else (source, target)
            fact = f"{missing} absent and its name only a guess, {present} present, {reason}"
            return TieDecision(target, source, "guessed", "none", None, False, fact)
        return self._decide_tied(target, source, stored_name, make_decision)

    def _is_guess(self, pair: TiePair, target: str, source: str) -> bool:
        """Return True if one name of the pair is absent and would be invented for an unknown class.

        In the Llama layout the name of the head is a convention, and with `tie_missing` the user asked for it.
        """
        if not self.architecture.is_unknown_class or self.tie_missing:
            return False
        is_llama_layout = source.endswith(pair.namings[0][1])  # the first pair of `SUFFIX_TIES`
        return source not in self.stored_tensors or (target not in self.stored_tensors and not is_llama_layout)

    def _decide_tied(
        self, target: str, source: str, stored_name: str, make_decision: Callable[..., TieDecision]
    ) -> TieDecision:
        """Decide a pair that is tied: it is one tensor unless both names are present and differ."""
        if target not in self.stored_tensors:
            stored: StoredNames = "tied-to-only" if stored_name == source else "third-name"
            return make_decision(stored, "alias", f"{target} absent, {stored_name} present")
        if stored_name == target:
            return make_decision("name-only", "alias", f"{source} absent, {target} present")
        first, second = self.stored_tensors[target], self.stored_tensors[stored_name]
        if first != second:
            fact = f"{target} is {first.dtype} {first.shape}, {stored_name} is {second.dtype} {second.shape}"
            return make_decision("mismatched", "keep-both", fact)
        if self.are_equal(target, stored_name):
            return make_decision("equal", "alias", f"{target} and {stored_name} have the same bytes")
        return make_decision("different", "keep-both", f"{target} and {stored_name} have different bytes")

    def _decide_untied(
        self, pair: TiePair, target: str, source: str, make_decision: Callable[..., TieDecision]
    ) -> TieDecision:
        """Decide a pair that the config does not tie, and of which at most one name is present."""
        has_target, has_source = target in self.stored_tensors, source in self.stored_tensors
        if not has_target and not has_source:
            return self._decide_absent(pair, target, source, make_decision)
        stored: StoredNames = "name-only" if has_target else "tied-to-only"
        present, missing = (target, source) if has_target else (source, target)
        if has_source and self.names.lacks_base_prefix(pair, source):
            return make_decision("base-model", "none", f"{target} absent, the names are those of a base model")
        # the outer bias of a prediction head is only an alias of the decoder's own bias, which forward reads
        is_unread = has_target and not pair.is_primary and source.endswith(".bias")
        if is_unread or not self._is_of_class():
            return make_decision(stored, "none", f"{missing} absent")
        reason = pair.flag.explain(self.config)
        self.problems.append(
            f"{missing}: not in the checkpoint, and not tied to {present} ({reason}), so "
            f"{self.architecture.class_name} would start with random values there; "
            f"convert the checkpoint with --tie-missing to use {present} for it, or add the tensor"
        )
        return make_decision(stored, "none", f"{missing} absent")

    def _decide_absent(
        self, pair: TiePair, target: str, source: str, make_decision: Callable[..., TieDecision]
    ) -> TieDecision:
        """Decide a pair of which neither name is present."""
        # a secondary pair that is absent as a whole is a head that was never trained: every loader initializes it
        if pair.is_primary and self._is_of_class():
            self.problems.append(
                f"{target}, {source}: neither is in the checkpoint, and {self.architecture.class_name} needs one of "
                "them; use a complete checkpoint (--tie-missing cannot replace both)"
            )
        return make_decision("missing", "none", f"{target} and {source} absent")

    def _is_of_class(self) -> bool:
        return not self.architecture.is_unknown_class and self.names.match_fraction >= _MIN_MATCH_FRACTION
