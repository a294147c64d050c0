"""Open HF directories: `model.safetensors`, or an index and its shards.

The index decides which files belong to the checkpoint, never a glob: stock loaders that glob let a stray
`consolidated.safetensors` override the real weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.errors import InputError, ReadError, UnsupportedError
from ckptx.formats.hf.safetensors import Header, parse_header
from ckptx.formats.sharding_info import SHARDING_INFO, contains_shards, files_with_sharding_info
from ckptx.storage.files import resolve_inside
from ckptx.storage.interface import Location, Source, SourceFiles
from ckptx.storage.local import LocalSource
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import MAX_CONFIG_BYTES, MAX_INDEX_BYTES
from ckptx.wording import counted, list_names

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def open_huggingface(source: Source, weights: str) -> Catalog | None:
    """Open the safetensors of a directory.

    Args:
        source: The directory.
        weights: Name of the index or of the single safetensors file.

    Returns:
        The catalog, or None if the headers record that the files contain shards of tensors.

    Raises:
        InputError: A file is missing or corrupt, or index and headers disagree; the message names file and tensor.
        UnsupportedError: A header has a dtype, or a version of the sharding record, that ckptx does not know.
    """
    if weights.endswith(".json"):
        text = read_text(source, weights, MAX_INDEX_BYTES)
        weight_map = parse_index(text, source.location / weights)
        names = sorted(set(weight_map.values()))
        catalog = _open_files(source, names, index=weights)
        if catalog is None:
            return None
        check_index(weight_map, catalog, source.location / weights)
        catalog.verbatim[weights] = text
    else:
        names = [weights]
        catalog = _open_files(source, names)
        if catalog is None:
            return None
    catalog.notes.extend(stray_notes(source.listing(), {*names, weights}, (".safetensors", ".bin")))
    return catalog


def _open_files(source: Source, names: list[str], index: str | None = None) -> Catalog | None:
    """Return the catalog of the files, or None if they contain shards instead of whole tensors.

    Args:
        source: The directory.
        names: Names of the files.
        index: Name of the index that lists them; None for a single file.
    """
    root = source.location
    catalog = Catalog(root, "huggingface", {}, opened_source=source)
    file_of_tensor: dict[str, str] = {}
    files_with_info: set[str] = set()
    regions: dict[Shape, Region] = {}
    with source.open() as files:
        for name in names:
            try:
                identity = files.identity(name)
                header = read_header(files, name)
            except ReadError:
                raise
            except InputError as error:
                if index is None or name.endswith(".safetensors"):
                    raise
                raise InputError(
                    f'{root / index}: lists the file "{name}", which is missing or not a safetensors file; correct '
                    "the index"
                ) from error
            if SHARDING_INFO in header.metadata:
                if contains_shards(header, str(root / name)):
                    return None
                files_with_info.add(name)
            catalog.files[name], catalog.identities[name] = identity.nbytes, identity
            catalog.verbatim[name] = header.text
            for tensor, dtype, shape, begin, end in header.tensors:
                if tensor in file_of_tensor:
                    if {name, file_of_tensor[tensor]} <= files_with_info:
                        return None
                    other = file_of_tensor[tensor]
                    if catalog.identities[other] == identity:
                        raise InputError(
                            f"{root}: the index names one file twice, as {other} and {name}; correct the index"
                        )
                    raise InputError(
                        f'{root}: tensor "{tensor}" is in both {other} and {name}; remove one of the files'
                    )
                file_of_tensor[tensor] = name
                region = regions.get(shape)
                if region is None:
                    region = regions[shape] = full_region(shape)
                chunk = Chunk(region, name, begin, end - begin)
                catalog.tensors[tensor] = TensorEntry(tensor, dtype, shape, (chunk,))
        return None if files_with_info and _has_further_shards(source, files, set(names)) else catalog


def _has_further_shards(source: Source, files: SourceFiles, names: set[str]) -> bool:
    """Return True if another file of the directory contains shards: then these may be just the first shards."""
    others = {name for name in source.listing() if name.endswith(".safetensors")} - names
    return any(
        contains_shards(read_header(files, name), str(source.location / name))
        for name in files_with_sharding_info(source, others)
    )


def read_header(files: SourceFiles, name: str) -> Header:
    """Return the header of a safetensors file.

    Raises:
        InputError, UnsupportedError: See `parse_header`.
    """
    return parse_header(lambda at, n: files.read(name, at, n), files.size(name), str(files.root / name))


def read_text(source: Source, name: str, limit: int) -> str:
    """Read a small UTF-8 file without newline conversion.

    Raises:
        InputError: It is missing, unreadable, larger than `limit` bytes, not UTF-8, or a git-lfs pointer.
    """
    path = source.location / name
    try:
        text = source.read_small(name, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 at byte {error.start}; correct the file, or restore it from a copy"
        ) from error
    if text.startswith("version https://git-lfs"):
        raise InputError(f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull` or download it again")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a local file; see `read_json_object`."""
    return read_json_object(LocalSource(path.parent), path.name)


