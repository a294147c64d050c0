"""A defect: the model it is planted in, what is wrong, and the function that plants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from benchmarks.planted.models import Config, Tensors
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks


class Built(NamedTuple):
    """The parallel model, before it has storage; `layout` is None without TP."""

    model: nn.Module
    layout: TensorParallelLayout | None
    ranks: TpRanks


# In what is stored: tensors and config are changed in place. And in the parallel model, by other forward passes.
InStored = Callable[[Tensors, Config], None]
InRuntime = Callable[[Built], None]


@dataclass(frozen=True, slots=True)
class Defect:
    """One row of a table.

    Attributes:
        model: One of `benchmarks.planted.models`, with its deviations.
        kind: "w" for the weights of the checkpoint, "c" for its config, "w+c"; "runtime" with equal bytes; "clean" for
            nothing at all.
        name: What is wrong.
        stored: Plants it in the checkpoint.
        runtime: Plants it in the parallel model.
        missed: Why it is not found, where it is not.
        options: Of the run, beside the usual ones.
    """

    model: str
    kind: str
    name: str
    stored: InStored | None = None
    runtime: InRuntime | None = None
    missed: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"{self.model} | {self.title}"

    @property
    def title(self) -> str:
        """As in the table."""
        return self.name if self.kind in ("runtime", "clean") else f"{self.kind}: {self.name}"


def w(name: str, plant: InStored, missed: str = "") -> Defect:
    """In the weights."""
    return Defect("", "w", name, stored=plant, missed=missed)


def c(name: str, plant: InStored, missed: str = "") -> Defect:
    """In the config."""
    return Defect("", "c", name, stored=plant, missed=missed)


def wc(name: str, plant: InStored, missed: str = "") -> Defect:
    """In both."""
    return Defect("", "w+c", name, stored=plant, missed=missed)


def r(name: str, plant: InRuntime, missed: str = "", **options: Any) -> Defect:
    """In the runtime; `tp` and `dp_shard` among the options are the mesh, which is tp 2 where they are left out."""
    return Defect("", "runtime", name, runtime=plant, missed=missed, options=options)


def of(model: str, *defects: Defect) -> list[Defect]:
    """The defects of one model."""
    return [replace(each, model=model) for each in defects]
