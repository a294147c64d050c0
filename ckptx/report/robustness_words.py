"""What the rows of a robustness report say in words, the same in text, on the page and in JUnit XML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.report import counted, human_bytes

# What it means that an oracle fails, and where to look. docs/ci.md says more of each.
CAUSES: Mapping[str, str] = {
    "reference": "a run changed files of the run that it is compared with; let each run write into its own folder",
    "readable": "what was published does not open: cut short, incomplete, or published before it was whole",
    "sharded": "the trainer cut its parameters otherwise than the recipe expects; it may have run unsharded in silence",
    "finite": "a NaN or an infinity is in the state or in a loss; what was saved can already hold it",
    "names": "tensors are missing, left over, or named after a wrapper; a head is tied on one side alone",
    "model": "parameters or buffers differ; possible causes: weights of another step, swapped rows or shards, a cast",
    "second model": "a second copy of the model, such as an EMA, differs; possible cause: it was not restored",
    "moments": "optimizer state differs; possible causes: not restored, loaded for other parameters, or cast",
    "master weights": "master weights of the optimizer differ; possible causes: not restored, or made from the model",
    "adam step": "step counts of the optimizer, which set its bias correction, differ; possible cause: not restored",
    "group": "settings of the optimizer's param groups differ; possible cause: they were not restored",
    "scheduler": "scheduler state differs; possible causes: it was not restored, or was made for another step count",
    "step": "the step counter differs; possible cause: it was not restored",
    "epoch": "the epoch differs; possible cause: it was not restored",
    "samples": "the count of samples differs; possible cause: it was not restored, so that data repeats or is left out",
    "rng": "RNG state differs; possible causes: another rank's state, an old one, or a draw after it was restored",
    "replicas": "ranks that hold the same tensor hold different numbers; one of them was saved for all",
    "batch": "the next samples differ; possible causes: position in the data not restored, or that of another rank",
    "rate": "the learning rate differs; possible causes: the scheduler or optimizer state was not restored",
    "memory": "something holds the model after its phase, or a process group was not ended; the latter is 6 threads",
    "other": "state that ckptx has no word for differs; the items say which",
    "loss": "more than noise; where no exact oracle fails, look at what is no state: dropout, kernels, reductions",
    "logits": "more than noise; the model computes something else with the same weights",
}

_NOTHING: Mapping[str, str] = {
    "replicas": "no replicated state",
    "loss": "no loss",
    "logits": "no logits",
    "finite": "no floating-point state",
    "memory": "no rank was asked",
}
_SETTINGS = {"lr": "learning rate", "initial_lr": "initial learning rate", "weight_decay": "weight decay"}

MOST_ITEMS = 4  # of an oracle, named in a line


def number(value: float | str | None) -> str:
    """A measured number; one that is not finite is a text in the report, as JSON has no name for it."""
    return "none" if value is None else f"{number_of(value):.3g}"


def number_of(value: float | str | None) -> float:
    """A number of the report, NaN for what is none."""
    try:
        return float("nan") if value is None else float(value)
    except ValueError:
        return float("nan")


def mesh(report: RobustnessReport) -> str:
    """`tp 2 x dp_shard 2, 4 ranks`."""
    if report.world_size is None:
        return "an unknown number of ranks"
    dims = [f"{name} {size}" for name, size in report.layout.items() if size > 1]
    return f"{' x '.join(dims)}{', ' if dims else ''}{counted(report.world_size, 'rank')}"


def notes_of(phase: Mapping[str, Any]) -> list[str]:
    """What there is to say of a phase."""
    notes = phase.get("notes") or ()
    return [notes] if isinstance(notes, str) else [str(note) for note in notes]


def failing_oracles(phase: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of its oracles that are not ok."""
    return [row for row in phase.get("oracles") or () if row["ok"] is False]


