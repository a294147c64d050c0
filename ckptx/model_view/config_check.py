"""Whether the tensors of a checkpoint are those of the model that its config describes: names, layers and shapes.

A wrong ``--base``, a model that lacks its last layers, or shards of tensors that somebody renamed to look whole are no
other model to whoever only moves bytes. A tensor that the class does not have is a misfit where it lies in a module of
the class; `ckptx.architecture.extra_tensors` lists the kinds that may be there, and what lies outside of all modules
passes through with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, product
from math import prod
from typing import Any, NamedTuple

from ckptx.architecture.extra_tensors import ExtraTensor, ExtraTensors
from ckptx.architecture.overrides import SUFFIX_TABLE
from ckptx.architecture.shape_rules import ExpectedShapes, Sizes, paths_of
from ckptx.architecture.shapes import expected_of, says_layers
from ckptx.architecture.spec import Architecture
from ckptx.architecture.surplus_layers import SurplusLayer, layer_behind, unexplained_layers
from ckptx.catalog.dtype import BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, whole
from ckptx.errors import CkptxError, InputError
from ckptx.mapping.destinations import Destination, named
from ckptx.mapping.name_index import fill, indices_of
from ckptx.mapping.names import pattern_of, split_pattern
from ckptx.mapping.ops import Conversion, convert
from ckptx.mapping.rules import NameRules
from ckptx.model_view.view import ModelView, rules_of, trainer_rules
from ckptx.untrusted.limits import INDEX
from ckptx.wording import counted, first_of

_BYTE = BY_NAME["U8"]
_LEGACY = re.compile(r"LayerNorm\.(gamma|beta)$")
_NAMED = 1000  # of what is missing
_EXTRAS_NAMED = 3  # of each reason
_NO_TENSOR = "no tensor of this name"


class Mismatch(NamedTuple):
    """One name that is not as the config says.

    Attributes:
        name: Of a tensor, in the names of the checkpoint as far as it is there.
        found: What the checkpoint has.
        needed: What the config asks for.
    """

    name: str
    found: str
    needed: str

    def description(self) -> str:
        """Return it as part of a sentence."""
        if self.needed == _NO_TENSOR:
            return f'"{self.name}" {self.found}'
        return f'"{self.name}": found {self.found}, needed {self.needed}'


@dataclass(frozen=True, slots=True)
class ConfigMatch:
    """What a check found.

    Attributes:
        checked: "names and shapes", "layers" or "nothing".
        misfits: In the order of the model's names; of what is missing a thousand at the most, as a config can ask for
            any number.
        unchecked: Tensors of the model whose shape nothing was known of.
        is_cut_short: More is missing than `misfits` name.
        extras: Tensors that the class does not have, by name.
    """

    checked: str
    misfits: tuple[Mismatch, ...] = ()
    unchecked: int = 0
    is_cut_short: bool = False
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict)

    @property
    def note(self) -> str | None:
        """What the report says where not everything was held against the config."""
        if self.checked == "nothing":
            return "names and shapes not checked: nothing is known of the class under this config"
        if self.checked == "layers":
            return "shapes not checked: none are known of the class under this config; layers were counted"
        return None

    def to_dict(self) -> dict[str, Any]:
        """What the report holds."""
        misfits = [misfit._asdict() for misfit in self.misfits]
        return {
            "checked": self.checked,
            "unchecked": self.unchecked,
            "note": self.note,
            "misfits": misfits,
            "is_cut_short": self.is_cut_short,
            "extras": [
                {"reason": reason, "tensors": len(names), "names": names[:_EXTRAS_NAMED]}
                for reason, names in self._accepted().items()
            ],
        }

    def _accepted(self, *, but_computed: bool = False) -> dict[str, list[str]]:
        """Return the tensors that the class does not have and that may be there, by reason."""
        found: dict[str, list[str]] = {}
        for name, extra in self.extras.items():
            if extra.reason and not (but_computed and extra.is_computed):
                found.setdefault(extra.reason, []).append(name)
        return found

    def extra_notes(self, class_name: str) -> list[str]:
        """Return one line for each kind of tensor that the class does not have, without those that it computes."""
        return [
            f"{counted(len(names), 'tensor')} unknown to {class_name}, passed through: {first_of(names)} ({reason})"
            for reason, names in self._accepted(but_computed=True).items()
        ]

    def summary(self, subject: str) -> str:
        """One line with the first three."""
        said = "; ".join(each.description() for each in self.misfits[:3])
        over = "over " * self.is_cut_short
        more = f"; and {over}{len(self.misfits) - 3:,} more" if len(self.misfits) > 3 else ""
        return f"{subject}: does not fit its config: {said}{more}"


def match_config(view: ModelView) -> ConfigMatch:
    """Holds the tensors of a model against its config; no byte of them is read.

    Raises:
        InputError: A number in the config is none.
    """
    architecture, config = view.published, view.config
    if architecture is None or config is None or architecture.known_from == SUFFIX_TABLE:
        return ConfigMatch("nothing")
    expected = expected_of(architecture, config)
    rules = rules_of(view)
    assert view.architecture is not None
    extras = ExtraTensors(view.architecture, config, view.tensors)
    if expected is None or rules is None:
        return _layers_alone(view, architecture, config, extras.found)
    tensors = view.tensors
    try:
        if view.trainer_naming:
            tensors = trainer_rules(view.trainer_naming).to_model(_without_archives(tensors)).tensors
        survey = _ConfigMatcher(architecture, config, rules, expected, extras)
        legacy = {name: _LEGACY.sub(_modern, name) for name in tensors if "LayerNorm." in name}
        return survey.of({legacy.get(name, name): entry for name, entry in tensors.items()})
    except InputError as error:
        return ConfigMatch(
            "names and shapes", (Mismatch(str(view.catalog.root), str(error), "tensors that go together"),)
        )


def _without_archives(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors in one chunk each, which conversions take even where nobody has looked into the archives."""
    return {
        name: entry._replace(chunks=(Chunk(whole(entry.shape), name, 0, entry.nbytes),), replicas=())
        for name, entry in tensors.items()
    }


