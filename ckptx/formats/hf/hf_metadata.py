"""`.hf_metadata/` and `huggingface/`: HF files that NeMo AutoModel and verl write next to their shards.

    config.json, tokenizer, custom code            to be copied into an HF checkpoint
    fqn_to_file_index_mapping.json                 {NAME: number of its file in the original checkpoint, from 1 on}
    fqn_to_dtype_mapping.json                      {NAME: its safetensors dtype there}; optional

Only AutoModel writes the two mappings.
Source: `nemo_automodel/components/checkpoint/addons.py`, `verl/utils/checkpoint/fsdp_checkpoint_manager.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME, DType
from ckptx.catalog.entry import Sidecar
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.hf.reader import read_json_object
from ckptx.formats.sidecars import list_sidecars
from ckptx.storage.interface import Source, local_path

# Format of the checkpoint -> name of the directory in it. Weights in verl's directory are ignored.
DIRECTORIES = {"dcp": ".hf_metadata", "sharded": ".hf_metadata", "fsdp": "huggingface"}
_CONFIG = "config.json"
FILE_MAPPING = "fqn_to_file_index_mapping.json"
DTYPE_MAPPING = "fqn_to_dtype_mapping.json"


class HfMetadata(NamedTuple):
    """The files of the HF checkpoint that a trainer started from, without its weights.

    Attributes:
        source: The directory.
        config: `config.json`, or None.
        sidecars: Files to copy to an output, with names relative to the directory; never the two mappings.
        file_numbers: Tensor name -> number of its file, from 1; empty if not recorded.
        dtypes: Tensor name -> original dtype; empty if not recorded.
    """

    source: Source
    config: dict[str, Any] | None
    sidecars: tuple[Sidecar, ...]
    file_numbers: dict[str, int]
    dtypes: dict[str, DType]


def find_hf_metadata(catalog: Catalog) -> Source | None:
    """Return the HF metadata directory of a checkpoint; None if it has none, or if its format never has one.

    If the checkpoint has separate model and optimizer directories, return the one in the model directory.
    """
    directory = DIRECTORIES.get(catalog.format)
    if directory is None:
        return None
    name = f"{catalog.parts[0].directory}/{directory}" if catalog.parts else directory
    source = catalog.source
    return source.with_location(source.location / name) if source.listing().is_directory(name) else None


def config_source(catalog: Catalog) -> Source:
    """Return the directory with the config of a checkpoint, and with its custom model code if there is any."""
    found = find_hf_metadata(catalog)
    return found if found is not None and found.listing().has(_CONFIG) else catalog.source


@contextmanager
def name_config_in_errors(catalog: Catalog) -> Iterator[None]:
    """Prepend the directory of the config to errors whose message begins with `config.json: `."""
    try:
        yield
    except CkptxError as error:
        message = str(error)
        if not message.startswith(f"{_CONFIG}: "):
            raise
        raise type(error)(f"{config_source(catalog).location / _CONFIG}{message.removeprefix(_CONFIG)}") from error


def local_config_directory(catalog: Catalog) -> Path:
    """Return the local directory of the config, for transformers.

    Raises:
        UnsupportedError: The checkpoint is not on a local disk.
    """
    return local_path(config_source(catalog).location)


def read_config(source: Source) -> dict[str, Any] | None:
    """Return the `config.json` of a directory, or None.

    Raises:
        InputError: It is damaged.
    """
    return read_json_object(source, _CONFIG) if source.listing().has(_CONFIG) else None


def read_hf_metadata(source: Source) -> HfMetadata:
    """Read an HF metadata directory.

    Raises:
        InputError: A file is damaged or has invalid values.
        UnsupportedError: A dtype is not one safetensors defines.
    """
    sidecars = list_sidecars(source, frozenset()).copied
    return HfMetadata(
        source,
        read_config(source),
        tuple(sidecar for sidecar in sidecars if sidecar.name not in (FILE_MAPPING, DTYPE_MAPPING)),
        _read_file_numbers(source),
        _read_dtypes(source),
    )


def _read_file_numbers(source: Source) -> dict[str, int]:
    if not source.listing().has(FILE_MAPPING):
        return {}
    files, path = read_json_object(source, FILE_MAPPING), source.location / FILE_MAPPING
    for name, number in files.items():
        if type(number) is not int or number < 1:
            raise InputError(
                f'{path}: file number of tensor "{name}" must be a positive integer, found {number!r:.80}; save it '
                "again, or pass --base PATH"
            )
    return files


def _read_dtypes(source: Source) -> dict[str, DType]:
    if not source.listing().has(DTYPE_MAPPING):
        return {}
    dtypes, path = {}, source.location / DTYPE_MAPPING
    for name, stored in read_json_object(source, DTYPE_MAPPING).items():
        dtype = DTYPES_BY_NAME.get(stored) if isinstance(stored, str) else None
        if dtype is None or not dtype.in_safetensors:
            error_class = UnsupportedError if isinstance(stored, str) else InputError
            raise error_class(
                f'{path}: dtype {stored!r:.80} of tensor "{name}" is not a dtype of safetensors 0.8; pass --base PATH'
            )
        dtypes[name] = dtype
    return dtypes
