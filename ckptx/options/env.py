"""Options of `env`."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from typing import ClassVar

from ckptx.options.option import Options


class EnvOptions(Options):
    """Options of `env`."""

    command: ClassVar[str] = "env"
