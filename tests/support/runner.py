"""Click's runner of commands, the same under every click that ckptx runs with."""

from __future__ import annotations

import inspect
from typing import Any

from click import testing


class CliRunner(testing.CliRunner):
    """Stdout and stderr apart, as click 8.2 always has them; before it, stdout held both where nobody asked."""

    def __init__(self, **options: Any) -> None:
        if "mix_stderr" in inspect.signature(testing.CliRunner).parameters:
            options["mix_stderr"] = False
        super().__init__(**options)
