"""Names that share bytes on both sides are compared under each name, and read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptx


def write_aliases(root: Path, names: list[str], *others: str, change: int | None = None) -> int:
    """Write a DCP in which `names` are one tensor, and return its bytes of tensor data."""
    shared = torch.arange(1000, dtype=torch.float32)
    if change is not None:
        shared[change] = -1
    state: dict[str, Any] = {names[0]: shared, **{name: torch.full((10,), 2.0) for name in others}}
    dcp.save(state, checkpoint_id=root / "stored", no_dist=True)
    metadata = dcp.FileSystemReader(root / "stored").read_metadata()
    for name in names[1:]:
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[names[0]]
        for index, place in list(metadata.storage_data.items()):
            if index.fqn == names[0]:
                metadata.storage_data[type(index)(name, index.offset, index.index)] = place
    import pickle

    (root / "stored" / ".metadata").write_bytes(pickle.dumps(metadata))
    return 4000 + 40 * len(others)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_equal_names_are_read_once(tmp_path: Path, names: list[str]) -> None:
    sizes = [write_aliases(tmp_path / side, names, "x", "y") for side in ("first", "second")]
    report = ckptx.verify(tmp_path / "first", tmp_path / "second")
    assert report.ok and report.compared == len(names) + 2
    assert report.bytes_read == sum(sizes)


def test_a_difference_is_reported_under_every_name(tmp_path: Path) -> None:
    write_aliases(tmp_path / "first", ["a", "b"], "x")
    write_aliases(tmp_path / "second", ["a", "b"], "x", change=700)
    report = ckptx.verify(tmp_path / "first", tmp_path / "second")
    rows = [{key: value for key, value in row.items() if key != "name"} for row in report.differing]
    assert [row["name"] for row in report.differing] == ["a", "b"] and rows[0] == rows[1]


def test_names_that_share_bytes_on_one_side_only_are_read_separately(tmp_path: Path) -> None:
    write_aliases(tmp_path / "first", ["a", "b"])
    shared = torch.arange(1000, dtype=torch.float32)
    other = shared.clone()
    other[5] = -1
    dcp.save({"a": shared, "b": other}, checkpoint_id=tmp_path / "second", no_dist=True)
    report = ckptx.verify(tmp_path / "first", tmp_path / "second")
    assert [row["name"] for row in report.differing] == ["b"]
