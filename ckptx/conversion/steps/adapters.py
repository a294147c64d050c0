"""`merge`: the model with adapters added, which all later steps read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.source_model import SourceModel
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.rules import TrainerRules
from ckptx.model_view.parameter_count import tie_representatives
from ckptx.model_view.view import ModelView, decide_ties
from ckptx.options.conversion import ConversionOptions
from ckptx.storage.interface import SourceFiles

if TYPE_CHECKING:  # numpy and the readers of adapters are imported by `merge` only
    from ckptx.adapters.adapter import Adapter
    from ckptx.adapters.changes import Changes
    from ckptx.adapters.merged_weights import AdapterFiles
    from ckptx.architecture.tied import TieDecision

_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)")  # directory of a repository in the cache of the Hub


class OpenedAdapter(NamedTuple):
    """An adapter to merge.

    Attributes:
        adapter: The adapter.
        factor: Factor of its layers, in addition to their scaling.
        files: Its open files.
    """

    adapter: Adapter
    factor: float
    files: SourceFiles


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The model in the source, with adapters added.

    Attributes:
        base: Source and base, see `BaseCheckpoint`.
        model: Model in the source; the entry of a merged weight is in a computed file.
        files: Files of the source, and computed files of merged weights.
        adapters: The adapters; empty without `merge`.
        merged: Name of each tensor to which layers were added, in `TensorEntry.name` -> entry before.
        replaced: Name of each tensor that a tensor of an adapter replaces, in `TensorEntry.name` -> entry before.
        origins: `TensorEntry.name` of a tensor that the source stores under another name -> that stored name.
        notes: Notes for the user.
    """

    base: BaseCheckpoint
    model: SourceModel
    files: SourceFiles
    adapters: tuple[OpenedAdapter, ...] = ()
    merged: Mapping[str, TensorEntry] = field(default_factory=dict)
    replaced: Mapping[str, TensorEntry] = field(default_factory=dict)
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def catalogs(self) -> tuple[Catalog, ...]:
        """Return the catalogs of the adapters."""
        return tuple(each.adapter.catalog for each in self.adapters)

    @property
    def adapter_bytes(self) -> int:
        """Return the bytes of all tensors of the adapters."""
        return sum(catalog.nbytes for catalog in self.catalogs)

    def stored_names(self, names: Iterable[str]) -> set[str]:
        """Return the stored names of the tensors of the source that these tensors are read from."""
        return {stored for name in names if name not in self.replaced for stored in self.origins.get(name, (name,))}

    def dropped(self, written: set[str]) -> list[dict[str, str]]:
        """Return the stored `name` and `reason` of each tensor that is replaced, except those in `written`."""
        names = {stored for name in self.replaced for stored in self.origins.get(name, (name,))}
        return [{"name": name, "reason": "replaced by a tensor of the adapter"} for name in sorted(names - written)]

    def stored_entry(self, entry: TensorEntry) -> TensorEntry:
        """Return the entry before merging of an entry of the model."""
        return self.merged.get(entry.name) or self.replaced.get(entry.name) or entry

    def report_entry(self) -> list[dict[str, Any]] | None:
        """Return the entry `adapters` of the report; None without `merge`."""
        if not self.adapters:
            return None
        from ckptx.adapters.adapter import describe_adapter

        return [
            {"path": str(each.adapter.catalog.location), "factor": each.factor, **describe_adapter(each.adapter)}
            for each in self.adapters
        ]


