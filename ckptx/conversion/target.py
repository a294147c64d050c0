"""What the target of a conversion holds: which tensors, under which names, shared how, in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckptx.architecture.tied import TieDecision
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.run import Conversion
from ckptx.errors import InputError
from ckptx.view import ModelView


@dataclass(slots=True)
class Target:
    """The tensors of a target.

    Attributes:
        tensors: By name; shapes and dtypes are those of the target, chunks are not set yet.
        origin: Name in the target -> name of the entry in the source that it is read from.
        read: Name in the target -> names on disk of the tensors it is made of.
        aliases: Names that share the bytes of a name in `tensors`; only a DCP can have some.
        copies: Names in `tensors` that hold the bytes of another one, because no file can share them.
    """

    tensors: dict[str, TensorEntry]
    origin: dict[str, str]
    read: dict[str, tuple[str, ...]]
    aliases: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, TensorEntry]) -> Target:
        """Every tensor under its own name. The entries are those of the source and name where they are on disk."""
        renamed = {name: entry._replace(name=name) for name, entry in tensors.items()}
        on_disk = {name: entry.name for name, entry in tensors.items()}
        return cls(renamed, on_disk, {name: (disk,) for name, disk in on_disk.items()})

    def store_as(self, name: str, stored: str) -> None:
        """Stores the bytes of `stored` under `name` too."""
        self.tensors[name] = self.tensors[stored]._replace(name=name)
        self.origin[name], self.read[name] = self.origin[stored], self.read[stored]

    def copy_out(self, name: str) -> None:
        """Turns an alias into a tensor of its own."""
        self.copies[name] = self.aliases.pop(name)
        self.store_as(name, self.copies[name])

    def leave_out(self, name: str) -> None:
        """Drops a name if it is there."""
        self.tensors.pop(name, None)
        self.origin.pop(name, None)
        self.read.pop(name, None)

    def holds(self, names: Iterable[str]) -> bool:
        """True when every one of `names` is there, as a tensor or as a name that shares bytes."""
        return all(name in self.tensors or name in self.aliases for name in names)

    def written(self) -> set[str]:
        """Names on disk of everything the target is made of."""
        return {name for names in self.read.values() for name in names}

    def renamed(self, names: Callable[[str], str]) -> Target:
        """The same under other names."""
        return Target(
            {names(name): entry._replace(name=names(name)) for name, entry in self.tensors.items()},
            {names(name): origin for name, origin in self.origin.items()},
            {names(name): on_disk for name, on_disk in self.read.items()},
            {names(name): names(stored) for name, stored in self.aliases.items()},
            {names(name): names(stored) for name, stored in self.copies.items()},
        )


def share(run: Conversion, view: ModelView, decisions: list[TieDecision], *, aliases_possible: bool) -> Target:
    """Carries out `--tied`: the table of the design for auto, else one way for all tied names.

    Raises:
        InputError: `--tied drop` would lose a tensor that differs from the one it is said to be.
    """
    target = Target.of(view.tensors)
    tied = run.options.tied
    for decision in decisions:
        if tied == "drop" and decision.case in ("different", "mismatched"):
            raise InputError(
                f'tensors "{decision.target}" and "{decision.source}" differ, so --tied drop would lose one; '
                "use --tied auto, which keeps both"
            )
    shared = [decision for decision in decisions if decision.action == "alias" and decision.stored is not None]
    merged = []
    for decision in shared:
        assert decision.stored is not None
        names = {decision.target, decision.source} - {decision.stored}
        if tied == "copy" or (tied == "auto" and not aliases_possible and not decision.declared):
            # No loader ties what the config does not declare (--tie-missing), so a file must hold every name.
            for name in names:
                target.store_as(name, decision.stored)
        elif tied == "drop" or not aliases_possible:
            target.store_as(decision.source, decision.stored)
            merged.append(decision)
        else:
            for name in names:
                target.leave_out(name)
                target.aliases[name] = decision.stored
    # Only now: a name that stood in for an absent source may have done so for several pairs.
    for decision in merged:
        for name in {decision.target, str(decision.stored)} - {decision.source}:
            target.leave_out(name)
    run.share_ledger({name for decision in shared for name in (decision.target, decision.source)}, view)
    return target
