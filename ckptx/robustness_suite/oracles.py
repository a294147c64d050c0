"""The oracles: what two moments of a run have to have in common, to the last bit, and what of it differs.

A moment is a set of items, each with the digest of its bytes, under the oracle that speaks of it:

    reference    the files of the run that did not stop: no other run changes them
    readable     what was published opens, and is complete
    sharded      parameters are cut over ranks, where the recipe says so
    finite       no NaN; no infinity in a parameter, a moment or a loss
    names        the same names; no wrapper of FSDP2, compile or checkpointing in one; heads tied as the table says
    model        parameters and persistent buffers
    second model   a copy of the model that is kept beside it, as an EMA
    moments      exp_avg, exp_avg_sq and what else an optimizer keeps for each parameter
    master weights  parameters in full precision, which an optimizer keeps
    adam step    how many steps each parameter has taken
    group        what the optimizer does with each parameter: betas, eps, weight decay, ...
    scheduler    its state
    step, epoch, samples   where the run is, and what it has seen
    rng          python, numpy, torch and device, of each rank
    replicas     what ranks hold whole, against each other
    batch        the samples of the next step, by rank
    rate         the learning rate of the next step
    memory       what a phase leaves in the process, against what a released warm-up left
    other        what a trainer stores and ckptx has no word for

Loss and logits come last, and against the noise that was measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

EXACT = (
    "reference", "readable", "sharded", "finite", "names", "model", "second model", "moments", "master weights",
    "adam step", "group", "scheduler", "step", "epoch", "samples", "rng", "replicas", "batch", "rate", "other",
)  # fmt: skip
MEASURED = ("loss", "logits", "memory")
ORDER = (*EXACT, *MEASURED)
_SHOWN = 8  # items that a row of the report names

Items = Mapping[tuple[str, str], str]  # (oracle, item) -> digest, or the value as a text


class Difference(NamedTuple):
    """One item that is not what it should be.

    Attributes:
        oracle: Whose it is.
        item: Its name.
        rank: Where, or None where it is no rank's own.
        reference: What it should be; None where it should not be at all.
        found: What it is; None where it is missing.
    """

    oracle: str
    item: str
    rank: int | None
    reference: str | None
    found: str | None


class Verdict(NamedTuple):
    """What one oracle says of one phase.

    Attributes:
        oracle: Its name.
        compared: How many items it looked at.
        differences: Those that differ.
        value: Of a measure: the largest distance.
        limit: What it may be.
        times_noise: The limit as a multiple of the noise; None if no noise is allowed, and the limit is 0.
        noise: The noise that the limit is a multiple of; None where `times_noise` is.
        is_widened: Whether the recipe made it more than it is by default.
    """

    oracle: str
    compared: int
    differences: Sequence[Difference] = ()
    value: float | None = None
    limit: float | None = None
    times_noise: float | None = None
    noise: float | None = None
    is_widened: bool = False

    @property
    def ok(self) -> bool | None:
        """Nothing differs, and what was measured is a number within its limit; None where nothing was compared."""
        if self.differences:
            return False
        if not self.compared:
            return None
        return self.value is None or (self.limit is not None and self.value <= self.limit)

    def row(self) -> dict[str, Any]:
        """What the report has of it."""
        return {
            "name": self.oracle,
            "ok": self.ok,
            "compared": self.compared,
            "count": len(self.differences),
            "differing": [each.item for each in self.differences[:_SHOWN]],
            "value": plain_number(self.value),
            "limit": plain_number(self.limit),
            "times_noise": self.times_noise,
            "noise": plain_number(self.noise),
            "widened": self.is_widened,
        }


def compare(reference: Sequence[Items], found: Sequence[Items], oracles: Iterable[str] = EXACT) -> list[Verdict]:
    """What differs between two moments, rank by rank.

    Args:
        reference: The items of each rank, of the run that did not stop.
        found: Of the other, with as many ranks.
        oracles: Which are asked; one without a single item on either side is not. What is missing is no finite number
            and no NaN either: the oracle that speaks of it says so.
    """
    wanted = set(oracles)
    compared: dict[str, int] = {}
    differences: dict[str, list[Difference]] = {}
    for rank, (before, after) in enumerate(zip(reference, found, strict=True)):
        for oracle, item in {**before, **after}:
            if oracle not in wanted:
                continue
            compared[oracle] = compared.get(oracle, 0) + 1
            was, now = before.get((oracle, item)), after.get((oracle, item))
            if was != now and not (oracle == "finite" and None in (was, now)):
                differences.setdefault(oracle, []).append(Difference(oracle, item, rank, was, now))
    return [Verdict(oracle, compared[oracle], differences.get(oracle, ())) for oracle in ORDER if oracle in compared]


def replicas(by_rank: Sequence[Mapping[tuple[str, str], str]]) -> Verdict:
    """What ranks hold alike, against the first that has it."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    compared, differences = 0, []
    for rank, held in enumerate(by_rank):
        for key, found in held.items():
            if key not in first:
                first[key] = rank, found
                continue
            compared += 1
            if first[key][1] != found:
                differences.append(Difference("replicas", key[0], rank, f"as on rank {first[key][0]}", "other bytes"))
    return Verdict("replicas", compared, differences)