def open_adapters(
    options: ConversionOptions, dst: Path, model_config: Mapping[str, Any] | None, stack: ExitStack
) -> tuple[OpenedAdapter, ...]:
    """Open the adapters that the options name; empty without `merge`.

    Args:
        options: `adapters`, and the Hub options for them.
        dst: Directory to write; must not contain files of an adapter.
        model_config: Config of the model; None if it is not known.
        stack: Closes the files of the adapters.

    Raises:
        InputError: A path is no adapter, or its files are damaged.
        UnsupportedError: An adapter is of a kind that ckptx does not merge.
        OutputError: `dst` overlaps an adapter.
    """
    if not options.adapters:
        return ()
    from ckptx.adapters.adapter import open_adapter
    from ckptx.adapters.state_dicts import has_adapter
    from ckptx.conversion.steps.adapter_source import extract_adapter
    from ckptx.formats.hf.hub import resolve_source
    from ckptx.formats.registry import open_checkpoint
    from ckptx.publishing.output_checks import refuse_overlap
    from ckptx.publishing.overwrite_checks import refuse_input_files

    opened = []
    for path, factor in options.adapters:
        local = resolve_source(path, revision=None, token=options.token, cache_dir=options.cache_dir)
        refuse_overlap(local, dst)
        catalog = open_checkpoint(local)
        refuse_input_files(catalog, dst)
        files = stack.enter_context(catalog.source.open(catalog.identities))
        if catalog.traits.is_adapter:
            adapter = open_adapter(catalog)
        elif has_adapter(catalog):
            adapter = extract_adapter(catalog, files, options.adapter_settings(), model_config).adapter
        else:
            raise InputError(
                f"{catalog.location}: is not an adapter (format: {catalog.format}); pass a directory with "
                "adapter_config.json and adapter_model.safetensors, after MODEL"
            )
        opened.append(OpenedAdapter(adapter, factor, files))
    return tuple(opened)


def merge_adapters(
    adapters: tuple[OpenedAdapter, ...],
    model: SourceModel,
    base: BaseCheckpoint,
    files: SourceFiles,
    options: ConversionOptions,
) -> MergedModel:
    """Add the layers of adapters to the weights of a model.

    A tied weight of which an adapter changes one name only is two tensors afterwards.

    Args:
        adapters: The adapters; if there are none, the model is returned as it is.
        model: Model in the source.
        base: Source and base, see `BaseCheckpoint`.
        files: Files of the source.
        options: `tie_missing` and `allow_config_mismatch`.

    Raises:
        InputError: An adapter does not fit the model, was trained on another one, changes nothing, or has values that
            are NaN or infinite.
        UnsupportedError: A weight is quantized, or stored in another form than the class has it, or a tied weight
            cannot be untied; or adapters cannot be combined.
    """
    if not adapters:
        return MergedModel(base, model, files)
    from ckptx.adapters.changes import Changes
    from ckptx.adapters.merged_weights import AdapterFiles
    from ckptx.adapters.values import check_values
    from ckptx.adapters.weight_names import WeightNames
    from ckptx.quantization.computed_files import ComputedFiles

    for each in adapters:
        _check_base_name(each.adapter, base, allow_mismatch=options.allow_config_mismatch)
    view, origins = _under_disk_names(model.view)
    decisions = decide_ties(view, files, tie_missing=options.tie_missing, accepted_problems=[])
    second_names = _second_names(view, decisions)
    tensors = {
        **view.tensors,
        **{name: view.tensors[stored].with_name(view.prefix + name) for name, stored in second_names.items()},
    }
    changes = Changes(WeightNames.of(view, tensors))
    tying: set[AdapterFiles] = set()
    for each in adapters:
        adapter_files = AdapterFiles(each.files)
        changes.add(each.adapter, adapter_files, each.factor)
        if each.adapter.config.keeps_ties:
            tying.add(adapter_files)
    _refuse_or_share(changes, view, decisions, tying)
    notes = [note for each in adapters for note in check_values(each.adapter, each.files)]
    untied = _untied_names(changes, decisions)
    computed = changes.computed(tensors)
    tensors = {
        name: computed[name].entry if name in computed else entry
        for name, entry in tensors.items()
        if name not in second_names or name in untied
    }
    origins |= {
        view.prefix + name: origins.get(view.tensors[stored].name, (view.tensors[stored].name,))
        for name, stored in second_names.items()
        if name in untied
    }
    before = {file.base.name: file.base for file in computed.values()}
    replaced = {computed[name].base.name for name in changes.replaced}
    changed = replace(
        view,
        catalog=replace(
            view.catalog, tensors={**view.catalog.tensors, **{entry.name: entry for entry in tensors.values()}}
        ),
        tensors=tensors,
    )
    return MergedModel(
        replace(base, is_merged=True),
        replace(model, view=changed),
        ComputedFiles(files, {file.file_name: file for name, file in computed.items() if name in tensors}),
        adapters,
        {name: entry for name, entry in before.items() if name not in replaced},
        {name: entry for name, entry in before.items() if name in replaced},
        origins,
        tuple(notes),
    )


