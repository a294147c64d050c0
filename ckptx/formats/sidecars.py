"""The files that travel with the weights, byte for byte: config, tokenizer, chat template, processors, remote code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptx.catalog.entry import Sidecar
from ckptx.storage import unreadable

MANIFEST = "ckptx.json"

# Weights in whatever format: those of the checkpoint are converted, the others stay behind and are named.
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".ot", ".tflite",
    ".distcp", ".npz", ".pkl", ".nemo", ".mlmodel", ".engine",
)  # fmt: skip
_INDEXES = (".safetensors.index.json", ".bin.index.json", ".h5.index.json", ".msgpack.index.json")
_MAX_DEPTH = 3


class Surroundings(NamedTuple):
    """What lies beside the weights: files to carry, and weight files of other formats that are left behind."""

    carried: tuple[Sidecar, ...]
    left: tuple[str, ...]


def look_around(root: Path, used: frozenset[str]) -> Surroundings:
    """Lists the sidecars below `root`.

    A directory that holds weights of its own (`onnx/`, `original/`) is left behind, unless `modules.json` says that the
    model is built from it, as sentence-transformers does.

    Args:
        root: The directory of the checkpoint.
        used: Names of the weight files that are part of the checkpoint.

    Raises:
        InputError: A link leads nowhere: a cache or a copy that is incomplete would lose its tokenizer in silence.
    """
    modules = _modules(root)
    carried: list[Sidecar] = []
    left: list[str] = []
    for directory, names in _walk(root, 0):
        inside = [str(Path(directory, name).relative_to(root)) for name in names]
        top = Path(inside[0]).parts[0] if inside else ""
        weights = [name for name in inside if name.endswith(_WEIGHTS + _INDEXES) and name not in used]
        if directory != str(root) and weights and top not in modules:
            left.extend(inside)
            continue
        is_module = directory != str(root) and top in modules
        left.extend(name for name in weights if not is_module)
        carried.extend(
            Sidecar(name, os.stat(root / name).st_size)
            for name in inside
            if name not in used and name not in (MANIFEST, ".metadata") and (is_module or name not in weights)
        )
    return Surroundings(tuple(sorted(carried)), tuple(sorted(left)))


def _walk(directory: Path, depth: int) -> Iterator[tuple[str, list[str]]]:
    entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise unreadable(Path(entry.path), FileNotFoundError())
    yield str(directory), [entry.name for entry in entries if entry.is_file()]
    if depth < _MAX_DEPTH:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _walk(Path(entry.path), depth + 1)


def _modules(root: Path) -> frozenset[str]:
    try:
        listed = json.loads((root / "modules.json").read_text(encoding="utf-8"))
        return frozenset(module["path"].split("/")[0] for module in listed if module.get("path"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return frozenset()  # absent, or somebody else's modules.json
