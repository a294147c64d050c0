"""Check that the tensors of a checkpoint match its config: names, layers and shapes.

It detects a wrong `--base`, a model that lacks its last layers, and shards of tensors that were renamed to look
whole, all of which a plain copy of bytes would accept. A tensor that the class does not have is a mismatch if it is in
a module of the class, except for the kinds that `ckptx.architecture.extra_tensors` allows; tensors outside of all
modules of the class pass through with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from math import prod
from typing import Any, NamedTuple

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.extra_layers import ExtraLayer, find_extra_layer, unexplained_layers
from ckptx.architecture.extra_tensors import ExtraTensor, ExtraTensors
from ckptx.architecture.shape_rules import ExpectedShapes, Sizes, star_prefixes
from ckptx.architecture.shapes import expected_shapes, states_layer_count
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, full_region
from ckptx.errors import CkptxError, InputError, ReadError
from ckptx.formats.hf.hf_metadata import name_config_in_errors
from ckptx.mapping.destinations import Destination, name_in_run
from ckptx.mapping.name_index import fill_pattern, indices_of
from ckptx.mapping.names import pattern_of, replace_legacy_leaf, split_pattern
from ckptx.mapping.ops import Conversion, convert
from ckptx.mapping.rules import NameRules, TrainerRules
from ckptx.model_view.config_match import MISSING_LAYER, MISSING_TENSOR, MUST_BE_ABSENT, ConfigMatch, Mismatch
from ckptx.model_view.padded_vocabulary import find_other_vocabulary
from ckptx.model_view.view import ModelView, rules_of
from ckptx.untrusted.limits import INDEX_IN_NAME
from ckptx.wording import counted

_U8 = DTYPES_BY_NAME["U8"]
_MAX_LISTED = 1000  # missing tensors in a report


def match_config(view: ModelView) -> ConfigMatch:
    """Compare the tensors of a model with its config; no tensor data is read.

    Returns:
        The match; its `checked` is "nothing" without a config, or if the class is unknown.

    Raises:
        InputError: The config has an invalid number.
        UnsupportedError: The names are those of a trainer, and ckptx lacks an operation to convert them to disk names.
    """
    match = _match_tensors(view)
    if not match.mismatches or view.config is None:
        return match
    vocabulary = find_other_vocabulary(
        match, view.config, lambda config: _match_tensors(replace(view, config=config, _rules=[]))
    )
    return match if vocabulary is None else replace(match, other_vocabulary=vocabulary)


def _match_tensors(view: ModelView) -> ConfigMatch:
    """Compare the tensors of a model with its config, without looking for the cause of mismatches."""
    architecture, config = view.disk_architecture, view.config
    if architecture is None or config is None or architecture.is_unknown_class:
        return ConfigMatch("nothing")
    expected = expected_shapes(architecture, config)
    rules = rules_of(view)
    assert view.architecture is not None
    extras = ExtraTensors(view.architecture, config, view.tensors)
    if expected is None or rules is None:
        return _match_layers(view, architecture, config, extras.by_name)
    tensors = view.tensors
    try:
        if view.trainer_conversions:
            tensors = TrainerRules(view.trainer_conversions).from_trainer(_without_archives(tensors)).tensors
        matcher = _ConfigMatcher(architecture, config, rules, expected, extras)
        return matcher.match({replace_legacy_leaf(name): entry for name, entry in tensors.items()})
    except InputError as error:
        return ConfigMatch(
            "names and shapes", (Mismatch(str(view.catalog.location), str(error), "tensors of one model"),)
        )


def _without_archives(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors with one made-up chunk each, so that they can be converted without locating archives."""
    return {
        name: entry._replace(chunks=(Chunk(full_region(entry.shape), name, 0, entry.nbytes),), replicas=())
        for name, entry in tensors.items()
    }