def unchecked_oracles(phase: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of oracles that had nothing to compare."""
    return [row for row in phase.get("oracles") or () if row["ok"] is None]


def unchecked_text(row: Mapping[str, Any]) -> str:
    """Say why an oracle did not judge."""
    return f"not checked: {_NOTHING.get(str(row['name']), 'nothing to compare')}"


def widened(report: RobustnessReport) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The name of a phase and a row of its oracles, for each limit that the recipe made wider."""
    for phase in report.phases:
        for row in phase.get("oracles") or ():
            if row.get("widened"):
                yield str(phase["name"]), row


def widened_text(phase: str, row: Mapping[str, Any]) -> str:
    """What a limit was widened to."""
    return f"{phase}: {row['name']} may be {row['times_noise']:g} x the noise away, {number(row['limit'])}"


def oracle_text(row: Mapping[str, Any]) -> str:
    """Return the result of an oracle, without its items: `2 of 185 items differ`, or the difference and its tolerance.

    Example:
        difference 0.0003, tolerance 3.82e-06 (8 x noise 4.77e-07); difference 0.0003, tolerance 0 (equal bits required)
    """
    parts = []
    if row.get("count"):
        differ = "differs" if row["count"] == 1 else "differ"
        parts.append(f"{row['count']:,} of {counted(row['compared'], 'item')} {differ}")
    elif row.get("value") is None:
        parts.append(f"{counted(row['compared'], 'item')} {'alike' if row['ok'] else 'compared'}")
    if row.get("value") is not None:
        times = row.get("times_noise")
        rule = f"{times:g} x noise{_noise_of(row)}" if times is not None else "equal bits required"
        parts.append(f"difference {number(row['value'])}, tolerance {number(row['limit'])} ({rule})")
    return "; ".join(parts)


def _noise_of(row: Mapping[str, Any]) -> str:
    """Return the noise that the tolerance of a row is a multiple of; nothing for a report that does not have it."""
    return "" if row.get("noise") is None else f" {number(row['noise'])}"


def items_of(report: RobustnessReport, phase: Mapping[str, Any], oracle: str) -> list[str]:
    """Each item of an oracle that differs, with its ranks, and what it is where that is known: `a on rank 1: x, y`."""
    found: dict[tuple[str, object], list[Mapping[str, Any]]] = {}
    for row in report.differing:
        if is_of(row, phase) and row.get("oracle") == oracle:
            said = row.get("found") if row.get("rank") is None else None  # of no rank, as several things a kill left
            found.setdefault((str(row["item"]), said), []).append(row)
    if not found:
        (names,) = (row.get("differing") or () for row in phase["oracles"] if row["name"] == oracle)
        return [str(name) for name in names]
    return [f"{item}{_ranks(rows)}{_values(rows[0])}" for (item, _), rows in found.items()]


def cause_of(report: RobustnessReport, phase: Mapping[str, Any], oracle: str) -> str | None:
    """Return what it means that an oracle fails; for param groups, only the settings that differ are named."""
    if oracle != "group":
        return CAUSES.get(oracle)
    items = [str(row["item"]) for row in report.differing if is_of(row, phase) and row.get("oracle") == oracle]
    keys = list(dict.fromkeys(item.rpartition(".")[2] for item in items))
    if not keys:
        return CAUSES[oracle]
    names = ", ".join(some([_SETTINGS.get(key, key) for key in keys]))
    return f"{names} in the optimizer's param groups: different; possible cause: not restored"


def is_of(row: Mapping[str, Any], phase: Mapping[str, Any]) -> bool:
    """Whether a row of `differing` is about a phase, which it names by its number or its name."""
    return row.get("phase") in (phase["name"], phase.get("number", phase["name"]))


def called(phase: Mapping[str, Any]) -> str:
    """The number and the name of a phase: `6 resume`."""
    number = phase.get("number")
    return str(phase["name"]) if number is None else f"{number} {phase['name']}"


def _ranks(rows: Sequence[Mapping[str, Any]]) -> str:
    ranks = sorted({row["rank"] for row in rows if row.get("rank") is not None})
    if not ranks:
        return ""
    return f" on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"


def _values(row: Mapping[str, Any]) -> str:
    reference, found = row.get("reference"), row.get("found")
    if reference is None and found is None:
        return ""
    if found is None:
        return ": is missing"
    return f": {found}, there is none in the reference" if reference is None else f": {found}, should be {reference}"


def some(items: Sequence[str], most: int = MOST_ITEMS) -> list[str]:
    """The first of some items, and how many more there are."""
    more = [f"and {len(items) - most:,} more"] if len(items) > most else []
    return [*items[:most], *more]


def step_memory_text(report: RobustnessReport) -> str | None:
    """What a step was forecast to take, and took."""
    found = report.step_memory
    said = []
    for name, words in (("peak", "at the peak"), ("between_steps", "between steps")):
        forecast, measured = found.get(f"forecast_{name}"), found.get(f"measured_{name}")
        if measured is not None:
            expected = f", forecast {human_bytes(forecast)} ({measured / forecast:.3f} x)" if forecast else ""
            said.append(f"{human_bytes(measured)} {words}{expected}")
    return "; ".join(said) or None


def noise_text(report: RobustnessReport, what: str) -> str | None:
    """What the noise of `loss` or `logits` is, and what it was measured with; None where it was not."""
    row = report.noise.get(what)
    if not row:
        return None
    parts = [("two runs alike", row.get("repeated")), ("embedding moved by a unit", row.get("moved"))]
    said = ", ".join(f"{words} {number(value)}" for words, value in parts if value is not None)
    return f"{number(noise_of(report, what))} ({said})" if said else None


def noise_of(report: RobustnessReport, what: str) -> float | None:
    """The larger of the two, NaN if one is NaN; None where it was not measured."""
    row = report.noise.get(what) or {}
    values = [number_of(row[key]) for key in ("repeated", "moved") if row.get(key) is not None]
    if not values:
        return None
    return max(values) if all(map(isfinite, values)) else float("nan")


def memory_faults(phase: Mapping[str, Any]) -> list[str]:
    """What a phase that failed left behind, above the baseline, where no oracle says it."""
    memory = phase.get("memory")
    is_judged = any(row["name"] == "memory" for row in phase.get("oracles") or ())
    if phase["ok"] is not False or not memory or is_judged:
        return []
    faults = []
    if memory["tensor_bytes"] > memory["baseline_tensor_bytes"]:
        baseline = human_bytes(memory["baseline_tensor_bytes"])
        faults.append(f"{human_bytes(memory['tensor_bytes'])} of tensors are live after it, {baseline} before")
    if memory["threads"] > memory["baseline_threads"]:
        threads = counted(memory["threads"], "thread")
        faults.append(f"{threads} after it, {memory['baseline_threads']} before; a process group is 6")
    return faults


def kill_text(row: Mapping[str, Any]) -> str:
    """Who was killed where, and what could be loaded then."""
    how = "asynchronous" if row.get("asynchronous") else "synchronous"
    latest = "no step" if row.get("latest") is None else f"latest {row['latest']}"
    return f"at {row.get('at')}, {how}, {_killed(row.get('ranks'))}: {latest}"


def _killed(ranks: Any) -> str:
    if isinstance(ranks, list | tuple):
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else "no rank"
    return str(ranks) if isinstance(ranks, str) else f"rank {ranks}"


def verdict(report: RobustnessReport) -> str:
    """The last word: PASSED, or what failed."""
    failed = [phase for phase in report.phases if phase["ok"] is False]
    ran = [phase for phase in report.phases if phase["ok"] is not None]
    planted = f"; planted: {report.injected}" if report.injected else ""
    if report.ok and not failed:
        skipped = len(report.phases) - len(ran)
        left = f", {skipped} not run" if skipped else ""
        return f"PASSED: {report.recipe}, {counted(len(ran), 'phase')}{left}{planted}"
    said = [f"{phase['name']}{_named_by(phase)}" for phase in failed]
    return f"FAILED: {report.recipe}: {'; '.join(said) or 'see the notes'}{planted}"


def _named_by(phase: Mapping[str, Any]) -> str:
    names = [str(row["name"]) for row in failing_oracles(phase)]
    names += ["memory"] if memory_faults(phase) else []
    return f" ({', '.join(names)})" if names else ""


def first_cause(report: RobustnessReport) -> dict[str, Any] | None:
    """Return what failed first in a run, and why: `phase`, `oracle` (None where the phase has none), `cause` in words.

    Later phases repeat the failure of an earlier one, as every step spreads it. None where no phase failed.
    """
    for phase in report.phases:
        if phase["ok"] is False:
            failing = [str(row["name"]) for row in failing_oracles(phase)]
            failing += ["memory"] if memory_faults(phase) else []
            oracle = failing[0] if failing else None
            said = (
                phase.get("cause")
                or (cause_of(report, phase, oracle) if oracle else None)
                or next(iter(notes_of(phase)), "")
                or "unknown"
            )
            return {"phase": str(phase["name"]), "oracle": oracle, "cause": str(said)}
    return None


def cause_text(report: RobustnessReport) -> str | None:
    """Say in one line what failed first: `cause: resume, oracle rng: ...`; None where no phase failed."""
    found = first_cause(report)
    if found is None:
        return None
    oracle = f", oracle {found['oracle']}" if found["oracle"] else ""
    return f"cause: {found['phase']}{oracle}: {found['cause']}"
