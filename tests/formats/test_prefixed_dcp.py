"""A DCP with files under prefixes and `.metadata` at the root, as prefix strategies of s3torchconnector write it."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import ckptx
from tests.support import torch_dcp

TENSORS = {"w": torch.arange(12.0).view(4, 3), "v": torch.ones(2), "u": torch.zeros(3, 2)}


def test_files_under_prefixes_are_read(tmp_path: Path) -> None:
    """The files are `f000/epoch_1/__0_0.distcp`, `f001/epoch_1/__0_1.distcp`, ..."""
    root = tmp_path / "state"
    dcp.save(dict(TENSORS), storage_writer=dcp.FileSystemWriter(root, thread_count=3), no_dist=True)
    metadata = pickle.loads((root / ".metadata").read_bytes())
    names = sorted(path.name for path in root.glob("*.distcp"))
    assert len(names) > 1
    moved = {name: f"f{number:03d}/epoch_1/{name}" for number, name in enumerate(names)}
    for name, new_name in moved.items():
        (root / new_name).parent.mkdir(parents=True)
        (root / name).rename(root / new_name)
    for key, stored in metadata.storage_data.items():
        metadata.storage_data[key] = dataclasses.replace(stored, relative_path=moved[stored.relative_path])
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    assert set(ckptx.inspect(root).files) == set(moved.values())
    ckptx.reshard(root, tmp_path / "out", dp_shard=2, base="none")
    torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "out"), TENSORS)
    assert ckptx.verify(root, tmp_path / "out").exit == 0
