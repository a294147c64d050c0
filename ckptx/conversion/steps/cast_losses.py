"""Report the numbers that `--dtype` made infinite or zero, and refuse the first kind unless it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.errors import InputError
from ckptx.report.report import Log
from ckptx.transfer.executor import CopyResult
from ckptx.wording import counted, first_of

_NAMED = 20  # tensors; a report lists them all


def refuse_overflow(outcome: CopyResult, is_allowed: bool, dtype: str, log: Log) -> None:
    """Refuse an output that holds infinity in the place of numbers.

    Args:
        outcome: The counts of the copy.
        is_allowed: True with `--allow-overflow`.
        dtype: The value of `--dtype`.
        log: Receives a line for each tensor, up to twenty.

    Raises:
        InputError: A finite number of the source became infinite.
    """
    if outcome.overflows and not is_allowed:
        rows = [f'"{name}": {counted(count, "number")} too large' for name, count in outcome.overflows.items()]
        log.note(*rows[:_NAMED])
        if len(rows) > _NAMED:
            log.note(f"and {counted(len(rows) - _NAMED, 'more tensor')} with numbers that are too large")
        raise InputError(
            f"--dtype {dtype}: {_described(outcome.overflows)} {_is_or_are(outcome.overflows)} too large for the "
            "dtype and would become infinite; choose a dtype with a larger range, such as bf16 or fp32, or pass "
            "--allow-overflow"
        )


def notes_on_losses(outcome: CopyResult) -> tuple[str, ...]:
    """Describe the losses of a copy, one line for each kind."""
    notes = []
    if outcome.overflows:
        notes.append(f"{_described(outcome.overflows)} became infinite, as --allow-overflow permits")
    if outcome.underflows:
        notes.append(f"{_described(outcome.underflows)} became zero, too small for the dtype they were cast to")
    return tuple(notes)


def rows_of(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Give the counts as the report has them."""
    return [{"name": name, "count": count} for name, count in counts.items()]


def _described(counts: Mapping[str, int]) -> str:
    numbers, tensors = counted(sum(counts.values()), "number"), counted(len(counts), "tensor")
    return f"{numbers} in {tensors} ({first_of(list(counts))})"


def _is_or_are(counts: Mapping[str, int]) -> str:
    return "is" if sum(counts.values()) == 1 else "are"
