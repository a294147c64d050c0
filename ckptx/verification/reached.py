"""Which parameters of a reference no input reached: they got no gradient, or a gradient of nothing but zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptx.verification.side import Seen


def unreached(gradients: Mapping[str, torch.Tensor], seen: Seen) -> list[dict[str, Any]]:
    """A row for each parameter, with its `name`, and with `experts` where only some of its experts were not reached.

    Args:
        gradients: By canonical name, of one backward step.
        seen: The model they are of.
    """
    rows: list[dict[str, Any]] = []
    for name in sorted(seen.trained):
        gradient = gradients.get(name)
        if gradient is None or not bool(gradient.any()):
            rows.append({"name": name})
            continue
        count = seen.routing.experts.get(name.rpartition(".")[0])
        if count is not None and gradient.dim() > 1 and gradient.shape[0] == count:
            missing = [expert for expert in range(count) if not bool(gradient[expert].any())]
            if missing:
                rows.append({"name": name, "experts": missing})
    return rows
