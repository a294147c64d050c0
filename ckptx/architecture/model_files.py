"""Facts about each model type, one generated file each, and the index of the classes.

    classes.json         {"schema": 4, "transformers": "5.23.0", "classes": {"LlamaForCausalLM": "llama", ...}}
    models/llama.json    {"source": {"directories": ["llama"], "digest": ...}, "classes": {...}, "bodies": {...},
                          "structures": {...}, "shapes": {...}, "shape_bodies": {...}}

A file has one key per line and is self-contained: `classes`, `bodies` and `structures` are described in
`class_decoding` and `structure_decoding`, `shapes` and `shape_bodies` in `shape_decoding` (bodies hold what classes
around the same base model share); `tools/model_file_writer.py` writes them. `source` identifies the code of
transformers from which the facts were read, so that another version of it is noticed. Only the file of the required
class is opened. The index names the file: the class and model type of a checkpoint never become part of a path.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 4
INDEX_FILE = Path(__file__).with_name("classes.json")
MODELS_DIR = Path(__file__).with_name("models")
FACT_SECTIONS = ("classes", "bodies", "structures", "shapes", "shape_bodies")

Sections = Mapping[str, Mapping[str, Any]]  # contents of a model file: name of a section -> its JSON object


@functools.cache
def read_index() -> Mapping[str, Any]:
    """Return the index: `transformers` is the introspected version, `classes` the model type of each class."""
    found: dict[str, Any] = json.loads(INDEX_FILE.read_bytes())
    assert found["schema"] == SCHEMA, f"{INDEX_FILE.name} has schema {found['schema']}, this reader needs {SCHEMA}"
    return found


def class_names() -> list[str]:
    """Return the names of all known classes, sorted."""
    return list(read_index()["classes"])


def classes_of(model_type: str) -> list[str]:
    """Return the classes whose own config has this model type, sorted."""
    return [name for name, known in read_index()["classes"].items() if known == model_type]


def sections_of(class_name: str) -> Sections | None:
    """Return the contents of the file of a class; None for an unknown class."""
    model_type = read_index()["classes"].get(class_name)
    return None if model_type is None else _read_model_file(model_type)


def source_of(class_name: str) -> Mapping[str, Any] | None:
    """Return the section `source` for a class; None for an unknown class.

    `directories` lists the directories in `transformers/models` with its code, and `digest` is the digest of this code
    (`transformers_version.source_digest`).
    """
    sections = sections_of(class_name)
    return None if sections is None else sections["source"]


def model_file(model_type: str) -> Path:
    """Return the path of the file of a model type, which must be one of the index; it may be empty."""
    return MODELS_DIR / f"{model_type or 'no-model-type'}.json"


@functools.cache
def _read_model_file(model_type: str) -> Sections:
    found: dict[str, Mapping[str, Any]] = json.loads(model_file(model_type).read_bytes())
    return found
