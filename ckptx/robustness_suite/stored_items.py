"""Read the checkpoint of any trainer as items that oracles compare; nothing in it is executed.

    a folder with `.metadata`           DCP of ckptx, of torchtitan, or of a script with one stateful object
    model.safetensors, optimizer.pt,    files of transformers' Trainer, of accelerate's save_state, and of custom
    random_states_0.pkl, *.json, ...    trainers
    *.npz, *.npy, *.zip, *.tar          arrays and members
    any other file                      its bytes

A folder is searched at any depth, as `checkpoint_files` does: the Trainer with FSDP writes one DCP for the model, one
for the optimizer, and other files next to them. A checkpoint may also be a single file.

Each tensor, and each value in a pickled object or in JSON, is one item: its name, and a digest of its bytes or the
value itself. Tensors are read in blocks of 1 MiB. An item whose name matches no oracle belongs to "other", which is
compared like the rest. Not compared are:

* settings of a trainer, which are not state: training_args.bin, config.json and the like, tokenizers
* logs with timestamps; `files_not_compared` lists them and the settings
* times, speeds, and names of runs and folders, which differ between identical runs (`_VOLATILE_KEYS`), outside of model
  and optimizer
* the history of losses in trainer_state.json, which `losses` reads
* the sharding: which rank wrote which file; see `detect_sharding`
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
    MARKER,
    METADATA,
    NOT_COMPARED,
    PICKLE,
    SAFETENSORS,
    TAR,
    ZIP,
    ComparedFile,
    is_declared_pickle,
    list_files,
)
from ckptx.robustness_suite.file_contents import (
    FILE_PREFIX,
    contents_of_array,
    contents_of_tar,
    contents_of_zip,
    describe_file,
    is_torch_archive,
)
from ckptx.robustness_suite.item_names import oracles_of
from ckptx.robustness_suite.item_oracles import StoredItem, is_rng_tuple, oracles_of_items
from ckptx.robustness_suite.json_values import values_of_json
from ckptx.robustness_suite.oracles import Items
from ckptx.robustness_suite.pickle_reader import ContainerInfo, Leaf, PickleReader
from ckptx.robustness_suite.tensor_digests import TensorDigests
from ckptx.storage.files import FilePool, read_head, read_small
from ckptx.untrusted.limits import MAX_CONFIG_BYTES, MAX_RANKS, MAX_TENSORS
from ckptx.wording import counted

_VOLATILE_KEYS = re.compile(
    r"(.+_)?(time|timestamp|elapsed|hostname|runtime|per_second|seconds)|(wandb_|run_|save_)+id|uuid|best_model_checkpoint"
    r"|(output|logging|run)_dir|log_history|run_name"
)
_FINITE_ORACLES = frozenset({"model", "second model", "moments", "master weights"})  # tensors that must be finite
# Oracles of items that are compared under any name, also one of `_VOLATILE_KEYS`.
_ALWAYS_COMPARED_ORACLES = _FINITE_ORACLES | {"adam step", "param groups", "learning rate"}


class RunSharding(NamedTuple):
    """Sharding of a run, as its files show it.

    Attributes:
        is_sharded: True if each rank had a shard of the parameters.
        evidence: Evidence in the files, in words.
        world_size: Number of ranks that wrote files; None if unknown.
    """

    is_sharded: bool
    evidence: str
    world_size: int | None


def read_items(path: Path, run_folder: Path | None = None) -> Items:
    """Return the items of a checkpoint.

    Args:
        path: Folder or file of the checkpoint.
        run_folder: Folder of the run that wrote it; its path is removed from strings in JSON, as it is not state.
            None removes nothing.

    Returns:
        (oracle, name) -> digest, or the value itself if it is short. For each floating-point tensor of a model, and of
        the moments and master weights of an optimizer, ("finite", name) -> "finite", or a text with the number of
        elements that are not.

    Raises:
        InputError: The path has no checkpoint, or the checkpoint is damaged or too large.
        UnsupportedError: The kind of a file is not supported.
    """
    items = _ItemCollector()
    files = list_files(path)
    for file in files:
        if file.kind == JSON:
            _read_json(file, items, run_folder)
        elif file.kind != NOT_COMPARED:
            _READERS[file.kind](file, items)
    if not items.has_values:
        if items.first_error is not None:
            raise items.first_error
        raise InputError(
            f"{path}: no checkpoint found, {_folder_text(path)}; make the command of the trainer save one there"
        )
    return items.items_by_oracle()


def files_not_compared(path: Path) -> dict[str, list[str]]:
    """Return the files in a checkpoint that are not compared, by reason.

    Raises:
        InputError: See `read_items`.
    """
    by_reason: dict[str, list[str]] = {}
    for file in list_files(path):
        if file.kind == NOT_COMPARED:
            by_reason.setdefault(file.note, []).append(file.relative_path)
    return by_reason


def is_file_digest(value: str | None) -> bool:
    """Return True if the value of an item is the digest of a whole file, which may contain times and paths."""
    return value is not None and value.startswith(FILE_PREFIX)


def detect_sharding(path: Path) -> RunSharding:
    """Detect from a checkpoint whether the run that wrote it sharded its parameters.

    Raises:
        InputError: The path has no checkpoint, or the checkpoint is damaged.
    """
    files = list_files(path)
    ranks = {int(match[1]) for each in files if (match := re.search(r"\brng\.rank (\d+)", each.name_prefix or ""))}
    world_size = max(ranks) + 1 if ranks else None
    for file in files:
        if file.catalog is not None and file.may_contain("model"):
            catalog = file.catalog
            stored = [_stored_tensor(file, file.full_name(name), entry) for name, entry in catalog.tensors.items()]
            entries_with_oracles = zip(catalog.tensors.values(), oracles_of_items(stored), strict=True)
            model = [entry for entry, oracles in entries_with_oracles if oracles == ("model",)]
            num_sharded = sum(len(entry.chunks) > 1 for entry in model)
            writers = [int(match[1]) for name in catalog.files if (match := re.match(r"__(\d+)_\d+\.distcp", name))]
            world_size = world_size or (max(writers) + 1 if writers and max(writers) < MAX_RANKS else None)
            evidence = (
                f"{num_sharded} of {len(model)} parameters are stored as several shards in {file.path.name}/{METADATA}"
            )
            return RunSharding(num_sharded > 0, evidence, world_size)
    names = sorted(file.path.name for file in files if file.may_contain("model") and file.kind in (SAFETENSORS, PICKLE))
    gathered = [name for name in names if "fsdp" in name]
    if gathered:
        return RunSharding(
            True, f"{gathered[0]} is a file that accelerate writes when FSDP has gathered the parameters", world_size
        )
    listed = ", ".join(names[:3]) or "no file"
    evidence = f"{listed} has whole parameters, and there is no DCP or pytorch_model_fsdp file"
    return RunSharding(False, evidence, world_size)


def _folder_text(path: Path) -> str:
    if path.is_file():
        return "the file contains no value"
    names = sorted(each.name for each in os.scandir(path))
    return f"the folder has {', '.join(names[:6])}{', ...' * (len(names) > 6)}" if names else "the folder is empty"


# ---------------------------------------------------------------------------------------------- items and their readers


class _ItemCollector:
    """Collector of the items of a checkpoint, which then assigns oracles to all of them and makes names unique."""

    def __init__(self) -> None:
        self._stored: list[StoredItem] = []
        self._values: list[tuple[str, int | None]] = []  # for each of `_stored`: value, `num_nonfinite`
        self._files: list[tuple[str, str, tuple[str, ...]]] = []  # name, value and oracles
        self.has_values = False  # True if anything but digests of whole files was added
        self.first_error: CkptxError | None = None  # first error of a file that is therefore compared by its bytes

    def add(self, file: ComparedFile, item: StoredItem, value: str, num_nonfinite: int | None = None) -> None:
        """Add a value.

        Args:
            file: File that contains the value.
            item: Name, shape and dtype, from which the oracle is derived.
            value: Value or digest.
            num_nonfinite: Number of elements that are NaN or infinity; None if they were not counted.
        """
        self._check_limit(file)
        self.has_values = True
        self._stored.append(item)
        self._values.append((value, num_nonfinite))

    def add_file(self, file: ComparedFile, name: str, value: str, oracles: tuple[str, ...]) -> None:
        """Add a value without a name inside its file, such as the digest of the file, with its oracles."""
        self._check_limit(file)
        self.has_values |= not is_file_digest(value)
        self._files.append((name, value, oracles))

    def _check_limit(self, file: ComparedFile) -> None:
        if len(self._stored) + len(self._files) > 4 * MAX_TENSORS:
            raise InputError(
                f"{file.path}: more than {4 * MAX_TENSORS:,} values, the maximum; use a smaller checkpoint"
            )

    def items_by_oracle(self) -> dict[tuple[str, str], str]:
        """Return the items as `read_items` does."""
        items: dict[tuple[str, str], str] = {}
        classified = zip(self._stored, self._values, oracles_of_items(self._stored), strict=True)
        for item, (value, num_nonfinite), oracles in classified:
            if _VOLATILE_KEYS.fullmatch(item.name.rpartition(".")[2]) and _ALWAYS_COMPARED_ORACLES.isdisjoint(oracles):
                continue
            unique_name, number = item.name, 1
            while any((oracle, unique_name) in items for oracle in oracles):
                unique_name = f"{item.file}: {item.name}" if number == 1 else f"{item.file}: {item.name} ({number})"
                number += 1
            for oracle in oracles:
                items[oracle, unique_name] = value
            if num_nonfinite is not None and not _FINITE_ORACLES.isdisjoint(oracles):
                count_text = f"{counted(num_nonfinite, 'element')} not finite"
                items["finite", unique_name] = count_text if num_nonfinite else "finite"
        for name, value, oracles in self._files:
            items |= {(oracle, name): value for oracle in oracles}
        return items


def _stored_tensor(
    file: ComparedFile, name: str, entry: TensorEntry, is_parameter_by_default: bool = True
) -> StoredItem:
    return StoredItem(name, file.label, is_parameter_by_default, entry.shape, entry.dtype.name)


def _read_dcp(file: ComparedFile, items: _ItemCollector) -> None:
    assert file.catalog is not None
    with FilePool(file.path) as files:
        located, tensors = locate_payloads(file.catalog, files, lazy=True), TensorDigests(files)
        for name, entry in located.tensors.items():
            items.add(file, _stored_tensor(file, file.full_name(name), entry), *tensors.read(entry))
        for name, stored in file.catalog.objects.items():
            subject = f'{file.path / stored.file}: object "{name}"'
            reader = PickleReader(files, stored.file, subject, tensors, stored.offset, stored.nbytes)
            _add_leaves(file, name, reader, tensors, items)


def _read_safetensors(file: ComparedFile, items: _ItemCollector) -> None:
    with FilePool(file.path.parent) as files:
        name, tensors = file.path.name, TensorDigests(files)
        header = parse_header(partial(files.read, name), files.size(name), str(file.path))
        for tensor in header.tensors:
            chunk = Chunk(full_region(tensor.shape), name, tensor.begin, tensor.end - tensor.begin)
            entry = TensorEntry(tensor.name, tensor.dtype, tensor.shape, (chunk,))
            items.add(file, _stored_tensor(file, file.full_name(tensor.name), entry), *tensors.read(entry))
        for key, value in sorted(header.metadata.items()):
            items.add_file(file, f"{file.label}: metadata.{key}", repr(value), ("other",))


def _read_pickle(file: ComparedFile, items: _ItemCollector) -> None:
    with FilePool(file.path.parent) as files:
        tensors = TensorDigests(files)
        try:
            reader = PickleReader(files, file.path.name, str(file.path), tensors)
            leaves = list(reader.leaves())
        except UnsupportedError:
            if read_head(file.path, 4) != b"PK\3\4":
                raise
            _read_members(file, items)  # TorchScript and the like
            return
        except InputError as error:
            if is_declared_pickle(file.path):
                raise
            items.first_error = items.first_error or error
            _read_bytes(file, items)
            return
        _add_leaves(file, "", reader, tensors, items, leaves)


def _read_zip(file: ComparedFile, items: _ItemCollector) -> None:
    if is_torch_archive(file.path):
        _read_pickle(file, items)
    else:
        _read_members(file, items)


def _read_members(file: ComparedFile, items: _ItemCollector) -> None:
    """Add the arrays of a `.npy` or `.npz`, or the members of another archive."""
    contents = {ARRAY: contents_of_array, TAR: contents_of_tar}.get(file.kind, contents_of_zip)
    for name, text in contents(file.path):
        whole_name = file.full_name(name) if name or file.name_prefix else file.label
        items.add(file, StoredItem(whole_name, file.label, file.name_prefix == "model"), text)


def _read_bytes(file: ComparedFile, items: _ItemCollector) -> None:
    """Add the digest of a whole file, under the oracle that its name implies, such as "rng"; "other" if none."""
    oracles = (
        ("other",)
        if file.name_prefix in (None, "model", "trainer_state")
        else oracles_of(file.name_prefix or "", False)
    )
    items.add_file(file, file.relative_path, describe_file(file.path), oracles)


def _read_marker(file: ComparedFile, items: _ItemCollector) -> None:
    items.add_file(file, file.relative_path, f"{FILE_PREFIX}{file.note}", ("other",))


_READERS = {
    DCP: _read_dcp,
    SAFETENSORS: _read_safetensors,
    PICKLE: _read_pickle,
    ARRAY: _read_members,
    ZIP: _read_zip,
    TAR: _read_members,
    BYTES: _read_bytes,
    MARKER: _read_marker,
}


def _add_leaves(
    file: ComparedFile,
    name: str,
    reader: PickleReader,
    tensors: TensorDigests,
    items: _ItemCollector,
    leaves: Sequence[Leaf] | None = None,
) -> None:
    """Add the leaves of a pickle.

    Args:
        file: File that contains the pickle.
        name: Name of the pickled object in a DCP; "" for a file that is one pickle.
        reader: Reader of the pickle.
        tensors: Computes the digests of its tensors.
        items: Collector that gets the leaves.
        leaves: Leaves of `reader`, if they were read already; None to read them.
    """
    names = _parameter_names(reader)
    named = [
        (file.full_name(".".join(filter(None, (name, *_replace_numbers(leaf.path, names)))) or file.label), leaf)
        for leaf in (reader.leaves() if leaves is None else leaves)
    ]
    for path in names:
        whole_name = file.full_name(".".join(filter(None, (name, *path, "state"))))
        named.append((whole_name, Leaf((), ContainerInfo("parameters by number, shown by name"), ())))
    first: dict[str, int] = {}
    for index, (whole_name, _) in enumerate(named):
        first.setdefault(whole_name, index)
    # Leaves with the same name are sorted by key, as the order of dicts is not significant.
    for whole_name, leaf in sorted(named, key=lambda each: (first[each[0]], each[1].sort_key)):
        tensor_parts = reader.read_tensor(whole_name, leaf.value)
        if tensor_parts is None:
            item = StoredItem(whole_name, file.label, is_rng_tuple=is_rng_tuple(reader.normalize(leaf.value)))
            items.add(file, item, reader.value_text(leaf.value))
        else:
            entry, data, attributes_text = tensor_parts
            text, num_nonfinite = tensors.read(entry, data)
            items.add(file, _stored_tensor(file, whole_name, entry, not name), text + attributes_text, num_nonfinite)


def _parameter_names(reader: PickleReader) -> Mapping[tuple[str, ...], Mapping[str, str]]:
    """Return path of an optimizer -> number -> name of its parameters, if its param groups have `param_names`.

    The state dict of torch contains them if the optimizer was created from `named_parameters()`.
    """
    names_by_optimizer: dict[tuple[str, ...], dict[str, str]] = {}
    root_value = reader.root_value
    for path, node in [((), root_value), *(((str(key),), value) for key, value in _string_items(reader, root_value))]:
        groups = dict(_string_items(reader, node)).get("param_groups")
        for group in groups if isinstance(groups, list) else ():
            values = dict(_string_items(reader, group))
            numbers, names = values.get("params"), values.get("param_names")
            if isinstance(numbers, list) and isinstance(names, list) and len(numbers) == len(names):
                named = {str(each): name for each, name in zip(numbers, names, strict=True) if isinstance(name, str)}
                if all(type(each) is int for each in numbers):
                    names_by_optimizer.setdefault(path, {}).update(named)
    return names_by_optimizer


def _string_items(reader: PickleReader, node: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in reader.dict_items(node) if type(key) is str)


def _replace_numbers(path: tuple[str, ...], names: Mapping[tuple[str, ...], Mapping[str, str]]) -> Iterator[str]:
    """Yield the words of a path in optimizer state, with names of parameters instead of numbers."""
    for index, part in enumerate(path):
        is_number = index and path[index - 1] == "state" and path[: index - 1] in names
        yield names[path[: index - 1]].get(part, part) if is_number else part


def _read_json(file: ComparedFile, items: _ItemCollector, run_folder: Path | None) -> None:
    try:
        values = list(values_of_json(read_small(file.path, MAX_CONFIG_BYTES), file.path, _VOLATILE_KEYS, run_folder))
    except UnicodeDecodeError:
        _read_bytes(file, items)
        return
    except CkptxError as error:
        items.first_error = items.first_error or error
        _read_bytes(file, items)
        return
    for name, value, text in values:
        item = StoredItem(file.full_name(name or file.label), file.label, is_rng_tuple=is_rng_tuple(value))
        items.add(file, item, text)
