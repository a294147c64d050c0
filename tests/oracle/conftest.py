"""Checkpoints that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.models import EVERY, write


@pytest.fixture(scope="module")
def hf_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the model of a recipe lies in float32; it is written when it is first asked for."""
    made: dict[str, Path] = {}

    def hf(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("hf") / name
            write(replace(EVERY[name], dtype=torch.float32), made[name])
        return made[name]

    return hf
