"""Phases: each tests one property of the checkpoints of a training run.

0 initial logits     the sharded model gives the same logits as from_pretrained in one process
1 uninterrupted run  two runs with the same seed match; measures the noise that limits later differences of losses and
                     logits
2 replicas           replicated state matches across ranks, and a checkpoint loads to the same logits
3 load and save      a checkpoint that is loaded and saved keeps all state, with synchronous and asynchronous saves
4 export             exported HF files give the same logits in stock transformers
5 other layouts      a checkpoint resharded for other meshes is bit-identical, and trains equally within the noise
6 resume             a resumed run equals an uninterrupted run: bit for bit, in new processes, twice, past an epoch
7 kills              a killed save leaves the last good step, and no incomplete step that looks complete
"""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from ckptx.api.convert import convert
from ckptx.api.reshard import reshard
from ckptx.architecture.find import find_architecture
from ckptx.comparison.contents import verify_bytes
from ckptx.errors import InputError, OutputError, UnsupportedError, UsageError
from ckptx.formats.hf.reader import read_json
from ckptx.formats.registry import open_checkpoint
from ckptx.options.conversion import Names
from ckptx.options.verify import CompareOptions
from ckptx.robustness_suite.judge import Findings
from ckptx.robustness_suite.kills import kill_points
from ckptx.robustness_suite.oracles import (
    Difference,
    Verdict,
    all_finite,
    compare,
    measured,
    replicas,
    within_noise,
)
from ckptx.robustness_suite.runs import KillPoint, Logits, RunResult, max_difference
from ckptx.robustness_suite.session import DRAWS, Session, of_steps
from ckptx.robustness_suite.stored_items import items_of
from ckptx.runtime.training.checkpoints import LATEST
from ckptx.runtime.training.recipe import ChecksBlock, LayoutBlock, Recipe

_DEFAULTS = ChecksBlock()
_OF_NO_RANK = ("scheduler", "step", "samples", "rate")  # state that is the same on every mesh


class Phase(NamedTuple):
    """One phase.

    Attributes:
        number: Number of the phase, for `--phases`.
        name: Name of the phase.
        title: Property that the phase tests.
        run: Function that runs the phase.
    """

    number: int
    name: str
    title: str
    run: Callable[[Session], Findings]


def source_parity(session: Session) -> Findings:
    """Run phase 0."""
    reference, noise = session.run_task("source_logits", session.recipe, session.source, DRAWS)
    found = session.run_task("runtime_logits", session.run_of())
    return Findings([_logits(session, reference, found, noise)])


def straight_run(session: Session) -> Findings:
    """Run phase 1."""
    straight, again = session.straight, session.again
    found = Findings([_sharded(session, straight)] if session.recipe.checks.sharded is not None else [])
    found.verdicts += _finite(straight)
    if session.is_exact:
        for step in session.stops:
            found.verdicts += compare(straight.items[step], again.items[step])
        found.verdicts.append(_losses(session, straight, again, noise=None))
    else:
        found.notes.append("two runs with the same seed may differ in bits on this device; their difference is noise")
    noise = session.noise
    found.notes.append(
        f"noise of the loss {max(noise['loss'].values()):.3g}, of logits {max(noise['logits'].values()):.3g}"
    )
    return _merge_verdicts(found)


def _saving(recipe: Recipe, is_asynchronous: bool) -> Recipe:
    """Return the recipe with saves in the foreground or in the background."""
    return structs.replace(recipe, checkpoint=structs.replace(recipe.checkpoint, asynchronous=is_asynchronous))


def replicas_and_reference(session: Session) -> Findings:
    """Run phase 2."""
    straight, last = session.straight, session.stops[-1]
    found = Findings([replicas(straight.held[step]) for step in session.stops])
    with found.reading(f"step-{last}"):
        logits = session.run_task("runtime_logits", session.run_of(resumed=session.checkpoint(last)))
        noise = None if session.is_exact else session.noise_of("logits")
        found.verdicts.append(_logits(session, session.reference_logits, logits, noise))
    return _merge_verdicts(found)


