"""Blocks that several ranks stored are compared on both sides, so that no replica hides behind the first."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import ckptx
from ckptx.errors import InputError
from ckptx.formats.sharded.file_names import shard_name
from tests.formats.cut_writer import rows, write_shard
from tests.support.checkpoint_writers import flip, value, write_safetensors

RANKS = 3
W, NORM = value("BF16", 6, 4, seed=1), value("F32", 4, seed=2)


def sharded(root: Path, changed_rank: int | None = None) -> Path:
    """`w` in blocks of rows, `norm` on every rank; the last byte of one rank's `norm` may be changed."""
    root.mkdir()
    for rank in range(RANKS):
        write_shard(root, rank + 1, {"w": rows(W, 2 * rank, 2 * rank + 2), "norm": (NORM, (0,))})
    if changed_rank is not None:
        flip(root / shard_name(changed_rank + 1, 1, 1), -1)
    return root


def whole(root: Path) -> Path:
    root.mkdir()
    write_safetensors(root / "model.safetensors", {"w": W, "norm": NORM})
    return root


@pytest.mark.parametrize(("side", "rank"), product(("reference", "checkpoint"), range(1, RANKS)))
@pytest.mark.parametrize("other", ["sharded", "whole"])
def test_a_replica_that_differs_is_refused_on_either_side(tmp_path: Path, side: str, rank: int, other: str) -> None:
    damaged = sharded(tmp_path / "damaged", rank)
    intact = sharded(tmp_path / "intact") if other == "sharded" else whole(tmp_path / "intact")
    pair = (damaged, intact) if side == "reference" else (intact, damaged)
    with pytest.raises(InputError, match=r'tensor "norm": .* have different bytes') as caught:
        ckptx.verify(*pair)
    assert str(caught.value).startswith(str(damaged)) and shard_name(rank + 1, 1, 1) in str(caught.value)


def test_replicas_that_agree_are_compared_with_the_other_side(tmp_path: Path) -> None:
    first, second = sharded(tmp_path / "first"), whole(tmp_path / "second")
    report = ckptx.verify(first, second)
    assert report.ok and report.compared == 2
    flip(second / "model.safetensors", -1)
    assert [row["name"] for row in ckptx.verify(first, second).differing] in (["w"], ["norm"])
