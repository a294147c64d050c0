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
        source: Checkpoint they are read from, with an additional entry for each combined or split tensor.
        tensors: Target tensors by name, with shapes and dtypes of the target; chunks are not set yet.
        source_names: Name in the target -> name of the entry in `source` that it is read from.
        stored_names: Name in the target -> stored names, in the source, of the tensors it is made of.
        aliases: Name that shares bytes -> name in `tensors`; only for a DCP, and for sharded safetensors before they
            are sharded.
        copied_aliases: Alias that `with_copies` stored as a tensor of its own -> name in `tensors` with the same bytes.
            Copies that `--tied copy` stores are not in it.
        tied_stored_names: Stored names of tied tensors, of which not all have to be written: the ledger counts the
            others as tied.
    """

    source: Catalog
    tensors: Mapping[str, TensorEntry]
    source_names: Mapping[str, str]
    stored_names: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    copied_aliases: Mapping[str, str] = field(default_factory=dict)
    tied_stored_names: frozenset[str] = frozenset()

    @classmethod
    def from_source(cls, source: Catalog, tensors: Mapping[str, TensorEntry]) -> TargetTensors:
        """Create a target with every tensor under its key in `tensors`, whose entries have their stored names."""
        return cls(
            source,
            tensors={name: entry.with_name(name) for name, entry in tensors.items()},
            source_names={name: entry.name for name, entry in tensors.items()},
            stored_names={name: (entry.name,) for name, entry in tensors.items()},
        )

    def has_names(self, names: Iterable[str]) -> bool:
        """Return True if every name is present, as a tensor or as an alias."""
        return all(name in self.tensors or name in self.aliases for name in names)

    def written_stored_names(self) -> set[str]:
        """Return the stored names of all tensors that the target is made of."""
        return {name for names in self.stored_names.values() for name in names}

    def renamed(self, new_name: Callable[[str], str]) -> TargetTensors:
        """Return the same target under other names; `new_name` maps each name to its new one."""
        return replace(
            self,
            tensors={new_name(name): entry.with_name(new_name(name)) for name, entry in self.tensors.items()},
            source_names={new_name(name): source_name for name, source_name in self.source_names.items()},
            stored_names={new_name(name): stored for name, stored in self.stored_names.items()},
            aliases={new_name(name): new_name(kept) for name, kept in self.aliases.items()},
            copied_aliases={new_name(name): new_name(kept) for name, kept in self.copied_aliases.items()},
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
            stored_names={**self.stored_names, **{name: self.stored_names[kept] for name, kept in copied.items()}},
            aliases={name: kept for name, kept in self.aliases.items() if name not in copied},
            copied_aliases={**self.copied_aliases, **copied},
        )

    def select(self, names: Iterable[str]) -> TargetTensors:
        """Return the same target with only these tensors, in this order, and the aliases of these tensors."""
        names = list(names)
        selected = set(names)
        return replace(
            self,
            tensors={name: self.tensors[name] for name in names},
            source_names={name: self.source_names[name] for name in names},
            stored_names={name: self.stored_names[name] for name in names},
            aliases={name: kept for name, kept in self.aliases.items() if kept in selected},
            copied_aliases={
                name: kept for name, kept in self.copied_aliases.items() if name in selected and kept in selected
            },
        )


def apply_ties(view: ModelView, decisions: Iterable[TieDecision], *, tied: str, can_alias: bool) -> TargetTensors:
    """Return the target with tied weights written as `tied` requires.

    Args:
        view: Model in the source.
        decisions: Decisions on its tied weights.
        tied: Value of `--tied`: "alias", "copy" or "drop", for the names that the decisions make one tensor. "auto" is
            "alias" if `can_alias`; else "drop", but "copy" for a pair that the config does not declare.
        can_alias: True if two names of the target can point at the same bytes; required for "alias".

    Raises:
        InputError: `--tied drop` would lose a tensor that differs from the one it is declared tied to.
    """
    assert can_alias or tied != "alias"  # the options refuse it
    decisions = list(decisions)
    for decision in decisions:
        if tied == "drop" and decision.stored in ("different", "mismatched"):  # in bytes; in dtype or shape
            raise InputError(
                f'tensors "{decision.target}" and "{decision.source}" differ, so --tied drop would lose one; '
                "use --tied auto, which keeps both"
            )
    all_tensors = TargetTensors.from_source(view.catalog, view.tensors)
    tensors, source_names, stored_names = (
        dict(all_tensors.tensors),
        dict(all_tensors.source_names),
        dict(all_tensors.stored_names),
    )
    aliases: dict[str, str] = {}

    def store_under(name: str, kept_name: str) -> None:
        tensors[name] = tensors[kept_name].with_name(name)
        source_names[name], stored_names[name] = source_names[kept_name], stored_names[kept_name]

    def drop(name: str) -> None:
        for each in (tensors, source_names, stored_names):
            each.pop(name, None)

    tied_pairs = [
        (each, each.stored_name) for each in decisions if each.action == "alias" and each.stored_name is not None
    ]
    dropped_pairs = []
    for decision, kept_name in tied_pairs:
        names = {decision.target, decision.source} - {kept_name}
        if tied == "copy" or (tied == "auto" and not can_alias and not decision.declared):
            # Loaders tie what the config declares, not what --tie-missing tied, so a file must hold every name.
            for name in names:
                store_under(name, kept_name)
        elif tied == "drop" or not can_alias:
            store_under(decision.source, kept_name)
            dropped_pairs.append((decision, kept_name))
        else:
            for name in names:
                drop(name)
                aliases[name] = kept_name
    # Drop last: if B and C are tied to A and only B is stored, both pairs copy B to A.
    for decision, kept_name in dropped_pairs:
        for name in {decision.target, kept_name} - {decision.source}:
            drop(name)
    tied_names = {name for decision, _ in tied_pairs for name in (decision.target, decision.source)}
    tied_stored_names = frozenset(view.tensors[name].name for name in tied_names if name in view.tensors)
    return TargetTensors(
        view.catalog, tensors, source_names, stored_names, aliases=aliases, tied_stored_names=tied_stored_names
    )
