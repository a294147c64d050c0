"""A model and an optimizer directory are converted to a model and an optimizer directory, which stock torch loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import ckptx
from tests.conversion.steps import CONFIG, TIED
from tests.support.checkpoint_writers import llama, write_hf
from tests.support.torch_dcp import assert_same_tensors, load, metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MESHES: list[dict[str, int]] = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "dp_shard": 2}]


def trained(root: Path, *, tied: bool, directories: tuple[str, str] = ("model", "optim")) -> Path:
    """Save weights and optimizer state with torch, in two directories; a tied head is not stored."""
    weights = {
        name: torch.full(shape, float(seed), dtype=torch.bfloat16)
        for seed, (name, (_, shape, _)) in enumerate(llama(head=not tied).items())
    }
    state = {
        name: {"exp_avg": weight.float() + 0.5, "step": torch.tensor(float(seed))}
        for seed, (name, weight) in enumerate(weights.items())
    }
    dcp.save({**weights, "epoch": 3}, checkpoint_id=root / directories[0])
    dcp.save({"state": state, "epoch": 4, "lr": 0.25}, checkpoint_id=root / directories[1])
    (root / directories[0] / "config.json").write_text(json.dumps(TIED if tied else CONFIG))
    return root


def planner_data(path: Path) -> dict[str, Any]:
    found = dcp.FileSystemReader(path).read_metadata().planner_data
    assert isinstance(found, dict)
    return found


def objects(path: Path) -> dict[str, Any]:
    """Load the values of a DCP that are not tensors, with torch."""
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.keys() - metadata(path).keys()
    state: dict[str, Any] = dict.fromkeys(names)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def with_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the names of a tied head, with the values of the embedding."""
    return {**tensors, **{name.replace(EMBED, HEAD): tensor for name, tensor in tensors.items() if EMBED in name}}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_directory_is_written_with_its_names(tmp_path: Path, mesh: dict[str, int], tied: bool) -> None:
    source, out = trained(tmp_path / "step", tied=tied), tmp_path / "out"
    base = write_hf(tmp_path / "base", llama(), config=TIED if tied else CONFIG)
    report = (
        ckptx.reshard(source, out, to="dcp", base=base, **mesh)
        if mesh
        else ckptx.convert("to-dcp", source, out, base=base)
    )
    for directory in ("model", "optim"):
        expected = load(source / directory)
        assert_same_tensors(load(out / directory), with_head(expected) if tied else expected)
        assert objects(out / directory) == objects(source / directory)
        paths = planner_data(source / directory)
        added = {name.replace(EMBED, HEAD): path for name, path in paths.items() if EMBED in name and tied}
        assert planner_data(out / directory) == paths | {
            name: tuple(HEAD if each == EMBED else each for each in path) for name, path in added.items()
        }
        written = {str(path.relative_to(out)) for path in (out / directory).glob("*.distcp")}
        assert written == {name for row in report.ranks for name in row["files"] if name.startswith(directory)}
    assert report.ledger["written"] == report.ledger["source"] and report.dropped == []
    assert report.objects == {"count": 3, "is_copied": True}
