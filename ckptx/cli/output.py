"""Output of a command: results go to stdout, notes, progress and errors to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ckptx.cli import signals
from ckptx.cli.streams import print_error, print_result
from ckptx.errors import (
    CkptxError,
    EnvironmentProblem,
    OutputError,
    PeerFailure,
    ReportTargetError,
    SpaceError,
    Terminated,
    UnsupportedError,
    exit_code_of,
    find_environment_problem,
)
from ckptx.options.output import JsonOutput, ReportOutput
from ckptx.processes.rendezvous import is_first_rank
from ckptx.publishing.report_file import check_report_path, write_text
from ckptx.report.number_formats import NOT_ENOUGH_SPACE
from ckptx.report.report import Log, Report, Stopwatch, human_bytes
from ckptx.storage.staging_paths import staging_paths
from ckptx.untrusted.printable import escape_lines, escape_strings, one_line

_SECONDS_BETWEEN_PROGRESS_LINES = 10.0
_BAR_FORMAT = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
_STEP_FORMAT = "{desc} [{elapsed}]"
R = TypeVar("R", bound=Report)


class Output:
    """Output of one run, controlled by the global options and the environment.

    Attributes:
        quiet: True to print errors and verdicts only: with `--quiet`, and on every rank but the first, which prints no
            verdict either.
        as_json: True to print the report as JSON instead of text.
        report_file: Path of the JSON report; None to write none.
    """

    def __init__(
        self,
        output: JsonOutput | None = None,
        pages: Mapping[str, Callable[[Report], str]] | None = None,
        *,
        is_quiet: bool = False,
    ) -> None:
        """Read the global options of the click context and the environment.

        Args:
            output: Options of the output; None for a command without them.
            pages: Other files to write with the report: path -> function that makes the content from the report.
            is_quiet: True prints errors only, as `--quiet` does.
        """
        context = click.get_current_context(silent=True)
        settings: dict[str, Any] = context.find_root().ensure_object(dict) if context is not None else {}
        self._is_first_rank = is_first_rank()
        self.quiet = is_quiet or bool(settings.get("quiet")) or not self._is_first_rank
        self.as_json = output is not None and output.as_json
        self.report_file = (
            str(output.report_file) if isinstance(output, ReportOutput) and output.report_file is not None else None
        )
        self._page_makers = dict(pages or {})
        self._is_colorless = bool(settings.get("no_color") or os.environ.get("NO_COLOR"))
        self._is_verbose = bool(settings.get("verbose"))
        hides_progress = os.environ.get("CI") or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == "1"
        self._shows_progress = not (self.quiet or self.as_json or hides_progress)
        self._bar: Any = None
        self._bar_start = 0.0
        self._last_line_time = time.monotonic()

    def run(
        self,
        command: str,
        make_report: Callable[[Log], R],
        format_report: Callable[[R], str],
        format_verdict: Callable[[R], str] | None = None,
        *,
        target: object = None,
    ) -> int:
        """Run a command, and print and write its report, even on failure.

        Args:
            command: Name of the command in the report.
            make_report: Function that runs the command; it adds notes to the log and returns the report.
            format_report: Function that formats the report for a terminal.
            format_verdict: Function that formats the report as one line for --quiet. If None, --quiet prints what
                `format_report` returns, and only if the exit code is not 0.
            target: Path of the checkpoint that the command writes, for the message of an interrupted run.

        Returns:
            The exit code.
        """
        stopwatch, log, message = Stopwatch(), Log(self._show_step), ""
        advice_on_interruption = partial(_advise_on_interruption, target if _makes_checkpoint(command) else None)
        signals.set_advice(advice_on_interruption)
        exception: BaseException | None = None
        report: R | None = None
        try:
            # Ranks of one run check the paths after the rendezvous, so that all of them fail.
            for path in self._report_paths() if os.environ.get("WORLD_SIZE", "1") == "1" else ():
                check_report_path(path)
            if any(name.startswith("CKPTX_") for name in os.environ):
                from ckptx.options.defaults import unknown_variables

                log.note(*(each.note() for each in unknown_variables()))
            with self._step_log():
                report = make_report(log)
        except CkptxError as error:
            exception, message = error, str(error)
            self._print_trace_if_verbose(error)
        except MemoryError as error:
            advice = "reduce --max-memory" if _makes_checkpoint(command) else "use a machine with more memory"
            exception, message = error, f"out of memory; {advice}"
            self._print_trace_if_verbose(error)
        except (KeyboardInterrupt, Terminated) as error:
            exception, message = error, f"interrupted{advice_on_interruption()}"
        except Exception as error:  # a defect in ckptx, which is never reported as a difference
            exception = find_environment_problem(error) or error
            internal = f"internal error: {type(error).__name__}: {error}; please report it"
            message = internal if exception is error else str(exception)
            self._print_trace_if_verbose(error)
        self._close_bar()
        if report is not None:
            code = self._deliver(stopwatch.stop(report), format_report, format_verdict)
        else:
            assert exception is not None
            code = self._fail(stopwatch, Report(command=command, notes=log.notes), message, exception)
        if isinstance(exception, KeyboardInterrupt | Terminated) and os.environ.get("CKPTX_DEBUG") == "1":
            _print_traceback(exception)
        return code

    def _deliver(self, report: R, format_report: Callable[[R], str], format_verdict: Callable[[R], str] | None) -> int:
        """Write and print a report; return the exit code."""
        code = self._write(report) or report.exit
        if self.as_json:
            return code
        if not self.quiet:
            for note in report.notes:
                click.echo(f"note: {one_line(note)}", err=True)
        formatter = format_verdict if self.quiet and format_verdict is not None else format_report
        # The note of a dry run whose output does not fit on the disk: with --quiet it is printed as the error.
        space_note = next((each for each in report.notes if each.startswith(NOT_ENOUGH_SPACE)), None)
        if self.quiet and code == SpaceError.exit_code and space_note is not None:
            if self._is_first_rank:
                print_error(space_note)
        elif self._is_first_rank and (not self.quiet or code or formatter is format_verdict):
            code = print_result(formatter(escape_strings(report)) + "\n") or code
        return code

    def _fail(self, stopwatch: Stopwatch, report: Report, message: str, exception: BaseException) -> int:
        """Write a report of the failure and print the error; return the exit code."""
        code = EnvironmentProblem.exit_code if isinstance(exception, MemoryError) else exit_code_of(exception)
        if isinstance(exception, ReportTargetError):
            self.report_file = None
        code = self._write(stopwatch.stop(replace(report, exit=code, error=message))) or code
        if self._is_first_rank or not (isinstance(exception, PeerFailure) and exception.is_reported):
            print_error(message)
        return code

    def red(self, text: str) -> str:
        """Return a string in red if stdout is a terminal and colors are allowed."""
        return text if self._is_colorless or not sys.stdout.isatty() else click.style(text, fg="red", bold=True)

    def print_partial(self, report: R, format_report: Callable[[R], str]) -> bool:
        """Print a part of a report that is not complete yet.

        Returns:
            True if it was printed; False with --quiet or --json, which print nothing.
        """
        if self.quiet or self.as_json:
            return False
        print_result(format_report(escape_strings(report)) + "\n")
        return True

    def _report_paths(self) -> list[str]:
        """Return the paths of the JSON report and of the other files."""
        return [*([] if self.report_file is None else [self.report_file]), *self._page_makers]

    def _write(self, report: Report) -> int:
        """Write the report and the other files; return 0, or the exit code of a failure."""
        code = 0
        for path in self._report_paths() if self._is_first_rank else ():
            try:
                if path in self._page_makers:
                    write_text(path, self._page_makers[path](report))
                else:
                    report.write(path)
            except (OutputError, SpaceError, UnsupportedError) as error:
                if str(error) != report.error:  # `_fail` prints the error of the report
                    print_error(f"{error}; the report was not written")
                report = replace(report, exit=report.exit or error.exit_code)
                code = report.exit
        if self.as_json and self._is_first_rank:
            code = print_result(report.to_json()) or code
        return code

    def _print_trace_if_verbose(self, error: BaseException) -> None:
        """Print the traceback of an error with `--verbose` or `CKPTX_DEBUG=1`."""
        if self._is_verbose or os.environ.get("CKPTX_DEBUG") == "1":
            _print_traceback(error)

    def _step_log(self) -> AbstractContextManager[None]:
        """Return a context that prints log records to stderr with `--verbose`; one without effect otherwise."""
        if not self._is_verbose:
            return nullcontext()
        from ckptx.cli.steps import log_steps

        return log_steps()

    def progress(self, done: int, total: int) -> None:
        """Show the progress: a bar on a terminal, elsewhere a line every ten seconds.

        Args:
            done: Bytes of tensor data processed so far.
            total: Bytes of tensor data to process.
        """
        if not self._shows_progress:
            return
        if not sys.stderr.isatty():
            if time.monotonic() - self._last_line_time >= _SECONDS_BETWEEN_PROGRESS_LINES:
                self._last_line_time = time.monotonic()
                click.echo(f"{human_bytes(done)} of {human_bytes(total)}", err=True)
            return
        if self._bar is None or self._bar.total is None:
            self._open_bar(total, _BAR_FORMAT)
        seconds = time.monotonic() - self._bar_start
        speed = f", {human_bytes(done / seconds)}/s" if seconds > 0 else ""
        self._bar.set_description_str(f"{human_bytes(done)} of {human_bytes(total)}{speed}", refresh=False)
        self._bar.update(done - self._bar.n)

    def _show_step(self, text: str) -> None:
        """Show on a terminal what runs now, and for how long the command has been running."""
        if not self._shows_progress or self._is_verbose or not sys.stderr.isatty():
            return
        if self._bar is None or self._bar.total is not None:
            self._open_bar(None, _STEP_FORMAT)
        self._bar.set_description_str(one_line(text))  # draws the bar

    def _open_bar(self, total: int | None, bar_format: str) -> None:
        from tqdm.auto import tqdm  # in a notebook it shows a widget

        self._close_bar()
        self._bar = tqdm(total=total, bar_format=bar_format, leave=False, file=sys.stderr)
        self._bar_start = time.monotonic()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _makes_checkpoint(command: str) -> bool:
    """Return True if a command writes a checkpoint."""
    from ckptx.options.commands import commands_by_name

    return commands_by_name()[command].writes_checkpoint


def _advise_on_interruption(target: object) -> str:
    """Return the end of the message of an interrupted run; `target` is the checkpoint that it was to write, or None."""
    if target is None:
        return ""
    directory = staging_paths(Path(str(target)))[0].parent
    given = Path(str(target)).parent / directory.name
    if os.path.lexists(given):
        directory = given  # as short as the path that the user passed
    removal = f", or remove {one_line(str(directory))}" if os.path.lexists(directory) else ""
    return f"; no output was created; run again with --resume to continue{removal}"


def _print_traceback(error: BaseException) -> None:
    """Print the traceback of an error to stderr."""
    import traceback  # takes longer to import than most commands take to start
    from textwrap import indent

    click.echo(indent(escape_lines("".join(traceback.format_exception(error))), "| "), err=True)
