"""Every flipped bit of a DCP outside of tensors: where stock torch cannot load it, `verify X X` and a read fail too."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.dcp.reader import locate_payloads, open_dcp
from ckptx.formats.torch_archive.archive import locate_payload, open_archive
from ckptx.storage.files import FilePool
from ckptx.storage.local import LocalSource

TENSOR = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) + 1
OBJECT = {"epoch": 3, "name": "x"}


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def is_loaded_by_torch(data: bytes, expected: Any) -> bool:
    """torch loads the same value; it fails in many ways."""
    try:
        value = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        return False
    if isinstance(expected, torch.Tensor):
        return isinstance(value, torch.Tensor) and value.dtype == expected.dtype and torch.equal(value, expected)
    return bool(value == expected)


def is_read(data: bytes, is_expected: bool) -> bool:
    """ckptx opens the archive, by its expected bytes or by its directory, and finds the checksum of its elements."""

    def read(offset: int, nbytes: int) -> bytes:
        return data[offset : offset + nbytes]

    try:
        if is_expected:
            records = [locate_payload(read, 0, len(data), "x", DTYPES_BY_NAME["BF16"], (2, 3)).record]
        else:
            records = list(open_archive(read, 0, len(data), "x").records.values())
    except (InputError, UnsupportedError):
        return False
    return all(zlib.crc32(read(each.offset, each.nbytes)) == each.crc for each in records if each.crc is not None)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(("value", "is_expected"), [(TENSOR, True), (TENSOR, False), (OBJECT, False)])
def test_no_archive_is_read_that_torch_cannot_open(value: Any, is_expected: bool) -> None:
    good = saved(value)
    begin = nbytes = 0
    if isinstance(value, torch.Tensor):
        payload = locate_payload(lambda offset, size: good[offset : offset + size], 0, len(good), "x")
        begin, nbytes = payload.data_offset, payload.nbytes
    accepted = damaged = 0
    for position in (each for each in range(len(good)) if not begin <= each < begin + nbytes):
        for bit in range(8):
            data = bytearray(good)
            data[position] ^= 1 << bit
            if is_read(bytes(data), is_expected):
                accepted += 1
                assert is_loaded_by_torch(bytes(data), value), (position, bit)
            else:
                damaged += 1
    assert accepted > 1000 and damaged > 4000  # padding and times are neither compared nor needed


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"w": TENSOR, "epoch": OBJECT, "empty": torch.zeros(0)}
    dcp.save(state, checkpoint_id=tmp_path / "step", no_dist=True)
    return tmp_path / "step"


def structural_positions(root: Path) -> list[tuple[str, int, int]]:
    """Positions of the records that name a member: file, byte, and bit."""
    positions = []
    for path in sorted(root.glob("*.distcp")):
        data = path.read_bytes()
        for signature in (b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6"):
            position = data.find(signature)
            while position >= 0:
                positions += [(path.name, position + 2, 0), (path.name, position + 16, 7)]
                position = data.find(signature, position + 1)
    return positions


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_verify_finds_what_torch_cannot_load(checkpoint: Path) -> None:
    assert ckptx.verify(checkpoint, checkpoint).ok
    positions = structural_positions(checkpoint)
    assert len(positions) > 40
    failures = 0
    for name, position, bit in positions:
        path = checkpoint / name
        good = path.read_bytes()
        data = bytearray(good)
        data[position] ^= 1 << bit
        path.write_bytes(data)
        state = {"w": torch.zeros_like(TENSOR), "epoch": {"epoch": 0, "name": ""}, "empty": torch.zeros(0)}
        try:
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
            is_loaded = torch.equal(state["w"], TENSOR) and state["epoch"] == OBJECT
        except BaseException:  # CheckpointException is not an Exception
            is_loaded = False
        if not is_loaded:
            failures += 1
            with pytest.raises(
                (InputError, UnsupportedError), match=rf'{name}: (tensor|object) "(w|epoch\.\w+|empty)"'
            ):
                ckptx.verify(checkpoint, checkpoint)
        path.write_bytes(good)
    assert failures > 20


class CountingFiles(FilePool):
    """Files that count their reads."""

    reads = 0

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        self.reads += 1
        return super().read_up_to(name, offset, nbytes)


def test_an_archive_takes_one_read_or_two(tmp_path: Path) -> None:
    """The head of the next archive comes with the directory of each, so that planning stays fast."""
    tensors = {f"layers.{index}.weight": torch.ones(64, 64) for index in range(50)}
    dcp.save(tensors, checkpoint_id=tmp_path / "step", no_dist=True)
    with CountingFiles(tmp_path / "step") as files:
        locate_payloads(open_dcp(LocalSource(tmp_path / "step")), files)
        assert files.reads <= len(tensors) + 1


def test_a_damaged_directory_is_found_when_a_conversion_reads(checkpoint: Path, tmp_path: Path) -> None:
    path = next(iter(checkpoint.glob("*.distcp")))
    data = bytearray(path.read_bytes())
    entry = open_dcp(LocalSource(checkpoint)).tensors["w"].chunks[0]
    data[data.find(b"PK\1\2", entry.offset)] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match='tensor "w": damaged torch archive'):
        ckptx.convert("to-hf", checkpoint, tmp_path / "out", base="none", optimizer="drop")
