"""The very files of an HF checkpoint: what to remember of them, and laying tensors out in them again.

What was remembered comes back through a file that anybody may have written. So a header or an index that was kept as
text must say, tensor by tensor, what is planned for its file: then it can change how the bytes look, and not which
tensor is which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.manifest import OriginalFile, OriginalFiles, OriginalIndex
from ckptx.catalog.region import Shape
from ckptx.errors import CkptxError, InputError
from ckptx.formats.hf.layout import HuggingFaceLayout, header_of, place_file
from ckptx.formats.hf.reader import INDEX, check_index, index_text, parse_index
from ckptx.formats.hf.safetensors import frame_header, padded, parse_header
from ckptx.storage.interface import Location
from ckptx.untrusted.file_name import weights_fault
from ckptx.untrusted.limits import JSON_DEPTH

_Place = tuple[DType, Shape, int, int]
_NEXT = "remove it, no loader needs it, and the files are laid out anew"


def remember(source: Catalog, notes: list[str]) -> OriginalFiles | None:
    """What it takes to write the files of `source` again, byte for byte.

    Args:
        source: An HF checkpoint.
        notes: Gets a line when the files have names that cannot be given back.

    Returns:
        None when they have such names.
    """
    index = next((name for name in source.verbatim if name not in source.files), None)
    fault = weights_fault(list(source.files), index)
    if fault is not None:
        notes.append(f"the names of the files are not remembered: {fault}")
        return None
    numbers = {name: number for number, name in enumerate(source.files)}
    return OriginalFiles(
        tuple(_remember_file(source, name) for name in source.files),
        None if index is None else _remember_index(source, index),
        {name: numbers[entry.chunks[0].file] for name, entry in source.tensors.items()},
    )


def _remember_file(source: Catalog, name: str) -> OriginalFile:
    text = source.verbatim[name]
    metadata = (_value_of(text, "__metadata__") or {}) if '"__metadata__"' in text else {}
    tensors = [entry for entry in source.tensors.values() if entry.chunks[0].file == name]
    try:
        usual = padded(header_of(tensors, metadata)) == text
    except UnicodeEncodeError:  # half a surrogate pair, escaped: it can be kept as it is alone
        usual = False
    return OriginalFile(name, metadata, None) if usual else OriginalFile(name, None, text)


def _remember_index(source: Catalog, name: str) -> OriginalIndex:
    text = source.verbatim[name]
    metadata: Any = _value_of(text, "metadata", {})
    weight_map = {entry.name: entry.chunks[0].file for entry in source.tensors.values()}
    usual = _is_shallow(metadata) and index_text(weight_map, metadata) == text
    return OriginalIndex(name, metadata, None) if usual else OriginalIndex(name, None, text)


def _value_of(text: str, key: str, default: object = None) -> Any:
    """What a JSON object has under a key. It was parsed before: where the key is the first, the rest is left alone."""
    first = re.match(rf'\s*{{\s*"{key}"\s*:\s*', text)
    if first is None:
        return json.loads(text).get(key, default)
    value, _ = json.JSONDecoder().raw_decode(text, first.end())
    return value


def _is_shallow(value: Any) -> bool:
    """True when lists and objects are nested in `value` less deep than they may be once it is part of a manifest."""
    level = [value]
    for _ in range(JSON_DEPTH // 2):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return True
    return False


def restore(
    root: Location, original: OriginalFiles, tensors: Mapping[str, TensorEntry], where: str
) -> HuggingFaceLayout:
    """Lays tensors out in the files that `remember` saw.

    Args:
        root: The directory to be.
        original: What to write again.
        tensors: By original name; all that `original` names.
        where: The manifest it was read from, with which errors begin.

    Raises:
        InputError: A header or the index says something else than what its files will hold.
    """
    catalog, prologues = Catalog(root, "huggingface", {}), {}
    shards: list[list[TensorEntry]] = [[] for _ in original.files]
    for name, number in original.tensors.items():
        shards[number].append(tensors[name])
    for number, (file, shard) in enumerate(zip(original.files, shards, strict=True)):
        text = padded(header_of(shard, file.metadata or {})) if file.header is None else file.header
        prologues[file.name] = place_file(catalog, file.name, shard, text)
        if file.header is not None:
            _check_header(file.header, catalog, shard, file.name, f"{where}: origin.files[{number}].header")
    index = original.index
    if index is None:
        return HuggingFaceLayout(catalog, prologues, INDEX, None)
    if index.text is None:
        weight_map = {name: entry.chunks[0].file for name, entry in catalog.tensors.items()}
        return HuggingFaceLayout(catalog, prologues, index.name, index_text(weight_map, index.metadata))
    _check_index(index, catalog, f"{where}: origin.index.text")
    return HuggingFaceLayout(catalog, prologues, index.name, index.text)


def _check_header(text: str, catalog: Catalog, shard: list[TensorEntry], file: str, where: str) -> None:
    frame = frame_header(text)
    try:
        header = parse_header(lambda at, n: frame[at : at + n], catalog.files[file], where)
    except CkptxError as error:
        raise _refused(error, where) from error
    said = {tensor.name: tensor[1:] for tensor in header.tensors}
    if len(said) != len(shard):
        raise InputError(f"{where}: holds {len(said)} tensors, needed {len(shard)}; {_NEXT}")
    for entry in shard:
        chunk = catalog.tensors[entry.name].chunks[0]
        planned = (entry.dtype, entry.shape, chunk.offset, chunk.offset + chunk.nbytes)
        if said.get(entry.name) != planned:
            raise InputError(f'{where}: tensor "{entry.name}" {_said(said.get(entry.name), planned)}; {_NEXT}')


def _said(found: _Place | None, planned: _Place) -> str:
    if found is None:
        return "is not in it"
    said = [f"{dtype} {list(shape)} at bytes {begin} to {end}" for dtype, shape, begin, end in (found, planned)]
    return f"is {said[0]}, needed {said[1]}"


def _check_index(index: OriginalIndex, catalog: Catalog, where: str) -> None:
    assert index.text is not None
    try:
        check_index(parse_index(index.text, PurePosixPath(where)), catalog, PurePosixPath(where))
    except CkptxError as error:
        raise _refused(error, where) from error


def _refused(error: CkptxError, where: str) -> InputError:
    """What was found, with the next step that helps here."""
    said = str(error).rpartition(";")[0] or str(error)
    return InputError(f"{said if said.startswith(where) else f'{where}: {said}'}; {_NEXT}")
