"""Log lines of a command on stderr, for `--verbose`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptx.untrusted.printable import one_line


class _OneLineFormatter(logging.Formatter):
    """Formatter that prints a record as one line, with seconds since the start, under torchrun with the rank."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()  # the time of a record is that of a clock that may be set back

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK")
        lead = "" if rank is None else f"rank {rank} "
        message = one_line(record.getMessage(), 0)
        return f"{lead}{time.monotonic() - self._started:8.3f} s  {record.name.removeprefix('ckptx.')}: {message}"


@contextmanager
def log_steps() -> Iterator[None]:
    """Print the log records of ckptx to stderr within the context."""
    logger, handler = logging.getLogger("ckptx"), logging.StreamHandler(sys.stderr)
    previous = logger.level, logger.propagate
    handler.setFormatter(_OneLineFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous[0])
        logger.propagate = previous[1]
