"""Parse `ckptx.json` into a `Manifest`, or report the field that is invalid.

Every field is checked, even if it is not used: a manifest with one invalid field was not written by ckptx, so its other
fields are not trusted either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ckptx.catalog.dtype import BY_NAME
from ckptx.catalog.form import FORMS
from ckptx.catalog.manifest import (
    ORIGINAL_FORMAT,
    RANK_ORDER,
    SCHEMA,
    FileRecord,
    LayoutRecord,
    Manifest,
    OriginalFile,
    OriginalFiles,
    OriginalIndex,
    ShardingRecord,
    TensorRecord,
)
from ckptx.catalog.manifest_consistency import contradiction_in
from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.storage.files import read_small
from ckptx.untrusted.file_name import colliding_name, name_fault, weights_fault
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import MANIFEST_BYTES, shape_fault
from ckptx.untrusted.numbers import SharedHash, UniqueTuples, salted

_MAX_VALUES = 1 << 24  # of any type; the largest published model with its optimizer state has a tenth
_END = 1 << 63
# Formats that a manifest can describe: outputs that have one, then sources that it can restore.
_FORMATS = (
    *(form.name for form in FORMS.values() if form.has_manifest),
    *(form.name for form in FORMS.values() if form.can_be_restored),
)
_NUMBERS = frozenset({int})
_DIGEST = re.compile("[0-9a-f]{32}")

T = TypeVar("T")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in a file.

    Raises:
        InputError: It is not a valid manifest, or not a regular file.
        UnsupportedError: A newer ckptx wrote it.
    """
    return parse_manifest(read_small(path, MANIFEST_BYTES), str(path))


