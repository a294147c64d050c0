"""Parse `ckptx.json` into a `Manifest`, or report the field that is invalid.

Every field is checked, even if it is not used: a manifest with one invalid field was not written by ckptx, so its other
fields are not trusted either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.format_traits import TRAITS_BY_FORMAT
from ckptx.catalog.manifest import (
    ORIGIN_FORMAT,
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
from ckptx.catalog.manifest_consistency import field_path, find_contradiction
from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.storage.files import read_small
from ckptx.untrusted.file_name import find_conflicting_name, find_name_fault, find_weights_fault
from ckptx.untrusted.hash_keys import HashFlood, UniqueTuples, salted_key
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import MAX_MANIFEST_BYTES, find_shape_fault

_MAX_VALUES = 1 << 24  # JSON values of any type; the largest published model with its optimizer state has a tenth
_INTEGER_STOP = 1 << 63  # every integer must be less, so that it fits an int64
# Formats of outputs with a manifest: those whose manifest records the original files, then HF checkpoints and adapters.
_FORMATS = (
    *(traits.name for traits in TRAITS_BY_FORMAT.values() if traits.has_manifest),
    *(traits.name for traits in TRAITS_BY_FORMAT.values() if traits.can_be_restored or traits.is_adapter),
)
_INTEGER_TYPES = frozenset({int})
_DIGEST = re.compile("[0-9a-f]{32}")

T = TypeVar("T")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in a file.

    Raises:
        InputError: It is not a valid manifest, or not a regular file.
        UnsupportedError: A newer ckptx wrote it.
    """
    return parse_manifest(read_small(path, MAX_MANIFEST_BYTES), str(path))


@lru_cache(maxsize=1)  # several steps of a conversion read the same manifest
def parse_manifest(data: bytes, path: str) -> Manifest:
    """Parse a manifest.

    Args:
        data: The bytes of the file.
        path: Its path, the subject of error messages.

    Raises:
        InputError: It is not a valid manifest, or contradicts itself; the message names the field.
        UnsupportedError: A newer ckptx wrote it.
    """
    document = _decode(data, path)
    version = document.get("ckptx")
    if type(version) is not int or version < 1:
        raise _invalid_manifest(path, f"ckptx must be the version of the manifest, found {version!r:.60}")
    if version != SCHEMA:
        raise UnsupportedError(
            f"{path}: manifest version is {version}, but this ckptx supports {SCHEMA}; use a newer ckptx, or remove "
            "the file, which no loader needs"
        )
    try:
        manifest = _ManifestParser().parse(document, path)
    except _InvalidField as fault:
        raise _invalid_manifest(path, f"{fault.field} must be {fault.required}, found {fault.value_text}") from None
    contradiction = find_contradiction(manifest)
    if contradiction is not None:
        field, value, required = contradiction
        raise InputError(
            f"{path}: contradicts itself ({field} is {value}, but must be {required}); remove it, no loader needs it"
        )
    return manifest


