"""Which checkpoint a path means, and opening it.

A path may be a directory, a weight file, an index, or a parent with one checkpoint below it. The readers of other
formats than HF safetensors are imported for a checkpoint that has them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog, Part
from ckptx.catalog.entry import StoredChunks, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.dcp.megatron import COMMON_FILE, is_torch_dist, torch_dist_sidecars
from ckptx.formats.foreign import kind_of_name, refuse_below, refuse_directory, refuse_file
from ckptx.formats.hf import reader as huggingface
from ckptx.formats.hf.hf_metadata import config_in, find_hf_metadata
from ckptx.formats.manifest_file import note_no_file
from ckptx.formats.rank_files import (
    Shapes,
    refuse_part_directory,
    refuse_part_file,
    refuse_parts_below,
    without_part_directories,
    without_part_files,
)
from ckptx.formats.sharded.file_names import is_shard
from ckptx.formats.sharding_info import that_record_offsets
from ckptx.formats.sidecars import MANIFEST, beside_one_file, look_around
from ckptx.mapping.names import is_optimizer, is_trainer_state
from ckptx.storage.files import identities, read_small, unreadable
from ckptx.storage.staged import is_being_written
from ckptx.untrusted.limits import INDEX_BYTES, NAME_LENGTH, TENSORS
from ckptx.untrusted.remote_name import refuse_remote

_METADATA = ".metadata"
_BIN_INDEX, _BIN = "pytorch_model.bin.index.json", "pytorch_model.bin"
_FSDP_BIN = "pytorch_model_fsdp.bin"  # the whole state dict, as accelerate saves it with FULL_STATE_DICT
# Refused before anything below the directory is looked for: what lies there is not what was passed.
_ITSELF = re.compile(r"__\d+\.metadata|adapter_config\.json|adapter_model\..+")

# Directories that trainers write side by side and that are one checkpoint: model first, optimizer second.
_PARTS = (
    ("model", "optim"), ("model", "optimizer"), ("pytorch_model_fsdp_0", "optimizer_0"), ("weights", "optimizer"),
)  # fmt: skip


class Located(NamedTuple):
    """A checkpoint found: its directory, its kind, and what names its weights there.

    `weights` is a file name for "huggingface" and "bin", and the parts (directories) of a "dcp" or "sharded".
    """

    root: Path
    kind: str
    weights: tuple[str, ...]


def open_checkpoint(path: str | Path) -> Catalog:
    """Opens the checkpoint that `path` means; reads headers only.

    Raises:
        InputError: There is none, several, or it is corrupt or incomplete.
        UnsupportedError: It is of a kind ckptx does not read, or `path` is a URL.
    """
    refuse_remote(path)
    located = locate(Path(path))
    if is_being_written(located.root):
        raise InputError(f"{located.root}: an unfinished output of ckptx; run the conversion again with --resume")
    before = identities(located.root, (*located.weights, "config.json", MANIFEST))
    located, catalog = _catalog_of(located)
    if not catalog.tensors:
        raise InputError(f"{located.root}: holds no tensors")
    _refuse_absurd(catalog)
    _refuse_part(located, catalog)
    note_no_file(catalog.root, catalog.notes)
    _add_surroundings(catalog, located)
    around = identities(located.root, (sidecar.name for sidecar in catalog.sidecars))
    catalog.identities = {**around, **before, **catalog.identities}
    catalog.opened_from = Path(path)
    return catalog


def _catalog_of(located: Located) -> tuple[Located, Catalog]:
    """Open what was found, without the files beside it; headers may say that it is of another kind than it seemed."""
    if located.kind == "dcp":
        catalog = _open_parts(located)
    elif located.kind == "sharded":
        catalog = _open_shards(located.root)
    elif located.kind == "bin":
        from ckptx.formats.hf.torch_bin import open_bin

        catalog = open_bin(located.root, list(located.weights))
        catalog.notes.extend(huggingface.stray_notes(located.root, {*catalog.files, *located.weights}, (".bin",)))
    else:
        found = huggingface.open_huggingface(located.root, located.weights[0])
        if found is None:
            located = Located(located.root, "sharded", (".",))
        catalog = _open_shards(located.root) if found is None else found
    return located, catalog


def _shapes_in(path: Path) -> Shapes | None:
    """The shapes of a file or directory that may be a part of a checkpoint, or None where it cannot be opened."""
    try:
        located = _locate_file(path) if path.is_file() else locate(path)
        return {name: entry.shape for name, entry in _catalog_of(located)[1].tensors.items()}
    except (CkptxError, OSError):
        return None


def _refuse_part(located: Located, catalog: Catalog) -> None:
    """Refuses one rank's part of a checkpoint: a file with others beside it, or a directory.

    Raises:
        UnsupportedError: It is one.
    """
    shapes = {name: entry.shape for name, entry in catalog.tensors.items()}
    metadata = _metadata_of(catalog, located.weights[0])
    if located.kind in ("huggingface", "bin") and not located.weights[0].endswith(".index.json"):
        refuse_part_file(located.root / located.weights[0], shapes, _shapes_in, metadata)
    refuse_part_directory(located.root, shapes, _shapes_in, metadata)


def _metadata_of(catalog: Catalog, weights: str) -> dict[str, Any]:
    """The metadata in the header of a safetensors file."""
    text = catalog.verbatim.get(weights, "")
    try:
        found = json.loads(text).get("__metadata__") if text and not weights.endswith(".json") else None
    except (ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refuse_absurd(catalog: Catalog) -> None:
    """Refuses names that nobody gave, and more of them than any model has."""
    longest = max(map(len, (*catalog.tensors, *catalog.objects)))
    if longest > NAME_LENGTH:
        raise InputError(f"{catalog.root}: a name of {longest:,} characters, allowed at most {NAME_LENGTH:,}")
    if len(catalog.tensors) > TENSORS:
        raise InputError(f"{catalog.root}: {len(catalog.tensors):,} tensors, allowed at most {TENSORS:,}")


def _add_surroundings(catalog: Catalog, located: Located) -> None:
    root = located.root
    beside = find_hf_metadata(catalog)
    catalog.config = None if beside is None else config_in(beside)
    if catalog.config is not None:
        return  # what travels with the weights lies there, too
    if os.path.lexists(root / "config.json"):  # not `is_file`: what is no file is refused there, not passed over
        catalog.config = huggingface.read_json(root / "config.json")
    used = frozenset((*catalog.files, *located.weights, *catalog.verbatim))
    is_megatron = located.kind == "dcp" and is_torch_dist(root)
    if located.kind != "dcp" or catalog.config is not None:
        around = look_around(root, used) if _has_own_directory(located) else beside_one_file(root)
        catalog.sidecars = around.carried
        named = {note.split(" ", 1)[0] for note in catalog.notes}
        left = [name for name in around.left if name not in named and not (is_megatron and name == COMMON_FILE)]
        if left:
            listed = ", ".join(left[:5]) + (f", and {len(left) - 5} more" if len(left) > 5 else "")
            catalog.notes.append(f"not carried: {listed}")
    if is_megatron:
        known = {sidecar.name: sidecar for sidecar in (*catalog.sidecars, *torch_dist_sidecars(root))}
        catalog.sidecars = tuple(known[name] for name in sorted(known))
        catalog.notes.append("Megatron torch_dist: tensors have Megatron's own names and layout")


def _has_own_directory(located: Located) -> bool:
    """False for a weight file with a name of its own: what else lies in its directory may be anything."""
    weights = located.weights[0]
    return (
        located.kind in ("dcp", "sharded")
        or weights in (huggingface.SINGLE, _BIN, _FSDP_BIN)
        or weights.endswith(".index.json")
    )


def _open_shards(root: Path) -> Catalog:
    from ckptx.formats.sharded.reader import open_sharded

    return open_sharded(root)


def _open_parts(located: Located) -> Catalog:
    """Opens a DCP of one part or two; names and files of both end in one catalog.

    The model may lie in sharded safetensors beside the DCP of its optimizer.
    """
    from ckptx.formats.dcp.reader import open_dcp

    if located.weights == (".",):
        return open_dcp(located.root)
    parts = [
        (part, open_dcp(root) if (root / _METADATA).is_file() else _open_shards(root))
        for part, root in ((part, located.root / part) for part in located.weights)
    ]
    merged = Catalog(located.root, "dcp", {})
    for part, catalog in parts:
        is_second, below = part == located.weights[1], _Below(part)
        names: dict[str, str] = {}
        for on_disk, entry in catalog.tensors.items():
            name = _optimizer_name(on_disk) if is_second else on_disk
            if name in merged.tensors:
                raise InputError(f'{located.root}: tensor "{name}" is in two parts ({", ".join(located.weights)})')
            merged.tensors[name] = below.moved(entry)._replace(name=name)
            names[name] = on_disk
        for on_disk, pickled in catalog.objects.items():
            name = _optimizer_name(on_disk) if is_second else on_disk
            if name in merged.objects:  # trainer state that both parts save, under the same name
                name = f"optimizer.{on_disk}"
            merged.objects[name] = pickled._replace(name=name, file=f"{part}/{pickled.file}")
            names[name] = on_disk
        merged.parts += (Part(part, names, catalog.planner_data),)
        merged.files.update((f"{part}/{name}", size) for name, size in catalog.files.items())
        merged.identities.update((f"{part}/{name}", each) for name, each in catalog.identities.items())
        merged.notes.extend(f"{part}: {note}" for note in catalog.notes)
    return merged


class _Below:
    """Moves tensors into a directory below the root of their catalog; those that are cut alike stay alike."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files: dict[int, tuple[str, ...]] = {}
        self._ids = ObjectIds()

    def moved(self, entry: TensorEntry) -> TensorEntry:
        """The tensor with its files below the directory."""
        chunks = entry.chunks
        if type(chunks) is StoredChunks:
            return entry._replace(chunks=chunks.in_files(self._below(chunks.files)))
        chunks, replicas = (
            tuple(chunk._replace(file=f"{self._directory}/{chunk.file}") for chunk in each)
            for each in (chunks, entry.replicas)
        )
        return entry._replace(chunks=chunks, replicas=replicas)

    def _below(self, files: Sequence[str]) -> tuple[str, ...]:
        key = self._ids(files)
        known = self._files.get(key)
        if known is None:
            known = self._files[key] = tuple([f"{self._directory}/{file}" for file in files])
        return known


