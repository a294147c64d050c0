"""What is known by hand about the forward pass of a class of transformers, put together for the runtime.

The rows are those of its model type (section `forward` of its corrections). A class that was wrapped with
``type(name, (Mixin, cls), ...)`` and kept module and name is found; a class of somebody else that has the same bare
name is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ckptx.architecture.correction_rows import Sequence, of_class
from ckptx.architecture.corrections import corrections_of_class


@dataclass(frozen=True, slots=True)
class ForwardTraits:
    """What the runtime may do with a class; see `ckptx.architecture.correction_rows.ForwardRow`.

    Attributes:
        head: The module whose output stays sharded over the vocabulary, empty for none.
        sequence: Where norms and residuals may run on a slice of the sequence; None for nowhere.
        runs: Patterns of plan rows with which the forward pass runs on shards, too.
        styles: Styles that the forward pass needs beside them; they cut nothing.
        reads_weight: Modules whose forward reads a weight of another module.
        reads_when: A key of the text model's config; `reads_weight` counts only where it is not zero.
        reason: Of `runs`, `styles` and `reads_weight`.
    """

    head: str = ""
    sequence: Sequence | None = None
    runs: tuple[str, ...] = ()
    styles: Mapping[str, str] = field(default_factory=dict)
    reads_weight: Mapping[str, str] = field(default_factory=dict)
    reads_when: str = ""
    reason: str = ""


def qualified_name(cls: type) -> str:
    """Module and name of a class, for messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


def forward_traits_of(model: nn.Module) -> ForwardTraits:
    """What the rows of the model's class say together, an empty one where there are none."""
    cls = type(model)
    rows = of_class(corrections_of_class(cls.__qualname__, cls.__module__).forward, cls.__qualname__)
    return ForwardTraits(
        head=next((row.head for row in rows if row.head), ""),
        sequence=next((row.sequence for row in rows if row.sequence), None),
        runs=next((row.runs for row in rows if row.runs), ()),
        styles=next((row.styles for row in rows if row.styles), {}),
        reads_weight=next((row.reads_weight for row in rows if row.reads_weight), {}),
        reads_when=next((row.reads_when for row in rows if row.reads_when), ""),
        reason=next((row.reason for row in rows if row.runs or row.styles or row.reads_weight), ""),
    )


def is_stock(model: nn.Module) -> bool:
    """True when the forward pass is one of transformers, also in a class that was wrapped: its plan speaks of it."""
    return str(type(model).forward.__module__).startswith("transformers.")
