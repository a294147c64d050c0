"""Sizes at which formats change shape: a tensor above 4 GiB (zip64), tens of thousands of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.formats.hf.safetensors import format_header_text, frame_header, pad_header

NBYTES = 2**32 + 4099
MARKS = {0: b"first", 2**31 + 7: b"middle", NBYTES - 4: b"last"}


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of one 4 GiB tensor, sparse, and a small one behind it."""
    root = tmp_path / "large"
    root.mkdir()
    rows = [
        ("a.weight", DTYPES_BY_NAME["U8"], (NBYTES,), 0, NBYTES),
        ("b.weight", DTYPES_BY_NAME["U8"], (3,), NBYTES, NBYTES + 3),
    ]
    header = frame_header(pad_header(format_header_text(rows, {"format": "pt"})))
    with (root / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + NBYTES + 3)
        for at, mark in {**MARKS, NBYTES: b"abc"}.items():
            os.pwrite(file.fileno(), mark, len(header) + at)
    yield root
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.unlink()  # 13 GiB are too much to leave to pytest


@pytest.mark.slow
def test_a_tensor_above_4_gib_goes_through_zip64_and_back(large: Path, tmp_path: Path) -> None:
    import torch

    ckptx.convert("hf2dcp", large, tmp_path / "dcp", files=2)
    entry = ckptx.open_checkpoint(tmp_path / "dcp").tensors["a.weight"]
    assert entry.nbytes == NBYTES
    assert ckptx.verify(large, tmp_path / "dcp").exit == 0
    # Stock torch maps an archive only when it is the whole file.
    loaded = torch.load(tmp_path / "dcp" / entry.chunks[0].file, mmap=True, weights_only=True)
    assert loaded.shape == (NBYTES,)
    for at, mark in MARKS.items():
        assert bytes(loaded[at : at + len(mark)].tolist()) == mark[: NBYTES - at]
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "back", base="none")
    with (large / "model.safetensors").open("rb") as a, (tmp_path / "back" / "model.safetensors").open("rb") as b:
        while block := a.read(64 << 20):
            assert b.read(64 << 20) == block
        assert not b.read(1)


@pytest.mark.slow
def test_twenty_thousand_tensors_load_through_stock_torch(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint import load

    names = [f"layers.{i // 200}.experts.{i % 200}.weight" for i in range(20_000)]
    rows = [(name, DTYPES_BY_NAME["I32"], (2, 3), 24 * i, 24 * i + 24) for i, name in enumerate(names)]
    values = torch.arange(6 * len(names), dtype=torch.int32)
    root = tmp_path / "many"
    root.mkdir()
    text = pad_header(format_header_text(rows, {"format": "pt"}))
    (root / "model.safetensors").write_bytes(frame_header(text) + values.numpy().tobytes())
    ckptx.convert("hf2dcp", root, tmp_path / "dcp", files=3)
    state = {name: torch.zeros(2, 3, dtype=torch.int32) for name in names[::97]}
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for i, name in enumerate(names[::97]):
        assert torch.equal(state[name].flatten(), values[6 * 97 * i : 6 * 97 * i + 6]), name
    assert ckptx.verify(root, tmp_path / "dcp").compared == 20_000
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "back", base="none")
    assert ckptx.verify(root, tmp_path / "back").exit == 0
