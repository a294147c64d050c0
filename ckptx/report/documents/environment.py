"""What `env` reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptx.report.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReport(Report):
    """Of `env`.

    Attributes:
        ckptx: Its version.
        python: Version of Python.
        platform: Name of the platform.
        cores: That this process may use.
        packages: Version of each package, or None.
        tested_with: Versions that the tests run with.
        defaults: A row for each default from a file or the environment: `option`, `value` (secrets are not shown),
            `origin` (file and key, or variable), and the `commands` that it is for.
    """

    commands: ClassVar[Sequence[str]] = ("env",)

    ckptx: str
    python: str
    platform: str
    cores: int
    packages: Mapping[str, str | None]
    tested_with: Mapping[str, str]
    defaults: Sequence[Mapping[str, Any]]
