"""`.hf_metadata/`: what NeMo Automodel leaves beside its shards for whoever makes an HF checkpoint of them.

    config.json, tokenizer, custom code            as they lie in the HF checkpoint to be
    fqn_to_file_index_mapping.json                 {NAME: number of its file in the original checkpoint, from 1 on}
    fqn_to_dtype_mapping.json                      {NAME: its dtype there, as safetensors calls it}; not always there

Source: `nemo_automodel/components/checkpoint/addons.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import BY_NAME, DType
from ckptx.catalog.entry import Sidecar
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.reader import read_json
from ckptx.formats.sidecars import look_around

DIRECTORY = ".hf_metadata"
_CONFIG = "config.json"
FILES = "fqn_to_file_index_mapping.json"
DTYPES = "fqn_to_dtype_mapping.json"


class HfMetadata(NamedTuple):
    """The HF checkpoint that a trainer started from, without its weights.

    Attributes:
        root: The directory.
        config: `config.json`, or None.
        sidecars: What travels with the weights, by path below `root`.
        files: Tensor name -> number of its file; empty when nothing says so.
        dtypes: Tensor name -> dtype it had; empty when nothing says so.
    """

    root: Path
    config: dict[str, Any] | None
    sidecars: tuple[Sidecar, ...]
    files: dict[str, int]
    dtypes: dict[str, DType]


def find_hf_metadata(catalog: Catalog) -> Path | None:
    """The directory beside the weights of a checkpoint in shards; of two parts, beside the first."""
    if catalog.format not in ("dcp", "sharded"):
        return None
    beside = catalog.root / catalog.parts[0].directory if catalog.parts else catalog.root
    return beside / DIRECTORY if (beside / DIRECTORY).is_dir() else None


def directory_of_config(catalog: Catalog) -> Path:
    """Where the config of a checkpoint lies that has one, and the code of a class that brings its own."""
    found = find_hf_metadata(catalog)
    return found if found is not None and os.path.lexists(found / _CONFIG) else catalog.root


def config_in(directory: Path) -> dict[str, Any] | None:
    """Its `config.json`, or None.

    Raises:
        InputError: It is damaged.
    """
    return read_json(directory / _CONFIG) if os.path.lexists(directory / _CONFIG) else None


def read_hf_metadata(directory: Path) -> HfMetadata:
    """All that is in the directory.

    Raises:
        InputError: A file is damaged, or says what cannot be.
        UnsupportedError: A dtype is not one safetensors defines.
    """
    carried = look_around(directory, frozenset()).carried
    return HfMetadata(
        directory,
        config_in(directory),
        tuple(sidecar for sidecar in carried if sidecar.name not in (FILES, DTYPES)),
        _files(directory / FILES),
        _dtypes(directory / DTYPES),
    )


def _files(path: Path) -> dict[str, int]:
    if not os.path.lexists(path):
        return {}
    files = read_json(path)
    for name, number in files.items():
        if type(number) is not int or number < 1:
            raise InputError(
                f'{path}: says tensor "{name}" is in file {number!r:.80}, needed a whole number from 1 on; save it '
                "again, or pass --base"
            )
    return files


def _dtypes(path: Path) -> dict[str, DType]:
    if not os.path.lexists(path):
        return {}
    dtypes = {}
    for name, said in read_json(path).items():
        dtype = BY_NAME.get(said) if isinstance(said, str) else None
        if dtype is None or not dtype.in_safetensors:
            kind = UnsupportedError if isinstance(said, str) else InputError
            raise kind(
                f'{path}: says tensor "{name}" has dtype {said!r:.80}, no dtype of safetensors 0.8; pass --base HF'
            )
        dtypes[name] = dtype
    return dtypes
