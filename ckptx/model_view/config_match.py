"""Result of the check of a checkpoint against its config, as an entry of a report and as lines for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptx.architecture.extra_tensors import ExtraTensor
from ckptx.wording import counted, first_of

_MAX_LISTED_EXTRAS = 3  # names per reason
# Values of `Mismatch.found` for what the config requires and the checkpoint lacks.
MISSING_TENSOR = "no such tensor"
MISSING_LAYER = "nothing"
# Value of `Mismatch.needed` for a tensor that the checkpoint must not have; `found` is then the end of a sentence.
MUST_BE_ABSENT = "no tensor of this name"


class Mismatch(NamedTuple):
    """Tensor or layer that does not match the config.

    Attributes:
        name: Name in the checkpoint, or in the model if it is missing.
        found: State in the checkpoint, such as "shape [32000, 4096]", or one of the constants above.
        needed: State that the config requires, such as "shape [32064, 4096] by config.json", or `MUST_BE_ABSENT`.
        shape: Shape in the checkpoint; empty unless shapes differ.
        expected: Shape by the config, with None for an unknown size; empty unless shapes differ.
    """

    name: str
    found: str
    needed: str
    shape: tuple[int, ...] = ()
    expected: tuple[int | None, ...] = ()

    @property
    def is_missing(self) -> bool:
        """Return True if the config requires a tensor or layer that the checkpoint lacks."""
        return self.found in (MISSING_TENSOR, MISSING_LAYER)

    def description(self) -> str:
        """Return a phrase with the name and both states."""
        if self.needed == MUST_BE_ABSENT:
            return f'"{self.name}" {self.found}'
        return f'"{self.name}": expected {self.needed}, found {self.found}'


class OtherVocabulary(NamedTuple):
    """Vocabulary with another size than the config states, which is the only difference from the config.

    Attributes:
        vocab_size: Value in the config.
        rows: Number of rows of the embedding and the output head, larger or smaller than `vocab_size`.
        keys: Dotted paths of the config keys whose value has to become `rows` for the tensors to match.
    """

    vocab_size: int
    rows: int
    keys: tuple[str, ...]

    def description(self) -> str:
        """Return the finding as a sentence without a period."""
        if self.rows < self.vocab_size:
            return f"the vocabulary has {self.rows} rows, fewer than vocab_size {self.vocab_size}"
        return f"the vocabulary is padded from {self.vocab_size} to {self.rows} rows"

    def edits(self) -> tuple[dict[str, Any], ...]:
        """Return the changes to config.json after which the tensors match it: `key`, and its value before and after."""
        return tuple({"key": key, "before": self.vocab_size, "after": self.rows} for key in self.keys)


@dataclass(frozen=True, slots=True)
class ConfigMatch:
    """Result of a check.

    Attributes:
        checked: "names and shapes"; "layers" for names and numbers of layers if shapes are unknown; or "nothing".
        mismatches: Wrong and extra tensors and layers, then missing ones; at most 1000 missing ones, because a config
            can require any number.
        unchecked: Number of tensors whose shape was not checked, because they are quantized or the expected shape is
            unknown.
        is_truncated: True if more tensors are missing than `mismatches` lists.
        extras: Tensors that the class does not have, by name; allowed ones have a reason, others are mismatches.
        other_vocabulary: The cause of all mismatches if it is a vocabulary of another size, else None.
    """

    checked: str
    mismatches: tuple[Mismatch, ...] = ()
    unchecked: int = 0
    is_truncated: bool = False
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict)
    other_vocabulary: OtherVocabulary | None = None

    @property
    def padded_vocabulary(self) -> OtherVocabulary | None:
        """Return the cause of all mismatches if it is a padded vocabulary, else None."""
        other = self.other_vocabulary
        return other if other is not None and other.rows > other.vocab_size else None

    @property
    def note(self) -> str | None:
        """Return a note for the report if shapes, or names and shapes, were not checked; None if both were."""
        if self.checked == "nothing":
            return "names and shapes not checked: unknown for this class and config"
        if self.checked == "layers":
            return "shapes not checked: unknown for this class and config; layers were counted"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the `config_check` entry of the report."""
        mismatches = [{"name": each.name, "found": each.found, "needed": each.needed} for each in self.mismatches]
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
        """Return the names of the extra tensors that are allowed, by reason."""
        by_reason: dict[str, list[str]] = {}
        for name, extra in self.extras.items():
            if extra.reason and not (skip_computed and extra.is_computed):
                by_reason.setdefault(extra.reason, []).append(name)
        return by_reason

    def extra_notes(self, class_name: str, *, are_written: bool) -> list[str]:
        """Return one line for each reason of allowed extra tensors, except those that the class computes.

        Args:
            class_name: Name of the model class.
            are_written: True if the note is about a conversion, which writes the tensors unchanged.
        """
        suffix = ", written unchanged" if are_written else ""
        return [
            f"{counted(len(names), 'tensor')} not defined by {class_name}{suffix}: {first_of(names)} ({reason})"
            for reason, names in self._allowed_extras(skip_computed=True).items()
        ]

    def summary(self, subject: str) -> str:
        """Return one line with the first three mismatches, or with the vocabulary that causes all of them."""
        if self.other_vocabulary is not None:
            return f"{subject}: does not match its config: {self.other_vocabulary.description()}"
        first = "; ".join(each.description() for each in self.mismatches[:3])
        over = "over " * self.is_truncated
        more = f"; and {over}{len(self.mismatches) - 3:,} more" if len(self.mismatches) > 3 else ""
        return f"{subject}: does not match its config: {first}{more}"
