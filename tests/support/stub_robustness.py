"""A stub of `robustness_suite.run` that records its calls, and returns or raises what a test sets."""

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
    """Stub that `ckptx.robustness` runs instead of a training.

    Attributes:
        calls: Options of each call.
        result: Result to return, or exception to raise.
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