def match_config_with_notes(view: ModelView, notes: list[str]) -> dict[str, Any] | None:
    """Check a checkpoint against its config, and add mismatches, extra tensors and errors to `notes`.

    Returns:
        The `config_check` entry of the report; None without a config or a class in it, or if the check failed with an
        error that is in `notes`.

    Raises:
        ReadError: The storage failed.
    """
    if view.disk_architecture is None or view.config is None:
        return None
    is_own_config = view.config is view.catalog.config
    try:
        with name_config_in_errors(view.catalog) if is_own_config else nullcontext():
            match = match_config(view)
            missing = _missing_untied_tensors(view)
    except ReadError:
        raise
    except CkptxError as error:
        notes.append(str(error))
        return None
    root = view.catalog.location
    class_name = view.disk_architecture.class_name
    notes += [f"{root}: {note}" for note in match.extra_notes(class_name, are_written=False)]
    notes += [f"{root}: {problem}" for problem in missing]
    if match.mismatches:
        notes.append(match.summary(str(root)))
    return match.to_dict()


def _missing_untied_tensors(view: ModelView) -> list[str]:
    """Return a sentence for each tensor, such as a head, that is missing and not tied to another one."""
    if view.architecture is None or view.config is None:
        return []
    from ckptx.architecture.tied import StoredTensor, resolve_ties

    stored = {name: StoredTensor(entry.shape, entry.dtype.name) for name, entry in view.tensors.items()}
    problems: list[str] = []
    resolve_ties(view.architecture, view.config, stored, lambda a, b: True, accepted_problems=problems)
    return problems


def _match_layers(
    view: ModelView, architecture: Architecture, config: Mapping[str, Any], extras: Mapping[str, ExtraTensor]
) -> ConfigMatch:
    """Check layers, names and vocabulary size, for a class whose shapes are unknown."""
    mismatches = _missing_vocab_rows(view, architecture, config)
    stacks = architecture.stacks(config) if states_layer_count(architecture, config) else ()
    layers_by_stack = {stack: layers for stack in stacks if (layers := _layer_indices(stack.path, view.tensors))}
    counts = {stack.path: stack.count for stack in layers_by_stack}
    extra_layers = {name: layer for name in view.tensors if (layer := find_extra_layer(name, counts)) is not None}
    mismatches += _unexpected_tensors(extras, extra_layers, architecture.class_name)
    mismatches += _extra_layer_mismatches(extra_layers, counts, config, extras)
    missing = list(
        islice(
            _missing_layers(
                {stack.path: _LayerList.from_indices(stack.count, each) for stack, each in layers_by_stack.items()}
            ),
            _MAX_LISTED + 1,
        )
    )
    checked = "layers" if mismatches or layers_by_stack else "nothing"
    return ConfigMatch(
        checked, (*mismatches, *missing[:_MAX_LISTED]), is_truncated=len(missing) > _MAX_LISTED, extras=extras
    )


def _unexpected_tensors(
    extras: Mapping[str, ExtraTensor], extra_layers: Mapping[str, ExtraLayer], class_name: str
) -> Iterator[Mismatch]:
    """Yield the extra tensors that are not allowed, without those in extra layers.

    They are in modules of the class, or a head of another class in place of the head of the class.
    """
    for name, extra in extras.items():
        if not extra.reason and name not in extra_layers:
            place = f"is in {extra.module}, where" if extra.module else "is stored in place of the output head, but"
            yield Mismatch(name, f"{place} {class_name} has no such tensor", MUST_BE_ABSENT)


def _extra_layer_mismatches(
    extra_layers: Mapping[str, ExtraLayer],
    counts: Mapping[str, int],
    config: Mapping[str, Any],
    extras: Mapping[str, ExtraTensor],
) -> Iterator[Mismatch]:
    """Yield one mismatch for each layer after the last one, except MTP layers."""
    for name, layer in unexplained_layers(extra_layers, counts, config, extras):
        required = f"a layer index below {counts[layer.path]} in {layer.path} (config.json)"
        yield Mismatch(name, f"layer {layer.layer_index}", required)


