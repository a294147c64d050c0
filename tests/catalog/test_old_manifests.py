"""Manifests that earlier versions wrote stay readable, and give the original files back byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptx
from tests.support.checkpoint_writers import tree_bytes

FIXTURES = Path(__file__).parents[2] / "fixtures" / "manifests"
CASES = sorted(path.parent.relative_to(FIXTURES).as_posix() for path in FIXTURES.glob("*/*/ckptx.json"))


def test_the_fixtures_are_there() -> None:
    assert len(CASES) == 12


@pytest.mark.parametrize("case", CASES)
def test_the_original_files_come_back(case: str, tmp_path: Path) -> None:
    ckptx.convert("dcp2hf", FIXTURES / case, tmp_path / "back")
    back = tree_bytes(tmp_path / "back")
    del back["ckptx.json"]
    assert back == tree_bytes(FIXTURES / case / ".." / "hf")


@pytest.mark.parametrize("case", CASES)
def test_they_come_back_through_another_layout(case: str, tmp_path: Path) -> None:
    ckptx.reshard(FIXTURES / case, tmp_path / "cut", tp=2, pp=2, to="dcp")
    ckptx.reshard(tmp_path / "cut", tmp_path / "shards", tp=1, to="safetensors")
    ckptx.convert("dcp2hf", tmp_path / "shards", tmp_path / "back")
    back = tree_bytes(tmp_path / "back")
    del back["ckptx.json"]
    assert back == tree_bytes(FIXTURES / case / ".." / "hf")
