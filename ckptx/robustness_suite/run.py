"""Implementation of `ckptx robustness`: read a recipe, run its phases on shared ranks, and build the report."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.errors import CkptxError, OutputError, UsageError
from ckptx.options.robustness import RobustnessOptions
from ckptx.processes.rendezvous import is_first_rank, is_launched, launched_world_size
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.environment import environment
from ckptx.report.number_formats import peak_of_processes
from ckptx.report.report import Log, Stopwatch
from ckptx.report.robustness_phrases import find_first_failure
from ckptx.robustness_suite.memory import StepMemory, add_measurement, forecast_memory
from ckptx.robustness_suite.oracles import Difference, Verdict
from ckptx.robustness_suite.phases import Phase, select_phases
from ckptx.robustness_suite.ranks import Ranks, RetainedMemory
from ckptx.robustness_suite.report_builder import ReportBuilder
from ckptx.robustness_suite.session import InjectedFault, Session
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.recipe_file import find_recipe, read_recipe


def robustness(options: RobustnessOptions) -> RobustnessReport:
    """Run the phases of a recipe: train, save, load, export, reshard, resume and kill; report the items that differ.

    Returns:
        The report; `exit` is 1 if something differs, and 2 if no check detected the injected fault.

    Raises:
        CkptxError: See `ckptx.robustness`.
    """
    stopwatch, log = Stopwatch(), options.log or Log()
    phases, fault_name, overrides, on_phase = options.phases, options.inject, options.overrides, options.on_phase
    device, backend, gpu_memory = options.device, options.backend, options.gpu_bytes
    path = find_recipe(options.recipe)
    recipe = read_recipe(path, overrides, launched_world_size())
    log(recipe)
    selected_phases = select_phases(phases)
    injection = InjectedFault()
    if fault_name is not None:
        from ckptx.robustness_suite.faults import find_fault  # imported only if a fault is injected

        fault = find_fault(fault_name, recipe)
        injection = fault.injection
        if phases is None:
            selected_phases = [each for each in selected_phases if each.number == fault.phase]
        _check_fault_phase(fault_name, fault.phase, selected_phases)
    if recipe.trainer is not None:
        _check_external_options(recipe, phases, fault_name)
    else:
        _check_save_at(recipe)
        _check_sharded(recipe)
    output = _prepare_output(options.out)
    folder = output.path
    try:
        report = _initial_report(recipe, path, overrides, fault_name, folder)
        report = replace(report, environment=environment())
        if recipe.trainer is not None:
            report = _run_external(report, recipe, path, log, on_phase)
        else:
            local_ranks = recipe.layout.dims.world_size
            with Ranks(device=device, backend=backend, gpu_memory=gpu_memory, local_ranks=local_ranks) as ranks:
                session = Session(
                    recipe=recipe,
                    source=folder / "source",
                    out=folder,
                    ranks=ranks,
                    is_exact=True,
                    log=log,
                    injection=injection,
                )
                if ranks.is_launched:  # all ranks use the temporary folder of rank 0
                    folder = session.out = session.run_task("broadcast", folder)
                    report = replace(report, output_dir=str(folder))
                on_phase(report)
                setup = session.run_task("prepare", recipe, folder / "source", device)
                session.source, session.devices, session.is_exact = setup.source, setup.devices, setup.devices is None
                if setup.note is not None:
                    log.note(setup.note)
                used_device = "cpu" if setup.devices is None else "cuda"
                report = replace(report, environment=environment(device=used_device, backend=setup.backend))
                forecast = forecast_memory(session, gpu_memory)
                report = _run_phases(report, session, selected_phases, forecast, on_phase)
                if ranks.is_launched:
                    session.run_task("broadcast", None)  # wait until all ranks have finished reading
            report = replace(report, **peak_of_processes([ranks.peak_rss], are_ranks=True))
        if fault_name is not None and not report.exit:  # 1 would mean that the fault was detected
            report = replace(report, exit=UsageError.exit_code)
            log.note(f"--inject {fault_name}: no check failed; run the recipe without --set, or choose another fault")
    except BaseException as error:  # without a report, remove the output folder
        keeps_output = recipe.trainer is not None and isinstance(error, CkptxError)  # keep the output of the command
        if output.is_temporary and not (keeps_output and any(output.path.iterdir())):
            shutil.rmtree(output.path, ignore_errors=True)
        elif output.is_new:
            with suppress(OSError):  # not empty, or already removed
                output.path.rmdir()
        raise
    if output.is_temporary and not report.exit:
        shutil.rmtree(folder, ignore_errors=True)
        report = replace(report, output_dir="")
    return stopwatch.stop(replace(report, notes=log.notes, first_failure=find_first_failure(report)))


def _check_fault_phase(name: str, number: int, selected_phases: Sequence[Phase]) -> None:
    """Check that the phase that detects a fault is selected.

    Raises:
        UsageError: It is not.
    """
    if number not in {each.number for each in selected_phases}:
        phase = next(each for each in select_phases(None) if each.number == number)
        raise UsageError(
            f"--inject {name}: the fault is detected in phase {number} ({phase.name}), which --phases does not select; "
            f"add {number} to --phases, or leave out --phases to run this phase only"
        )


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


def _check_sharded(recipe: Recipe) -> None:
    """Check that the layout shards parameters if the recipe requires that.

    Raises:
        UsageError: It has neither tensor parallelism nor data-parallel shards.
    """
    dims = recipe.layout.dims
    if recipe.checks.sharded and dims.tp == dims.dp_shard == 1:
        raise UsageError(
            "checks.sharded: true requires sharded parameters, but layout.tp and layout.dp_shard are 1; raise one of "
            "them, or set checks.sharded to null"
        )


def _check_external_options(recipe: Recipe, phases: str | None, fault_name: str | None) -> None:
    """Refuse options that do not apply to a custom trainer.

    Raises:
        UsageError: Such an option is set, or torchrun launched this process.
    """
    for option, value in (("--phases", phases), ("--inject", fault_name)):
        if value is not None:
            raise UsageError(
                f'{option} does not apply to the recipe "{recipe.name}", whose trainer is a command; leave it out'
            )
    if is_launched():
        raise UsageError(f"{recipe.name}: its command starts its own ranks; run ckptx without torchrun")


def _run_external(
    report: RobustnessReport, recipe: Recipe, path: Path, log: Log, on_phase: Callable[[RobustnessReport], None]
) -> RobustnessReport:
    """Run a custom trainer, and add its results to the report."""
    from ckptx.robustness_suite.external_trainer import run_external

    assert recipe.trainer is not None
    report = replace(report, trainer=recipe.trainer.command, layout={})
    builder = run_external(
        recipe, Path(report.output_dir), log, lambda builder: on_phase(builder.report(report)), folder=path.parent
    )
    return builder.report(report, log)


def _run_phases(
    report: RobustnessReport, session: Session, phases: Sequence[Phase], forecast: StepMemory,
    on_phase: Callable[[RobustnessReport], None],
) -> RobustnessReport:  # fmt: skip
    """Run the phases in order, and add their results to the report."""
    baseline = measure_baseline(session)
    builder = ReportBuilder(lambda builder: on_phase(builder.report(report)), session.world_size)
    for phase in phases:
        run_phase(builder, session, phase, baseline)
    builder.noise = session.measured_noise
    for name, run in session.runs.items():
        builder.add_losses(name, run.losses, run.compared_with, run.mesh)
    return replace(
        builder.report(report, session.log),
        kills=session.kills or None,
        step_memory=add_measurement(forecast, session.measured_memory),
    )


def run_phase(builder: ReportBuilder, session: Session, phase: Phase, baseline: RetainedMemory) -> dict[str, Any]:
    """Run a phase, add its row to the report, and return the row.

    The verdicts of the phase are extended by those on the files of the uninterrupted run and on memory.
    """
    begin = time.perf_counter()
    findings = phase.run(session)
    reference = session.reference_verdict()
    if reference is not None:
        findings.verdicts.insert(0, reference)
    findings.verdicts.append(_memory_verdict(session, baseline))
    seconds, retained = round(time.perf_counter() - begin, 3), _max_memory(session.memory_samples)
    session.memory_samples.clear()
    memory = retained._asdict() | {f"baseline_{name}": value for name, value in baseline._asdict().items()}
    return builder.add(phase.name, phase.title, findings, seconds, number=phase.number, memory=memory)


def measure_baseline(session: Session) -> RetainedMemory:
    """Return memory and threads of local ranks after a run of two steps was released: the limits for all phases.

    Each is the maximum over ranks. The tensor memory of the second step, which is that of all later steps, is measured,
    too, for `session.measured_memory`.
    """
    result = session.run_task("train", replace(session.make_request(last_step=2), measures_memory=True))
    session.measured_memory = result.measured_memory
    baseline = _max_memory(session.memory_samples)
    session.memory_samples.clear()
    return baseline


def _max_memory(samples: Sequence[RetainedMemory]) -> RetainedMemory:
    """Return the maximum of each field; 0 without samples."""
    return RetainedMemory(
        *(max((each[index] for each in samples), default=0) for index in range(len(RetainedMemory._fields)))
    )


def _memory_verdict(session: Session, baseline: RetainedMemory) -> Verdict:
    """Compare memory and threads after a phase with the baseline."""
    retained = _max_memory(session.memory_samples)
    differences = [
        Difference("memory", name.replace("_", " "), None, f"at most {limit}", str(value))
        for name, limit, value in zip(RetainedMemory._fields, baseline, retained, strict=True)
        if value > limit
    ]
    return Verdict("memory", len(RetainedMemory._fields) * len(session.memory_samples), differences)


class _OutputFolder(NamedTuple):
    """Output folder of a run.

    Attributes:
        path: Path of the folder; the working directory on a rank that receives the folder of rank 0 later.
        is_new: True if this process created the folder.
        is_temporary: True if it is a temporary folder that this process has to remove.
    """

    path: Path
    is_new: bool
    is_temporary: bool


def _prepare_output(out: str | Path | None) -> _OutputFolder:
    """Return the output folder, and create it if it is missing."""
    if out is None:
        if is_launched() and not is_first_rank():
            return _OutputFolder(Path(), is_new=False, is_temporary=False)
        return _OutputFolder(Path(tempfile.mkdtemp(prefix="ckptx-robustness-")), is_new=True, is_temporary=True)
    folder = Path(out)
    try:
        # Other ranks skip this check, as rank 0 may have written already.
        if is_first_rank() and folder.exists() and any(folder.iterdir()):
            raise OutputError(f"{folder}: already contains files; use another --out, or an empty folder")
        is_new = is_first_rank() and not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}; use another --out") from error
    return _OutputFolder(folder.resolve(), is_new, is_temporary=False)


def _initial_report(
    recipe: Recipe, path: Path, overrides: Sequence[str], inject: str | None, out: Path
) -> RobustnessReport:
    dims = recipe.layout.dims
    return RobustnessReport(
        command="robustness",
        recipe=recipe.name,
        recipe_file=str(path),
        overrides=dict(each.partition("=")[::2] for each in overrides),
        injected_fault=inject,
        output_dir=str(out),
        world_size=dims.world_size,
        layout={"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate},
        trainer="ckptx",
        phases=[],
    )
