"""Which parameters of a reference no input reached: they got no gradient, or a gradient of nothing but zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptx.runtime.parity.side import ModelFacts


class UnreachedParameters:
    """Looks at gradients, some at a time."""

    def __init__(self, seen: ModelFacts) -> None:
        """Of the model that is known as `seen`."""
        self._seen = seen
        self._rows: dict[str, dict[str, Any] | None] = {}

    def look(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Takes note of gradients of one backward step, by canonical name."""
        self._rows |= {name: self._row(name, each) for name, each in gradients.items()}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each parameter, with its `name`, and with `experts` where only some of them were not reached."""
        found = (self._rows.get(name, {"name": name}) for name in sorted(self._seen.trained))
        return [row for row in found if row is not None]

    def _row(self, name: str, gradient: torch.Tensor) -> dict[str, Any] | None:
        if not bool(gradient.any()):
            return {"name": name}
        count = self._seen.routing.experts.get(name.rpartition(".")[0])
        if count is not None and gradient.dim() > 1 and gradient.shape[0] == count:
            missing = [expert for expert in range(count) if not bool(gradient[expert].any())]
            if missing:
                return {"name": name, "experts": missing}
        return None