def read_json_object(source: Source, name: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        InputError: `read_text` raised it, the file is not a JSON object, or an object has the same key twice.
    """
    path = source.location / name
    value = parse_json(read_text(source, name, MAX_CONFIG_BYTES), path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found a {type(value).__name__}; correct or remove the file")
    return value


def parse_index(text: str, path: Location) -> dict[str, str]:
    """Return the weight map (tensor name -> file name) of an index.

    Raises:
        InputError: It is not JSON, has no weight map, an empty one, or one with a file outside the directory.
    """
    index = parse_json(text, path, "index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{path}: has no weight_map of tensor to file; correct the index, or download it again")
    if not weight_map:
        raise InputError(f"{path}: weight_map is empty, the checkpoint has no tensors; download it again")
    for file in dict.fromkeys(weight_map.values()):
        resolve_inside(path.parent, file)
    return weight_map


def check_index(weight_map: dict[str, str], catalog: Catalog, path: Location) -> None:
    """Check that index and files list the same tensors.

    Raises:
        InputError: A tensor is only in one of them, or in another file than the index lists.
    """
    for name, file in weight_map.items():
        entry = catalog.tensors.get(name)
        if entry is None or entry.chunks[0].file != file:
            found = "no file contains it" if entry is None else f"it is in {entry.chunks[0].file}"
            raise InputError(
                f'{path}: lists tensor "{name}" in {file}, but {found}; the checkpoint is incomplete, download it again'
            )
    for name, entry in catalog.tensors.items():
        if name not in weight_map:
            raise InputError(
                f'{path}: does not list tensor "{name}" of {entry.chunks[0].file}; index and files are of '
                "different checkpoints"
            )


def stray_notes(names: Iterable[str], used_files: set[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return a list with one note on the weight files that are not part of the checkpoint; empty if there are none.

    Args:
        names: Names of all files in the directory.
        used_files: Names of the files that are part of the checkpoint.
        suffixes: Suffixes of weight files.
    """
    strays = sorted(name for name in names if name.endswith(suffixes) and name not in used_files)
    if len(strays) < 2:
        return [f"{name} ignored: it is not part of the checkpoint" for name in strays]
    return [f"{counted(len(strays), 'weight file')} ignored, not part of the checkpoint: {list_names(strays)}"]


def refuse_adapters(names: Iterable[str], root: Location) -> None:
    """Refuse LoRA and other adapters, because the base weights alone are another model.

    Args:
        names: Names of tensors, or their patterns.
        root: The checkpoint, for error messages.

    Raises:
        UnsupportedError: A tensor name belongs to an adapter.
    """
    for name in names:
        if any(part in _ADAPTER_PARTS or part.startswith("lora_") for part in name.split(".")):
            raise UnsupportedError(
                f'{root}: tensor "{name}" belongs to an adapter (LoRA or similar); write the adapter with '
                "`ckptx convert to-peft`, or add it to its model with `ckptx merge MODEL ADAPTER DST`"
            )


_ADAPTER_PARTS = frozenset({"base_layer", "modules_to_save", "ia3_l", "prompt_embeddings", "hada_w1_a", "lokr_w1"})


def format_index(weight_map: dict[str, str], metadata: dict[str, Any]) -> str:
    """Return an index in the format of transformers: sorted, indented by two spaces, with a final newline."""
    if not weight_map:
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    # Python's JSON encoder runs in C only without indentation, so a separator with spaces indents the many entries.
    metadata_text = json.dumps(metadata, indent=2, sort_keys=True).replace("\n", "\n  ")
    entries = json.dumps(weight_map, separators=(",\n    ", ": "), sort_keys=True)[1:-1]
    return f'{{\n  "metadata": {metadata_text},\n  "weight_map": {{\n    {entries}\n  }}\n}}\n'
