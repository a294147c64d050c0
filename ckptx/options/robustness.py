"""Options of `robustness`."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Callable
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, ClassVar

from ckptx.options.option import EXECUTION, REPORT, Argument, Hook, Option
from ckptx.options.output import ReportOutput
from ckptx.options.recipes import shipped_recipes_text
from ckptx.options.source import LogOptions
from ckptx.options.step import DeviceOptions, GpuMemoryOptions, RecipeOptions
from ckptx.report.documents.robustness import RobustnessReport


def _ignore_report(report: RobustnessReport) -> None:
    """Ignore a partial report."""


_PHASES_HELP = (
    "Run only these phases, e.g. 0-3,6. The phases are 0 initial logits (equal to those of the HF model), "
    "1 uninterrupted run, 2 replicas (copies of a replicated weight are equal, and a "
    "loaded checkpoint gives the same logits), 3 load and save, 4 export, 5 other layouts, 6 resume and "
    "7 killed saves (processes are killed during a save). Training runs that these phases depend on are executed as "
    "well. Not for a recipe with a custom trainer."
)
_RECIPE_HELP = f"A YAML file, or a built-in recipe: {shipped_recipes_text()}."


class RobustnessOptions(LogOptions, GpuMemoryOptions, DeviceOptions, RecipeOptions, kw_only=False):
    """Options of `robustness`."""

    command: ClassVar[str] = "robustness"

    recipe: Annotated[str | Path, Argument(_RECIPE_HELP, "RECIPE", is_optional=True)]
    _: KW_ONLY
    phases: Annotated[str | None, Option(_PHASES_HELP, EXECUTION, metavar="LIST", default="all")] = None
    inject: Annotated[
        str | None,
        Option(
            "Inject a fault to test the checks: exit 1 if a check detects it (the expected result), exit 2 if none "
            "does (or for an invalid option). --inject list prints all faults. Not for a recipe with a custom trainer.",
            EXECUTION,
            metavar="FAULT|list",
            default="not set",
            keywords=("list",),
        ),
    ] = None
    out: Annotated[
        str | Path | None,
        Option(
            "Output directory.",
            EXECUTION,
            metavar="DIR",
            default="temporary, kept on failure",
        ),
    ] = None
    on_phase: Annotated[
        Callable[[RobustnessReport], None],
        Hook("Function that is called with the partial report before the first phase and after each phase."),
    ] = _ignore_report


class RobustnessOutput(ReportOutput):
    """Options for the output of `ckptx robustness`."""

    html: Annotated[
        str | Path | None,
        Option(
            "Write a self-contained HTML page with phases, losses, memory and differences.",
            REPORT,
            metavar="FILE",
            default="not set",
        ),
    ] = None
    junit: Annotated[
        str | Path | None,
        Option(
            "Write JUnit XML for CI, with a test case for each phase and each check.",
            REPORT,
            metavar="FILE",
            default="not set",
        ),
    ] = None