def match_config_with_notes(view: ModelView, notes: list[str]) -> dict[str, Any] | None:
    """The fit of what is only looked at, for a report; `notes` gets a line where it does not fit, and one for each kind
    of tensor that the class does not have.

    Returns:
        None for a checkpoint without a config, or of an unknown class.
    """
    if view.published is None or view.config is None:
        return None
    try:
        fit = match_config(view)
    except CkptxError as error:
        notes.append(str(error))
        return None
    root = view.catalog.root
    notes += [f"{root}: {note}" for note in fit.extra_notes(view.published.class_name)]
    if fit.misfits:
        notes.append(fit.summary(str(root)))
    return fit.to_dict()


def _modern(found: re.Match[str]) -> str:
    return "LayerNorm.weight" if found[1] == "gamma" else "LayerNorm.bias"


def _layers_alone(
    view: ModelView, architecture: Architecture, config: Mapping[str, Any], extras: Mapping[str, ExtraTensor]
) -> ConfigMatch:
    """The number of layers, names and the rows of embeddings, for a class of which no shapes are known."""
    misfits = _lost_rows(view, architecture, config)
    stacks = architecture.stacks(config) if says_layers(architecture, config) else ()
    found = {stack: below for stack in stacks if (below := _layers_below(stack.path, view.tensors))}
    counts = {stack.path: stack.count for stack in found}
    behind = {name: layer for name in view.tensors if (layer := layer_behind(name, counts)) is not None}
    misfits += _of_other_models(extras, behind, architecture.class_name)
    misfits += _surplus(behind, counts, config, extras)
    lost = list(islice(_wholly_gone({s.path: _Empty.of(s.count, below) for s, below in found.items()}), _NAMED + 1))
    checked = "layers" if misfits or found else "nothing"
    return ConfigMatch(checked, (*misfits, *lost[:_NAMED]), is_cut_short=len(lost) > _NAMED, extras=extras)


