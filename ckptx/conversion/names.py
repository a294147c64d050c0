"""`--names`: the same tensors as they are published, as the model has them, or as torchtitan calls them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from ckptx.architecture.dialects import torchtitan
from ckptx.conversion.run import Conversion
from ckptx.conversion.target import Target
from ckptx.errors import UnsupportedError
from ckptx.mapping.rules import NameRules, Renamed
from ckptx.view import ModelView, dialect_rules, rules_of


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the names of a target relate to others.

    Attributes:
        rules: To the names of the model; None when the class is unknown.
        sources: New name -> the old names of what went into it; empty when names are what they were.
    """

    rules: NameRules | None
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def renamed(self, view: ModelView) -> dict[str, str]:
        """Name in the view -> name now, of tensors that went over one to one."""
        if not self.sources:
            return {name: name for name in view.tensors}
        uses = Counter(name for sources in self.sources.values() for name in sources)
        return {
            sources[0]: name for name, sources in self.sources.items() if len(sources) == 1 and uses[sources[0]] == 1
        }


def respell(
    run: Conversion, view: ModelView, target: Target, *, by_default: str | None, original: list[str] | None = None
) -> Spelling:
    """Gives the tensors of `target` the names that `--names` asks for.

    Args:
        run: Its source gets an entry for each tensor that is put together otherwise.
        view: The model.
        target: Renamed in place, aliases too.
        by_default: What to do without `--names`; None leaves names as they are.
        original: The names on disk to come back to, where a manifest remembers them.

    Raises:
        UnsupportedError: The class is unknown, or has a conversion that ckptx lacks.
        InputError: Tensors that belong together are not all there.
    """
    published, spoken = rules_of(view), dialect_rules(view.dialect) if view.dialect else None
    wanted = run.options.names or by_default
    if wanted is None or (wanted == "torchtitan" and spoken is not None):
        return Spelling(spoken or published)
    if published is None:
        if run.options.names is None:
            return Spelling(None)
        raise UnsupportedError(f"--names {wanted}: the names of this class are unknown; leave them as they are")
    entries = {name: run.source.tensors[target.origin[name]] for name in target.tensors}
    entries |= {name: entries[stored] for name, stored in target.aliases.items()}
    renamed = Renamed.not_yet(entries)
    if spoken is not None:
        renamed = renamed.then(spoken.to_model(renamed.tensors))
    rules = published
    if wanted == "model":
        renamed = renamed.then(published.to_model(renamed.tensors))
    else:
        renamed = renamed.then(published.to_disk(renamed.tensors, original))
    if wanted == "torchtitan":
        rules = _torchtitan(view)
        renamed = renamed.then(rules.to_disk(renamed.tensors))
        if renamed.kept:
            raise UnsupportedError(
                f'--names torchtitan: tensor "{renamed.kept[0]}" is quantized; torchtitan has no names for what lies '
                "beside it; keep the names that it has on disk"
            )
    run.report.warnings.extend(renamed.notes)
    if all(sources == (name,) for name, sources in renamed.sources.items()):
        return Spelling(rules)
    _apply(run, target, renamed)
    return Spelling(rules, renamed.sources)


def _torchtitan(view: ModelView) -> NameRules:
    assert view.published is not None and view.config is not None
    return dialect_rules(torchtitan.conversions(view.published.class_name, view.config))


def _apply(run: Conversion, target: Target, renamed: Renamed) -> None:
    """Makes `renamed` what the target holds and the source offers."""
    became = {sources: name for name, sources in renamed.sources.items()}
    aliases = {
        became[name,]: became[stored,]
        for name, stored in target.aliases.items()
        if (name,) in became and (stored,) in became
    }
    read = {
        name: tuple(disk for old in sources for disk in target.read.get(old, ()))
        for name, sources in renamed.sources.items()
    }
    target.tensors = {name: entry for name, entry in renamed.tensors.items() if name not in aliases}
    target.origin = {name: name for name in target.tensors}
    target.read = {name: read[name] for name in target.tensors}
    target.aliases = aliases
    others = {name: entry for name, entry in run.source.tensors.items() if name not in renamed.tensors}
    run.source = replace(run.source, tensors={**others, **renamed.tensors})
