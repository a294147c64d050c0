"""Read and write `torch.save` archives: zip files whose members are stored, not deflated.

    data.pkl  .format_version  .storage_alignment  byteorder  data/0  version  .data/serialization_id  | directory | end

All members are under `archive/`. `data.pkl` describes a tensor as a strided view of the storage `data/0`, whose bytes,
the payload, are raw and little-endian. The bytes of every member, after its header, start at a multiple of 64 bytes
from the start of the archive. CRC and size of a member follow its bytes (a data descriptor), so an archive is written
front to back, and its length depends on dtype and shape only. From 4 GiB on, sizes and offsets move to zip64 fields.

`shape` counts elements of the dtype. `torch_shape` and `strides`, as in `data.pkl`, count torch elements: pairs of
elements for F4, the elements themselves for any other dtype.

Writing produces the bytes of torch 2.13. Reading supports any zip-based `torch.save` (since torch 1.6): first by
comparing with the bytes that would be written for the expected dtype and shape, else by following the zip directory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from pickle import encode_long
from typing import Any, NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import ArchiveFrame, Record
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.torch_archive.unpickle import TensorRef, UnsupportedObject, load_torch
from ckptx.formats.torch_archive.zip_directory import (
    CENTRAL,
    END,
    END64,
    LOCAL,
    LOCATOR,
    ZIP32,
    ReadBytes,
    damaged_error,
    data_begin,
    read_directory,
    read_member,
)
from ckptx.untrusted.limits import MAX_PICKLE_BYTES

_ALIGNMENT = 64  # bytes
_UTF8 = 0x0800  # zip flag: the name is UTF-8
_DESCRIPTOR = 0x0008  # zip flag: a data descriptor follows the data

# The member `.data/serialization_id` has 40 digits. The first 20 are a hash of the member names, which are the same in
# every archive of one tensor, the last 20 a hash of the checksums.
_SERIALIZATION_ID = b"15728199511854643026"
_SERIALIZATION_CRC = zlib.crc32(_SERIALIZATION_ID)
_ID_LENGTH, _ID_DIGITS = 40, 20
_SMALL_MEMBER_NBYTES = 1 << 12  # limit for members whose checksum is checked although ckptx does not need them
_CRC_NBYTES = 4


class _ArchiveParts(NamedTuple):
    """All bytes of an archive except the payload and what depends on its checksum.

    Attributes:
        head: Bytes before the payload.
        tail_parts: Parts of the bytes after the payload. Between them go, in this order: the CRC-32 of the payload (in
            its data descriptor, which an empty payload lacks), the last 20 digits of `.data/serialization_id`, the
            CRC-32 of that member (in its data descriptor), and both CRC-32 again (in the directory).
        nbytes: Size of the payload in bytes.
        length: Size of the whole archive in bytes.
        id_hash: Hash of the checksums of the members before the payload, for `.data/serialization_id`.
        descriptor_nbytes: Size of the data descriptor of the payload in bytes; 0 for an empty payload.
    """

    head: bytes
    tail_parts: tuple[bytes, bytes, bytes, bytes, bytes, bytes]
    nbytes: int
    length: int
    id_hash: int
    descriptor_nbytes: int


def archive_length(dtype: DType, shape: Shape) -> int:
    """Return the length in bytes of the archive of a row-major tensor."""
    return _build_parts(dtype, dtype.to_torch_elements(shape)).length


@lru_cache(maxsize=4096)
def archive_frame(dtype: DType, shape: Shape) -> ArchiveFrame:
    """Return the bytes around the elements in the archive of a row-major tensor."""
    parts = _build_parts(dtype, dtype.to_torch_elements(shape))
    bytes_around_crc = (b"", b"")
    if parts.nbytes:
        sizes_nbytes = parts.descriptor_nbytes - 4 - _CRC_NBYTES  # a data descriptor is: signature, CRC-32, two sizes
        bytes_around_crc = parts.tail_parts[0], parts.tail_parts[1][:sizes_nbytes]
    return ArchiveFrame(
        parts.head, partial(_tail, parts), parts.length - len(parts.head) - parts.nbytes, bytes_around_crc
    )


def _tail(parts: _ArchiveParts, crc: int) -> bytes:
    """Return the bytes after the payload. `crc` is the CRC-32 of the payload; 0 for an empty one."""
    first, second, third, fourth, fifth, sixth = parts.tail_parts
    digits = b"%020d" % _combine_hash(
        _combine_hash(parts.id_hash, crc) if parts.nbytes else parts.id_hash, _VERSION_CRC
    )
    id_crc = zlib.crc32(digits, _SERIALIZATION_CRC).to_bytes(_CRC_NBYTES, "little")
    payload_crc = crc.to_bytes(_CRC_NBYTES, "little")
    descriptor_crc = payload_crc if parts.nbytes else b""
    return b"".join((first, descriptor_crc, second, digits, third, id_crc, fourth, payload_crc, fifth, id_crc, sixth))


_CONSTANTS = (
    (b"archive/.format_version", b"1"),
    (b"archive/.storage_alignment", b"64"),
    (b"archive/byteorder", b"little"),
)
_VERSION = (b"archive/version", b"3\n")
_VERSION_CRC = zlib.crc32(_VERSION[1])


@lru_cache(maxsize=4096)  # Some 3 KiB each; a checkpoint has a few dozen pairs of dtype and shape.
def _build_parts(dtype: DType, torch_shape: Shape) -> _ArchiveParts:
    """Build the archive of a row-major tensor without its payload, in the order of the members in the module."""
    nbytes = prod(torch_shape) * dtype.itemsize
    central: list[bytes] = []
    head = b""
    id_hash = 0
    for name, data in ((b"archive/data.pkl", _tensor_pickle(dtype, torch_shape)), *_CONSTANTS):
        crc = zlib.crc32(data)
        id_hash = _combine_hash(id_hash, crc)
        central.append(_central_header(name, crc, len(data), len(head)))
        head += _local_header(name, len(data), len(head)) + data + _descriptor(crc, len(data), len(head))

    offset = len(head)
    head += _local_header(b"archive/data/0", nbytes, offset)
    payload_central = _central_header(b"archive/data/0", 0, nbytes, offset)
    payload_descriptor = _descriptor(0, nbytes, offset)
    name, data = _VERSION
    offset = len(head) + nbytes + len(payload_descriptor)
    central_version = _central_header(name, _VERSION_CRC, len(data), offset)
    version = _local_header(name, len(data), offset) + data + _descriptor(_VERSION_CRC, len(data), offset)
    offset += len(version)
    name = b"archive/.data/serialization_id"
    id_header = _local_header(name, _ID_LENGTH, offset)
    id_central = _central_header(name, 0, _ID_LENGTH, offset)
    id_after = _descriptor(0, _ID_LENGTH, offset)
    offset += len(id_header) + _ID_LENGTH + len(id_after)

    tail_parts = (
        payload_descriptor[:4],
        payload_descriptor[8:] + version + id_header + _SERIALIZATION_ID,
        id_after[:4],
        id_after[8:] + b"".join(central) + payload_central[:16],
        payload_central[20:] + central_version + id_central[:16],
        id_central[20:]
        + _end_records(7, sum(map(len, (*central, payload_central, central_version, id_central))), offset),
    )
    crc_count = 4 if nbytes else 3  # payload and id, each in its data descriptor and in the directory
    tail_nbytes = sum(map(len, tail_parts)) + crc_count * _CRC_NBYTES + _ID_DIGITS
    length = len(head) + nbytes + tail_nbytes
    return _ArchiveParts(head, tail_parts, nbytes, length, id_hash, len(payload_descriptor))


def _combine_hash(seed: int, crc: int) -> int:
    """Return `c10::hash_combine` of a 64-bit hash and the CRC-32 of the next member."""
    return seed ^ ((crc + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFFFFFFFFFFFFFF)


def _tensor_pickle(dtype: DType, torch_shape: Shape) -> bytes:
    """Return `data.pkl` of a row-major tensor: pickle protocol 2, every object memoized in the order it is written."""
    numel = prod(torch_shape)
    is_legacy = dtype.storage_class is not None
    kind = f"torch\n{dtype.storage_class}" if is_legacy else "torch.storage\nUntypedStorage"
    strides = []
    step = 1
    for size in reversed(torch_shape):
        strides.append(step)
        step *= max(size, 1)
    memo = iter(range(5, 256))
    parts = [
        f"\x80\x02ctorch._utils\n_rebuild_tensor_v{2 if is_legacy else 3}\nq\0((".encode("latin-1"),
        f"X\7\0\0\0storageq\1c{kind}\nq\2X\1\0\0\0000q\3X\3\0\0\0cpuq\4".encode("latin-1"),
        pickled_int(numel if is_legacy else numel * dtype.itemsize),
        b"tq%cQK\0" % next(memo),
    ]
    for numbers in (torch_shape, tuple(reversed(strides))):
        parts.append(_pickled_tuple(numbers))
        if numbers:  # The empty tuple is a singleton that a pickler never memoizes.
            parts.append(b"q%c" % next(memo))
    parts.append(b"\x89ccollections\nOrderedDict\nq%c)Rq%c" % (next(memo), next(memo)))
    if not is_legacy:
        parts.append(b"ctorch\n%s\nq%c" % (str(dtype.torch_name).encode(), next(memo)))
    parts.append(b"tq%cRq%c." % (next(memo), next(memo)))
    return b"".join(parts)


def _pickled_tuple(numbers: Shape) -> bytes:
    body = b"".join(map(pickled_int, numbers))
    if len(numbers) > 3:
        return b"(" + body + b"t"
    return body + (b")", b"\x85", b"\x86", b"\x87")[len(numbers)]


def pickled_int(number: int) -> bytes:
    """Return the opcode and argument of an int, as in pickle protocol 2 and later."""
    if 0 <= number < 1 << 8:
        return b"K%c" % number
    if 0 <= number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    data = encode_long(number)
    return b"\x8a%c" % len(data) + data


def _local_header(name: bytes, size: int, offset: int) -> bytes:
    """Return the header at `offset` in the archive of a member of `size` bytes, padded so that its data is aligned."""
    extra = _zip64_extra(size, 0, offset)
    padding = -(offset + LOCAL.size + len(name) + len(extra) + 4) % _ALIGNMENT
    extra += b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    flags = _UTF8 | (_DESCRIPTOR if size else 0)
    return LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _zip64_extra(size: int, compressed_size: int, offset: int) -> bytes:
    """Return the zip64 field of a header, empty if 32 bits suffice. `compressed_size` is 0 in a local header."""
    fields = (*((size, compressed_size) if size >= ZIP32 else ()), *((offset,) if offset >= ZIP32 else ()))
    return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""


def _descriptor(crc: int, size: int, offset: int) -> bytes:
    """Return the data descriptor of a member whose header is at `offset`; empty for a member without data."""
    if not size:
        return b""
    wide = size >= ZIP32 or offset >= ZIP32
    return struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\x08", crc, size, size)


def _central_header(name: bytes, crc: int, size: int, offset: int) -> bytes:
    """Return the directory entry of a member of `size` bytes whose header is at `offset`."""
    extra = _zip64_extra(size, size, offset)
    flags = _UTF8 | (_DESCRIPTOR if size else 0)
    short = min(size, ZIP32)
    sizes = (crc, short, short, len(name), len(extra))
    fixed = CENTRAL.pack(b"PK\1\2", 0, 0, flags, 0, 0, 0, *sizes, 0, 0, 0, 0, min(offset, ZIP32))
    return fixed + name + extra


def _end_records(count: int, size: int, offset: int) -> bytes:
    """Return the bytes after a directory of `count` members, which has `size` bytes and begins at `offset`."""
    return (
        END64.pack(b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, offset)
        + LOCATOR.pack(b"PK\6\7", 0, offset + size, 1)
        + END.pack(b"PK\5\6", 0, 0, count, count, size, min(offset, ZIP32), 0)
    )


class Payload(NamedTuple):
    """Location of the elements of an archived tensor.

    Attributes:
        dtype: Dtype recorded in the archive.
        torch_shape: Shape in torch elements: for F4 pairs of elements.
        strides: Strides in torch elements; None if the elements are row-major.
        data_offset: Absolute position of the first element in the file, in bytes.
        nbytes: Bytes from there to the end of the last element.
        record: Record of the storage that contains the elements.
    """

    dtype: DType
    torch_shape: Shape
    strides: Shape | None
    data_offset: int
    nbytes: int
    record: Record


class Archive(NamedTuple):
    """An opened `torch.save` archive.

    Attributes:
        tree: Pickled object, with stand-ins for tensors.
        records: Storage key -> record of the storage.
    """

    tree: Any
    records: dict[str, Record]


def locate_payload(
    read: ReadBytes, offset: int, length: int, where: str, dtype: DType | None = None, shape: Shape = ()
) -> Payload:
    """Locate the elements of the tensor archived at `offset`.

    Args:
        read: Reads (offset, nbytes) of the file.
        offset: First byte of the archive.
        length: Bytes of the archive.
        where: Subject of error messages.
        dtype: Likely dtype; None if unknown. If dtype and shape are right, an archive of torch 2.13 or ckptx takes only
            two reads. They are not checked: compare them with those of the result.
        shape: Likely shape, in elements of `dtype`.

    Raises:
        InputError: The archive is damaged or contains no tensor.
        UnsupportedError: The archive is valid, but of a kind that is not converted.
    """
    if dtype is not None:
        found = _locate_expected(read, offset, length, dtype, shape)
        if found is not None:
            return found
    archive = open_archive(read, offset, length, where)
    if isinstance(archive.tree, TensorRef | UnsupportedObject):
        payload = locate_tensor(archive.tree, archive.records, where)
        _check_descriptor(read, offset + length, payload.record, where)
        return payload
    raise InputError(f"{where}: expected a tensor, found a {type(archive.tree).__name__}; the checkpoint is damaged")


def _locate_expected(read: ReadBytes, offset: int, length: int, dtype: DType, shape: Shape) -> Payload | None:
    """Return the payload if the bytes before and after it are those that would be written; else None.

    The directory after the payload is compared too, as torch opens no archive whose directory is damaged.
    """
    torch_shape = dtype.to_torch_elements(shape)
    parts = _build_parts(dtype, torch_shape)
    if length != parts.length or read(offset, len(parts.head)) != parts.head:
        return None
    data = offset + len(parts.head)
    tail = read(data + parts.nbytes, length - len(parts.head) - parts.nbytes)
    crc = int.from_bytes(tail[4:8], "little") if parts.nbytes else 0
    if tail != _tail(parts, crc):
        return None
    # For a storage that is not empty, torch writes a CRC of 0 if it is configured not to compute one.
    record = Record(data, parts.nbytes, (crc or None) if parts.nbytes else 0)
    return Payload(dtype, torch_shape, None, data, parts.nbytes, record)


def _check_descriptor(read: ReadBytes, end: int, record: Record, where: str) -> None:
    """Refuse a record whose data descriptor, if it has one, has another CRC-32 than the directory.

    `end` is the end of the archive in the file.
    """
    position = record.offset + record.nbytes
    if record.crc and position + 4 + _CRC_NBYTES <= end:
        descriptor = read(position, 4 + _CRC_NBYTES)
        if descriptor[:4] == b"PK\7\x08" and descriptor[4:] != record.crc.to_bytes(_CRC_NBYTES, "little"):
            raise damaged_error(where, "the checksum after its elements is not that in its directory")


def locate_tensor(tensor: TensorRef | UnsupportedObject, records: dict[str, Record], where: str) -> Payload:
    """Locate the elements of a tensor in the storages of its archive.

    Raises:
        InputError: Its storage is missing, has the wrong length, or ends before its last element.
        UnsupportedError: It is a conjugate or negative view, or not a dense tensor.
    """
    if isinstance(tensor, UnsupportedObject):
        raise UnsupportedError(f"{where}: {tensor.kind}, which is not converted; save it as a plain dense tensor")
    if tensor.flags:
        raise UnsupportedError(
            f"{where}: {' and '.join(tensor.flags)} view, whose stored bytes are not its values; "
            "save it with .resolve_conj().resolve_neg()"
        )
    record = records.get(tensor.storage.key)
    if record is None:
        raise InputError(
            f"{where}: its storage {tensor.storage.key[:40]!r} is missing; the file is damaged, copy it again"
        )
    if record.nbytes != tensor.storage.nbytes:
        raise InputError(
            f"{where}: its storage has {record.nbytes} bytes, expected {tensor.storage.nbytes}; the file is damaged, "
            "copy it again"
        )
    itemsize = tensor.dtype.itemsize
    extents = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)]
    span = (sum(extents) + 1) * itemsize if prod(tensor.shape) else 0
    first = tensor.offset * itemsize if span else 0
    if first + span > record.nbytes:
        raise InputError(
            f"{where}: refers to bytes {first} to {first + span} of its storage, which has {record.nbytes}; "
            "the file is damaged, copy it again"
        )
    strides = None if is_row_major(tensor.shape, tensor.strides) else tensor.strides
    return Payload(tensor.dtype, tensor.shape, strides, record.offset + first, span, record)


def is_row_major(shape: Shape, strides: Shape) -> bool:
    """Return True if the elements are in order without gaps; strides of dims of size 1 do not matter."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return not prod(shape)
        step *= size
    return True


