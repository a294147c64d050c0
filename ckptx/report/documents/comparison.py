"""Reports of `diff` and `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptx.report.report import Report


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiffReport(Report):
    """Report of `diff`.

    Attributes:
        parameters: Number of parameters of the first checkpoint.
        compared: Number of tensor names that both checkpoints have.
        differing: One entry per difference.
        tied_tensors: One entry per name that only one checkpoint has, as it is tied to a name that both have.
    """

    commands: ClassVar[Sequence[str]] = ("diff",)

    parameters: int
    compared: int
    differing: Sequence[dict[str, Any]]
    tied_tensors: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyReport(Report):
    """Report of `verify`.

    Attributes:
        parameters: Number of parameters of the reference.
        compared: Number of pairs of tensors that were compared.
        differing: One entry per difference.
    """

    commands: ClassVar[Sequence[str]] = ("verify",)

    parameters: int
    compared: int
    differing: Sequence[dict[str, Any]]
