"""Number of parameters and aliases of a checkpoint, as docs/report.md defines them for every command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError, ReadError, UnsupportedError
from ckptx.formats.hf.hf_metadata import name_config_in_errors
from ckptx.mapping.names import pattern_of
from ckptx.model_view.recorded_ties import recorded_ties
from ckptx.model_view.view import ModelView

if TYPE_CHECKING:
    from ckptx.architecture.tied import TieDecision
    from ckptx.storage.interface import SourceFiles
    from ckptx.transfer.stream import TensorReader

_SAMPLE_BYTES = 1 << 16  # bytes per sample; three samples per tensor
_MAX_POSSIBLE_TIES = 4  # names: input embedding and output head of a decoder, and the same of an encoder


@dataclass(frozen=True, slots=True)
class Parameters:
    """Number of parameters of a model, and the tied names that count once.

    Attributes:
        count: Number of elements of all tensors, each counted once regardless of its names and copies.
        tied: Groups of tied names whose tensors are stored separately, with equal sampled rows, and counted once.
    """

    count: int = 0
    tied: list[list[str]] = field(default_factory=list)


def has_known_ties(view: ModelView) -> bool:
    """Return True if the class and the config of a model determine which of its names are tied."""
    return view.architecture is not None and view.config is not None and not view.architecture.is_unknown_class


def count_parameters(view: ModelView, files: SourceFiles | None = None) -> Parameters:
    """Count the parameters of a model.

    Names that share bytes are one tensor. Names that may be tied are one tensor if dtype, shape and sampled rows agree,
    because files may hold different tensors under such names. These rows are the only tensor data that is read. Ties
    are those that the config declares. For an unknown class or without a config, they are those that the manifest
    records, and matrices of equal dtype and shape outside of layers may be tied as well.

    Args:
        view: Model.
        files: Open files of the checkpoint, from which the rows are read; None to open them if required.

    Raises:
        InputError: A tie flag in the config is not a boolean.
        ReadError: The storage failed.
    """
    is_own_config = view.config is view.catalog.config
    with name_config_in_errors(view.catalog) if is_own_config else nullcontext():
        ties = list(_declared_ties(view))
    if not has_known_ties(view):
        ties += [*_recorded_ties(view), *_possible_ties(view)]
    representatives = _representatives(ties)
    count, stored_separately = _count_untied(view, representatives)
    tied = []
    for names in stored_separately.values():
        for tied_names in _group_by_samples(view, names, files) if len(names) > 1 else [names]:
            count += view.tensors[tied_names[0]].numel
            if len(tied_names) > 1:
                tied.append(tied_names)
    return Parameters(count, tied)


def count_with_known_ties(view: ModelView, representatives: Mapping[str, str]) -> int:
    """Count the parameters of a model whose tied names are known.

    Args:
        view: Model.
        representatives: Name -> representative name, equal for all names of one tensor.
    """
    count, separate = _count_untied(view, representatives)
    return count + sum(view.tensors[names[0]].numel for names in separate.values())


def tie_representatives(decisions: Iterable[TieDecision]) -> dict[str, str]:
    """Map each name of a tie that was decided to be one tensor to one of its names, equal for all of them.

    Names of other decisions are left out.
    """
    return _representatives(
        (each.target, each.source, each.stored_name)
        for each in decisions
        if each.action == "alias" and each.stored_name is not None
    )


def _count_untied(view: ModelView, representatives: Mapping[str, str]) -> tuple[int, dict[object, list[str]]]:
    """Count the elements of names that are in no tie, and group the others; names that share bytes occur once.

    Args:
        view: Model.
        representatives: Name in a tie -> representative name of the tie.

    Returns:
        The number of elements, and the names in ties, in groups of equal tie, dtype and shape.
    """
    count = 0
    locations: set[object] = set()
    stored_separately: dict[object, list[str]] = {}
    for name, entry in view.tensors.items():
        numel = prod(entry.shape)
        location = entry.position if numel else name
        if location in locations:
            continue
        locations.add(location)
        if name in representatives:
            stored_separately.setdefault((representatives[name], entry.dtype, entry.shape), []).append(name)
        else:
            count += numel
    return count, stored_separately


def _declared_ties(view: ModelView) -> Iterator[tuple[str, ...]]:
    """Yield the names of each tie that the config declares."""
    if view.architecture is not None and view.config is not None:
        for pair in view.architecture.ties:
            if pair.flag.is_set(view.config):
                yield from pair.namings


def _recorded_ties(view: ModelView) -> Iterator[tuple[str, ...]]:
    """Yield the names of each tie that the manifest records."""
    names = {entry.name: name for name, entry in view.tensors.items()}
    for target, source in recorded_ties(view).items():
        if target in names and source in names:
            yield names[target], names[source]


def _possible_ties(view: ModelView) -> Iterator[tuple[str, ...]]:
    """Yield the names of matrices of equal dtype and shape that may be the embedding and head of a model.

    They are outside of layers: their names have no index, and no component "layers", which a tensor of Megatron with
    the values of all layers has. If more than `_MAX_POSSIBLE_TIES` have equal dtype and shape, these are not yielded.
    """
    by_header: dict[object, list[str]] = {}
    for name, entry in view.tensors.items():
        if len(entry.shape) == 2 and entry.numel and pattern_of(name) == name and "layers" not in name.split("."):
            by_header.setdefault((entry.dtype, entry.shape), []).append(name)
    for names in by_header.values():
        if 1 < len(names) <= _MAX_POSSIBLE_TIES:
            yield tuple(names)


def hold_equal_samples(view: ModelView, names: Sequence[str]) -> bool:
    """Return True if sampled rows of some tensors of a model are equal, or cannot be read.

    Raises:
        ReadError: The storage failed.
    """
    return len(_group_by_samples(view, list(names), None)) == 1


def find_absent_ties(view: ModelView) -> list[list[str]]:
    """Return the pairs of names that the config ties and of which only one is stored, as [absent name, stored name]."""
    if view.architecture is None or view.config is None:
        return []
    pairs = []
    for pair in view.architecture.ties:
        if not pair.flag.is_set(view.config):
            continue
        stored = [[name for name in names if name in view.tensors] for names in pair.namings]
        if any(len(names) > 1 for names in stored):
            continue
        for names, present in zip(pair.namings, stored, strict=True):
            if present:
                pairs.append([next(name for name in names if name not in present), *present])
                break
    return pairs


def _representatives(ties: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Map each name to the first, in sorted order, of all names tied to it, directly or indirectly."""
    groups: dict[str, set[str]] = {}
    for names in ties:
        joined = set().union(*(groups.get(name, {name}) for name in names))
        groups.update(dict.fromkeys(joined, joined))
    return {name: min(group) for name, group in groups.items()}


