"""What the user of `verify --run` should know besides its result."""

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
    left: Mapping[str, str],
    inputs: Inputs,
    not_reached: Sequence[Mapping[str, Any]] | None,
    apart: frozenset[str],
) -> None:
    """Notes what was not compared, or is no difference though it looks like one.

    Args:
        log: Takes the notes.
        name: Of the class.
        configs: How they differ.
        left: What nothing read of both checkpoints, with the reason.
        inputs: What the models were given.
        not_reached: From `Reached`; None without a backward pass.
        apart: Names that one side ties and the other does not.
    """
    noted = [
        f"{each.key} ({each.reference} in the reference, {each.checkpoint} in the checkpoint)"
        for each in configs
        if each.is_noted
    ]
    if noted:
        log.note(f"configs differ in what changes nothing that is compared: {', '.join(noted)}")
    if apart:
        log.note(
            f"one checkpoint ties {_some(sorted(apart))}, the other stores it by itself: both ran with a parameter of "
            "its own, so that training goes on with two in one and with one in the other"
        )
    if left:
        log.note(
            "the reference has tensors that its class does not compute with, and they were not compared: "
            f"{_some([f'{each} ({reason})' for each, reason in left.items()])}"
        )
    if inputs.missing:
        log.note(
            f"{name}: no {' and no '.join(inputs.missing)} among the inputs, for ckptx does not know the form that "
            "this class takes; what works on them was compared by its bytes alone"
        )
    if not_reached:
        said = [
            f"{row['name']} of {_experts(row['experts'])}" if "experts" in row else str(row["name"])
            for row in not_reached
        ]
        log.note(f"{name}: no gradient reaches {_some(said)}; how these compute was compared forward at most")


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
