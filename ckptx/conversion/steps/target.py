"""What the target of a conversion holds: which tensors, under which names, shared how, in which dtype."""

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
    """The tensors of a target.

    Attributes:
        source: The checkpoint they are read from, with an entry for each tensor that is put together.
        tensors: By name; shapes and dtypes are those of the target, chunks are not set yet.
        source_names: Name in the target -> name of the entry in `source` that it is read from.
        read: Name in the target -> names on disk of the tensors it is made of.
        aliases: Names that share the bytes of a name in `tensors`; only a DCP can have some.
        copies: Names in `tensors` that hold the bytes of another one, because no file can share them.
        shared: Names on disk of tied tensors: they are accounted for when one of them is written.
    """

    source: Catalog
    tensors: Mapping[str, TensorEntry]
    source_names: Mapping[str, str]
    read: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()

    @classmethod
    def of(cls, source: Catalog, tensors: Mapping[str, TensorEntry]) -> TargetTensors:
        """Every tensor under its own name. The entries are those of the source and name where they are on disk."""
        renamed = {name: entry.called(name) for name, entry in tensors.items()}
        on_disk = {name: entry.name for name, entry in tensors.items()}
        return cls(source, renamed, on_disk, {name: (disk,) for name, disk in on_disk.items()})

    def holds(self, names: Iterable[str]) -> bool:
        """True when every one of `names` is there, as a tensor or as a name that shares bytes."""
        return all(name in self.tensors or name in self.aliases for name in names)

    def written(self) -> set[str]:
        """Names on disk of everything the target is made of."""
        return {name for names in self.read.values() for name in names}

    def renamed(self, names: Callable[[str], str]) -> TargetTensors:
        """The same under other names."""
        return replace(
            self,
            tensors={names(name): entry.called(names(name)) for name, entry in self.tensors.items()},
            source_names={names(name): stored for name, stored in self.source_names.items()},
            read={names(name): on_disk for name, on_disk in self.read.items()},
            aliases={names(name): names(stored) for name, stored in self.aliases.items()},
            copies={names(name): names(stored) for name, stored in self.copies.items()},
        )

    def with_copies(self, names: Iterable[str]) -> TargetTensors:
        """The same with each of these aliases as a tensor of its own."""
        copied = {name: self.aliases[name] for name in names}
        if not copied:
            return self
        return replace(
            self,
            tensors={**self.tensors, **{name: self.tensors[stored].called(name) for name, stored in copied.items()}},
            source_names={**self.source_names, **{name: self.source_names[stored] for name, stored in copied.items()}},
            read={**self.read, **{name: self.read[stored] for name, stored in copied.items()}},
            aliases={name: stored for name, stored in self.aliases.items() if name not in copied},
            copies={**self.copies, **copied},
        )

    def only(self, names: Iterable[str]) -> TargetTensors:
        """The same with these tensors alone, in this order."""
        names = list(names)
        return replace(
            self,
            tensors={name: self.tensors[name] for name in names},
            source_names={name: self.source_names[name] for name in names},
            read={name: self.read[name] for name in names},
        )


def share(view: ModelView, decisions: Iterable[TieDecision], *, tied: str, can_alias: bool) -> TargetTensors:
    """What the target holds once ties are carried out.

    Args:
        view: The model.
        decisions: On its ties.
        tied: "auto" for what was decided, else one way for all tied names: "alias", "copy" or "drop".
        can_alias: Two names of the target can point at the same bytes.

    Raises:
        InputError: `--tied drop` would lose a tensor that differs from the one it is said to be.
    """
    decisions = list(decisions)
    for decision in decisions:
        if tied == "drop" and decision.case in ("different", "mismatched"):
            raise InputError(
                f'tensors "{decision.target}" and "{decision.source}" differ, so --tied drop would lose one; '
                "use --tied auto, which keeps both"
            )
    whole = TargetTensors.of(view.catalog, view.tensors)
    tensors, source_names, read = dict(whole.tensors), dict(whole.source_names), dict(whole.read)
    aliases: dict[str, str] = {}

    def store_as(name: str, stored: str) -> None:
        tensors[name] = tensors[stored].called(name)
        source_names[name], read[name] = source_names[stored], read[stored]

    def leave_out(name: str) -> None:
        for each in (tensors, source_names, read):
            each.pop(name, None)

    shared = [(each, each.stored) for each in decisions if each.action == "alias" and each.stored is not None]
    merged = []
    for decision, stored in shared:
        names = {decision.target, decision.source} - {stored}
        if tied == "copy" or (tied == "auto" and not can_alias and not decision.declared):
            # No loader ties what the config does not declare (--tie-missing), so a file must hold every name.
            for name in names:
                store_as(name, stored)
        elif tied == "drop" or not can_alias:
            store_as(decision.source, stored)
            merged.append((decision, stored))
        else:
            for name in names:
                leave_out(name)
                aliases[name] = stored
    # Only now: a name that stood in for an absent source may have done so for several pairs.
    for decision, stored in merged:
        for name in {decision.target, stored} - {decision.source}:
            leave_out(name)
    pairs = {name for decision, _ in shared for name in (decision.target, decision.source)}
    on_disk = frozenset(view.tensors[name].name for name in pairs if name in view.tensors)
    return TargetTensors(view.catalog, tensors, source_names, read, aliases, {}, on_disk)
