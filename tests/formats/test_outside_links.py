"""What is carried through a link that leads out of the checkpoint is carried, and named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckptx
from ckptx.formats.outside_links import find_outside_links
from ckptx.storage.local import LocalSource
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf

NAMES = ("README.md", "tokenizer.json", "1_Pooling/config.json", "config.json")


def lay(root: Path, name: str, to: str, through: str) -> bool:
    """Puts a file where `to` says, and a link to it (or to its directory) at `name`; True when that leads out."""
    path = root / name
    place = {"inside": root / ".store", "outside": root.parent / "private", "hub": root.parent.parent / "blobs"}[to]
    place.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes() if path.exists() else b'{"text": "of the user"}'
    path.unlink(missing_ok=True)
    if through == "directory" and "/" in name:
        (place / path.name).write_bytes(data)
        path.parent.rmdir()
        path.parent.symlink_to(place)
    else:
        (place / "0123abcd").write_bytes(data)
        path.symlink_to(os.path.relpath(place / "0123abcd", path.parent))
    return to == "outside"


@pytest.mark.parametrize("through", ["file", "directory"])
@pytest.mark.parametrize("to", ["inside", "outside", "hub"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["hf", "base"])
def test_it_is_carried_and_named(tmp_path: Path, kind: str, name: str, to: str, through: str) -> None:
    root = write_hf(tmp_path / "models--a--b" / "snapshots" / "1", llama(), config=LLAMA)
    (root / "modules.json").write_text('[{"path": "1_Pooling"}]')
    leads_out = lay(root, name, to, through)
    dst = tmp_path / "out"
    if kind == "hf":
        report = ckptx.convert("hf2dcp", root, dst)
    else:
        report = ckptx.convert("dcp2hf", write_dcp(tmp_path / "dcp", llama()), dst, base=root)
    assert (dst / name).read_bytes() == (root / name).read_bytes()
    assert not (dst / name).is_symlink()
    said = [warning for warning in report.notes if "point outside the checkpoint" in warning]
    assert len(said) == leads_out
    assert all(f"{name} -> " in line and "private" in line for line in said)


def test_many_are_counted(tmp_path: Path) -> None:
    root = write_hf(tmp_path / "hf", llama(), config=LLAMA)
    for number in range(9):
        (tmp_path / f"text{number}").write_text("{}")
        (root / f"extra{number}.json").symlink_to(tmp_path / f"text{number}")
    report = ckptx.convert("hf2dcp", root, tmp_path / "out")
    assert [warning for warning in report.notes if "and 4 more" in warning and "9 links" in warning]
    assert len(find_outside_links(LocalSource(root), [f"extra{number}.json" for number in range(9)])) == 9
