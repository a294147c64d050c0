"""The options of a conversion, parsed and checked once, for the command line and the Python API alike."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from ckptx.errors import UsageError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_DTYPES = {
    "auto": "auto",
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32",
}  # fmt: skip


def parse_size(text: str | int, option: str) -> int:
    """Bytes from `5GB` (1000s, as in transformers), `256MiB` (1024s) or a plain number.

    Raises:
        UsageError: It is none of these, or nothing.
    """
    match = _SIZE.fullmatch(str(text))
    nbytes = int(float(match[1]) * _UNITS[(match[2] or "B").lower()]) if match else 0
    if nbytes < 1:
        raise UsageError(f'{option}: "{text}" is not a size; write 5GB, 256MiB or a number of bytes')
    return nbytes


def default_workers() -> int:
    """As many threads as this process may use cores, at most 16."""
    return max(1, min(16, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of `convert`; names and meanings are those of the command line.

    Attributes:
        dtype: "auto", "bf16", "fp16" or "fp32".
        prefix: None for auto; otherwise stripped by dcp2hf, added by hf2dcp.
        tied: "auto", "alias", "copy" or "drop".
        tie_missing: Tie a head that is missing and not declared tied.
        files: Number of `.distcp` files; None lets the size decide.
        max_shard_size: Bytes of tensors in a safetensors shard.
        max_shard_size_given: True when the user chose it: the original shards are then not restored.
        base: dcp2hf: checkpoint that gives config and sidecars, "none" for none.
        workers: Threads.
        max_memory: Bytes of buffers in flight.
    """

    dtype: str = "auto"
    prefix: str | None = None
    tied: str = "auto"
    tie_missing: bool = False
    files: int | None = None
    max_shard_size: int = 5_000_000_000
    max_shard_size_given: bool = False
    base: str | None = None
    workers: int = 1
    max_memory: int = 256_000_000
    dry_run: bool = False
    overwrite: bool = False
    resume: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    token: str | None = None
    cache_dir: str | None = None

    @classmethod
    def parse(cls, direction: str, options: dict[str, Any]) -> ConvertOptions:
        """Checks options as the command line or a caller gives them.

        Raises:
            UsageError: One is unknown, malformed, or not for this direction.
        """
        values = {name: value for name, value in options.items() if value is not None}
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise UsageError(f"convert {direction}: unknown option {unknown[0]}")
        for name, wrong in (("files", "dcp2hf"), ("max_shard_size", "hf2dcp"), ("base", "hf2dcp")):
            if name in values and direction == wrong:
                raise UsageError(f"convert {direction}: --{name.replace('_', '-')} has no meaning in this direction")
        dtype = str(values.get("dtype", "auto"))
        if dtype not in _DTYPES:
            raise UsageError(f'--dtype: "{dtype}", needed one of auto, bf16, fp16, fp32')
        values["dtype"] = _DTYPES[dtype]
        if values.get("prefix") == "auto":
            del values["prefix"]
        if values.get("tied", "auto") not in ("auto", "alias", "copy", "drop"):
            raise UsageError(f'--tied: "{values["tied"]}", needed one of auto, alias, copy, drop')
        if direction == "dcp2hf" and values.get("tied") == "alias":
            raise UsageError("--tied alias: safetensors cannot let two names share bytes; use auto, copy or drop")
        if "max_shard_size" in values:
            values["max_shard_size"] = parse_size(values["max_shard_size"], "--max-shard-size")
            values["max_shard_size_given"] = True
        values["max_memory"] = parse_size(values.get("max_memory", 256_000_000), "--max-memory")
        values.setdefault("workers", default_workers())
        for name in ("workers", "files"):
            if name in values and (type(values[name]) is not int or values[name] < 1):
                raise UsageError(f"--{name}: {values[name]!r}, needed a positive number")
        if values["max_memory"] < (2 << 20) * values["workers"]:
            raise UsageError(f"--max-memory: {values['max_memory']} bytes, needed at least 2 MiB for each worker")
        return cls(**values)

    def fingerprint(self) -> dict[str, Any]:
        """The options that decide bytes beyond the layout itself."""
        return {"dtype": self.dtype, "tied": self.tied, "prefix": self.prefix}
