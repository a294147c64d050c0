"""Notes of `verify --run` that a user should read in addition to its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptx.comparison.configs import ConfigDifference
from ckptx.report.report import Log, counted
from ckptx.runtime.parity.inputs.batch import Inputs

_MAX_NAMES = 3  # in a note


def add_notes(
    log: Log,
    name: str,
    config_differences: Sequence[ConfigDifference],
    uncompared_names: Mapping[str, str],
    inputs: Inputs,
    unreached: Sequence[Mapping[str, Any]] | None,
    separate_names: frozenset[str],
) -> None:
    """Note what was not compared, and differences without effect.

    Args:
        log: Log that receives the notes.
        name: Name of the model class.
        config_differences: Result of `compare_configs`.
        uncompared_names: Name of a tensor of the reference that its class does not compute with -> reason.
        inputs: Inputs that the models ran on.
        unreached: Result of `UnreachedParameters.list_parameters`; None without a backward pass.
        separate_names: Names that are tied in one checkpoint and separate in the other.
    """
    inert_differences = [
        f"{each.key} ({each.reference} in the reference, {each.checkpoint} in the checkpoint)"
        for each in config_differences
        if each.has_no_effect
    ]
    if inert_differences:
        log.note(f"config differences without effect on this comparison: {', '.join(inert_differences)}")
    if separate_names:
        log.note(
            f"{_list_some(sorted(separate_names))}: tied in one checkpoint and separate in the other; compared as "
            "separate parameters. Further training would differ"
        )
    if uncompared_names:
        log.note(
            "tensors of the reference that its class does not compute with were not compared: "
            f"{_list_some([f'{each} ({reason})' for each, reason in uncompared_names.items()])}"
        )
    if inputs.missing:
        log.note(
            f"{name}: the inputs have no {' and no '.join(inputs.missing)}, because ckptx does not know the input form "
            "of this class; the modules that take them were compared by their bytes only"
        )
    if unreached:
        descriptions = [
            f"{each['name']} of {_list_experts(each['experts'])}" if "experts" in each else str(each["name"])
            for each in unreached
        ]
        log.note(
            f"{name}: no gradient reaches {_list_some(descriptions)}; these were compared in the forward pass at most"
        )


def unread_notes(unread_tensors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note for each side and reason, with names of the stored tensors that no part of the model reads.

    Args:
        unread_tensors: Result of `ckptx.runtime.parity.run_report.list_unread_tensors`.
    """
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    for each in unread_tensors:
        names_by_reason.setdefault((" and the ".join(each["stored_in"]), each["reason"]), []).append(each["name"])
    for (sides, reason), names in names_by_reason.items():
        verb = "holds" if " and " not in sides else "hold"
        tensors = counted(len(names), "tensor")
        yield f"the {sides} {verb} {tensors} that the model does not read: {_list_some(names)} ({reason})"


def _list_experts(numbers: Sequence[int]) -> str:
    return f"expert {numbers[0]}" if len(numbers) == 1 else f"experts {_list_some([*map(str, numbers)])}"


def _list_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"
