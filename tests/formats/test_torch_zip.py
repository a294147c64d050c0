"""Archives byte for byte as torch writes them, archives of any torch read, everything else refused by name."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME, DTYPES_BY_TORCH_NAME, DType
from ckptx.catalog.entry import Record
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.torch_archive import archive as torch_zip
from ckptx.formats.torch_archive.archive import (
    Payload,
    archive_frame,
    archive_length,
    is_row_major,
    locate_payload,
    open_archive,
)
from tests.formats.stock_goldens import archive, raw_bytes, raw_tensor

SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (255,),
    (256,),
    (65536,),
    (2, 3),
    (1, 70000),
    (0, 70000),
    (3, 0, 2),
    (2, 3, 4),
    (1, 1, 1),
    (2, 1, 3, 2),
    (1, 2, 1, 2, 1, 2, 1, 2, 1, 2),
]
BF16 = DTYPES_BY_NAME["BF16"]


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def reader(data: bytes) -> Callable[[int, int], bytes]:
    def read(offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(data), "read outside of the file"
        return data[offset : offset + nbytes]

    return read


def locate(data: bytes, dtype: DType | None = None, shape: tuple[int, ...] = ()) -> Payload:
    return locate_payload(reader(data), 0, len(data), "x", dtype, shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES_BY_TORCH_NAME.values(), ids=DTYPES_BY_TORCH_NAME)
def test_an_archive_is_what_torch_writes(dtype: DType) -> None:
    for shape in SHAPES:
        tensor = raw_tensor(str(dtype.torch_name), shape)
        assert archive(tensor) == saved(tensor), shape
        assert archive_length(dtype, dtype.from_torch_elements(shape)) == len(saved(tensor))


class HeadAndTail(io.RawIOBase):
    """A file that keeps what is written in small pieces and counts the rest."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.length = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = len(data)
        self.kept.append(bytes(data) if size < 1 << 16 else b"<%d>" % size)
        self.length += size
        return size


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [(1 << 32) - 900, (1 << 32) - 704, (1 << 32) - 2, (1 << 32) - 1, 5 << 30])
def test_an_archive_around_4_gib_is_what_torch_writes(nbytes: int) -> None:
    tensor = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))  # pages of zeros that nobody touches take no memory
    file = HeadAndTail()
    torch.save(tensor, file)  # type: ignore[arg-type]
    dtype, shape = DTYPES_BY_NAME["U8"], (nbytes,)
    crc = 0
    zeros = bytes(1 << 24)
    for begin in range(0, nbytes, 1 << 24):
        crc = zlib.crc32(zeros[: min(1 << 24, nbytes - begin)], crc)
    assert file.length == archive_length(dtype, shape)
    ours = archive_frame(dtype, shape).head + b"<%d>" % nbytes + archive_frame(dtype, shape).build_tail(crc)
    assert b"".join(file.kept) == ours


def test_a_head_of_4_gib_and_more_moves_to_zip64_fields() -> None:
    shape = (1 << 33,)
    head, tail = archive_frame(BF16, shape).head, archive_frame(BF16, shape).build_tail(7)
    assert len(head) % 64 == 0
    assert tail[:8] == b"PK\7\x08\7\0\0\0"
    assert int.from_bytes(tail[8:16], "little") == 1 << 34
    assert archive_length(BF16, shape) == len(head) + (1 << 34) + len(tail)


def test_a_sparse_archive_beyond_4_gib_is_found_both_ways(tmp_path: Path) -> None:
    shape = (5 << 29,)
    head, tail = archive_frame(BF16, shape).head, archive_frame(BF16, shape).build_tail(7)
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.write(b"before" + head)
        file.seek(prod(shape) * 2, os.SEEK_CUR)
        file.write(tail)

    def read(offset: int, nbytes: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)

    length = archive_length(BF16, shape)
    data = 6 + len(head)
    expected = Payload(BF16, shape, None, data, 5 << 30, Record(data, 5 << 30, 7))
    assert locate_payload(read, 6, length, "x", BF16, shape) == expected
    assert locate_payload(read, 6, length, "x") == expected


