"""What `diff` and `verify` report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptx.report.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Report):
    """Of `diff`.

    Attributes:
        parameters: Of the first checkpoint.
        compared: Names that both have.
        differing: A row for each difference.
        tied: Names that one side leaves out, because they are tied to one that both have.
    """

    commands: ClassVar[Sequence[str]] = ("diff",)

    parameters: int
    compared: int
    differing: Sequence[dict[str, Any]]
    tied: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Report):
    """Of `verify`.

    Attributes:
        parameters: Of the reference.
        compared: Pairs of tensors that were compared.
        differing: A row for each difference.
    """

    commands: ClassVar[Sequence[str]] = ("verify",)

    parameters: int
    compared: int
    differing: Sequence[dict[str, Any]]
