"""Read the checkpoint of any trainer as items that oracles compare. Nothing in it is executed.

    a folder with `.metadata`           DCP: of ckptx, of torchtitan, of a script with one stateful object
    model.safetensors, optimizer.pt,    transformers' Trainer, accelerate's save_state, and what trainers of their own
    random_states_0.pkl, *.json, ...    put into such files
    *.npz, *.npy, *.zip, *.tar          arrays and members
    any other file                      its bytes

A folder is searched at any depth, as `checkpoint_files` does: the Trainer with FSDP has a DCP for the model, one for
the optimizer, and files beside them. A checkpoint may be one file, too.

Every tensor, and every value in a pickled object or in JSON, is one item: its name, and a digest of its bytes or the
value itself. Tensors are read in pieces of a megabyte. What belongs to no oracle by its name is of "other", which is
compared like the rest. Left out is:

* what a trainer was told, not what it has come to: training_args.bin, config.json and the like, tokenizers
* logs with times; `not_compared` lists them and the settings
* times, speeds, and names of runs and folders, which two runs never share (`_NOISE`), outside of model and optimizer
* the history of losses in trainer_state.json, which `losses` reads
* the layout: which rank wrote what into which file. `sharding_of` looks at that
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.dcp.reader import locate_payloads
from ckptx.formats.hf.safetensors import parse_header
from ckptx.robustness_suite.checkpoint_files import (
    ARRAY,
    BYTES,
    DCP,
    JSON,
    LEFT_OUT,
    MARK,
    METADATA,
    PICKLE,
    SAFETENSORS,
    TAR,
    ZIP,
    ComparedFile,
    is_surely_pickle,
    places,
)
from ckptx.robustness_suite.file_contents import (
    FILE,
    contents_of_array,
    contents_of_tar,
    contents_of_zip,
    digest_of_file,
    is_torch_archive,
)
from ckptx.robustness_suite.item_names import oracles_of
from ckptx.robustness_suite.json_values import values_of_json
from ckptx.robustness_suite.oracles import Items
from ckptx.robustness_suite.pickled import ContainerForm, Leaf, Reader
from ckptx.robustness_suite.state_kinds import StoredItem, is_generator_state, oracles_of_items
from ckptx.robustness_suite.tensor_digests import TensorDigests
from ckptx.storage.files import FilePool, read_head, read_small
from ckptx.untrusted.limits import CONFIG_BYTES, RANKS, TENSORS

_NOISE = re.compile(
    r"(.+_)?(time|timestamp|elapsed|hostname|runtime|per_second|seconds)|(wandb_|run_|save_)+id|uuid|best_model_checkpoint"
    r"|(output|logging|run)_dir|log_history|run_name"
)
_FINITE = frozenset({"model", "second model", "moments", "master weights"})
_NEVER_NOISE = _FINITE | {"adam step", "group", "rate"}


class LayoutOfRun(NamedTuple):
    """Sharding of a run, as its files show it.

    Attributes:
        is_sharded: True if each rank had a shard of the parameters.
        how: Evidence in the files, in words.
        world_size: Number of ranks that wrote files; None if unknown.
    """

    is_sharded: bool
    how: str
    world_size: int | None


def items_of(path: Path, run: Path | None = None) -> Items:
    """Return the items of a checkpoint.

    Args:
        path: Folder or file.
        run: Folder of the run that wrote it; its path is removed from strings in JSON, as it is no state.

    Returns:
        (oracle, name) -> digest, or the value itself where it is short. ("finite", name) -> "finite", or how many
        elements are not, for every tensor of the model and of the moments.

    Raises:
        InputError: It is no checkpoint, is damaged, or holds what no state of a training run holds.
        UnsupportedError: A file in it is of a kind that is not read.
    """
    items = _Items()
    found = places(path)
    for place in found:
        if place.kind == JSON:
            _read_json(place, items, run)
        elif place.kind != LEFT_OUT:
            _READ[place.kind](place, items)
    if not items.has_values:
        if items.fault is not None:
            raise items.fault
        raise InputError(f"{path}: no checkpoint found, {_content(path)}")
    return items.by_oracle()


def not_compared(path: Path) -> dict[str, list[str]]:
    """Return the files in a checkpoint that are not compared, by reason.

    Raises:
        InputError: See `items_of`.
    """
    found: dict[str, list[str]] = {}
    for place in places(path):
        if place.kind == LEFT_OUT:
            found.setdefault(place.note, []).append(place.file)
    return found


def is_of_bytes(value: str | None) -> bool:
    """Return True if the value of an item is the digest of a whole file, which may contain times and paths."""
    return value is not None and value.startswith(FILE)


def sharding_of(path: Path) -> LayoutOfRun:
    """Return whether and how a run was sharded, from its checkpoint.

    Raises:
        InputError: It is no checkpoint, or is damaged.
    """
    found_places = places(path)
    ranks = {int(found[1]) for each in found_places if (found := re.search(r"\brng\.rank (\d+)", each.word or ""))}
    world_size = max(ranks) + 1 if ranks else None
    for place in found_places:
        if place.catalog is not None and place.is_of("model"):
            catalog = place.catalog
            stored = [_stored(place, place.name(name), entry) for name, entry in catalog.tensors.items()]
            oracles = zip(catalog.tensors.values(), oracles_of_items(stored), strict=True)
            model = [entry for entry, found in oracles if found == ("model",)]
            cut = sum(len(entry.chunks) > 1 for entry in model)
            writers = [int(found[1]) for name in catalog.files if (found := re.match(r"__(\d+)_\d+\.distcp", name))]
            world_size = world_size or (max(writers) + 1 if writers and max(writers) < RANKS else None)
            how = f"{cut} of {len(model)} parameters are in several pieces in {place.path.name}/{METADATA}"
            return LayoutOfRun(cut > 0, how, world_size)
    names = sorted(
        place.path.name for place in found_places if place.is_of("model") and place.kind in (SAFETENSORS, PICKLE)
    )
    gathered = [name for name in names if "fsdp" in name]
    if gathered:
        return LayoutOfRun(
            True, f"{gathered[0]} is what accelerate writes where FSDP gathered the parameters", world_size
        )
    listed = ", ".join(names[:3]) or "no file"
    how = f"{listed} has whole parameters, and no DCP or pytorch_model_fsdp file lies beside it"
    return LayoutOfRun(False, how, world_size)


def _content(path: Path) -> str:
    if path.is_file():
        return "the file holds no value"
    names = sorted(each.name for each in os.scandir(path))
    return f"there is {', '.join(names[:6])}{', ...' * (len(names) > 6)}" if names else "it is empty"


# ---------------------------------------------------------------------------------------------------- what is there


class _Items:
    """Items as they are found; what each is depends on all of them, and no name hides another."""

    def __init__(self) -> None:
        self._stored: list[StoredItem] = []
        self._values: list[tuple[str, int | None]] = []
        self._files: list[tuple[str, str, tuple[str, ...]]] = []
        self.has_values = False  # of a format that has names, or arrays
        self.fault: CkptxError | None = None  # why a file is compared by its bytes

    def add(self, place: ComparedFile, item: StoredItem, value: str, not_finite: int | None = None) -> None:
        """Add a value, whose kind follows from all items together."""
        self._require_room(place)
        self.has_values = True
        self._stored.append(item)
        self._values.append((value, not_finite))

    def add_file(self, place: ComparedFile, name: str, value: str, oracles: tuple[str, ...]) -> None:
        """Add what has no names inside, such as a file that is compared by its bytes."""
        self._require_room(place)
        self.has_values |= not is_of_bytes(value)
        self._files.append((name, value, oracles))

    def _require_room(self, place: ComparedFile) -> None:
        if len(self._stored) + len(self._files) > 4 * TENSORS:
            raise InputError(f"{place.path}: more values than any training run has")

    def by_oracle(self) -> dict[tuple[str, str], str]:
        """Return what `items_of` returns."""
        items: dict[tuple[str, str], str] = {}
        oracles_of = zip(self._stored, self._values, oracles_of_items(self._stored), strict=True)
        for item, (value, not_finite), oracles in oracles_of:
            if _NOISE.fullmatch(item.name.rpartition(".")[2]) and _NEVER_NOISE.isdisjoint(oracles):
                continue
            unique, number = item.name, 1
            while any((oracle, unique) in items for oracle in oracles):
                unique = f"{item.file}: {item.name}" if number == 1 else f"{item.file}: {item.name} ({number})"
                number += 1
            for oracle in oracles:
                items[oracle, unique] = value
            if not_finite is not None and not _FINITE.isdisjoint(oracles):
                items["finite", unique] = "finite" if not not_finite else f"{not_finite:,} elements are not"
        for name, value, oracles in self._files:
            items |= {(oracle, name): value for oracle in oracles}
        return items


def _stored(place: ComparedFile, name: str, entry: TensorEntry, is_tensor: bool = True) -> StoredItem:
    return StoredItem(name, place.label, is_tensor, entry.shape, entry.dtype.name)


def _read_dcp(place: ComparedFile, items: _Items) -> None:
    assert place.catalog is not None
    with FilePool(place.path) as files:
        located, tensors = locate_payloads(place.catalog, files, lazy=True), TensorDigests(files)
        for name, entry in located.tensors.items():
            items.add(place, _stored(place, place.name(name), entry), *tensors.read(entry))
        for name, stored in place.catalog.objects.items():
            where = f'{place.path / stored.file}: object "{name}"'
            reader = Reader(files, stored.file, where, tensors, stored.offset, stored.nbytes)
            _add_leaves(place, name, reader, tensors, items)


def _read_safetensors(place: ComparedFile, items: _Items) -> None:
    with FilePool(place.path.parent) as files:
        name, tensors = place.path.name, TensorDigests(files)
        header = parse_header(partial(files.read, name), files.size(name), str(place.path))
        for tensor in header.tensors:
            chunk = Chunk(full_region(tensor.shape), name, tensor.begin, tensor.end - tensor.begin)
            entry = TensorEntry(tensor.name, tensor.dtype, tensor.shape, (chunk,))
            items.add(place, _stored(place, place.name(tensor.name), entry), *tensors.read(entry))
        for key, value in sorted(header.metadata.items()):
            items.add_file(place, f"{place.label}: metadata.{key}", repr(value), ("other",))


def _read_pickle(place: ComparedFile, items: _Items) -> None:
    with FilePool(place.path.parent) as files:
        tensors = TensorDigests(files)
        try:
            reader = Reader(files, place.path.name, str(place.path), tensors)
            leaves = list(reader.leaves())
        except UnsupportedError:
            if read_head(place.path, 4) != b"PK\3\4":
                raise
            _read_members(place, items)  # TorchScript and the like
            return
        except InputError as error:
            if is_surely_pickle(place.path):
                raise
            items.fault = items.fault or error
            _read_bytes(place, items)
            return
        _add_leaves(place, "", reader, tensors, items, leaves)


def _read_zip(place: ComparedFile, items: _Items) -> None:
    if is_torch_archive(place.path):
        _read_pickle(place, items)
    else:
        _read_members(place, items)


def _read_members(place: ComparedFile, items: _Items) -> None:
    """Add the arrays of a `.npy` or `.npz`, or the members of another archive."""
    contents = {ARRAY: contents_of_array, TAR: contents_of_tar}.get(place.kind, contents_of_zip)
    for name, text in contents(place.path):
        whole_name = place.name(name) if name or place.word else place.label
        items.add(place, StoredItem(whole_name, place.label, place.word == "model"), text)


def _read_bytes(place: ComparedFile, items: _Items) -> None:
    oracles = ("other",) if place.word in (None, "model", "trainer_state") else oracles_of(place.word or "", False)
    items.add_file(place, place.file, f"{FILE}{digest_of_file(place.path)}", oracles)


def _read_mark(place: ComparedFile, items: _Items) -> None:
    items.add_file(place, place.file, f"{FILE}{place.note}", ("other",))


_READ = {
    DCP: _read_dcp,
    SAFETENSORS: _read_safetensors,
    PICKLE: _read_pickle,
    ARRAY: _read_members,
    ZIP: _read_zip,
    TAR: _read_members,
    BYTES: _read_bytes,
    MARK: _read_mark,
}


def _add_leaves(
    place: ComparedFile,
    name: str,
    reader: Reader,
    tensors: TensorDigests,
    items: _Items,
    leaves: Sequence[Leaf] | None = None,
) -> None:
    names = _parameter_names(reader)
    named = [
        (place.name(".".join(filter(None, (name, *_with_names(leaf.path, names)))) or place.label), leaf)
        for leaf in (reader.leaves() if leaves is None else leaves)
    ]
    for path in names:
        whole_name = place.name(".".join(filter(None, (name, *path, "state"))))
        named.append((whole_name, Leaf((), ContainerForm("parameters by number, shown by name"), ())))
    first: dict[str, int] = {}
    for index, (whole_name, _) in enumerate(named):
        first.setdefault(whole_name, index)
    # Parts with the same name are in the order of their places, whatever the order of the dicts.
    for whole_name, leaf in sorted(named, key=lambda each: (first[each[0]], each[1].place)):
        tensor = reader.tensor(whole_name, leaf.value)
        if tensor is None:
            item = StoredItem(whole_name, place.label, is_generator=is_generator_state(reader.meaning(leaf.value)))
            items.add(place, item, reader.said(leaf.value))
        else:
            entry, data, rest = tensor
            text, not_finite = tensors.read(entry, data)
            items.add(place, _stored(place, whole_name, entry, not name), text + rest, not_finite)


def _parameter_names(reader: Reader) -> Mapping[tuple[str, ...], Mapping[str, str]]:
    """Return for each optimizer in a pickle the names of parameters by number, if its groups have `param_names`.

    torch has them in `state_dict` where an optimizer was made of `named_parameters()`.
    """
    found: dict[tuple[str, ...], dict[str, str]] = {}
    tree = reader.tree
    for path, node in [((), tree), *(((str(key),), value) for key, value in _string_items(reader, tree))]:
        groups = dict(_string_items(reader, node)).get("param_groups")
        for group in groups if isinstance(groups, list) else ():
            values = dict(_string_items(reader, group))
            numbers, names = values.get("params"), values.get("param_names")
            if isinstance(numbers, list) and isinstance(names, list) and len(numbers) == len(names):
                named = {str(each): name for each, name in zip(numbers, names, strict=True) if isinstance(name, str)}
                if all(type(each) is int for each in numbers):
                    found.setdefault(path, {}).update(named)
    return found


def _string_items(reader: Reader, node: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in reader.items_of(node) if type(key) is str)


def _with_names(path: tuple[str, ...], names: Mapping[tuple[str, ...], Mapping[str, str]]) -> Iterator[str]:
    """Yield the words of a path in optimizer state, with names of parameters instead of numbers."""
    for index, part in enumerate(path):
        is_number = index and path[index - 1] == "state" and path[: index - 1] in names
        yield names[path[: index - 1]].get(part, part) if is_number else part


def _read_json(place: ComparedFile, items: _Items, run: Path | None) -> None:
    try:
        values = list(values_of_json(read_small(place.path, CONFIG_BYTES), place.path, _NOISE, run))
    except UnicodeDecodeError:
        _read_bytes(place, items)
        return
    except CkptxError as error:
        items.fault = items.fault or error
        _read_bytes(place, items)
        return
    for name, value, text in values:
        item = StoredItem(place.name(name or place.label), place.label, is_generator=is_generator_state(value))
        items.add(place, item, text)
