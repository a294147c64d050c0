"""The sizes of a mesh in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sizes_text(layout: Mapping[str, Any]) -> str:
    """Return the sizes of a mesh: `tp 2 x pp 1 x dp_shard 2`, and ` with ep 2` for expert parallelism.

    Args:
        layout: Sizes of the mesh, as in the `layout` of a report.
    """
    sizes = f"tp {layout['tp']} x pp {layout['pp']} x dp_shard {layout['dp_shard']}"
    return f"{sizes} with ep {layout['ep']}" if layout.get("ep", 1) > 1 else sizes