def all_finite(by_rank: Sequence[Items], losses: Mapping[int, float] | None = None) -> Verdict:
    """Require that no NaN is anywhere, and no infinity in what is trained or in a loss, by step."""
    compared, differences = 0, []
    for rank, items in enumerate(by_rank):
        for (oracle, name), said in items.items():
            if oracle == "finite":
                compared += 1
                if said != "finite":
                    differences.append(Difference("finite", name, rank, "finite", said))
    for step, loss in (losses or {}).items():
        compared += 1
        if not isfinite(loss):
            differences.append(Difference("finite", f"loss of step {step}", None, "finite", str(loss)))
    return Verdict("finite", compared, differences)


def measured(
    oracle: str, pairs: Iterable[tuple[float, float]], noise: float | None, times: float, default: float
) -> Verdict:
    """Numbers against those they should be, with a limit of so many times the noise.

    Args:
        oracle: loss or logits.
        pairs: What should be, and what is.
        noise: The largest difference that means nothing, as it was measured; None where equal bits are required.
        times: By how much that may be exceeded, as the recipe says.
        default: As it is by default.
    """
    distances = [distance(*pair) for pair in pairs]
    return within_noise(oracle, len(distances), largest(distances), noise, times, default)


def within_noise(
    oracle: str, compared: int, value: float, noise: float | None, times: float, default: float
) -> Verdict:
    """Judge a distance that was measured, as `measured` does."""
    if noise is None:
        return Verdict(oracle, compared, value=value, limit=0.0)
    return Verdict(
        oracle, compared, value=value, limit=times * noise, times_noise=times, noise=noise, is_widened=times > default
    )


def distance(reference: float, found: float) -> float:
    """How far apart two numbers are; NaN where one of them is no finite number."""
    return abs(reference - found) if isfinite(reference) and isfinite(found) else nan


def largest(values: Iterable[float]) -> float:
    """The largest of some numbers, 0 of none, NaN if one is NaN (Python's `max` depends on their order then)."""
    found = 0.0
    for value in values:
        if value != value:
            return nan
        found = max(found, value)
    return found


def plain_number(value: float | None) -> float | str | None:
    """A number as JSON can say it."""
    return value if value is None or isfinite(value) else str(value)


def failing(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """Those that are not ok, in the order of the oracles."""
    return (each for each in sorted(verdicts, key=lambda each: ORDER.index(each.oracle)) if each.ok is False)


def phase_ok(verdicts: Iterable[Verdict]) -> bool | None:
    """Return False if a verdict failed, None if nothing was compared at all."""
    found = {each.ok for each in verdicts}
    return False if False in found else True if True in found else None
