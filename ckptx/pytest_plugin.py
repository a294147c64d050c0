"""pytest plugin: `--ckptx-recipe NAME` adds a test for each phase of a robustness run; a fixture runs a recipe.

pytest imports this file in every project, so it imports the rest of ckptx and torch only when the first test of a
recipe runs. All tests of a recipe share one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ckptx.report.documents.robustness import RobustnessReport

# Names of the phases in reports, for collection without torch.
PHASES = (
    "initial logits", "uninterrupted run", "replicas", "load and save", "export", "other layouts", "resume",
    "killed saves",
)  # fmt: skip
# The same for a recipe with a `trainer` block; "sharded" only with `checks.sharded`.
TRAINER_PHASES = ("uninterrupted", "sharded", "rerun", "load and save", "resumed", "altered")
_WHOLE_RUN = "run"  # name of the test of the run as a whole


def phase_names(recipe: str, settings: Sequence[str]) -> tuple[str, ...]:
    """Return the phases of a recipe; none if it cannot be read, which the test of the whole run reports.

    Args:
        recipe: Name or YAML file of the recipe.
        settings: Overrides of its keys, KEY=VALUE.
    """
    from ckptx.errors import CkptxError

    try:
        from ckptx.runtime.training.recipe_file import read_recipe

        found = read_recipe(recipe, settings)
    except (CkptxError, ImportError):
        return ()
    if found.trainer is None:
        return PHASES
    return tuple(each for each in TRAINER_PHASES if each != "sharded" or found.checks.sharded is not None)


def recipe_error(recipe: str, settings: Sequence[str]) -> str:
    """Return the error of a recipe that cannot be read; "" if it can be read, or if a package to read it is missing."""
    from ckptx.errors import CkptxError

    try:
        from ckptx.runtime.training.recipe_file import read_recipe

        read_recipe(recipe, settings)
    except CkptxError as error:
        return f"--ckptx-recipe {recipe}: {error}"
    except ImportError:
        pass  # the test of the whole run names the package
    return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--ckptx-recipe` and `--ckptx-set`."""
    group = parser.getgroup("ckptx", "checkpoint robustness (ckptx)")
    group.addoption(
        "--ckptx-recipe",
        action="append",
        default=[],
        metavar="RECIPE",
        help="Recipe to run as `ckptx robustness` does, with one test per phase (repeatable).",
    )
    group.addoption(
        "--ckptx-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Override a key of the recipes, e.g. layout.tp=2 (repeatable).",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:  # fmt: skip
    """Add the tests of recipes before other plugins deselect tests."""
    for recipe in dict.fromkeys(config.getoption("ckptx_recipe")):
        node = RecipeNode.from_parent(
            session, name=recipe, nodeid=f"ckptx-recipe {recipe}", overrides=config.getoption("ckptx_set")
        )
        tests: list[pytest.Item | pytest.Collector] = list(node.collect())
        error = recipe_error(recipe, config.getoption("ckptx_set"))
        if error:  # `-k` could deselect the only test, which would show it
            raise pytest.UsageError(error)
        items.extend(each for each in tests if isinstance(each, pytest.Item))
        # pytest counts the tests of such a report as collected; if it did not, `-k` would print negative numbers.
        config.hook.pytest_collectreport(report=pytest.CollectReport(node.nodeid, "passed", None, tests))


@pytest.fixture
def checkpoint_robustness(tmp_path: Path) -> Callable[..., RobustnessReport]:
    """Return a function that runs a recipe with the options of `ckptx.robustness`, and returns the report.

        report = checkpoint_robustness("llama_tiny", overrides=["layout.tp=2"])
        assert report.ok

    The function asserts nothing. It writes below `tmp_path`.
    """

    def run(recipe: str | Path, **options: Any) -> RobustnessReport:
        from ckptx.robustness_suite import robustness

        options.setdefault("out", tmp_path / f"robustness-{len(list(tmp_path.iterdir()))}")
        return robustness(recipe, **options)

    return run


class PhaseFailure(Exception):
    """A phase of a recipe failed; the message names the differences."""


class RecipeNode(pytest.Collector):
    """Collector of a recipe: one run, and a test for each phase."""

    def __init__(self, *, overrides: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self._overrides = overrides
        self._report: RobustnessReport | None = None
        self._error: Exception | None = None
        self.phase_names: tuple[str, ...] = ()

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the test of the run as a whole, which fails if there is no report, and the tests of the phases."""
        self.phase_names = phase_names(self.name, self._overrides)
        for name in (_WHOLE_RUN, *self.phase_names):
            item = PhaseItem.from_parent(self, name=name)
            if self.config.pluginmanager.hasplugin("xdist"):  # with `--dist loadgroup` they run in one process
                item.add_marker(pytest.mark.xdist_group(self.nodeid))
            yield item

    def report(self) -> RobustnessReport:
        """Return the report of the recipe, which runs at the first call.

        Raises:
            CkptxError: The run ended without a report.
        """
        if self._error is not None:
            raise self._error
        if self._report is None:
            from ckptx.robustness_suite import robustness

            try:
                self._report = robustness(self.name, overrides=self._overrides)
            except Exception as error:  # raised again for the tests that follow
                self._error = error
                raise
        return self._report


class PhaseItem(pytest.Item):
    """Test of a phase of a recipe, or of the run as a whole."""

    parent: RecipeNode

    def runtest(self) -> None:
        """Run the recipe if no other test has, and check the phase."""
        if self.name == _WHOLE_RUN:
            self._check_whole(self.parent.report())
            return
        try:
            report = self.parent.report()
        except Exception as error:  # the test of the whole run fails with it
            pytest.skip(f"the run ended without a report: {error}")
        phase = next((phase for phase in report.phases if phase["name"] == self.name), None)
        if phase is None:
            pytest.skip("the run did not reach this phase")
        self._check_phase(report, phase)

    def _check_phase(self, report: RobustnessReport, phase: Mapping[str, Any]) -> None:
        self.user_properties.append(("ckptx_seconds", phase["seconds"]))
        if phase["ok"] is None:
            pytest.skip("; ".join(phase["notes"]) or "not run")
        if phase["ok"] is False:
            raise PhaseFailure(self._failure_text(report, phase))

    @staticmethod
    def _failure_text(report: RobustnessReport, phase: Mapping[str, Any]) -> str:
        from ckptx.report.robustness import phase_text
        from ckptx.untrusted.printable import escape_strings

        printable = escape_strings(report)
        return phase_text(printable, printable.phases[list(report.phases).index(dict(phase))])

    def _check_whole(self, report: RobustnessReport) -> None:
        """Raise `PhaseFailure` for a failure that no test of a phase shows."""
        from ckptx.report.robustness_phrases import verdict
        from ckptx.untrusted.printable import one_line

        failures = [
            self._failure_text(report, phase)
            for phase in report.phases
            if phase["name"] not in self.parent.phase_names and phase["ok"] is False
        ]
        if failures:
            raise PhaseFailure("\n".join(failures))
        if not report.ok and all(phase["ok"] is not False for phase in report.phases):
            raise PhaseFailure(one_line(verdict(report)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **options: Any) -> Any:
        """Return the differences or the error of ckptx without a traceback; other exceptions with one."""
        from ckptx.errors import CkptxError

        if isinstance(excinfo.value, PhaseFailure):
            return str(excinfo.value)
        if isinstance(excinfo.value, CkptxError):
            return f"exit {excinfo.value.exit_code}: {excinfo.value}"
        return super().repr_failure(excinfo, *args, **options)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the root folder, no line number, and a title, which pytest prints as the location of the test."""
        return self.config.rootpath, None, f"{self.parent.name}: {self.name}"
