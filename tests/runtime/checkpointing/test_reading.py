"""Regions of tensors, however they are stored, in memory, however it lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptx.catalog.region import Region
from ckptx.errors import UnsupportedError
from ckptx.runtime.checkpointing import reading
from ckptx.runtime.checkpointing.reading import OpenCheckpoint, RegionReader, open_source, split_region
from tests.support.torch_dcp import raw

SHAPE = (6, 5, 4)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return {
        "plain": values,
        "half": values.to(torch.bfloat16),
        "turned": values.permute(2, 0, 1),  # not row-major
        "none": values[:0],
        "one": torch.tensor(3.5),
        "yes": values > 0,
        "small": values.to(torch.float8_e4m3fn),
    }


@pytest.fixture(params=["safetensors", "bin"])
def source(
    request: pytest.FixtureRequest, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> Iterator[OpenCheckpoint]:
    if request.param == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with open_source(tmp_path) as opened:
        yield opened


def taken(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(at, at + n) for at, n in zip(*region, strict=True))]


REGIONS = [
    Region((0, 0, 0), SHAPE),
    Region((2, 0, 0), (3, 5, 4)),
    Region((0, 1, 1), (6, 3, 2)),
    Region((5, 4, 3), (1, 1, 1)),
]


@pytest.mark.parametrize("name", ["plain", "half", "turned", "none", "one", "yes", "small"])
@pytest.mark.parametrize("region", REGIONS, ids=str)
@pytest.mark.parametrize("staged", [False, True])
def test_regions_fill_any_memory(
    source: OpenCheckpoint,
    tensors: dict[str, torch.Tensor],
    name: str,
    region: Region,
    staged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_STAGING_BYTES", 24)  # several bands
    if staged:  # as for a device
        monkeypatch.setattr(reading, "MemorySink", reading.StagedSink)
    expected = tensors[name]
    entry = source.tensors[name]
    if name in ("none", "one"):
        region = Region((0,) * expected.dim(), tuple(expected.shape))
    elif name == "turned":
        offsets, sizes = ((each[2], *each[:2]) for each in region)
        region = Region(offsets, sizes)
    wanted = taken(expected, region).clone(memory_format=torch.contiguous_format)
    read = RegionReader(source.files)
    row_major = torch.empty(wanted.shape, dtype=wanted.dtype)
    columns = torch.empty((*wanted.shape[::-1],), dtype=wanted.dtype).permute(tuple(range(wanted.dim()))[::-1])
    for target in (row_major, columns):
        read.fill(entry, region, target)
        assert raw(target) == raw(wanted)
        assert read.is_equal(entry, region, target)
        if target.numel():
            flipped = target.clone(memory_format=torch.contiguous_format)
            flipped.view(-1).view(torch.uint8)[-1] ^= 1
            target.copy_(flipped)
            assert not read.is_equal(entry, region, target)


def test_floats_are_cast_into_any_memory(source: OpenCheckpoint, tensors: dict[str, torch.Tensor]) -> None:
    region = REGIONS[2]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for target in (
            torch.empty(region.sizes, dtype=dtype),
            torch.empty(region.sizes[::-1], dtype=dtype).permute(2, 1, 0),
        ):
            RegionReader(source.files).fill(source.tensors["plain"], region, target)
            assert torch.equal(target, taken(tensors["plain"], region).to(dtype))


@pytest.mark.parametrize("name", ["yes", "small"])
def test_nothing_else_is_cast(source: OpenCheckpoint, name: str) -> None:
    with pytest.raises(UnsupportedError, match="only floating-point tensors can be cast"):
        RegionReader(source.files).fill(source.tensors[name], REGIONS[0], torch.empty(SHAPE))


def test_bytes_that_no_checksum_vouches_for_are_counted(source: OpenCheckpoint) -> None:
    read = RegionReader(source.files)
    read.fill(source.tensors["plain"], REGIONS[0], torch.empty(SHAPE))
    assert read.unverified_bytes == 0 and read.bytes_read >= 4 * 120
    read.fill(source.tensors["plain"], REGIONS[1], torch.empty(REGIONS[1].sizes))
    assert read.unverified_bytes == (0 if source.view.catalog.format == "huggingface" else 4 * 60)


@pytest.mark.parametrize("numel", [1, 3, 4, 7, 20, 33, 1000])
def test_bands_tile_a_region_in_order(numel: int) -> None:
    for region in REGIONS:
        found = list(split_region(region, numel))
        assert all(band.numel <= numel for band in found)
        values = torch.arange(120).reshape(SHAPE)
        flat = torch.cat([taken(values, band).reshape(-1) for band in found])
        assert torch.equal(flat, taken(values, region).reshape(-1))
