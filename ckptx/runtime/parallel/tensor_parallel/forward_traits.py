"""Collects the verified facts about the forward pass of a transformers class, for the runtime.

The facts come from the corrections of its model type (section `forward`). They also apply to a class that was wrapped
with ``type(name, (Mixin, cls), ...)`` and kept its module and name, but not to a third-party class of that name.
A decision that follows from them has the origin "optimized plan".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ckptx.architecture.correction_types import SequenceParallelModules, filter_by_class
from ckptx.architecture.corrections import corrections_of_class


@dataclass(frozen=True, slots=True)
class ForwardTraits:
    """The ways in which the runtime may run a class; see `ckptx.architecture.correction_types.ForwardCorrection`.

    Attributes:
        sharded_head: Name of the module whose output stays sharded over the vocabulary; empty for none.
        sequence: Modules for sequence parallelism; None if it is not supported.
        runnable_patterns: Patterns of plan rules whose tensors the forward pass can also use as shards.
        styles: Pattern -> additional style that the forward pass requires; it shards nothing.
        reads_weight: Module -> another module whose weight its forward reads.
        reads_weight_key: Key of the text model's config; `reads_weight` applies only if it is nonzero.
        reason: Reason for `runnable_patterns`, `styles` and `reads_weight`; empty if there are none.
    """

    sharded_head: str = ""
    sequence: SequenceParallelModules | None = None
    runnable_patterns: tuple[str, ...] = ()
    styles: Mapping[str, str] = field(default_factory=dict)
    reads_weight: Mapping[str, str] = field(default_factory=dict)
    reads_weight_key: str = ""
    reason: str = ""


def qualified_name(cls: type) -> str:
    """Return module and name of a class, for messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


def find_forward_traits(model: nn.Module) -> ForwardTraits:
    """Return the traits of the model's class, each from the first of its corrections that sets it; else the default."""
    cls = type(model)
    rows = filter_by_class(corrections_of_class(cls.__qualname__, cls.__module__).forward, cls.__qualname__)
    return ForwardTraits(
        sharded_head=next((row.head for row in rows if row.head), ""),
        sequence=next((row.sequence for row in rows if row.sequence), None),
        runnable_patterns=next((row.runs for row in rows if row.runs), ()),
        styles=next((row.styles for row in rows if row.styles), {}),
        reads_weight=next((row.reads_weight for row in rows if row.reads_weight), {}),
        reads_weight_key=next((row.reads_when for row in rows if row.reads_when), ""),
        reason=next((row.reason for row in rows if row.runs or row.styles or row.reads_weight), ""),
    )


def has_stock_forward(model: nn.Module) -> bool:
    """Return True if the forward pass is one of transformers, even in a wrapped class, so that its plan applies."""
    return str(type(model).forward.__module__).startswith("transformers.")
