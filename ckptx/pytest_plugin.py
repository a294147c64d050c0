"""`pytest --ckptx-recipe NAME`: a test for each phase of a robustness run; and a fixture that runs a recipe.

pytest imports this file at every start, in projects that never ask for it, too. So it imports the rest of
ckptx, and torch, only when the first test of a recipe runs. All tests of a recipe share that one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ckptx.report.documents.robustness import RobustnessReport

# What phases there are is known before any is run, and without torch.
PHASES = (
    "source parity", "straight run", "replicas", "save again", "export", "other layouts", "resume", "kills",
)  # fmt: skip
_WHOLE = "run"  # the test of what is no phase's own


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--ckptx-recipe` and `--ckptx-set`."""
    group = parser.getgroup("ckptx", "robustness of checkpoints")
    group.addoption(
        "--ckptx-recipe",
        action="append",
        default=[],
        metavar="RECIPE",
        help="run this recipe as `ckptx robustness` does, a test for each phase; may be given several times",
    )
    group.addoption(
        "--ckptx-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another value for a key of these recipes; may be given several times",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:  # fmt: skip
    """Adds the tests of recipes before others select among all."""
    for recipe in dict.fromkeys(config.getoption("ckptx_recipe")):
        node = RecipeNode.from_parent(
            session, name=recipe, nodeid=f"ckptx-recipe {recipe}", settings=config.getoption("ckptx_set")
        )
        items.extend(node.collect())


@pytest.fixture
def checkpoint_robustness(tmp_path: Path) -> Callable[..., RobustnessReport]:
    """Runs a recipe: `checkpoint_robustness("llama_tiny", settings=["layout.tp=2"])`, with the options of the command.

    It asserts nothing: `report.ok` is for the test to look at. What is written goes below `tmp_path`.
    """

    def run(recipe: str | Path, **options: Any) -> RobustnessReport:
        from ckptx.robustness_suite import robustness

        options.setdefault("out", tmp_path / f"robustness-{len(list(tmp_path.iterdir()))}")
        return robustness(recipe, **options)

    return run


class PhaseFailure(Exception):
    """A phase of a recipe failed; the text names what differs."""


class RecipeNode(pytest.Collector):
    """A recipe: its one run, and a test for each phase of it."""

    def __init__(self, *, settings: Sequence[str], **made: Any) -> None:
        super().__init__(**made)
        self._settings = settings
        self._report: RobustnessReport | None = None
        self._error: Exception | None = None

    def collect(self) -> Iterator[pytest.Item]:
        """The test of the run as a whole, which also says why there is none, and those of its phases."""
        for name in (_WHOLE, *PHASES):
            item = PhaseItem.from_parent(self, name=name)
            if self.config.pluginmanager.hasplugin("xdist"):  # `--dist loadgroup` keeps them in one process
                item.add_marker(pytest.mark.xdist_group(self.nodeid))
            yield item

    def report(self) -> RobustnessReport:
        """What the run found; it runs when this is first called.

        Raises:
            CkptxError: It could not be judged.
        """
        if self._error is not None:
            raise self._error
        if self._report is None:
            from ckptx.robustness_suite import robustness

            try:
                self._report = robustness(self.name, settings=self._settings)
            except Exception as error:  # kept for the tests that come after
                self._error = error
                raise
        return self._report


class PhaseItem(pytest.Item):
    """A phase of a recipe; or all that is no known phase's own."""

    parent: RecipeNode

    def runtest(self) -> None:
        """Runs the recipe, if no other test of it has, and looks at the phase."""
        if self.name == _WHOLE:
            self._look_at_the_whole(self.parent.report())
            return
        try:
            report = self.parent.report()
        except Exception as error:  # said by the test of the whole
            pytest.skip(f"the run was not judged: {error}")
        phase = next((phase for phase in report.phases if phase["name"] == self.name), None)
        if phase is None:
            pytest.skip("the recipe has no such phase, or was not asked for it")
        self._look_at(report, phase)

    def _look_at(self, report: RobustnessReport, phase: Mapping[str, Any]) -> None:
        from ckptx.report.robustness import phase_text
        from ckptx.untrusted.printable import shown

        self.user_properties.append(("ckptx_seconds", phase["seconds"]))
        if phase["ok"] is None:
            pytest.skip("; ".join(phase["notes"]) or "not run")
        if phase["ok"] is False:
            said = shown(report)
            raise PhaseFailure(phase_text(said, said.phases[list(report.phases).index(dict(phase))]))

    def _look_at_the_whole(self, report: RobustnessReport) -> None:
        from ckptx.report.robustness_words import verdict
        from ckptx.untrusted.printable import one_line

        for phase in report.phases:
            if phase["name"] not in PHASES and phase["ok"] is not None:
                self._look_at(report, phase)
        if not report.ok and all(phase["ok"] is not False for phase in report.phases):
            raise PhaseFailure(one_line(verdict(report)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **options: Any) -> Any:
        """What differs, without a traceback through ckptx; one for what is no refusal of its own."""
        from ckptx.errors import CkptxError

        if isinstance(excinfo.value, PhaseFailure):
            return str(excinfo.value)
        if isinstance(excinfo.value, CkptxError):
            return f"exit {excinfo.value.exit_code}: {excinfo.value}"
        return super().repr_failure(excinfo, *args, **options)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where it stands in pytest's listings."""
        return self.config.rootpath, None, f"{self.parent.name}: {self.name}"
