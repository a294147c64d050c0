"""Digests of files that hold no state in a format of torch: arrays of numpy, archives by their members, and any bytes.

    .npy            magic and version, the length of a header, the header: dtype, order and shape | the elements
    .npz            a zip of them. A zip has times in it, so that its members are compared and not its bytes
    .tar            in the same way
    anything else   its bytes

Each is read in pieces, so that the size does not matter. An array of objects is a pickle, of which nothing is executed.
"""

from __future__ import annotations

import ast
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from ckptx.errors import CkptxError
from ckptx.formats.torch_archive.pickle_graph import read_graph
from ckptx.robustness_suite.canonical import ValueDigests
from ckptx.robustness_suite.pickled_kinds import PickleNormalizer
from ckptx.storage.files import open_regular
from ckptx.transfer.digest import TreeDigest
from ckptx.untrusted.limits import MAX_DIMS, MAX_PICKLE_BYTES, MAX_TENSORS

FILE_PREFIX = "file: "  # what the description of a file begins with that is compared by its bytes
_BLOCK_BYTES = 1 << 20
_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 1 << 16
_HEADER_KEYS = {"descr", "fortran_order", "shape"}


class Content(NamedTuple):
    """Something in a file that is compared.

    Attributes:
        name: Its name in the file; empty for the whole file.
        text: Text that is compared.
    """

    name: str
    text: str


class _ByteSource(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


def digest_of_file(path: Path) -> str:
    """The length and digest of the bytes of a file.

    Raises:
        InputError: It cannot be read.
    """
    with open_regular_file(path) as file:
        return _describe_bytes(file)


def contents_of_array(path: Path) -> Iterator[Content]:
    """The array of a `.npy` file, or the bytes of one that is none."""
    with open_regular_file(path) as file:
        yield Content("", _describe_array(file, str(path)))


def contents_of_zip(path: Path) -> Iterator[Content]:
    """The members of a zip, arrays among them by their elements; the bytes of one that cannot be read."""
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = path.stat().st_size
            if len(members) > MAX_TENSORS or sum(each.compress_size for each in members) > size:
                raise zipfile.BadZipFile  # members that lie over each other
            if any(each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for each in members):
                raise zipfile.BadZipFile
            contents = []
            for member in members:
                with archive.open(member) as source:
                    name = member.filename.removesuffix(".npy")
                    contents.append(Content(name, _describe_array(source, f"{path}: {name}")))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, ValueError, zlib.error):
        contents = [Content("", digest_of_file(path))]
    yield from contents


def is_torch_archive(path: Path) -> bool:
    """True of a zip that has the pickle of `torch.save` in it."""
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.count("/") == 1 and name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def contents_of_tar(path: Path) -> Iterator[Content]:
    """The members of a tar by their contents, without times and owners; the bytes of one that cannot be read."""
    try:
        with open_regular_file(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            contents = []
            for count, member in enumerate(archive):
                if count > MAX_TENSORS or member.issparse():
                    raise tarfile.ReadError
                source = archive.extractfile(member) if member.isreg() else None
                text = (
                    f"{FILE_PREFIX}of type {member.type!r} to {member.linkname!r}"
                    if source is None
                    else _describe_array(source, "")
                )
                contents.append(Content(member.name, text))
    except (tarfile.TarError, OSError, EOFError, ValueError):
        contents = [Content("", digest_of_file(path))]
    yield from contents


def open_regular_file(path: Path) -> BinaryIO:
    """A regular file, opened for reading.

    Raises:
        InputError: It is missing, no regular file, or cannot be read.
    """
    return open(open_regular(path), "rb")


# -------------------------------------------------------------------------------------------------------------- arrays


class _Header(NamedTuple):
    descr: object
    is_fortran: bool
    shape: tuple[int, ...]


def _describe_array(file: _ByteSource, subject: str) -> str:
    """An array of numpy by its elements; anything else by its bytes."""
    start = file.read(len(_MAGIC) + 6)
    header, raw = _parse_header(start, file)
    if header is None:
        return _describe_bytes(file, raw)
    text = f"array {header.descr!r} {list(header.shape)}"
    count = prod(header.shape)
    if "|O" in repr(header.descr):
        return f"{text} {_digest_objects(file, subject)}"
    if header.is_fortran and len(header.shape) > 1:
        data = file.read(MAX_PICKLE_BYTES + 1)
        if count and data and not len(data) % count and len(data) <= MAX_PICKLE_BYTES:
            elements = np.frombuffer(data, f"V{len(data) // count}").reshape(header.shape, order="F")
            return f"{text} {_digest_stream(file, elements.tobytes(order='C'))[1]}"
        return f"{text} in Fortran order {_digest_stream(file, data)[1]}"
    return f"{text} {_digest_stream(file, b'')[1]}"


def _parse_header(start: bytes, file: _ByteSource) -> tuple[_Header | None, bytes]:
    """The header of an array, or None and what was read."""
    if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + 6 or start[6] not in (1, 2, 3):
        return None, start
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(start[8 : 8 + width], "little") - (4 - width)
    if not 0 < length <= _MAX_HEADER_BYTES:
        return None, start
    body = file.read(length)
    text = (start[8 + width :] + body).decode("utf-8" if start[6] == 3 else "latin-1", "replace")
    try:
        fields = ast.literal_eval(text.strip())
        assert isinstance(fields, dict) and fields.keys() == _HEADER_KEYS
        shape, is_fortran = fields["shape"], fields["fortran_order"]
        assert isinstance(shape, tuple) and len(shape) <= MAX_DIMS and type(is_fortran) is bool
        assert all(type(size) is int and size >= 0 for size in shape)
    except (AssertionError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None, start + body
    return _Header(fields["descr"], is_fortran, shape), start + body


def _digest_objects(file: _ByteSource, subject: str) -> str:
    """An array of objects by the values in its pickle."""
    data = file.read(MAX_PICKLE_BYTES + 1)
    if len(data) <= MAX_PICKLE_BYTES:
        try:
            graph = read_graph(data, subject)
            if graph.end == len(data) and not graph.dropped:
                return ValueDigests(subject, PickleNormalizer(subject, {}, lambda _: None).normalize, repr).hex_digest(
                    graph.value
                )
        except CkptxError:
            pass
    return _digest_stream(file, data)[1]


def _describe_bytes(file: _ByteSource, prefix: bytes = b"") -> str:
    count, digest = _digest_stream(file, prefix)
    return f"{FILE_PREFIX}{count:,} bytes {digest}"


def _digest_stream(file: _ByteSource, prefix: bytes) -> tuple[int, str]:
    """The number and the digest of bytes that were read and of those that follow."""
    digest, count, pending = TreeDigest(), 0, prefix
    while True:
        block = pending or file.read(_BLOCK_BYTES)
        pending = b""
        if not block:
            break
        count += len(block)
        view = memoryview(block)
        while len(view):
            head = view[: digest.leaf_remaining]
            digest.update(head)
            view = view[len(head) :]
    digest.update(memoryview(b""), is_last=True)
    return count, digest.digest().hex()
