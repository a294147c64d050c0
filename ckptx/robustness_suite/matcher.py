"""Match a regular expression of a recipe against the lines of a text, for at most some seconds; `losses` starts this.

An expression may need longer than the universe exists for a line that it does not match ("catastrophic backtracking").
Python's engine cannot be stopped from another thread, but it looks for signals: a process of its own can have an alarm.

    stdin     JSON: pattern, lines, seconds
    stdout    JSON: found, a list of [number of the line, step, loss]; or late, the line it had come to

It imports the standard library alone: it starts in a few milliseconds, without ckptx.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any


class _Timeout(Exception):
    """The time is over."""


def _alarm(*_: object) -> None:
    raise _Timeout


def _match_lines(pattern: str, lines: list[str], seconds: float) -> dict[str, Any]:
    line_number, matches = 0, []
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        expression = re.compile(pattern)
        for line_number, line in enumerate(lines, start=1):
            matches += [(line_number, each["step"], each["loss"]) for each in expression.finditer(line)]
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _Timeout:
        return {"late": line_number}
    return {"found": matches}


if __name__ == "__main__":
    order = json.load(sys.stdin)
    json.dump(_match_lines(order["pattern"], order["lines"], order["seconds"]), sys.stdout)
