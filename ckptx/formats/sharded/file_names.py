"""How the files of sharded safetensors are called: as torch's HuggingFaceStorageWriter calls them."""

from __future__ import annotations

import re

_NAME = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")


def shard_name(shard: int, number: int, count: int) -> str:
    """The name of file `number` of `count` of a rank; all count from 1, `shard` is the rank plus one."""
    return f"shard-{shard:05d}-model-{number:05d}-of-{count:05d}.safetensors"


def is_shard(name: str) -> bool:
    """True for the name of a file as `shard_name` gives it."""
    return _NAME.fullmatch(name) is not None


def shard_numbers(name: str) -> tuple[int, int, int]:
    """The numbers that `shard_name` made the name of."""
    match = _NAME.fullmatch(name)
    assert match is not None
    shard, number, count = match.groups()
    return int(shard), int(number), int(count)
