"""Helpers of replays of external test suites: shards as torch records them, and conversions with the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ckptx.cli.main import cli
from tests.support.runner import CliRunner

INDEX = "model.safetensors.index.json"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], offsets: Mapping[str, Sequence[int]] = {}) -> None:
    """Write a safetensors file that records the offsets of its tensors in larger ones [default: 0]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = {name: {"saved_offsets": list(offsets.get(name, [0] * part.dim()))} for name, part in tensors.items()}
    whole = {name: part.contiguous() for name, part in tensors.items()}
    save_file(whole, path, metadata={"DCP_SHARDING_INFO": json.dumps(info)})


def run_convert(*arguments: object) -> dict[str, Any]:
    """Run `ckptx convert`, check that it exits with 0, and return the report."""
    result = CliRunner().invoke(cli, ["convert", *map(str, arguments), "--json"], standalone_mode=False)
    assert result.return_value == 0, result.stderr
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


def read_tensors(root: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of all safetensors files in a directory with the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(root.glob("*.safetensors")):
        held = load_file(path)
        assert found.keys().isdisjoint(held)
        found |= held
    return found


def index_of(root: Path) -> dict[str, Any]:
    """Read the index of an HF directory."""
    index = json.loads((root / INDEX).read_text())
    assert isinstance(index, dict)
    return index


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def names_of_tests(module: str) -> set[str]:
    """Return the names of the tests of a module, `Class.test` for tests in a class."""
    here: ModuleType = sys.modules[module]
    found = {name for name in vars(here) if name.startswith("test_")}
    for each in vars(here).values():
        if isinstance(each, type) and each.__name__.startswith("Test"):
            found |= {f"{each.__name__}.{name}" for name in vars(each) if name.startswith("test_")}
    return found