def _layer_indices(path: str, names: Iterable[str]) -> set[int]:
    """Return the indices of the layers of a list that have a tensor among `names`."""
    prefix = f"{path}."
    components = (name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix))
    return {int(component) for component in components if INDEX_IN_NAME.fullmatch(component)}


def _missing_vocab_rows(view: ModelView, architecture: Architecture, config: Mapping[str, Any]) -> list[Mismatch]:
    """Return the embeddings and output heads that have fewer rows than vocab_size.

    They are found by the names of the primary tied pairs of the class, whether or not the config ties them.
    """
    nested = config.get("text_config")
    sizes = [each.get("vocab_size") for each in (config, nested) if isinstance(each, Mapping)]
    vocab_size = min((size for size in sizes if isinstance(size, int)), default=0)
    mismatches = []
    for pair in architecture.ties:
        for name in sorted({name for naming in pair.namings for name in naming}) if pair.is_primary else ():
            entry = view.tensors.get(name)
            if entry is not None and len(entry.shape) == 2 and entry.shape[0] < vocab_size:
                mismatches.append(Mismatch(name, str(list(entry.shape)), f"{vocab_size} rows (vocab_size)"))
    return mismatches


class _LayerList(NamedTuple):
    """List of layers in a checkpoint.

    Attributes:
        layer_count: Number of layers that the config requires.
        present_layers: Indices, in order, of the layers of which the checkpoint has any tensor.
    """

    layer_count: int
    present_layers: list[int]

    @classmethod
    def from_indices(cls, layer_count: int, indices: set[int]) -> _LayerList:
        """Create the list; an index that is not below `layer_count` is ignored."""
        return cls(layer_count, sorted(index for index in indices if index < layer_count))


def _missing_layers(lists: Mapping[str, _LayerList]) -> Iterator[Mismatch]:
    for path, layers in sorted(lists.items()):
        present = set(layers.present_layers)
        for index in range(layers.layer_count):
            if index not in present:
                yield Mismatch(
                    f"{path}.{index}", MISSING_LAYER, f"one of {counted(layers.layer_count, 'layer')} by config.json"
                )


class _ConversionRun(NamedTuple):
    """The tensors on disk that a conversion combines in one of its runs, such as the experts of one layer.

    Attributes:
        conversion: Conversion of these tensors.
        shared_indices: Indices that they share, such as (3,) for those of layer 3.
        positions: For each source pattern of the conversion, the indices of the experts (or of other modules in a list)
            whose tensor is present; {0} for a tensor outside of lists, and empty if none is present.
        patterns: Patterns of the model tensors that the run makes; runs of one conversion may differ in them, and then
            the tensors may have different shapes.
        extra_layer: Extra layer that the tensors belong to; None if the model has their layer.
    """

    conversion: Conversion
    shared_indices: tuple[int, ...]
    positions: list[set[int]]
    patterns: tuple[str, ...]
    extra_layer: ExtraLayer | None