def _decode(data: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object in a file; values are counted first, so that a file with too many is not parsed.

    Raises:
        InputError: The bytes are not a JSON object in UTF-8, or have too many values.
    """
    if sum(data.count(char) for char in b"[{,") > _MAX_VALUES:
        raise _invalid_manifest(path, f"has more than {_MAX_VALUES} values, the limit")
    try:
        document = parse_json(data.decode("utf-8"), "the text", noun="")
    except (UnicodeDecodeError, InputError) as error:
        raise _invalid_manifest(path, f"{error!s:.120}") from error
    if not isinstance(document, dict):
        raise _invalid_manifest(path, f"expected a JSON object, found a {type(document).__name__}")
    return document


def _invalid_manifest(path: str, reason: str) -> InputError:
    return InputError(f"{path}: not a valid manifest ({reason}); remove it if it is damaged, no loader needs it")


class _InvalidField(Exception):
    """The value of a field is invalid.

    Attributes:
        field: Path of the field in the file.
        value_text: Value as text, shortened.
        required: Requirement, such as "a list of sizes".
    """

    def __init__(self, field: str, value: Any, required: str, value_text: str | None = None) -> None:
        super().__init__(field)
        self.field, self.value_text, self.required = field, value_text or f"{value!r:.60}", required


class _ManifestParser:
    """Parser of one manifest; raises `_InvalidField` with the path of the field in the file."""

    def __init__(self) -> None:
        self._shapes: UniqueTuples[Shape] = UniqueTuples()  # equal shapes share one tuple
        self._fitting_shapes: list[set[tuple[int, Shape]]] = []  # for each sharding, the shapes that contain its blocks

    def parse(self, document: Mapping[str, Any], path: str) -> Manifest:
        """Return the manifest in a JSON object, whose fields are all checked by themselves.

        Raises:
            _InvalidField: A field is missing, or its value is invalid.
        """
        self._require_string(document.get("tool"), "tool")
        format = document.get("format")
        if format not in _FORMATS:
            self._refuse("format", format, f"one of {', '.join(_FORMATS)}")
        files, sidecars = (self._parse_section(document, key, self._parse_file) for key in ("files", "sidecars"))
        duplicate = find_conflicting_name([*files, *sidecars])
        if duplicate is not None:
            self._refuse("names in files and sidecars", duplicate, "unique")
        shardings = tuple(
            self._parse_sharding(sharding, len(files), f"cuts[{number}]")
            for number, sharding in enumerate(self._require_list(document.get("cuts"), "cuts"))
        )
        self._fitting_shapes = [set() for _ in shardings]
        tensors = self._parse_section(
            document, "tensors", lambda entry: self._parse_tensor(entry, shardings, len(files))
        )
        self._check_ties(tensors)
        original = document.get("origin", 0)  # null means that there is none; the key itself is required
        return Manifest(
            path,
            str(format),
            self._parse_layout(document.get("layout"), "layout"),
            None if original is None else self._parse_original(original, "origin"),
            shardings,
            files,
            sidecars,
            tensors,
        )

    def _parse_section(self, document: Mapping[str, Any], key: str, parse_entry: Callable[[Any], T]) -> dict[str, T]:
        """Return the parsed entries of a section by name.

        Args:
            document: The manifest.
            key: "files", "sidecars" or "tensors".
            parse_entry: Parses the value of one name; the field in its error, such as ".dtype", follows that name.
        """
        entries = self._require_object(document.get(key), key)
        for name in entries:
            fault = None if key == "tensors" else find_name_fault(name)
            if fault is not None:
                self._refuse(f"every name in {key}", name, f"a valid file name ({fault})")
            self._require_string(name, key)
        parsed = {}
        for name, entry in entries.items():
            try:
                parsed[name] = parse_entry(entry)
            except _InvalidField as fault:
                fault.field = f"{field_path(key, name)}{fault.field}"
                raise
        return parsed

    def _parse_file(self, entry: Any) -> FileRecord:
        entry = self._require_object(entry, "")
        return FileRecord(
            self._require_count(entry.get("bytes"), ".bytes"), self._require_digest(entry.get("digest"), ".digest")
        )

    def _parse_tensor(self, entry: Any, shardings: tuple[ShardingRecord, ...], file_count: int) -> TensorRecord:
        entry = self._require_object(entry, "")
        dtype_name = entry.get("dtype")
        dtype = DTYPES_BY_NAME.get(dtype_name) if isinstance(dtype_name, str) else None
        if dtype is None:
            self._refuse(".dtype", dtype_name, "a dtype")
        shape = self._require_shape(entry.get("shape"), ".shape")
        if prod(shape) * dtype.bits >= _INTEGER_STOP:
            self._refuse(".shape", list(shape), "a shape that fits into a file")
        file_index, sharding_index = entry.get("file"), entry.get("cut")
        if (file_index is None) == (sharding_index is None):
            self._refuse("", sorted(entry), "an object with either file or cut")
        if file_index is not None:
            self._require_index(file_index, file_count, ".file")
        else:
            self._require_index(sharding_index, len(shardings), ".cut")
            if salted_key(shape) not in self._fitting_shapes[sharding_index]:  # checked once per shape
                if not all(_is_inside(region, shape) for region in shardings[sharding_index].regions):
                    self._refuse(".cut", sharding_index, "the index of blocks within the shape")
                self._fitting_shapes[sharding_index].add(salted_key(shape))
        return TensorRecord(
            dtype,
            shape,
            self._require_digest(entry.get("digest"), ".digest"),
            file_index,
            sharding_index,
            self._require_optional_string(entry.get("tied_to"), ".tied_to"),
            self._require_optional_string(entry.get("model"), ".model"),
        )

    def _check_ties(self, tensors: Mapping[str, TensorRecord]) -> None:
        """Check that each `tied_to` names another tensor with the same dtype and shape; digests are compared later."""
        for name, tensor in tensors.items():
            if tensor.tied_to is None:
                continue
            other = tensors.get(tensor.tied_to)
            if other is None or tensor.tied_to == name or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
                self._refuse(
                    f"{field_path('tensors', name)}.tied_to",
                    tensor.tied_to,
                    "another tensor of the same dtype and shape",
                )

    def _parse_sharding(self, sharding: Any, file_count: int, field: str) -> ShardingRecord:
        sharding = self._require_object(sharding, field)
        block_files, offsets, sizes, replicas = (
            self._require_list(sharding.get(key), f"{field}.{key}") for key in ("files", "offsets", "sizes", "replicas")
        )
        if not len(block_files) == len(offsets) == len(sizes):
            self._refuse(
                field, f"{len(block_files)}, {len(offsets)}, {len(sizes)}", "equally many files, offsets and sizes"
            )
        for file in block_files:
            self._require_index(file, file_count, f"{field}.files")
        for replica in replicas:
            self._require_index(replica, len(block_files), f"{field}.replicas")
        regions = []
        for begin, size in zip(offsets, sizes, strict=True):
            region = Region(self._require_shape(begin, f"{field}.offsets"), self._require_shape(size, f"{field}.sizes"))
            if len(region.offsets) != len(region.sizes):
                self._refuse(f"{field}.offsets", begin, f"{len(size)} integers, one per dim")
            regions.append(region)
        return ShardingRecord(tuple(block_files), tuple(regions), tuple(replicas))

    def _parse_layout(self, layout: Any, field: str) -> LayoutRecord:
        layout = self._require_object(layout, field)
        tp, pp, dp_shard = (
            self._require_positive(layout.get(axis), f"{field}.{axis}") for axis in ("tp", "pp", "dp_shard")
        )
        ep = self._require_positive(layout.get("ep", 1), f"{field}.ep")
        if tp * dp_shard % ep:
            self._refuse(f"{field}.ep", ep, f"a divisor of tp x dp_shard, {tp * dp_shard}")
        ep_inner = None if ep == 1 else self._require_string(layout.get("ep_inner"), f"{field}.ep_inner")
        virtual_stages = self._require_positive(layout.get("virtual_stages", 1), f"{field}.virtual_stages")
        style = self._require_string(layout.get("schedule_style", "loop"), f"{field}.schedule_style")
        if style not in ("loop", "v") or (style == "v" and virtual_stages != 2):
            self._refuse(f"{field}.schedule_style", style, '"loop", or "v" with virtual_stages 2')
        if layout.get("rank_order") != RANK_ORDER:
            self._refuse(f"{field}.rank_order", layout.get("rank_order"), RANK_ORDER)
        tp_plan = self._parse_tp_plan(layout.get("tp_plan"), f"{field}.tp_plan")
        stages = layout.get("stages", 0)
        if stages is None:
            return LayoutRecord(tp, pp, dp_shard, None, tp_plan, ep, ep_inner, virtual_stages, style)
        field = f"{field}.stages"
        spans = (
            tuple(self._parse_layer_span(span, field) for span in self._require_list(stage, field))
            for stage in self._require_list(stages, field)
        )
        return LayoutRecord(tp, pp, dp_shard, tuple(spans), tp_plan, ep, ep_inner, virtual_stages, style)

    def _parse_tp_plan(self, plan: Any, field: str) -> dict[str, str] | None:
        if plan is None:
            return None
        rules = self._require_object(plan, field)
        return {pattern: self._require_string(style, f"{field}.{pattern:.60}") for pattern, style in rules.items()}

    def _parse_layer_span(self, span: Any, field: str) -> tuple[str, int, int]:
        if not isinstance(span, list) or len(span) != 3:
            self._refuse(field, span, "[path, first, stop]")
        return (
            self._require_string(span[0], field),
            self._require_count(span[1], field),
            self._require_count(span[2], field),
        )

    def _parse_original(self, original: Any, field: str) -> OriginalFiles:
        original = self._require_object(original, field)
        if original.get("format") != ORIGIN_FORMAT:
            self._refuse(f"{field}.format", original.get("format"), ORIGIN_FORMAT)
        files = tuple(
            self._parse_original_file(file, f"{field}.files[{number}]")
            for number, file in enumerate(self._require_list(original.get("files"), f"{field}.files"))
        )
        index = original.get("index", 0)
        index = None if index is None else self._parse_original_index(index, f"{field}.index")
        fault = find_weights_fault([file.name for file in files], None if index is None else index.name)
        if fault is not None:
            raise _InvalidField(f"{field}.files", None, "valid file names of an HF checkpoint", value_text=fault)
        tensors_field = f"{field}.tensors"
        tensors = self._require_object(original.get("tensors"), tensors_field)
        for name, file in tensors.items():
            self._require_string(name, tensors_field)
            if not _is_index(file, len(files)):
                self._refuse_index(file, len(files), field_path(tensors_field, name))
        if set(tensors.values()) != set(range(len(files))):
            self._refuse(
                tensors_field, f"those of {len(set(tensors.values()))} files", f"the tensors of all {len(files)} files"
            )
        return OriginalFiles(files, index, tensors)

    def _parse_original_file(self, file: Any, field: str) -> OriginalFile:
        file = self._require_object(file, field)
        name = self._require_string(file.get("name"), f"{field}.name")
        if ("metadata" in file) == ("header" in file):
            self._refuse(field, sorted(map(str, file)), "an object with either metadata or header")
        if "header" in file:
            return OriginalFile(name, None, self._require_string(file["header"], f"{field}.header"))
        metadata = self._require_object(file["metadata"], f"{field}.metadata")
        for key, value in metadata.items():
            self._require_string(key, f"{field}.metadata")
            self._require_string(value, f"{field}.metadata")
        return OriginalFile(name, metadata, None)

    def _parse_original_index(self, index: Any, field: str) -> OriginalIndex:
        index = self._require_object(index, field)
        name = self._require_string(index.get("name"), f"{field}.name")
        if ("metadata" in index) == ("text" in index):
            self._refuse(field, sorted(map(str, index)), "an object with either metadata or text")
        if "text" in index:
            return OriginalIndex(name, None, self._require_string(index["text"], f"{field}.text"))
        return OriginalIndex(name, index["metadata"], None)

    def _require_object(self, value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(field, value, "an object")
        return value

    def _require_list(self, value: Any, field: str) -> list[Any]:
        if not isinstance(value, list):
            self._refuse(field, value, "a list")
        return value

    def _require_string(self, value: Any, field: str) -> str:
        if type(value) is not str:
            self._refuse(field, value, "a string")
        return value

    def _require_optional_string(self, value: Any, field: str) -> str | None:
        return None if value is None else self._require_string(value, field)

    def _require_count(self, value: Any, field: str) -> int:
        if type(value) is not int or not 0 <= value < _INTEGER_STOP:
            self._refuse(field, value, "an integer of 0 or more")
        return value

    def _require_positive(self, value: Any, field: str) -> int:
        return self._require_count(value, field) or self._refuse(field, value, "1 or more")

    def _require_index(self, value: Any, stop: int, field: str) -> None:
        if not _is_index(value, stop):
            self._refuse_index(value, stop, field)

    def _refuse_index(self, value: Any, stop: int, field: str) -> NoReturn:
        self._refuse(field, value, f"an index below {stop}")

    def _require_shape(self, value: Any, field: str) -> Shape:
        """Return a shape, or the offsets of a block; an equal one that was parsed before is returned instead."""
        if not isinstance(value, list) or not _INTEGER_TYPES.issuperset(map(type, value)):
            self._refuse(field, value, "a list of sizes")
        shape = tuple(value)
        stored_shape = self._shapes.get(shape)
        if stored_shape is not None:
            return stored_shape
        if not all(0 <= size < _INTEGER_STOP for size in shape):
            self._refuse(field, value, "a list of sizes")
        fault = find_shape_fault(shape)
        if fault is not None:
            raise _InvalidField(field, None, "a shape that fits into memory", value_text=fault)
        try:
            return self._shapes.add(shape)
        except HashFlood as error:
            raise _InvalidField(field, None, "sizes of real tensors", value_text=str(error)) from None

    def _require_digest(self, value: Any, field: str) -> str:
        if type(value) is not str or not _DIGEST.fullmatch(value):
            self._refuse(field, value, "a digest of 32 hex digits")
        return value

    def _refuse(self, field: str, value: Any, required: str) -> NoReturn:
        raise _InvalidField(field, value, required)


def _is_index(value: Any, stop: int) -> bool:
    return type(value) is int and 0 <= value < stop


def _is_inside(region: Region, shape: Shape) -> bool:
    return len(region.sizes) == len(shape) and all(
        begin + size <= dim for begin, size, dim in zip(*region, shape, strict=True)
    )