def _check_base_name(adapter: Adapter, base: BaseCheckpoint, *, allow_mismatch: bool) -> None:
    """Refuse an adapter of another model, if both are known by their name on the Hub.

    Raises:
        InputError: The names differ, and `allow_mismatch` is False.
    """
    match = next(filter(None, map(_HUB_CACHE.fullmatch, str(base.source.root).split("/"))), None)
    named = adapter.config.base_model
    if match is None or named is None or named.count("/") != 1 or named.startswith((".", "/", "~")) or allow_mismatch:
        return
    own = f"{match[1]}/{match[2]}"
    if own.lower() != named.lower():
        raise InputError(
            f"{adapter.catalog.location}: was trained on {named} (base_model_name_or_path), not on {own}; pass that "
            "model, or --allow-config-mismatch if both have the same weights"
        )


def _under_disk_names(view: ModelView) -> tuple[ModelView, dict[str, tuple[str, ...]]]:
    """Return a model with the names of a trainer under disk names, and disk name -> stored names; others unchanged.

    Raises:
        InputError, UnsupportedError: The names cannot be converted.
    """
    if not view.trainer_conversions:
        return view, {}
    renamed = TrainerRules(view.trainer_conversions).from_trainer(view.tensors)
    origins = {
        name: tuple(view.tensors[source].name for source in sources) for name, sources in renamed.sources.items()
    }
    return (
        replace(
            view,
            catalog=replace(view.catalog, tensors={**view.catalog.tensors, **renamed.tensors}),
            tensors=dict(renamed.tensors),
            prefix="",
            architecture=view.disk_architecture,
            trainer_conversions=(),
            unknown=(),
        ),
        origins,
    )


def _second_names(view: ModelView, decisions: Iterable[TieDecision]) -> dict[str, str]:
    """Return the names of tied weights that the source does not store -> name of the weight that it stores."""
    return {
        name: decision.stored_name
        for decision in decisions
        if decision.action == "alias" and decision.stored_name is not None
        for name in (decision.target, decision.source)
        if name not in view.tensors
    }


def _groups(decisions: Iterable[TieDecision]) -> list[set[str]]:
    """Return the names of each tied weight, second names included."""
    groups: dict[str, set[str]] = {}
    for name, representative in tie_representatives(list(decisions)).items():
        groups.setdefault(representative, set()).add(name)
    return list(groups.values())


def _refuse_or_share(changes: Changes, view: ModelView, decisions: list[TieDecision], tying: set[AdapterFiles]) -> None:
    """Change all names of a tied weight if the adapter keeps ties; else check that the weight can be untied.

    Args:
        changes: Changes by all adapters.
        view: Model.
        decisions: Decisions about its tied weights.
        tying: Files of the adapters that keep ties.

    Raises:
        UnsupportedError: It cannot: the class has one tensor for both names. Or an adapter that keeps ties and another
            one change the weight.
    """
    changed = set(changes.names)
    for group in _groups(decisions):
        names = sorted(group & changed)
        files = changes.files_of(names)
        keeps_ties = not files.isdisjoint(tying)
        if keeps_ties and len(files) > 1:
            (first, *_), (second, *_) = names, sorted(group - {names[0]})
            raise UnsupportedError(
                f'{view.catalog.location}: several adapters change "{first}", which is tied to "{second}", and one of '
                "them keeps them equal (ensure_weight_tying); merge the first, then the second"
            )
        if names and keeps_ties:
            for other in group - {names[0]}:
                changes.share(names[0], other)
        if not names or keeps_ties or len(names) == len(group):
            continue
        architecture = view.disk_architecture
        if architecture is not None and not architecture.is_unknown_class and not architecture.ties_flag_editable:
            (other, *_) = sorted(group - changed)
            raise UnsupportedError(
                f'{view.catalog.location}: an adapter changes "{names[0]}", which {architecture.class_name} always '
                f'ties to "{other}", so that the merged model would need two tensors; merge the adapter with PEFT'
            )


def _untied_names(changes: Changes, decisions: Iterable[TieDecision]) -> set[str]:
    """Return the names of tied weights of which some names change and others do not, or change in another way."""
    changed = set(changes.names)
    untied: set[str] = set()
    for group in _groups(decisions):
        if not group & changed:
            continue
        kinds = {(*map(id, changes.additions.get(name, ())), id(changes.replaced.get(name))) for name in group}
        if len(kinds) > 1:
            untied |= group
    return untied