def _of_other_models(
    extras: Mapping[str, ExtraTensor], behind: Mapping[str, SurplusLayer], class_name: str
) -> Iterator[Mismatch]:
    """Tensors in modules of the class that neither the class nor any row of extra tensors has."""
    for name, extra in extras.items():
        if not extra.reason and name not in behind:
            yield Mismatch(name, f"lies in {extra.module}, where {class_name} has no such tensor", _NO_TENSOR)


def _surplus(
    behind: Mapping[str, SurplusLayer],
    counts: Mapping[str, int],
    config: Mapping[str, Any],
    extras: Mapping[str, ExtraTensor],
) -> Iterator[Mismatch]:
    """Layers behind the last one, unless they predict further tokens; one misfit each."""
    for name, layer in unexplained_layers(behind, counts, config, extras):
        yield Mismatch(name, f"layer {layer.number}", f"{counts[layer.path]} of {layer.path} by config.json")


def _layers_below(path: str, names: Iterable[str]) -> set[int]:
    """The layers of a list that have a name among these."""
    lead = f"{path}."
    heads = (name[len(lead) :].partition(".")[0] for name in names if name.startswith(lead))
    return {int(head) for head in heads if INDEX.fullmatch(head)}


def _lost_rows(view: ModelView, architecture: Architecture, config: Mapping[str, Any]) -> list[Mismatch]:
    """Embeddings of fewer rows than the vocabulary has words; they are the names that are tied."""
    nested = config.get("text_config")
    sizes = [each.get("vocab_size") for each in (config, nested) if isinstance(each, Mapping)]
    words = min((size for size in sizes if isinstance(size, int)), default=0)
    misfits = []
    for pair in architecture.ties:
        for name in sorted({name for naming in pair.namings for name in naming}) if pair.is_primary else ():
            entry = view.tensors.get(name)
            if entry is not None and len(entry.shape) == 2 and entry.shape[0] < words:
                misfits.append(Mismatch(name, str(list(entry.shape)), f"{words} rows, one for each word of vocab_size"))
    return misfits


class _Empty(NamedTuple):
    """A list of layers, most of which may be empty.

    Attributes:
        said: How many the config says.
        others: Indices of those with any tensor.
    """

    said: int
    others: list[int]

    @classmethod
    def of(cls, said: int, filled: set[int]) -> _Empty:
        return cls(said, sorted(index for index in filled if index < said))


def _wholly_gone(lists: Mapping[str, _Empty]) -> Iterator[Mismatch]:
    for path, layers in sorted(lists.items()):
        others = set(layers.others)
        for index in range(layers.said):
            if index not in others:
                yield Mismatch(f"{path}.{index}", "nothing", f"one of the {layers.said} layers that config.json says")


class _NumberedRun(NamedTuple):
    """Tensors on disk that go together.

    Attributes:
        conversion: What they go into.
        fixed: The indices that they share.
        positions: Per source pattern the positions that are there.
        alike: What tells apart runs of one conversion whose shapes may differ: numbers that stand in the places of
            stars of its patterns.
        behind: The list of layers and the index in it, where the model has no such layer.
    """

    conversion: Conversion
    fixed: tuple[int, ...]
    positions: list[set[int]]
    alike: tuple[str, ...]
    behind: SurplusLayer | None


