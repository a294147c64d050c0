"""Run the tests of one package for many mutants, each in a forked process.

`record_tests` runs the tests once with coverage. `run_mutants` collects them once and forks for each mutant. Which
tests run for a mutant follows from the lines of its statement:

* The statement runs in tests only: the forked process replaces the code of the functions that exist, which is the same
  as importing the changed file, and runs the tests that execute the statement.
* The statement also runs on import: a process that has imported only installed packages imports the changed file, and
  runs all tests that execute a line of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import coverage
import pytest
from hypothesis import HealthCheck, Phase, settings
from mutant_source import Mutant

# The limit of processor time of a run is EXTRA_SECONDS + TIME_FACTOR x the time that its tests took with coverage; the
# limit of wall-clock time is WALL_FACTOR times that, as the machine may be busy.
EXTRA_SECONDS = 5
TIME_FACTOR = 4
WALL_FACTOR = 10
MEMORY_BYTES = 8 << 30  # limit of the data segment of a process, as a mutant may allocate without end
IMPORT_CONTEXT = ""  # coverage context of lines that run on import
POOL_FIXTURE = "pool"  # fixture of gloo processes, which run the unchanged code
# pytest rewrites the assertions of plugins, too, of which ckptx is one, and would load their unchanged files.
PYTEST_OPTIONS = (
    "--assert=plain",
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-s", "--tb=short", "-m", "not slow"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # hypothesis is imported before pytest starts
    "--assert=plain",  # ckptx is a pytest plugin: pytest would rewrite its asserts and import it without the mutant
)

_PROJECT = os.getcwd()
_CACHED_FUNCTION_TYPE = type(functools.cache(len))
_SET_PARENT_DEATH_SIGNAL = 1  # option of prctl(2)


@dataclass
class Recording:
    """Results of one run of the tests with coverage.

    Attributes:
        contexts: File -> line -> contexts that executed the line: ids of tests, the name of a test file for its
            fixtures, and `IMPORT_CONTEXT` for import and collection.
        seconds: Test id -> duration with coverage.
        modules: Names of modules of installed packages that the tests imported.
    """

    contexts: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    seconds: dict[str, float] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)

    def tests_of(self, mutant: Mutant) -> tuple[set[str], bool]:
        """Return the tests to run for a mutant, and True if its statement runs on import.

        These are the tests that execute its statement; if it runs on import, those of `tests_of_package`.
        """
        lines = self.contexts.get(str(mutant.path), {})
        contexts = set().union(*(lines.get(line, ()) for line in {*mutant.lines, mutant.line}))
        if IMPORT_CONTEXT in contexts:
            return self.tests_of_package(), True
        return self._tests_in(contexts), False

    def tests_of_package(self) -> set[str]:
        """Return the tests that execute any line of the recorded files."""
        return self._tests_in(set().union(*(each for lines in self.contexts.values() for each in lines.values())))

    def _tests_in(self, contexts: set[str]) -> set[str]:
        """Return the tests among some contexts, and all tests of the test files among them."""
        return {test for test in self.seconds if test in contexts or _file_of(test) in contexts}

    def add(self, path: str, lines: dict[int, list[str]]) -> None:
        """Add the contexts of each line of a file."""
        for line, contexts in lines.items():
            self.contexts[path][int(line)].update(contexts)


@dataclass(frozen=True)
class Outcome:
    """Result of the tests for one mutant.

    Attributes:
        result: `killed`, `survived`, `timeout` or `not covered`; `import` for a mutant that has to be run on import.
        tests: Number of tests that were selected; 0 for `not covered` and `import`.
        seconds: Duration of the run; 0 for `not covered` and `import`.
    """

    result: str
    tests: int
    seconds: float


def record_tests(folders: Sequence[str], files: Iterable[Path]) -> Recording:
    """Run the tests of folders with coverage.

    Args:
        folders: Directories of tests.
        files: Source files whose lines are recorded.

    Raises:
        RuntimeError: A test fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if _run_in_fork(lambda: _run_pytest(folders, directory / "tests", _Recorder(directory, list(files))), None):
            raise RuntimeError("tests fail without a mutant; run them with pytest first")
        recording = Recording(**json.loads((directory / "session.json").read_text()))
        recording.contexts = defaultdict(lambda: defaultdict(set))
        for context_file in directory.glob("*.contexts"):
            for path, lines in json.loads(context_file.read_text()).items():
                recording.add(path, lines)
    return recording


