"""Decides, pair by pair, which names of a checkpoint are one tensor.

The config flag is not the truth: checkpoints with ``tie_word_embeddings: true`` hold two different tensors,
and T5 forces the flag for all. The contents decide, exactly as ``from_pretrained`` does, and where it would
leave a parameter with random values in silence, this refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptx.architecture.disk_names import NamesOnDisk, name_pairs
from ckptx.architecture.overrides import SUFFIX_TABLE
from ckptx.architecture.spec import Architecture, TiePair
from ckptx.errors import InputError

Case = Literal[
    "source-only",  # the usual form of a tied checkpoint
    "target-only",  # the alias was stored, the source was not
    "third-name",  # neither, but another name tied to the same source
    "equal",
    "different",
    "mismatched",  # other shape or dtype
    "undeclared",  # both there and not tied: two plain tensors
    "base-model",  # not tied, and the files hold a base model without its head
    "other-form",  # the missing tensor is there in another form, as a quantized module
    "missing",  # neither, and it does not matter or cannot be judged
]

# Fewer known names than this, and the checkpoint is not one of the class: an absent name proves nothing.
_BELONGS = 0.5


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the catalog knows about a name on disk."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TieDecision:
    """What happens to one candidate pair.

    Attributes:
        target: The alias, in the naming of the checkpoint.
        source: The name that a HF checkpoint stores, in the naming of the checkpoint.
        case: The row of the tie table.
        action: ``alias``: one tensor, found on disk under ``stored``. ``keep-both``: two tensors.
            ``none``: there is nothing to tie.
        stored: For ``alias``, the name on disk that holds the bytes; it may be a third name of the same tie.
        declared: Whether the config ties the pair. An undeclared alias (``--tie-missing``) must be stored
            under both names in a HF checkpoint, for no loader would tie it.
        evidence: One sentence for the report.
    """

    target: str
    source: str
    case: Case
    action: Literal["alias", "keep-both", "none"]
    stored: str | None
    declared: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class UntyingEdits:
    """Changes to ``config.json`` so that it stops calling different tensors tied.

    Attributes:
        values: New values by key path.
        note: One sentence on what was edited or why not; empty when there is nothing to say.
    """

    values: Mapping[tuple[str, ...], bool] = field(default_factory=dict)
    note: str = ""


def resolve_ties(
    architecture: Architecture,
    config: Mapping[str, Any],
    on_disk: Mapping[str, StoredTensor],
    equal: Callable[[str, str], bool],
    *,
    tie_missing: bool = False,
    accepted: list[str] | None = None,
) -> list[TieDecision]:
    """One decision per pair of ``architecture.ties``, in that order.

    Args:
        architecture: Of the checkpoint's class.
        config: The contents of ``config.json``.
        on_disk: Every tensor of the checkpoint.
        equal: Compares the bytes of two names. Called only for declared pairs whose names are both on disk
            with the same shape and dtype.
        tie_missing: Treat a pair as tied when one name is missing, whatever the config says.
        accepted: Gets a sentence for each name that is missing and that nothing on disk can stand for.

    Raises:
        InputError: There is such a name, and no ``accepted``.
    """
    names = NamesOnDisk(architecture, on_disk)
    named = name_pairs(architecture.ties, names)
    anchors = _anchors(architecture.ties, named, config, on_disk, tie_missing)
    judge = _TieJudge(architecture, config, on_disk, names, equal, tie_missing)
    decisions = [
        judge.decide(pair, target, source, anchors.get(pair.namings[0][1]))
        for pair, (target, source) in zip(architecture.ties, named, strict=True)
    ]
    if judge.problems and accepted is None:
        raise InputError("; ".join(judge.problems))
    if accepted is not None:
        accepted += judge.problems
    return decisions


def config_edits(
    architecture: Architecture, config: Mapping[str, Any], decisions: Sequence[TieDecision]
) -> UntyingEdits:
    """The edits for pairs that the config declares and that hold different tensors.

    Args:
        architecture: As given to ``resolve_ties``.
        config: As given to ``resolve_ties``.
        decisions: What it returned.
    """
    judged = list(zip(architecture.ties, decisions, strict=True))
    untied = [pair for pair, decision in judged if decision.declared and decision.action == "keep-both"]
    if not untied:
        return UntyingEdits()
    if not architecture.ties_flag_editable:
        return UntyingEdits(note=f"tie_word_embeddings stays as it is: {architecture.class_name} computes with it")
    paths: set[tuple[str, ...]] = {("tie_word_embeddings",)}
    if isinstance(config.get("text_config"), Mapping):
        paths.add(("text_config", "tie_word_embeddings"))
    for pair in untied:
        paths.update(pair.flag.paths)
    edited = _edited(config, paths)
    aliases = [d for pair, d in judged if d.declared and d.action == "alias" and not pair.flag.effective(edited)]
    if aliases:
        return UntyingEdits(note=f"tie_word_embeddings stays as it is: {aliases[0].target} still needs it")
    listed = ", ".join(sorted(".".join(path) for path in paths))
    return UntyingEdits(dict.fromkeys(sorted(paths), False), f"{listed} written as false: the tensors differ")


def _edited(config: Mapping[str, Any], paths: set[tuple[str, ...]]) -> dict[str, Any]:
    result = dict(config)
    for path in paths:
        node = result
        for key in path[:-1]:
            below = node.get(key)
            node[key] = dict(below) if isinstance(below, Mapping) else {}
            node = node[key]
        node[path[-1]] = False
    return result


def _anchors(
    ties: Sequence[TiePair],
    named: Sequence[tuple[str, str]],
    config: Mapping[str, Any],
    on_disk: Mapping[str, StoredTensor],
    tie_missing: bool,
) -> dict[str, str]:
    """Per source (model name), what stands for it on disk: itself, or the first target tied to it."""
    anchors: dict[str, str] = {}
    for pair, (_, source) in zip(ties, named, strict=True):
        if source in on_disk:
            anchors[pair.namings[0][1]] = source
    for pair, (target, _) in zip(ties, named, strict=True):
        if target in on_disk and (tie_missing or pair.flag.effective(config)):
            anchors.setdefault(pair.namings[0][1], target)
    return anchors


@dataclass(slots=True)
class _TieJudge:
    """The tie table, applied to one pair at a time; collects refusals so that all are reported at once."""

    architecture: Architecture
    config: Mapping[str, Any]
    on_disk: Mapping[str, StoredTensor]
    names: NamesOnDisk
    equal: Callable[[str, str], bool]
    tie_missing: bool
    problems: list[str] = field(default_factory=list)

    def decide(self, pair: TiePair, target: str, source: str, anchor: str | None) -> TieDecision:
        declared = pair.flag.effective(self.config)
        reason = pair.flag.evidence(self.config)
        has_target, has_source = target in self.on_disk, source in self.on_disk

        def decided(case: Case, action: Literal["alias", "keep-both", "none"], said: str) -> TieDecision:
            stored = anchor if action == "alias" else None
            return TieDecision(target, source, case, action, stored, declared, f"{said}, {reason}")

        if has_target and has_source and not declared:
            return decided("undeclared", "keep-both", f"{target} and {source} both present")
        absent = [name for name, there in ((target, has_target), (source, has_source)) if not there]
        for name in absent:
            if self.names.has_other_form(name):
                return decided("other-form", "none", f"{name} present in another form")
        if not declared and not self.tie_missing:
            return self._undeclared(pair, target, source, decided)
        if anchor is None:
            return self._neither(pair, target, source, decided)
        return self._declared(target, source, anchor, decided)

    def _declared(self, target: str, source: str, anchor: str, decided: Callable[..., TieDecision]) -> TieDecision:
        """The pair is one tensor unless both are there and differ; ``anchor`` is on disk."""
        if target not in self.on_disk:
            case: Case = "source-only" if anchor == source else "third-name"
            return decided(case, "alias", f"{target} absent, {anchor} present")
        if anchor == target:
            return decided("target-only", "alias", f"{source} absent, {target} present")
        first, second = self.on_disk[target], self.on_disk[anchor]
        if first != second:
            said = f"{target} is {first.dtype} {first.shape}, {anchor} is {second.dtype} {second.shape}"
            return decided("mismatched", "keep-both", said)
        if self.equal(target, anchor):
            return decided("equal", "alias", f"{target} and {anchor} hold the same bytes")
        return decided("different", "keep-both", f"{target} and {anchor} hold different bytes")

    def _undeclared(self, pair: TiePair, target: str, source: str, decided: Callable[..., TieDecision]) -> TieDecision:
        """At most one name is there, and the config does not tie it to the other."""
        has_target, has_source = target in self.on_disk, source in self.on_disk
        if not has_target and not has_source:
            return self._neither(pair, target, source, decided)
        case: Case = "target-only" if has_target else "source-only"
        present, missing = (target, source) if has_target else (source, target)
        if has_source and self.names.is_without_base_prefix(pair, source):
            return decided("base-model", "none", f"{target} absent, the names are those of a base model")
        # the outer bias of a prediction head is only a second name for the decoder's own, which forward reads
        unread = has_target and not pair.is_primary and source.endswith(".bias")
        if unread or not self._can_judge():
            return decided(case, "none", f"{missing} absent")
        why = pair.flag.evidence(self.config)
        self.problems.append(
            f"{missing}: not in the checkpoint, and not tied to {present} ({why}), so "
            f"{self.architecture.class_name} would start with random values there; "
            f"pass --tie-missing to use {present} for it, or add the tensor"
        )
        return decided(case, "none", f"{missing} absent")

    def _neither(self, pair: TiePair, target: str, source: str, decided: Callable[..., TieDecision]) -> TieDecision:
        # a secondary pair that is absent as a whole is a head that was never trained: every loader
        # initialises it
        if pair.is_primary and self._can_judge():
            self.problems.append(
                f"{target}, {source}: neither is in the checkpoint, "
                f"{self.architecture.class_name} needs one of them; the checkpoint is incomplete "
                "(--tie-missing cannot help: there is nothing to tie to)"
            )
        return decided("missing", "none", f"{target} and {source} absent")

    def _can_judge(self) -> bool:
        return self.architecture.known_from != SUFFIX_TABLE and self.names.match >= _BELONGS
