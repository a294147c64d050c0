"""Test that the checkpoints of a training run can be read back, exported, resharded and resumed; name what was lost."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import cast

from ckptx.options.api import api
from ckptx.options.robustness import RobustnessOptions
from ckptx.report.documents.robustness import RobustnessReport


@api(RobustnessOptions)
def robustness(options: RobustnessOptions) -> RobustnessReport:
    """Train, save, load, export, reshard and resume with a recipe, and compare the states bit for bit.

    Raises:
        UsageError: An option or a recipe key has an invalid value.
        InputError: The recipe, or a file that it names, cannot be read.
        UnsupportedError: The recipe cannot run.
        OutputError: `out` cannot be written.
        SpaceError: The run does not fit into memory, or the output onto the disk.
        EnvironmentProblem: A package is missing, or the device does not exist.
    """
    from ckptx.errors import missing_package

    try:
        run = import_module("ckptx.robustness_suite.run")  # it imports torch
    except ImportError as error:
        raise missing_package("robustness", error) from error
    return cast("RobustnessReport", run.robustness(options))


def known_faults() -> Mapping[str, str]:
    """Return the faults that `inject` accepts, with their descriptions."""
    from ckptx.errors import missing_package

    try:
        faults = import_module("ckptx.robustness_suite.faults").FAULTS
    except ImportError as error:
        raise missing_package("--inject", error) from error
    return {name: str(fault.description) for name, fault in faults.items()}
