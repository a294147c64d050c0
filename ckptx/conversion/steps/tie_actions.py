"""Form of each tied pair in the output: one tensor with two names, a copy, or one name."""

from __future__ import annotations

from collections.abc import Iterable

from ckptx.architecture.tied import TieDecision
from ckptx.conversion.outputs.output_format import OutputContents


def tie_actions(decisions: Iterable[TieDecision], contents: OutputContents) -> list[str]:
    """Return how each tied pair is written.

    Args:
        decisions: Decisions on the tied weights of the source, by names of the view.
        contents: Contents of the output.

    Returns:
        "alias" if both names are in the output and share bytes, "copy" if the bytes are stored under each of them,
        "single" if the output has one of the names and a loader ties the other to it; "keep-both" and "none" are
        passed on.
    """
    target = contents.sharded.target
    new_names = {sources[0]: name for name, sources in contents.naming.sources.items() if len(sources) == 1}

    def stored_name(name: str) -> str | None:
        """Return the output tensor that holds the bytes of a view name; None if the output lacks it."""
        target_name = new_names.get(name) if new_names else name
        output_name = None if target_name is None else contents.names.get(target_name, target_name)
        return (
            None
            if output_name is None
            else target.aliases.get(output_name, output_name if output_name in target.tensors else None)
        )

    actions = []
    for decision in decisions:
        action: str = decision.action
        if action == "alias":
            found = [stored_name(name) for name in (decision.target, decision.source)]
            if None in found:
                action = "single"
            elif found[0] != found[1]:
                action = "copy"
        actions.append(action)
    return actions
