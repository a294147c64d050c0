"""Schedules that split the backward are of torch 2.13, and so is what is held of torch's faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptx.runtime.parallel.pipeline.schedules import can_split_backward

_HERE = Path(__file__).parent
_WORDS = (
    "zerobubble", "dualpipev", "_split_", "-True]", "backward_in_two_parts", "torchs_own", "torch_counts",
    "torch_frees", "torch_loses",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips them with another torch."""
    if can_split_backward():
        return
    skip = pytest.mark.skip(reason=f"torch {torch.__version__} cannot go backward in two parts, needed 2.13")
    for item in items:
        if item.path.parent == _HERE and any(word in item.name for word in _WORDS):
            item.add_marker(skip)