@dataclass(slots=True)
class _ConfigMatcher:
    """One pass over the names of a checkpoint, tensors that are alike together."""

    architecture: Architecture
    config: Mapping[str, Any]
    rules: NameRules
    expected: ExpectedShapes
    extras: ExtraTensors
    _there: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    _filled: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _runs: dict[tuple[int, tuple[int, ...]], _NumberedRun] = field(default_factory=dict)
    _fits: dict[tuple[object, ...], Sizes | bool] = field(default_factory=dict)
    _sources: dict[tuple[object, ...], list[list[Shape]] | None] = field(default_factory=dict)
    _foreign: set[str] = field(default_factory=set)
    _unchecked: int = 0
    _tensors: int = 0

    def of(self, tensors: Mapping[str, TensorEntry]) -> ConfigMatch:
        """Everything that does not fit, shapes first."""
        self._tensors = len(tensors)
        places = self.rules.places(tensors)
        for name, place in places.items():
            if place is None:
                self._foreign |= self._modules_of(name)
        misfits = [found for name, place in places.items() if (found := self._look_at(name, place, tensors[name]))]
        behind = self._behind_the_last(places)
        misfits = [each for each in misfits if each.name not in behind]  # of layers that the model does not have
        misfits += _of_other_models(self.extras.found, behind, self.architecture.class_name)
        misfits += _surplus(behind, self.expected.counts, self.config, self.extras.found)
        prefix = self.architecture.base_prefix
        has_base = bool(prefix) and any(each.startswith(f"{prefix}.") for each in self.expected.required)
        is_base = has_base and not any(name.startswith(f"{prefix}.") for name in tensors)
        empty = self._empty_layers()
        lost = chain(_wholly_gone(empty), self._missing(is_base, empty), self._not_added(), self._incomplete_runs())
        named = list(islice(lost, _NAMED + 1))
        every = (*misfits, *named[:_NAMED])
        return ConfigMatch("names and shapes", every, self._unchecked, len(named) > _NAMED, self.extras.found)

    def _modules_of(self, name: str) -> set[str]:
        """The module of a name that the model does not have, on disk and in the model."""
        module = name.rpartition(".")[0]
        weight = self.rules.model_name(f"{module}.weight")
        return {module, weight.rpartition(".")[0]} if weight is not None else {module}

    # -- what is there

    def _look_at(self, name: str, place: Destination | str | None, entry: TensorEntry) -> Mismatch | None:
        if place is None:
            return None
        if isinstance(place, str):
            pattern, indices = split_pattern(place)
            self._there.setdefault(pattern, set()).add(indices)
            if pattern in self.expected.absent:
                return self._switched_off(name, [pattern])
            return self._mismatch(name, entry, (pattern,), lambda: self.expected.shapes.get(pattern))
        number, fixed, column, at = place
        run = self._runs.get(place.run)
        if run is None:
            run = self._runs[place.run] = self._run_at(self.rules.conversions[number], fixed)
        run.positions[column].add(at)
        patterns = [pattern_of(named(target, fixed, 0)) for target in run.conversion.targets]
        if all(pattern in self.expected.absent for pattern in patterns):
            return self._switched_off(name, patterns)
        return self._mismatch(
            name, entry, (number, column, run.alike), lambda: self._shapes_on_disk(run.conversion, place)
        )

    def _switched_off(self, name: str, patterns: Sequence[str]) -> Mismatch | None:
        """A tensor that the class has under another config alone."""
        if self.extras.is_of_quantized_weight(name):
            return None  # some packages store a bias beside each packed weight
        keys = ", ".join(dict.fromkeys(self.expected.absent[pattern] for pattern in patterns))
        class_name = self.architecture.class_name
        return Mismatch(name, f"is no tensor of {class_name} with this config.json (it depends on {keys})", _NO_TENSOR)

    def _run_at(self, conversion: Conversion, fixed: tuple[int, ...]) -> _NumberedRun:
        """A run of which nothing was seen yet; what it goes into is there from now on."""
        for target in conversion.targets:
            self._note_target(target, fixed)
        names = [named(target, fixed, 0) for target in conversion.targets]
        positions: list[set[int]] = [set() for _ in conversion.sources]
        return _NumberedRun(
            conversion, fixed, positions, tuple(map(pattern_of, names)), layer_behind(names[0], self.expected.counts)
        )

    def _note_target(self, target: str, fixed: tuple[int, ...]) -> None:
        if target.count("*") == len(fixed):
            name = fill(target, fixed)
            self._there.setdefault(pattern_of(name), set()).add(indices_of(name))
        else:  # a list of modules that one tensor on disk holds: all of it
            self._filled.add((pattern_of(named(target, fixed, 0)), indices_of(named(target, fixed, 0))[:-1]))

    def _mismatch(self, name: str, entry: TensorEntry, key: tuple[object, ...], wanted: Any) -> Mismatch | None:
        """A row where the shape is none of those wanted; quantized tensors have forms of their own."""
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
        return Mismatch(name, f"shape {list(entry.shape)}", f"{_said(verdict)} by config.json")

    def _shapes_on_disk(self, conversion: Conversion, place: Destination) -> tuple[Sizes, ...] | None:
        """The shapes that a part of the model's tensors may have."""
        columns = self._parts(conversion, place.fixed)
        if columns is None:
            return None
        shape = columns[place.column][0]
        found: list[Sizes] = [shape]
        for op in conversion.ops:
            if op.kind == "transpose" and op.args and max(op.dim, op.other) < len(shape):
                turned = list(shape)
                turned[op.dim], turned[op.other] = turned[op.other], turned[op.dim]
                found.append(tuple(turned))
        return tuple(found)

    def _parts(self, conversion: Conversion, fixed: tuple[int, ...]) -> list[list[Shape]] | None:
        """Per source pattern the shapes of its tensors on disk, None where they do not follow."""
        patterns = tuple(pattern_of(named(target, fixed, 0)) for target in conversion.targets)
        key = (conversion, patterns)
        if key not in self._sources:
            self._sources[key] = self._taken_apart(conversion, fixed, patterns)
        return self._sources[key]

    def _taken_apart(
        self, conversion: Conversion, fixed: tuple[int, ...], patterns: tuple[str, ...]
    ) -> list[list[Shape]] | None:
        entries = []
        for target, pattern in zip(conversion.targets, patterns, strict=True):
            told = self.expected.shapes.get(pattern, ())
            if len(told) != 1 or None in told[0] or target.count("*") != len(fixed):
                return None
            shape = self._clipped(tuple(size for size in told[0] if size is not None), conversion)
            entries.append([TensorEntry(pattern, _BYTE, shape, (Chunk(whole(shape), "", 0, prod(shape)),))])
        try:
            made = convert(conversion.inverse, entries, [None] * len(conversion.sources))
        except CkptxError:  # the sizes do not divide, or an operation is none of ours: nothing follows
            return None
        return [[entry.shape for entry in column] for column in made]

    def _clipped(self, shape: Shape, conversion: Conversion) -> Shape:
        """The shape, with no more parts of a list than would show that some are missing."""
        sizes = list(shape)
        for op in conversion.ops:
            if op.kind == "merge" and op.dim < len(sizes):
                sizes[op.dim] = min(sizes[op.dim], self._tensors + 1)
        return tuple(sizes)

    # -- what is missing, and what is too much

    def _missing(self, is_base: bool, empty: Mapping[str, _Empty]) -> Iterator[Mismatch]:
        """Tensors that must be there, of layers of which something is."""
        tied = {name for pair in self.architecture.ties for naming in pair.namings for name in naming}
        prefix = f"{self.architecture.base_prefix}."
        for pattern in sorted(self.expected.required):
            if is_base and not pattern.startswith(prefix):
                continue
            there = self._there.get(pattern, set())
            for indices in self._indices(pattern, empty):
                name = fill(pattern, indices) if indices not in there else ""
                if name and name not in tied and not self._has_other_form(name):
                    yield Mismatch(name, "no such tensor", self._shape_said(pattern))

    def _not_added(self) -> Iterator[Mismatch]:
        """Tensors that a key of the config adds to the class, and of which no layer has any."""
        tied = {name for pair in self.architecture.ties for naming in pair.namings for name in naming}
        for pattern, key in sorted(self.expected.added.items()):
            name = fill(pattern, (0,) * pattern.count("*"))
            is_there = pattern in self._there or any(pattern == each for each, _ in self._filled)
            if not is_there and name not in tied and not self._has_other_form(name):
                yield Mismatch(name, "no such tensor", f"one in each such module, as config.json sets {key}")

    def _indices(self, pattern: str, empty: Mapping[str, _Empty]) -> Iterator[tuple[int, ...]]:
        """What the stars of a required pattern stand for, without empty layers and lists that one tensor holds."""
        paths = paths_of(pattern)
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
        """For each list of layers whose number the config says: which have no tensor at all, and which have some."""
        counts = {path: self.expected.counts[path] for path in self.expected.stated}
        if says_layers(self.architecture, self.config):
            counts |= {stack.path: stack.count for stack in self.architecture.stacks(self.config)}
        found = {}
        for path, count in counts.items():
            lead = f"{path}."
            if any(each.startswith(lead) and not fixed for each, fixed in self._filled):
                continue  # one tensor on disk holds all layers
            there = {
                indices[0] for each, known in self._there.items() if each.startswith(f"{lead}*.") for indices in known
            }
            found[path] = _Empty.of(count, there | _layers_below(path, self._foreign))
        return found

    def _has_other_form(self, name: str) -> bool:
        """Whether the module holds tensors that the model does not have, as a quantized one does."""
        module, _, leaf = name.rpartition(".")
        prefix = self.architecture.base_prefix
        short = module.removeprefix(f"{prefix}.") if prefix else module
        return bool({module, short, name, f"{short}.{leaf}"} & self._foreign)

    def _shape_said(self, pattern: str) -> str:
        told = self.expected.shapes.get(pattern)
        return f"{_said(told[0])} by config.json" if told else "one by config.json"

    def _incomplete_runs(self) -> Iterator[Mismatch]:
        """Experts, or parts of a fused tensor, that are not all there."""
        for conversion, fixed, positions, _, _ in self._runs.values():
            parts = self._parts(conversion, fixed)
            for at, source in enumerate(conversion.sources):
                count = 1 + max(map(max, filter(None, positions))) if parts is None else len(parts[at])
                needed = f"{count} of its kind by config.json"
                for position in range(count) if len(positions[at]) < count else ():
                    name = named(source, fixed, position)
                    if position not in positions[at] and not self._has_other_form(name):
                        yield Mismatch(name, "no such tensor", needed)
                for position in sorted(each for each in positions[at] if each >= count):
                    yield Mismatch(named(source, fixed, position), "one more", needed)

    def _behind_the_last(self, places: Mapping[str, Destination | str | None]) -> dict[str, SurplusLayer]:
        """Tensors of layers behind the last one that the config says, by name."""
        found: dict[str, SurplusLayer] = {}
        runs = {key: run.behind for key, run in self._runs.items() if run.behind is not None}
        for name, place in places.items():
            if isinstance(place, Destination):
                layer = runs.get(place.run) if runs else None
            else:
                layer = layer_behind(place or name, self.expected.counts)
            if layer is not None:
                found[name] = layer
        return found


def _verdict(shape: Shape, wanted: tuple[Sizes, ...] | None) -> Sizes | bool:
    """True where a shape is one of those wanted, False where nothing is known, else the first that is wanted."""
    if not wanted or (all(size is None for each in wanted for size in each) and wanted != ((),)):
        return False
    for each in wanted:
        if len(each) == len(shape) and all(size in (None, have) for size, have in zip(each, shape, strict=True)):
            return True
    return wanted[0]


def _said(sizes: Sizes) -> str:
    return "shape [" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
