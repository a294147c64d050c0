"""Count the elements that a cast makes infinite (overflow) or zero (underflow)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class OverflowCounts:
    """Overflows and underflows in the cast of one tensor.

    Attributes:
        overflows: Number of finite elements that became infinite.
        underflows: Number of nonzero elements that became zero.
    """

    overflows: int = 0
    underflows: int = 0

    def add(self, other: OverflowCounts) -> None:
        """Add the counts of another part of the same tensor."""
        self.overflows += other.overflows
        self.underflows += other.underflows


class OverflowCountsByTensor:
    """Overflows and underflows of all tensors of one copy or comparison; several threads may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts_by_name: dict[str, OverflowCounts] = {}

    def add(self, name: str, counts: OverflowCounts) -> None:
        """Add the counts of a tensor, or of a part of it."""
        if counts.overflows or counts.underflows:
            with self._lock:
                self._counts_by_name.setdefault(name, OverflowCounts()).add(counts)

    @property
    def overflows(self) -> dict[str, int]:
        """Return the number of overflows by tensor, without tensors that have none."""
        return _drop_zero_counts({name: each.overflows for name, each in self._counts_by_name.items()})

    @property
    def underflows(self) -> dict[str, int]:
        """Return the number of underflows by tensor, without tensors that have none."""
        return _drop_zero_counts({name: each.underflows for name, each in self._counts_by_name.items()})


def _drop_zero_counts(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: counts[name] for name in sorted(counts) if counts[name]}
