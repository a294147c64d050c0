"""Check that the tensors of a checkpoint match its config: names, layers and shapes.

It detects a wrong ``--base``, a model that lacks its last layers, and shards of tensors that were renamed to look
whole, all of which a plain copy of bytes would accept. A tensor that the class does not have is a mismatch if it lies
in a module of the class; `ckptx.architecture.extra_tensors` lists the kinds that are allowed, and tensors outside of
all modules pass through with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, product
from math import prod
from typing import Any, NamedTuple

from ckptx.architecture.extra_tensors import ExtraTensor, ExtraTensors
from ckptx.architecture.overrides import FROM_SUFFIX_TABLE
from ckptx.architecture.shape_rules import ExpectedShapes, Sizes, star_prefixes
from ckptx.architecture.shapes import expected_shapes, states_layer_count
from ckptx.architecture.spec import Architecture
from ckptx.architecture.surplus_layers import SurplusLayer, find_surplus_layer, unexplained_layers
from ckptx.catalog.dtype import BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, whole
from ckptx.errors import CkptxError, InputError, ReadError
from ckptx.mapping.destinations import Destination, run_name
from ckptx.mapping.name_index import fill_pattern, indices_of
from ckptx.mapping.names import pattern_of, split_pattern
from ckptx.mapping.ops import Conversion, convert
from ckptx.mapping.rules import NameRules
from ckptx.model_view.view import ModelView, rules_of, trainer_rules
from ckptx.untrusted.limits import INDEX
from ckptx.wording import counted, first_of

_BYTE = BY_NAME["U8"]
_LEGACY = re.compile(r"LayerNorm\.(gamma|beta)$")
_NAMED = 1000  # missing tensors in a report
_EXTRAS_NAMED = 3  # names per reason
_NO_TENSOR = "no tensor of this name"


class Mismatch(NamedTuple):
    """Tensor or layer that does not match the config.

    Attributes:
        name: Name in the checkpoint, or in the model if it is missing.
        found: State in the checkpoint.
        needed: State that the config requires.
    """

    name: str
    found: str
    needed: str

    def description(self) -> str:
        """Return the mismatch as part of a sentence."""
        if self.needed == _NO_TENSOR:
            return f'"{self.name}" {self.found}'
        return f'"{self.name}": expected {self.needed}, found {self.found}'


@dataclass(frozen=True, slots=True)
class ConfigMatch:
    """Result of a check.

    Attributes:
        checked: "names and shapes", "layers" or "nothing".
        mismatches: Mismatches in the order of model names; at most 1000 missing tensors, as a config can require any
            number.
        unchecked: Number of model tensors whose expected shape is unknown.
        is_truncated: True if more tensors are missing than `mismatches` lists.
        extras: Tensors that the class does not have, by name.
    """

    checked: str
    mismatches: tuple[Mismatch, ...] = ()
    unchecked: int = 0
    is_truncated: bool = False
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict)

    @property
    def note(self) -> str | None:
        """Return a note for the report if not everything was checked; None if it was."""
        if self.checked == "nothing":
            return "names and shapes not checked: unknown for this class and config"
        if self.checked == "layers":
            return "shapes not checked: unknown for this class and config; layers were counted"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the `config_check` entry of the report."""
        mismatches = [misfit._asdict() for misfit in self.mismatches]
        return {
            "checked": self.checked,
            "unchecked": self.unchecked,
            "note": self.note,
            "mismatches": mismatches,
            "is_truncated": self.is_truncated,
            "extra_tensors": [
                {"reason": reason, "tensors": len(names), "names": names[:_EXTRAS_NAMED]}
                for reason, names in self._accepted().items()
            ],
        }

    def _accepted(self, *, but_computed: bool = False) -> dict[str, list[str]]:
        """Return the extra tensors that are allowed, by reason."""
        found: dict[str, list[str]] = {}
        for name, extra in self.extras.items():
            if extra.reason and not (but_computed and extra.is_computed):
                found.setdefault(extra.reason, []).append(name)
        return found

    def extra_notes(self, class_name: str) -> list[str]:
        """Return one line for each kind of extra tensor, except those that the class computes."""
        return [
            f"{counted(len(names), 'tensor')} unknown to {class_name}, passed through: {first_of(names)} ({reason})"
            for reason, names in self._accepted(but_computed=True).items()
        ]

    def summary(self, subject: str) -> str:
        """Return one line with the first three mismatches."""
        first = "; ".join(each.description() for each in self.mismatches[:3])
        over = "over " * self.is_truncated
        more = f"; and {over}{len(self.mismatches) - 3:,} more" if len(self.mismatches) > 3 else ""
        return f"{subject}: does not match its config: {first}{more}"


