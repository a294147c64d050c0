"""DCP_SHARDING_INFO: the record in a safetensors header of where its tensors begin in larger, sharded ones.

    __metadata__      DCP_SHARDING_INFO: {NAME: {"saved_offsets": [...]}} as JSON text, DCP_VERSION: "1.0"

Torch's reader honors it in every `*.safetensors` of a directory, regardless of the file name, so the header decides
here too. Torch's writer records it for whole tensors as well, with all offsets 0, so its presence alone does not make a
file a shard.
Source: `torch/distributed/checkpoint/hf_storage.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.safetensors import MAX_HEADER, Header
from ckptx.storage.interface import Source
from ckptx.untrusted.json_text import nesting_error, number_error

SHARDING_INFO = "DCP_SHARDING_INFO"
OFFSETS_KEY = "saved_offsets"
VERSION_KEY = "DCP_VERSION"
VERSION = "1.0"


def read_sharding_info(metadata: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """Return the record, tensor name -> {"saved_offsets": [...]}, unchecked; None for a file without one.

    A file without the record has whole tensors.

    Raises:
        InputError: The text is not a JSON object.
        UnsupportedError: The record has another major version than `VERSION`.
    """
    version = metadata.get(VERSION_KEY, VERSION)
    if version.partition(".")[0] != VERSION.partition(".")[0]:
        raise UnsupportedError(
            f"{where}: {VERSION_KEY} is {version}, but this ckptx supports {VERSION}; use a newer ckptx"
        )
    text = metadata.get(SHARDING_INFO)
    if not text:
        return None
    try:
        info = json.loads(text)
    except RecursionError as error:
        raise nesting_error(where, "file") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{where}: {SHARDING_INFO} is not JSON ({error}); the file is corrupt, copy it again"
        ) from error
    except ValueError as error:  # Python refuses numbers of more than 4,300 digits
        raise number_error(where, "file") from error
    if not isinstance(info, dict):
        raise InputError(
            f"{where}: {SHARDING_INFO} must be a JSON object, found a {type(info).__name__}; save it again"
        )
    return info


def recorded_offsets(tensor_info: Any, name: str, shape: Shape, where: str) -> Shape:
    """Return the offsets in a tensor's entry of the record; `check_offsets` checks their number and range.

    Args:
        tensor_info: The entry; None if the record does not list the tensor.
        name: Name of the tensor, for error messages.
        shape: Shape of the shard, for error messages.
        where: The file, for error messages.

    Raises:
        InputError: There are no offsets, or they are not a list of integers.
    """
    offsets = tensor_info.get(OFFSETS_KEY) if isinstance(tensor_info, dict) else None
    if isinstance(offsets, list) and all(type(begin) is int for begin in offsets):
        return tuple(offsets)
    if offsets is not None:
        raise _offsets_error(offsets, name, shape, where)
    raise InputError(
        f'{where}: tensor "{name}" has no {OFFSETS_KEY} in {SHARDING_INFO}, so its position is unknown; save it again'
    )


def check_offsets(offsets: Shape, name: str, shape: Shape, where: str) -> None:
    """Check that there is one offset per dim of the shard, and that all are at least 0 and below 2**63.

    Raises:
        InputError: The offsets are invalid.
    """
    if len(offsets) != len(shape) or any(not 0 <= begin < 1 << 63 for begin in offsets):
        raise _offsets_error(list(offsets), name, shape, where)


def refuse_unknown_entries(info: Mapping[str, Any], where: str) -> None:
    """Refuse the entries of a record that are left after those of all tensors in the file were removed from it.

    Raises:
        InputError: An entry is left, so the record is that of another file.
    """
    if info:
        raise InputError(
            f'{where}: {SHARDING_INFO} lists tensor "{next(iter(info))}", which the file does not contain; save it '
            "again"
        )


def _offsets_error(offsets: object, name: str, shape: Shape, where: str) -> InputError:
    return InputError(
        f'{where}: {OFFSETS_KEY} of tensor "{name}" of shape {list(shape)} must be one integer per dim, found '
        f"{offsets!s:.80}; the file is corrupt, copy it again"
    )


def contains_shards(header: Header, where: str) -> bool:
    """Return True if a tensor of the file has offsets other than 0; the first shard of a tensor looks like a whole one.

    Raises:
        InputError: The record is damaged, or lists other tensors than the file.
        UnsupportedError: See `read_sharding_info`.
    """
    info = read_sharding_info(header.metadata, where)
    if info is None:
        return False
    has_offsets = False
    for name, _, shape, _, _ in header.tensors:
        offsets = recorded_offsets(info.pop(name, None), name, shape, where)
        check_offsets(offsets, name, shape, where)
        has_offsets = has_offsets or any(offsets)
    refuse_unknown_entries(info, where)
    return has_offsets


def files_with_sharding_info(source: Source, names: Iterable[str]) -> list[str]:
    """Return the safetensors files among `names` whose headers contain DCP_SHARDING_INFO, without parsing them.

    The recorded offsets may all be 0. A damaged file counts as one without the record; opening it raises the error.

    Raises:
        InputError: A file cannot be read.
    """
    found = []
    for name in names:
        with source.open() as files:
            length = int.from_bytes(files.read_up_to(name, 0, 8), "little")
            if length <= min(MAX_HEADER, files.size(name)) and SHARDING_INFO.encode() in files.read_up_to(
                name, 8, length
            ):
                found.append(name)
    return found
