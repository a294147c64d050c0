"""`--names`: disk names (as on the Hub), model names (of the transformers module), or the names of a trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptx.architecture.trainer_naming.detect import SCHEMES, detect_scheme
from ckptx.architecture.trainer_naming.scheme import TrainerScheme
from ckptx.conversion.steps.target_tensors import TargetTensors
from ckptx.errors import UnsupportedError
from ckptx.mapping.ops import Conversion
from ckptx.mapping.rules import NameRules, RenamedTensors, TrainerRules
from ckptx.model_view.view import ModelView, rules_of


@dataclass(frozen=True, slots=True)
class NameMap:
    """Map from target names to the names that they are loaded as, and to the names before renaming.

    Attributes:
        rules: Rules from disk names to model names, or, if the target has names of a trainer, `TrainerRules`; None if
            the class is unknown.
        sources: Target name -> view names of the tensors that it is made of; empty if no name changed.
    """

    rules: NameRules | None
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def loaded_name(self, name: str) -> str | None:
        """Return the name that a target tensor is loaded as; None if the rules do not know the tensor.

        For a disk or model name, it is the model name; for a name of a trainer, the disk name; for an unknown class,
        the name itself.
        """
        return name if self.rules is None else self.rules.model_name(name)

    def target_names(self, view: ModelView) -> dict[str, str]:
        """Map view names to target names, for tensors that map one to one."""
        if not self.sources:
            return {name: name for name in view.tensors}
        uses = Counter(name for sources in self.sources.values() for name in sources)
        return {
            sources[0]: name for name, sources in self.sources.items() if len(sources) == 1 and uses[sources[0]] == 1
        }


@dataclass(frozen=True, slots=True)
class SchemeChange:
    """Change of the naming scheme from or to the names of a trainer.

    Attributes:
        before: Scheme of the source: "hf", "model" or a trainer, such as "torchtitan" or "megatron".
        after: Scheme of the target, one of the same.
        conversions: Conversions from names of the trainer to disk names.
    """

    before: str
    after: str
    conversions: tuple[Conversion, ...]

    def report_entry(self) -> dict[str, Any]:
        """Return the `names` entry of the report, with the number of heads for each permuted q or k projection."""
        heads = {
            each.targets[0]: op.args[0] for each in self.conversions for op in each.ops if op.kind == "permute_rope"
        }
        permuted = [{"name": name, "heads": count} for name, count in heads.items()]
        return {"before": self.before, "after": self.after, "permuted": permuted}


@dataclass(frozen=True, slots=True)
class NamedTarget:
    """Target tensors under their new names.

    Attributes:
        target: Target tensors.
        naming: Map from target names to loaded names and to view names.
        notes: Notes for the user.
        scheme_change: Change from or to the names of a trainer; None for no such change.
    """

    target: TargetTensors
    naming: NameMap
    notes: tuple[str, ...] = ()
    scheme_change: SchemeChange | None = None

    def is_unchanged(self, name: str, view: ModelView) -> bool:
        """Return True if a target tensor has the elements of a tensor of the source in the same order.

        Args:
            name: Name of a target tensor, or of an alias, that is made of one tensor.
            view: Model in the source; a tensor that is only renamed has the chunks of its entry there.
        """
        name = self.target.aliases.get(name, name)
        stored_name = self.target.source_names.get(name)
        entry = view.tensors.get(self.naming.sources.get(name, (name,))[0])
        if stored_name is None or entry is None:  # a tied name that the target or the source does not store itself
            return True
        chunks = self.target.source.tensors[stored_name].chunks
        return chunks is entry.chunks or chunks == entry.chunks


def rename_tensors(
    view: ModelView,
    target: TargetTensors,
    *,
    names: str | None,
    default: str | None,
    original_tensor_names: list[str] | None = None,
) -> NamedTarget:
    """Rename the tensors of a target to the scheme of `--names`.

    Args:
        view: Model in the source.
        target: Target under view names, with the dtypes of the source and without copied aliases.
        names: Value of `--names`; None if not set.
        default: Scheme without `--names`; None keeps names.
        original_tensor_names: Names of the tensors in the original files that a manifest records; None for none.

    Raises:
        UnsupportedError: `--names` is set and the naming of the class is unknown, or ckptx lacks a conversion.
        InputError: Some of the tensors that are combined into one are missing.
    """
    entries = {name: target.source.tensors[target.source_names[name]] for name in target.tensors}
    assert all(target.tensors[name].dtype is entry.dtype for name, entry in entries.items())
    assert not target.copied_aliases
    disk_to_model = rules_of(view)
    source_rules = TrainerRules(view.trainer_conversions) if view.trainer_conversions else None
    source_scheme = _source_scheme(view) if view.trainer_conversions else None
    requested = names or default
    scheme = SCHEMES.get(requested or "")
    if requested is None or (scheme is not None and scheme == source_scheme):
        return NamedTarget(target, NameMap(source_rules or disk_to_model))
    if disk_to_model is None:
        if names is None:
            return NamedTarget(target, NameMap(None))
        raise UnsupportedError(f"--names {requested}: the naming of this class is unknown; leave out --names")
    entries |= {name: entries[stored] for name, stored in target.aliases.items()}
    renamed = RenamedTensors.identity(entries)
    if source_rules is not None:
        renamed = renamed.then(source_rules.from_trainer(renamed.tensors))
    try:
        if requested == "model":
            renamed = renamed.then(disk_to_model.to_model(renamed.tensors))
        else:
            renamed = renamed.then(disk_to_model.to_disk(renamed.tensors, original_tensor_names))
    except UnsupportedError as error:
        if names is not None:
            raise
        # Names that follow `requested` already need no conversion, so the present names follow the other scheme.
        unchanged = "hf" if requested == "model" else "model"
        raise UnsupportedError(f"{error}; pass --names {unchanged} to keep the names") from error
    change = None
    if source_scheme is not None:
        change = SchemeChange(source_scheme.trainer, requested, view.trainer_conversions)
    rules: NameRules = disk_to_model
    if scheme is not None:
        target_rules = _target_rules(scheme, view)
        if change is None:
            before = "hf" if _is_unchanged(renamed) else "model"  # `renamed` has disk names so far
            change = SchemeChange(before, requested, target_rules.conversions)
        renamed = renamed.then(target_rules.to_trainer(renamed.tensors))
        if renamed.unconverted:
            raise UnsupportedError(
                f'--names {scheme.trainer}: tensor "{renamed.unconverted[0]}" is quantized, and {scheme.trainer} has '
                "no names for quantization scales; pass --names hf"
            )
        rules = target_rules
    notes = tuple(renamed.notes)
    if _is_unchanged(renamed):
        return NamedTarget(target, NameMap(rules), notes)
    return NamedTarget(_apply_renaming(target, renamed), NameMap(rules, renamed.sources), notes, change)


def _is_unchanged(renamed: RenamedTensors) -> bool:
    return all(sources == (name,) for name, sources in renamed.sources.items())


def _source_scheme(view: ModelView) -> TrainerScheme | None:
    assert view.disk_architecture is not None
    return detect_scheme(view.disk_architecture, view.catalog.tensors)


def _target_rules(scheme: TrainerScheme, view: ModelView) -> TrainerRules:
    assert view.disk_architecture is not None and view.config is not None
    return TrainerRules(scheme.conversions(view.disk_architecture.class_name, view.config))


def _apply_renaming(target: TargetTensors, renamed: RenamedTensors) -> TargetTensors:
    """Return the target under new names; its source gets an entry for each tensor under its new name."""
    name_by_sources = {sources: name for name, sources in renamed.sources.items()}
    aliases = {
        name_by_sources[(name,)]: name_by_sources[(stored,)]
        for name, stored in target.aliases.items()
        if (name,) in name_by_sources and (stored,) in name_by_sources
    }
    tensors = {name: entry for name, entry in renamed.tensors.items() if name not in aliases}
    others = {name: entry for name, entry in target.source.tensors.items() if name not in renamed.tensors}
    return replace(
        target,
        source=replace(target.source, tensors={**others, **renamed.tensors}),
        tensors=tensors,
        source_names={name: name for name in tensors},
        stored_names={
            name: tuple(stored for old in renamed.sources[name] for stored in target.stored_names.get(old, ()))
            for name in tensors
        },
        aliases=aliases,
    )
