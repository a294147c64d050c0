"""A defect: its model, its description, and the function that injects it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from benchmarks.injected.models import Config, Tensors
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks


class InjectionTarget(NamedTuple):
    """The parallel model on the meta device.

    Attributes:
        model: Model with sharded parameters.
        layout: Sharding of its parameters; None without TP.
        ranks: TP ranks.
    """

    model: nn.Module
    layout: TensorParallelLayout | None
    ranks: TpRanks


CheckpointInjection = Callable[[Tensors, Config], None]  # changes tensors and config of a checkpoint in place
RuntimeInjection = Callable[[InjectionTarget], None]  # changes the parallel model in place


@dataclass(frozen=True, slots=True)
class Defect:
    """One row of a table.

    Attributes:
        model: Name of a model of `benchmarks.injected.models`, with its standard deviations; "" until `defects_of` sets
            it.
        kind: "w" for weights of the checkpoint, "c" for its config, "w+c" for both, "runtime" for the parallel model,
            "clean" for no defect.
        name: Description of the defect.
        checkpoint_injection: Function that injects it into the checkpoint; None for the other kinds.
        runtime_injection: Function that injects it into the parallel model; None for the other kinds.
        missed_reason: Reason that `verify --run` misses it, or "".
        options: Additional options of the run.
    """

    model: str
    kind: str
    name: str
    checkpoint_injection: CheckpointInjection | None = None
    runtime_injection: RuntimeInjection | None = None
    missed_reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the unique name, with the model."""
        return f"{self.model} | {self.title}"

    @property
    def title(self) -> str:
        """Return the name in the table."""
        return self.name if self.kind in ("runtime", "clean") else f"{self.kind}: {self.name}"


def weight_defect(name: str, injection: CheckpointInjection, missed_reason: str = "") -> Defect:
    """Return a defect of the weights."""
    return Defect("", "w", name, checkpoint_injection=injection, missed_reason=missed_reason)


def config_defect(name: str, injection: CheckpointInjection, missed_reason: str = "") -> Defect:
    """Return a defect of the config."""
    return Defect("", "c", name, checkpoint_injection=injection, missed_reason=missed_reason)


def combined_defect(name: str, injection: CheckpointInjection, missed_reason: str = "") -> Defect:
    """Return a defect of weights and config."""
    return Defect("", "w+c", name, checkpoint_injection=injection, missed_reason=missed_reason)


def runtime_defect(name: str, injection: RuntimeInjection, missed_reason: str = "", **options: Any) -> Defect:
    """Return a defect of the runtime; the options `tp` and `dp_shard` set the mesh [default: tp 2]."""
    return Defect("", "runtime", name, runtime_injection=injection, missed_reason=missed_reason, options=options)


def defects_of(model: str, *defects: Defect) -> list[Defect]:
    """Return the defects with this model."""
    return [replace(each, model=model) for each in defects]
