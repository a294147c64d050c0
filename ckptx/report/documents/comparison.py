"""Reports of `diff` and `verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptx.report.report import Report, counted
from ckptx.untrusted.printable import one_line


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiffReport(Report):
    """Report of `diff`.

    Attributes:
        parameters: Number of parameters of the first checkpoint.
        compared: Number of tensor names whose shapes and dtypes were compared: those that both checkpoints have, and
            tied ones that one of them lacks.
        total: Number of tensor names of the model that one or both checkpoints have.
        not_compared: Numbers of what `diff` does not compare, in both checkpoints together: `optimizer` (tensors of
            optimizer state), `other` (other tensors, not of the model), `objects` (pickled objects).
        differing: One entry per difference: `name`, `what` differs ("missing", "shape", "dtype", "tie", or "setting" of
            an adapter), and the values of both sides, `a` and `b`: dtype and shape (null: missing), or for "tie"
            whether the name is tied.
        tied_tensors: One entry per name that one checkpoint lacks because it ties it: `name`, `only_in` (path of the
            checkpoint that has it), and `tied_to` (the name in the other checkpoint).
    """

    commands: ClassVar[Sequence[str]] = ("diff",)

    parameters: int
    compared: int
    total: int
    not_compared: Mapping[str, int] = field(default_factory=dict)
    differing: Sequence[dict[str, Any]]
    tied_tensors: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyReport(Report):
    """Report of `verify`.

    Attributes:
        parameters: Number of parameters of the reference.
        compared: Number of pairs of tensors whose contents were compared.
        total: `compared`, and the tensors that one checkpoint lacks or that differ in dtype or shape. It does not
            include `not_compared`.
        not_compared: Numbers of what was not compared, in both checkpoints together: `optimizer` (tensors of optimizer
            state) and `other` (other tensors, not of the model), if only one checkpoint has any, or no name is in both;
            `objects` (pickled objects that only one checkpoint has, or with different bytes, which may be equal).
        config_differences: Keys of config.json that both checkpoints have with different values, and that change what a
            model computes.
        config_mismatches: Paths of the checkpoints whose tensors do not match their config; a note says how.
        differing: One entry per difference: `name`, `what` differs ("missing", "shape", "dtype", "content", or
            "setting" of an adapter), and the values of both sides, `a` and `b`: dtype and shape (null: missing), or the
            bytes of the first element that differs. For "content" also its `index`, `differing_count` (number of
            elements that differ; of a tensor larger than 16 MiB, only those in the first 16 MiB block with a
            difference), and `differing_elements` (the same in words).
    """

    def __repr__(self) -> str:
        """Return one short line with the verdict: `<VerifyReport of verify: exit 1, DIFFERENT: "w" (content)>`."""
        if self.error is not None or self.exit > 1:
            return Report.__repr__(self)
        first = "" if not self.differing else f': "{one_line(self.differing[0]["name"])}" ({self.differing[0]["what"]})'
        if self.differing or not self.compared:
            verdict = "DIFFERENT" if self.differing else "NOTHING COMPARED"
        else:
            verdict = "INCOMPLETE" if self.exit else "EQUAL"
        return (
            f"<VerifyReport of verify: exit {self.exit}, {verdict}{first}, {counted(self.compared, 'tensor')} compared>"
        )

    commands: ClassVar[Sequence[str]] = ("verify",)

    parameters: int
    compared: int
    total: int
    not_compared: Mapping[str, int] = field(default_factory=dict)
    config_differences: Sequence[str] = ()
    config_mismatches: Sequence[str] = ()
    differing: Sequence[dict[str, Any]]
