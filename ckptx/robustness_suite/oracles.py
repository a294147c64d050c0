"""Oracles: compare two snapshots of the state of a run bit for bit, and name the items that differ.

An oracle is the comparison of one kind of state, a check in the report. A snapshot is a set of items, each with the
digest of its bytes or its value, under the oracle that compares it:

    reference files   the files of the uninterrupted run: no other run changes them
    resume            a resumed run logs no loss of a step before its checkpoint, and has the weights of that checkpoint
    readable          a published checkpoint opens, and is complete
    sharded           parameters are sharded over ranks, as the recipe requires
    finite            no NaN; no infinity in a parameter, a moment or a loss
    names             the same names of tensors: none missing, added, or named after a wrapper of FSDP2 or compile
    model             parameters and persistent buffers
    second model      another copy of the model, such as an EMA
    moments           exp_avg, exp_avg_sq and other optimizer state of each parameter
    master weights    parameters in full precision, kept by an optimizer
    adam step         the number of optimizer steps of each parameter
    param groups      settings of the optimizer's param groups: betas, eps, weight decay, ...
    scheduler         state of the learning rate scheduler
    step, epoch, samples   position of the run, and number of samples seen
    rng               RNG state of python, numpy, torch and device, for each rank
    replicas          state that is replicated on several ranks
    batch             the samples of the next step, by rank
    learning rate     the learning rate of the next step
    memory            memory and threads of a rank after each task of a phase: at most those after a run of two steps
    other             state that ckptx does not recognize

Loss and logits are compared after these; their tolerance is a multiple of the noise measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

EXACT_ORACLES = (
    "reference files", "resume", "readable", "sharded", "finite", "names", "model", "second model", "moments",
    "master weights", "adam step", "param groups", "scheduler", "step", "epoch", "samples", "rng", "replicas", "batch",
    "learning rate", "other",
)  # fmt: skip
MEASURED_ORACLES = ("loss", "logits", "memory")
ORACLE_ORDER = (*EXACT_ORACLES, *MEASURED_ORACLES)
_MAX_LISTED_ITEMS = 8  # items that a row of the report names

Items = Mapping[tuple[str, str], str]  # (oracle, item) -> digest, or the value as a string


class Difference(NamedTuple):
    """One item that differs.

    Attributes:
        oracle: Name of the oracle.
        item: Name of the item.
        rank: Global rank that has the item; None if it belongs to no rank.
        reference: Expected value; None if the item is not in the reference.
        actual: Actual value; None if the item is missing.
    """

    oracle: str
    item: str
    rank: int | None
    reference: str | None
    actual: str | None


class Verdict(NamedTuple):
    """Result of one oracle in one phase.

    Attributes:
        oracle: Name of the oracle.
        compared: Number of items compared.
        differences: Items that differ.
        value: Largest difference of losses or logits; None for other oracles.
        limit: Tolerance of `value`; None for other oracles.
        noise_factor: Tolerance as a multiple of the noise; None if equal bits are required and the tolerance is 0.
        noise: Measured noise, the other factor of the tolerance; None if `noise_factor` is None.
        is_widened: True if the recipe raised the tolerance above its default.
    """

    oracle: str
    compared: int
    differences: Sequence[Difference] = ()
    value: float | None = None
    limit: float | None = None
    noise_factor: float | None = None
    noise: float | None = None
    is_widened: bool = False

    @property
    def ok(self) -> bool | None:
        """Return True if nothing differs and the measurement is within its tolerance; None if nothing was compared."""
        if self.differences:
            return False
        if not self.compared:
            return None
        return self.value is None or (self.limit is not None and self.value <= self.limit)

    def row(self) -> dict[str, Any]:
        """Return the verdict as a row of the report, with the names of the first items that differ."""
        return {
            "name": self.oracle,
            "ok": self.ok,
            "compared": self.compared,
            "differing_count": len(self.differences),
            "differing": [each.item for each in self.differences[:_MAX_LISTED_ITEMS]],
            "value": json_number(self.value),
            "tolerance": json_number(self.limit),
            "noise_factor": self.noise_factor,
            "noise": json_number(self.noise),
            "is_widened": self.is_widened,
        }


def compare(
    reference: Sequence[Items], actual: Sequence[Items], oracles: Iterable[str] = EXACT_ORACLES
) -> list[Verdict]:
    """Compare two snapshots rank by rank.

    Args:
        reference: Items of each rank in the uninterrupted run.
        actual: Items of each rank in the other run, with the same number of ranks.
        oracles: Oracles to apply; an oracle without items in either run has no verdict. A missing tensor is reported by
            its own oracle, not by `finite`.
    """
    selected = set(oracles)
    compared: dict[str, int] = {}
    differences: dict[str, list[Difference]] = {}
    for rank, (reference_items, actual_items) in enumerate(zip(reference, actual, strict=True)):
        for oracle, item in {**reference_items, **actual_items}:
            if oracle not in selected:
                continue
            compared[oracle] = compared.get(oracle, 0) + 1
            values = reference_items.get((oracle, item)), actual_items.get((oracle, item))
            if values[0] != values[1] and not (oracle == "finite" and None in values):
                differences.setdefault(oracle, []).append(Difference(oracle, item, rank, *values))
    return [
        Verdict(oracle, compared[oracle], differences.get(oracle, ())) for oracle in ORACLE_ORDER if oracle in compared
    ]


def compare_replicas(by_rank: Sequence[Mapping[tuple[str, str], str]]) -> Verdict:
    """Compare replicated state with the first rank that has it.

    Args:
        by_rank: For each rank, (item, part of it that is replicated) -> digest of its bytes.
    """
    first: dict[tuple[str, str], tuple[int, str]] = {}
    compared, differences = 0, []
    for rank, digests in enumerate(by_rank):
        for key, digest in digests.items():
            if key not in first:
                first[key] = rank, digest
                continue
            compared += 1
            if first[key][1] != digest:
                differences.append(
                    Difference("replicas", key[0], rank, f"bytes of rank {first[key][0]}", "different bytes")
                )
    return Verdict("replicas", compared, differences)


def check_finite(by_rank: Sequence[Items], losses: Mapping[int, float] | None = None) -> Verdict:
    """Check that no item is NaN, and that trained state and losses by step have no infinity."""
    compared, differences = 0, []
    for rank, items in enumerate(by_rank):
        for (oracle, name), finding in items.items():
            if oracle == "finite":
                compared += 1
                if finding != "finite":
                    differences.append(Difference("finite", name, rank, "finite", finding))
    for step, loss in (losses or {}).items():
        compared += 1
        if not isfinite(loss):
            differences.append(Difference("finite", f"loss of step {step}", None, "finite", str(loss)))
    return Verdict("finite", compared, differences)


def compare_measurements(
    oracle: str, pairs: Iterable[tuple[float, float]], noise: float | None, noise_factor: float, default_factor: float
) -> Verdict:
    """Return the verdict on pairs of numbers, with a tolerance that is a multiple of the noise.

    Args:
        oracle: "loss" or "logits".
        pairs: Pairs of an expected and an actual number.
        noise: Measured noise; None if equal bits are required.
        noise_factor: Factor of the noise, from the recipe.
        default_factor: Default of that factor.
    """
    distances = [abs_difference(*pair) for pair in pairs]
    return compare_with_noise(oracle, len(distances), largest_value(distances), noise, noise_factor, default_factor)


def compare_with_noise(
    oracle: str, compared: int, value: float, noise: float | None, noise_factor: float, default_factor: float
) -> Verdict:
    """Compare a largest difference, `value`, with a tolerance, as `compare_measurements` does."""
    if noise is None:
        return Verdict(oracle, compared, value=value, limit=0.0)
    return Verdict(
        oracle,
        compared,
        value=value,
        limit=noise_factor * noise,
        noise_factor=noise_factor,
        noise=noise,
        is_widened=noise_factor > default_factor,
    )


def abs_difference(reference: float, actual: float) -> float:
    """Return the absolute difference of two numbers; NaN if one of them is not finite."""
    return abs(reference - actual) if isfinite(reference) and isfinite(actual) else nan


def largest_value(values: Iterable[float]) -> float:
    """Return the largest number, 0 for none, NaN if one is NaN (the result of `max` would depend on their order)."""
    maximum = 0.0
    for value in values:
        if value != value:
            return nan
        maximum = max(maximum, value)
    return maximum


def json_number(value: float | None) -> float | str | None:
    """Return a number as JSON can represent it: NaN and infinity become strings."""
    return value if value is None or isfinite(value) else str(value)


def failed_verdicts(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts that failed, in the order of the oracles."""
    return (each for each in sorted(verdicts, key=lambda each: ORACLE_ORDER.index(each.oracle)) if each.ok is False)


def phase_ok(verdicts: Iterable[Verdict]) -> bool | None:
    """Return False if a verdict failed, None if nothing was compared at all, else True."""
    results = {each.ok for each in verdicts}
    return False if False in results else True if True in results else None
