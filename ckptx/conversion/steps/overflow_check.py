"""Report the numbers that `--dtype` made infinite or zero, and refuse infinities without `--allow-overflow`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.errors import InputError
from ckptx.report.report import Log
from ckptx.transfer.executor import CopyResult
from ckptx.wording import counted, first_of

_MAX_LISTED = 20  # tensors listed in the log; the report lists all


def refuse_overflow(outcome: CopyResult, is_allowed: bool, dtype: str, log: Log) -> None:
    """Refuse an output in which finite numbers became infinite.

    Args:
        outcome: Result of the copy, with the counts.
        is_allowed: True with `--allow-overflow`.
        dtype: Value of `--dtype`.
        log: Receives a line for each of the first 20 tensors, and one with the number of the others.

    Raises:
        InputError: A finite number of the source became infinite.
    """
    if outcome.overflows and not is_allowed:
        lines = [f'"{name}": {counted(count, "number")} too large' for name, count in outcome.overflows.items()]
        log.note(*lines[:_MAX_LISTED])
        if len(lines) > _MAX_LISTED:
            log.note(f"and {counted(len(lines) - _MAX_LISTED, 'more tensor')} with too large numbers")
        raise InputError(
            f"--dtype {dtype}: {_describe(outcome.overflows)} {_is_or_are(outcome.overflows)} too large for the "
            "dtype and would become infinite; choose a dtype with a larger range, such as bf16 or fp32, or pass "
            "--allow-overflow"
        )


def range_notes(outcome: CopyResult) -> tuple[str, ...]:
    """Return a note on overflows and one on underflows in a copy; none for a kind that did not occur."""
    notes = []
    if outcome.overflows:
        notes.append(f"{_describe(outcome.overflows)} became infinite (--allow-overflow)")
    if outcome.underflows:
        notes.append(f"{_describe(outcome.underflows)} became zero: too small for the target dtype")
    return tuple(notes)


def overflow_entries(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the `overflows` or `underflows` of the report, given the number of elements by tensor name."""
    return [{"name": name, "count": count} for name, count in counts.items()]


def _describe(counts: Mapping[str, int]) -> str:
    numbers, tensors = counted(sum(counts.values()), "number"), counted(len(counts), "tensor")
    return f"{numbers} in {tensors} ({first_of(list(counts))})"


def _is_or_are(counts: Mapping[str, int]) -> str:
    return "is" if sum(counts.values()) == 1 else "are"
