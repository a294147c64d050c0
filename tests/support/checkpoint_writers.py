"""Write tiny checkpoints without torch, from the format descriptions and not with the code under test.

A tensor is a `Value`: safetensors dtype name, shape, row-major little-endian bytes.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.region import Region, full_region
from ckptx.formats.dcp.metadata import DcpMetadata, StorageInfo, StorageKey, TensorMetadata
from ckptx.formats.dcp.metadata_writer import metadata_to_bytes
from ckptx.formats.torch_archive.archive import archive_frame

Value = tuple[str, tuple[int, ...], bytes]

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "C64": 64, "U64": 64, "U32": 32, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def value(dtype: str, *shape: int, seed: int = 0) -> Value:
    """Return a tensor of random bytes; floats are finite, because the top bit of their exponent is cleared."""
    nbytes = prod(shape) * BITS[dtype] // 8
    data = np.random.default_rng([seed, len(shape), nbytes]).integers(0, 256, nbytes, dtype=np.uint8)
    if dtype in ("F64", "F32", "F16", "BF16"):
        data[BITS[dtype] // 8 - 1 :: BITS[dtype] // 8] &= 0xBF
    if dtype == "BOOL":
        data &= 1
    return dtype, shape, data.tobytes()


def array(data: np.ndarray[Any, Any]) -> Value:
    """Convert a numpy array to a tensor."""
    names = {"f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "u1": "U8"}
    return names[data.dtype.str[1:]], data.shape, np.ascontiguousarray(data).tobytes()


def header(tensors: Mapping[str, Value], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the header of a safetensors file as a dict, which tests can corrupt before they write it."""
    rows: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return rows


def framed(text: str | bytes | dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of a safetensors file from the text of its header and its payload."""
    if isinstance(text, dict):
        text = json.dumps(text, separators=(",", ":"))
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + body


def safetensors_bytes(tensors: Mapping[str, Value], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file, with its header padded to a multiple of 8 as by the library."""
    text = json.dumps(header(tensors, metadata), separators=(",", ":"))
    return framed(text + " " * (-len(text.encode()) % 8), b"".join(data for _, _, data in tensors.values()))


def write_safetensors(path: Path, tensors: Mapping[str, Value], metadata: Mapping[str, str] | None = None) -> Path:
    """Write one safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, {"format": "pt"} if metadata is None else metadata))
    return path


def write_hf(
    root: Path, tensors: Mapping[str, Value], shards: int = 1, config: Mapping[str, Any] | None = LLAMA
) -> Path:
    """Write an HF directory: one file, or an index and shards."""
    root.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (root / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if shards == 1:
        write_safetensors(root / SINGLE, tensors)
        return root
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        write_safetensors(root / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    write_index(root, weight_map, sum(len(data) for _, _, data in tensors.values()))
    return root


def write_index(root: Path, weight_map: Mapping[str, str], total: int = 0) -> None:
    """Write `model.safetensors.index.json` as transformers does."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    (root / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def llama(
    layers: int = 2, hidden: int = 8, vocab: int = 16, inner: int = 24, dtype: str = "BF16", head: bool = True
) -> dict[str, Value]:
    """Return the tensors of a tiny Llama, all with different bytes."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: value(dtype, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def archive(tensor: Value) -> bytes:
    """Return a tensor as a torch archive."""
    name, shape, data = tensor
    frame = archive_frame(DTYPES_BY_NAME[name], shape)
    return frame.head + data + frame.build_tail(zlib.crc32(data))


def part(tensor: Value, region: Region) -> Value:
    """Return a region of a tensor with whole-byte elements."""
    name, shape, data = tensor
    spans = tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))
    block = np.frombuffer(data, f"V{BITS[name] // 8}").reshape(shape)[spans]
    return name, region.sizes, np.ascontiguousarray(block).tobytes()


def write_dcp(
    root: Path,
    tensors: Mapping[str, Value],
    cuts: Mapping[str, Sequence[Region]] | None = None,
    payloads: Mapping[str, bytes] | None = None,
    aliases: Mapping[str, str] | None = None,
    files: int = 1,
    objects: Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a DCP directory.

    Args:
        root: Directory to write.
        tensors: Tensors by FQN.
        cuts: Regions of the chunks by FQN; tensors without an entry are one chunk.
        payloads: Bytes to store for a name instead of its archive.
        aliases: FQN -> FQN whose bytes it shares.
        files: Number of files; chunks are distributed round-robin.
        objects: FQNs of pickled objects, of three bytes each.
        config: Content of `config.json`; None to omit it.
    """
    root.mkdir(parents=True, exist_ok=True)
    described: dict[str, TensorMetadata] = {}
    storage: dict[StorageKey, StorageInfo] = {}
    bodies = [bytearray() for _ in range(files)]
    turn = 0

    def store(key: StorageKey, block: bytes) -> None:
        nonlocal turn
        body = bodies[turn % files]
        storage[key] = StorageInfo(f"__{turn % files}_0.distcp", len(body), len(block))
        body += block
        turn += 1

    for name, tensor in tensors.items():
        regions = tuple((cuts or {}).get(name, [full_region(tensor[1])]))
        for region in regions:
            store((name, region.offsets), (payloads or {}).get(name) or archive(part(tensor, region)))
        described[name] = TensorMetadata(str(DTYPES_BY_NAME[tensor[0]].torch_name), tensor[1], regions)
    for name in objects:
        store((name, None), b"\x80\x02N.")
    for alias, name in (aliases or {}).items():
        described[alias] = described[name]
        storage.update({(alias, key[1]): place for key, place in list(storage.items()) if key[0] == name})
    for i, body in enumerate(bodies):
        (root / f"__{i}_0.distcp").write_bytes(body)
    (root / ".metadata").write_bytes(metadata_to_bytes(DcpMetadata(described, tuple(objects), storage)))
    if config is not None:
        (root / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return root


def manifest(format: str, files: Mapping[str, int], tensors: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Any]:
    """Return the content of `ckptx.json`, from the sizes of files and the dtype and shape of tensors."""
    return {
        "ckptx": 1,
        "tool": "0.1.0",
        "format": format,
        "layout": {"tp": 1, "pp": 1, "dp_shard": 1, "rank_order": "pp,dp,tp", "stages": None},
        "origin": None,
        "cuts": [],
        "files": {name: {"bytes": nbytes, "digest": "0" * 32} for name, nbytes in files.items()},
        "sidecars": {},
        "tensors": {
            name: {"dtype": dtype, "shape": list(shape), "digest": "0" * 32, "file": 0}
            for name, (dtype, shape) in tensors.items()
        },
    }


def tree_bytes(root: Path) -> dict[str, bytes]:
    """Read every file below `root`."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def tree_digest(root: Path) -> str:
    """Return a digest of the names and bytes of all files below `root`."""
    digest = hashlib.sha256()
    for name, data in tree_bytes(root).items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def flip(path: Path, at: int, mask: int = 0x01) -> None:
    """Flip bits of one byte; a negative position counts from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def names_in(directory: Path) -> list[str]:
    """List the entries of a directory, including hidden ones."""
    return sorted(path.name for path in directory.iterdir())
