"""Open `pytorch_model.bin` and its sharded form: dicts of tensors written by `torch.save`.

The tensors of one file may share storages (tied weights) or be any strided view of one. A name that shares bytes with
another has a separate entry with the same byte range. Only the zip directory and the pickle of each file are read.

A single file may hold nested dicts, such as `{"model": model.state_dict(), "optimizer": ..., "step": 5}`. Its tensors
get the names that they would have in a DCP, `model.norm.weight` and `optimizer.state.0.exp_avg`, so that the model is
found by its prefix, as in a DCP. Values that are not tensors, such as numbers and objects of any class, are ignored
there, with a note. A file without nested dicts must not contain such values, because loaders reject them, too, and an
object may be there in place of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.format_traits import BIN, TORCH_SAVE
from ckptx.catalog.region import full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.reader import check_index, parse_index, read_text
from ckptx.formats.torch_archive.archive import locate_tensor, open_archive
from ckptx.formats.torch_archive.unknown_objects import UnknownNames, class_of_unknown, count_tensors
from ckptx.formats.torch_archive.unpickle import (
    ORDERED_DICT,
    TORCH_GLOBALS,
    Call,
    Globals,
    StorageRef,
    TensorRef,
    UnsupportedObject,
    describe_refused_name,
    load_torch,
)
from ckptx.storage.interface import Source, SourceFiles
from ckptx.untrusted.limits import MAX_INDEX_BYTES, MAX_TENSORS
from ckptx.wording import counted

_MAX_DEPTH = 16  # levels of dicts and lists in a file
# Values in a file. A few nested lists, each of which contains the next one many times, have more than can be visited.
_MAX_VALUES = 4 * MAX_TENSORS
_MAX_LISTED = 4  # names in a note
_SAVE_TENSORS = "save only tensors: torch.save(model.state_dict(), ...)"
_GLOBALS: Globals = {
    **TORCH_GLOBALS,
    # The first argument of a defaultdict is its default factory, which is dropped.
    ("collections", "defaultdict"): Call(lambda *arguments: ORDERED_DICT(*arguments[1:])),
}


def open_bin(source: Source, names: Sequence[str]) -> Catalog:
    """Return the catalog of the `.bin` files of a directory.

    Args:
        source: The directory.
        names: The files, or one index (`.json`) that lists them and is checked against them.

    Raises:
        InputError: A file is missing or damaged, two files contain one name, or the index and the files disagree.
        UnsupportedError: A file is from before torch 1.6, or contains more than named dense tensors.
    """
    index = names[0] if len(names) == 1 and names[0].endswith(".json") else None
    if index is None:
        return _open_files(source, names)
    text, path = read_text(source, index, MAX_INDEX_BYTES), source.location / index
    weight_map = parse_index(text, path)
    catalog = _open_files(source, list(dict.fromkeys(weight_map.values())))
    check_index(weight_map, catalog, path)
    catalog.verbatim[index] = text
    return catalog


def _open_files(source: Source, names: Sequence[str]) -> Catalog:
    catalog = Catalog(source.location, BIN.name, {}, opened_source=source)
    entries: dict[str, TensorEntry] = {}
    with source.open() as files:
        for name in names:
            identity = files.identity(name)
            catalog.files[name], catalog.identities[name] = identity.nbytes, identity
            contents = _open_file(files, name, is_single=len(names) == 1)
            if contents.is_nested:
                catalog.format = TORCH_SAVE.name
            catalog.notes += _ignored_notes(name, contents.ignored)
            for entry in contents.entries:
                if entry.name in entries:
                    raise InputError(
                        f'{source.location / name}: tensor "{entry.name}" is also in '
                        f"{entries[entry.name].chunks[0].file}; remove one of the files"
                    )
                entries[entry.name] = entry
    in_order = sorted(entries.values(), key=lambda entry: entry.chunks[0][1:3])
    catalog.tensors = {entry.name: entry for entry in in_order}
    return catalog


class _FileContents(NamedTuple):
    """Contents of one file.

    Attributes:
        entries: The tensors.
        is_nested: True if they are in nested dicts.
        ignored: Values other than tensors; empty unless the dicts are nested.
    """

    entries: list[TensorEntry]
    is_nested: bool
    ignored: list[_IgnoredValue]


class _IgnoredValue(NamedTuple):
    """A value that is not converted.

    Attributes:
        name: Dotted path of keys to the value.
        class_name: Dotted name of its class if ckptx does not know the class, else None.
        tensor_count: Number of tensors in it that were not counted for another value.
    """

    name: str
    class_name: str | None
    tensor_count: int

    @property
    def parent(self) -> str:
        """Return the first two components of the name, quoted for a note, and the class if the name has no others."""
        parts = self.name.split(".")
        class_name = self.class_name if len(parts) <= 2 else None
        return repr(".".join(parts[:2])) + (f" ({class_name})" if class_name else "")


def _ignored_notes(name: str, ignored: list[_IgnoredValue]) -> list[str]:
    notes = []
    if ignored:
        listed = _list_parents(ignored)
        notes.append(f"{name}: {counted(len(ignored), 'value')} other than tensors ignored, in {listed}")
    with_tensors = [value for value in ignored if value.tensor_count]
    if with_tensors:
        count = counted(sum(value.tensor_count for value in with_tensors), "tensor")
        notes.append(
            f"{name}: {count} in objects not converted, in {_list_parents(with_tensors)}; to convert them, save the "
            "state_dict() of the objects"
        )
    return notes


def _list_parents(values: list[_IgnoredValue]) -> str:
    parents = list(dict.fromkeys(value.parent for value in values))
    return ", ".join(parents[:_MAX_LISTED]) + (", ..." if len(parents) > _MAX_LISTED else "")


def _open_file(files: SourceFiles, name: str, *, is_single: bool) -> _FileContents:
    """Return the contents of a file.

    Args:
        files: Files of the directory.
        name: Name of the file.
        is_single: True if it is the only file of the checkpoint, which may hold nested dicts.

    Raises:
        InputError: The file is damaged, two tensors have the same dotted name, or a file without nested dicts refers to
            an unknown class.
        UnsupportedError: It contains more than named dense tensors.
    """
    where = f"{files.root / name}"
    unknown = UnknownNames()
    archive = open_archive(
        partial(files.read, name), 0, files.size(name), where, partial(load_torch, allowed=_GLOBALS, unknown=unknown)
    )
    is_nested = is_single and isinstance(archive.tree, dict) and _has_nested_tensor(archive.tree, where)
    refused_name = unknown.first()
    if refused_name is not None and not is_nested:
        raise InputError(f"{where}: {describe_refused_name(refused_name)}; {_SAVE_TENSORS}")
    if not isinstance(archive.tree, dict):
        raise UnsupportedError(
            f"{where}: expected a dict of named tensors, found {describe_value(archive.tree)}; save the plain "
            "state_dict()"
        )
    tree = archive.tree
    ignored: list[_IgnoredValue] = []
    if is_nested:
        tree, ignored = _flatten(tree, where)
    entries = []
    for key, value in tree.items():
        if not isinstance(value, TensorRef | UnsupportedObject) or type(key) is not str or not is_utf8(key):
            raise UnsupportedError(
                f"{where}: expected only named tensors, found {describe_value(value)} at {str(key)[:80]!r}; save the "
                "plain state_dict()"
            )
        payload = locate_tensor(value, archive.records, f'{where}: tensor "{key}"')
        dtype, shape = payload.dtype, payload.dtype.from_torch_elements(payload.torch_shape)
        if dtype.pack > 1 and not shape:
            raise UnsupportedError(f'{where}: tensor "{key}": is a 0-d {dtype.torch_name}, which is not supported')
        if dtype.pack > 1 and payload.strides is not None:
            raise UnsupportedError(
                f'{where}: tensor "{key}": {dtype.torch_name} is not row-major; save it with .contiguous()'
            )
        chunk = Chunk(full_region(shape), name, payload.data_offset, payload.nbytes, payload.strides, payload.record)
        entries.append(TensorEntry(key, dtype, shape, (chunk,)))
    return _FileContents(entries, is_nested, ignored)


def _is_nested(value: object) -> bool:
    """Return True for a dict, list or tuple with values; the stand-ins for torch objects are tuples, too."""
    return isinstance(value, dict | list | tuple) and not isinstance(value, TensorRef | UnsupportedObject | StorageRef)


def _has_nested_tensor(tree: Mapping[Any, Any], where: str) -> bool:
    """Return True if a dict or list in a dict contains a tensor.

    Raises:
        UnsupportedError: There are too many values.
    """
    pending: list[tuple[object, int]] = [(value, 0) for value in tree.values() if _is_nested(value)]
    visited = 0
    while pending:
        value, depth = pending.pop()
        if isinstance(value, TensorRef):
            return True
        if _is_nested(value) and depth < _MAX_DEPTH:
            assert isinstance(value, dict | list | tuple)
            pending.extend((each, depth + 1) for each in (value.values() if isinstance(value, dict) else value))
        visited += 1
        _refuse_many_values(visited + len(pending), where)
    return False


def _refuse_many_values(count: int, where: str) -> None:
    if count > _MAX_VALUES:
        raise UnsupportedError(f"{where}: more than {_MAX_VALUES:,} values in it; save the plain state_dict()")


def _flatten(tree: Mapping[Any, Any], where: str) -> tuple[dict[str, Any], list[_IgnoredValue]]:
    """Return the tensors of nested dicts and lists by dotted name, as stand-ins, and all other values.

    Raises:
        InputError: Two tensors have the same dotted name.
        UnsupportedError: A key above a tensor is neither a string nor an integer, a state dict contains an object with
            tensors in place of a tensor, or there are too many values or levels of dicts.
    """
    tensors: dict[str, Any] = {}
    ignored: list[_IgnoredValue] = []
    pending: list[tuple[str, Any, int]] = [("", tree, 0)]
    counted_ids: set[int] = set()
    visited = 0
    while pending:
        name, value, depth = pending.pop()
        visited += 1
        _refuse_many_values(visited + len(pending), where)
        if depth > _MAX_DEPTH:
            raise UnsupportedError(f"{where}: more than {_MAX_DEPTH} levels of dicts; save the plain state_dict()")
        if _is_nested(value):
            pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
            odd_keys = [key for key, _ in pairs if type(key) not in (str, int)]
            if odd_keys and (not name or count_tensors(value, counted_ids)):
                raise UnsupportedError(
                    f"{where}: {name or 'the dict'} has a key that is {describe_value(odd_keys[0])}; save the plain "
                    "state_dict()"
                )
            if odd_keys:
                ignored.append(_IgnoredValue(name, None, 0))
                continue
            pending.extend((f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in reversed(pairs))
        elif not isinstance(value, TensorRef | UnsupportedObject):
            ignored.append(_IgnoredValue(name, class_of_unknown(value), count_tensors(value, counted_ids)))
        elif name in tensors:
            raise InputError(f'{where}: two tensors have the dotted name "{name}"; save the plain state_dict()')
        else:
            tensors[name] = value
    _refuse_objects_among_tensors(tensors, ignored, where)
    return tensors, ignored


def _refuse_objects_among_tensors(tensors: Mapping[str, Any], ignored: list[_IgnoredValue], where: str) -> None:
    """Refuse an object with tensors in a state dict, where it may replace a weight: a quantized one, for example."""
    state_dicts = {name.rpartition(".")[0] for name in tensors if "." in name}
    for value in ignored:
        if value.tensor_count and value.name.rpartition(".")[0] in state_dicts:
            raise UnsupportedError(
                f"{where}: expected only tensors next to the tensors in {value.name.rpartition('.')[0]!r}, found an "
                f"object of {value.class_name or 'torch.storage'} that contains tensors at {value.name!r}; "
                f"{_SAVE_TENSORS}"
            )


def is_utf8(key: str) -> bool:
    """Return True if a name can be encoded as UTF-8."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe_value(value: object) -> str:
    """Describe the type of a value in a state dict, for error messages."""
    if isinstance(value, TensorRef):
        return "a tensor"
    if isinstance(value, UnsupportedObject):
        return f"a {value.kind}"
    if (class_name := class_of_unknown(value)) is not None:
        return f"an object of {class_name}"
    if isinstance(value, dict):
        return "a nested dict"
    return "None" if value is None else f"a value of type {type(value).__name__}"
