"""The options of `convert` and `reshard`, parsed and checked once, for the command line and the Python API alike."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from ckptx.catalog.form import Form
from ckptx.errors import UsageError
from ckptx.untrusted.limits import MEMORY_BYTES, RANKS, WORKERS
from ckptx.untrusted.remote_name import refuse_remote

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
Dtype = Literal["auto", "base", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"]
Tied = Literal["auto", "alias", "copy", "drop"]
Names = Literal["disk", "model", "torchtitan"]
Optimizer = Literal["keep", "drop"]
To = Literal["dcp", "safetensors"]
Index = Literal["auto", "always"]
_WORDS = {
    "tied": get_args(Tied),
    "names": get_args(Names),
    "optimizer": get_args(Optimizer),
    "to": get_args(To),
    "index": get_args(Index),
}
_DTYPES = {name: name.replace("bfloat", "bf").replace("float", "fp") for name in get_args(Dtype)}


def parse_size(text: str | int, option: str) -> int:
    """Bytes from `5GB` (1000s, as in transformers), `256MiB` (1024s) or a plain number.

    Raises:
        UsageError: It is none of these, or nothing.
    """
    match = _SIZE.fullmatch(str(text))
    amount = float(match[1]) * _UNITS[(match[2] or "B").lower()] if match else 0.0
    if amount > MEMORY_BYTES:
        raise UsageError(f'{option}: "{text!s:.40}" is more than {MEMORY_BYTES >> 40} TiB, the most allowed')
    nbytes = int(amount)
    if nbytes < 1:
        raise UsageError(f'{option}: "{text}" is not a size; write 5GB, 256MiB or a number of bytes')
    return nbytes


def default_workers() -> int:
    """As many threads as this process may use cores, at most 16; processes of one torchrun share the cores."""
    neighbours = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) // max(1, int(neighbours) if neighbours.isdecimal() else 1)
    return max(1, min(16, cores))


# Options that some commands do not have.
_MEANINGLESS = {
    "hf2dcp": ("max_shard_size", "index", "base", "to", "optimizer"),
    "dcp2hf": ("files", "to", "tp", "pp", "dp_shard", "pp_split", "tp_plan"),
    "reshard": ("max_shard_size", "index"),
}


class ConvertArguments(TypedDict, total=False):
    """What `convert` and `reshard` take by name, see `ConvertOptions`; None is not given. Sizes may be texts: "5GB"."""

    dtype: Dtype | None
    names: Names | None
    prefix: str | None
    tied: Tied | None
    tie_missing: bool | None
    allow_misfit: bool | None
    allow_overflow: bool | None
    optimizer: Optimizer | None
    to: To | None
    tp: int | None
    pp: int | None
    dp_shard: int | None
    pp_split: str | None
    tp_plan: str | Path | None
    files: int | None
    max_shard_size: int | str | None
    index: Index | None
    base: str | Path | None
    workers: int | None
    max_memory: int | str | None
    dry_run: bool | None
    overwrite: bool | None
    resume: bool | None
    trust_remote_code: bool | None
    revision: str | None
    token: str | None
    cache_dir: str | Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of `convert` and `reshard`; names and meanings are those of the command line.

    Attributes:
        dtype: "auto", "base" (as each tensor is in the base), "bf16", "fp16" or "fp32".
        names: "disk", "model" or "torchtitan"; None is "disk" for convert and DCP, "model" for sharded safetensors.
        prefix: None for auto; otherwise stripped from the names of a DCP, added by hf2dcp.
        tied: "auto", "alias", "copy" or "drop".
        tie_missing: Tie a head that is missing and not declared tied.
        allow_misfit: Take tensors whose names or shapes are not those of the config.
        allow_overflow: Write numbers that the dtype does not have as infinity.
        optimizer: "keep" or "drop"; None keeps what the output can hold.
        to: reshard: "dcp", "safetensors", or None for the family of the input.
        tp, pp, dp_shard: The mesh.
        pp_split: How layers are split over stages, see `layout.stages.split_layers`.
        tp_plan: File with a TP plan of the user.
        files: Number of `.distcp` files, of each rank when cut; None lets the size decide.
        max_shard_size: Bytes of tensors in a safetensors shard.
        max_shard_size_given: True when the user chose it: the original shards are then not restored.
        index: dcp2hf: "always" writes an index beside a single file, too.
        base: Of a DCP: checkpoint that gives config and sidecars, "none" for none.
        workers: Threads.
        max_memory: Bytes of buffers in flight.
    """

    dtype: str = "auto"
    names: str | None = None
    prefix: str | None = None
    tied: str = "auto"
    tie_missing: bool = False
    allow_misfit: bool = False
    allow_overflow: bool = False
    optimizer: str | None = None
    to: str | None = None
    tp: int = 1
    pp: int = 1
    dp_shard: int = 1
    pp_split: str = "even"
    tp_plan: str | None = None
    files: int | None = None
    max_shard_size: int = 5_000_000_000
    max_shard_size_given: bool = False
    index: str = "auto"
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
    def parse(cls, command: str, options: Mapping[str, Any]) -> ConvertOptions:
        """Checks options as the command line or a caller gives them.

        Args:
            command: "hf2dcp", "dcp2hf" or "reshard".
            options: By name; None is not given.

        Raises:
            UsageError: One is unknown, malformed, or not for this command.
            UnsupportedError: A path is a URL.
        """
        said = command if command == "reshard" else f"convert {command}"
        values = {name: value for name, value in options.items() if value is not None}
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise UsageError(f"--{unknown[0].replace('_', '-')}: has no meaning for {said}")
        for name in _MEANINGLESS[command]:
            if name in values:
                raise UsageError(f"--{name.replace('_', '-')}: has no meaning for {said}")
        dtype = str(values.get("dtype", "auto"))
        if dtype not in _DTYPES:
            raise UsageError(f'--dtype: "{dtype}", needed one of auto, base, bf16, fp16, fp32')
        values["dtype"] = _DTYPES[dtype]
        if values.get("prefix") == "auto":
            del values["prefix"]
        for name, known in _WORDS.items():
            if name in values and values[name] not in known:
                raise UsageError(f'--{name}: "{values[name]}", needed one of {", ".join(known)}')
        if "max_shard_size" in values:
            values["max_shard_size"] = parse_size(values["max_shard_size"], "--max-shard-size")
            values["max_shard_size_given"] = True
        values["max_memory"] = parse_size(values.get("max_memory", 256_000_000), "--max-memory")
        values.setdefault("workers", default_workers())
        for name in ("workers", "files", "tp", "pp", "dp_shard"):
            if name in values and (type(values[name]) is not int or values[name] < 1):
                raise UsageError(f"--{name.replace('_', '-')}: {values[name]!r}, needed a positive number")
            most = WORKERS if name == "workers" else RANKS
            if values.get(name, 0) > most:
                raise UsageError(f"--{name.replace('_', '-')}: {values[name]}, allowed at most {most}")
        if values.get("tp", 1) * values.get("pp", 1) * values.get("dp_shard", 1) > RANKS:
            raise UsageError(f"--tp x --pp x --dp-shard: allowed at most {RANKS} ranks")
        if values["max_memory"] < (2 << 20) * values["workers"]:
            raise UsageError(f"--max-memory: {values['max_memory']} bytes, needed at least 2 MiB for each worker")
        refuse_remote(*(values.get(name) for name in ("base", "tp_plan", "cache_dir")))
        settings = cls(**values)
        settings.refuse_what_says_nothing()
        if command == "dcp2hf" or settings.to == "safetensors":
            settings.refuse_what_safetensors_lack()
        return settings

    def refuse_what_says_nothing(self) -> None:
        """Checks that each option has something to act on; one that is silently ignored is a wrong result.

        Raises:
            UsageError: One has no meaning beside the others.
        """
        if self.allow_overflow and self.dtype == "auto":
            raise UsageError("--allow-overflow has an effect only where --dtype casts; pass --dtype too")
        if self.pp_split != "even" and self.pp == 1:
            raise UsageError("--pp-split: says which layers a stage gets, needed --pp 2 or more with it")
        if self.tp_plan is not None and self.tp == 1:
            raise UsageError("--tp-plan: says how TP cuts tensors, needed --tp 2 or more with it")
        if self.base == "none" and (self.tie_missing or self.tied != "auto"):
            name = "--tie-missing" if self.tie_missing else "--tied"
            raise UsageError(f"{name}: has no meaning with --base none, which knows of no ties; name a checkpoint")

    def refuse_what_source_lacks(self, source: Form, to: str) -> None:
        """Checks the options against what is converted into what.

        Args:
            source: Format of the source.
            to: "dcp" or "safetensors".

        Raises:
            UsageError: One is about something that is not there.
        """
        if source.is_of_training:
            return
        if self.optimizer is not None:
            raise UsageError(
                "--optimizer: is about the optimizer state of a DCP; SRC is none and holds the model alone"
            )
        if self.prefix is not None and to == "safetensors":
            raise UsageError("--prefix: is removed from names of a DCP and added to those of one; here is neither")

    def refuse_what_safetensors_lack(self) -> None:
        """Checks the options against an output in safetensors.

        Raises:
            UsageError: One asks for what such files cannot hold.
        """
        if self.tied == "alias":
            raise UsageError("--tied alias: safetensors cannot let two names share bytes; use auto, copy or drop")
        if self.optimizer == "keep":
            raise UsageError("--optimizer keep: safetensors hold the model alone; use --to dcp to keep it")
        if self.files is not None:
            raise UsageError("--files: safetensors have as many files a rank as their tensors need; it is for a DCP")

    def fingerprint(self) -> dict[str, Any]:
        """The options that decide bytes beyond the layout itself."""
        return {"dtype": self.dtype, "tied": self.tied, "prefix": self.prefix, "names": self.names, "index": self.index}

    @property
    def is_cut(self) -> bool:
        """True when more than one rank gets files."""
        return self.tp * self.pp * self.dp_shard > 1