def run_mutants(
    folders: Sequence[str], mutants: Sequence[Mutant], recording: Recording
) -> Iterator[tuple[Mutant, Outcome]]:
    """Run the tests for each mutant, print its outcome, and yield both.

    Raises:
        RuntimeError: Tests fail without a mutant.
    """
    import_mutants, test_mutants = [], []
    for mutant in mutants:
        tests, runs_on_import = recording.tests_of(mutant)
        if not tests:
            yield mutant, _print_outcome(mutant, Outcome("not covered", 0, 0.0))
        else:
            (import_mutants if runs_on_import else test_mutants).append(mutant)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        forker = _MutantForker(recording, test_mutants, directory / "results")
        if _run_in_fork(lambda: _run_pytest(folders, directory / "tests", forker), None):
            raise RuntimeError("tests fail without a mutant in the order of this tool")
        for line in (directory / "results").read_text().splitlines():
            index, *outcome = json.loads(line)
            if outcome[0] == "import":
                import_mutants.append(test_mutants[index])
            else:
                yield test_mutants[index], Outcome(*outcome)
        _import_quietly(recording.modules)
        for mutant in import_mutants:
            selection = _TestSelection(recording.tests_of_package(), recording)
            start = time.monotonic()
            run = functools.partial(_run_with_changed_file, mutant, folders, directory / "tests", selection)
            status = _run_in_fork(run, selection.time_limit())
            outcome = Outcome(_result_of_status(status), len(selection.tests), time.monotonic() - start)
            yield mutant, _print_outcome(mutant, outcome)


class _Plugin:
    """Settings of every session: no gloo processes, and the same examples of hypothesis in each run."""

    def pytest_configure(self) -> None:
        settings.register_profile(
            "mutants",
            database=None,
            deadline=None,
            derandomize=True,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=tuple(HealthCheck),
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if POOL_FIXTURE not in getattr(item, "fixturenames", ())]


