"""Names of one checkpoint in those of another: which tensor goes into which, and the entries it gives.

A checkpoint may come in several namings that all load: as published, as saved today, in the model's own names, with
or without the name of the base model in front. So names are never read off a table of one of them: each is looked up,
and those of the model stay as they are.
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
    """Tensors in other names.

    Attributes:
        tensors: By new name, in the order of their first sources.
        sources: The old names that went into each, in the order of the conversion.
        unknown: Names that no rule knows; their tensors pass through as they are.
        notes: What the user should know.
        kept: Names that stay although a rule speaks of them: quantized weights of a kind that no rule can put together
            or take apart with what lies beside them.
    """

    tensors: dict[str, TensorEntry]
    sources: dict[str, tuple[str, ...]]
    unknown: list[str]
    notes: list[str]
    kept: tuple[str, ...] = ()

    @classmethod
    def not_yet(cls, tensors: Mapping[str, TensorEntry]) -> Renamed:
        """Tensors in the names they have."""
        return cls(dict(tensors), {name: (name,) for name in tensors}, [], [])

    def then(self, second: Renamed) -> Renamed:
        """This renaming and after it another, made of this one's tensors."""
        sources = {
            name: tuple(dict.fromkeys(old for each in names for old in self.sources[each]))
            for name, names in second.sources.items()
        }
        return Renamed(
            second.tensors, sources, second.unknown, [*self.notes, *second.notes], (*self.kept, *second.kept)
        )


class _PatternEntry(NamedTuple):
    """What is found for every name of one pattern, whatever its numbers.

    Attributes:
        conversion: Index of the conversion, None when there is none.
        column: As in `Destination`.
        in_list: True when the last index is a position in a module list.
        plain: What to put in front of the name, and how much of it to leave out, to make it one of the model's own;
            None when it is none.
    """

    conversion: int | None
    column: int
    in_list: bool
    plain: tuple[str, int] | None


