"""File names of sharded safetensors, in the scheme of torch's HuggingFaceStorageWriter."""

from __future__ import annotations

import re

_NAME = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")


def shard_name(shard: int, number: int, count: int) -> str:
    """Return the name of file `number`, from 1, of the `count` files of a rank; `shard` is the rank plus 1."""
    return f"shard-{shard:05d}-model-{number:05d}-of-{count:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Return True if a file name has the form of `shard_name`."""
    return _NAME.fullmatch(name) is not None


def shard_numbers(name: str) -> tuple[int, int, int]:
    """Return shard, number and count, with which `shard_name` returns this name; it must have that form."""
    match = _NAME.fullmatch(name)
    assert match is not None
    shard, number, count = match.groups()
    return int(shard), int(number), int(count)
