"""Form of each tied pair in the output: one tensor with two names, a copy, or one name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ckptx.architecture.tied import TieDecision
from ckptx.conversion.outputs.output_format import OutputContents


class TieAction(NamedTuple):
    """Form of one tied pair in the output.

    Attributes:
        action: "alias" if both names are in the output and share bytes, "copy" if the bytes are stored under each of
            them, "single" if the output has one of the names and a loader ties the other to it; "keep-both" and "none"
            as decided.
        output_names: Output names of `TieDecision.target` and `TieDecision.source`; None for a name that the output
            lacks.
    """

    action: str
    output_names: tuple[str | None, str | None]


def tie_actions(decisions: Iterable[TieDecision], contents: OutputContents) -> list[TieAction]:
    """Return how each tied pair is written.

    Args:
        decisions: Decisions on the tied weights of the source, by view names.
        contents: Contents of the output.
    """
    target = contents.sharded.target
    new_names = {sources[0]: name for name, sources in contents.naming.sources.items() if len(sources) == 1}

    def output_name(name: str) -> str | None:
        """Return the output name of a view name; None if the output lacks it."""
        target_name = new_names.get(name) if new_names else name
        found = None if target_name is None else contents.names.get(target_name, target_name)
        return found if found is not None and target.has_names([found]) else None

    actions = []
    for decision in decisions:
        action: str = decision.action
        names = output_name(decision.target), output_name(decision.source)
        if action == "alias":
            if None in names:
                action = "single"
            elif len({target.aliases.get(name, name) for name in names if name is not None}) == 2:
                action = "copy"
        actions.append(TieAction(action, names))
    return actions
