"""The three standard streams: made safe to use whatever the caller left of them, and what is written to them."""

from __future__ import annotations

import io
import os
import sys

import click

from ckptx.errors import OutputError, UsageError
from ckptx.untrusted.printable import one_line


def settle_streams() -> None:
    """Opens the standard streams that are closed, and lets every name be printed in any locale.

    With a closed stdout (`ckptx ... >&-`) the first file that is opened would get descriptor 1, and a summary would be
    written into it: into the weights. What goes to a closed stream goes nowhere. A name that the encoding of a stream
    lacks is printed with escapes.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
    if sys.stdin is None:
        sys.stdin = _text(0, "r")
    if sys.stdout is None:
        sys.stdout = _text(1, "w")
    if sys.stderr is None:
        sys.stderr = _text(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _text(descriptor: int, mode: str) -> io.TextIOWrapper:
    binary = io.FileIO(descriptor, mode, closefd=False)
    return io.TextIOWrapper(io.BufferedReader(binary) if mode == "r" else io.BufferedWriter(binary), encoding="utf-8")


def print_result(text: str) -> int:
    """Write a result to stdout and return the exit code; a reader that has gone is no failure."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries once more at the end
        say_error(f"stdout: cannot be written: {error.strerror}")
        return OutputError.exit_code
    return 0


def say_error(message: str, *, as_json: bool = False, exit_code: int = UsageError.exit_code) -> None:
    """Print one line to stderr.

    Args:
        message: The error.
        as_json: Print a report to stdout, too, for an error in the call itself: its caller waits for one.
        exit_code: Exit code that the report gives.
    """
    if as_json:
        from ckptx.report.report import Report, Stopwatch  # takes longer to import than most errors take to be found

        report = Report(command="usage", exit=exit_code, error=message)
        print_result(Stopwatch().stop(report).to_json())
    context = click.get_current_context(silent=True)
    settings = context.find_root().ensure_object(dict) if context is not None else {}
    plain = bool(settings.get("no_color") or os.environ.get("NO_COLOR"))
    label = "error:" if plain or not sys.stderr.isatty() else click.style("error:", fg="red", bold=True)
    click.echo(f"{label} {one_line(message)}", err=True, color=False if plain else None)
