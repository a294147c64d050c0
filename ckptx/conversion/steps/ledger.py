"""The ledger: every tensor of the source ends somewhere, and what the target is made of."""

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
    """What became of the source.

    Attributes:
        ends: How many names of the source were `written`, are `aliases` of a name that was, or were `dropped`.
        source: How many there are.
        tensors: Names in the target.
        stored: How many tensors they are.
        copies: How many names hold the bytes of another.
        aliases: How many share them.
        dtypes: Names of the target by dtype, `before` as they were read, `after` as they are written.
    """

    ends: Mapping[str, int]
    source: int
    tensors: int
    stored: int
    copies: int
    aliases: int
    dtypes: Mapping[str, dict[str, int]]

    def to_dict(self) -> dict[str, Any]:
        """What the report holds."""
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
    """Holds what was planned against what the source has.

    Args:
        source: Names on disk of its tensors.
        plan: Of the copy.
        written: Names on disk of the tensors that the target is made of.
        shared: Names on disk of tied tensors.
        dropped: Names on disk that a rule leaves out.
        aliases: Name in the target -> name it shares bytes with.
        leaders: Name on disk -> a name for the tensor it is, the same for all that were found to be one.

    Raises:
        Defect: A tensor ends nowhere.
    """
    on_disk, left, ends = set(source), set(source), {}
    for end, names in (("written", written), ("aliases", shared), ("dropped", dropped)):
        ends[end] = len(left.intersection(names))
        left.difference_update(names)
    if left:
        raise Defect(f'tensor "{min(left)}" and {len(left) - 1} more would be lost; please report it')
    steps = {step.target.name: step for step in plan.steps() if step.framed}
    keys = {_bytes_of(step.source, on_disk, leaders) for step in steps.values()}
    shown = [*steps.values(), *(steps[name] for name in aliases.values())]
    return Ledger(
        ends,
        len(on_disk),
        len(steps) + len(aliases),
        len(keys),
        len(steps) - len(keys),
        len(aliases),
        {
            "before": count_dtypes(step.source for step in shown),
            "after": count_dtypes(step.target for step in shown),
        },
    )


def _bytes_of(entry: TensorEntry, on_disk: set[str], leaders: Mapping[str, str]) -> object:
    """A key for the bytes that an entry of the source stands for: equal for the names of one tensor."""
    if entry.name in leaders:
        return leaders[entry.name]
    # An entry that was put together may begin where another begins that was taken out of the same tensor.
    return entry.place if entry.name in on_disk and entry.numel else entry.name