def _optimizer_name(name: str) -> str:
    """The name of a tensor of the second part: the directory may be all that says `optimizer`."""
    return name if is_optimizer(name) or is_trainer_state(name) else f"optimizer.{name}"


def locate(path: Path) -> Located:
    """Finds the checkpoint without opening it.

    Raises:
        InputError: Nothing, or more than one candidate; they are listed.
        UnsupportedError: A kind that is recognised but not read.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise unreadable(path, FileNotFoundError())
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or directory")
    if path.is_file():
        return _locate_file(path)
    here = _locate_directory(path)
    if here is not None:
        return here
    refusals: list[UnsupportedError] = []
    below = list(_candidates(path, 2, refusals))
    if len(below) == 1:
        return below[0]
    if below:
        left = without_part_directories(path, [located.root for located in below], _shapes_in)
        listed = ", ".join(map(str, left[:8]))
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        raise InputError(f"{path}: holds {len(below)} checkpoints, needed one; pass one of: {listed}{more}")
    refuse_below(path, 2)
    if refusals:
        raise refusals[0]
    refuse_parts_below(path, 2, _shapes_in)
    found = "it is empty" if not any(path.iterdir()) else "no .metadata, *.safetensors or pytorch_model*.bin in it"
    raise InputError(f"{path}: no checkpoint found, {found}")


def _locate_file(path: Path) -> Located:
    name = path.name
    if is_shard(name):
        return Located(path.parent, "sharded", (".",))
    if not (name.endswith(".safetensors") and that_record_offsets(path.parent, [name])):
        refuse_file(path)
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return _located_by_header(path.parent, name)
    if name == ".metadata":
        return Located(path.parent, "dcp", (".",))
    if name.endswith((".bin", ".bin.index.json", ".pt", ".pth")):
        return Located(path.parent, "bin", (name,))
    raise InputError(f"{path}: is no weight file or index; pass the directory of the checkpoint")


def _locate_directory(path: Path) -> Located | None:
    try:
        names = {entry.name for entry in os.scandir(path)}
    except OSError as error:
        raise unreadable(path, error) from error
    if _METADATA in names:
        return Located(path, "dcp", (".",))
    for parts in _PARTS:
        model, optimizer = (path / part for part in parts)
        if (optimizer / _METADATA).is_file() and ((model / _METADATA).is_file() or _has_shards(model)):
            return Located(path, "dcp", parts)
    if any(map(is_shard, names)):
        return Located(path, "sharded", (".",))
    weights = _weights_in(path, names)
    if weights is not None:
        return weights
    refuse_directory(path, [name for name in names if _ITSELF.fullmatch(name)])
    if any(name.endswith(".distcp") for name in names):
        raise InputError(
            f"{path}: has .distcp files but no .metadata; the save was interrupted or still runs, use another one"
        )
    return None


def _has_shards(path: Path) -> bool:
    if not path.is_dir():
        return False
    names = set(os.listdir(path))
    if any(map(is_shard, names)):
        return True
    weights = _weights_in(path, names)
    return weights is not None and weights.kind == "sharded"


def _weights_in(path: Path, names: set[str]) -> Located | None:
    """HF weights in a directory, in the order in which transformers prefers them."""
    single, index = huggingface.SINGLE in names, huggingface.INDEX in names
    if single and index and huggingface.SINGLE not in _text_of_index(path):
        raise InputError(
            f"{path}: has both {huggingface.SINGLE} and {huggingface.INDEX}, and loaders disagree on which counts; "
            "pass the one you mean as SRC"
        )
    if index:
        return Located(path, "huggingface", (huggingface.INDEX,))
    if single:
        return _located_by_header(path, huggingface.SINGLE)
    if _BIN_INDEX in names:
        return Located(path, "bin", (_BIN_INDEX,))
    for name in (_BIN, _FSDP_BIN):
        if name in names:
            return Located(path, "bin", (name,))
    indexes = sorted(name for name in names if name.endswith(".safetensors.index.json"))
    if len(indexes) == 1:
        return Located(path, "huggingface", (indexes[0],))
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if not indexes and that_record_offsets(path, files):
        return Located(path, "sharded", (".",))
    found = indexes or [name for name in files if kind_of_name(name) is None]
    if not found:
        return None
    if len(found) > 1:
        found = without_part_files(path, found, _shapes_in)
        raise InputError(f"{path}: no model.safetensors or index, but {', '.join(found[:8])}; pass one as SRC")
    return Located(path, "huggingface", (found[0],))


def _located_by_header(root: Path, weights: str) -> Located:
    """What one weight file or index stands for: itself, or all shards of its directory when its header makes it one.

    A file that records offsets is still one of whole tensors where its name or an index says so, unless other files
    that record some lie beside it without being in the index.
    """
    by_itself = Located(root, "huggingface", (weights,))
    if weights.endswith(".json") or not that_record_offsets(root, [weights]):
        return by_itself
    beside = sorted(entry.name for entry in os.scandir(root) if entry.name != weights)
    for index in beside:
        if index.endswith(".safetensors.index.json"):
            listed = huggingface.parse_index(huggingface.read_text(root / index, INDEX_BYTES), root / index).values()
            if weights in listed and huggingface.open_huggingface(root, index) is not None:
                return by_itself
    if weights != huggingface.SINGLE or that_record_offsets(root, [n for n in beside if n.endswith(".safetensors")]):
        return Located(root, "sharded", (".",))
    return by_itself


def _text_of_index(path: Path) -> str:
    return read_small(path / huggingface.INDEX, INDEX_BYTES).decode("utf-8", "replace")


def _candidates(path: Path, depth: int, refusals: list[UnsupportedError]) -> Iterator[Located]:
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if not entry.is_dir() or entry.name.startswith("."):
            continue
        try:
            located = _locate_directory(Path(entry.path))
        except (InputError, UnsupportedError) as error:
            if isinstance(error, UnsupportedError):
                refusals.append(error)
            continue  # a broken neighbour is no candidate; passed by name it says why
        if located is not None:
            yield located
        elif depth > 1:
            yield from _candidates(Path(entry.path), depth - 1, refusals)
