"""Digests of files that are not in a format of torch: numpy arrays, archives and other files.

    .npy            magic and version, length of the header, header (dtype, order, shape) | elements
    .npz            zip of .npy files. A zip contains timestamps, so its members are compared, not its bytes
    .tar            compared by its members, for the same reason
    other files     compared by their bytes

Files are read in blocks, so memory does not grow with the file size. An array of objects is a pickle; it is parsed, and
nothing in it is executed.
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
from ckptx.robustness_suite.pickle_normalizer import PickleNormalizer
from ckptx.robustness_suite.value_digests import ValueDigests
from ckptx.storage.files import open_regular
from ckptx.transfer.digest import TreeDigest
from ckptx.untrusted.limits import MAX_DIMS, MAX_PICKLE_BYTES, MAX_TENSORS

# Start of the description of an entry that is not split into values: size and digest of its bytes, or what it is.
FILE_PREFIX = "file: "
_BLOCK_BYTES = 1 << 20
_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 1 << 16
_HEADER_KEYS = {"descr", "fortran_order", "shape"}


class Content(NamedTuple):
    """A part of a file that is compared.

    Attributes:
        name: Name of an archive member; "" for the whole file.
        text: Description with dtype, shape and digest; equal contents have equal descriptions.
    """

    name: str
    text: str


class _ByteSource(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


def describe_file(path: Path) -> str:
    """Return a description of the bytes of a file: `FILE_PREFIX`, their number and digest.

    Raises:
        InputError: The file cannot be read.
    """
    with open_regular_file(path) as file:
        return _describe_bytes(file)


def contents_of_array(path: Path) -> Iterator[Content]:
    """Yield the contents of a `.npy` file: its array, or its bytes if it is not a valid array."""
    with open_regular_file(path) as file:
        yield Content("", _describe_array(file, str(path)))


def contents_of_zip(path: Path) -> Iterator[Content]:
    """Yield the members of a zip, `.npy` members as arrays; the bytes of the file if it is not a valid zip."""
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = path.stat().st_size
            if len(members) > MAX_TENSORS or sum(each.compress_size for each in members) > size:
                raise zipfile.BadZipFile  # overlapping members, as in a zip bomb
            if any(each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for each in members):
                raise zipfile.BadZipFile
            contents = []
            for member in members:
                with archive.open(member) as source:
                    name = member.filename.removesuffix(".npy")
                    contents.append(Content(name, _describe_array(source, f"{path}: {name}")))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, ValueError, zlib.error):
        contents = [Content("", describe_file(path))]
    yield from contents


def is_torch_archive(path: Path) -> bool:
    """Return True for a zip that contains the pickle of `torch.save`."""
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.count("/") == 1 and name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def contents_of_tar(path: Path) -> Iterator[Content]:
    """Yield the members of a tar by their contents, without timestamps and owners; its bytes if it is not valid."""
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
        contents = [Content("", describe_file(path))]
    yield from contents


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading in binary mode.

    Raises:
        InputError: The file is missing, not a regular file, or cannot be read.
    """
    return open(open_regular(path), "rb")


# -------------------------------------------------------------------------------------------------------------- arrays


class _Header(NamedTuple):
    descr: object
    is_fortran: bool
    shape: tuple[int, ...]


def _describe_array(file: _ByteSource, subject: str) -> str:
    """Return a description of a numpy array by its elements, or of any other data by its bytes."""
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
    """Return the header of an array, or None if it is not valid, and the bytes that were read.

    Args:
        start: Magic, version (2 bytes) and the next 4 bytes: the length of the header; in version 1 only 2 of them.
        file: File after `start`.
    """
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
    """Digest an array of objects: the values in its pickle, or its bytes if the pickle cannot be parsed."""
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
    """Return the number and hex digest of the bytes in `prefix`, which were read already, and in the rest of a file."""
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