@lru_cache(maxsize=1)  # several steps of a conversion read the same manifest
def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest.

    Args:
        data: The bytes of the file.
        where: Its path, the subject of error messages.

    Raises:
        InputError: It is not a valid manifest, or contradicts itself; the message names the field.
        UnsupportedError: A newer ckptx wrote it.
    """
    found = _json(data, where)
    version = found.get("ckptx")
    if type(version) is not int or version < 1:
        raise _invalid(where, f"ckptx must be the version of the manifest, found {version!r:.60}")
    if version != SCHEMA:
        raise UnsupportedError(
            f"{where}: manifest version is {version}, but this ckptx supports {SCHEMA}; use a newer ckptx, or remove "
            "the file, which no loader needs"
        )
    try:
        manifest = _ManifestReader().manifest(found, where)
    except _Fault as fault:
        raise _invalid(where, f"{fault.field} must be {fault.required}, found {fault.found}") from None
    contradiction = contradiction_in(manifest)
    if contradiction is not None:
        field, value, required = contradiction
        raise InputError(
            f"{where}: contradicts itself ({field} is {value}, but must be {required}); remove it, no loader needs it"
        )
    return manifest


def _json(data: bytes, where: str) -> dict[str, Any]:
    if sum(data.count(char) for char in b"[{,") > _MAX_VALUES:
        raise _invalid(where, f"has more than {_MAX_VALUES} values, the limit")
    try:
        found = parse_json(data.decode("utf-8"), "the text")
    except (UnicodeDecodeError, InputError) as error:
        raise _invalid(where, f"{error!s:.120}") from error
    if not isinstance(found, dict):
        raise _invalid(where, f"expected a JSON object, found a {type(found).__name__}")
    return found


def _invalid(where: str, reason: str) -> InputError:
    return InputError(f"{where}: not a valid manifest ({reason}); remove it if it is damaged, no loader needs it")


class _Fault(Exception):
    """A field has an invalid value."""

    def __init__(self, field: str, found: Any, required: str, shown: str | None = None) -> None:
        super().__init__(field)
        self.field, self.found, self.required = field, shown or f"{found!r:.60}", required


class _ManifestReader:
    """Parses the fields of one manifest; errors name the path of a field in the file."""

    def __init__(self) -> None:
        self._shapes: UniqueTuples[Shape] = UniqueTuples()
        self._inside: list[set[tuple[int, Shape]]] = []

    def manifest(self, found: Mapping[str, Any], where: str) -> Manifest:
        self._text(found.get("tool"), "tool")
        format = found.get("format")
        if format not in _FORMATS:
            self._refuse("format", format, f"one of {', '.join(_FORMATS)}")
        files, sidecars = (self._rows(found, key, self._file) for key in ("files", "sidecars"))
        twice = colliding_name([*files, *sidecars])
        if twice is not None:
            self._refuse("names in files and sidecars", twice, "unique")
        cuts = tuple(
            self._cut(cut, len(files), f"cuts[{number}]")
            for number, cut in enumerate(self._list(found.get("cuts"), "cuts"))
        )
        self._inside = [set() for _ in cuts]
        tensors = self._rows(found, "tensors", lambda row: self._tensor(row, cuts, len(files)))
        self._check_ties(tensors)
        original = found.get("origin", 0)  # null means that there is none; the key itself is required
        return Manifest(
            where,
            str(format),
            self._layout(found.get("layout"), "layout"),
            None if original is None else self._original(original, "origin"),
            cuts,
            files,
            sidecars,
            tensors,
        )

    def _rows(self, found: Mapping[str, Any], key: str, read: Callable[[Any], T]) -> dict[str, T]:
        rows = self._object(found.get(key), key)
        for name in rows:
            fault = None if key == "tensors" else name_fault(name)
            if fault is not None:
                self._refuse(f"every name in {key}", name, f"a valid file name ({fault})")
            self._text(name, key)
        parsed = {}
        for name, row in rows.items():
            try:
                parsed[name] = read(row)
            except _Fault as fault:
                fault.field = f"{_at(key, name)}{fault.field}"
                raise
        return parsed

    def _file(self, row: Any) -> FileRecord:
        row = self._object(row, "")
        return FileRecord(self._count(row.get("bytes"), ".bytes"), self._digest(row.get("digest"), ".digest"))

    def _tensor(self, row: Any, cuts: tuple[ShardingRecord, ...], files: int) -> TensorRecord:
        row = self._object(row, "")
        name = row.get("dtype")
        dtype = BY_NAME.get(name) if isinstance(name, str) else None
        if dtype is None:
            self._refuse(".dtype", name, "a dtype")
        shape = self._shape(row.get("shape"), ".shape")
        if prod(shape) * dtype.bits >= _END:
            self._refuse(".shape", list(shape), "a shape that fits into a file")
        file, cut = row.get("file"), row.get("cut")
        if (file is None) == (cut is None):
            self._refuse("", sorted(row), "an object with either file or cut")
        if file is not None:
            self._index(file, files, ".file")
        else:
            self._index(cut, len(cuts), ".cut")
            if salted(shape) not in self._inside[cut]:  # tensors that share a cut have one shape
                if not all(_is_inside(region, shape) for region in cuts[cut].regions):
                    self._refuse(".cut", cut, "the index of blocks within the shape")
                self._inside[cut].add(salted(shape))
        return TensorRecord(
            dtype,
            shape,
            self._digest(row.get("digest"), ".digest"),
            file,
            cut,
            self._text_or_none(row.get("tied_to"), ".tied_to"),
            self._text_or_none(row.get("model"), ".model"),
        )

    def _check_ties(self, tensors: Mapping[str, TensorRecord]) -> None:
        for name, row in tensors.items():
            if row.tied_to is None:
                continue
            other = tensors.get(row.tied_to)
            if other is None or row.tied_to == name or (other.dtype, other.shape) != (row.dtype, row.shape):
                self._refuse(
                    f"{_at('tensors', name)}.tied_to", row.tied_to, "another tensor of the same dtype and shape"
                )

    def _cut(self, cut: Any, files: int, at: str) -> ShardingRecord:
        cut = self._object(cut, at)
        block_files, offsets, sizes, replicas = (
            self._list(cut.get(key), f"{at}.{key}") for key in ("files", "offsets", "sizes", "replicas")
        )
        if not len(block_files) == len(offsets) == len(sizes):
            self._refuse(
                at, f"{len(block_files)}, {len(offsets)}, {len(sizes)}", "equally many files, offsets and sizes"
            )
        for file in block_files:
            self._index(file, files, f"{at}.files")
        for replica in replicas:
            self._index(replica, len(block_files), f"{at}.replicas")
        regions = []
        for begin, size in zip(offsets, sizes, strict=True):
            region = Region(self._shape(begin, f"{at}.offsets"), self._shape(size, f"{at}.sizes"))
            if len(region.offsets) != len(region.sizes):
                self._refuse(f"{at}.offsets", begin, f"{len(size)} integers, one per dim")
            regions.append(region)
        return ShardingRecord(tuple(block_files), tuple(regions), tuple(replicas))

    def _layout(self, layout: Any, at: str) -> LayoutRecord:
        layout = self._object(layout, at)
        tp, pp, dp_shard = (self._positive(layout.get(axis), f"{at}.{axis}") for axis in ("tp", "pp", "dp_shard"))
        if layout.get("rank_order") != RANK_ORDER:
            self._refuse(f"{at}.rank_order", layout.get("rank_order"), RANK_ORDER)
        stages = layout.get("stages", 0)
        if stages is None:
            return LayoutRecord(tp, pp, dp_shard, None)
        at = f"{at}.stages"
        spans = (tuple(self._span(span, at) for span in self._list(stage, at)) for stage in self._list(stages, at))
        return LayoutRecord(tp, pp, dp_shard, tuple(spans))

    def _span(self, span: Any, at: str) -> tuple[str, int, int]:
        if not isinstance(span, list) or len(span) != 3:
            self._refuse(at, span, "[path, first, stop]")
        return self._text(span[0], at), self._count(span[1], at), self._count(span[2], at)

    def _original(self, original: Any, at: str) -> OriginalFiles:
        original = self._object(original, at)
        if original.get("format") != ORIGINAL_FORMAT:
            self._refuse(f"{at}.format", original.get("format"), ORIGINAL_FORMAT)
        files = tuple(
            self._original_file(file, f"{at}.files[{number}]")
            for number, file in enumerate(self._list(original.get("files"), f"{at}.files"))
        )
        index = original.get("index", 0)
        index = None if index is None else self._original_index(index, f"{at}.index")
        fault = weights_fault([file.name for file in files], None if index is None else index.name)
        if fault is not None:
            raise _Fault(f"{at}.files", None, "valid file names of an HF checkpoint", shown=fault)
        at_tensors = f"{at}.tensors"
        tensors = self._object(original.get("tensors"), at_tensors)
        for name, file in tensors.items():
            self._text(name, at_tensors)
            if not _is_index(file, len(files)):
                self._refuse_index(file, len(files), _at(at_tensors, name))
        if set(tensors.values()) != set(range(len(files))):
            self._refuse(
                at_tensors, f"those of {len(set(tensors.values()))} files", f"the tensors of all {len(files)} files"
            )
        return OriginalFiles(files, index, tensors)

    def _original_file(self, file: Any, at: str) -> OriginalFile:
        file = self._object(file, at)
        name = self._text(file.get("name"), f"{at}.name")
        if ("metadata" in file) == ("header" in file):
            self._refuse(at, sorted(map(str, file)), "an object with either metadata or header")
        if "header" in file:
            return OriginalFile(name, None, self._text(file["header"], f"{at}.header"))
        metadata = self._object(file["metadata"], f"{at}.metadata")
        for key, value in metadata.items():
            self._text(key, f"{at}.metadata")
            self._text(value, f"{at}.metadata")
        return OriginalFile(name, metadata, None)

    def _original_index(self, index: Any, at: str) -> OriginalIndex:
        index = self._object(index, at)
        name = self._text(index.get("name"), f"{at}.name")
        if ("metadata" in index) == ("text" in index):
            self._refuse(at, sorted(map(str, index)), "an object with either metadata or text")
        if "text" in index:
            return OriginalIndex(name, None, self._text(index["text"], f"{at}.text"))
        return OriginalIndex(name, index["metadata"], None)

    def _object(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(at, value, "an object")
        return value

    def _list(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list):
            self._refuse(at, value, "a list")
        return value

    def _text(self, value: Any, at: str) -> str:
        if type(value) is not str:
            self._refuse(at, value, "a string")
        return value

    def _text_or_none(self, value: Any, at: str) -> str | None:
        return None if value is None else self._text(value, at)

    def _count(self, value: Any, at: str) -> int:
        if type(value) is not int or not 0 <= value < _END:
            self._refuse(at, value, "an integer of 0 or more")
        return value

    def _positive(self, value: Any, at: str) -> int:
        return self._count(value, at) or self._refuse(at, value, "1 or more")

    def _index(self, value: Any, stop: int, at: str) -> None:
        if not _is_index(value, stop):
            self._refuse_index(value, stop, at)

    def _refuse_index(self, value: Any, stop: int, at: str) -> NoReturn:
        self._refuse(at, value, f"an index below {stop}")

    def _shape(self, value: Any, at: str) -> Shape:
        if not isinstance(value, list) or not _NUMBERS.issuperset(map(type, value)):
            self._refuse(at, value, "a list of sizes")
        shape = tuple(value)
        known = self._shapes.get(shape)
        if known is not None:
            return known
        if not all(0 <= size < _END for size in shape):
            self._refuse(at, value, "a list of sizes")
        fault = shape_fault(shape)
        if fault is not None:
            raise _Fault(at, None, "a shape that fits into memory", shown=fault)
        try:
            return self._shapes.keep(shape)
        except SharedHash as error:
            raise _Fault(at, None, "sizes of real tensors", shown=str(error)) from None

    def _digest(self, value: Any, at: str) -> str:
        if type(value) is not str or not _DIGEST.fullmatch(value):
            self._refuse(at, value, "a digest of 32 hex digits")
        return value

    def _refuse(self, at: str, found: Any, required: str) -> NoReturn:
        raise _Fault(at, found, required)


def _at(key: str, name: str) -> str:
    """Return the path of a field in an object."""
    return f"{key}[{json.dumps(name):.200}]"


def _is_index(value: Any, stop: int) -> bool:
    return type(value) is int and 0 <= value < stop


def _is_inside(region: Region, shape: Shape) -> bool:
    return len(region.sizes) == len(shape) and all(
        begin + size <= dim for begin, size, dim in zip(*region, shape, strict=True)
    )
