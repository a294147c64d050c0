"""Rules between two namings of a checkpoint: the destination of each tensor, and the converted catalog entries.

A checkpoint may come in several namings that all load: published names, names of current transformers, model names,
with or without the name of the base model in front. So each name is looked up in all of them, and model names stay
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.destinations import Destination, ResolvedNames, Run, named, renamed_at, with_scales
from ckptx.mapping.name_index import NameIndex, indices_of
from ckptx.mapping.names import pattern_of, split_pattern
from ckptx.mapping.ops import Columns, Conversion, convert
from ckptx.mapping.quantization_scales import SCALE_OF_BLOCKS, bases_of_scales
from ckptx.wording import counted

ShapeOf = Callable[[str], "Shape | None"]


class Renamed(NamedTuple):
    """Tensors under other names.

    Attributes:
        tensors: Tensors by new name, in the order of their first sources.
        sources: New name -> old names of the tensors it is made of, in the order of the conversion.
        unknown: Names that no rule knows; their tensors pass through unchanged.
        notes: Notes for the user.
        kept: Names that stay although a rule applies: quantized weights whose scales no rule can combine or split.
    """

    tensors: dict[str, TensorEntry]
    sources: dict[str, tuple[str, ...]]
    unknown: list[str]
    notes: list[str]
    kept: tuple[str, ...] = ()

    @classmethod
    def not_yet(cls, tensors: Mapping[str, TensorEntry]) -> Renamed:
        """Create a renaming that keeps all names."""
        return cls(dict(tensors), {name: (name,) for name in tensors}, [], [])

    def then(self, second: Renamed) -> Renamed:
        """Return the composition of this renaming and a second one, which was applied to its tensors."""
        sources = {
            name: tuple(dict.fromkeys(old for each in names for old in self.sources[each]))
            for name, names in second.sources.items()
        }
        return Renamed(
            second.tensors, sources, second.unknown, [*self.notes, *second.notes], (*self.kept, *second.kept)
        )


class _PatternEntry(NamedTuple):
    """Result of a lookup that holds for every name of one pattern.

    Attributes:
        conversion: Index of the conversion; None if there is none.
        column: Index of the pattern among the sources, see `Destination`.
        in_list: True if the last index is a position in a module list.
        plain: Text to prepend and number of characters to remove to get a model name; None if it is not one.
    """

    conversion: int | None
    column: int
    in_list: bool
    plain: tuple[str, int] | None


class NameRules:
    """Rules between the namings of a checkpoint ("disk") and one set of names ("model").

    Attributes:
        conversions: Conversions from disk to model. If several give a model name, the first is used for writing.
        shape_of: Function that returns the shape of a model tensor; None if unknown.
    """

    def __init__(
        self,
        conversions: Sequence[Conversion],
        base_prefix: str = "",
        model_patterns: Collection[str] = (),
        *,
        shape_of: ShapeOf | None = None,
        is_extra: Callable[[str], bool] | None = None,
    ) -> None:
        """Build the indices of the rules.

        Args:
            conversions: Conversions that load, in order of preference. One without ops from a name to itself means
                that the model name is also the name to write.
            base_prefix: Name of the base model inside the class; disk names may omit it.
            model_patterns: Model names, with `*` for indices; the targets of the conversions are added.
            shape_of: Function that returns the shape of a model tensor; None if unknown.
            is_extra: Function that returns True for a name that matches a pattern but is not in the model, such as
                that of a layer after the last; such tensors are unknown.
        """
        self.conversions = tuple(conversions)
        self._back = tuple(conversion.inverse for conversion in self.conversions)
        self._prefix = f"{base_prefix}." if base_prefix else ""
        self._patterns = frozenset(model_patterns).union(*(each.targets for each in self.conversions))
        self._bases = bases_of_scales(self.conversions)
        known_shape: ShapeOf = shape_of or (lambda name: None)
        self.shape_of: ShapeOf = lambda name: (
            None if self._bases and name.endswith(SCALE_OF_BLOCKS) else known_shape(name)
        )
        self._is_extra, self._asks_extra = is_extra or (lambda name: False), is_extra is not None
        self._sources = NameIndex(() if _is_identity(each) else each.sources for each in self.conversions)
        self._targets = NameIndex(each.targets for each in self.conversions)
        self._looked_up: dict[str, tuple[Destination | None, str | None]] = {}
        self._model_names: dict[str, str | None] = {}
        self._known_patterns: dict[str, bool] = {}
        self._by_pattern: dict[str, _PatternEntry | None] = {}
        self._run_names: dict[tuple[int, tuple[int, ...]], str] = {}

    # -- destinations

    def model_name(self, disk_name: str) -> str | None:
        """Return the model tensor that a disk tensor is converted to, the first of several; None if it is unknown."""
        if disk_name not in self._model_names:
            place, plain = self._look_up(disk_name)
            self._model_names[disk_name] = plain if place is None else self._run_name(place)
        return self._model_names[disk_name]

    def _run_name(self, place: Destination) -> str:
        """Return the first model tensor of a run, which thousands of experts may share."""
        name = self._run_names.get(place.run)
        if name is None:
            name = self._run_names[place.run] = next(self._target_names(place))
        return name

    def places(self, names: Iterable[str]) -> dict[str, Destination | str | None]:
        """Map each disk name to its destination in a conversion, its model name if it is one, or None if unknown.

        A name may be both a disk name and a model name: norm0 -> norm1 -> norm2. It counts as a model name if its
        target already exists. Scales are renamed like their weight.
        """
        return self._places(names).places

    def are_model_names(self, names: Iterable[str]) -> bool:
        """Return True if all of these names may be model names."""
        return not any(isinstance(place, Destination) for place in self.places(names).values())

    def _places(self, names: Iterable[str]) -> ResolvedNames:
        found: dict[str, Destination | str | None] = {}
        doubtful: dict[str, tuple[Destination, str]] = {}
        for name in names:
            place, plain = self._look_up(name)
            found[name] = place or plain
            if place is not None and plain is not None:
                doubtful[name] = place, plain
        if doubtful:
            taken = {plain for plain in found.values() if isinstance(plain, str)}
            resolved = False
            while not resolved:
                resolved = True
                for name, (place, plain) in list(doubtful.items()):
                    if any(target in taken for target in self._target_names(place)):
                        found[name] = plain
                        taken.add(plain)
                        del doubtful[name]
                        resolved = False
        return with_scales(
            found,
            self.conversions,
            lambda weight: found.get(weight) or next((it for it in self._look_up(weight) if it is not None), None),
            lambda place: renamed_at(self.conversions, place),
        )

    def _look_up(self, name: str) -> tuple[Destination | None, str | None]:
        """Return the destination of a disk name and its model name, each None if the name is not of that kind."""
        known = self._looked_up.get(name)
        if known is None:
            known = self._looked_up[name] = self._resolve(name)
        return known

    def _resolve(self, name: str) -> tuple[Destination | None, str | None]:
        pattern, indices = split_pattern(name)
        entry_of_pattern = self._by_pattern.get(pattern)
        if entry_of_pattern is None:
            found = self._resolve_uncached(name)
            if pattern not in self._by_pattern:
                self._by_pattern[pattern] = (
                    None if self._depends_on_indices(name) else self._pattern_entry(name, *found)
                )
            return found
        plain = (
            None if entry_of_pattern.plain is None else entry_of_pattern.plain[0] + name[entry_of_pattern.plain[1] :]
        )
        if entry_of_pattern.conversion is None:
            return None, plain
        if entry_of_pattern.in_list:
            return Destination(entry_of_pattern.conversion, indices[:-1], entry_of_pattern.column, indices[-1]), plain
        return Destination(entry_of_pattern.conversion, indices, entry_of_pattern.column), plain

    def _depends_on_indices(self, name: str) -> bool:
        """Return True if the result of a lookup may depend on the numbers in the name."""
        if self._asks_extra or any(self._sources.counts(naming) for naming in self._spellings(name)):
            return True
        return bool(indices_of(self._prefix))

    def _pattern_entry(self, name: str, place: Destination | None, plain: str | None) -> _PatternEntry:
        change = None
        if plain is not None:
            change = (self._prefix, 0) if len(plain) > len(name) else ("", len(name) - len(plain))
        if place is None:
            return _PatternEntry(None, 0, False, change)
        return _PatternEntry(place.conversion, place.column, len(place.fixed) < len(indices_of(name)), change)

    def _resolve_uncached(self, name: str) -> tuple[Destination | None, str | None]:
        place = plain = None
        for naming in self._spellings(name):
            for fit in self._sources.find(naming):
                place = self._place(fit.group, fit.column, fit.indices, self.conversions[fit.group].targets[0])
                break
            if self._is_known(naming):
                plain = naming
            if place or plain:
                break
        if place is not None and self._is_extra(next(self._target_names(place))):
            place = None
        if plain is not None and self._is_extra(plain):
            plain = None
        return place, plain

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix:
            if name.startswith(self._prefix):
                yield name.removeprefix(self._prefix)
            yield self._prefix + name

    def _is_known(self, name: str) -> bool:
        pattern = pattern_of(name)
        known = self._known_patterns.get(pattern)
        if known is None:
            parts = pattern.split(".")
            known = pattern in self._patterns or any(
                ".".join(parts[:end]) + ".**" in self._patterns for end in range(1, len(parts))
            )
            self._known_patterns[pattern] = known
        return known

    @staticmethod
    def _place(conversion: int, column: int, indices: tuple[int, ...], other_side: str) -> Destination:
        """Return the destination; the last index is a position in a module list if the other side has fewer indices."""
        if len(indices) > other_side.count("*"):
            return Destination(conversion, indices[:-1], column, indices[-1])
        return Destination(conversion, indices, column)

    def _target_names(self, place: Destination) -> Iterator[str]:
        """Yield the model tensors of a run, for a module list the first."""
        return (named(target, place.fixed, 0) for target in self.conversions[place.conversion].targets)

    # -- catalogs

    def to_model(self, tensors: Mapping[str, TensorEntry]) -> Renamed:
        """Convert the tensors of a checkpoint to model names.

        Raises:
            InputError: Parts of a model tensor are missing or do not match, or two tensors have one destination.
            UnsupportedError: ckptx does not support a conversion.
        """
        resolved = self._places(tensors)
        places, kept = self._keep_unconvertible(resolved, self.conversions)
        renamed = _Converter(tensors, self.conversions, self.shape_of).run(places, kept)
        if self._prefix:
            plain = [(old, new) for old, new in places.items() if isinstance(new, str)]
            added = sum(new == self._prefix + old for old, new in plain)
            removed = sum(old == self._prefix + new for old, new in plain)
            for count, action in ((added, "added to"), (removed, "removed from")):
                if count:
                    renamed.notes.append(f'base model prefix "{self._prefix}" {action} {counted(count, "name")}')
        return renamed

    def to_disk(self, tensors: Mapping[str, TensorEntry], wanted: Iterable[str] | None = None) -> Renamed:
        """Convert tensors from model names to disk names.

        Args:
            tensors: Tensors by model name.
            wanted: Disk names to restore, such as those of the original checkpoint. Other tensors, and all if it is
                None, get the names that `save_pretrained` writes.

        Raises:
            InputError: See `to_model`.
            UnsupportedError: See `to_model`.
        """
        names: dict[Destination, str] = {}
        plain: dict[str, str] = {}
        for name, place in self.places(wanted or ()).items():
            if isinstance(place, Destination):
                names[place] = name
            elif place is not None:
                plain[place] = name
        runs = {place.run for place in names}
        found = {name: plain.get(name) or self._place_back(name, runs) for name in tensors}
        known = set(map(pattern_of, plain))
        resolved = with_scales(
            found,
            self._back,
            lambda weight: found.get(weight) or plain.get(weight) or self._place_back(weight, runs),
            lambda place: names.get(place) or renamed_at(self._back, place),
            lambda weight: pattern_of(weight) in known or self._targets.may_fit(weight) or self._is_known(weight),
        )
        places, kept = self._keep_unconvertible(resolved, self._back)
        return _Converter(tensors, self._back, lambda name: None, names).run(places, kept)

    def _keep_unconvertible(
        self, resolved: ResolvedNames, conversions: Sequence[Conversion]
    ) -> tuple[dict[str, Destination | str | None], tuple[str, ...]]:
        """Keep the names of quantized weights that cannot be converted; return the places and these names.

        Raises:
            UnsupportedError: A kept name equals the name of its target, which has another order of elements.
        """
        if not resolved.unconvertible:
            return resolved.places, ()
        scales = {(k, fixed) for k, base in self._bases.items() for j, fixed in resolved.unconvertible if j == base}
        unconvertible = resolved.unconvertible | scales
        places, kept = dict(resolved.places), []
        for name, place in resolved.places.items():
            if isinstance(place, Destination) and place.run in unconvertible:
                if name in {named(target, place.fixed, place.at) for target in conversions[place.conversion].targets}:
                    raise UnsupportedError(
                        f'tensor "{name}": is quantized, and the other names require another order of its elements; '
                        "keep its current names"
                    )
                places[name] = name
                kept.append(name)
        return places, tuple(kept)

    def _place_back(self, name: str, runs: Collection[Run]) -> Destination | str | None:
        """Return the destination of a model tensor on disk, in one of `runs` if possible."""
        fallback: Destination | str | None = name if self._is_known(name) else None
        first = True
        for fit in self._targets.find(name):
            place = self._place(fit.group, fit.column, fit.indices, self.conversions[fit.group].sources[0])
            if place.run in runs:
                return place
            if first:
                fallback = name if _is_identity(self.conversions[fit.group]) else place
                first = False
        return fallback


class _Converter:
    """Application of conversions to a catalog: gathers the tensors of each run, converts and renames them."""

    def __init__(
        self,
        tensors: Mapping[str, TensorEntry],
        conversions: Sequence[Conversion],
        shape_of: ShapeOf,
        names: Mapping[Destination, str] | None = None,
    ) -> None:
        self._tensors, self._conversions, self._shape_of = tensors, conversions, shape_of
        self._names = names or {}
        self._result = Renamed({}, {}, [], [])

    def run(self, places: Mapping[str, Destination | str | None], kept: tuple[str, ...] = ()) -> Renamed:
        """Convert tensors with a destination; others pass through, and `kept` names only add a note."""
        runs = gather(places, self._conversions)
        done = set()
        for name, place in places.items():
            if not isinstance(place, Destination):
                if place is None:
                    self._result.unknown.append(name)
                self._add(place or name, self._tensors[name], (name,))
            elif place.run not in done:
                done.add(place.run)
                self._convert(place, runs[place.run])
        if kept:
            self._result.notes.append(
                f"quantized, names unchanged: {_counted(kept)} with their scales; ckptx combines and splits only "
                "the scales of block-wise fp8"
            )
        return self._result._replace(kept=kept)

    def _convert(self, place: Destination, members: list[dict[int, str]]) -> None:
        conversion = self._conversions[place.conversion]
        check_complete(conversion, place.fixed, members)
        columns: Columns = [[self._tensors[column[at]] for at in sorted(column)] for column in members]
        names = [named(target, place.fixed, 0) for target in conversion.targets]
        shapes = [self._shape_of(name) for name in names]
        sources = tuple(column[at] for column in members for at in sorted(column))
        results = convert(conversion, columns, shapes)
        for number, (target, shape, column) in enumerate(zip(conversion.targets, shapes, results, strict=True)):
            for at, entry in enumerate(column):
                made = Destination(place.conversion, place.fixed, number, at)
                name = self._names.get(made) or named(target, place.fixed, at)
                if shape is not None and conversion.ops and entry.shape != shape:
                    raise InputError(
                        f'tensor "{name}": made of {_counted(sources)} it has shape {list(entry.shape)}, expected '
                        f"{list(shape)}; some are missing, or the config belongs to another model"
                    )
                self._add(name, entry, sources)

    def _add(self, name: str, entry: TensorEntry, sources: tuple[str, ...]) -> None:
        if name in self._result.tensors:
            other = self._result.sources[name][0]
            raise InputError(
                f'tensors "{other}" and "{sources[0]}": both are "{name}" in the other naming; remove one of them'
            )
        self._result.tensors[name] = entry.renamed(name)
        self._result.sources[name] = sources


def gather(
    places: Mapping[str, Destination | str | None], conversions: Sequence[Conversion]
) -> dict[tuple[int, tuple[int, ...]], list[dict[int, str]]]:
    """Group names by run of a conversion, column and position.

    Raises:
        InputError: Two names have one destination.
    """
    runs: dict[tuple[int, tuple[int, ...]], list[dict[int, str]]] = {}
    for name, place in places.items():
        if not isinstance(place, Destination):
            continue
        columns = runs.get(place.run)
        if columns is None:
            columns = runs[place.run] = [{} for _ in conversions[place.conversion].sources]
        other = columns[place.column].setdefault(place.at, name)
        if other != name:
            raise InputError(f'tensors "{other}" and "{name}": two namings of one tensor; remove one of them')
    return runs


def check_complete(conversion: Conversion, fixed: tuple[int, ...], members: Sequence[Mapping[int, str]]) -> None:
    """Refuse a run with a missing tensor.

    Raises:
        InputError: A tensor is missing; the message names the first.
    """
    count = 1 + max(at for column in members for at in column)
    for pattern, column in zip(conversion.sources, members, strict=True):
        if len(column) == count:
            continue
        at = next(at for at in range(count) if at not in column)
        present = next(name for column in members for name in column.values())
        raise InputError(
            f'tensor "{named(pattern, fixed, at)}": missing, but required for '
            f'"{named(conversion.targets[0], fixed, 0)}" together with "{present}"; the checkpoint is incomplete, '
            "download it again"
        )


def _is_identity(conversion: Conversion) -> bool:
    return conversion.sources == conversion.targets and not conversion.ops


def _counted(names: Sequence[str]) -> str:
    return f'"{names[0]}"' if len(names) == 1 else f'{counted(len(names), "tensor")}, "{names[0]}" and more,'
