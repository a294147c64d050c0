"""Locate and open the checkpoint at a path.

A path may be a directory, a weight file, an index, or a parent directory of one checkpoint. Readers of formats other
than HF safetensors are imported on demand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog, CheckpointPart
from ckptx.catalog.entry import ArchiveChunks, Sidecar, TensorEntry
from ckptx.catalog.format_traits import TRAITS_BY_FORMAT
from ckptx.catalog.object_ids import ObjectIds
from ckptx.errors import ArgumentTypeError, CkptxError, InputError, StorageFailure, UnsupportedError
from ckptx.formats.dcp import detect as dcp
from ckptx.formats.dcp.megatron import COMMON_FILE, NAMES_NOTE, is_torch_dist, torch_dist_sidecars
from ckptx.formats.deepspeed import detect as deepspeed
from ckptx.formats.deepspeed.file_names import COMPANIONS
from ckptx.formats.fsdp import detect as fsdp
from ckptx.formats.hf import detect as hf_detect
from ckptx.formats.hf import reader as hf_reader
from ckptx.formats.hf.hf_metadata import find_hf_metadata, read_config
from ckptx.formats.located_checkpoint import Detect, LocatedCheckpoint
from ckptx.formats.manifest_file import note_unreadable_manifest
from ckptx.formats.peft import detect as peft
from ckptx.formats.rank_files import (
    Shapes,
    complete_directories,
    refuse_part_directory,
    refuse_part_file,
    refuse_parts_in_tree,
)
from ckptx.formats.sharded import detect as sharded
from ckptx.formats.sharded.file_names import is_shard
from ckptx.formats.sharding_info import files_with_sharding_info
from ckptx.formats.sidecars import (
    MANIFEST,
    is_resumed_state_file,
    list_sidecars,
    list_trainer_files,
    sidecars_of_file,
)
from ckptx.formats.torch_checkpointing import detect as torch_checkpointing
from ckptx.formats.unsupported import refuse_directory, refuse_file, refuse_in_tree
from ckptx.mapping.names import is_optimizer, is_trainer_state
from ckptx.storage.interface import Location, Source
from ckptx.storage.listing import EntryKind
from ckptx.storage.local import LocalSource
from ckptx.storage.staging_paths import is_in_staging_directory
from ckptx.untrusted.limits import MAX_NAME_LENGTH, MAX_TENSORS
from ckptx.untrusted.remote_name import refuse_remote
from ckptx.wording import counted, list_names

# In order of precedence: `.metadata` before weights in the same directory, shards by name before files that are shards
# only by their header, and HF weights before the rank files from which they were merged. `metadata.pkl` of
# torch_checkpointing may list safetensors files of any name, so its detector comes before that of HF; it returns None
# if the directory also has merged HF weights.
DETECTORS: tuple[Detect, ...] = (
    dcp.detect,
    sharded.detect,
    torch_checkpointing.detect,
    hf_detect.detect_weights,
    fsdp.detect,
    deepspeed.detect,
    peft.detect,
)

_METADATA = ".metadata"
# Names that make a directory unsupported even if its subdirectories contain checkpoints.
_UNSUPPORTED_MARKERS = re.compile(r"__\d+\.metadata|adapter_model\..+")
_SEARCH_LEVELS = 2  # levels of subdirectories that are searched for a checkpoint


def open_checkpoint(path: str | Path | Source) -> Catalog:
    """Open the checkpoint at a path or source; only headers and metadata are read.

    Args:
        path: A local path, or a source of any storage.

    Raises:
        ArgumentTypeError: `path` is neither a path nor a source.
        InputError: There is no checkpoint, or more than one, or it is corrupt or incomplete.
        UnsupportedError: Its format is not supported, or the path is a URL.
    """
    if isinstance(path, str | Path):
        refuse_remote(path)
        opened: Source = LocalSource(path)
    elif hasattr(path, "without_cache"):  # `Source` is a protocol that isinstance cannot check
        opened = path
    else:
        raise ArgumentTypeError(f"path: {path!r} must be a string or a path")
    opened = opened.without_cache()
    kind = opened.read_kind()
    if kind not in (None, EntryKind.BROKEN_LINK):
        _refuse_unfinished(opened)  # before the files in it, some of which are missing, are judged
    located = locate(opened)
    source = located.source
    _refuse_unfinished(source)
    listing = source.listing()
    identities = source.read_identities(
        name for name in (*located.weights, "config.json", MANIFEST) if listing.has(name)
    )
    located, catalog = _open_located(located)
    catalog.opened_from = opened.location
    catalog.opened_file = opened.location if kind is EntryKind.FILE else None
    if not catalog.tensors:
        raise InputError(f"{catalog.location}: contains no tensors; pass another checkpoint")
    _check_limits(catalog)
    _refuse_rank_part(located, catalog)
    note_unreadable_manifest(source, catalog.notes)
    _add_config_and_sidecars(catalog, located)
    catalog.identities = {**identities, **catalog.identities}
    return catalog


def _refuse_unfinished(source: Source) -> None:
    """Refuse the hidden directory of a conversion that did not finish.

    Raises:
        InputError: The source is in such a directory.
    """
    if is_in_staging_directory(source.absolute_locations()[-1]):
        raise InputError(f"{source.location}: an unfinished output of ckptx; run the conversion again with --resume")


def _open_located(located: LocatedCheckpoint) -> tuple[LocatedCheckpoint, Catalog]:
    """Open the weights of a located checkpoint.

    Returns:
        `located`, with the format "sharded" if the headers of HF files record that they contain shards; and the catalog
        without config and sidecars.
    """
    source = located.source
    if located.kind == "dcp":
        catalog = _open_dcp(located)
    elif located.kind == "sharded":
        catalog = _open_shards(source)
    elif located.kind == "bin":
        from ckptx.formats.hf.torch_bin import open_bin

        catalog = open_bin(source, list(located.weights))
        used_files = {*catalog.files, *located.weights}
        catalog.notes.extend(hf_reader.stray_notes(source.listing(), used_files, (".bin",)))
    elif located.kind == "fsdp":
        from ckptx.formats.fsdp.reader import open_fsdp

        catalog = open_fsdp(source, located.weights)
    elif located.kind == "deepspeed":
        from ckptx.formats.deepspeed.reader import open_deepspeed

        catalog = open_deepspeed(source, located.weights)
    elif located.kind == "torch-checkpointing":
        from ckptx.formats.torch_checkpointing.reader import open_torch_checkpointing

        catalog = open_torch_checkpointing(source)
    elif located.kind == "peft":
        from ckptx.formats.peft.reader import open_peft

        catalog = open_peft(source, located.weights[0])
    else:
        opened = hf_reader.open_huggingface(source, located.weights[0])
        if opened is None:
            located = LocatedCheckpoint(source, "sharded", (".",))
        catalog = _open_shards(source) if opened is None else opened
    return located, catalog


def _read_shapes(source: Source, location: Location) -> Shapes | None:
    """Return the shapes of the tensors in a file or directory, or None if it cannot be opened."""
    try:
        return {
            name: entry.shape
            for name, entry in _open_located(locate(source.with_location(location)))[1].tensors.items()
        }
    except (CkptxError, OSError):
        return None


def _refuse_rank_part(located: LocatedCheckpoint, catalog: Catalog) -> None:
    """Refuse a file or directory that holds what one rank stored of a checkpoint.

    Raises:
        UnsupportedError: It is one.
    """
    source, read_shapes = located.source, partial(_read_shapes, located.source)
    shapes = {name: entry.shape for name, entry in catalog.tensors.items()}
    metadata = _header_metadata(catalog, located.weights[0])
    if TRAITS_BY_FORMAT[located.kind].is_published and not located.weights[0].endswith(".index.json"):
        refuse_part_file(source, located.weights[0], shapes, read_shapes, metadata)
    refuse_part_directory(source, shapes, read_shapes, metadata)


def _header_metadata(catalog: Catalog, file: str) -> dict[str, Any]:
    """Return `__metadata__` in the header of a safetensors file; empty without one, and for other files."""
    text = catalog.verbatim.get(file, "")
    try:
        found = json.loads(text).get("__metadata__") if text and not file.endswith(".json") else None
    except (ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_limits(catalog: Catalog) -> None:
    """Refuse overlong names, and more tensors than any model has."""
    longest = max(map(len, (*catalog.tensors, *catalog.objects)))
    if longest > MAX_NAME_LENGTH:
        raise InputError(
            f"{catalog.location}: has a name of {longest:,} characters, the limit is {MAX_NAME_LENGTH:,}; shorten it"
        )
    if len(catalog.tensors) > MAX_TENSORS:
        raise InputError(
            f"{catalog.location}: has {len(catalog.tensors):,} tensors, the limit is {MAX_TENSORS:,}; split the "
            "checkpoint"
        )


def _add_config_and_sidecars(catalog: Catalog, located: LocatedCheckpoint) -> None:
    """Set config, sidecars and their identities, and add notes on files that are not copied.

    An adapter has no config of a model, and its own config as the only sidecar.
    """
    source = located.source
    if catalog.traits.is_adapter:
        catalog.identities = {**source.read_identities((peft.CONFIG_FILE,)), **catalog.identities}
        catalog.sidecars = (Sidecar(peft.CONFIG_FILE, source.size(peft.CONFIG_FILE)),)
        return
    hf_metadata = find_hf_metadata(catalog)
    catalog.config = None if hf_metadata is None else read_config(hf_metadata)
    if catalog.config is not None:  # conversions copy the sidecars of `hf_metadata`, not those next to the weights
        _set_training_files(catalog, located)
        _note_dropped_files(catalog, list_trainer_files(source))
        return
    catalog.config = read_config(source)
    companions = COMPANIONS if located.kind == "deepspeed" else ()
    used_files = frozenset((*catalog.files, *located.weights, *catalog.verbatim, *companions))
    is_megatron = located.kind == "dcp" and is_torch_dist(source)
    if not is_megatron:
        _set_training_files(catalog, located)
    if located.kind != "dcp" or catalog.config is not None:
        sidecars = list_sidecars(source, used_files) if _has_own_directory(located) else sidecars_of_file(source)
        catalog.sidecars = sidecars.copied
        catalog.identities = {**sidecars.identities, **catalog.identities}
        _note_dropped_files(catalog, [each for each in sidecars.dropped if not (is_megatron and each == COMMON_FILE)])
    elif not is_megatron:
        _note_dropped_files(catalog, list_trainer_files(source))
    if is_megatron:
        sidecars_by_name = {sidecar.name: sidecar for sidecar in (*catalog.sidecars, *torch_dist_sidecars(source))}
        catalog.sidecars = tuple(sidecars_by_name[name] for name in sorted(sidecars_by_name))
        catalog.identities = {**source.read_identities(sidecars_by_name), **catalog.identities}
        catalog.notes.append(NAMES_NOTE)


def _set_training_files(catalog: Catalog, located: LocatedCheckpoint) -> None:
    """Set the files from which the trainer of a DCP resumes, and their identities; do nothing for other formats."""
    if located.kind == "dcp":
        names = tuple(name for name in list_trainer_files(located.source) if is_resumed_state_file(name))
        catalog.training_files = names
        catalog.identities = {**located.source.read_identities(names), **catalog.identities}


def _note_dropped_files(catalog: Catalog, names: Iterable[str]) -> None:
    """Add a note with the files that are never copied, except those that have a note of their own."""
    noted_words = {word.rstrip(",:") for note in catalog.notes for word in note.split(" ")}
    noted_names = noted_words.union(catalog.training_files)
    dropped = [name for name in names if name not in noted_names]
    if dropped:
        catalog.notes.append(f"not copied: {list_names(dropped)}")


def _has_own_directory(located: LocatedCheckpoint) -> bool:
    """Return False for a weight file with a custom name, whose directory may contain unrelated files."""
    weights = located.weights[0]
    return (
        not TRAITS_BY_FORMAT[located.kind].is_published
        or weights in hf_detect.WHOLE_CHECKPOINT_NAMES
        or weights.endswith(".index.json")
    )


def _open_shards(source: Source) -> Catalog:
    from ckptx.formats.sharded.reader import open_sharded

    return open_sharded(source)


def _open_dcp(located: LocatedCheckpoint) -> Catalog:
    """Open a DCP that is stored in one directory, or in two parts: a model and an optimizer directory.

    The catalog of two parts combines the names and files of both. The first part may be sharded safetensors instead of
    a DCP.
    """
    from ckptx.formats.dcp.reader import open_dcp

    source = located.source
    if located.weights == (".",):
        return open_dcp(source)
    parts = [
        (part, open_dcp(part_source) if source.listing().is_file(f"{part}/{_METADATA}") else _open_shards(part_source))
        for part, part_source in ((part, source.with_location(source.location / part)) for part in located.weights)
    ]
    merged = Catalog(located.root, "dcp", {}, opened_source=source)
    for part, catalog in parts:
        is_second, relocation = part == located.weights[1], _Relocation(part)
        names: dict[str, str] = {}
        for stored_name, entry in catalog.tensors.items():
            name = _optimizer_name(stored_name) if is_second else stored_name
            if name in merged.tensors:
                raise InputError(
                    f'{located.root}: tensor "{name}" is in both {" and ".join(located.weights)}; pass one of them'
                )
            merged.tensors[name] = relocation.relocate(entry)._replace(name=name)
            names[name] = stored_name
        for stored_name, pickled in catalog.objects.items():
            name = _optimizer_name(stored_name) if is_second else stored_name
            if name in merged.objects:  # trainer state that both parts save, under the same name
                name = f"optimizer.{stored_name}"
            merged.objects[name] = pickled._replace(name=name, file=f"{part}/{pickled.file}")
            names[name] = stored_name
        merged.parts += (CheckpointPart(part, names, catalog.planner_data),)
        merged.files.update((f"{part}/{name}", size) for name, size in catalog.files.items())
        merged.identities.update((f"{part}/{name}", each) for name, each in catalog.identities.items())
        merged.notes.extend(f"{part}: {note}" for note in catalog.notes)
    return merged


class _Relocation:
    """Prefixes the file names of tensors with a directory; tuples of names that tensors share stay shared."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files: dict[int, tuple[str, ...]] = {}
        self._ids = ObjectIds()

    def relocate(self, entry: TensorEntry) -> TensorEntry:
        """Return the tensor with its files in the directory."""
        chunks = entry.chunks
        if type(chunks) is ArchiveChunks:
            return entry._replace(chunks=chunks.with_files(self._relocate_files(chunks.files)))
        chunks, replicas = (
            tuple(chunk._replace(file=f"{self._directory}/{chunk.file}") for chunk in each)
            for each in (chunks, entry.replicas)
        )
        return entry._replace(chunks=chunks, replicas=replicas)

    def _relocate_files(self, files: Sequence[str]) -> tuple[str, ...]:
        key = self._ids(files)
        known = self._files.get(key)
        if known is None:
            known = self._files[key] = tuple([f"{self._directory}/{file}" for file in files])
        return known


