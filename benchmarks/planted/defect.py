"""A defect: its model, its description, and the function that injects it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from benchmarks.planted.models import Config, Tensors
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks


class Built(NamedTuple):
    """The parallel model on the meta device.

    Attributes:
        model: Model with sharded parameters.
        layout: Sharding of its parameters; None without TP.
        ranks: TP ranks.
    """

    model: nn.Module
    layout: TensorParallelLayout | None
    ranks: TpRanks


# Inject a defect into a checkpoint: change tensors and config in place. Or into the parallel model, by hooks.
InStored = Callable[[Tensors, Config], None]
InRuntime = Callable[[Built], None]


@dataclass(frozen=True, slots=True)
class Defect:
    """One row of a table.

    Attributes:
        model: Name of a model of `benchmarks.planted.models`, with its standard deviations.
        kind: "w" for weights of the checkpoint, "c" for its config, "w+c" for both, "runtime" for the parallel model,
            "clean" for no defect.
        name: Description of the defect.
        stored: Function that injects it into the checkpoint; None for the other kinds.
        runtime: Function that injects it into the parallel model; None for the other kinds.
        missed: Reason that `verify --run` misses it, or "".
        options: Additional options of the run.
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
        """Unique name, with the model."""
        return f"{self.model} | {self.title}"

    @property
    def title(self) -> str:
        """Name in the table."""
        return self.name if self.kind in ("runtime", "clean") else f"{self.kind}: {self.name}"


def w(name: str, plant: InStored, missed: str = "") -> Defect:
    """Return a defect of the weights."""
    return Defect("", "w", name, stored=plant, missed=missed)


def c(name: str, plant: InStored, missed: str = "") -> Defect:
    """Return a defect of the config."""
    return Defect("", "c", name, stored=plant, missed=missed)


def wc(name: str, plant: InStored, missed: str = "") -> Defect:
    """Return a defect of weights and config."""
    return Defect("", "w+c", name, stored=plant, missed=missed)


def r(name: str, plant: InRuntime, missed: str = "", **options: Any) -> Defect:
    """Return a defect of the runtime; the options `tp` and `dp_shard` set the mesh [default: tp 2]."""
    return Defect("", "runtime", name, runtime=plant, missed=missed, options=options)


def of(model: str, *defects: Defect) -> list[Defect]:
    """Set the model of defects."""
    return [replace(each, model=model) for each in defects]
