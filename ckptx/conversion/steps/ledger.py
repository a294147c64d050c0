"""Ledger of a conversion: every source tensor is written, tied to a written one, decoded into one, or dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InternalError
from ckptx.report.report import count_dtypes
from ckptx.transfer.plan import CopyPlan


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of tensor names in the source and the output.

    Attributes:
        counts_by_outcome: Number of source names that were "written", are "tied" to a written name, were
            "decoded" into a weight, or were "dropped".
        source_count: Number of source names.
        target_count: Number of output names.
        distinct_count: Number of different tensors among them.
        copies: Number of output names that are stored as a copy of another.
        aliases: Number of output names that share the bytes of another.
        dtypes: `before` (as in the source) and `after` (as written) -> dtype -> number of output names.
    """

    counts_by_outcome: Mapping[str, int]
    source_count: int
    target_count: int
    distinct_count: int
    copies: int
    aliases: int
    dtypes: Mapping[str, dict[str, int]]

    def report_entry(self) -> dict[str, Any]:
        """Return the `ledger` of the report."""
        target = {
            "tensors": self.target_count,
            "stored": self.distinct_count,
            "copies": self.copies,
            "aliases": self.aliases,
        }
        return {"source": self.source_count, **self.counts_by_outcome, "target": target}


def build_ledger(
    source_names: Collection[str],
    plan: CopyPlan,
    *,
    written: Collection[str],
    shared: Collection[str],
    decoded: Collection[str] = (),
    dropped: Collection[str],
    aliases: Mapping[str, str],
    representatives: Mapping[str, str],
    stored_dtype: Callable[[TensorEntry], DType] = attrgetter("dtype"),
) -> Ledger:
    """Check that the plan accounts for every source tensor, and count them.

    Args:
        source_names: Stored names of the source tensors.
        plan: Copy plan.
        written: Stored names of the tensors that the target is made of.
        shared: Stored names of tied tensors; those in `written` count as written.
        decoded: Stored names of scales and other parts of quantized weights that are decoded.
        dropped: Stored names of dropped tensors.
        aliases: Output name -> output name that it shares bytes with.
        representatives: Stored name -> representative name, equal for all names of one tensor.
        stored_dtype: Function that returns the dtype in the source files for a source entry of the plan.

    Raises:
        InternalError: A tensor is neither written nor shared nor decoded nor dropped.
    """
    stored_names, remaining, counts_by_outcome = set(source_names), set(source_names), {}
    for outcome, names in (
        ("written", written),
        ("tied", shared),
        ("decoded", decoded),
        ("dropped", dropped),
    ):
        counts_by_outcome[outcome] = len(remaining.intersection(names))
        remaining.difference_update(names)
    if remaining:
        raise InternalError(f'tensor "{min(remaining)}" and {len(remaining) - 1} more would be lost; please report it')
    steps = {step.target.name: step for step in plan.steps() if step.is_tensor}
    keys = {_content_key(step.source, stored_names, representatives) for step in steps.values()}
    all_steps = [*steps.values(), *(steps[name] for name in aliases.values())]
    return Ledger(
        counts_by_outcome,
        len(stored_names),
        len(steps) + len(aliases),
        len(keys),
        len(steps) - len(keys),
        len(aliases),
        {
            "before": count_dtypes(step.source._replace(dtype=stored_dtype(step.source)) for step in all_steps),
            "after": count_dtypes(step.target for step in all_steps),
        },
    )


def _content_key(entry: TensorEntry, stored_names: set[str], representatives: Mapping[str, str]) -> object:
    """Return a key for the bytes of a source entry, equal for all names of one tensor."""
    if entry.name in representatives:
        return representatives[entry.name]
    # Only a stored tensor is identified by its position: an entry that a conversion makes of slices may begin at the
    # same offset as another one.
    return entry.position if entry.name in stored_names and entry.numel else entry.name
