"""A click runner of commands with the same behavior in all supported versions of click."""

from __future__ import annotations

import inspect
from typing import Any

from click import testing


class CliRunner(testing.CliRunner):
    """A runner that separates stdout and stderr, which is the default only since click 8.2."""

    def __init__(self, **options: Any) -> None:
        if "mix_stderr" in inspect.signature(testing.CliRunner).parameters:
            options["mix_stderr"] = False
        super().__init__(**options)
