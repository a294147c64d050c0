"""Record the files of an HF checkpoint, and restore them byte for byte later.

The record is stored in a manifest, which anybody may have edited. So a header or an index that was stored as text must
list exactly the tensors that are planned for its file: then it can change formatting, but not assign tensors to
different bytes.
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
from ckptx.formats.hf.layout import HuggingFaceLayout, format_header, place_file
from ckptx.formats.hf.reader import INDEX_FILE, check_index, format_index, parse_index
from ckptx.formats.hf.safetensors import frame_header, pad_header, parse_header
from ckptx.storage.interface import Location
from ckptx.untrusted.file_name import find_weights_fault
from ckptx.untrusted.limits import MAX_JSON_DEPTH

_TensorRange = tuple[DType, Shape, int, int]  # dtype, shape, first byte, end
_NEXT_STEP = "remove the manifest, which no loader needs, to write new files instead"


def record_files(source: Catalog, notes: list[str]) -> OriginalFiles | None:
    """Return a record from which `plan_recorded_files` can write the files of `source` byte for byte.

    Args:
        source: An HF checkpoint.
        notes: Receives a line if the files have names that cannot be restored.

    Returns:
        The record; None if the files have such names.
    """
    index = next((name for name in source.verbatim if name not in source.files), None)
    fault = find_weights_fault(list(source.files), index)
    if fault is not None:
        notes.append(f"original file names not recorded: {fault}")
        return None
    numbers = {name: number for number, name in enumerate(source.files)}
    return OriginalFiles(
        tuple(_record_file(source, name) for name in source.files),
        None if index is None else _record_index(source, index),
        {name: numbers[entry.chunks[0].file] for name, entry in source.tensors.items()},
    )


def _record_file(source: Catalog, name: str) -> OriginalFile:
    """Record only `__metadata__` of a file if its header follows from that and the tensors; else the header."""
    text = source.verbatim[name]
    metadata = (_json_value(text, "__metadata__") or {}) if '"__metadata__"' in text else {}
    tensors = [entry for entry in source.tensors.values() if entry.chunks[0].file == name]
    try:
        is_standard = pad_header(format_header(tensors, metadata)) == text
    except UnicodeEncodeError:  # a lone surrogate, escaped in the header: only the text itself can represent it
        is_standard = False
    return OriginalFile(name, metadata, None) if is_standard else OriginalFile(name, None, text)


def _record_index(source: Catalog, name: str) -> OriginalIndex:
    """Record only `metadata` of an index if its text can be generated from that and the tensors; else the text."""
    text = source.verbatim[name]
    metadata: Any = _json_value(text, "metadata", {})
    weight_map = {entry.name: entry.chunks[0].file for entry in source.tensors.values()}
    is_standard = _is_shallow(metadata) and format_index(weight_map, metadata) == text
    return OriginalIndex(name, metadata, None) if is_standard else OriginalIndex(name, None, text)


def _json_value(text: str, key: str, default: object = None) -> Any:
    """Return the value of a key in a valid JSON object; if the key is the first one, the rest is not parsed."""
    first = re.match(rf'\s*{{\s*"{key}"\s*:\s*', text)
    if first is None:
        return json.loads(text).get(key, default)
    value, _ = json.JSONDecoder().raw_decode(text, first.end())
    return value


def _is_shallow(value: Any) -> bool:
    """Return True if the value is nested less deeply than half the limit for a manifest, which will contain it."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH // 2):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return True
    return False


def plan_recorded_files(
    root: Location, original: OriginalFiles, tensors: Mapping[str, TensorEntry], where: str
) -> HuggingFaceLayout:
    """Plan the files that `record_files` recorded.

    Args:
        root: Output directory.
        original: The record.
        tensors: All tensors of the record, by original name.
        where: Manifest that contains the record, the subject of error messages.

    Raises:
        InputError: A stored header or index contradicts the planned files.
    """
    catalog, prologues = Catalog(root, "huggingface", {}), {}
    shards: list[list[TensorEntry]] = [[] for _ in original.files]
    for name, number in original.tensors.items():
        shards[number].append(tensors[name])
    for number, (file, shard) in enumerate(zip(original.files, shards, strict=True)):
        text = pad_header(format_header(shard, file.metadata or {})) if file.header is None else file.header
        prologues[file.name] = place_file(catalog, file.name, shard, text)
        if file.header is not None:
            _check_header(file.header, catalog, shard, file.name, f"{where}: origin.files[{number}].header")
    index = original.index
    if index is None:
        return HuggingFaceLayout(catalog, prologues, INDEX_FILE, None)
    if index.text is None:
        weight_map = {name: entry.chunks[0].file for name, entry in catalog.tensors.items()}
        return HuggingFaceLayout(catalog, prologues, index.name, format_index(weight_map, index.metadata))
    _check_index(index, catalog, f"{where}: origin.index.text")
    return HuggingFaceLayout(catalog, prologues, index.name, index.text)


def _check_header(text: str, catalog: Catalog, shard: list[TensorEntry], file: str, where: str) -> None:
    """Refuse a stored header that does not list exactly the tensors planned for its file, at the planned positions."""
    frame = frame_header(text)
    try:
        header = parse_header(lambda at, n: frame[at : at + n], catalog.files[file], where)
    except CkptxError as error:
        raise _manifest_error(error, where) from error
    listed = {tensor.name: tensor[1:] for tensor in header.tensors}
    if len(listed) != len(shard):
        raise InputError(f"{where}: lists {len(listed)} tensors, but the file has {len(shard)}; {_NEXT_STEP}")
    for entry in shard:
        chunk = catalog.tensors[entry.name].chunks[0]
        planned = (entry.dtype, entry.shape, chunk.offset, chunk.offset + chunk.nbytes)
        if listed.get(entry.name) != planned:
            raise InputError(
                f'{where}: tensor "{entry.name}" {_describe_mismatch(listed.get(entry.name), planned)}; {_NEXT_STEP}'
            )


def _describe_mismatch(found: _TensorRange | None, planned: _TensorRange) -> str:
    if found is None:
        return "is missing"
    descriptions = [f"{dtype} {list(shape)} at bytes {begin} to {end}" for dtype, shape, begin, end in (found, planned)]
    return f"is {descriptions[0]}, expected {descriptions[1]}"


def _check_index(index: OriginalIndex, catalog: Catalog, where: str) -> None:
    assert index.text is not None
    try:
        check_index(parse_index(index.text, PurePosixPath(where)), catalog, PurePosixPath(where))
    except CkptxError as error:
        raise _manifest_error(error, where) from error


def _manifest_error(error: CkptxError, where: str) -> InputError:
    """Replace the next step in an error message, the part after its last semicolon, by one that fits a manifest."""
    problem = str(error).rpartition(";")[0] or str(error)
    return InputError(f"{problem if problem.startswith(where) else f'{where}: {problem}'}; {_NEXT_STEP}")
