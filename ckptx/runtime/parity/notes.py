"""Notes of `verify --run` that a user should read besides its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptx.report.report import Log, counted
from ckptx.runtime.parity.configs import ConfigDifference
from ckptx.runtime.parity.inputs.batch import Inputs

_MOST_NAMED = 3  # in a note


def note(
    log: Log,
    name: str,
    configs: Sequence[ConfigDifference],
    uncompared: Mapping[str, str],
    inputs: Inputs,
    unreached: Sequence[Mapping[str, Any]] | None,
    separate_names: frozenset[str],
) -> None:
    """Note what was not compared, and differences without effect.

    Args:
        log: Log that receives the notes.
        name: Name of the model class.
        configs: Differences of the configs.
        uncompared: Stored tensors that neither side reads, with the reason of each.
        inputs: Inputs that the models ran on.
        unreached: Rows from `UnreachedParameters`; None without a backward pass.
        separate_names: Names that are tied in one checkpoint and separate in the other.
    """
    noted = [
        f"{each.key} ({each.reference} in the reference, {each.checkpoint} in the checkpoint)"
        for each in configs
        if each.is_noted
    ]
    if noted:
        log.note(f"config differences without effect on this comparison: {', '.join(noted)}")
    if separate_names:
        log.note(
            f"{_some(sorted(separate_names))}: tied in one checkpoint and separate in the other; compared as separate "
            "parameters. Further training would differ"
        )
    if uncompared:
        log.note(
            "tensors of the reference that its class does not compute with were not compared: "
            f"{_some([f'{each} ({reason})' for each, reason in uncompared.items()])}"
        )
    if inputs.missing:
        log.note(
            f"{name}: the inputs have no {' and no '.join(inputs.missing)}, because ckptx does not know the input form "
            "of this class; the modules that take them were compared by their bytes only"
        )
    if unreached:
        descriptions = [
            f"{row['name']} of {_experts(row['experts'])}" if "experts" in row else str(row["name"])
            for row in unreached
        ]
        log.note(f"{name}: no gradient reaches {_some(descriptions)}; these were compared in the forward pass at most")


def unread_notes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Name the stored tensors that no part of the model reads, one line for each reason.

    Args:
        rows: Rows of `ckptx.runtime.parity.run_report.rows_of_unread`.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((" and the ".join(row["stored_in"]), row["reason"]), []).append(row["name"])
    for (sides, reason), names in groups.items():
        verb = "holds" if " and " not in sides else "hold"
        tensors = counted(len(names), "tensor")
        yield f"the {sides} {verb} {tensors} that the model does not read: {_some(names)} ({reason})"


def _experts(numbers: Sequence[int]) -> str:
    return f"expert {numbers[0]}" if len(numbers) == 1 else f"experts {_some([*map(str, numbers)])}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"
