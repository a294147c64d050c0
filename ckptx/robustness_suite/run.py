"""Implementation of `ckptx robustness`: read a recipe, run its phases on shared ranks, and build the report."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptx.errors import CkptxError, OutputError, UsageError
from ckptx.options.robustness import RobustnessOptions
from ckptx.processes.rendezvous import is_first_rank, is_launched, launched_world_size
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.environment import environment
from ckptx.report.numbers import peak_of_processes
from ckptx.report.report import Log, Stopwatch
from ckptx.report.robustness_words import first_cause
from ckptx.robustness_suite.judge import Judge
from ckptx.robustness_suite.memory import Memory, forecast_memory, with_measured
from ckptx.robustness_suite.oracles import Difference, Verdict
from ckptx.robustness_suite.phases import Phase, select_phases
from ckptx.robustness_suite.ranks import LeakedMemory, Ranks
from ckptx.robustness_suite.session import InjectedFault, Session
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.recipe_file import find_recipe, read_recipe


def robustness(options: RobustnessOptions) -> RobustnessReport:
    """Train, save, load, export, reshard, resume and kill as a recipe says, and name what differs.

    Returns:
        The report; `exit` is 1 if something differs.

    Raises:
        CkptxError: As `ckptx.robustness` does.
    """
    stopwatch, log = Stopwatch(), options.log or Log()
    phases, inject, settings, on_phase = options.phases, options.inject, options.settings, options.on_phase
    device, backend, memory = options.device, options.backend, options.gpu_bytes
    path = find_recipe(options.recipe)
    read = read_recipe(path, settings, launched_world_size())
    log(read)
    wanted = select_phases(phases)
    planted = InjectedFault()
    if inject is not None:
        from ckptx.robustness_suite.faults import find_fault  # imported only if a fault is injected

        fault = find_fault(inject, read)
        planted = fault.planted
        if phases is None:
            wanted = [each for each in wanted if each.number == fault.phase]
    if read.train is not None:
        _check_external_options(read, phases, inject)
    else:
        _check_save_at(read)
    folder, is_mine = _folder(options.out)
    mine = folder
    try:
        report = _report(read, path, settings, inject, folder)
        report = replace(report, environment=environment(device=device, backend=backend))
        if read.train is not None:
            report = _run_external(report, read, path, log, on_phase)
        else:
            with Ranks(device=device, backend=backend, gpu_memory=memory) as ranks:
                session = Session(
                    recipe=read,
                    source=folder / "source",
                    out=folder,
                    ranks=ranks,
                    is_exact=True,
                    log=log,
                    planted=planted,
                )
                if ranks.is_launched:  # all ranks use the temporary folder of rank 0
                    folder = session.out = session.run_task("agreed", folder)
                    report = replace(report, output_dir=str(folder))
                on_phase(report)
                session.source, session.devices = session.run_task("prepared", read, folder / "source")
                session.is_exact = session.devices is None
                forecast = forecast_memory(session, memory)
                report = _run(report, session, wanted, forecast, on_phase)
                if ranks.is_launched:
                    session.run_task("agreed", None)  # wait until all ranks have finished reading
            report = replace(report, **peak_of_processes([ranks.peak_rss], are_ranks=True))
    except BaseException as error:  # there is no report
        stays = read.train is not None and isinstance(error, CkptxError)  # keep the output of the command
        if is_mine and not (stays and any(mine.iterdir())):
            shutil.rmtree(mine, ignore_errors=True)
        elif not is_mine and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise
    if is_mine and not report.exit:
        shutil.rmtree(folder, ignore_errors=True)
        report = replace(report, output_dir="")
    return stopwatch.stop(replace(report, warnings=log.notes, cause=first_cause(report)))


def _check_save_at(recipe: Recipe) -> None:
    """Check that a run saves a checkpoint to resume from.

    Raises:
        UsageError: The run saves only at the last step.
    """
    training = recipe.training
    if min(training.save_at, default=training.steps) >= training.steps:
        raise UsageError(
            f"training.save_at: {list(training.save_at)} has no step before the last step {training.steps}, so there "
            "are no steps after a resume to compare; set training.steps or training.save_at"
        )


def _check_external_options(recipe: Recipe, phases: str | None, inject: str | None) -> None:
    """Refuse options that do not apply to a custom trainer.

    Raises:
        UsageError: Such an option is set, or torchrun launched this process.
    """
    for option, value in (("--phases", phases), ("--inject", inject)):
        if value is not None:
            raise UsageError(f"{option} does not apply to {recipe.name}, whose trainer is a command; leave it out")
    if is_launched():
        raise UsageError(f"{recipe.name}: its command starts its own ranks; run ckptx without torchrun")


def _run_external(
    report: RobustnessReport, recipe: Recipe, path: Path, log: Log, on_phase: Callable[[RobustnessReport], None]
) -> RobustnessReport:
    """Run a custom trainer, and add its results to the report."""
    from ckptx.robustness_suite.external_trainer import run_external

    assert recipe.train is not None
    report = replace(report, trainer=recipe.train.command, layout={})
    found = run_external(
        recipe, Path(report.output_dir), log, lambda so_far: on_phase(so_far.report(report)), folder=path.parent
    )
    return found.report(report, log)


def _run(
    report: RobustnessReport, session: Session, phases: Sequence[Phase], forecast: Memory,
    on_phase: Callable[[RobustnessReport], None],
) -> RobustnessReport:  # fmt: skip
    """Run the phases in order, and add their results to the report."""
    baseline = baseline_of(session)
    judge = Judge(lambda so_far: on_phase(so_far.report(report)), session.world_size)
    for phase in phases:
        run_phase(judge, session, phase, baseline)
    judge.noise = session.noise_found
    for name, losses in session.losses.items():
        judge.add_losses(name, losses)
    return replace(
        judge.report(report, session.log),
        kills=session.kills or None,
        step_memory=with_measured(forecast, session.taken),
    )


def run_phase(judge: Judge, session: Session, phase: Phase, baseline: LeakedMemory) -> dict[str, Any]:
    """Run a phase, and return its row, which `judge` has from then on."""
    begin = time.perf_counter()
    found = phase.run(session)
    reference = session.reference_verdict()
    if reference is not None:
        found.verdicts.insert(0, reference)
    found.verdicts.append(_memory(session, baseline))
    seconds, residue = round(time.perf_counter() - begin, 3), _most(session.residues)
    session.residues.clear()
    memory = residue._asdict() | {f"baseline_{name}": value for name, value in baseline._asdict().items()}
    return judge.add(phase.name, phase.title, found, seconds, number=phase.number, memory=memory)


def baseline_of(session: Session) -> LeakedMemory:
    """Measure memory and threads after a run of two steps was released: the minimum of a process that has trained.

    The second step is like all later steps; its memory is measured.
    """
    outcome = session.run_task("train", replace(session.run_of(until=2), measures=True))
    session.taken = outcome.taken
    found = _most(session.residues)
    session.residues.clear()
    return found


def _most(residues: Sequence[LeakedMemory]) -> LeakedMemory:
    return LeakedMemory(
        *(max((each[index] for each in residues), default=0) for index in range(len(LeakedMemory._fields)))
    )


def _memory(session: Session, baseline: LeakedMemory) -> Verdict:
    """Compare memory and threads after a phase with the baseline."""
    found = _most(session.residues)
    differences = [
        Difference("memory", name.replace("_", " "), None, f"at most {most}", str(left))
        for name, most, left in zip(LeakedMemory._fields, baseline, found, strict=True)
        if left > most
    ]
    return Verdict("memory", len(LeakedMemory._fields) * len(session.residues), differences)


def _folder(out: str | Path | None) -> tuple[Path, bool]:
    """Return the output folder, and True if it is temporary and this process has to remove it."""
    if out is None:
        if is_launched() and not is_first_rank():
            return Path(), False  # rank 0 creates the folder
        return Path(tempfile.mkdtemp(prefix="ckptx-robustness-")), True
    folder = Path(out)
    try:
        if is_first_rank() and folder.exists() and any(folder.iterdir()):  # rank 0 may write already
            raise OutputError(f"{folder}: already contains files; use another --out, or an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}; use another --out") from error
    return folder.resolve(), False


def _report(recipe: Recipe, path: Path, settings: Sequence[str], inject: str | None, out: Path) -> RobustnessReport:
    dims = recipe.layout.dims
    return RobustnessReport(
        command="robustness",
        recipe=recipe.name,
        recipe_file=str(path),
        settings=dict(each.partition("=")[::2] for each in settings),
        injected_fault=inject,
        output_dir=str(out),
        world_size=dims.world_size,
        layout={"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate},
        trainer="ckptx",
        phases=[],
    )