def open_archive(
    read: ReadBytes, offset: int, length: int, where: str, load_tree: Callable[[bytes, str], Any] = load_torch
) -> Archive:
    """Open any archive of `torch.save`: its pickled tree with stand-ins, and the location of its storages.

    Args:
        read: Reads (offset, nbytes) of the file.
        offset: First byte of the archive.
        length: Bytes of the archive.
        where: Subject of error messages.
        load_tree: Parses the pickle, called as `load_tree(data, where)`; its result becomes `Archive.tree`. The default
            allows only the classes and functions that occur in a convertible checkpoint.

    Raises:
        InputError: The archive is damaged.
        UnsupportedError: It has the format before torch 1.6, TorchScript code, big-endian data, deflated members or a
            safetensors payload.
    """

    def read_zip(position: int, nbytes: int) -> bytes:
        if position < 0 or position + nbytes > length:
            raise damaged_error(where, f"refers to bytes {position} to {position + nbytes} of {length}")
        return read(offset + position, nbytes)

    _refuse_other_formats(read_zip(0, min(length, 512)), where)
    members = read_directory(read_zip, length, where)
    prefix = next(iter(members), "").partition("/")[0] + "/"
    if f"{prefix}constants.pkl" in members:
        raise UnsupportedError(f"{where}: TorchScript archive, which is not converted; save its state_dict()")
    order = read_member(read_zip, members, f"{prefix}byteorder", where, 64) or b"little"
    if order == b"big":
        raise UnsupportedError(
            f"{where}: big-endian archive, which is not converted; save it on a little-endian machine"
        )
    if order != b"little":
        raise damaged_error(where, "unknown byte order")
    pickled = read_member(read_zip, members, f"{prefix}data.pkl", where, MAX_PICKLE_BYTES)
    if pickled is None:
        raise damaged_error(where, "no data.pkl inside")
    records = {}
    for name, member in members.items():
        if name.startswith(f"{prefix}data/"):
            begin = data_begin(read_zip, name, member, where)
            crc = member.crc or (None if member.nbytes else 0)
            # The key of a storage is what follows `data/`.
            records[name[len(prefix) + 5 :]] = Record(offset + begin, member.nbytes, crc)
        elif member.nbytes <= _SMALL_MEMBER_NBYTES:
            read_member(read_zip, members, name, where, _SMALL_MEMBER_NBYTES)  # torch reads some, such as the version
    version = read_member(read_zip, members, f"{prefix}version", where, _SMALL_MEMBER_NBYTES)
    if version is None:
        version = read_member(read_zip, members, f"{prefix}.data/version", where, _SMALL_MEMBER_NBYTES)
    if version is None:
        raise damaged_error(where, "no record 'version', without which torch does not open it")
    _refuse_overlaps(records, where)
    return Archive(load_tree(pickled, where), records)


def _refuse_overlaps(records: dict[str, Record], where: str) -> None:
    """Refuse overlapping storages, with which a small archive could become an output of any size."""
    end, previous_key = 0, ""
    for offset, nbytes, key in sorted((record.offset, record.nbytes, key) for key, record in records.items()):
        if offset < end and nbytes:
            raise damaged_error(where, f"storages {previous_key[:40]!r} and {key[:40]!r} share bytes")
        end, previous_key = max(end, offset + nbytes), key


def _refuse_other_formats(head: bytes, where: str) -> None:
    if head.startswith(b"PK\3\4"):
        return
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{where}: a git-lfs pointer, not the data; run `git lfs pull`")
    if head.startswith(b"\x80\x02\x8a\x0a") or head[257:262] == b"ustar":
        raise UnsupportedError(f"{where}: written by torch before 1.6 (no zip); load and save it again with torch")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        raise UnsupportedError(
            f"{where}: has a safetensors payload, which is not supported; save it with SerializationFormat.TORCH_SAVE"
        )
    raise InputError(f"{where}: not a torch archive (begins with {head[:8].hex(' ') or 'nothing'}); copy it again")
