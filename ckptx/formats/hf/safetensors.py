"""The safetensors format: an 8-byte little-endian length, a JSON header of that length, then raw bytes.

    u64 n | {"__metadata__": {str: str}, NAME: {"dtype", "shape", "data_offsets": [begin, end)}, ...} | bytes

`data_offsets` count from the end of the header; together they cover the bytes exactly, without hole or overlap.
Source: the format section of the safetensors README. Headers are parsed here and not by the library because the errors
of the library name no tensor, and because restoring a checkpoint needs the exact bytes of its headers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from ckptx.catalog.dtype import DTYPES_BY_NAME, DType
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.untrusted.json_text import nesting_error, number_error, refuse_lone_surrogates
from ckptx.untrusted.limits import MAX_NUMEL_BITS, MAX_TENSORS, find_shape_fault

# Bytes. The library refuses longer headers, so no loader could open such a file.
MAX_HEADER = 100_000_000

_METADATA = "__metadata__"
_LFS_POINTER = b"version https://git-lfs"
_TENSOR_KEYS = {"dtype", "shape", "data_offsets"}

ReadBytes = Callable[[int, int], bytes]  # (offset, nbytes) -> exactly `nbytes` bytes of the file


class HeaderTensor(NamedTuple):
    """One tensor of a header.

    Attributes:
        name: Name of the tensor.
        dtype: Dtype of its elements.
        shape: Shape in elements.
        begin: Position of its first byte, counted from the beginning of the file.
        end: Position after its last byte, counted likewise.
    """

    name: str
    dtype: DType
    shape: Shape
    begin: int
    end: int


class Header(NamedTuple):
    """A parsed header.

    Attributes:
        tensors: Tensors in the order of their bytes.
        metadata: Contents of `__metadata__`; empty if the header has none.
        text: JSON text of the header, with padding.
    """

    tensors: list[HeaderTensor]
    metadata: dict[str, str]
    text: str


def parse_header(read: ReadBytes, size: int, where: str) -> Header:
    """Parse and check the header of one file.

    Args:
        read: Returns exactly `nbytes` bytes at `offset`, called as `read(offset, nbytes)`.
        size: Size of the file in bytes.
        where: The file, for error messages.

    Raises:
        InputError: The file is truncated, a git-lfs pointer, or its header breaks a rule of the format.
        UnsupportedError: A dtype is not one safetensors defines.
    """
    start = read(0, min(size, 64))
    if start.startswith(_LFS_POINTER):
        raise InputError(f"{where}: a git-lfs pointer, not the file itself; run `git lfs pull` or download it again")
    if start.startswith(b"PK\3\4"):
        raise InputError(f"{where}: a zip archive, as torch.save writes, not a safetensors file; rename it to .bin")
    if size < 10:
        raise InputError(
            f"{where}: has {size} bytes, a safetensors file has at least 10; the file is truncated, download it again"
        )
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER:
        raise InputError(
            f"{where}: header length is {length}, the limit is {MAX_HEADER}; the file is corrupt or not safetensors, "
            "copy it again"
        )
    if 8 + length > size:
        raise InputError(
            f"{where}: header ends at byte {8 + length}, but the file has {size}; the file is truncated, download it "
            "again"
        )
    raw = read(8, length)
    try:
        text = raw.decode("utf-8")
        if text.count('"dtype"') > MAX_TENSORS:
            raise InputError(f"{where}: header lists more than {MAX_TENSORS:,} tensors, the limit; split the file")
        parsed = json.loads(text)
    except RecursionError as error:
        raise nesting_error(where, "file") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: header is not JSON ({error}); the file is corrupt, copy it again") from error
    except ValueError as error:  # Python refuses numbers of more than 4,300 digits
        raise number_error(where, "file") from error
    if not text.startswith("{") or not isinstance(parsed, dict):
        raise InputError(f"{where}: header is not a JSON object; the file is corrupt, copy it again")
    refuse_lone_surrogates(text, where)
    metadata = parsed.pop("__metadata__", None)
    _refuse_duplicate_keys(text, len(parsed), where)
    kinds: dict[str, _DtypeAndShape] = {}
    tensors = [_parse_tensor(name, value, 8 + length, size, where, kinds) for name, value in parsed.items()]
    tensors.sort(key=itemgetter(3, 4))  # begin, end
    _check_coverage(tensors, 8 + length, size, where)
    return Header(tensors, _check_metadata(metadata, where), text)


def _refuse_duplicate_keys(text: str, count: int, where: str) -> None:
    """Refuse duplicate keys: Python's JSON parser keeps the last one, but another parser may keep the first.

    `count` is the number of tensors that Python's parser found.
    """
    if text.count('"__metadata__"') < 2 and all(text.count(f'"{key}"') == count for key in _TENSOR_KEYS):
        return  # there are as many dtypes, shapes and offsets as tensors: no duplicate was dropped

    def refuse(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise InputError(f'{where}: key "{twice}" appears twice in the header; the file is corrupt, copy it again')
        return keys

    json.loads(text, object_pairs_hook=refuse)


class _DtypeAndShape(NamedTuple):
    """Dtype and shape that many tensors of a header share.

    Attributes:
        dtype: Dtype of its elements.
        shape: Shape in elements.
        nbytes: Size of each tensor in bytes.
    """

    dtype: DType
    shape: Shape
    nbytes: int


def _parse_tensor(
    name: str, value: Any, data_start: int, size: int, where: str, kinds: dict[str, _DtypeAndShape]
) -> HeaderTensor:
    """Parse the entry of one tensor.

    Args:
        name: Name of the tensor.
        value: Its entry in the header.
        data_start: End of the header, from which `data_offsets` count.
        size: Size of the file in bytes.
        where: The file, for error messages.
        kinds: Cache of parsed pairs of dtype and shape, which all tensors of the header share.

    Raises:
        InputError, UnsupportedError: See `parse_header`.
    """
    try:
        dtype_name, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(
            f'{where}: tensor "{name}" lacks one of dtype, shape, data_offsets; the file is corrupt, copy it again'
        ) from error
    key = f"{dtype_name!r}{shape!r}"  # a string, because 1, 1.0 and true are equal as keys
    kind = kinds.get(key)
    if kind is None:
        kind = kinds[key] = _parse_kind(name, dtype_name, shape, where)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < 1 << MAX_NUMEL_BITS:
        raise InputError(
            f'{where}: tensor "{name}" has data_offsets {_abbreviate([begin, end])}; the file is corrupt, copy it again'
        )
    if end - begin != kind.nbytes:
        raise InputError(
            f'{where}: tensor "{name}" has {end - begin} bytes, but shape {shape} and dtype {kind.dtype} require '
            f"{kind.nbytes}; the file is corrupt, copy it again"
        )
    if data_start + end > size:
        raise InputError(
            f'{where}: tensor "{name}" ends at byte {data_start + end}, but the file has {size}; '
            "the file is truncated, download it again"
        )
    return HeaderTensor(name, kind.dtype, kind.shape, data_start + begin, data_start + end)


def _parse_kind(name: str, dtype_name: Any, shape: Any, where: str) -> _DtypeAndShape:
    dtype = DTYPES_BY_NAME.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None or not dtype.in_safetensors:
        raise UnsupportedError(
            f'{where}: tensor "{name}" has dtype {_abbreviate(dtype_name)}, which is not a dtype of safetensors 0.8; '
            "try a newer ckptx"
        )
    if not isinstance(shape, list):
        raise InputError(
            f'{where}: tensor "{name}" has shape {_abbreviate(shape)}, not a list; the file is corrupt, copy it again'
        )
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise InputError(
                f'{where}: tensor "{name}" has shape {_abbreviate(shape)}; the file is corrupt, copy it again'
            )
    if (fault := find_shape_fault(shape)) is not None:
        raise InputError(f'{where}: tensor "{name}" has a shape of {fault}; the file is corrupt, copy it again')
    numel = prod(shape)
    if numel * dtype.bits % 8:
        raise InputError(
            f'{where}: tensor "{name}" ({dtype} {shape}) does not fill whole bytes; the file is corrupt, copy it again'
        )
    return _DtypeAndShape(dtype, tuple(shape), dtype.nbytes(numel))


def _abbreviate(value: object) -> str:
    """Return the first 80 characters of an invalid value, as JSON."""
    return f"{json.dumps(value):.80}"


def _check_coverage(tensors: list[HeaderTensor], data_start: int, size: int, where: str) -> None:
    """Check that tensors, in the order of their bytes, cover the file from `data_start` to its end exactly once."""
    position = data_start
    for tensor in tensors:
        if tensor.begin != position:
            fault = "overlaps the tensor before it" if tensor.begin < position else "leaves a gap before it"
            raise InputError(
                f'{where}: tensor "{tensor.name}" begins at byte {tensor.begin}, expected {position}; it {fault}, '
                "the file is corrupt, copy it again"
            )
        position = tensor.end
    if position != size:
        raise InputError(
            f"{where}: tensors end at byte {position}, but the file has {size}; the file is corrupt, copy it again"
        )


def _check_metadata(metadata: Any, where: str) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{where}: __metadata__ is not a map of strings; the file is corrupt, copy it again")
    return metadata


def format_header_text(tensors: Iterable[tuple[str, DType, Shape, int, int]], metadata: Mapping[str, str]) -> str:
    """Return the JSON text of a header in the format of the library, without padding.

    Args:
        tensors: (name, dtype, shape, begin, end) in the order of their bytes; begin and end count from the end of the
            header.
        metadata: `__metadata__`; omitted if empty.

    Raises:
        UnsupportedError: A tensor has the name that the format reserves for metadata.
    """
    tensors = list(tensors)
    if any(name == _METADATA for name, *_ in tensors):
        raise UnsupportedError(f'tensor "{_METADATA}": safetensors reserves this name; rename the tensor')
    parts = []
    if metadata:
        parts.append('"__metadata__":' + json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")))
    kinds: dict[tuple[DType, Shape], str] = {}  # thousands of tensors share a few dtypes and shapes
    for name, dtype, shape, begin, end in tensors:
        kind = kinds.get((dtype, shape))
        if kind is None:
            kind = kinds[dtype, shape] = f'{{"dtype":"{dtype.name}","shape":[{",".join(map(str, shape))}]'
        parts.append(f'{encode_basestring(name)}:{kind},"data_offsets":[{begin},{end}]}}')
    return "{" + ",".join(parts) + "}"


def pad_header(text: str) -> str:
    """Pad the header text with spaces so that the tensor bytes after it begin at a multiple of 8."""
    return text + " " * (-len(text.encode("utf-8")) % 8)


def frame_header(text: str) -> bytes:
    """Return the first bytes of a file: length and header."""
    raw = text.encode("utf-8")
    return len(raw).to_bytes(8, "little") + raw