def _optimizer_name(name: str) -> str:
    """Return the name in the catalog of a tensor or object of the optimizer directory.

    It gets the prefix `optimizer.`, unless its own name shows that it is optimizer or trainer state.
    """
    return name if is_optimizer(name) or is_trainer_state(name) else f"optimizer.{name}"


def locate(source: Source) -> LocatedCheckpoint:
    """Find the checkpoint at a location, which may be a file or a directory above the checkpoint.

    Raises:
        InputError: There is no checkpoint, or more than one; the message lists them.
        UnsupportedError: The format is recognized but not supported.
    """
    path = source.location
    kind = source.read_kind()
    if kind is EntryKind.BROKEN_LINK:
        source.with_location(path.parent).size(path.name)  # raises an error with the target of the link
    if kind is None or kind is EntryKind.BROKEN_LINK:
        raise InputError(f"{path}: no such file or directory")
    if kind is EntryKind.FILE:
        return _locate_file(source.with_location(path.parent), path.name)
    read_shapes = partial(_read_shapes, source)
    located = _locate_directory(source)
    if located is not None:
        return located
    refusals: list[UnsupportedError] = []
    candidates = dict(_find_candidates(source, "", _SEARCH_LEVELS, refusals))
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if candidates:
        complete = complete_directories(source, list(candidates), read_shapes)  # raises if it would be empty
        listed = ", ".join(str(path / name) for name in complete[:8])
        more = f" and {len(complete) - 8} more" if len(complete) > 8 else ""
        part_count = len(candidates) - len(complete)
        parts = f" and {counted(part_count, 'part')} of others, one per rank" if part_count else ""
        advice = f"choose one: {listed}{more}" if len(complete) > 1 else f"pass {listed}"
        raise InputError(f"{path}: contains {counted(len(complete), 'checkpoint')}{parts}; {advice}")
    if refusals:
        raise refusals[0]
    refuse_in_tree(source, _SEARCH_LEVELS)
    refuse_parts_in_tree(source, _SEARCH_LEVELS, read_shapes)
    problem = "has no .metadata, *.safetensors or pytorch_model*.bin" if len(source.listing()) else "is empty"
    raise InputError(f"{path}: no checkpoint found, the directory {problem}; pass the directory of a checkpoint")


