"""A stand-in for `robustness_suite.run`: notes what it was called with, and reports or raises what a test says."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ckptx.options.robustness import RobustnessOptions

FAULTS = {
    "nan": SimpleNamespace(description="a row is NaN"),
    "stale_rng": SimpleNamespace(description="an older state"),
}


class StubRun:
    """What `ckptx.robustness` runs in place of a training.

    Attributes:
        calls: The options of each call.
        result: What it reports; an exception is raised.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
        self.calls: list[RobustnessOptions] = []
        self.result = result
        run: Any = ModuleType("ckptx.robustness_suite.run")
        run.robustness = self._robustness
        faults: Any = ModuleType("ckptx.robustness_suite.faults")
        faults.FAULTS = FAULTS
        monkeypatch.setitem(sys.modules, run.__name__, run)
        monkeypatch.setitem(sys.modules, faults.__name__, faults)

    def _robustness(self, options: RobustnessOptions) -> Any:
        self.calls.append(options)
        if options.log is not None:
            options.log.note("a note")
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result
