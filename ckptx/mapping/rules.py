"""Rules between two namings of a checkpoint: the destination of each tensor, and the converted catalog entries.

A checkpoint may come in several namings that all load: disk names (as on the Hub), names of current transformers, model
names, with or without the name of the base model in front. So each name is looked up in all of them, and model names
stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.destinations import (
    Destination,
    ResolvedNames,
    RunKey,
    add_scale_destinations,
    name_in_run,
    target_name_at,
)
from ckptx.mapping.name_index import NameIndex, indices_of
from ckptx.mapping.names import pattern_of, split_pattern
from ckptx.mapping.ops import Columns, Conversion, convert
from ckptx.mapping.quantization_scales import BLOCK_SCALE_SUFFIX, weight_conversions
from ckptx.mapping.rewrite import KEEP_NAMES
from ckptx.wording import counted

ShapeLookup = Callable[[str], "Shape | None"]  # name of a tensor -> its shape; None if unknown


class RenamedTensors(NamedTuple):
    """Tensors under the names of another naming; conversions may have combined or split them.

    Attributes:
        tensors: Tensors by new name, in the order of their first sources.
        sources: New name -> old names of the tensors it is made of, in the order of the conversion.
        unknown: Names that no rule knows; their tensors pass through unchanged.
        notes: Notes for the user.
        unconverted: Names that stay although a rule applies: quantized weights whose scales no rule can combine or
            split.
    """

    tensors: dict[str, TensorEntry]
    sources: dict[str, tuple[str, ...]]
    unknown: list[str]
    notes: list[str]
    unconverted: tuple[str, ...] = ()

    @classmethod
    def identity(cls, tensors: Mapping[str, TensorEntry]) -> RenamedTensors:
        """Create a renaming that keeps all names."""
        return cls(dict(tensors), {name: (name,) for name in tensors}, [], [])

    def then(self, second: RenamedTensors) -> RenamedTensors:
        """Return the composition of this renaming and a second one, which was applied to its tensors.

        `unknown` has the names that the second renaming does not know.
        """
        sources = {
            name: tuple(dict.fromkeys(old for each in names for old in self.sources[each]))
            for name, names in second.sources.items()
        }
        return RenamedTensors(
            second.tensors,
            sources,
            second.unknown,
            [*self.notes, *second.notes],
            (*self.unconverted, *second.unconverted),
        )


class _PatternEntry(NamedTuple):
    """Result of a lookup that holds for every name of one pattern.

    Attributes:
        conversion: Index of the conversion; None if no conversion applies.
        pattern_index: Index of the pattern among the sources, see `Destination`.
        in_list: True if the last index is a position in a module list.
        model_name_edit: (text, count): the model name is `text`, followed by the name without its first `count`
            characters; None if names of the pattern are not model names.
    """

    conversion: int | None
    pattern_index: int
    in_list: bool
    model_name_edit: tuple[str, int] | None


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
        shape_of: ShapeLookup | None = None,
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
        self._inverse_conversions = tuple(conversion.inverse for conversion in self.conversions)
        self._base_prefix = f"{base_prefix}." if base_prefix else ""
        self._model_patterns = frozenset(model_patterns).union(*(each.targets for each in self.conversions))
        self._weight_conversions = weight_conversions(self.conversions)
        known_shape: ShapeLookup = shape_of or (lambda name: None)
        self.shape_of: ShapeLookup = lambda name: (
            None if self._weight_conversions and name.endswith(BLOCK_SCALE_SUFFIX) else known_shape(name)
        )
        self._is_extra, self._has_extra_check = is_extra or (lambda name: False), is_extra is not None
        self._source_index = NameIndex(() if _is_identity(each) else each.sources for each in self.conversions)
        self._target_index = NameIndex(each.targets for each in self.conversions)
        self._lookups: dict[str, tuple[Destination | None, str | None]] = {}
        self._model_names: dict[str, str | None] = {}
        self._known_patterns: dict[str, bool] = {}
        self._pattern_entries: dict[str, _PatternEntry | None] = {}
        self._first_targets: dict[RunKey, str] = {}

    # -- destinations

    def model_name(self, disk_name: str) -> str | None:
        """Return the name of the model tensor that a disk tensor becomes, the first if it becomes several.

        None if the name is unknown.
        """
        if disk_name not in self._model_names:
            destination, model_name = self._look_up(disk_name)
            self._model_names[disk_name] = model_name if destination is None else self._first_target(destination)
        return self._model_names[disk_name]

    def _first_target(self, destination: Destination) -> str:
        """Return the first target name. It is cached by run, because all experts of a layer have the same run."""
        name = self._first_targets.get(destination.run_key)
        if name is None:
            name = self._first_targets[destination.run_key] = next(self._target_names(destination))
        return name

    def destinations(self, names: Iterable[str]) -> dict[str, Destination | str | None]:
        """Map each disk name to its destination in a conversion, its model name if it is one, or None if unknown.

        A name may be both a disk name and a model name, such as norm1 in norm0 -> norm1 -> norm2. It counts as a model
        name if the model name that it would be converted to is already that of another tensor. Scales are renamed like
        their weight.
        """
        return self._resolve_names(names).destinations

    def are_model_names(self, names: Iterable[str]) -> bool:
        """Return True if no conversion applies to these names: each is a model name, or unknown."""
        return not any(isinstance(destination, Destination) for destination in self.destinations(names).values())

    def _resolve_names(self, names: Iterable[str]) -> ResolvedNames:
        """Return the destinations of disk names, see `destinations`, and the runs that cannot be converted."""
        destinations: dict[str, Destination | str | None] = {}
        ambiguous: dict[str, tuple[Destination, str]] = {}
        for name in names:
            destination, model_name = self._look_up(name)
            destinations[name] = destination or model_name
            if destination is not None and model_name is not None:
                ambiguous[name] = destination, model_name
        if ambiguous:
            used_names = {model_name for model_name in destinations.values() if isinstance(model_name, str)}
            is_stable = False
            while not is_stable:
                is_stable = True
                for name, (destination, model_name) in list(ambiguous.items()):
                    if any(target in used_names for target in self._target_names(destination)):
                        destinations[name] = model_name
                        used_names.add(model_name)
                        del ambiguous[name]
                        is_stable = False
        return add_scale_destinations(
            destinations,
            self.conversions,
            lambda weight: (
                destinations.get(weight) or next((each for each in self._look_up(weight) if each is not None), None)
            ),
            lambda destination: target_name_at(self.conversions, destination),
        )

    def _look_up(self, name: str) -> tuple[Destination | None, str | None]:
        """Return the destination of a disk name and its model name, each None if the name is not of that kind."""
        known = self._lookups.get(name)
        if known is None:
            known = self._lookups[name] = self._resolve(name)
        return known

    def _resolve(self, name: str) -> tuple[Destination | None, str | None]:
        """Return the same as `_look_up`, by the result for another name with the same pattern if that determines it."""
        pattern, indices = split_pattern(name)
        entry = self._pattern_entries.get(pattern)
        if entry is None:
            found = self._resolve_uncached(name)
            if pattern not in self._pattern_entries:
                self._pattern_entries[pattern] = (
                    None if self._depends_on_indices(name) else self._pattern_entry(name, *found)
                )
            return found
        model_name = (
            None if entry.model_name_edit is None else entry.model_name_edit[0] + name[entry.model_name_edit[1] :]
        )
        if entry.conversion is None:
            return None, model_name
        if entry.in_list:
            return Destination(entry.conversion, indices[:-1], entry.pattern_index, indices[-1]), model_name
        return Destination(entry.conversion, indices, entry.pattern_index), model_name

    def _depends_on_indices(self, name: str) -> bool:
        """Return True if the result of a lookup may depend on the numbers in the name."""
        if self._has_extra_check or any(
            self._source_index.depends_on_indices(spelling) for spelling in self._spellings(name)
        ):
            return True
        return bool(indices_of(self._base_prefix))

    def _pattern_entry(self, name: str, destination: Destination | None, model_name: str | None) -> _PatternEntry:
        """Return the entry for all names with the pattern of `name`, from the result of its lookup."""
        edit = None
        if model_name is not None:
            edit = (self._base_prefix, 0) if len(model_name) > len(name) else ("", len(name) - len(model_name))
        if destination is None:
            return _PatternEntry(None, 0, False, edit)
        return _PatternEntry(
            destination.conversion,
            destination.pattern_index,
            len(destination.shared_indices) < len(indices_of(name)),
            edit,
        )

    def _resolve_uncached(self, name: str) -> tuple[Destination | None, str | None]:
        """Return the same as `_look_up`, from the first spelling of the name that is known."""
        destination = model_name = None
        for spelling in self._spellings(name):
            for match in self._source_index.find(spelling):
                destination = self._make_destination(
                    match.group, match.pattern_index, match.indices, self.conversions[match.group].targets[0]
                )
                break
            if self._is_known(spelling):
                model_name = spelling
            if destination or model_name:
                break
        if destination is not None and self._is_extra(next(self._target_names(destination))):
            destination = None
        if model_name is not None and self._is_extra(model_name):
            model_name = None
        return destination, model_name

    def _spellings(self, name: str) -> Iterator[str]:
        """Yield a name as it is, without the prefix of the base model if it has that, and with it in front."""
        yield name
        if self._base_prefix:
            if name.startswith(self._base_prefix):
                yield name.removeprefix(self._base_prefix)
            yield self._base_prefix + name

    def _is_known(self, name: str) -> bool:
        """Return True for a model name."""
        pattern = pattern_of(name)
        known = self._known_patterns.get(pattern)
        if known is None:
            parts = pattern.split(".")
            known = pattern in self._model_patterns or any(
                ".".join(parts[:end]) + ".**" in self._model_patterns for end in range(1, len(parts))
            )
            self._known_patterns[pattern] = known
        return known

    @staticmethod
    def _make_destination(
        conversion: int, pattern_index: int, indices: tuple[int, ...], other_pattern: str
    ) -> Destination:
        """Return the destination of a name that matches a pattern.

        Args:
            conversion: Index of the conversion.
            pattern_index: Index of the pattern on its side of the conversion.
            indices: Indices in the name. If they are more than `other_pattern` has, the last is a position in a module
                list.
            other_pattern: First pattern of the other side.
        """
        if len(indices) > other_pattern.count("*"):
            return Destination(conversion, indices[:-1], pattern_index, indices[-1])
        return Destination(conversion, indices, pattern_index)

    def _target_names(self, destination: Destination) -> Iterator[str]:
        """Yield the names of the model tensors of a run; for a module list, only the name of its first tensor."""
        return (
            name_in_run(target, destination.shared_indices, 0)
            for target in self.conversions[destination.conversion].targets
        )

    # -- catalogs

    def to_model(self, tensors: Mapping[str, TensorEntry]) -> RenamedTensors:
        """Convert the tensors of a checkpoint to model names.

        Raises:
            InputError: Parts of a model tensor are missing or do not match, or two tensors have one destination.
            UnsupportedError: ckptx does not support a conversion.
        """
        resolved = self._resolve_names(tensors)
        destinations, unconverted = self._keep_unconvertible(resolved, self.conversions)
        renamed = _Converter(tensors, self.conversions, self.shape_of).convert_all(destinations, unconverted)
        if self._base_prefix:
            prefix_changes = [(old, new) for old, new in destinations.items() if isinstance(new, str)]
            added = sum(new == self._base_prefix + old for old, new in prefix_changes)
            removed = sum(old == self._base_prefix + new for old, new in prefix_changes)
            for count, action in ((added, "added to"), (removed, "removed from")):
                if count:
                    renamed.notes.append(f'base model prefix "{self._base_prefix}" {action} {counted(count, "name")}')
        return renamed

    def to_disk(self, tensors: Mapping[str, TensorEntry], disk_names: Iterable[str] | None = None) -> RenamedTensors:
        """Convert tensors from model names to disk names.

        Args:
            tensors: Tensors by model name.
            disk_names: Disk names to restore, such as those of the original checkpoint. Other tensors, and all if it is
                None, get the names that `save_pretrained` writes.

        Raises:
            InputError: See `to_model`.
            UnsupportedError: See `to_model`.
        """
        disk_name_by_destination: dict[Destination, str] = {}
        renames: dict[str, str] = {}
        for name, destination in self.destinations(disk_names or ()).items():
            if isinstance(destination, Destination):
                disk_name_by_destination[destination] = name
            elif destination is not None:
                renames[destination] = name
        runs = {destination.run_key for destination in disk_name_by_destination}
        initial_destinations = {name: renames.get(name) or self._disk_destination(name, runs) for name in tensors}
        renamed_patterns = set(map(pattern_of, renames))
        resolved = add_scale_destinations(
            initial_destinations,
            self._inverse_conversions,
            lambda weight: (
                initial_destinations.get(weight) or renames.get(weight) or self._disk_destination(weight, runs)
            ),
            lambda destination: (
                disk_name_by_destination.get(destination) or target_name_at(self._inverse_conversions, destination)
            ),
            lambda weight: (
                pattern_of(weight) in renamed_patterns or self._target_index.may_match(weight) or self._is_known(weight)
            ),
        )
        destinations, unconverted = self._keep_unconvertible(resolved, self._inverse_conversions)
        return _Converter(tensors, self._inverse_conversions, lambda name: None, disk_name_by_destination).convert_all(
            destinations, unconverted
        )

    def _keep_unconvertible(
        self, resolved: ResolvedNames, conversions: Sequence[Conversion]
    ) -> tuple[dict[str, Destination | str | None], tuple[str, ...]]:
        """Keep the names of quantized weights that cannot be converted; return all destinations and these names.

        Raises:
            UnsupportedError: A kept name equals the name of its target, which has another order of elements.
        """
        if not resolved.unconvertible:
            return resolved.destinations, ()
        scales = {
            (scale_conversion, shared_indices)
            for scale_conversion, weight_conversion in self._weight_conversions.items()
            for conversion, shared_indices in resolved.unconvertible
            if conversion == weight_conversion
        }
        unconvertible = resolved.unconvertible | scales
        destinations, unconverted = dict(resolved.destinations), []
        for name, destination in resolved.destinations.items():
            if isinstance(destination, Destination) and destination.run_key in unconvertible:
                if name in {
                    name_in_run(target, destination.shared_indices, destination.list_index)
                    for target in conversions[destination.conversion].targets
                }:
                    raise UnsupportedError(
                        f'tensor "{name}": is quantized, and converting its name would reorder its elements, which '
                        "ckptx cannot do; pass --dequantize, or " + KEEP_NAMES
                    )
                destinations[name] = name
                unconverted.append(name)
        return destinations, tuple(unconverted)

    def _disk_destination(self, name: str, runs: Collection[RunKey]) -> Destination | str | None:
        """Return the disk destination of a model tensor, in one of `runs` if possible; None if its name is unknown."""
        fallback: Destination | str | None = name if self._is_known(name) else None
        is_first = True
        for match in self._target_index.find(name):
            destination = self._make_destination(
                match.group, match.pattern_index, match.indices, self.conversions[match.group].sources[0]
            )
            if destination.run_key in runs:
                return destination
            if is_first:
                fallback = name if _is_identity(self.conversions[match.group]) else destination
                is_first = False
        return fallback


class TrainerRules(NameRules):
    """Rules between the names of a trainer and disk names.

    Its conversions are from names of the trainer to disk names. `NameRules` would call the names of the trainer "disk"
    and the disk names "model", so use the methods of this class, whose names state the direction.
    """

    def disk_name(self, trainer_name: str) -> str | None:
        """Return the disk name of a tensor of the trainer, the first of several; None if unknown."""
        return self.model_name(trainer_name)

    def from_trainer(self, tensors: Mapping[str, TensorEntry]) -> RenamedTensors:
        """Convert tensors from names of the trainer to disk names.

        Raises:
            InputError, UnsupportedError: See `NameRules.to_model`.
        """
        return self.to_model(tensors)

    def to_trainer(
        self, tensors: Mapping[str, TensorEntry], trainer_names: Iterable[str] | None = None
    ) -> RenamedTensors:
        """Convert tensors from disk names to names of the trainer.

        Args:
            tensors: Tensors by disk name.
            trainer_names: Names to restore, such as those of an older version of the trainer. Other tensors, and all if
                it is None, get current names.

        Raises:
            InputError, UnsupportedError: See `NameRules.to_model`.
        """
        return self.to_disk(tensors, trainer_names)


class _Converter:
    """Application of conversions to a catalog: gathers the tensors of each run, converts and renames them."""

    def __init__(
        self,
        tensors: Mapping[str, TensorEntry],
        conversions: Sequence[Conversion],
        shape_of: ShapeLookup,
        names: Mapping[Destination, str] | None = None,
    ) -> None:
        """Store the arguments.

        Args:
            tensors: Tensors by old name.
            conversions: Conversions that destinations refer to.
            shape_of: Function that returns the shape that a converted tensor must have; None if unknown.
            names: Names of converted tensors by their place among the targets of a run; others get the names that the
                target patterns give.
        """
        self._tensors, self._conversions, self._shape_of = tensors, conversions, shape_of
        self._names = names or {}
        self._result = RenamedTensors({}, {}, [], [])

    def convert_all(
        self, destinations: Mapping[str, Destination | str | None], unconverted: tuple[str, ...] = ()
    ) -> RenamedTensors:
        """Convert tensors with a destination; others pass through, and `unconverted` names only add a note."""
        runs = group_by_run(destinations, self._conversions)
        done = set()
        for name, destination in destinations.items():
            if not isinstance(destination, Destination):
                if destination is None:
                    self._result.unknown.append(name)
                self._add(destination or name, self._tensors[name], (name,))
            elif destination.run_key not in done:
                done.add(destination.run_key)
                self._convert(destination, runs[destination.run_key])
        if unconverted:
            self._result.notes.append(
                f"quantized, names unchanged: {_describe_names(unconverted)} with their scales; ckptx combines and "
                "splits only the scales of block-wise fp8"
            )
        return self._result._replace(unconverted=unconverted)

    def _convert(self, destination: Destination, names_by_pattern: list[dict[int, str]]) -> None:
        """Convert the tensors of one run, and add the results.

        Args:
            destination: Destination of any of its tensors.
            names_by_pattern: For each source pattern, position in the module list -> name.

        Raises:
            InputError: A tensor is missing, a result does not have its shape in the model, or two have one new name.
            UnsupportedError: See `convert`.
        """
        conversion = self._conversions[destination.conversion]
        check_complete(conversion, destination.shared_indices, names_by_pattern)
        columns: Columns = [
            [self._tensors[column[list_index]] for list_index in sorted(column)] for column in names_by_pattern
        ]
        names = [name_in_run(target, destination.shared_indices, 0) for target in conversion.targets]
        shapes = [self._shape_of(name) for name in names]
        sources = tuple(column[list_index] for column in names_by_pattern for list_index in sorted(column))
        results = convert(conversion, columns, shapes)
        for pattern_index, (target, shape, column) in enumerate(zip(conversion.targets, shapes, results, strict=True)):
            for list_index, entry in enumerate(column):
                result = Destination(destination.conversion, destination.shared_indices, pattern_index, list_index)
                name = self._names.get(result) or name_in_run(target, destination.shared_indices, list_index)
                if shape is not None and conversion.ops and entry.shape != shape:
                    raise InputError(
                        f'tensor "{name}": made of {_describe_names(sources)} it has shape {list(entry.shape)}, '
                        f"expected {list(shape)}; some are missing, or the config belongs to another model"
                    )
                self._add(name, entry, sources)

    def _add(self, name: str, entry: TensorEntry, sources: tuple[str, ...]) -> None:
        """Add a tensor to the result under its new name; `sources` are the old names that it is made of.

        Raises:
            InputError: Another tensor has this new name.
        """
        if name in self._result.tensors:
            other = self._result.sources[name][0]
            raise InputError(
                f'tensors "{other}" and "{sources[0]}": both are "{name}" in the other naming; remove one of them'
            )
        self._result.tensors[name] = entry.with_name(name)
        self._result.sources[name] = sources


def group_by_run(
    destinations: Mapping[str, Destination | str | None], conversions: Sequence[Conversion]
) -> dict[RunKey, list[dict[int, str]]]:
    """Group names by run of a conversion.

    Returns:
        Run -> for each source pattern, position in the module list -> name.

    Raises:
        InputError: Two names have one destination.
    """
    runs: dict[RunKey, list[dict[int, str]]] = {}
    for name, destination in destinations.items():
        if not isinstance(destination, Destination):
            continue
        columns = runs.get(destination.run_key)
        if columns is None:
            columns = runs[destination.run_key] = [{} for _ in conversions[destination.conversion].sources]
        other = columns[destination.pattern_index].setdefault(destination.list_index, name)
        if other != name:
            raise InputError(f'tensors "{other}" and "{name}" are two names of one tensor; remove one of them')
    return runs


def check_complete(
    conversion: Conversion, shared_indices: tuple[int, ...], names_by_pattern: Sequence[Mapping[int, str]]
) -> None:
    """Refuse a run with a missing tensor. The highest position determines the length of a module list.

    Raises:
        InputError: A tensor is missing; the message names the first.
    """
    count = 1 + max(list_index for column in names_by_pattern for list_index in column)
    for pattern, column in zip(conversion.sources, names_by_pattern, strict=True):
        if len(column) == count:
            continue
        list_index = next(list_index for list_index in range(count) if list_index not in column)
        present = next(name for column in names_by_pattern for name in column.values())
        raise InputError(
            f'tensor "{name_in_run(pattern, shared_indices, list_index)}": missing, but required for '
            f'"{name_in_run(conversion.targets[0], shared_indices, 0)}" together with "{present}"; the checkpoint is '
            "incomplete, download it again"
        )


def _is_identity(conversion: Conversion) -> bool:
    return conversion.sources == conversion.targets and not conversion.ops


def _describe_names(names: Sequence[str]) -> str:
    return f'"{names[0]}"' if len(names) == 1 else f'{counted(len(names), "tensor")}, "{names[0]}", ...,'
