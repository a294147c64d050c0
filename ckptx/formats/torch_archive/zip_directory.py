"""Parse the directory of a zip file with stored members: their names, sizes and positions.

The format is that of PKWARE's zip application note (4.3.6 overall format, 4.5.3 zip64). Positions are relative to the
first byte of the zip, which may be anywhere in a file; `read_zip` reads at a position and refuses any outside the zip.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from ckptx.errors import InputError, UnsupportedError

ReadBytes = Callable[[int, int], bytes]  # position and number of bytes -> bytes; raises if any is outside the zip

ZIP32 = 0xFFFFFFFF  # Sizes and offsets from this value on are in a zip64 field.

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")

# Bytes. The end record may be followed by a comment of 64 KiB. Larger directories than the limit are refused.
_END_SEARCH = 22 + 0xFFFF
_DIRECTORY_LIMIT = 1 << 26
_UNREADABLE_FLAGS = 0x2061  # encryption, patches and a masked header, which torch does not read
_DEFLATED = 8
_IS_DIRECTORY = 0x10  # file attribute of MS-DOS, which zip uses


class Member(NamedTuple):
    """An entry of the zip directory.

    Attributes:
        method: Compression method; 0 for stored data.
        crc: CRC-32 of the data; 0 if none was computed.
        nbytes: Size of the data in bytes.
        header_offset: Position of the local header, relative to the first byte of the zip.
    """

    method: int
    crc: int
    nbytes: int
    header_offset: int


def damaged_error(where: str, reason: str) -> InputError:
    """Return the error for an inconsistent archive."""
    return InputError(f"{where}: damaged torch archive: {reason}; copy or download it again")


def read_directory(read_zip: ReadBytes, length: int, where: str) -> dict[str, Member]:
    """Return all members by name, in the order of the zip directory.

    Args:
        read_zip: Reads bytes of the zip.
        length: Size of the zip in bytes.
        where: Subject of error messages.

    Raises:
        InputError: There is no directory, or it is damaged.
    """
    position, tail = -1, b""
    for search_bytes in (1 << 10, _END_SEARCH):
        begin = max(length - search_bytes, 0)
        tail = read_zip(begin, length - begin)
        position = tail.rfind(b"PK\5\6")
        if position >= 0:
            break
    if position < 0 or position + END.size > len(tail):
        raise damaged_error(where, "no end record, it is truncated")
    disk, directory_disk, disk_count, count, size, begin_directory = END.unpack_from(tail, position)[1:7]
    position += begin
    if position >= LOCATOR.size:
        signature, _, end64_position, num_disks = LOCATOR.unpack(read_zip(position - LOCATOR.size, LOCATOR.size))
        if signature == b"PK\6\7":
            fields = END64.unpack(read_zip(end64_position, END64.size))
            disk, directory_disk, disk_count, count, size, begin_directory = fields[4:10]
            if fields[0] != b"PK\6\6" or fields[1] < END64.size - 12 or num_disks != 1:
                raise damaged_error(where, "no valid zip64 end record")
    if disk != directory_disk or disk > 1 or disk_count != count:
        raise damaged_error(where, f"its end record describes disk {disk} with {disk_count} of {count} members")
    if size > _DIRECTORY_LIMIT or count * CENTRAL.size > size:
        raise damaged_error(where, f"directory of {size} bytes for {count} members")
    return _parse_members(read_zip(begin_directory, size), count, where)


def _parse_members(directory: bytes, count: int, where: str) -> dict[str, Member]:
    members: dict[str, Member] = {}
    position = 0
    for _ in range(count):
        if position + CENTRAL.size > len(directory):
            raise damaged_error(where, "directory is truncated")
        fields = CENTRAL.unpack_from(directory, position)
        signature, flags, method, crc, stored_size, nbytes = fields[0], fields[3], fields[4], *fields[7:10]
        name_length, extra_length, header = fields[10], fields[11], fields[16]
        position += CENTRAL.size
        name = directory[position : position + name_length].decode("utf-8", "replace")
        extra = directory[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + fields[12]
        if ZIP32 in (nbytes, stored_size, header):
            nbytes, stored_size, header = _zip64_fields(extra, (nbytes, stored_size, header), where)
        is_stored = not method and stored_size == nbytes
        is_readable = not flags & _UNREADABLE_FLAGS and fields[13] <= 1 and (is_stored or method == _DEFLATED)
        if signature != b"PK\1\2" or name in members or not is_readable:
            raise damaged_error(where, f"directory entry {name[:60]!r} is invalid")
        if nbytes and fields[15] & _IS_DIRECTORY:
            # torch treats it as a directory, reads nothing, and loads uninitialized memory.
            raise damaged_error(where, f"member {name[:60]!r} of {nbytes} bytes is marked as a directory")
        members[name] = Member(method, crc, nbytes, header)
    if position != len(directory):
        raise damaged_error(where, f"its last directory entry ends at byte {position} of {len(directory)}")
    return members


def _zip64_fields(extra: bytes, fields: tuple[int, int, int], where: str) -> tuple[int, ...]:
    """Return size, stored size and header offset, with values from the zip64 block in place of those of `ZIP32`."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            wide = [value for (value,) in struct.iter_unpack("<Q", extra[position + 4 :][: size // 8 * 8])]
            if len(wide) >= fields.count(ZIP32):
                return tuple(wide.pop(0) if field == ZIP32 else field for field in fields)
        position += 4 + size
    raise damaged_error(where, "zip64 fields are missing")


def data_begin(read_zip: ReadBytes, name: str, member: Member, where: str) -> int:
    """Return the position of the first byte of a member's data, relative to the first byte of the zip.

    Raises:
        InputError: The member has no header, or its data extends beyond the archive.
        UnsupportedError: It is compressed.
    """
    if member.method:
        raise UnsupportedError(
            f"{where}: member {name[:60]!r} is compressed, which is not supported; save it again with torch.save"
        )
    fields = LOCAL.unpack(read_zip(member.header_offset, LOCAL.size))
    begin = member.header_offset + LOCAL.size + int(fields[9]) + int(fields[10])
    if fields[0] != b"PK\3\4":
        raise damaged_error(where, f"no header for member {name[:60]!r}")
    if read_zip(member.header_offset + LOCAL.size, int(fields[9])).decode("utf-8", "replace") != name:
        raise damaged_error(where, f"the header of member {name[:60]!r} has another name")
    read_zip(begin + member.nbytes, 0)  # raises if the data extends beyond the zip
    return begin


def read_member(read_zip: ReadBytes, members: dict[str, Member], name: str, where: str, limit: int) -> bytes | None:
    """Return the bytes of a small member, checked against its CRC-32 if it has one; None if there is no such member.

    Raises:
        InputError: They are damaged, or more than `limit`.
        UnsupportedError: They are compressed.
    """
    member = members.get(name)
    if member is None:
        return None
    begin = data_begin(read_zip, name, member, where)
    if member.nbytes > limit:
        raise damaged_error(where, f"member {name[:60]!r} has {member.nbytes} bytes, the limit is {limit}")
    data = read_zip(begin, member.nbytes)
    if member.crc and zlib.crc32(data) != member.crc:
        raise damaged_error(where, f"wrong checksum of member {name[:60]!r}")
    return data
