"""Result of the check of a checkpoint against its config, as an entry of a report and as lines for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptx.architecture.extra_tensors import ExtraTensor
from ckptx.wording import counted, first_of

_MAX_LISTED_EXTRAS = 3  # names per reason
NO_TENSOR = "no tensor of this name"


class Mismatch(NamedTuple):
    """Tensor or layer that does not match the config.

    Attributes:
        name: Name in the checkpoint, or in the model if it is missing.
        found: State in the checkpoint.
        needed: State that the config requires.
    """

    name: str
    found: str
    needed: str

    def description(self) -> str:
        """Return the mismatch as part of a sentence."""
        if self.needed == NO_TENSOR:
            return f'"{self.name}" {self.found}'
        return f'"{self.name}": expected {self.needed}, found {self.found}'


@dataclass(frozen=True, slots=True)
class ConfigMatch:
    """Result of a check.

    Attributes:
        checked: "names and shapes", "layers" or "nothing".
        mismatches: Mismatches in the order of model names; at most 1000 missing tensors, as a config can require any
            number.
        unchecked: Number of model tensors whose expected shape is unknown.
        is_truncated: True if more tensors are missing than `mismatches` lists.
        extras: Tensors that the class does not have, by name.
    """

    checked: str
    mismatches: tuple[Mismatch, ...] = ()
    unchecked: int = 0
    is_truncated: bool = False
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict)

    @property
    def note(self) -> str | None:
        """Return a note for the report if not everything was checked; None if it was."""
        if self.checked == "nothing":
            return "names and shapes not checked: unknown for this class and config"
        if self.checked == "layers":
            return "shapes not checked: unknown for this class and config; layers were counted"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the `config_check` entry of the report."""
        mismatches = [each._asdict() for each in self.mismatches]
        return {
            "checked": self.checked,
            "unchecked": self.unchecked,
            "note": self.note,
            "mismatches": mismatches,
            "is_truncated": self.is_truncated,
            "extra_tensors": [
                {"reason": reason, "tensors": len(names), "names": names[:_MAX_LISTED_EXTRAS]}
                for reason, names in self._allowed_extras().items()
            ],
        }

    def _allowed_extras(self, *, skip_computed: bool = False) -> dict[str, list[str]]:
        """Return the extra tensors that are allowed, by reason."""
        by_reason: dict[str, list[str]] = {}
        for name, extra in self.extras.items():
            if extra.reason and not (skip_computed and extra.is_computed):
                by_reason.setdefault(extra.reason, []).append(name)
        return by_reason

    def extra_notes(self, class_name: str) -> list[str]:
        """Return one line for each kind of extra tensor, except those that the class computes."""
        return [
            f"{counted(len(names), 'tensor')} unknown to {class_name}, passed through: {first_of(names)} ({reason})"
            for reason, names in self._allowed_extras(skip_computed=True).items()
        ]

    def summary(self, subject: str) -> str:
        """Return one line with the first three mismatches."""
        first = "; ".join(each.description() for each in self.mismatches[:3])
        over = "over " * self.is_truncated
        more = f"; and {over}{len(self.mismatches) - 3:,} more" if len(self.mismatches) > 3 else ""
        return f"{subject}: does not match its config: {first}{more}"
