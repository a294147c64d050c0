"""`--names`: the same tensors as they are published, as the model has them, or as a trainer calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckptx.architecture.trainer_naming.detect import SCHEMES, scheme_of
from ckptx.architecture.trainer_naming.scheme import TrainerScheme
from ckptx.conversion.steps.target import TargetTensors
from ckptx.errors import UnsupportedError
from ckptx.mapping.rules import NameRules, Renamed
from ckptx.model_view.view import ModelView, rules_of, trainer_rules


@dataclass(frozen=True, slots=True)
class NameMap:
    """How the names of a target relate to others.

    Attributes:
        rules: To the names of the model; None when the class is unknown.
        sources: New name -> the old names of what went into it; empty when names are what they were.
    """

    rules: NameRules | None
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def model_name(self, name: str) -> str | None:
        """The tensor of the model that a tensor goes into; None for what the model does not have."""
        return name if self.rules is None else self.rules.model_name(name)

    def renamed(self, view: ModelView) -> dict[str, str]:
        """Name in the view -> name now, of tensors that went over one to one."""
        if not self.sources:
            return {name: name for name in view.tensors}
        uses = Counter(name for sources in self.sources.values() for name in sources)
        return {
            sources[0]: name for name, sources in self.sources.items() if len(sources) == 1 and uses[sources[0]] == 1
        }


@dataclass(frozen=True, slots=True)
class NamedTarget:
    """A target in the names that it will have.

    Attributes:
        target: The tensors.
        naming: How their names relate to those of the model, and to those that they had.
        notes: What the user should know.
    """

    target: TargetTensors
    naming: NameMap
    notes: tuple[str, ...] = ()


def rename(
    view: ModelView,
    target: TargetTensors,
    *,
    asked: str | None,
    by_default: str | None,
    original: list[str] | None = None,
) -> NamedTarget:
    """Gives the tensors of a target the names that `--names` asks for.

    Args:
        view: The model.
        target: In the names of the view.
        asked: `--names`.
        by_default: What to do without it; None leaves names as they are.
        original: The names on disk to come back to, where a manifest remembers them.

    Raises:
        UnsupportedError: The class is unknown, or has a conversion that ckptx lacks.
        InputError: Tensors that belong together are not all there.
    """
    published, spoken = rules_of(view), trainer_rules(view.trainer_naming) if view.trainer_naming else None
    wanted = asked or by_default
    scheme = SCHEMES.get(wanted or "")
    if wanted is None or (scheme is not None and spoken is not None and scheme == _scheme_of(view)):
        return NamedTarget(target, NameMap(spoken or published))
    if published is None:
        if asked is None:
            return NamedTarget(target, NameMap(None))
        raise UnsupportedError(f"--names {wanted}: the names of this class are unknown; leave them as they are")
    entries = {name: target.source.tensors[target.source_names[name]] for name in target.tensors}
    entries |= {name: entries[stored] for name, stored in target.aliases.items()}
    renamed = Renamed.not_yet(entries)
    if spoken is not None:
        renamed = renamed.then(spoken.to_model(renamed.tensors))
    rules = published
    try:
        if wanted == "model":
            renamed = renamed.then(published.to_model(renamed.tensors))
        else:
            renamed = renamed.then(published.to_disk(renamed.tensors, original))
    except UnsupportedError as error:
        if asked is not None:
            raise
        left = "disk" if wanted == "model" else "model"
        raise UnsupportedError(f"{error}; --names {left} leaves them as they are") from error
    if scheme is not None:
        rules = _rules_of_scheme(scheme, view)
        renamed = renamed.then(rules.to_disk(renamed.tensors))
        if renamed.kept:
            raise UnsupportedError(
                f'--names {scheme.trainer}: tensor "{renamed.kept[0]}" is quantized; {scheme.trainer} has no names for '
                "what lies beside it; keep the names that it has on disk"
            )
    notes = tuple(renamed.notes)
    if all(sources == (name,) for name, sources in renamed.sources.items()):
        return NamedTarget(target, NameMap(rules), notes)
    return NamedTarget(_put_together(target, renamed), NameMap(rules, renamed.sources), notes)


def _scheme_of(view: ModelView) -> TrainerScheme | None:
    assert view.published is not None
    return scheme_of(view.published, view.catalog.tensors)


def _rules_of_scheme(scheme: TrainerScheme, view: ModelView) -> NameRules:
    assert view.published is not None and view.config is not None
    return trainer_rules(scheme.conversions(view.published.class_name, view.config))


def _put_together(target: TargetTensors, renamed: Renamed) -> TargetTensors:
    """The target in new names; its source gets an entry for each tensor in its new form."""
    became = {sources: name for name, sources in renamed.sources.items()}
    aliases = {
        became[name,]: became[stored,]
        for name, stored in target.aliases.items()
        if (name,) in became and (stored,) in became
    }
    tensors = {name: entry for name, entry in renamed.tensors.items() if name not in aliases}
    others = {name: entry for name, entry in target.source.tensors.items() if name not in renamed.tensors}
    return replace(
        target,
        source=replace(target.source, tensors={**others, **renamed.tensors}),
        tensors=tensors,
        source_names={name: name for name in tensors},
        read={
            name: tuple(disk for old in renamed.sources[name] for disk in target.read.get(old, ())) for name in tensors
        },
        aliases=aliases,
    )