def _locate_file(source: Source, name: str) -> LocatedCheckpoint:
    """Find the checkpoint to which a file of the directory belongs; for many formats, it is the whole directory.

    Raises:
        InputError: It is not a weight file or an index.
        UnsupportedError: The format is recognized but not supported.
    """
    if is_shard(name):
        return LocatedCheckpoint(source, "sharded", (".",))
    for locate_by_file in (
        fsdp.locate_by_file,
        deepspeed.locate_by_file,
        torch_checkpointing.locate_by_file,
        peft.locate_by_file,
    ):
        located = locate_by_file(source, name)
        if located is not None:
            return located
    if not (name.endswith(".safetensors") and files_with_sharding_info(source, [name])):
        refuse_file(source, name)
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return hf_detect.locate_by_header(source, name)
    if name == _METADATA:
        return LocatedCheckpoint(source, "dcp", (".",))
    if name.endswith((".bin", ".bin.index.json", ".pt", ".pth")):
        return LocatedCheckpoint(source, "bin", (name,))
    raise InputError(f"{source.location / name}: not a weight file or index; pass the directory of the checkpoint")


def _locate_directory(source: Source) -> LocatedCheckpoint | None:
    """Find the checkpoint whose files are directly in a directory; None if there is none.

    Raises:
        InputError: There are several checkpoints, or the save of a DCP was interrupted.
        UnsupportedError: The format is recognized but not supported.
    """
    read_shapes = partial(_read_shapes, source)
    for detect in DETECTORS:
        located = detect(source, read_shapes)
        if located is not None:
            return located
    refuse_directory(source.location, [name for name in source.listing() if _UNSUPPORTED_MARKERS.fullmatch(name)])
    dcp.refuse_interrupted(source)
    return None


def _find_candidates(
    source: Source, prefix: str, depth: int, refusals: list[UnsupportedError]
) -> Iterator[tuple[str, LocatedCheckpoint]]:
    """Iterate over checkpoints in subdirectories, with their relative paths; a checkpoint is not searched for others.

    Args:
        source: The directory to search.
        prefix: Relative path of `source`, which ends with a slash or is empty.
        depth: Levels of subdirectories to search.
        refusals: Receives the errors of subdirectories in unsupported formats.
    """
    for name in source.listing().directories():
        if name.startswith("."):
            continue
        directory = source.with_location(source.location / name)
        try:
            located = _locate_directory(directory)
        except StorageFailure:
            raise
        except (InputError, UnsupportedError) as error:
            if isinstance(error, UnsupportedError):
                refusals.append(error)
            continue  # a broken directory is no candidate; its error is reported if it is passed itself
        if located is not None:
            yield prefix + name, located
        elif depth > 1:
            yield from _find_candidates(directory, f"{prefix}{name}/", depth - 1, refusals)
