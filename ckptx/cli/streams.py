"""Standard streams: open those that the caller closed, and print results and errors."""

from __future__ import annotations

import errno
import io
import os
import sys

import click

from ckptx.errors import OutputError, SpaceError, UsageError
from ckptx.untrusted.printable import one_line


def prepare_streams() -> None:
    """Open the standard streams that are closed, and escape characters that the locale cannot encode.

    With a closed stdout (`ckptx ... >&-`) the first file to be opened would get descriptor 1, and the summary would be
    written to that file, which may contain weights. Output to a closed stream is discarded.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    if sys.stdin is None:
        sys.stdin = _open_text_stream(0, "r")
    if sys.stdout is None:
        sys.stdout = _open_text_stream(1, "w")
    if sys.stderr is None:
        sys.stderr = _open_text_stream(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _open_text_stream(descriptor: int, mode: str) -> io.TextIOWrapper:
    binary = io.FileIO(descriptor, mode, closefd=False)
    return io.TextIOWrapper(io.BufferedReader(binary) if mode == "r" else io.BufferedWriter(binary), encoding="utf-8")


def print_result(text: str) -> int:
    """Write a result to stdout.

    Returns:
        0, also if the reader has closed the pipe; the exit code of the error, which is printed, for other failures.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python would flush stdout again at exit
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            print_error(f"stdout: cannot be written: {error.strerror}; free some space and run again")
            return SpaceError.exit_code
        print_error(f"stdout: cannot be written: {error.strerror}")
        return OutputError.exit_code
    return 0


def print_error(message: str, *, as_json: bool = False, exit_code: int = UsageError.exit_code) -> None:
    """Print one line to stderr.

    Args:
        message: Error message.
        as_json: True also prints a JSON report to stdout, for an error in the arguments of the command.
        exit_code: Exit code in the report.
    """
    if as_json:
        from ckptx.report.report import Report, Stopwatch  # slow to import

        report = Report(command="usage", exit=exit_code, error=message)
        print_result(Stopwatch().stop(report).to_json())
    context = click.get_current_context(silent=True)
    settings = context.find_root().ensure_object(dict) if context is not None else {}
    is_plain = bool(settings.get("no_color") or os.environ.get("NO_COLOR"))
    label = "error:" if is_plain or not sys.stderr.isatty() else click.style("error:", fg="red", bold=True)
    click.echo(f"{label} {one_line(message)}", err=True, color=False if is_plain else None)
