"""What a checkpoint on disk holds, whoever wrote it, as items that oracles compare. Nothing in it is executed.

    a folder with `.metadata`           DCP: of ckptx, of torchtitan, of a script with one stateful object
    model.safetensors, optimizer.pt,    transformers' Trainer, accelerate's save_state, and what trainers of their own
    random_states_0.pkl, *.json, ...    put into such files

A folder is searched for both, two levels down: the Trainer with FSDP has a DCP for the model, one for the optimizer,
and files beside them. A checkpoint may be one file, too.

Every tensor, and every value in a pickled object or in JSON, is one item: its name, and a digest of its bytes or the
value itself. Tensors are read in pieces of a megabyte. What belongs to no oracle by its name is of "other", which is
compared like the rest. Left out is:

* what a trainer was told, not what it has come to: training_args.bin, config.json and the like, tokenizers
* times, speeds, and names of runs and folders, which two runs never share (`_NOISE`), outside of model and optimizer
* the history of losses in trainer_state.json, which `losses` reads
* the layout: which rank wrote what into which file. `sharding_of` looks at that
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import whole
from ckptx.errors import InputError
from ckptx.formats.dcp.reader import open_dcp, open_payloads
from ckptx.formats.hf.safetensors import parse_header
from ckptx.formats.torch_archive.unpickle import Refused, TensorRef
from ckptx.robustness.item_names import word_of_file
from ckptx.robustness.oracles import Items
from ckptx.robustness.pickled import Reader, number_of, short
from ckptx.robustness.state_kinds import StoredItem, is_generator_state, oracles_of_items
from ckptx.storage.files import FilePool, read_small, unreadable
from ckptx.transfer.digest import TreeDigest
from ckptx.transfer.stream import TensorReader
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import CONFIG_BYTES, JSON_DEPTH, RANKS, TENSORS

_METADATA = ".metadata"
_DEPTH = 2  # folders below the one that was named
_PIECE = 1 << 20
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".tar", ".p")
_NO_STATE = re.compile(
    r"(training_args|.*config|.*index|tokenizer.*|vocab|merges|added_tokens|special_tokens_map|ckptx)"
    r"\.(json|bin|pt)|.*\.index\.json|preprocessor_config\.json|chat_template\..*"
)
_NOISE = re.compile(
    r"(.+_)?(time|timestamp|elapsed|hostname|runtime|per_second|seconds)|(wandb_|run_|save_)+id|uuid|best_model_checkpoint"
    r"|(output|logging|run)_dir|log_history|run_name"
)
_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "BF16": ("<u2", 0xFF << 7),
    "F16": ("<u2", 0x1F << 10),
}
_FINITE = frozenset({"model", "second model", "moments", "master weights"})
_NEVER_NOISE = _FINITE | {"adam step", "group", "rate"}


class Sharding(NamedTuple):
    """Whether the ranks of a run each had a part of the parameters, and what says so.

    Attributes:
        is_sharded: The answer.
        how: What it was read from.
        world_size: How many ranks wrote, where the files say.
    """

    is_sharded: bool
    how: str
    world_size: int | None


def items_of(path: Path) -> Items:
    """What a checkpoint holds.

    Args:
        path: A folder or a file.

    Returns:
        (oracle, name) -> digest, or the value itself where it is short. ("finite", name) -> "finite", or how many
        elements are not, for every tensor of the model and of the moments.

    Raises:
        InputError: It is no checkpoint, is damaged, or holds what no state of a training run holds.
        UnsupportedError: A file in it is of a kind that is not read.
    """
    items = _Items()
    found = _places(path)
    for place in found:
        if place.is_dcp:
            _read_dcp(place, items)
        elif place.path.suffix == ".safetensors":
            _read_safetensors(place, items)
        elif place.path.suffix == ".json":
            _read_json(place, items)
        else:
            _read_pickle(place, items)
    found_items = items.by_oracle()
    if not found_items:
        raise InputError(f"{path}: no checkpoint found, {_content(path)}")
    return found_items


def sharding_of(path: Path) -> Sharding:
    """Whether a run was sharded, from what it wrote.

    Raises:
        InputError: It is no checkpoint, or is damaged.
    """
    places = _places(path)
    ranks = {int(found[1]) for each in places if (found := re.search(r"\brng\.rank (\d+)", each.word or ""))}
    world_size = max(ranks) + 1 if ranks else None
    for place in places:
        if place.is_dcp and place.is_of("model"):
            catalog = open_dcp(place.path)
            stored = [_stored(place, place.name(name), entry) for name, entry in catalog.tensors.items()]
            oracles = zip(catalog.tensors.values(), oracles_of_items(stored), strict=True)
            model = [entry for entry, found in oracles if found == ("model",)]
            cut = sum(len(entry.chunks) > 1 for entry in model)
            writers = [int(found[1]) for name in catalog.files if (found := re.match(r"__(\d+)_\d+\.distcp", name))]
            world_size = world_size or (max(writers) + 1 if writers and max(writers) < RANKS else None)
            how = f"{cut} of {len(model)} parameters are in several pieces in {place.path.name}/{_METADATA}"
            return Sharding(cut > 0, how, world_size)
    names = sorted(place.path.name for place in places if place.is_of("model") and place.path.suffix != ".json")
    gathered = [name for name in names if "fsdp" in name]
    if gathered:
        return Sharding(True, f"{gathered[0]} is what accelerate writes where FSDP gathered the parameters", world_size)
    listed = ", ".join(names[:3]) or "no file"
    how = f"{listed} has whole parameters, and no DCP or pytorch_model_fsdp file lies beside it"
    return Sharding(False, how, world_size)


# ------------------------------------------------------------------------------------------------ where state lies


class _Place(NamedTuple):
    """A file, or the folder of a DCP.

    Attributes:
        path: Where it is.
        label: Its path below the checkpoint, without ending.
        word: What names in it begin with, where its own name says; None where it does not.
        is_dcp: It is a folder.
    """

    path: Path
    label: str
    word: str | None
    is_dcp: bool

    def name(self, inside: str) -> str:
        """The whole name of something in it."""
        if self.word is None:
            return inside
        first = self.word.partition(".")[0]
        begins = self.is_dcp and inside.partition(".")[0] == first
        return inside if begins else ".".join(filter(None, (self.word, inside)))

    def is_of(self, word: str) -> bool:
        """False where its name says that it holds something else."""
        return self.word is None or self.word.partition(".")[0] == word


def _places(path: Path) -> list[_Place]:
    if path.is_file():
        return [_Place(path, path.stem, None, False)]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or directory, needed a checkpoint")
    return sorted(_places_in(path, (), _DEPTH), key=lambda each: each.label)


def _places_in(folder: Path, above: tuple[str, ...], depth: int) -> Iterator[_Place]:
    try:
        entries = sorted(os.scandir(folder), key=lambda each: each.name)
    except OSError as error:
        raise unreadable(folder, error) from error
    is_dcp = any(each.name == _METADATA for each in entries)
    if is_dcp:
        yield _Place(folder, "/".join(above), word_of_file(above[-1]) if above else None, True)
    for entry in entries:
        name = entry.name
        stem, ending = os.path.splitext(name)
        if entry.is_dir():
            if depth and not name.startswith("."):
                yield from _places_in(Path(entry.path), (*above, name), depth - 1)
        elif _NO_STATE.fullmatch(name) or name.startswith("."):
            continue
        elif ending in (".safetensors", ".json", *_PICKLES):
            yield _Place(Path(entry.path), "/".join((*above, stem)), word_of_file(stem), False)


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

    def add(self, place: _Place, item: StoredItem, value: str, not_finite: int | None = None) -> None:
        if len(self._stored) > 4 * TENSORS:
            raise InputError(f"{place.path}: more values than any training run has")
        self._stored.append(item)
        self._values.append((value, not_finite))

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
        return items


def _stored(place: _Place, name: str, entry: TensorEntry, is_tensor: bool = True) -> StoredItem:
    return StoredItem(name, place.label, is_tensor, entry.shape, entry.dtype.name)


class _Sink:
    """Digests a tensor of any length and counts what is not finite in it."""

    def __init__(self, entry: TensorEntry, buffer: memoryview) -> None:
        self._digest, self._left, self._buffer = TreeDigest(), entry.nbytes, buffer
        self._kind = _EXPONENTS.get(entry.dtype.name)
        self._rest = b""
        self.not_finite = 0

    def space(self, nbytes: int) -> memoryview:
        return self._buffer[: min(nbytes, self._digest.room, len(self._buffer))]

    def commit(self, view: memoryview) -> None:
        self._left -= len(view)
        self._digest.update(view, last=not self._left)
        if self._kind is not None:
            kind, exponent = self._kind
            width = np.dtype(kind).itemsize
            data = self._rest + view if self._rest else view
            usable = len(data) // width * width
            bits = np.frombuffer(data[:usable], kind)
            self.not_finite += int(np.count_nonzero((bits & bits.dtype.type(exponent)) == exponent))
            self._rest = bytes(data[usable:])

    def said(self, entry: TensorEntry) -> str:
        return f"{entry.dtype} {list(entry.shape)} {self._digest.digest().hex()}"


class _Tensors:
    """Reads tensors of one place, each once."""

    def __init__(self, files: FilePool) -> None:
        self._files, self._reader = files, TensorReader(files)
        self._buffer = memoryview(bytearray(_PIECE))

    def read(self, entry: TensorEntry) -> tuple[str, int | None]:
        """Its digest, or the number in it; and how many elements are not finite, where the dtype has such."""
        sink = _Sink(entry, self._buffer)
        self._reader.stream(entry, whole(entry.shape), sink)
        number = number_of(entry, self._files)
        said = sink.said(entry) if number is None else f"{entry.dtype} {list(entry.shape)} {number}"
        return said, sink.not_finite if entry.dtype.name in _EXPONENTS else None

    def digest(self, entry: TensorEntry) -> str:
        """Its digest alone."""
        return self.read(entry)[0]


def _read_dcp(place: _Place, items: _Items) -> None:
    catalog = open_dcp(place.path)
    with FilePool(place.path) as files:
        located, tensors = open_payloads(catalog, files, later=True), _Tensors(files)
        for name, entry in located.tensors.items():
            items.add(place, _stored(place, place.name(name), entry), *tensors.read(entry))
        for name, stored in catalog.objects.items():
            where = f'{place.path / stored.file}: object "{name}"'
            reader = Reader(files, stored.file, where, stored.offset, stored.nbytes)
            _add_leaves(place, name, reader, tensors, items)


def _read_safetensors(place: _Place, items: _Items) -> None:
    with FilePool(place.path.parent) as files:
        name, tensors = place.path.name, _Tensors(files)
        for tensor in parse_header(partial(files.read, name), files.size(name), str(place.path)).tensors:
            chunk = Chunk(whole(tensor.shape), name, tensor.begin, tensor.end - tensor.begin)
            entry = TensorEntry(tensor.name, tensor.dtype, tensor.shape, (chunk,))
            items.add(place, _stored(place, place.name(tensor.name), entry), *tensors.read(entry))


def _read_pickle(place: _Place, items: _Items) -> None:
    with FilePool(place.path.parent) as files:
        reader = Reader(files, place.path.name, str(place.path))
        _add_leaves(place, "", reader, _Tensors(files), items)


def _add_leaves(place: _Place, name: str, reader: Reader, tensors: _Tensors, items: _Items) -> None:
    names = _parameter_names(reader.tree)
    for path, value in reader.leaves():
        whole_name = place.name(".".join(filter(None, (name, *_with_names(path, names)))) or place.label)
        if isinstance(value, TensorRef | Refused):
            entry = reader.entry(whole_name, value)
            items.add(place, _stored(place, whole_name, entry, not name), *tensors.read(entry))
        else:
            item = StoredItem(whole_name, place.label, is_generator=is_generator_state(value))
            items.add(place, item, reader.said(whole_name, value, tensors.digest))


def _parameter_names(tree: Any) -> Mapping[tuple[str, ...], Mapping[str, str]]:
    """Of each optimizer in a pickle: the number of each parameter -> its name, where the groups have `param_names`.

    torch has them in `state_dict` where an optimizer was made of `named_parameters()`.
    """
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for path, node in [((), tree), *(((str(key),), value) for key, value in _dict_items(tree))]:
        groups = node.get("param_groups") if isinstance(node, dict) else None
        for group in groups if isinstance(groups, list) else ():
            numbers, names = (group.get(key) if isinstance(group, dict) else None for key in ("params", "param_names"))
            if isinstance(numbers, list) and isinstance(names, list) and len(numbers) == len(names):
                named = {str(each): name for each, name in zip(numbers, names, strict=True) if isinstance(name, str)}
                if all(type(each) is int for each in numbers):
                    found.setdefault(path, {}).update(named)
    return found


def _dict_items(tree: Any) -> Iterator[tuple[Any, Any]]:
    return iter(dict.items(tree) if isinstance(tree, dict) else ())


def _with_names(path: tuple[str, ...], names: Mapping[tuple[str, ...], Mapping[str, str]]) -> Iterator[str]:
    """A path of an optimizer's state with names in the place of numbers."""
    for index, part in enumerate(path):
        is_number = index and path[index - 1] == "state" and path[: index - 1] in names
        yield names[path[: index - 1]].get(part, part) if is_number else part


def _read_json(place: _Place, items: _Items) -> None:
    text = read_small(place.path, CONFIG_BYTES).decode("utf-8", "replace")
    waiting: list[tuple[str, Any, int]] = [("", parse_json(text, place.path), 0)]
    while waiting:
        name, value, depth = waiting.pop()
        below = value.items() if isinstance(value, dict) and depth < JSON_DEPTH else ()
        if _NOISE.fullmatch(name.rpartition(".")[2]):
            continue
        if below:
            waiting.extend((f"{name}.{key}" if name else key, item, depth + 1) for key, item in reversed([*below]))
        else:
            item = StoredItem(place.name(name or place.label), place.label, is_generator=is_generator_state(value))
            items.add(place, item, short(repr(value)))