def save_again(session: Session) -> Findings:
    """Run phase 3."""
    step = session.boundary
    first = session.checkpoint(step)
    found = Findings()
    for name, is_asynchronous in (("saved-again", False), ("saved-again-async", True)):
        recipe = _saving(session.recipe, is_asynchronous)
        with found.reading(f"step-{step}"):
            run = session.run_of(resumed=first, until=0, saves={step: session.saved(name, step)}, looks=[step])
            outcome = session.train(name, replace(run, recipe=recipe))
            found.verdicts += compare(session.straight.items[step], outcome.items[step])
            found.verdicts.append(_same_files(first, session.saved(name, step)))
    return _merge_verdicts(found)


def export(session: Session) -> Findings:
    """Run phase 4."""
    last = session.stops[-1]
    checkpoint, exported = session.checkpoint(last), session.out / "export"
    found = Findings()
    architecture = find_architecture(read_json(session.source / "config.json"))
    is_known = architecture is not None and architecture.name_patterns
    names: Names | None = "disk" if is_known else None  # experts that are fused in the run are separate on the Hub
    with found.reading(f"step-{last}"):
        convert("dcp2hf", checkpoint, exported, base=str(session.source), names=names, overwrite=True)
        found.verdicts.append(_names(session.source, exported))
        found.verdicts.append(_same_bytes(checkpoint, exported))
        logits, noise = session.run_task("source_logits", session.recipe, exported, DRAWS)  # of a forward pass alone
        found.verdicts.append(_logits(session, session.reference_logits, logits, noise))
    return _merge_verdicts(found)


def other_layouts(session: Session) -> Findings:
    """Run phase 5."""
    step, found = session.boundary, Findings()
    layouts = session.recipe.checks.layouts
    if not layouts:
        return Findings(skipped="the recipe has no other layouts; add checks.layouts")
    left = [each for each in layouts if not session.can_have(each.dims.world_size)]
    notes = [
        f"{session.on(each)}: not run, requires {each.dims.world_size} ranks, which are not available" for each in left
    ]
    if len(left) == len(layouts):
        return Findings(skipped="; ".join(notes))
    found.notes += notes
    steady = structs.replace(session.recipe, training=structs.replace(session.recipe.training, dropout=0.0))
    checkpoint = session.checkpoint(step)
    base: RunResult | None = None
    for number, layout in enumerate(layouts, 1):
        if layout in left:
            continue
        words = session.on(layout)
        with found.reading(f"step-{step} on {words}"), _errors_name_key(f"checks.layouts[{number - 1}]"):
            if base is None:
                run = replace(session.run_of(resumed=checkpoint, looks=[step]), recipe=steady)
                base = session.train("without-dropout", run)
            found.verdicts += _on_other_layout(session, layout, number, base, steady)
    return _merge_verdicts(found)


def _on_other_layout(
    session: Session, layout: LayoutBlock, number: int, base: RunResult, steady: Recipe
) -> Iterator[Verdict]:
    """Reshard a checkpoint for another mesh, load it there, save it, and continue training."""
    step, words, dims = session.boundary, session.on(layout), layout.dims
    checkpoint = session.checkpoint(step)
    resharded, saved = session.out / f"layout-{number}-resharded", session.saved(f"layout-{number}", step)
    reshard(checkpoint, resharded, tp=dims.tp, pp=dims.pp, dp_shard=dims.dp_shard, to="dcp", overwrite=True)
    yield _same_bytes(checkpoint, resharded, words)
    run = replace(session.run_of(resumed=resharded, looks=[step], saves={step: saved}, layout=layout), recipe=steady)
    outcome = session.train(f"layout-{number}", run)
    yield from compare(base.start[:1], outcome.start[:1], _OF_NO_RANK)
    yield _same_bytes(checkpoint, saved, words)
    yield _losses(session, base, outcome, session.noise_of("loss"))
    yield from _same_state(checkpoint, resharded, words)
    yield from _same_state(checkpoint, saved, words)


@contextmanager
def _errors_name_key(key: str) -> Iterator[None]:
    """Prefix errors of layouts that a model does not support with the key of the recipe."""
    try:
        yield
    except (UsageError, UnsupportedError) as error:
        raise type(error)(f"{key}: {error}") from error


