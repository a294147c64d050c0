"""What counts as one: the aliases and the parameters of a checkpoint.

The words are those of the report (docs/report.md), and every command counts with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Region, whole
from ckptx.errors import InputError, UnsupportedError
from ckptx.model_view.view import ModelView

if TYPE_CHECKING:
    from ckptx.architecture.tied import TieDecision
    from ckptx.transfer.stream import TensorReader

_SAMPLE = 1 << 16  # bytes of each of three places


@dataclass(frozen=True, slots=True)
class Parameters:
    """The elements of a model, and which of its names add none.

    Attributes:
        count: Elements of its tensors, each tensor once however many names or copies it has.
        tied: Groups of names that are stored apart and counted once, because the config ties them.
    """

    count: int = 0
    tied: list[list[str]] = field(default_factory=list)


def parameters_of(view: ModelView) -> Parameters:
    """Counts the model's parameters.

    Names that share bytes are one tensor. So are names that the config declares tied, where dtype, shape and some rows
    agree: files may hold different tensors under names that are declared tied. Rows of such names are the only tensor
    data that is read.
    """
    leaders = _tied_names(view)
    count, apart = _counted_apart(view, leaders)
    tied = []
    for names in apart.values():
        for same in _with_equal_rows(view, names) if len(names) > 1 else [names]:
            count += view.tensors[same[0]].numel
            if len(same) > 1:
                tied.append(same)
    return Parameters(count, tied)


def parameters_decided(view: ModelView, leaders: Mapping[str, str]) -> int:
    """Counts the model's parameters where it is known which names are one tensor.

    Args:
        view: The model.
        leaders: Name -> a name for the tensor it is, the same for all of its names.
    """
    count, apart = _counted_apart(view, leaders)
    return count + sum(view.tensors[names[0]].numel for names in apart.values())


def leaders_of(decisions: Iterable[TieDecision]) -> dict[str, str]:
    """Name -> one of the names that are the same tensor as decided, bytes compared."""
    return _leaders(
        (each.target, each.source, each.stored)
        for each in decisions
        if each.action == "alias" and each.stored is not None
    )


def _counted_apart(view: ModelView, leaders: Mapping[str, str]) -> tuple[int, dict[object, list[str]]]:
    """Elements under names of no tie; and names of each tie, dtype and shape that have bytes of their own."""
    count = 0
    places: set[object] = set()
    apart: dict[object, list[str]] = {}
    for name, entry in view.tensors.items():
        numel = prod(entry.shape)
        place = entry.place if numel else name
        if place in places:
            continue
        places.add(place)
        if name in leaders:
            apart.setdefault((leaders[name], entry.dtype, entry.shape), []).append(name)
        else:
            count += numel
    return count, apart


def _tied_names(view: ModelView) -> dict[str, str]:
    """Name -> one of the names that the config ties it to, the same for all of them."""
    if view.architecture is None or view.config is None:
        return {}
    declared = (pair for pair in view.architecture.ties if pair.flag.effective(view.config))
    return _leaders(names for pair in declared for names in pair.namings)


def _leaders(ties: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Name -> one name for all that are tied to it, directly or not."""
    groups: dict[str, set[str]] = {}
    for names in ties:
        joined = set().union(*(groups.get(name, {name}) for name in names))
        groups.update(dict.fromkeys(joined, joined))
    return {name: min(group) for name, group in groups.items()}


def _with_equal_rows(view: ModelView, names: list[str]) -> list[list[str]]:
    """The names, those together whose rows are equal; where rows cannot be read, the config is believed."""
    from ckptx.formats.dcp.reader import open_payloads  # few models have names that are tied and stored apart
    from ckptx.transfer.stream import TensorReader

    catalog = view.catalog
    entries = {name: view.tensors[name] for name in names}
    found: dict[object, list[str]] = {}
    try:
        with catalog.source.open() as files:
            if catalog.form.has_archives:
                part = replace(catalog, tensors={entry.name: entry for entry in entries.values()})
                located = open_payloads(part, files).tensors
                entries = {name: located[entry.name] for name, entry in entries.items()}
            reader = TensorReader(files)
            for name, entry in entries.items():
                found.setdefault(tuple(_samples(reader, entry)), []).append(name)
    except (InputError, UnsupportedError):  # to be told by a command that needs the bytes
        return [names]
    return list(found.values())


def _samples(reader: TensorReader, entry: TensorEntry) -> Iterator[bytes]:
    """Digests of the first rows of a tensor, of some in the middle, and of the last."""
    if not entry.shape:
        yield _digest(reader, entry, whole(entry.shape))
        return
    rows, row = entry.shape[0], max(1, entry.nbytes // entry.shape[0])
    count = min(rows, max(1, _SAMPLE // row))
    for first in (0, (rows - count) // 2, rows - count):
        rest = [0] * (len(entry.shape) - 1)
        yield _digest(reader, entry, Region((first, *rest), (count, *entry.shape[1:])))


def _digest(reader: TensorReader, entry: TensorEntry, region: Region) -> bytes:
    from ckptx.transfer.digest_sink import DigestSink

    nbytes = entry.dtype.nbytes(region.numel)
    sink = DigestSink(nbytes, memoryview(bytearray(max(1, nbytes))))
    reader.stream(entry, region, sink, [])  # a part of a record: its CRC-32 cannot be held against anything
    return sink.digest.digest()


def aliases_of(catalog: Catalog) -> dict[str, str]:
    """Name -> the first name in the catalog whose bytes it shares."""
    first: dict[object, str] = {}
    aliases = {}
    for name, entry in catalog.tensors.items():
        stored = first.setdefault(entry.place, name) if entry.numel else name
        if stored != name and entry.chunks == catalog.tensors[stored].chunks:
            aliases[name] = stored
    return aliases
