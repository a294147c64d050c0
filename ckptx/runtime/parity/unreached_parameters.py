"""Find parameters of a reference that no input reaches: they have no gradient, or one of zeros only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptx.runtime.parity.model_loaders import ModelFacts


class UnreachedParameters:
    """Parameters without a gradient, collected from some gradients at a time."""

    def __init__(self, facts: ModelFacts) -> None:
        """Expect gradients of the model that `facts` describes."""
        self._facts = facts
        self._rows: dict[str, dict[str, Any] | None] = {}

    def record(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Record gradients of one backward step, by canonical name."""
        self._rows |= {name: self._row(name, each) for name, each in gradients.items()}

    def make_rows(self) -> list[dict[str, Any]]:
        """Return a row for each unreached parameter: its `name`, and `experts` if only some were not reached."""
        candidates = (self._rows.get(name, {"name": name}) for name in sorted(self._facts.trained_names))
        return [row for row in candidates if row is not None]

    def _row(self, name: str, gradient: torch.Tensor) -> dict[str, Any] | None:
        if not bool(gradient.any()):
            return {"name": name}
        count = self._facts.routing.expert_counts.get(name.rpartition(".")[0])
        if count is not None and gradient.dim() > 1 and gradient.shape[0] == count:
            missing = [expert for expert in range(count) if not bool(gradient[expert].any())]
            if missing:
                return {"name": name, "experts": missing}
        return None
