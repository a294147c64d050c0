"""DCP_SHARDING_INFO: what the header of a safetensors file says of the larger tensors that its own are parts of.

    __metadata__      DCP_SHARDING_INFO: {NAME: {"saved_offsets": [...]}} as JSON text, DCP_VERSION: "1.0"

Torch's reader honours it in every `*.safetensors` of a directory, whatever the file is called, so the header decides
here too. Torch's writer records it for whole tensors as well, all offsets 0: by itself it does not make a file a shard.
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

SHARDING_INFO = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
VERSION_KEY = "DCP_VERSION"
VERSION = "1.0"


def sharding_info(metadata: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """Offsets by tensor, or None for a file that records none and so holds whole tensors.

    Raises:
        InputError: The text is not a JSON object.
        UnsupportedError: A newer version of the format.
    """
    version = metadata.get(VERSION_KEY, VERSION)
    if version.partition(".")[0] != VERSION.partition(".")[0]:
        raise UnsupportedError(f"{where}: {VERSION_KEY} is {version}, this ckptx reads {VERSION}; use a newer ckptx")
    text = metadata.get(SHARDING_INFO)
    if not text:
        return None
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: {SHARDING_INFO} is not JSON ({error}); the file is corrupt") from error
    if not isinstance(info, dict):
        raise InputError(f"{where}: {SHARDING_INFO} is a {type(info).__name__}, needed a JSON object; save it again")
    return info


def offsets_of(row: Any, name: str, shape: Shape, where: str) -> Shape:
    """The offsets that `row` of the info gives the tensor `name`; their number and size are not looked at yet.

    Raises:
        InputError: It gives none, or something else.
    """
    offsets = row.get(OFFSETS) if isinstance(row, dict) else None
    if isinstance(offsets, list) and all(type(begin) is int for begin in offsets):
        return tuple(offsets)
    if offsets is not None:
        raise _wrong_offsets(offsets, name, shape, where)
    raise InputError(
        f'{where}: tensor "{name}" has no {OFFSETS} in {SHARDING_INFO}; where it belongs is unknown, save it again'
    )


def check_offsets(offsets: Shape, name: str, shape: Shape, where: str) -> None:
    """There must be one for each dim, and none may be negative or beyond any file.

    Raises:
        InputError: They are not.
    """
    if len(offsets) != len(shape) or any(not 0 <= begin < 1 << 63 for begin in offsets):
        raise _wrong_offsets(list(offsets), name, shape, where)


def refuse_unheld(info: Mapping[str, Any], where: str) -> None:
    """Refuses what the info still lists when every tensor of the file has taken its row.

    Raises:
        InputError: There is such a name; the info is that of another file.
    """
    if info:
        raise InputError(f'{where}: {SHARDING_INFO} lists tensor "{next(iter(info))}", which the file does not hold')


def _wrong_offsets(offsets: object, name: str, shape: Shape, where: str) -> InputError:
    return InputError(
        f'{where}: tensor "{name}" of shape {list(shape)} has {OFFSETS} {offsets!s:.80}, needed a count for each dim; '
        "the file is corrupt"
    )


def holds_parts(header: Header, where: str) -> bool:
    """True when a tensor of the file begins inside a larger one; the first part of a tensor looks like a whole one.

    Raises:
        InputError: The info is damaged, or does not speak of the very tensors of the file.
        UnsupportedError: A newer version of the format.
    """
    info = sharding_info(header.metadata, where)
    if info is None:
        return False
    found = False
    for name, _, shape, _, _ in header.tensors:
        offsets = offsets_of(info.pop(name, None), name, shape, where)
        check_offsets(offsets, name, shape, where)
        found = found or any(offsets)
    refuse_unheld(info, where)
    return found


def that_record_offsets(source: Source, names: Iterable[str]) -> list[str]:
    """Those of the safetensors files `names` whose headers speak of offsets; nothing is parsed.

    A file too damaged to tell records none: whoever opens it says what is wrong with it.

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
