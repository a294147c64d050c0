"""`TensorReader.read_tensor` of archives: the bytes of every grid; False for archives that it leaves to `stream`."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError
from ckptx.formats.registry import open_checkpoint
from ckptx.model_view.view import locate_archives, view_model
from ckptx.transfer.small_tensors import encode_crc
from ckptx.transfer.stream import TensorReader
from tests.support.checkpoint_writers import archive, array, flip, write_dcp

SHAPE = (6, 4, 5)
NUMBERS = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)


def parts(*dims: int) -> list[Region]:
    """The regions of a split of some dims in two, the first part of each one index shorter."""
    regions = [full_region(SHAPE)]
    for dim in dims:
        half = SHAPE[dim] // 2 - 1 or 1
        regions = [
            Region(
                (*region.offsets[:dim], begin, *region.offsets[dim + 1 :]),
                (*region.sizes[:dim], size, *region.sizes[dim + 1 :]),
            )
            for region in regions
            for begin, size in ((0, half), (half, SHAPE[dim] - half))
        ]
    return regions


def read(root: Path) -> tuple[bool, bytes, TensorReader]:
    catalog = open_checkpoint(root)
    with catalog.source.open() as files:
        entry = locate_archives(view_model(catalog), files, lazy=True).tensors["x"]
        view = bytearray(entry.nbytes)
        reader = TensorReader(files)
        is_read = reader.read_tensor(entry, memoryview(view))
        again = bytearray(entry.nbytes)
        assert reader.read_tensor(entry, memoryview(again)) is is_read and again == view
    return is_read, bytes(view), reader


@pytest.mark.parametrize("dims", [(), (0,), (1,), (2,), (0, 1), (0, 2)])
def test_a_grid_of_archives_is_read_at_once(tmp_path: Path, dims: tuple[int, ...]) -> None:
    root = write_dcp(tmp_path / "dcp", {"x": array(NUMBERS)}, cuts={"x": parts(*dims)}, files=2)
    is_read, data, reader = read(root)
    assert is_read and data == NUMBERS.tobytes()
    assert reader.bytes_read == 2 * NUMBERS.nbytes and reader.records_without_crc == 0


@pytest.mark.parametrize("dims", [(1, 2), (0, 1, 2)])
def test_other_splits_are_left_to_the_stream(tmp_path: Path, dims: tuple[int, ...]) -> None:
    root = write_dcp(tmp_path / "dcp", {"x": array(NUMBERS)}, cuts={"x": parts(*dims)})
    is_read, _, reader = read(root)
    assert not is_read and reader.bytes_read == 0


def test_an_archive_of_another_layout_is_left_to_the_stream(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(torch.from_numpy(NUMBERS), stream, pickle_protocol=4)
    root = write_dcp(tmp_path / "dcp", {"x": array(NUMBERS)}, payloads={"x": stream.getvalue()})
    assert not read(root)[0]


def test_columns_of_another_layout_are_left_to_the_stream(tmp_path: Path) -> None:
    half = np.arange(12, dtype=np.float32).reshape(4, 3)
    stream = io.BytesIO()
    torch.save(torch.from_numpy(half), stream, pickle_protocol=4)
    columns = [Region((0, 0), (4, 3)), Region((0, 3), (4, 3))]
    whole = {"x": array(np.concatenate([half, half], axis=1))}
    assert read(write_dcp(tmp_path / "known", whole, cuts={"x": columns}))[0]
    assert not read(write_dcp(tmp_path / "other", whole, cuts={"x": columns}, payloads={"x": stream.getvalue()}))[0]


@pytest.mark.parametrize("payload", [archive(array(NUMBERS))[:-8], b"\x00" * 4000], ids=["cut short", "zeros"])
def test_what_is_no_archive_is_refused(tmp_path: Path, payload: bytes) -> None:
    root = write_dcp(tmp_path / "dcp", {"x": array(NUMBERS)}, payloads={"x": payload})
    with pytest.raises(InputError, match='tensor "x"'):
        read(root)


@pytest.mark.parametrize("dims", [(), (2,)])
def test_a_changed_byte_is_found(tmp_path: Path, dims: tuple[int, ...]) -> None:
    root = write_dcp(tmp_path / "dcp", {"x": array(NUMBERS)}, cuts={"x": parts(*dims)})
    file = root / "__0_0.distcp"
    flip(file, file.read_bytes().index(NUMBERS[0, 0, :1].tobytes()))
    with pytest.raises(InputError, match="CRC-32"):
        read(root)


def test_a_crc_in_the_journal_is_little_endian() -> None:
    assert encode_crc(0x01020304) == b"\x04\x03\x02\x01\0\0\0\0"
