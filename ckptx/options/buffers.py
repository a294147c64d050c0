"""Mixin for commands that copy or compare bytes: threads and memory. Also the spellings of dtypes."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from collections.abc import Callable
from typing import Annotated, Literal

from ckptx.options.option import EXECUTION, Hook, Option, Options
from ckptx.options.sizes import default_workers, parse_size
from ckptx.untrusted.limits import MAX_WORKERS

Progress = Callable[[int, int], None]  # called with the number of bytes done and the total
Dtype = Literal["auto", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"]
# Other spelling of a choice -> choice, see `Option.spellings`.
DTYPE_SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def no_progress(done: int, total: int) -> None:
    """Ignore the progress."""


class BufferOptions(Options):
    """Options for threads and memory."""

    workers: Annotated[
        int | None,
        Option(
            "Number of threads; does not affect the result.",
            EXECUTION,
            minimum=1,
            maximum=MAX_WORKERS,
            default="number of cores, at most 16",
            replaces=("num_workers", "num_proc", "threads", "jobs"),
        ),
    ] = None
    max_memory: Annotated[
        int | str,
        Option(
            "Memory limit of the buffers, of all threads together, for tensors that were saved non-contiguous, such as "
            "transposed views. It does not limit other memory of the process.",
            EXECUTION,
            parse=parse_size,
        ),
    ] = "256MB"
    on_progress: Annotated[Progress, Hook("Function that is called with the number of bytes done and the total.")] = (
        no_progress
    )

    @property
    def threads(self) -> int:
        """Return the number of threads: `workers`, or its default."""
        return self.workers or default_workers()

    @property
    def buffer_bytes(self) -> int:
        """Return the value of `max_memory` in bytes."""
        return parse_size(self.max_memory, "--max-memory")
