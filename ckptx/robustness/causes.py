"""What a checkpoint says that was resumed for no step and saved again: a fault leaves its trace in certain oracles."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptx.robustness.oracles import Items, Verdict

_RANK = re.compile(r"(?<=rank)([ _]?)\d+|(?<=\.)\d+(?=\.|$)|(?<=_)\d+(?=\.|$)")

# A set of oracles that all fail while no other does -> the fault that leaves this trace.
_CAUSES: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"rng"}),
        (
            "only random numbers differ: something drew from them after they were restored, as iter(loader) does; make "
            "the iterator first, or give the loader a generator of its own"
        ),
    ),
    (
        frozenset({"group", "rate"}),
        (
            "the optimizer was not set: dcp.load filled its moments in place, its groups are new; pass what was loaded "
            "to set_state_dict"
        ),
    ),
    (frozenset({"scheduler"}), "the schedule was not loaded: load its state_dict after the optimizer"),
    (
        frozenset({"scheduler", "group", "rate"}),
        "the schedule begins anew, and with it the learning rate: load its state_dict after the optimizer",
    ),
    (frozenset({"batch"}), "the place in the data was not loaded: the next samples are those of the first step"),
    (frozenset({"batch", "samples"}), "the place in the data was not loaded: it counts from zero"),
    (frozenset({"step"}), "the counter of steps was not loaded"),
    (frozenset({"moments", "adam step"}), "the optimizer begins anew: its state was not loaded"),
    (frozenset({"moments", "adam step", "group", "rate"}), "the optimizer begins anew: its state was not loaded"),
    (frozenset({"model"}), "parameters or buffers are others while the rest is right: look at how the model is loaded"),
)
_RANKS_ALIKE = "random numbers of one rank were given to others: save and load those of each rank under its own name"


def likely_causes(verdicts: Sequence[Verdict], before: Items, after: Items) -> list[str]:
    """Lines for the report; none where nothing differs, or where the trace is not known.

    Args:
        verdicts: Of the comparison.
        before: What was resumed from.
        after: What was saved again.
    """
    found = frozenset(each.oracle for each in verdicts if each.differences)
    if "rng" in found and _is_of_another_rank(verdicts, before, after):
        return [_RANKS_ALIKE]
    return [said for oracles, said in _CAUSES if oracles == found]


def _is_of_another_rank(verdicts: Sequence[Verdict], before: Items, after: Items) -> bool:
    """True when every state of random numbers that differs is one that another rank had."""
    had: dict[str, set[str]] = {}
    for (oracle, name), value in before.items():
        if oracle == "rng":
            had.setdefault(_RANK.sub(r"\1#", name), set()).add(value)
    changed = [each.item for verdict in verdicts if verdict.oracle == "rng" for each in verdict.differences]
    return all(after.get(("rng", name)) in had.get(_RANK.sub(r"\1#", name), ()) for name in changed)