def resume(session: Session) -> Findings:
    """Run phase 6."""
    found = Findings()
    noise = None if session.is_exact else session.noise_of("loss")
    steps = [each for each in session.stops if each < session.recipe.training.steps]
    for number, step in enumerate(steps, 1):
        later = [each for each in session.stops if each > step]
        run = session.run_of(resumed=session.checkpoint(step), looks=later)
        with found.reading(f"step-{step}"):
            if number > 1:
                outcome = session.train(f"resumed-{number}", run)
            else:
                with session.fresh_ranks() as fresh:
                    outcome = session.train("resumed", run, fresh)
            at_start = compare(session.straight.items[step], outcome.start)
            found.verdicts += at_start
            if session.is_exact and all(
                each.ok is not False for each in at_start
            ):  # later steps can only be equal if the start is
                for each in later:
                    found.verdicts += compare(session.straight.items[each], outcome.items[each])
            found.verdicts += _finite(outcome)
            found.verdicts.append(_losses(session, session.straight, outcome, noise))
    return _merge_verdicts(found)


def kills(session: Session) -> Findings:
    """Run phase 7."""
    found, good = Findings(), session.boundary
    first = session.checkpoint(good)
    ways = ((False, False), (False, True), (True, False))  # asynchronous, all ranks
    names: dict[bool, list[str]] = {}
    for number, (is_asynchronous, everyone) in enumerate(ways, 1):
        recipe = _saving(session.recipe, is_asynchronous)
        run = replace(session.run_of(resumed=first), recipe=recipe)
        if is_asynchronous not in names:
            root = _root_with(session, f"rehearsed-{number}", first)
            names[is_asynchronous] = session.run_task("saved_under_watch", run, KillPoint(root=root))[0]
        at = kill_points(names[is_asynchronous], len(ways))[number - 1]
        root = _root_with(session, f"killed-{number}", first)
        before = session.run_task("left_over", root, good, {})
        ended = session.run_until_killed("saved_under_watch", run, KillPoint(root=root, at=at, everyone=everyone))
        session.plant(f"killed-{number}", root)
        left = session.run_task("left_over", root, good, before.digests)
        faults = list(left.faults)
        if not ended:
            faults.append(f"{at}: no rank was killed at this operation")
        try:
            session.run_task("saved_under_watch", run, KillPoint(root=root))
        except (InputError, OutputError) as error:
            faults.append(f"the next save: {error}")
        else:
            after = session.run_task("left_over", root, good + 1, before.digests)
            faults += [f"after the next save: {each}" for each in after.faults]
        session.kills.append(
            {"operation": at, "ranks": ended, "is_async": is_asynchronous, "latest_step": left.latest, "ok": not faults}
        )
        differences = [Difference("readable", at, None, "only the last good step", each) for each in faults]
        found.verdicts.append(Verdict("readable", 1, differences))
    return _merge_verdicts(found)


def _root_with(session: Session, name: str, first: Path) -> Path:
    """Create a directory of steps with one published step."""
    root = session.folder(name)
    session.once(_begin_with, root, first)
    return root


def _begin_with(root: Path, first: Path) -> None:
    shutil.copytree(first, root / first.name)
    (root / LATEST).write_text(f"{first.name}\n", encoding="utf-8")


PHASES: tuple[Phase, ...] = (
    Phase(0, "initial logits", "the sharded model gives the same logits as from_pretrained", source_parity),
    Phase(1, "uninterrupted run", "two runs with the same seed match; measures numerical noise", straight_run),
    Phase(2, "replicas", "replicated state matches across ranks; logits survive a reload", replicas_and_reference),
    Phase(3, "load and save", "a checkpoint that is loaded and saved keeps all state", save_again),
    Phase(4, "export", "exported HF files give the same logits in transformers", export),
    Phase(5, "other layouts", "resharded for another mesh, state is equal and training matches", other_layouts),
    Phase(6, "resume", "a resumed run equals an uninterrupted run", resume),
    Phase(7, "kills", "a killed save leaves the last good step", kills),
)


# --------------------------------------------------------------------------------------------- verdicts


def _merge_verdicts(found: Findings) -> Findings:
    """Merge the verdicts of each oracle: keep the largest difference of a measurement, and all items that differ."""
    by_oracle: dict[str, list[Verdict]] = {}
    for each in found.verdicts:
        by_oracle.setdefault(each.oracle, []).append(each)
    verdicts = []
    for oracle, several in by_oracle.items():
        worst = next((each for each in several if each.ok is False), None) or max(
            several, key=lambda each: -1.0 if each.value is None else each.value
        )
        verdicts.append(
            worst._replace(
                oracle=oracle,
                compared=sum(each.compared for each in several),
                differences=[difference for each in several for difference in each.differences],
            )
        )
    return replace(found, verdicts=verdicts)


