"""Find parameters of a reference that no input reaches: they have no gradient, or one of zeros only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptx.runtime.parity.model_loaders import ModelFacts


class UnreachedParameters:
    """Parameters that no gradient reaches, collected from the gradients of one stage at a time."""

    def __init__(self, facts: ModelFacts) -> None:
        """Expect gradients of the model that `facts` describes."""
        self._facts = facts
        # Canonical name -> entry of `list_parameters`; None for a parameter that a gradient reaches.
        self._unreached: dict[str, dict[str, Any] | None] = {}

    def record(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Record gradients of one backward step, by canonical name."""
        self._unreached |= {name: self._describe_unreached(name, each) for name, each in gradients.items()}

    def list_parameters(self) -> list[dict[str, Any]]:
        """Return `name` of each unreached parameter, and the numbers of its `experts` if only some are unreached."""
        candidates = (self._unreached.get(name, {"name": name}) for name in sorted(self._facts.trained_names))
        return [each for each in candidates if each is not None]

    def _describe_unreached(self, name: str, gradient: torch.Tensor) -> dict[str, Any] | None:
        """Return the entry of a parameter in `list_parameters`; None if its gradient reaches all of it."""
        if not bool(gradient.any()):
            return {"name": name}
        count = self._facts.routing.expert_counts.get(name.rpartition(".")[0])
        if count is not None and gradient.dim() > 1 and gradient.shape[0] == count:
            missing = [expert for expert in range(count) if not bool(gradient[expert].any())]
            if missing:
                return {"name": name, "experts": missing}
        return None
