"""Counts of the numbers that a cast makes infinite or zero."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class CastLosses:
    """Losses of one tensor.

    Attributes:
        overflows: Number of finite elements that became infinite.
        underflows: Number of nonzero elements that became zero.
    """

    overflows: int = 0
    underflows: int = 0

    def add(self, other: CastLosses) -> None:
        """Add the losses of another part of the same tensor."""
        self.overflows += other.overflows
        self.underflows += other.underflows


class LossesByTensor:
    """Losses of all tensors of one copy; several threads may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._losses: dict[str, CastLosses] = {}

    def add(self, name: str, losses: CastLosses) -> None:
        """Add the losses of a tensor, or of a part of it."""
        if losses.overflows or losses.underflows:
            with self._lock:
                self._losses.setdefault(name, CastLosses()).add(losses)

    @property
    def overflows(self) -> dict[str, int]:
        """Return the number of overflows by tensor, without tensors that have none."""
        return _counts({name: each.overflows for name, each in self._losses.items()})

    @property
    def underflows(self) -> dict[str, int]:
        """Return the number of underflows by tensor, without tensors that have none."""
        return _counts({name: each.underflows for name, each in self._losses.items()})


def _counts(found: Mapping[str, int]) -> dict[str, int]:
    return {name: found[name] for name in sorted(found) if found[name]}