def _finite(outcome: RunResult) -> list[Verdict]:
    return [
        *(all_finite(items) for items in (outcome.start, *outcome.items.values())), all_finite((), outcome.losses)
    ]  # fmt: skip


def _sharded(session: Session, outcome: RunResult) -> Verdict:
    parts, every = outcome.sharded
    is_sharded, wanted = parts > 0, session.recipe.checks.sharded
    words = {True: "sharded", False: "not sharded"}
    differences = (
        [Difference("sharded", f"{parts} of {every} parameters", None, words[bool(wanted)], words[is_sharded])]
        if is_sharded != wanted
        else []
    )
    return Verdict("sharded", every, differences)


def _losses(session: Session, reference: RunResult, found: RunResult, noise: float | None) -> Verdict:
    steps = sorted(found.losses)
    times = session.recipe.checks.loss_times_noise
    pairs = zip(of_steps(reference.losses, steps), of_steps(found.losses, steps), strict=True)
    return measured("loss", pairs, noise, times, _DEFAULTS.loss_times_noise)


def _logits(session: Session, reference: Logits, found: Logits, noise: float | None) -> Verdict:
    times = session.recipe.checks.logits_times_noise
    return within_noise(
        "logits", len(reference), max_difference(reference, found), noise, times, _DEFAULTS.logits_times_noise
    )


def _same_bytes(reference: Path, found: Path, where: str = "") -> Verdict:
    """Compare all tensors of two models bit for bit, in any format and layout."""
    report = verify_bytes(
        CompareOptions(reference, found), with_state=False
    )  # other oracles compare the rest of the state
    lead = f"{where}: " if where else ""
    differences = [
        Difference("model", f"{lead}{row['name']}", None, "the same", str(row.get("kind", "differs")))
        for row in report.differing
    ]
    return Verdict("model", report.compared, differences)


# State besides the model that is the same on every mesh; RNG state belongs to a rank.
_OF_A_RUN = ("moments", "adam step", "group", "rate", "scheduler", "step", "batch", "samples")


def _same_state(reference: Path, found: Path, where: str) -> list[Verdict]:
    """Compare the state of two checkpoints besides the model."""
    verdicts = compare([items_of(reference)], [items_of(found)], _OF_A_RUN)
    return [
        each._replace(differences=[one._replace(item=f"{where}: {one.item}", rank=None) for one in each.differences])
        for each in verdicts
    ]


def _names(reference: Path, found: Path) -> Verdict:
    """Compare the names in two checkpoints of one format, so that none is added, lost or named after a wrapper."""
    before, after = (set(open_checkpoint(each).tensors) for each in (reference, found))
    differences = [Difference("names", name, None, "present", "missing") for name in sorted(before - after)]
    differences += [Difference("names", name, None, "missing", "present") for name in sorted(after - before)]
    return Verdict("names", len(before | after), differences)


def _same_files(reference: Path, found: Path) -> Verdict:
    """Compare all files of two folders byte for byte."""
    names = sorted({each.name for folder in (reference, found) for each in folder.iterdir()})
    differences = []
    for name in names:
        first, second = reference / name, found / name
        if not (first.is_file() and second.is_file()):
            state = "present" if first.is_file() else "missing"
            differences.append(Difference("names", name, None, state, "present" if second.is_file() else "missing"))
        elif not filecmp.cmp(first, second, shallow=False):
            differences.append(Difference("model", name, None, "equal bytes", "different bytes"))
    return Verdict("model", len(names), differences)


def select_phases(text: str | None) -> Sequence[Phase]:
    """Return the phases that `--phases` selects by numbers, ranges or names, separated by commas."""
    if text is None:
        return PHASES
    known = {str(each.number): each for each in PHASES} | {each.name: each for each in PHASES}
    numbers: set[int] = set()
    for part in (each.strip() for each in text.split(",")):
        first, dash, last = part.partition("-")
        if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) <= PHASES[-1].number:
            numbers |= set(range(int(first), int(last) + 1))
        elif part in known:
            numbers.add(known[part].number)
        else:
            names = ", ".join(f"{each.number} ({each.name})" for each in PHASES)
            raise UsageError(f'--phases: "{part}" must be one of {names}, or a range such as 0-3')
    return [each for each in PHASES if each.number in numbers]
