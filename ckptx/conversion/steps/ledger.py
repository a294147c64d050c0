"""Ledger of a conversion: every source tensor is written, shared or dropped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.catalog.entry import TensorEntry
from ckptx.errors import Defect
from ckptx.report.report import count_dtypes
from ckptx.transfer.plan import CopyPlan


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of source and target names.

    Attributes:
        ends: Number of source names that were `written`, are `aliases` of a written name, or were `dropped`.
        source: Number of source names.
        tensors: Number of target names.
        stored: Number of distinct tensors among them.
        copies: Number of target names that are stored as a copy of another.
        aliases: Number of target names that share the bytes of another.
        dtypes: Number of target names by dtype, `before` (as read) and `after` (as written).
    """

    ends: Mapping[str, int]
    source: int
    tensors: int
    stored: int
    copies: int
    aliases: int
    dtypes: Mapping[str, dict[str, int]]

    def to_dict(self) -> dict[str, Any]:
        """Return the `ledger` of the report."""
        target = {"tensors": self.tensors, "stored": self.stored, "copies": self.copies, "aliases": self.aliases}
        return {"source": self.source, **self.ends, "target": target}


def build_ledger(
    source: Collection[str],
    plan: CopyPlan,
    *,
    written: Collection[str],
    shared: Collection[str],
    dropped: Collection[str],
    aliases: Mapping[str, str],
    leaders: Mapping[str, str],
) -> Ledger:
    """Check that the plan accounts for every source tensor, and count them.

    Args:
        source: Names on disk of the source tensors.
        plan: Copy plan.
        written: Names on disk of the tensors that the target is made of.
        shared: Names on disk of tied tensors.
        dropped: Names on disk of dropped tensors.
        aliases: Name in the target -> name it shares bytes with.
        leaders: Name on disk -> representative name, equal for all names of one tensor.

    Raises:
        Defect: A tensor is neither written nor shared nor dropped.
    """
    on_disk, remaining, ends = set(source), set(source), {}
    for end, names in (("written", written), ("aliases", shared), ("dropped", dropped)):
        ends[end] = len(remaining.intersection(names))
        remaining.difference_update(names)
    if remaining:
        raise Defect(f'tensor "{min(remaining)}" and {len(remaining) - 1} more would be lost; please report it')
    steps = {step.target.name: step for step in plan.steps() if step.framed}
    keys = {_content_key(step.source, on_disk, leaders) for step in steps.values()}
    all_steps = [*steps.values(), *(steps[name] for name in aliases.values())]
    return Ledger(
        ends,
        len(on_disk),
        len(steps) + len(aliases),
        len(keys),
        len(steps) - len(keys),
        len(aliases),
        {
            "before": count_dtypes(step.source for step in all_steps),
            "after": count_dtypes(step.target for step in all_steps),
        },
    )


def _content_key(entry: TensorEntry, on_disk: set[str], leaders: Mapping[str, str]) -> object:
    """Return a key for the bytes of a source entry, equal for all names of one tensor."""
    if entry.name in leaders:
        return leaders[entry.name]
    # A composed entry may begin at the same offset as another slice of the same tensor.
    return entry.place if entry.name in on_disk and entry.numel else entry.name