def match_config(view: ModelView) -> ConfigMatch:
    """Compare the tensors of a model with its config; no tensor data is read.

    Raises:
        InputError: The config has an invalid number.
    """
    architecture, config = view.published, view.config
    if architecture is None or config is None or architecture.known_from == FROM_SUFFIX_TABLE:
        return ConfigMatch("nothing")
    expected = expected_shapes(architecture, config)
    rules = rules_of(view)
    assert view.architecture is not None
    extras = ExtraTensors(view.architecture, config, view.tensors)
    if expected is None or rules is None:
        return _match_layers(view, architecture, config, extras.by_name)
    tensors = view.tensors
    try:
        if view.trainer_naming:
            tensors = trainer_rules(view.trainer_naming).to_model(_without_archives(tensors)).tensors
        survey = _ConfigMatcher(architecture, config, rules, expected, extras)
        legacy = {name: _LEGACY.sub(_modern, name) for name in tensors if "LayerNorm." in name}
        return survey.of({legacy.get(name, name): entry for name, entry in tensors.items()})
    except InputError as error:
        return ConfigMatch("names and shapes", (Mismatch(str(view.catalog.root), str(error), "tensors of one model"),))


def _without_archives(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors in one chunk each, which conversions take even where nobody has looked into the archives."""
    return {
        name: entry._replace(chunks=(Chunk(whole(entry.shape), name, 0, entry.nbytes),), replicas=())
        for name, entry in tensors.items()
    }


def match_config_with_notes(view: ModelView, notes: list[str]) -> dict[str, Any] | None:
    """Check a checkpoint against its config without failing, and add mismatches and extra tensors to `notes`.

    Returns:
        The `config_check` entry of the report; None for a checkpoint without a config or of an unknown class.
    """
    if view.published is None or view.config is None:
        return None
    try:
        fit = match_config(view)
    except ReadError:
        raise
    except CkptxError as error:
        notes.append(str(error))
        return None
    root = view.catalog.root
    notes += [f"{root}: {note}" for note in fit.extra_notes(view.published.class_name)]
    if fit.mismatches:
        notes.append(fit.summary(str(root)))
    return fit.to_dict()


def _modern(found: re.Match[str]) -> str:
    return "LayerNorm.weight" if found[1] == "gamma" else "LayerNorm.bias"


def _match_layers(
    view: ModelView, architecture: Architecture, config: Mapping[str, Any], extras: Mapping[str, ExtraTensor]
) -> ConfigMatch:
    """Check layers, names and vocabulary size, for a class whose shapes are unknown."""
    mismatches = _missing_vocab_rows(view, architecture, config)
    stacks = architecture.stacks(config) if states_layer_count(architecture, config) else ()
    found = {stack: below for stack in stacks if (below := _layers_below(stack.path, view.tensors))}
    counts = {stack.path: stack.count for stack in found}
    behind = {name: layer for name in view.tensors if (layer := find_surplus_layer(name, counts)) is not None}
    mismatches += _of_other_models(extras, behind, architecture.class_name)
    mismatches += _surplus(behind, counts, config, extras)
    lost = list(islice(_missing_layers({s.path: _Empty.of(s.count, below) for s, below in found.items()}), _NAMED + 1))
    checked = "layers" if mismatches or found else "nothing"
    return ConfigMatch(checked, (*mismatches, *lost[:_NAMED]), is_truncated=len(lost) > _NAMED, extras=extras)


def _of_other_models(
    extras: Mapping[str, ExtraTensor], behind: Mapping[str, SurplusLayer], class_name: str
) -> Iterator[Mismatch]:
    """Yield the tensors in modules of the class that neither the class nor any rule for extra tensors knows."""
    for name, extra in extras.items():
        if not extra.reason and name not in behind:
            yield Mismatch(name, f"is in {extra.module}, where {class_name} has no such tensor", _NO_TENSOR)


def _surplus(
    behind: Mapping[str, SurplusLayer],
    counts: Mapping[str, int],
    config: Mapping[str, Any],
    extras: Mapping[str, ExtraTensor],
) -> Iterator[Mismatch]:
    """Yield one mismatch for each layer after the last one, except MTP layers."""
    for name, layer in unexplained_layers(behind, counts, config, extras):
        required = f"a layer index below {counts[layer.path]} in {layer.path} (config.json)"
        yield Mismatch(name, f"layer {layer.layer_index}", required)


def _layers_below(path: str, names: Iterable[str]) -> set[int]:
    """Return the indices of the layers of a list that have a tensor among `names`."""
    lead = f"{path}."
    heads = (name[len(lead) :].partition(".")[0] for name in names if name.startswith(lead))
    return {int(head) for head in heads if INDEX.fullmatch(head)}


def _missing_vocab_rows(view: ModelView, architecture: Architecture, config: Mapping[str, Any]) -> list[Mismatch]:
    """Return embeddings with fewer rows than vocab_size; these are the names that can be tied."""
    nested = config.get("text_config")
    sizes = [each.get("vocab_size") for each in (config, nested) if isinstance(each, Mapping)]
    words = min((size for size in sizes if isinstance(size, int)), default=0)
    mismatches = []
    for pair in architecture.ties:
        for name in sorted({name for naming in pair.namings for name in naming}) if pair.is_primary else ():
            entry = view.tensors.get(name)
            if entry is not None and len(entry.shape) == 2 and entry.shape[0] < words:
                mismatches.append(Mismatch(name, str(list(entry.shape)), f"{words} rows (vocab_size)"))
    return mismatches


class _Empty(NamedTuple):
    """List of layers, most of which may have no tensor.

    Attributes:
        total: Number of layers in the config.
        others: Indices of the layers with any tensor.
    """

    total: int
    others: list[int]

    @classmethod
    def of(cls, total: int, filled: set[int]) -> _Empty:
        return cls(total, sorted(index for index in filled if index < total))


def _missing_layers(lists: Mapping[str, _Empty]) -> Iterator[Mismatch]:
    for path, layers in sorted(lists.items()):
        others = set(layers.others)
        for index in range(layers.total):
            if index not in others:
                yield Mismatch(f"{path}.{index}", "nothing", f"one of {layers.total} layers by config.json")


class _NumberedRun(NamedTuple):
    """Tensors on disk that one conversion combines.

    Attributes:
        conversion: Conversion of these tensors.
        fixed: Indices that they share.
        positions: Positions that are present, for each source pattern.
        patterns: Target patterns; runs of one conversion with different target patterns may have different shapes.
        behind: Surplus layer that the tensors belong to; None if the model has their layer.
    """

    conversion: Conversion
    fixed: tuple[int, ...]
    positions: list[set[int]]
    patterns: tuple[str, ...]
    behind: SurplusLayer | None


@dataclass(slots=True)
class _ConfigMatcher:
    """Comparison of the names and shapes of one checkpoint with a config, with results shared by pattern."""

    architecture: Architecture
    config: Mapping[str, Any]
    rules: NameRules
    expected: ExpectedShapes
    extras: ExtraTensors
    _present: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    _filled: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _runs: dict[tuple[int, tuple[int, ...]], _NumberedRun] = field(default_factory=dict)
    _fits: dict[tuple[object, ...], Sizes | bool] = field(default_factory=dict)
    _sources: dict[tuple[object, ...], list[list[Shape]] | None] = field(default_factory=dict)
    _foreign: set[str] = field(default_factory=set)
    _unchecked: int = 0
    _tensors: int = 0

    def of(self, tensors: Mapping[str, TensorEntry]) -> ConfigMatch:
        """Return all mismatches, shapes first."""
        self._tensors = len(tensors)
        places = self.rules.destinations(tensors)
        for name, place in places.items():
            if place is None:
                self._foreign |= self._modules_of(name)
        mismatches = [found for name, place in places.items() if (found := self._check(name, place, tensors[name]))]
        behind = self._surplus_layers(places)
        mismatches = [each for each in mismatches if each.name not in behind]  # of layers that the model does not have
        mismatches += _of_other_models(self.extras.by_name, behind, self.architecture.class_name)
        mismatches += _surplus(behind, self.expected.counts, self.config, self.extras.by_name)
        prefix = self.architecture.base_prefix
        has_base = bool(prefix) and any(each.startswith(f"{prefix}.") for each in self.expected.required)
        is_base = has_base and not any(name.startswith(f"{prefix}.") for name in tensors)
        empty = self._empty_layers()
        lost = chain(
            _missing_layers(empty), self._missing(is_base, empty), self._missing_added(), self._incomplete_runs()
        )
        named = list(islice(lost, _NAMED + 1))
        every = (*mismatches, *named[:_NAMED])
        return ConfigMatch("names and shapes", every, self._unchecked, len(named) > _NAMED, self.extras.by_name)

    def _modules_of(self, name: str) -> set[str]:
        """Return the module of a name that the model lacks, under its name on disk and in the model."""
        module = name.rpartition(".")[0]
        weight = self.rules.model_name(f"{module}.weight")
        return {module, weight.rpartition(".")[0]} if weight is not None else {module}

    # -- what is there

    def _check(self, name: str, place: Destination | str | None, entry: TensorEntry) -> Mismatch | None:
        if place is None:
            return None
        if isinstance(place, str):
            pattern, indices = split_pattern(place)
            self._present.setdefault(pattern, set()).add(indices)
            if pattern in self.expected.absent_patterns:
                return self._switched_off(name, [pattern])
            return self._mismatch(name, entry, (pattern,), lambda: self.expected.shapes.get(pattern))
        number, fixed, column, at = place
        run = self._runs.get(place.run_key)
        if run is None:
            run = self._runs[place.run_key] = self._run_at(self.rules.conversions[number], fixed)
        run.positions[column].add(at)
        patterns = [pattern_of(run_name(target, fixed, 0)) for target in run.conversion.targets]
        if all(pattern in self.expected.absent_patterns for pattern in patterns):
            return self._switched_off(name, patterns)
        return self._mismatch(
            name, entry, (number, column, run.patterns), lambda: self._shapes_on_disk(run.conversion, place)
        )

    def _switched_off(self, name: str, patterns: Sequence[str]) -> Mismatch | None:
        """A tensor that the class has under another config alone."""
        if self.extras.is_part_of_quantized_weight(name):
            return None  # some packages store a bias beside each packed weight
        keys = ", ".join(dict.fromkeys(self.expected.absent_patterns[pattern] for pattern in patterns))
        class_name = self.architecture.class_name
        return Mismatch(
            name, f"is not a tensor of {class_name} with this config.json (it depends on {keys})", _NO_TENSOR
        )

    def _run_at(self, conversion: Conversion, fixed: tuple[int, ...]) -> _NumberedRun:
        """Return a new run without positions, and mark the tensors it is combined into as present."""
        for target in conversion.targets:
            self._note_target(target, fixed)
        names = [run_name(target, fixed, 0) for target in conversion.targets]
        positions: list[set[int]] = [set() for _ in conversion.sources]
        return _NumberedRun(
            conversion,
            fixed,
            positions,
            tuple(map(pattern_of, names)),
            find_surplus_layer(names[0], self.expected.counts),
        )

    def _note_target(self, target: str, fixed: tuple[int, ...]) -> None:
        if target.count("*") == len(fixed):
            name = fill_pattern(target, fixed)
            self._present.setdefault(pattern_of(name), set()).add(indices_of(name))
        else:  # one tensor on disk holds a whole list of modules
            self._filled.add((pattern_of(run_name(target, fixed, 0)), indices_of(run_name(target, fixed, 0))[:-1]))

    def _mismatch(self, name: str, entry: TensorEntry, key: tuple[object, ...], wanted: Any) -> Mismatch | None:
        """Return a mismatch if the shape is not an expected one; quantized tensors may have other shapes."""
        if not entry.dtype.cast or (self._foreign and name.rpartition(".")[0] in self._foreign):
            self._unchecked += 1
            return None
        full = (*key, entry.shape)
        verdict = self._fits.get(full)
        if verdict is None:
            verdict = self._fits[full] = _verdict(entry.shape, wanted())
        if verdict is True:
            return None
        if verdict is False:
            self._unchecked += 1
            return None
        return Mismatch(name, f"shape {list(entry.shape)}", f"{_format_shape(verdict)} by config.json")

    def _shapes_on_disk(self, conversion: Conversion, place: Destination) -> tuple[Sizes, ...] | None:
        """Return the shapes that a source tensor may have on disk; None if they cannot be derived."""
        columns = self._parts(conversion, place.shared_indices)
        if columns is None:
            return None
        shape = columns[place.pattern_index][0]
        found: list[Sizes] = [shape]
        for op in conversion.ops:
            if op.kind == "transpose" and op.args and max(op.dim, op.other_dim) < len(shape):
                swapped = list(shape)
                swapped[op.dim], swapped[op.other_dim] = swapped[op.other_dim], swapped[op.dim]
                found.append(tuple(swapped))
        return tuple(found)

    def _parts(self, conversion: Conversion, fixed: tuple[int, ...]) -> list[list[Shape]] | None:
        """Return the expected shapes on disk for each source pattern; None if they cannot be derived."""
        patterns = tuple(pattern_of(run_name(target, fixed, 0)) for target in conversion.targets)
        key = (conversion, patterns)
        if key not in self._sources:
            self._sources[key] = self._derive_shapes(conversion, fixed, patterns)
        return self._sources[key]

    def _derive_shapes(
        self, conversion: Conversion, fixed: tuple[int, ...], patterns: tuple[str, ...]
    ) -> list[list[Shape]] | None:
        entries = []
        for target, pattern in zip(conversion.targets, patterns, strict=True):
            shapes = self.expected.shapes.get(pattern, ())
            if len(shapes) != 1 or None in shapes[0] or target.count("*") != len(fixed):
                return None
            shape = self._clipped(tuple(size for size in shapes[0] if size is not None), conversion)
            entries.append([TensorEntry(pattern, _BYTE, shape, (Chunk(whole(shape), "", 0, prod(shape)),))])
        try:
            made = convert(conversion.inverse, entries, [None] * len(conversion.sources))
        except CkptxError:  # sizes do not divide, or an operation is unsupported, so that no shapes follow
            return None
        return [[entry.shape for entry in column] for column in made]

    def _clipped(self, shape: Shape, conversion: Conversion) -> Shape:
        """Return the shape with merged dims limited to a size that still shows that tensors are missing."""
        sizes = list(shape)
        for op in conversion.ops:
            if op.kind == "merge" and op.dim < len(sizes):
                sizes[op.dim] = min(sizes[op.dim], self._tensors + 1)
        return tuple(sizes)

    # -- what is missing, and what is too much

    def _missing(self, is_base: bool, empty: Mapping[str, _Empty]) -> Iterator[Mismatch]:
        """Yield the required tensors that are missing in layers that have other tensors."""
        tied = {name for pair in self.architecture.ties for naming in pair.namings for name in naming}
        prefix = f"{self.architecture.base_prefix}."
        for pattern in sorted(self.expected.required):
            if is_base and not pattern.startswith(prefix):
                continue
            there = self._present.get(pattern, set())
            for indices in self._indices(pattern, empty):
                name = fill_pattern(pattern, indices) if indices not in there else ""
                if name and name not in tied and not self._has_other_form(name):
                    yield Mismatch(name, "no such tensor", self._expected_shape(pattern))

    def _missing_added(self) -> Iterator[Mismatch]:
        """Yield the tensors that a config key adds to the class if no layer has any of them."""
        tied = {name for pair in self.architecture.ties for naming in pair.namings for name in naming}
        for pattern, key in sorted(self.expected.added_patterns.items()):
            name = fill_pattern(pattern, (0,) * pattern.count("*"))
            is_there = pattern in self._present or any(pattern == each for each, _ in self._filled)
            if not is_there and name not in tied and not self._has_other_form(name):
                yield Mismatch(name, "no such tensor", f"one in each such module ({key} in config.json)")

    def _indices(self, pattern: str, empty: Mapping[str, _Empty]) -> Iterator[tuple[int, ...]]:
        """Yield the indices of a required pattern, without empty layers and lists that one tensor holds."""
        paths = star_prefixes(pattern)
        if not paths:
            yield ()
            return
        counts = [self.expected.counts[path] for path in paths]
        first = empty[paths[0]].others if paths[0] in empty else range(counts[0])
        if 0 in counts:
            return
        for lead in product(first, *map(range, counts[1:-1])) if len(counts) > 1 else ((),):
            if (pattern, lead) not in self._filled:
                yield from ((*lead, last) for last in (range(counts[-1]) if len(counts) > 1 else first))

    def _empty_layers(self) -> dict[str, _Empty]:
        """Return for each list of layers with a known length the layers that have any tensor."""
        counts = {path: self.expected.counts[path] for path in self.expected.stated_paths}
        if states_layer_count(self.architecture, self.config):
            counts |= {stack.path: stack.count for stack in self.architecture.stacks(self.config)}
        found = {}
        for path, count in counts.items():
            lead = f"{path}."
            if any(each.startswith(lead) and not fixed for each, fixed in self._filled):
                continue  # one tensor on disk holds all layers
            there = {
                indices[0] for each, known in self._present.items() if each.startswith(f"{lead}*.") for indices in known
            }
            found[path] = _Empty.of(count, there | _layers_below(path, self._foreign))
        return found

    def _has_other_form(self, name: str) -> bool:
        """Return True if the module has tensors that the model lacks, as a quantized module does."""
        module, _, leaf = name.rpartition(".")
        prefix = self.architecture.base_prefix
        short = module.removeprefix(f"{prefix}.") if prefix else module
        return bool({module, short, name, f"{short}.{leaf}"} & self._foreign)

    def _expected_shape(self, pattern: str) -> str:
        shapes = self.expected.shapes.get(pattern)
        return f"{_format_shape(shapes[0])} by config.json" if shapes else "one by config.json"

    def _incomplete_runs(self) -> Iterator[Mismatch]:
        """Yield missing and surplus experts, or parts of a fused tensor."""
        for conversion, fixed, positions, _, _ in self._runs.values():
            parts = self._parts(conversion, fixed)
            for at, source in enumerate(conversion.sources):
                count = 1 + max(map(max, filter(None, positions))) if parts is None else len(parts[at])
                needed = f"{count} of its kind by config.json"
                for position in range(count) if len(positions[at]) < count else ():
                    name = run_name(source, fixed, position)
                    if position not in positions[at] and not self._has_other_form(name):
                        yield Mismatch(name, "no such tensor", needed)
                for position in sorted(each for each in positions[at] if each >= count):
                    yield Mismatch(run_name(source, fixed, position), "one more", needed)

    def _surplus_layers(self, places: Mapping[str, Destination | str | None]) -> dict[str, SurplusLayer]:
        """Return the tensors of layers after the last one of the config, by name."""
        found: dict[str, SurplusLayer] = {}
        runs = {key: run.behind for key, run in self._runs.items() if run.behind is not None}
        for name, place in places.items():
            if isinstance(place, Destination):
                layer = runs.get(place.run_key) if runs else None
            else:
                layer = find_surplus_layer(place or name, self.expected.counts)
            if layer is not None:
                found[name] = layer
        return found


def _verdict(shape: Shape, wanted: tuple[Sizes, ...] | None) -> Sizes | bool:
    """Return True if a shape is an expected one, False if none is known, else the first expected shape."""
    if not wanted or (all(size is None for each in wanted for size in each) and wanted != ((),)):
        return False
    for each in wanted:
        if len(each) == len(shape) and all(size in (None, have) for size, have in zip(each, shape, strict=True)):
            return True
    return wanted[0]


def _format_shape(sizes: Sizes) -> str:
    return "shape [" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
