"""Test that the checkpoints of a training run can be read back, exported, resharded and resumed; name what was lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ckptx.report.documents.robustness import RobustnessReport
    from ckptx.report.report import Log


def robustness(
    recipe: str | Path,
    *,
    settings: Sequence[str] = (),
    phases: str | None = None,
    inject: str | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    backend: str = "auto",
    gpu_memory: int | str | None = None,
    log: Log | None = None,
    on_phase: Callable[[RobustnessReport], None] = lambda report: None,
) -> RobustnessReport:
    """Trains, saves, loads, exports, re-lays and resumes as a recipe says, and compares to the last bit.

    Args:
        recipe: The name of one that ckptx brings, or a YAML file.
        settings: `key=value` for each value of the recipe that is to be another, as `layout.tp=2`.
        phases: Which of them, by their numbers, as `0-3,6`; all of them when left out.
        inject: A fault to plant, which has to be found.
        out: A directory for everything that is written, absent or empty; a temporary one when left out.
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl.
        gpu_memory: Of each GPU, as `80GB` or in bytes.
        log: Has what the user should know, when an error is raised, too.
        on_phase: Called with the report so far, before the first phase of our trainer, and after each phase.

    Raises:
        UsageError: An option or a setting has a value it cannot have.
        InputError: The recipe is none, or what it names cannot be read.
        UnsupportedError: What it asks for cannot run like that.
        OutputError: `out` cannot be written.
        SpaceError: It does not fit into memory, or on the disk.
        EnvironmentProblem: A package is missing, or there is no such device.
    """
    from ckptx.errors import missing_package

    try:
        run = import_module("ckptx.robustness_suite.run")  # it imports torch
    except ImportError as error:
        raise missing_package("robustness", error) from error
    made = run.robustness(
        recipe, settings=settings, phases=phases, inject=inject, out=out, device=device, backend=backend,
        gpu_memory=gpu_memory, log=log, on_phase=on_phase,
    )  # fmt: skip
    return cast("RobustnessReport", made)


def known_faults() -> Mapping[str, str]:
    """The faults that `inject` can plant: name -> what each does."""
    from ckptx.errors import missing_package

    try:
        found = import_module("ckptx.robustness_suite.faults").FAULTS
    except ImportError as error:
        raise missing_package("--inject", error) from error
    return {name: str(fault.says) for name, fault in found.items()}