def test_an_expected_archive_takes_two_reads() -> None:
    data = archive(raw_tensor("bfloat16", (3, 5)))
    reads: list[int] = []

    def read(offset: int, nbytes: int) -> bytes:
        reads.append(nbytes)
        return data[offset - 100 : offset - 100 + nbytes]

    payload = locate_payload(read, 100, len(data), "x", BF16, (3, 5))
    assert payload.data_offset == 100 + len(archive_frame(BF16, (3, 5)).head)
    assert payload.record.crc == zlib.crc32(raw_bytes(raw_tensor("bfloat16", (3, 5))))
    frame = archive_frame(BF16, (3, 5))
    assert reads == [len(frame.head), frame.tail_nbytes]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES_BY_TORCH_NAME.values(), ids=DTYPES_BY_TORCH_NAME)
def test_both_ways_of_reading_agree(dtype: DType) -> None:
    for shape in SHAPES:
        data = archive(raw_tensor(str(dtype.torch_name), shape))
        found = locate(data)
        assert locate(data, dtype, dtype.from_torch_elements(shape)) == found
        assert (found.dtype, found.torch_shape, found.strides) == (dtype, shape, None)


def test_an_archive_of_another_shape_is_found_with_its_own_shape() -> None:
    data = archive(raw_tensor("bfloat16", (3, 5)))
    assert locate(data, BF16, (5, 3)).torch_shape == (3, 5)
    assert locate(data, DTYPES_BY_NAME["F16"], (3, 5)).dtype is BF16


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[2:, 1:5],
        lambda t: t[::2, ::3],
        lambda t: t[:1].expand(4, 6),
        lambda t: t[3, 2],
        lambda t: t[3:3],
        lambda t: t[1:4],
        lambda t: t[:, :1].t(),
    ],
)
def test_a_view_is_found_by_offset_and_strides(view: Callable[[torch.Tensor], torch.Tensor], protocol: int) -> None:
    base = raw_tensor("float32", (8, 6))
    tensor = view(base)
    data = saved(tensor, pickle_protocol=protocol)
    found = locate(data)
    storage = np.frombuffer(data, dtype="V4", offset=found.data_offset, count=found.nbytes // 4)
    strides = found.strides or tuple(torch.empty(found.torch_shape).stride())
    block = np.lib.stride_tricks.as_strided(storage, found.torch_shape, [stride * 4 for stride in strides])
    assert found.torch_shape == tuple(tensor.shape)
    assert block.tobytes() == raw_bytes(tensor)
    assert (found.strides is None) == (tensor.is_contiguous() or not tensor.numel())
    assert found.record.offset <= found.data_offset
    assert found.data_offset + found.nbytes <= found.record.offset + found.record.nbytes
    assert zlib.crc32(data[found.record.offset : found.record.offset + found.record.nbytes]) == found.record.crc


def test_row_major_in_words() -> None:
    assert is_row_major((), ())
    assert is_row_major((2, 3), (3, 1))
    assert is_row_major((1, 3), (99, 1)), "the stride of a dim of one does not matter"
    assert is_row_major((0, 3), (0, 0)), "nothing has no order"
    assert not is_row_major((2, 3), (1, 2))
    assert not is_row_major((2, 3), (4, 1)), "a gap after each row"
    assert not is_row_major((2, 3), (0, 1)), "one row, expanded"


def rezip(
    data: bytes, method: int = zipfile.ZIP_STORED, change: Callable[[dict[str, bytes]], object] | None = None
) -> bytes:
    """The archive as another zip writer would have stored it, its members changed by `change`."""
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        members = {name: old.read(name) for name in old.namelist()}
    if change is not None:
        change(members)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as new:
        for name, content in members.items():
            new.writestr(name, content)
    return stream.getvalue()


def test_archives_of_older_torch_are_read() -> None:
    def as_torch_1_6(members: dict[str, bytes]) -> None:
        for name in list(members):
            content = members.pop(name)
            if name.split("/", 1)[1] in ("data.pkl", "data/0", "version"):
                members[name.replace("archive", "old_name")] = content

    tensor = raw_tensor("bfloat16", (3, 4))
    data = rezip(saved(tensor), change=as_torch_1_6)
    found = locate(data, BF16, (3, 4))
    assert data[found.data_offset :][: found.nbytes] == raw_bytes(tensor)


def test_a_checksum_of_zero_is_not_recorded() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(raw_tensor("bfloat16", (3, 4)))
    finally:
        torch.serialization.set_crc32_options(before)
    assert locate(data, BF16, (3, 4)).record.crc is None
    assert locate(saved(torch.empty(0))).record.crc == 0


def test_a_checksum_of_zero_in_our_own_frame_is_not_recorded() -> None:
    data = archive_frame(BF16, (2,)).head + b"abcd" + archive_frame(BF16, (2,)).build_tail(0)
    assert locate(data, BF16, (2,)).record.crc is None


def test_a_tree_of_tensors_opens_with_stand_ins() -> None:
    base = torch.zeros(4)
    data = saved({"a": base, "b": base[1:], "n": {"c": [torch.ones(2)]}})
    archive = open_archive(reader(data), 0, len(data), "x")
    assert archive.tree["a"].storage.key == archive.tree["b"].storage.key == "0"
    assert archive.tree["n"]["c"][0].storage.key == "1"
    assert [archive.records[key].nbytes for key in ("0", "1")] == [16, 8]


def tar(_: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        file.addfile(tarfile.TarInfo("storages"))
    return stream.getvalue()


def scripted(_: torch.Tensor) -> bytes:
    return rezip(saved(torch.zeros(2)), change=lambda members: members.update({"archive/constants.pkl": b""}))


def big_endian(tensor: torch.Tensor) -> bytes:
    return rezip(saved(tensor), change=lambda members: members.update({"archive/byteorder": b"big"}))


UNSUPPORTED: list[tuple[str, Callable[[torch.Tensor], bytes]]] = [
    ("conj view", lambda t: saved(torch.zeros(2, dtype=torch.complex64).conj())),
    ("neg view", lambda t: saved(torch.zeros(2, dtype=torch.complex64).conj().imag)),
    ("sparse tensor", lambda t: saved(t.to_sparse())),
    ("quantized tensor", lambda t: saved(torch.quantize_per_tensor(t, 0.1, 0, torch.qint8))),
    ("meta tensor without bytes", lambda t: saved(t.to("meta"))),
    ("torch.bits8", lambda t: saved(t.view(torch.bits8))),
    ("compressed", lambda t: rezip(saved(t), zipfile.ZIP_DEFLATED)),
    ("big-endian", big_endian),
    ("TorchScript", scripted),
    ("before 1.6", lambda t: saved(t, _use_new_zipfile_serialization=False)),
    ("before 1.6", tar),
    ("safetensors payload", lambda t: (2).to_bytes(8, "little") + b"{}"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("reason", "make"), UNSUPPORTED, ids=[reason for reason, _ in UNSUPPORTED])
def test_what_is_understood_but_not_converted_is_named(reason: str, make: Callable[[torch.Tensor], bytes]) -> None:
    with pytest.raises(UnsupportedError, match=f"^x: .*{reason}"):
        locate(make(torch.eye(4)))


def without(name: str) -> Callable[[torch.Tensor], bytes]:
    return lambda t: rezip(saved(t), change=lambda members: members.pop(f"archive/{name}"))


def replaced(name: str, content: bytes) -> Callable[[torch.Tensor], bytes]:
    return lambda t: rezip(saved(t), change=lambda members: members.update({f"archive/{name}": content}))


def other_pickle(value: Any) -> Callable[[torch.Tensor], bytes]:
    return lambda t: replaced("data.pkl", zipfile.ZipFile(io.BytesIO(saved(value))).read("archive/data.pkl"))(t)


def damaged_checksum(tensor: torch.Tensor) -> bytes:
    data = bytearray(rezip(saved(tensor)))
    data[data.index(b"FloatStorage")] ^= 1
    return bytes(data)


DAMAGED: list[tuple[str, Callable[[torch.Tensor], bytes]]] = [
    ("not a torch archive", lambda t: b""),
    ("not a torch archive", lambda t: b"not an archive"),
    ("git lfs pull", lambda t: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    ("it is truncated", lambda t: saved(t)[:-30]),
    ("no data.pkl", without("data.pkl")),
    ("its storage '0' is missing", without("data/0")),
    ("unknown byte order", replaced("byteorder", b"middle")),
    ("storage has 60 bytes, expected 64", replaced("data/0", bytes(60))),
    ("storage has 64 bytes, expected 256", other_pickle(torch.zeros(64))),
    ("expected a tensor, found a dict", lambda t: saved({"w": t})),
    ("expected a tensor, found a NoneType", lambda t: saved(None)),
    ("wrong checksum of member 'archive/data.pkl'", damaged_checksum),
    ("refers to posix.system", replaced("data.pkl", b"\x80\x02cposix\nsystem\nX\2\0\0\0id\x85R.")),
]


@pytest.mark.parametrize(("reason", "make"), DAMAGED, ids=[reason for reason, _ in DAMAGED])
def test_what_is_damaged_is_named(reason: str, make: Callable[[torch.Tensor], bytes]) -> None:
    with pytest.raises(InputError, match=f"^x: .*{reason}"):
        locate(make(torch.eye(4)))


def test_a_view_beyond_its_storage_is_refused() -> None:
    pickled = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(4, 4)))).read("archive/data.pkl")
    wider = pickled.replace(b"K\4K\4\x86", b"K\4K\5\x86")
    assert wider != pickled
    with pytest.raises(InputError, match="refers to bytes 0 to 68 of its storage, which has 64"):
        locate(replaced("data.pkl", wider)(torch.zeros(4, 4)))


def test_every_cut_of_an_archive_is_refused() -> None:
    data = archive(raw_tensor("bfloat16", (3, 5)))
    for size in range(len(data)):
        with pytest.raises(CkptxError):
            locate(data[:size])
        with pytest.raises(CkptxError):
            locate(data[:size], BF16, (3, 5))


ARCHIVES = [
    archive(raw_tensor("bfloat16", (3, 5))),
    saved(raw_tensor("float32", (6, 4)).t()),
    rezip(saved(raw_tensor("int64", (4,)))),
]


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_damage_never_escapes_as_another_error(data: st.DataObject) -> None:
    sample = bytearray(data.draw(st.sampled_from(ARCHIVES)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(sample) - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from([0, 1, 255, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1]))
        sample[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")[: len(sample) - at]
    try:
        found = locate(bytes(sample))
    except CkptxError:
        return
    assert 0 <= found.data_offset <= found.data_offset + found.nbytes <= len(sample)


def test_whatever_the_directory_says_what_torch_reads_is_read() -> None:
    """Every byte of the zip directory, changed in turn: refused, or found where torch finds it, or torch refuses it.

    On the old code `external attributes 0x10` was read, where torch loads memory that nobody wrote.
    """
    values = raw_tensor("float32", (3, 5))
    whole = rezip(saved(values))
    begin, agreed, refused = whole.index(b"PK\1\2"), 0, 0
    for at in range(begin, len(whole)):
        for changed in {0, 1, 0x10, 0xFF, whole[at] ^ 0x80} - {whole[at]}:
            sample = whole[:at] + bytes([changed]) + whole[at + 1 :]
            try:
                found = locate(sample)
            except CkptxError:
                refused += 1
                continue
            try:
                read = torch.load(io.BytesIO(sample), weights_only=True)
            except Exception:  # torch refuses it, for whatever reason
                continue
            agreed += 1
            ours = sample[found.data_offset : found.data_offset + found.nbytes]
            assert ours == raw_bytes(read), f"byte {at - begin} of the directory, {changed}"
    assert agreed > 100 and refused > 100


def test_what_is_alike_in_many_archives_is_made_once() -> None:
    before = torch_zip._build_parts.cache_info().misses
    tails = {archive_frame(BF16, (2039, 761)).build_tail(crc) for crc in range(1000)}
    heads = {archive_frame(BF16, (2039, 761)).head for _ in range(1000)}
    assert (len(heads), len(tails)) == (1, 1000)
    assert torch_zip._build_parts.cache_info().misses == before + 1


@pytest.mark.parametrize("name", ["BF16", "F32", "U16", "F4"])
@pytest.mark.parametrize("shape", [(2, 6), (0, 4), (70_000, 2)])
def test_a_frame_is_the_archive_without_its_elements(name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES_BY_NAME[name]
    sizes = dtype.to_torch_elements(shape)
    frame, crc = archive_frame(dtype, shape), 7 if prod(shape) else 0
    data = b"e" * dtype.nbytes(prod(shape))
    written = frame.head + data + frame.build_tail(crc)
    assert len(written) == len(frame.head) + len(data) + frame.tail_nbytes == archive_length(dtype, shape)
    for found in (locate(written), locate(written, dtype, shape)):
        assert found[:5] == (dtype, sizes, None, len(frame.head), len(data)) and found.record.crc == crc
    before, behind = frame.tail_around_crc
    assert frame.build_tail(crc).startswith(before + crc.to_bytes(4, "little") + behind if before else b"PK\3\4")