def _group_by_samples(view: ModelView, names: list[str], files: SourceFiles | None) -> list[list[str]]:
    """Group tied names by equal sampled rows; if the rows cannot be read, return one group, as the config declares.

    Raises:
        ReadError: The storage failed.
    """
    from ckptx.formats.dcp.reader import locate_payloads  # few models have names that are tied and stored separately
    from ckptx.transfer.stream import TensorReader

    catalog = view.catalog
    entries = {name: view.tensors[name] for name in names}
    groups: dict[object, list[str]] = {}
    try:
        with catalog.source.open() if files is None else nullcontext(files) as files:
            if catalog.traits.has_archives:
                part = replace(catalog, tensors={entry.name: entry for entry in entries.values()})
                located = locate_payloads(part, files).tensors
                entries = {name: located[entry.name] for name, entry in entries.items()}
            reader = TensorReader(files)
            for name, entry in entries.items():
                groups.setdefault(tuple(_sample_digests(reader, entry)), []).append(name)
    except ReadError:
        raise
    except (InputError, UnsupportedError):  # reported by commands that read the bytes
        return [names]
    return list(groups.values())


def _sample_digests(reader: TensorReader, entry: TensorEntry) -> Iterator[bytes]:
    """Yield digests of the first, some middle and the last rows of a tensor."""
    if not entry.shape:
        yield _digest(reader, entry, full_region(entry.shape))
        return
    rows, row_nbytes = entry.shape[0], max(1, entry.nbytes // entry.shape[0])
    count = min(rows, max(1, _SAMPLE_BYTES // row_nbytes))
    for first in (0, (rows - count) // 2, rows - count):
        rest = [0] * (len(entry.shape) - 1)
        yield _digest(reader, entry, Region((first, *rest), (count, *entry.shape[1:])))


def _digest(reader: TensorReader, entry: TensorEntry, region: Region) -> bytes:
    from ckptx.transfer.digest_sink import DigestSink

    nbytes = entry.dtype.nbytes(region.numel)
    sink = DigestSink(nbytes, memoryview(bytearray(max(1, nbytes))))
    reader.stream(entry, region, sink, [])  # part of a record, so its CRC-32 cannot be checked
    return sink.digest.digest()


def find_aliases(catalog: Catalog) -> dict[str, str]:
    """Map each name whose bytes an earlier name in the catalog has to the first such name."""
    name_by_position: dict[object, str] = {}
    aliases = {}
    for name, entry in catalog.tensors.items():
        first_name = name_by_position.setdefault(entry.position, name) if entry.numel else name
        if first_name != name and entry.chunks == catalog.tensors[first_name].chunks:
            aliases[name] = first_name
    return aliases
