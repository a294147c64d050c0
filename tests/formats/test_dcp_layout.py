"""`.distcp` files: how whole tensors are dealt out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import UnsupportedError
from ckptx.formats.dcp_layout import allocate, archive_frame, file_count, metadata_bytes, torch_shape
from ckptx.formats.dcp_metadata import parse_metadata
from tests.writers import archive, value


def entries(sizes: list[int]) -> list[TensorEntry]:
    return [TensorEntry(f"t{i}", BY_NAME["U8"], (size,), ()) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=30), st.integers(1, 40))
@settings(deadline=None)
def test_every_file_gets_consecutive_tensors_without_holes(sizes: list[int], files: int) -> None:
    catalog = allocate(Path("x"), entries(sizes), files)
    count = min(files, len(sizes))
    assert list(catalog.files) == [f"__{i}_0.distcp" for i in range(count)]
    assert list(catalog.tensors) == [f"t{i}" for i in range(len(sizes))]
    at = dict.fromkeys(catalog.files, 0)
    seen: list[str] = []
    for entry in catalog.tensors.values():
        (chunk,) = entry.chunks
        assert chunk.offset == at[chunk.file]
        at[chunk.file] += chunk.nbytes
        if chunk.file not in seen[-1:]:
            seen.append(chunk.file)
    assert at == catalog.files
    assert seen == list(catalog.files)


def test_files_are_balanced_by_bytes() -> None:
    catalog = allocate(Path("x"), entries([1_000_000] * 32), 4)
    assert len(set(catalog.files.values())) == 1


@pytest.mark.parametrize(("nbytes", "files"), [(0, 1), (1, 1), (256 << 20, 1), ((256 << 20) + 1, 2), (1 << 50, 64)])
def test_the_size_decides_how_many_files(nbytes: int, files: int) -> None:
    assert file_count(nbytes) == files


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64", "BOOL", "F8_E4M3", "U32", "F4"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 4), (2, 2, 2, 2)])
def test_a_frame_and_the_elements_are_the_archive(dtype: str, shape: tuple[int, ...]) -> None:
    if dtype == "F4" and not shape:
        return
    kind = BY_NAME[dtype]
    frame = archive_frame(kind, shape)
    torch_elements = torch_shape(kind, shape, "x")
    data = value("U8", *(torch_elements if kind.itemsize == 1 else (*shape, kind.itemsize)))[2]
    import zlib

    tail = frame.tail(zlib.crc32(data))
    assert len(tail) == frame.tail_nbytes
    assert frame.head + data + tail == archive((dtype, torch_elements, data))


def test_metadata_of_a_layout_with_an_alias() -> None:
    catalog = allocate(Path("x"), entries([5, 7]), 1)
    parsed = parse_metadata(metadata_bytes(catalog, {"alias": "t1"}), ".metadata")
    assert list(parsed.tensors) == ["t0", "t1", "alias"]
    assert parsed.storage["alias", (0,)] == parsed.storage["t1", (0,)]
    assert parsed.storage["t1", (0,)].offset == parsed.storage["t0", (0,)].length


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (3,)), ("F4", ()), ("F6_E2M3", (4,))])
def test_what_torch_cannot_hold_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match='tensor "x" has dtype F'):
        torch_shape(BY_NAME[dtype], shape, "x")
