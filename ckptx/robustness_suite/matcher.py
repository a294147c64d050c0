"""Match a regular expression of a recipe against lines, with a time limit; `losses` starts this file as a script.

An expression can take practically forever on a line that it does not match (catastrophic backtracking). Another thread
cannot interrupt Python's engine, but the engine checks for signals, so a separate process with an alarm is used.

    stdin     JSON: pattern, lines, seconds
    stdout    JSON: matches, a list of [line number, step, loss]; or timeout_line, the number of the line at which
              the time ran out

This file imports only the standard library, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any


class _Timeout(Exception):
    """The time limit is exceeded."""


def _raise_timeout(*_: object) -> None:
    raise _Timeout


def _match_lines(pattern: str, lines: list[str], seconds: float) -> dict[str, Any]:
    line_number, matches = 0, []
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        expression = re.compile(pattern)
        for line_number, line in enumerate(lines, start=1):
            matches += [(line_number, each["step"], each["loss"]) for each in expression.finditer(line)]
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _Timeout:
        return {"timeout_line": line_number}
    return {"matches": matches}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    json.dump(_match_lines(request["pattern"], request["lines"], request["seconds"]), sys.stdout)