class NameRules:
    """The rules between the namings of a checkpoint ("disk") and one set of names ("model").

    Attributes:
        conversions: Disk to model. Where several give a model name, the first is what is written.
        shape_of: Shape of a tensor of the model by its name, None where it is not known.
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
        """Keep them.

        Args:
            conversions: Those that load, in order of preference. One without ops from a name to itself says that the
                model's own name is also what is written.
            base_prefix: Name of the base model inside the class; disk names may come with or without it.
            model_patterns: The model's own names, with `*` for indices; the targets of the conversions are among them.
            shape_of: Shape of a tensor of the model by its name, None where it is not known.
            is_extra: True for a model name that the model does not want although a pattern fits (a layer behind the
                last); such tensors are unknown.
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
        self._alike: dict[str, _PatternEntry | None] = {}
        self._run_names: dict[tuple[int, tuple[int, ...]], str] = {}

    # -- which tensor goes where

    def model_name(self, disk_name: str) -> str | None:
        """The model tensor that a disk tensor goes into, the first when there are several; None when it is unknown."""
        if disk_name not in self._model_names:
            place, plain = self._look_up(disk_name)
            self._model_names[disk_name] = plain if place is None else self._run_name(place)
        return self._model_names[disk_name]

    def _run_name(self, place: Destination) -> str:
        """The first model tensor of a run, which thousands of experts may share."""
        name = self._run_names.get(place.run)
        if name is None:
            name = self._run_names[place.run] = next(self._target_names(place))
        return name

    def places(self, names: Iterable[str]) -> dict[str, Destination | str | None]:
        """For each disk name its place in a conversion, its model name when it only changes that, or None.

        A name may be one of the model and of the disk: norm0 -> norm1 -> norm2. It is the model's when what it would
        become is there already. What lies beside a weight is renamed as its weight is.
        """
        return self._places(names).places

    def are_model_names(self, names: Iterable[str]) -> bool:
        """True when none of these names is one of the disk alone."""
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
            settled = False
            while not settled:
                settled = True
                for name, (place, plain) in list(doubtful.items()):
                    if any(target in taken for target in self._target_names(place)):
                        found[name] = plain
                        taken.add(plain)
                        del doubtful[name]
                        settled = False
        return with_scales(
            found,
            self.conversions,
            lambda weight: found.get(weight) or next((it for it in self._look_up(weight) if it is not None), None),
            lambda place: renamed_at(self.conversions, place),
        )

    def _look_up(self, name: str) -> tuple[Destination | None, str | None]:
        """How a disk name is converted, and what it is called as one of the model's own; None for what it is not."""
        known = self._looked_up.get(name)
        if known is None:
            known = self._looked_up[name] = self._resolve(name)
        return known

    def _resolve(self, name: str) -> tuple[Destination | None, str | None]:
        pattern, indices = split_pattern(name)
        alike = self._alike.get(pattern)
        if alike is None:
            found = self._resolve_uncached(name)
            if pattern not in self._alike:
                self._alike[pattern] = None if self._depends_on_indices(name) else self._pattern_entry(name, *found)
            return found
        plain = None if alike.plain is None else alike.plain[0] + name[alike.plain[1] :]
        if alike.conversion is None:
            return None, plain
        if alike.in_list:
            return Destination(alike.conversion, indices[:-1], alike.column, indices[-1]), plain
        return Destination(alike.conversion, indices, alike.column), plain

    def _depends_on_indices(self, name: str) -> bool:
        """True when it may depend on the numbers in a name what is found for it."""
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
        """The last index is a position in a module list when the other side has fewer."""
        if len(indices) > other_side.count("*"):
            return Destination(conversion, indices[:-1], column, indices[-1])
        return Destination(conversion, indices, column)

    def _target_names(self, place: Destination) -> Iterator[str]:
        """The model tensors of a run; of a module list the first."""
        return (named(target, place.fixed, 0) for target in self.conversions[place.conversion].targets)

    # -- catalogs

    def to_model(self, tensors: Mapping[str, TensorEntry]) -> Renamed:
        """The tensors of a checkpoint in model names.

        Raises:
            InputError: Part of what makes up a model tensor is missing, does not fit together, or two tensors claim
                one name.
            UnsupportedError: A conversion is none of ckptx's.
        """
        settled = self._places(tensors)
        places, kept = self._keep_unconvertible(settled, self.conversions)
        renamed = _Rewrite(tensors, self.conversions, self.shape_of).run(places, kept)
        if self._prefix:
            plain = [(old, new) for old, new in places.items() if isinstance(new, str)]
            added = sum(new == self._prefix + old for old, new in plain)
            removed = sum(old == self._prefix + new for old, new in plain)
            for count, what in ((added, "added to"), (removed, "removed from")):
                if count:
                    renamed.notes.append(f'base model prefix "{self._prefix}" {what} {counted(count, "name")}')
        return renamed

    def to_disk(self, tensors: Mapping[str, TensorEntry], wanted: Iterable[str] | None = None) -> Renamed:
        """Tensors in model names in those of a checkpoint.

        Args:
            tensors: By model name.
            wanted: The names to come back to, as of the checkpoint that the tensors once came from. Tensors that none
                of them speaks for, and all when it is None, get the names that `save_pretrained` writes.

        Raises:
            InputError: As `to_model`.
            UnsupportedError: As `to_model`.
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
        settled = with_scales(
            found,
            self._back,
            lambda weight: found.get(weight) or plain.get(weight) or self._place_back(weight, runs),
            lambda place: names.get(place) or renamed_at(self._back, place),
            lambda weight: pattern_of(weight) in known or self._targets.may_fit(weight) or self._is_known(weight),
        )
        places, kept = self._keep_unconvertible(settled, self._back)
        return _Rewrite(tensors, self._back, lambda name: None, names).run(places, kept)

    def _keep_unconvertible(
        self, settled: ResolvedNames, conversions: Sequence[Conversion]
    ) -> tuple[dict[str, Destination | str | None], tuple[str, ...]]:
        """The places once quantized weights that cannot be converted stay as they are, and which do.

        Raises:
            UnsupportedError: One would have the name of the tensor that it should have become.
        """
        if not settled.unconvertible:
            return settled.places, ()
        scales = {(k, fixed) for k, base in self._bases.items() for j, fixed in settled.unconvertible if j == base}
        staying = settled.unconvertible | scales
        places, kept = dict(settled.places), []
        for name, place in settled.places.items():
            if isinstance(place, Destination) and place.run in staying:
                if name in {named(target, place.fixed, place.at) for target in conversions[place.conversion].targets}:
                    raise UnsupportedError(
                        f'tensor "{name}": quantized, and the other names call for another order of its elements; keep '
                        "the names that it has on disk"
                    )
                places[name] = name
                kept.append(name)
        return places, tuple(kept)

    def _place_back(self, name: str, runs: Collection[Run]) -> Destination | str | None:
        """Where a model tensor goes on its way to disk; one of `runs` if it can."""
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


class _Rewrite:
    """One pass over a catalog: gathers the tensors of each run, converts them, names what comes out."""

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
        """The tensors at their places; those without one pass through, `kept` are there already."""
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
                f"quantized, names kept as they are: {_counted(kept)} with what lies beside them; ckptx puts together "
                "and takes apart the scales of fp8 in blocks alone"
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
                        f'tensor "{name}": made of {_counted(sources)} it has shape {list(entry.shape)}, needed '
                        f"{list(shape)}; some are missing, or the config is of another model"
                    )
                self._add(name, entry, sources)

    def _add(self, name: str, entry: TensorEntry, sources: tuple[str, ...]) -> None:
        if name in self._result.tensors:
            other = self._result.sources[name][0]
            raise InputError(
                f'tensors "{other}" and "{sources[0]}": both are "{name}" in the other naming; remove one of them'
            )
        self._result.tensors[name] = entry.called(name)
        self._result.sources[name] = sources


def gather(
    places: Mapping[str, Destination | str | None], conversions: Sequence[Conversion]
) -> dict[tuple[int, tuple[int, ...]], list[dict[int, str]]]:
    """The names of each run of a conversion, by column and position.

    Raises:
        InputError: Two names claim one place.
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
    """Refuses a run that lacks a tensor.

    Raises:
        InputError: It names the first one missing.
    """
    count = 1 + max(at for column in members for at in column)
    for pattern, column in zip(conversion.sources, members, strict=True):
        if len(column) == count:
            continue
        at = next(at for at in range(count) if at not in column)
        present = next(name for column in members for name in column.values())
        raise InputError(
            f'tensor "{named(pattern, fixed, at)}": not in the checkpoint, but needed for '
            f'"{named(conversion.targets[0], fixed, 0)}" together with "{present}"; the checkpoint is incomplete, '
            "download it again"
        )


def _is_identity(conversion: Conversion) -> bool:
    return conversion.sources == conversion.targets and not conversion.ops


def _counted(names: Sequence[str]) -> str:
    return f'"{names[0]}"' if len(names) == 1 else f'{counted(len(names), "tensor")}, "{names[0]}" and more,'