class _Recorder(_Plugin):
    """Record which tests execute each line, in forked processes, too.

    Args:
        directory: Directory for the results: `session.json`, and PID.contexts of each process.
        files: Source files whose lines are recorded.
    """

    def __init__(self, directory: Path, files: list[Path]) -> None:
        self.directory = directory
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=[str(file) for file in files])
        self.recording = Recording()
        self.cached_functions: list[Any] = []
        self.process_id = os.getpid()

    def pytest_configure(self) -> None:
        super().pytest_configure()
        self.process_id = os.getpid()
        self.coverage.start()
        exit_now = os._exit

        def save_and_exit(status: int) -> None:
            if os.getpid() != self.process_id:
                self._save()
            exit_now(status)

        os._exit = save_and_exit  # type: ignore[assignment]  # how a forked process ends

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        cached = {id(value): value for value in gc.get_objects() if type(value) is _CACHED_FUNCTION_TYPE}
        self.cached_functions = [value for value in cached.values() if not _is_installed(value.__module__)]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for (
            cached_function
        ) in self.cached_functions:  # otherwise only the first test would execute the lines of a cached function
            cached_function.cache_clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(_file_of(item.nodeid))
        start = time.monotonic()
        result = yield
        self.recording.seconds[item.nodeid] = time.monotonic() - start
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.coverage.switch_context(item.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._save()
        modules = [name for name in sys.modules if _is_installed(name)]
        session = {"seconds": self.recording.seconds, "modules": modules}
        (self.directory / "session.json").write_text(json.dumps(session))

    def _save(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {os.path.relpath(path): data.contexts_by_lineno(path) for path in data.measured_files()}
        (self.directory / f"{os.getpid()}.contexts").write_text(json.dumps(lines))


class _TestSelection(_Plugin):
    """Run some of the collected tests and stop at the first failure."""

    def __init__(self, tests: set[str], recording: Recording) -> None:
        self.tests = tests
        self.recording = recording

    def time_limit(self) -> float:
        """Return the processor time that the tests may take, in seconds."""
        files = {_file_of(test) for test in self.tests}
        # the first test of a file also sets up the fixtures of the file
        first_seconds = {_file_of(test): seconds for test, seconds in reversed(self.recording.seconds.items())}
        times = sum(self.recording.seconds[test] for test in self.tests) + sum(first_seconds[file] for file in files)
        return EXTRA_SECONDS + TIME_FACTOR * times

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.run(session)
        return True

    def run(self, session: pytest.Session) -> None:
        """Run the tests, those of the fastest file first."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for test in self.tests:
            seconds[_file_of(test)] += self.recording.seconds[test]
        items = [item for item in session.items if item.nodeid in self.tests]
        items.sort(key=lambda item: seconds[_file_of(item.nodeid)])
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return


class _MutantForker(_Plugin):
    """Fork for each mutant after the tests were collected, and write the outcomes as lines of JSON."""

    def __init__(self, recording: Recording, mutants: Sequence[Mutant], results: Path) -> None:
        self.recording = recording
        self.mutants = mutants
        self.results = results
        self.functions: dict[types.CodeType, list[types.FunctionType]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        """Find the functions of the files with mutants, before a conftest freezes the garbage collector."""
        paths = {os.path.abspath(mutant.path) for mutant in self.mutants}
        for value in gc.get_objects():
            if type(value) is types.FunctionType and value.__code__.co_filename in paths:
                self.functions[value.__code__].append(value)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        all_tests = _TestSelection(self.recording.tests_of_package(), self.recording)
        if _run_in_fork(lambda: self._run(session, all_tests, {}), None):
            session.testsfailed += 1
            return True
        print(flush=True)  # ends the line of pytest's dots
        with self.results.open("w") as results:
            for index, mutant in enumerate(self.mutants):
                outcome = self._test_mutant(session, mutant)
                print(json.dumps([index, *astuple(outcome)]), file=results, flush=True)
        return True

    def _test_mutant(self, session: pytest.Session, mutant: Mutant) -> Outcome:
        changed = _find_changed_code(mutant)
        if changed is None or not any(old in self.functions for old in changed):
            return Outcome("import", 0, 0.0)
        selection = _TestSelection(self.recording.tests_of(mutant)[0], self.recording)
        start = time.monotonic()
        status = _run_in_fork(lambda: self._run(session, selection, changed), selection.time_limit())
        return _print_outcome(
            mutant, Outcome(_result_of_status(status), len(selection.tests), time.monotonic() - start)
        )

    def _run(
        self, session: pytest.Session, selection: _TestSelection, changed: dict[types.CodeType, types.CodeType]
    ) -> int:
        """Replace the code of functions, run the tests, and return the number of tests that failed."""
        for old, new in changed.items():
            for function in self.functions.get(old, ()):
                function.__code__ = new
        selection.run(session)
        return session.testsfailed


def _find_changed_code(mutant: Mutant) -> dict[types.CodeType, types.CodeType] | None:
    """Return old code -> new code of each function that changes; None if the file then defines other functions."""
    path = os.path.abspath(mutant.path)
    pairs = [tuple(compile(text, path, "exec", dont_inherit=True) for text in (mutant.module.code, mutant.source))]
    changed = {}
    while pairs:
        old, new = pairs.pop()
        inner = [[part for part in code.co_consts if isinstance(part, types.CodeType)] for code in (old, new)]
        names = [[part.co_name for part in parts] for parts in inner]
        if names[0] != names[1] or old.co_freevars != new.co_freevars:
            return None
        pairs += zip(*inner, strict=True)
        if old != new:
            changed[old] = new
    return changed


def _run_with_changed_file(mutant: Mutant, folders: Sequence[str], directory: Path, plugin: _Plugin) -> int:
    """Run pytest with one file changed on import; return its exit status."""
    path = os.path.abspath(mutant.path)
    code = compile(mutant.source, path, "exec", dont_inherit=True)
    unchanged = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> types.CodeType | None:
        return code if os.path.abspath(loader.path) == path else unchanged(loader, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]  # in this forked process only
    return _run_pytest(folders, directory, plugin)


def _run_pytest(folders: Sequence[str], directory: Path, plugin: _Plugin) -> int:
    """Run the tests of folders with a directory for temporary files; return the exit status of pytest."""
    options = [*PYTEST_OPTIONS, f"--basetemp={directory}", *folders]
    return int(pytest.main(options, plugins=[plugin]))


def _run_in_fork(function: Callable[[], int], limit: float | None) -> int:
    """Call a function in a forked process and return its exit status.

    Args:
        function: Returns 0 for success.
        limit: Processor time in seconds; a process that takes more is killed, and its output is dropped. None for no
            limit.

    Returns:
        0 for success, 1 for failure or an exception, or minus the number of the signal that ended the process.
    """
    process_id = os.fork()
    if process_id == 0:
        status = 1
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if limit is not None:
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + limit) + 1,) * 2)
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            status = min(function(), 1)
        except BaseException:  # pytest's own exit, too: this process ends here
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = None if limit is None else time.monotonic() + WALL_FACTOR * limit
    try:
        return _wait(process_id, deadline)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process_id, signal.SIGKILL)  # processes that it started


def _wait(process_id: int, deadline: float | None) -> int:
    """Wait for a process and return its exit status; from the deadline on, signal it every second."""
    while True:
        ended_id, status = os.waitpid(process_id, 0 if deadline is None else os.WNOHANG)
        if ended_id:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() > deadline:
            os.kill(process_id, signal.SIGXCPU)
            deadline += 1.0
        time.sleep(0.01)


def _print_outcome(mutant: Mutant, outcome: Outcome) -> Outcome:
    """Print the outcome of one mutant and return it."""
    print(f"{outcome.result:<12} {outcome.seconds:6.1f} s  {mutant.path}:{mutant.line} {mutant.operator}", flush=True)
    return outcome


def _result_of_status(status: int) -> str:
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    return "killed" if status else "survived"


def _import_quietly(modules: Iterable[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _file_of(test: str) -> str:
    """Return the file in the id of a test."""
    return test.partition("::")[0]


def _is_installed(module: str) -> bool:
    """Return True if an imported module is installed or built in, and False if it is a part of this project."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if not isinstance(spec, ModuleSpec):
        return True
    paths = [str(path) for path in (spec.origin, *(spec.submodule_search_locations or ())) if path]
    return not any(path.startswith(f"{_PROJECT}{os.sep}") and "site-packages" not in path for path in paths)
