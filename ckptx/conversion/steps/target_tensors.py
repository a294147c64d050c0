"""Target of a conversion: its tensors, their names and dtypes, and which of them share bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckptx.architecture.tied import TieDecision
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InputError
from ckptx.model_view.view import ModelView


@dataclass(frozen=True, slots=True)
class TargetTensors:
    """Tensors of a target.

    Attributes:
        source: Checkpoint they are read from, with an entry for each combined or split tensor.
        tensors: Target tensors by name, with shapes and dtypes of the target; chunks are not set yet.
        source_names: Name in the target -> name of the entry in `source` that it is read from.
        disk_names: Name in the target -> names on disk of the tensors it is made of.
        aliases: Name that shares bytes -> name in `tensors`; only for a DCP, and for sharded safetensors before they
            are sharded.
        copies: Name in `tensors` that repeats the bytes of another because they cannot share -> that other name.
        tied_disk_names: Names on disk of tied tensors, which the ledger accepts if one of them is written.
    """

    source: Catalog
    tensors: Mapping[str, TensorEntry]
    source_names: Mapping[str, str]
    disk_names: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    tied_disk_names: frozenset[str] = frozenset()

    @classmethod
    def from_source(cls, source: Catalog, tensors: Mapping[str, TensorEntry]) -> TargetTensors:
        """Create a target with every tensor under its key; the entries are those of the source, with stored names."""
        renamed = {name: entry.with_name(name) for name, entry in tensors.items()}
        disk_names = {name: entry.name for name, entry in tensors.items()}
        return cls(source, renamed, disk_names, {name: (disk,) for name, disk in disk_names.items()})

    def has_names(self, names: Iterable[str]) -> bool:
        """Return True if every name is present, as a tensor or as an alias."""
        return all(name in self.tensors or name in self.aliases for name in names)

    def written_disk_names(self) -> set[str]:
        """Return the stored names of all tensors that the target is made of."""
        return {name for names in self.disk_names.values() for name in names}

    def renamed(self, new_name: Callable[[str], str]) -> TargetTensors:
        """Return the same target under other names; `new_name` maps each name to its new one."""
        return replace(
            self,
            tensors={new_name(name): entry.with_name(new_name(name)) for name, entry in self.tensors.items()},
            source_names={new_name(name): source_name for name, source_name in self.source_names.items()},
            disk_names={new_name(name): on_disk for name, on_disk in self.disk_names.items()},
            aliases={new_name(name): new_name(kept_name) for name, kept_name in self.aliases.items()},
            copies={new_name(name): new_name(other_name) for name, other_name in self.copies.items()},
        )

    def with_copies(self, names: Iterable[str]) -> TargetTensors:
        """Return the same target with these aliases stored as separate tensors."""
        copied = {name: self.aliases[name] for name in names}
        if not copied:
            return self
        return replace(
            self,
            tensors={**self.tensors, **{name: self.tensors[kept].with_name(name) for name, kept in copied.items()}},
            source_names={**self.source_names, **{name: self.source_names[kept] for name, kept in copied.items()}},
            disk_names={**self.disk_names, **{name: self.disk_names[kept] for name, kept in copied.items()}},
            aliases={name: kept for name, kept in self.aliases.items() if name not in copied},
            copies={**self.copies, **copied},
        )

    def select(self, names: Iterable[str]) -> TargetTensors:
        """Return the same target with only these tensors, in this order."""
        names = list(names)
        return replace(
            self,
            tensors={name: self.tensors[name] for name in names},
            source_names={name: self.source_names[name] for name in names},
            disk_names={name: self.disk_names[name] for name in names},
        )


def apply_ties(view: ModelView, decisions: Iterable[TieDecision], *, tied: str, can_alias: bool) -> TargetTensors:
    """Return the target with tied weights written as `tied` requires.

    Args:
        view: Model in the source.
        decisions: Decisions on its tied weights.
        tied: Value of `--tied`: "auto" to follow the decisions, or "alias", "copy" or "drop" for all tied names.
        can_alias: True if two names of the target can point at the same bytes.

    Raises:
        InputError: `--tied drop` would lose a tensor that differs from the one it is declared tied to.
    """
    decisions = list(decisions)
    for decision in decisions:
        if tied == "drop" and decision.stored in ("different", "mismatched"):
            raise InputError(
                f'tensors "{decision.target}" and "{decision.source}" differ, so --tied drop would lose one; '
                "use --tied auto, which keeps both"
            )
    all_tensors = TargetTensors.from_source(view.catalog, view.tensors)
    tensors, source_names, disk_names = (
        dict(all_tensors.tensors),
        dict(all_tensors.source_names),
        dict(all_tensors.disk_names),
    )
    aliases: dict[str, str] = {}

    def store_under(name: str, kept_name: str) -> None:
        tensors[name] = tensors[kept_name].with_name(name)
        source_names[name], disk_names[name] = source_names[kept_name], disk_names[kept_name]

    def drop(name: str) -> None:
        for each in (tensors, source_names, disk_names):
            each.pop(name, None)

    tied_pairs = [
        (each, each.stored_name) for each in decisions if each.action == "alias" and each.stored_name is not None
    ]
    merged_pairs = []
    for decision, kept_name in tied_pairs:
        names = {decision.target, decision.source} - {kept_name}
        if tied == "copy" or (tied == "auto" and not can_alias and not decision.declared):
            # Loaders tie only what the config declares, not --tie-missing, so a file must hold every name.
            for name in names:
                store_under(name, kept_name)
        elif tied == "drop" or not can_alias:
            store_under(decision.source, kept_name)
            merged_pairs.append((decision, kept_name))
        else:
            for name in names:
                drop(name)
                aliases[name] = kept_name
    # Drop last: a name that stands in for an absent source may do so for several pairs.
    for decision, kept_name in merged_pairs:
        for name in {decision.target, kept_name} - {decision.source}:
            drop(name)
    tied_names = {name for decision, _ in tied_pairs for name in (decision.target, decision.source)}
    tied_disk_names = frozenset(view.tensors[name].name for name in tied_names if name in view.tensors)
    return TargetTensors(view.catalog, tensors, source_names, disk_names, aliases, {}, tied_disk_names)
