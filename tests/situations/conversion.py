"""Situations of conversions: configs edited beside an output, interrupted runs, casts, dtypes that a config names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import ckptx
from ckptx.storage import open_file
from tests.situations.box import Box, situation
from tests.situations.paths import hf2dcp
from tests.support.checkpoint_writers import LLAMA, SINGLE, Value, flip, llama, value, write_dcp, write_hf

AREA = "conversion"
EDITED = r"config\.json: differs from the config that ckptx\.json records.*--base PATH"
SIZES = {
    "hidden_size": 8, "intermediate_size": 24, "vocab_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIG = LLAMA | SIZES


def dcp2hf(box: Box, source: Any, *options: Any) -> tuple[Any, ...]:
    return ("convert", "to-hf", source, box.dst, *options)


def edit(path: Path, **keys: Any) -> None:
    """Edits a config as a person would."""
    path.write_text(json.dumps(json.loads(path.read_text()) | keys, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------- edited configs


def torchtitan(box: Box) -> Path:
    source = write_hf(box.root / "hf", llama(), config=CONFIG)
    ckptx.convert("to-dcp", source, box.root / "titan", names="torchtitan")
    return box.root / "titan"


for _keys in (
    {"num_attention_heads": 4, "num_key_value_heads": 4},
    {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8},
    {"torch_dtype": "float32"},
    {"rope_theta": 1e6},
):

    @situation(AREA, f"torchtitan's names, and config.json was edited: {json.dumps(_keys)[1:-1]}", 3, EDITED)
    def _(box: Box, keys: dict[str, Any] = _keys) -> Any:
        source = torchtitan(box)
        edit(source / "config.json", **keys)
        return dcp2hf(box, source)


@situation(AREA, "torchtitan's names, and config.json has other line endings", 3, EDITED)
def _(box: Box) -> Any:
    source = torchtitan(box)
    text = (source / "config.json").read_bytes()
    (source / "config.json").write_bytes(text.replace(b"\n", b"\r\n"))
    return dcp2hf(box, source)


@situation(AREA, "torchtitan's names, an edited config.json, and the output is a DCP again", 3, EDITED)
def _(box: Box) -> Any:
    source = torchtitan(box)
    edit(source / "config.json", num_attention_heads=4, num_key_value_heads=4)
    return ("reshard", source, box.dst, "--tp", "2")


@situation(AREA, "torchtitan's names, an edited config.json, and --base with the right one", 0)
def _(box: Box) -> Any:
    source = torchtitan(box)
    edit(source / "config.json", num_attention_heads=4, num_key_value_heads=4)
    ckptx.convert("to-hf", source, box.root / "check", base=str(box.root / "hf"))
    os.replace(box.root / "hf" / "config.json", source / "config.json")
    write_hf(box.root / "hf", llama(), config=CONFIG)
    return dcp2hf(box, source, "--base", box.root / "hf")


@situation(AREA, "torchtitan's names, and --base has another number of heads", 3, 'gives 4 heads for "layers')
def _(box: Box) -> Any:
    source = torchtitan(box)
    base = write_hf(box.root / "base", llama(), config=CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 4})
    return dcp2hf(box, source, "--base", base)


@situation(AREA, "torchtitan's names, and config.json is gone", 3, "has no config.json")
def _(box: Box) -> Any:
    source = torchtitan(box)
    (source / "config.json").unlink()
    return dcp2hf(box, source)


@situation(AREA, "torchtitan's names, and config.json names a class without such names", 3)
def _(box: Box) -> Any:
    source = torchtitan(box)
    edit(source / "config.json", architectures=["MistralForCausalLM"], model_type="mistral")
    return dcp2hf(box, source)


@situation(
    AREA,
    "torchtitan's names, no ckptx.json, and head counts in config.json that imply other shapes",
    3,
    "num_|needed|found",
)
def _(box: Box) -> Any:
    source = torchtitan(box)
    (source / "ckptx.json").unlink()
    edit(source / "config.json", num_attention_heads=4, num_key_value_heads=2, head_dim=2)
    return dcp2hf(box, source)


@situation(
    AREA, "a DCP with the names of the Hub, and the head counts in config.json were edited; no byte depends on them", 0
)
def _(box: Box) -> Any:
    source = write_hf(box.root / "hf", llama(), config=CONFIG)
    ckptx.convert("to-dcp", source, box.root / "dcp")
    edit(box.root / "dcp" / "config.json", num_attention_heads=4, num_key_value_heads=4)
    return dcp2hf(box, box.root / "dcp")


@situation(AREA, "a row of q_proj in torchtitan's order was changed together with its CRC-32", 3, "the bytes changed")
def _(box: Box) -> Any:
    import zlib

    source = torchtitan(box)
    hf = llama()["model.layers.0.self_attn.q_proj.weight"][2]
    rows = np.frombuffer(hf, np.uint16).reshape(2, 2, 2, 8).transpose(0, 2, 1, 3).tobytes()
    file = source / "__0_0.distcp"
    data = file.read_bytes()
    spoiled = rows[:-2] + bytes([rows[-2] ^ 1]) + rows[-1:]
    crcs = [zlib.crc32(each).to_bytes(4, "little") for each in (rows, spoiled)]
    file.write_bytes(data.replace(rows, spoiled).replace(*crcs))
    return dcp2hf(box, source)


# ------------------------------------------------------------------------------------------------- interrupted runs


def interrupted(box: Box, source: Path, after: int, place: Path | None = None, **options: Any) -> None:
    """Leaves a run that was stopped after some writes."""
    left, real = [after], open_file.write_at

    def failing(descriptor: int, data: memoryview | bytes, offset: int, path: Path) -> None:
        left[0] -= path.parent.name == "tree"
        if left[0] < 0:
            raise KeyboardInterrupt
        real(descriptor, data, offset, path)

    with patch.object(open_file, "write_at", failing), suppress(KeyboardInterrupt):
        ckptx.convert("to-dcp", source, place or box.dst, workers=1, **options)


def large(seed: int = 0) -> dict[str, Value]:
    """Tensors of 1 MiB, so that some are finished when others are not."""
    tensors = llama(hidden=8)
    return {name: value("BF16", *((512, 1024) if "proj" in name else shape), seed=seed + number)
            for number, (name, (_, shape, _)) in enumerate(tensors.items())}  # fmt: skip


def keeping_its_time(path: Path, change: Callable[[], object]) -> None:
    found = path.stat()
    change()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _rewrite(path: Path) -> None:
    other = write_hf(path.parents[1] / "other", large(100), config=LLAMA)

    def change() -> None:
        with path.open("r+b") as file:
            file.write((other / SINGLE).read_bytes())

    keeping_its_time(path, change)


for _name, _change in {
    "rewritten in place, its mtime restored": _rewrite,
    "changed in one byte, its mtime restored": lambda path: keeping_its_time(path, lambda: flip(path, -9, 8)),
    "made read-only": lambda path: path.chmod(0o444),
    "given a time of the future": lambda path: os.utime(path, ns=(2**62, 2**62)),
    "linked from elsewhere": lambda path: os.link(path, path.parents[1] / "linked"),
    "left as it was": lambda path: None,
}.items():
    for _after in (3, 9):

        @situation(
            AREA, f"a run stopped after {_after} writes is resumed; the source was {_name}", 0, "wrote 21 tensors"
        )
        def _(box: Box, change: Callable[[Path], object] = _change, after: int = _after) -> Any:
            source = write_hf(box.root / "hf", large(), config=LLAMA)
            interrupted(box, source, after)
            change(source / SINGLE)
            return hf2dcp(box, source, None, "--resume")


@situation(AREA, "a stopped run is resumed; the source was truncated", 3)
def _(box: Box) -> Any:
    source = write_hf(box.root / "hf", large(), config=LLAMA)
    interrupted(box, source, 9, place=box.root / "made")
    keeping_its_time(source / SINGLE, lambda: os.truncate(source / SINGLE, 1 << 20))
    return hf2dcp(box, source, "made", "--resume")


@situation(AREA, "a stopped run is resumed; heads in config.json were edited, and names are torchtitan's", 0)
def _(box: Box) -> Any:
    source = write_hf(box.root / "hf", llama(), config=CONFIG)
    interrupted(box, source, 2, names="torchtitan")
    edit(source / "config.json", num_attention_heads=4, num_key_value_heads=4)
    return hf2dcp(box, source, None, "--resume", "--names", "torchtitan")


@situation(AREA, "an output is complete; its source was rewritten in place, and the run is resumed", 5, "not empty")
def _(box: Box) -> Any:
    source = write_hf(box.root / "hf", large(), config=LLAMA)
    place = box.root / "made"
    ckptx.convert("to-dcp", source, place)
    _rewrite(source / SINGLE)
    return hf2dcp(box, source, place, "--resume")


# ------------------------------------------------------------------------------------------------- casts


def numbers(dtype: str, *odd: float) -> dict[str, Value]:
    """A model of ones, and at the begin of its embedding other numbers."""
    kinds: dict[str, Any] = {"F32": np.float32, "F64": np.float64}
    found: dict[str, Value] = {}
    for name, (_, shape, _) in llama().items():
        values = np.ones(shape, kinds[dtype])
        if name == "model.embed_tokens.weight":
            values.reshape(-1)[: len(odd)] = odd
        found[name] = dtype, shape, values.tobytes()
    return found


for _dtype, _to, _number in (
    ("F32", "fp16", 65520.0), ("F32", "fp16", -1e30), ("F64", "fp16", 1e300), ("F64", "fp32", 3.4028236e38),
    ("F32", "bf16", 3.4e38), ("F64", "bf16", -3.5e38),
):  # fmt: skip

    @situation(AREA, f"{_number} in {_dtype}, and --dtype {_to}", 3, r"1 number in 1 tensor.*--allow-overflow")
    def _(box: Box, dtype: str = _dtype, to: str = _to, number: float = _number) -> Any:
        return hf2dcp(box, write_hf(box.root / "hf", numbers(dtype, number)), None, "--dtype", to)


@situation(AREA, "numbers that are too large, and --allow-overflow", 0, "2 numbers in 1 tensor.*became infinite")
def _(box: Box) -> Any:
    source = write_hf(box.root / "hf", numbers("F32", 1e6, -1e6))
    return hf2dcp(box, source, None, "--dtype", "fp16", "--allow-overflow")


@situation(AREA, "infinity and NaN in the source, and --dtype fp16", 0, r"^(?!.*infinite).*$")
def _(box: Box) -> Any:
    source = write_hf(box.root / "hf", numbers("F32", np.inf, -np.inf, np.nan))
    return hf2dcp(box, source, None, "--dtype", "fp16")


@situation(AREA, "the largest numbers that fp16 has, rounded down to it", 0, r"^(?!.*infinite).*$")
def _(box: Box) -> Any:
    return hf2dcp(box, write_hf(box.root / "hf", numbers("F32", 65504.0, -65519.0)), None, "--dtype", "fp16")


@situation(AREA, "numbers that are too small for fp16", 0, "3 numbers in 1 tensor.*became zero")
def _(box: Box) -> Any:
    return hf2dcp(box, write_hf(box.root / "hf", numbers("F32", 1e-9, -1e-9, 1e-30)), None, "--dtype", "fp16")


@situation(AREA, "--allow-overflow without --dtype", 2, "--allow-overflow requires --dtype")
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf(), None, "--allow-overflow")


@situation(AREA, "--dtype base, and numbers that the base has no dtype for", 3, "--allow-overflow")
def _(box: Box) -> Any:
    base = write_hf(box.root / "base", llama(dtype="F16"))
    return dcp2hf(box, write_dcp(box.root / "dcp", numbers("F32", 1e6)), "--base", base, "--dtype", "base")


# ------------------------------------------------------------------------------------------------- dtypes of configs


@situation(AREA, "float32 tensors without a config under a base in bfloat16", 0, "'bfloat16' -> 'float32'")
def _(box: Box) -> Any:
    base = box.hf("base")
    source = write_hf(box.root / "hf", llama(dtype="F32"), config=None)
    return ("reshard", source, box.dst, "--to", "safetensors", "--tp", "2", "--base", base)


@situation(AREA, "float32 tensors without a config under a base in bfloat16, into a DCP", 0, "'bfloat16' -> 'float32'")
def _(box: Box) -> Any:
    base = box.hf("base")
    source = write_hf(box.root / "hf", llama(dtype="F32"), config=None)
    return ("reshard", source, box.dst, "--to", "dcp", "--tp", "2", "--base", base)


@situation(AREA, "bfloat16 tensors under a base whose config says float32", 0, r"^(?!.*->).*$")
def _(box: Box) -> Any:
    base = write_hf(box.root / "base", llama(dtype="F32"), config=LLAMA | {"torch_dtype": "float32"})
    source = write_hf(box.root / "hf", llama(), config=None)
    return ("reshard", source, box.dst, "--to", "safetensors", "--tp", "2", "--base", base)
