"""Report of `env`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptx.report.report import Report


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EnvironmentReport(Report):
    """Report of `env`.

    Attributes:
        ckptx: Version of ckptx.
        python: Version of Python.
        platform: Name of the platform.
        cores: Number of CPU cores that this process may use.
        packages: Version of each package; null if it is not installed.
        tested_with: Version of each package that the tests run with.
        settings: One entry per option that a file or environment variable sets: `option`, `value` (secrets are
            hidden), `origin` (file and key, or variable), and the `commands` that it applies to.
        unknown_variables: Environment variables `CKPTX_*` that are not options and have no effect.
    """

    commands: ClassVar[Sequence[str]] = ("env",)

    ckptx: str
    python: str
    platform: str
    cores: int
    packages: Mapping[str, str | None]
    tested_with: Mapping[str, str]
    settings: Sequence[Mapping[str, Any]]
    unknown_variables: Sequence[str] = ()