@dataclass(slots=True)
class _ConfigMatcher:
    """Comparison of the names and shapes of one checkpoint with a config.

    Attributes:
        architecture: Class of the model under disk names.
        config: Contents of `config.json`.
        rules: Rules from disk names to model names.
        expected: Tensors that a model with this config has.
        extras: Tensors of the checkpoint that the class does not have.
        _present_indices: Pattern of model names -> indices of the tensors that are present.
        _complete_lists: (pattern of model names, all indices but the last) of each list of modules of which one stored
            tensor contains all modules.
        _runs: Tensors that are combined or split together, by `Destination.run_key`.
        _shape_matches: Cached results of `_match_shape`.
        _disk_shapes: Cached results of `_derive_shapes`.
        _unknown_modules: Modules that have stored tensors without a model name, as quantized modules do; by their names
            on disk and in the model.
        _unchecked: Number of tensors so far whose shape could not be checked.
        _tensor_count: Number of tensors in the checkpoint.
    """

    architecture: Architecture
    config: Mapping[str, Any]
    rules: NameRules
    expected: ExpectedShapes
    extras: ExtraTensors
    _present_indices: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    _complete_lists: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _runs: dict[tuple[int, tuple[int, ...]], _ConversionRun] = field(default_factory=dict)
    _shape_matches: dict[tuple[object, ...], Sizes | bool] = field(default_factory=dict)
    _disk_shapes: dict[tuple[object, ...], list[list[Shape]] | None] = field(default_factory=dict)
    _unknown_modules: set[str] = field(default_factory=set)
    _unchecked: int = 0
    _tensor_count: int = 0

    def match(self, tensors: Mapping[str, TensorEntry]) -> ConfigMatch:
        """Return the result of the check of all tensors; call it once, because it records them."""
        self._tensor_count = len(tensors)
        destinations = self.rules.destinations(tensors)
        for name, destination in destinations.items():
            if destination is None:
                self._unknown_modules |= self._module_names(name)
        mismatches = [
            mismatch
            for name, destination in destinations.items()
            if (mismatch := self._check(name, destination, tensors[name]))
        ]
        extra_layers = self._extra_layers(destinations)
        # Extra layers are reported once per layer below.
        mismatches = [each for each in mismatches if each.name not in extra_layers]
        mismatches += _unexpected_tensors(self.extras.by_name, extra_layers, self.architecture.class_name)
        mismatches += _extra_layer_mismatches(extra_layers, self.expected.counts, self.config, self.extras.by_name)
        prefix = self.architecture.base_prefix
        # The tensors of a checkpoint of the base model alone have no prefix, and it needs no head.
        has_base = bool(prefix) and any(each.startswith(f"{prefix}.") for each in self.expected.required)
        is_base = has_base and not any(name.startswith(f"{prefix}.") for name in tensors)
        layer_lists = self._find_layer_lists()
        missing = chain(
            _missing_layers(layer_lists),
            self._missing_tensors(is_base, layer_lists),
            self._missing_optional_tensors(),
            self._incomplete_runs(),
        )
        listed_missing = list(islice(missing, _MAX_LISTED + 1))
        all_mismatches = (*mismatches, *listed_missing[:_MAX_LISTED])
        return ConfigMatch(
            "names and shapes", all_mismatches, self._unchecked, len(listed_missing) > _MAX_LISTED, self.extras.by_name
        )

    def _module_names(self, name: str) -> set[str]:
        """Return the module of a tensor that the model does not have: its name on disk, and that in the model."""
        module = name.rpartition(".")[0]
        weight = self.rules.model_name(f"{module}.weight")
        return {module, weight.rpartition(".")[0]} if weight is not None else {module}

    # -- tensors that are present

    def _check(self, name: str, destination: Destination | str | None, entry: TensorEntry) -> Mismatch | None:
        """Record that a tensor is present, and return a mismatch if it should be absent or has another shape.

        Args:
            name: Name of the tensor.
            destination: Model name, or destination in a conversion; None for a tensor that the model does not have.
            entry: The tensor.
        """
        if destination is None:
            return None
        if isinstance(destination, str):
            pattern, indices = split_pattern(destination)
            self._present_indices.setdefault(pattern, set()).add(indices)
            if pattern in self.expected.absent_patterns:
                return self._disabled_tensor(name, [pattern])
            return self._check_shape(name, entry, (pattern,), lambda: self.expected.shapes.get(pattern))
        conversion_index, shared_indices, pattern_index, list_index = destination
        run = self._runs.get(destination.run_key)
        if run is None:
            run = self._runs[destination.run_key] = self._start_run(
                self.rules.conversions[conversion_index], shared_indices
            )
        run.positions[pattern_index].add(list_index)
        patterns = [pattern_of(name_in_run(target, shared_indices, 0)) for target in run.conversion.targets]
        if all(pattern in self.expected.absent_patterns for pattern in patterns):
            return self._disabled_tensor(name, patterns)
        return self._check_shape(
            name,
            entry,
            (conversion_index, pattern_index, run.patterns),
            lambda: self._possible_disk_shapes(run.conversion, destination),
        )

    def _disabled_tensor(self, name: str, patterns: Sequence[str]) -> Mismatch | None:
        """Return a mismatch for a tensor that the class has only under other configs; None for quantization data."""
        if self.extras.is_part_of_quantized_weight(name):
            return None  # some packages store a bias next to each packed weight
        keys = ", ".join(dict.fromkeys(self.expected.absent_patterns[pattern] for pattern in patterns))
        class_name = self.architecture.class_name
        return Mismatch(
            name, f"is not a tensor of {class_name} with this config.json (it depends on {keys})", MUST_BE_ABSENT
        )

    def _start_run(self, conversion: Conversion, shared_indices: tuple[int, ...]) -> _ConversionRun:
        """Return a new run without positions, and mark the model tensors that it makes as present."""
        for target in conversion.targets:
            self._mark_present(target, shared_indices)
        names = [name_in_run(target, shared_indices, 0) for target in conversion.targets]
        positions: list[set[int]] = [set() for _ in conversion.sources]
        return _ConversionRun(
            conversion,
            shared_indices,
            positions,
            tuple(map(pattern_of, names)),
            find_extra_layer(names[0], self.expected.counts),
        )

    def _mark_present(self, target: str, shared_indices: tuple[int, ...]) -> None:
        """Record that the model tensors of a target pattern are present in the run with these indices."""
        if target.count("*") == len(shared_indices):
            name = fill_pattern(target, shared_indices)
            self._present_indices.setdefault(pattern_of(name), set()).add(indices_of(name))
        else:  # one tensor on disk holds a whole list of modules
            first_name = name_in_run(target, shared_indices, 0)
            self._complete_lists.add((pattern_of(first_name), indices_of(first_name)[:-1]))

    def _check_shape(
        self,
        name: str,
        entry: TensorEntry,
        key: tuple[object, ...],
        find_expected_shapes: Callable[[], tuple[Sizes, ...] | None],
    ) -> Mismatch | None:
        """Return a mismatch if the shape is not an expected one; quantized tensors may have other shapes.

        Args:
            name: Name of the tensor.
            entry: The tensor.
            key: Cache key, equal for tensors with the same expected shapes.
            find_expected_shapes: Function that returns the expected shapes; None if they are unknown.
        """
        if not entry.dtype.is_castable or (self._unknown_modules and name.rpartition(".")[0] in self._unknown_modules):
            self._unchecked += 1
            return None
        cache_key = (*key, entry.shape)
        result = self._shape_matches.get(cache_key)
        if result is None:
            result = self._shape_matches[cache_key] = _match_shape(entry.shape, find_expected_shapes())
        if result is True:
            return None
        if result is False:
            self._unchecked += 1
            return None
        found, needed = f"shape {list(entry.shape)}", f"{_format_shape(result)} by config.json"
        return Mismatch(name, found, needed, entry.shape, result)

    def _possible_disk_shapes(self, conversion: Conversion, destination: Destination) -> tuple[Sizes, ...] | None:
        """Return the shapes that a source tensor may have on disk, also transposed if the conversion allows both.

        None if they cannot be derived.
        """
        columns = self._expected_disk_shapes(conversion, destination.shared_indices)
        if columns is None:
            return None
        shape = columns[destination.pattern_index][0]
        shapes: list[Sizes] = [shape]
        for op in conversion.ops:
            if op.kind == "transpose" and op.args and max(op.dim, op.other_dim) < len(shape):
                swapped = list(shape)
                swapped[op.dim], swapped[op.other_dim] = swapped[op.other_dim], swapped[op.dim]
                shapes.append(tuple(swapped))
        return tuple(shapes)

    def _expected_disk_shapes(
        self, conversion: Conversion, shared_indices: tuple[int, ...]
    ) -> list[list[Shape]] | None:
        """Return for each source pattern the expected shapes of its tensors on disk, in the order of a module list.

        None if they cannot be derived from the shapes of the model tensors.
        """
        patterns = tuple(pattern_of(name_in_run(target, shared_indices, 0)) for target in conversion.targets)
        key = (conversion, patterns)
        if key not in self._disk_shapes:
            self._disk_shapes[key] = self._derive_shapes(conversion, shared_indices, patterns)
        return self._disk_shapes[key]

    def _derive_shapes(
        self, conversion: Conversion, shared_indices: tuple[int, ...], patterns: tuple[str, ...]
    ) -> list[list[Shape]] | None:
        entries = []
        for target, pattern in zip(conversion.targets, patterns, strict=True):
            shapes = self.expected.shapes.get(pattern, ())
            if len(shapes) != 1 or None in shapes[0] or target.count("*") != len(shared_indices):
                return None
            shape = self._limit_merged_dims(tuple(size for size in shapes[0] if size is not None), conversion)
            entries.append([TensorEntry(pattern, _U8, shape, (Chunk(full_region(shape), "", 0, prod(shape)),))])
        try:
            disk_entries = convert(conversion.inverse, entries, [None] * len(conversion.sources))
        except CkptxError:  # sizes do not divide, or an operation is unsupported, so that no shapes follow
            return None
        return [[entry.shape for entry in column] for column in disk_entries]

    def _limit_merged_dims(self, shape: Shape, conversion: Conversion) -> Shape:
        """Return the shape with the size of merged dims limited to one more than the number of stored tensors.

        The config may require any number of experts; with the limit, some still count as missing, and the derivation
        of shapes stays fast.
        """
        sizes = list(shape)
        for op in conversion.ops:
            if op.kind == "merge" and op.dim < len(sizes):
                sizes[op.dim] = min(sizes[op.dim], self._tensor_count + 1)
        return tuple(sizes)

    # -- missing and extra tensors

    def _missing_tensors(self, is_base: bool, layer_lists: Mapping[str, _LayerList]) -> Iterator[Mismatch]:
        """Yield the required tensors that are missing, except those of layers that are missing as a whole.

        Args:
            is_base: True if the checkpoint is of the base model alone, so that its head is not required.
            layer_lists: Result of `_find_layer_lists`.
        """
        tied = {name for pair in self.architecture.ties for naming in pair.namings for name in naming}
        prefix = f"{self.architecture.base_prefix}."
        for pattern in sorted(self.expected.required):
            if is_base and not pattern.startswith(prefix):
                continue
            present = self._present_indices.get(pattern, set())
            for indices in self._required_indices(pattern, layer_lists):
                name = fill_pattern(pattern, indices) if indices not in present else ""
                if name and name not in tied and not self._has_other_form(name):
                    yield Mismatch(name, MISSING_TENSOR, self._expected_shape(pattern))

    def _missing_optional_tensors(self) -> Iterator[Mismatch]:
        """Yield the tensors that a config key adds to the class if no layer has any of them."""
        tied = {name for pair in self.architecture.ties for naming in pair.namings for name in naming}
        for pattern, key in sorted(self.expected.added_patterns.items()):
            name = fill_pattern(pattern, (0,) * pattern.count("*"))
            is_present = pattern in self._present_indices or any(pattern == each for each, _ in self._complete_lists)
            if not is_present and name not in tied and not self._has_other_form(name):
                yield Mismatch(name, MISSING_TENSOR, f"this tensor because of {key} in config.json")

    def _required_indices(self, pattern: str, layer_lists: Mapping[str, _LayerList]) -> Iterator[tuple[int, ...]]:
        """Yield the indices of the required tensors of a pattern.

        Those in layers without any tensor, and in lists of modules that one stored tensor contains, are left out.
        """
        paths = star_prefixes(pattern)
        if not paths:
            yield ()
            return
        counts = [self.expected.counts[path] for path in paths]
        layers = layer_lists[paths[0]].present_layers if paths[0] in layer_lists else range(counts[0])
        if 0 in counts:
            return
        for outer_indices in product(layers, *map(range, counts[1:-1])) if len(counts) > 1 else ((),):
            if (pattern, outer_indices) not in self._complete_lists:
                yield from ((*outer_indices, last) for last in (range(counts[-1]) if len(counts) > 1 else layers))

    def _find_layer_lists(self) -> dict[str, _LayerList]:
        """Return for each list of layers with a known length the layers that have any tensor."""
        counts = {path: self.expected.counts[path] for path in self.expected.stated_paths}
        if states_layer_count(self.architecture, self.config):
            counts |= {stack.path: stack.count for stack in self.architecture.stacks(self.config)}
        layer_lists = {}
        for path, count in counts.items():
            prefix = f"{path}."
            if any(each.startswith(prefix) and not shared_indices for each, shared_indices in self._complete_lists):
                continue  # one tensor on disk holds all layers
            present = {
                indices[0]
                for each, known in self._present_indices.items()
                if each.startswith(f"{prefix}*.")
                for indices in known
            }
            layer_lists[path] = _LayerList.from_indices(count, present | _layer_indices(path, self._unknown_modules))
        return layer_lists

    def _has_other_form(self, name: str) -> bool:
        """Return True if the module of a missing tensor is in `_unknown_modules`, as that of a quantized weight is."""
        module, _, leaf = name.rpartition(".")
        prefix = self.architecture.base_prefix
        short = module.removeprefix(f"{prefix}.") if prefix else module
        return bool({module, short, name, f"{short}.{leaf}"} & self._unknown_modules)

    def _expected_shape(self, pattern: str) -> str:
        shapes = self.expected.shapes.get(pattern)
        return f"{_format_shape(shapes[0])} by config.json" if shapes else "this tensor by config.json"

    def _incomplete_runs(self) -> Iterator[Mismatch]:
        """Yield missing and additional experts of a layer, and missing parts of a fused tensor."""
        for conversion, shared_indices, positions, _, _ in self._runs.values():
            parts = self._expected_disk_shapes(conversion, shared_indices)
            for index, source in enumerate(conversion.sources):
                count = 1 + max(map(max, filter(None, positions))) if parts is None else len(parts[index])
                needed = f"{count} of its kind by config.json"
                for position in range(count) if len(positions[index]) < count else ():
                    name = name_in_run(source, shared_indices, position)
                    if position not in positions[index] and not self._has_other_form(name):
                        yield Mismatch(name, MISSING_TENSOR, needed)
                for position in sorted(each for each in positions[index] if each >= count):
                    yield Mismatch(name_in_run(source, shared_indices, position), "an additional one", needed)

    def _extra_layers(self, destinations: Mapping[str, Destination | str | None]) -> dict[str, ExtraLayer]:
        """Return the extra layer of each tensor that is in one, by the name of the tensor."""
        layers: dict[str, ExtraLayer] = {}
        runs = {key: run.extra_layer for key, run in self._runs.items() if run.extra_layer is not None}
        for name, destination in destinations.items():
            if isinstance(destination, Destination):
                layer = runs.get(destination.run_key) if runs else None
            else:
                layer = find_extra_layer(destination or name, self.expected.counts)
            if layer is not None:
                layers[name] = layer
        return layers


def _match_shape(shape: Shape, expected_shapes: tuple[Sizes, ...] | None) -> Sizes | bool:
    """Compare a shape with the expected ones.

    Returns:
        True if it is one of them, False if it cannot be checked because no size is known, else the first of them.
    """
    if not expected_shapes or (
        all(size is None for each in expected_shapes for size in each) and expected_shapes != ((),)
    ):
        return False
    for each in expected_shapes:
        if len(each) == len(shape) and all(size in (None, actual) for size, actual in zip(each, shape, strict=True)):
            return True
    return expected_shapes[0]


def _format_shape(sizes: Sizes) -> str:
    return "shape [" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
