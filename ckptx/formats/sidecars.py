"""The files that travel with the weights, byte for byte: config, tokenizer, chat template, processors, remote code."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptx.catalog.entry import Sidecar
from ckptx.formats.foreign import is_foreign_weights
from ckptx.storage.files import read_small, unreadable
from ckptx.untrusted.file_name import name_fault
from ckptx.untrusted.limits import CONFIG_BYTES

MANIFEST = "ckptx.json"
_OWN = frozenset({MANIFEST, ".metadata"})

# Weights in whatever format: those of the checkpoint are converted, the others stay behind and are named.
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".ot", ".tflite",
    ".distcp", ".npz", ".pkl", ".nemo", ".mlmodel", ".engine",
)  # fmt: skip
_INDEXES = (".safetensors.index.json", ".bin.index.json", ".h5.index.json", ".msgpack.index.json")
_MAX_DEPTH = 3


# What of a directory below the checkpoint travels: remote code, templates, configs; not the logs of a trainer.
_TEXTS = (".json", ".jinja", ".py", ".txt", ".model", ".tiktoken", ".md")
# What belongs to one weight file in a directory that may hold anything.
_KNOWN = re.compile(
    r"(config|generation_config|(pre)?processor_config|image_processor_config|video_preprocessor_config|vocab|merges|"
    r"special_tokens_map|added_tokens|chat_template|sentencepiece\.bpe|spiece|modeling_\w+|configuration_\w+|"
    r"(tokenizer|tokenization)\w*)\.(json|txt|model|jinja|py)"
)


# What repositories of models hold beside that.
_ABOUT = re.compile(
    r"README(\.\w+)?|LICEN[CS]E([-_.]\w+)*|NOTICE(\.\w+)?|USE_POLICY(\.\w+)?|\.gitattributes|modules\.json|"
    r"(config_sentence_transformers|sentence_bert_config|quantize_config|quantization_config|hf_quant_config|"
    r"adapter_config|params|recipe|video_processor|fqn_to_file_index_mapping)\.(json|yaml)|tekken\.json|"
    r"[\w.-]+\.tiktoken|(vocab|merges|sentencepiece|spiece|tokenizer)[\w.-]*\.(txt|model|json|vocab|bpe)"
)
# How weights are quantised, beside what config.json says of it: read by vLLM and GPTQ's tools.
QUANTIZATION_FILES = frozenset({"hf_quant_config.json", "quantize_config.json", "quantization_config.json"})


def is_known_sidecar(base: str) -> bool:
    """True for the name of a file that belongs to a model by its name alone."""
    return _KNOWN.fullmatch(base) is not None or _ABOUT.fullmatch(base) is not None


class Surroundings(NamedTuple):
    """What lies beside the weights: files to carry, and files that are left behind."""

    carried: tuple[Sidecar, ...]
    left: tuple[str, ...]


def look_around(root: Path, used: frozenset[str]) -> Surroundings:
    """Lists the sidecars below `root`.

    A directory that holds weights of its own (`onnx/`, `original/`) is left behind, unless `modules.json` says that the
    model is built from it, as sentence-transformers does. So is a file whose name has no place in an output.

    Args:
        root: The directory of the checkpoint.
        used: Names of the weight files that are part of the checkpoint.

    Raises:
        InputError: A link leads nowhere: a cache or a copy that is incomplete would lose its tokenizer in silence.
    """
    modules = _modules(root)
    homes = {str(Path(name).parent) for name in used}
    carried: list[str] = []
    left: list[str] = []
    for directory, names in _walk(root, 0):
        inside = [name for name in names if name not in used and Path(name).name not in _OWN]
        weights = [name for name in inside if name.endswith(_WEIGHTS + _INDEXES) or is_foreign_weights(Path(name).name)]
        if directory == ".":
            carried.extend(name for name in inside if name not in weights)
            left.extend(weights)
        elif Path(directory).parts[0] in modules:
            carried.extend(inside)
        elif weights or directory in homes:
            left.extend(inside)
        else:
            carried.extend(name for name in inside if name.endswith(_TEXTS))
            left.extend(name for name in inside if not name.endswith(_TEXTS))
    left.extend(name for name in carried if name_fault(name) is not None)
    return Surroundings(_sidecars(root, carried), tuple(sorted(left)))


def beside_one_file(root: Path) -> Surroundings:
    """The sidecars of one weight file with a name of its own, in a directory that may hold anything."""
    names = [entry.name for entry in os.scandir(root) if entry.is_file() and _KNOWN.fullmatch(entry.name)]
    return Surroundings(_sidecars(root, names), ())


def _sidecars(root: Path, names: list[str]) -> tuple[Sidecar, ...]:
    """Those of the names that a manifest may hold, too."""
    return tuple(Sidecar(name, os.stat(root / name).st_size) for name in sorted(names) if name_fault(name) is None)


def _walk(root: Path, depth: int, below: str = ".") -> Iterator[tuple[str, list[str]]]:
    """Directories and the files in them, as names relative to `root`."""
    listed = (entry for entry in os.scandir(root / below) if entry.name not in _OWN)
    entries = sorted(listed, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise unreadable(Path(entry.path), FileNotFoundError())
    yield below, [str(Path(below, entry.name)) for entry in entries if entry.is_file()]
    if depth < _MAX_DEPTH:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _walk(root, depth + 1, str(Path(below, entry.name)))


def _modules(root: Path) -> frozenset[str]:
    path = root / "modules.json"
    if not path.is_file():
        return frozenset()
    try:
        listed = json.loads(read_small(path, CONFIG_BYTES).decode("utf-8"))
        return frozenset(module["path"].split("/")[0] for module in listed if module.get("path"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()  # absent, or somebody else's modules.json
