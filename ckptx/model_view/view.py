"""View of the model in a checkpoint: names without wrappers, optimizer state separated, tied weights resolved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.infer_class import infer_class
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.model_names import ModelNames, apply_trainer_naming, find_model_names, known_names
from ckptx.architecture.shapes import shape_lookup
from ckptx.architecture.transformers_version import architecture_note
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.hf_metadata import local_config_directory, name_config_in_errors
from ckptx.formats.hf.reader import refuse_adapters
from ckptx.formats.manifest_file import read_manifest
from ckptx.formats.sidecars import MANIFEST
from ckptx.mapping.duplicates import find_duplicate_names
from ckptx.mapping.models import Models, OtherModel, describe_prefix, find_models, find_repeated_prefixes
from ckptx.mapping.names import Roles, UnwrappedNames, pattern_of, strip_wrappers, without_wrappers
from ckptx.mapping.ops import Conversion
from ckptx.mapping.quantization_scales import add_scale_conversions, find_parent
from ckptx.mapping.rules import NameRules
from ckptx.storage.interface import Location, SourceFiles
from ckptx.untrusted.limits import MAX_METADATA_BYTES
from ckptx.wording import counted, first_of

if TYPE_CHECKING:  # commands that read only headers do not import tensor readers or readers of other formats
    from ckptx.architecture.tied import TieDecision
    from ckptx.catalog.manifest import Manifest
    from ckptx.transfer.stream import TensorReader


@dataclass(frozen=True, slots=True)
class ModelView:
    """Model of one checkpoint.

    Attributes:
        catalog: Catalog of the checkpoint.
        config: Config used, that of the checkpoint or of a base; None without one.
        tensors: Tensors of the model by name without wrappers and prefix, in catalog order; `name` of an entry is the
            stored name.
        optimizer: Stored names of optimizer tensors.
        other: Stored names of tensors of neither model nor optimizer.
        prefix: Prefix that was removed from the names of the model, with its dot; empty for none.
        wrappers: Wrapper component -> number of times it was removed, from the names of the model and its optimizer
            state.
        architecture: Class of the model under the names of the checkpoint; None if unknown.
        disk_architecture: Class under disk names (as on the Hub); differs from `architecture` only for trainer names.
        trainer_conversions: Conversions from trainer names to disk names; empty if the names are not a trainer's.
        trainer_buffers: Stored names, which are also in `other`, of buffers of the trainer's model that the class does
            not have on the Hub.
        unknown: Names in `tensors` that the architecture does not have; conversions copy these tensors unchanged. Empty
            if the names of the class are unknown.
        other_models: Other models in the checkpoint, with stored names, which are also in `other`.
        duplicates: Stored name -> other stored name that is the same without wrappers or prefix. The first is not in
            `tensors`, `optimizer` or `other`; whether the two are one tensor is decided by their bytes.
        notes: Notes for the user on the reading of the checkpoint and the search for the model.
    """

    catalog: Catalog
    config: dict[str, Any] | None
    tensors: dict[str, TensorEntry]
    optimizer: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    prefix: str = ""
    wrappers: dict[str, int] = field(default_factory=dict)
    architecture: Architecture | None = None
    disk_architecture: Architecture | None = None
    trainer_conversions: tuple[Conversion, ...] = ()
    trainer_buffers: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    other_models: tuple[OtherModel, ...] = ()
    duplicates: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    _rules: list[NameRules | None] = field(default_factory=list, compare=False, repr=False)

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the bytes of the tensors with these stored names; bytes that names share count once."""
        entries = (self.catalog.tensors[name] for name in names)
        return sum({entry.position: entry.nbytes for entry in entries if entry.nbytes}.values())

    @property
    def model_duplicates(self) -> dict[str, str]:
        """Return the `duplicates` of model tensors."""
        stored = {entry.name for entry in self.tensors.values()} if self.duplicates else set()
        return {name: kept for name, kept in self.duplicates.items() if kept in stored}

    @property
    def model_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of all models in the checkpoint, this one first."""
        return (self.prefix, *(each.prefix for each in self.other_models))

    def notes_on_other_models(self, action: str) -> tuple[str, ...]:
        """Return a note on each other model; `action` describes how it is treated, such as "not converted"."""
        return tuple(
            f"{each.description}: {counted(len(each.names), 'tensor')}, {action}; "
            f'choose it with --source-prefix "{each.prefix}"'
            for each in self.other_models
        )


def view_model(
    catalog: Catalog,
    *,
    config: dict[str, Any] | None = None,
    prefix: str | None = None,
    trust_remote_code: bool = False,
    allow_several: bool = False,
    allow_adapter: bool = False,
    code_checkpoint: Catalog | None = None,
) -> ModelView:
    """Find the model in a checkpoint.

    Args:
        catalog: Catalog of the checkpoint.
        config: Config to use instead of that of the checkpoint; None to use its own.
        prefix: Prefix of model names; None to detect it.
        trust_remote_code: True to run code from the checkpoint for classes that transformers lacks.
        allow_several: True to choose one of several complete models and note the others.
        allow_adapter: True to accept tensors of an adapter among those of the model.
        code_checkpoint: Checkpoint that `config` and its custom code come from; None for `catalog`.

    Raises:
        InputError: No tensor has the prefix; there are several complete models, `prefix` is None and `allow_several`
            is not set; or a value in the config is invalid.
        UnsupportedError: Tensors of an adapter are among those of a model, a name has a component "*", the class cannot
            be built from the config, or the names are those of a trainer that cannot hold this model.
        EnvironmentProblem: The class has to be built, and a package for it is missing.
    """
    _refuse_stars(catalog)
    is_own_config = config is None or config is catalog.config
    config = config if config is not None else catalog.config
    architecture = None
    notes = list(catalog.notes)
    if config is not None and config.get("architectures") in (None, []):
        config = _add_inferred_class(config, catalog, notes)
    with name_config_in_errors(catalog) if is_own_config else nullcontext():
        if config is not None:
            architecture = find_architecture(
                config,
                config_dir=local_config_directory(code_checkpoint or catalog) if trust_remote_code else None,
                trust_remote_code=trust_remote_code,
            )
        found = _find_model_names(catalog, architecture, config, prefix, notes)
    disk_architecture, architecture = architecture, found.architecture
    patterns = architecture.name_patterns if architecture is not None else frozenset()
    roles, unwrapped = found.models.roles, found.unwrapped
    if len(found.models.complete_prefixes) > 1 and prefix is None and catalog.traits.is_training_format:
        if not allow_several:
            raise SeveralModelsError(catalog.location, found.models.complete_prefixes)
        notes.append(
            f"{_describe_models(found.models.complete_prefixes)}; showing the model {describe_prefix(roles.prefix)}"
        )
    stored_names = {short: name for name, short in unwrapped.names.items()}
    tensors = {name: catalog.tensors[stored_names[full]] for name, full in roles.model.items()}
    names_by_pattern: dict[str, list[str]] = {}
    for name in tensors:
        names_by_pattern.setdefault(pattern_of(name), []).append(name)
    if not catalog.traits.is_adapter and not allow_adapter:
        refuse_adapters(names_by_pattern, catalog.location)
    note = architecture_note(disk_architecture)
    if note is not None:
        notes.append(note)
    unknown: set[str] = set()
    if architecture is not None and patterns:
        unknown = {name for key, names in names_by_pattern.items() if not architecture.expects(key) for name in names}
        if isinstance(config, dict) and "quantization_config" in config:
            unknown = {name for name in unknown if not _belongs_to_weight(name, architecture)}
    return ModelView(
        catalog,
        config,
        tensors,
        tuple(stored_names[name] for name in roles.optimizer),
        tuple(stored_names[name] for name in roles.other if name not in found.models.duplicates),
        roles.prefix,
        unwrapped.count_without(stored_names[name] for name in roles.other) if unwrapped.counts else {},
        architecture,
        disk_architecture,
        found.trainer_conversions,
        tuple(stored_names[name] for name in found.buffers),
        tuple(name for name in tensors if name in unknown) if unknown else (),
        tuple(each._replace(names=tuple(stored_names[name] for name in each.names)) for each in found.models.others),
        {
            **unwrapped.duplicates,
            **{stored_names[name]: stored_names[kept] for name, kept in found.models.duplicates.items()},
        },
        tuple(notes),
    )


def view_model_under(
    catalog: Catalog,
    prefix: str | None,
    *,
    config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    code_checkpoint: Catalog | None = None,
) -> ModelView:
    """Find the model under a prefix if the checkpoint has one there, else ignore the prefix.

    Commands that compare two checkpoints use this, because they apply one prefix to both.

    Args:
        catalog: Catalog of the checkpoint.
        prefix: The prefix; None to detect it.
        config, trust_remote_code, code_checkpoint: See `view_model`.

    Raises:
        InputError, UnsupportedError, EnvironmentProblem: See `view_model`.
    """
    find_view = partial(
        view_model, catalog, config=config, trust_remote_code=trust_remote_code, code_checkpoint=code_checkpoint
    )
    if prefix is not None and catalog.traits.is_training_format:
        view = find_view(allow_several=True)
        is_known = view.architecture is not None and bool(view.architecture.name_patterns)
        is_known = is_known and len(view.unknown) < len(view.tensors)
        names = (*view.tensors, *strip_wrappers(view.other, frozenset()).names.values())
        for spelling in dict.fromkeys((prefix, without_wrappers(prefix))):
            if spelling in view.model_prefixes or (not is_known and any(name.startswith(spelling) for name in names)):
                return find_view(prefix=spelling)
    return find_view()


class SeveralModelsError(InputError):
    """Error for a checkpoint with several complete models and no prefix to choose one."""

    def __init__(self, root: Location, prefixes: tuple[str, ...]) -> None:
        hint = ' (--source-prefix "" for the names without a prefix)' if "" in prefixes else ""
        super().__init__(f"{root}: {_describe_models(prefixes)}; choose one with --source-prefix{hint}")


def _describe_models(prefixes: tuple[str, ...]) -> str:
    described = ", ".join(describe_prefix(prefix) for prefix in sorted(prefixes)[:8])
    more = f" and {len(prefixes) - 8} more" if len(prefixes) > 8 else ""
    return f"holds {len(prefixes)} complete models: {described}{more}"


def _refuse_stars(catalog: Catalog) -> None:
    """Refuse names with a component "*", which stands for an index in name patterns."""
    for name in catalog.tensors:
        if "*" in name and "*" in name.split("."):
            raise UnsupportedError(
                f'{catalog.location}: tensor "{name}": "*" stands for an index in name patterns; rename the tensor'
            )


def _belongs_to_weight(name: str, architecture: Architecture) -> bool:
    return find_parent(name, lambda weight: architecture.expects(pattern_of(weight))) is not None


def _add_inferred_class(config: dict[str, Any], catalog: Catalog, notes: list[str]) -> dict[str, Any]:
    """Return a config that names only the model type with the class that the tensor names suggest, and add a note.

    If no class fits, return the config unchanged.
    """
    inferred = infer_class(config, catalog.tensors)
    if inferred is None:
        return config
    notes.append(inferred.note)
    return {**config, "architectures": [inferred.class_name]}


def _find_model_names(
    catalog: Catalog,
    disk_architecture: Architecture | None,
    config: dict[str, Any] | None,
    prefix: str | None,
    notes: list[str],
) -> ModelNames:
    """Find the model in the names of a checkpoint; in an HF checkpoint, every tensor belongs to the model.

    Names of an HF checkpoint do not change, unless the class knows them only without wrappers: trainers also save the
    state dict of a compiled model as `model.safetensors`. Names do not change either if the manifest records that they
    came from an HF checkpoint.
    """
    unchanged_names = UnwrappedNames({name: name for name in catalog.tensors}, {})
    unchanged = unchanged_names, Models(Roles("", unchanged_names.names, [], []))
    if not catalog.traits.is_training_format:
        architecture, trainer_conversions = apply_trainer_naming(disk_architecture, config, catalog.tensors)
        unwrapped = _unwrap_unknown_names(catalog, architecture)
        if unwrapped is not None:
            names = {short: short for short in unwrapped.names.values()}
            return ModelNames(unwrapped, Models(Roles("", names, [], [])), architecture, trainer_conversions)
        others = find_models(unchanged[1].roles, known_names(architecture, config), is_user_prefix=False).others
        notes.extend(
            f"holds a second complete model {describe_prefix(each.prefix)}, {counted(len(each.names), 'tensor')}, "
            "treated as tensors unknown to the class"
            for each in others
            if each.is_complete
        )
        return ModelNames(*unchanged, architecture, trainer_conversions)
    found = find_model_names(catalog.tensors, disk_architecture, config, prefix)
    unwrapped, models = found.unwrapped, found.models
    roles = models.roles
    if unwrapped.counts or unwrapped.duplicates or roles.optimizer or roles.other:
        manifest = read_valid_manifest(catalog, notes)
        state = {*roles.optimizer, *roles.other}
        ambiguous = [name for name, short in unwrapped.names.items() if name != short or short in state]
        ambiguous += unwrapped.duplicates
        if manifest is not None and _are_original_names(ambiguous, catalog, manifest):
            return found._replace(unwrapped=unchanged_names, models=unchanged[1])
    if unwrapped.names_with_module:
        notes.append(
            f'"module." kept in {counted(len(unwrapped.names_with_module), "name")}, because names without it exist as '
            f"well: {first_of(unwrapped.names_with_module)}"
        )
    if prefix is None and (found.architecture is None or not found.architecture.name_patterns):
        repeated = find_repeated_prefixes(roles.model)
        if repeated:
            notes.append(
                f"the same names under {', '.join(map(json.dumps, repeated[:8]))}, probably "
                f"{counted(len(repeated), 'model')} of an unknown class; using all, choose one with --source-prefix"
            )
    return found


def _unwrap_unknown_names(catalog: Catalog, architecture: Architecture | None) -> UnwrappedNames | None:
    """Return the names without wrappers if the class knows most of them only so; None if they stay unchanged."""
    if architecture is None or not architecture.name_patterns:
        return None
    if any(architecture.expects(pattern_of(name)) for name in catalog.tensors):
        return None
    unwrapped = strip_wrappers(catalog.tensors, architecture.name_patterns)
    known_count = sum(architecture.expects(pattern_of(name)) for name in unwrapped.names.values())
    is_known = unwrapped.counts and not unwrapped.duplicates and 2 * known_count > len(unwrapped.names)
    return unwrapped if is_known else None


def _are_original_names(names: list[str], catalog: Catalog, manifest: Manifest) -> bool:
    """Return True if the manifest records that all `names` came from an HF checkpoint, as such or as a tied name."""
    recorded_tensors, original = manifest.tensors, manifest.original
    if original is None or not recorded_tensors.keys() >= catalog.tensors.keys():
        return False
    return all(name in original.tensors or recorded_tensors[name].tied_to is not None for name in names)


def rules_of(view: ModelView) -> NameRules | None:
    """Return the rules between disk names and model names; None without a config or if the class is unknown.

    Rules cache their lookups, so one instance is shared for each view.
    """
    if not view._rules:
        view._rules.append(_build_rules(view.disk_architecture, view.config))
    return view._rules[0]


def has_model_names(view: ModelView) -> bool:
    """Return True if the tensors have model names, as trainers save them, which may differ from disk names."""
    rules = rules_of(view)
    return view.catalog.traits.has_model_names or (rules is not None and rules.are_model_names(view.tensors))


def _build_rules(architecture: Architecture | None, config: dict[str, Any] | None) -> NameRules | None:
    if architecture is None or config is None or not architecture.name_patterns:
        return None
    conversions = add_scale_conversions(architecture.conversions(config), config)
    return NameRules(
        conversions,
        architecture.base_prefix,
        architecture.model_name_patterns,
        shape_of=shape_lookup(architecture, config),
    )


def read_valid_manifest(catalog: Catalog, notes: list[str]) -> Manifest | None:
    """Return the manifest of a checkpoint that ckptx wrote; None if there is none or it does not describe the files.

    Args:
        catalog: Catalog of the checkpoint; if ckptx writes no manifest in its format (`has_manifest`), none is read.
        notes: Receives one line if a manifest is ignored because it is damaged or describes other files.

    Raises:
        ReadError: The storage failed.
    """
    source = catalog.source
    manifest = read_manifest(source, notes) if catalog.traits.has_manifest else None
    if manifest is None or manifest.traits is not catalog.traits:
        return None
    from ckptx.catalog.manifest import FileRecord
    from ckptx.formats.dcp.reader import METADATA
    from ckptx.transfer.digest import bytes_digest_hex

    recorded = manifest.files
    metadata_files = [f"{part.directory}/{METADATA}" for part in catalog.parts] or [METADATA]
    for name in metadata_files if catalog.traits.has_archives else ():
        if not source.listing().is_file(name):  # a part in sharded safetensors, which ckptx does not write
            return None
        data = source.read_small(name, MAX_METADATA_BYTES)
        if recorded.get(name) != FileRecord(len(data), bytes_digest_hex(data)):
            notes.append(f"{MANIFEST} ignored: it describes another {name}")
            return None
    if any(name not in recorded or recorded[name].nbytes != size for name, size in catalog.files.items()):
        notes.append(f"{MANIFEST} ignored: it describes other files")
        return None
    return manifest


def locate_archives(view: ModelView, files: SourceFiles, *, lazy: bool = False) -> ModelView:
    """Return the view with the position of every chunk of the model tensors, also those of `model_duplicates`.

    Formats with `torch.save` archives, such as DCP, require it before tensors are read. Archives of other tensors are
    not opened.

    Args:
        view: View of the model.
        files: Open files of the checkpoint.
        lazy: See `locate_payloads`.
    """
    if not view.catalog.traits.has_archives:
        return view
    from ckptx.formats.dcp.reader import locate_payloads

    names = {entry.name: name for name, entry in view.tensors.items()}
    names_to_locate = (*names, *view.model_duplicates)
    located = locate_payloads(
        replace(view.catalog, tensors={name: view.catalog.tensors[name] for name in names_to_locate}), files, lazy=lazy
    )
    tensors = {short: located.tensors[name] for name, short in names.items()}
    return replace(view, tensors=tensors, catalog=replace(view.catalog, tensors=view.catalog.tensors | located.tensors))


def locate_all_archives(view: ModelView, files: SourceFiles, *, lazy: bool = False) -> ModelView:
    """Return the view with the position of every chunk of the checkpoint, including optimizer state."""
    from ckptx.formats.dcp.reader import locate_payloads

    located = locate_payloads(view.catalog, files, lazy=lazy)
    tensors = {name: located.tensors[entry.name] for name, entry in view.tensors.items()}
    return replace(view, tensors=tensors, catalog=located)


def compare_replicas(catalog: Catalog, files: SourceFiles) -> None:
    """Compare the bytes of regions of tensors that several ranks stored.

    Args:
        catalog: Catalog of the checkpoint, with every chunk located.
        files: Open files of the checkpoint.

    Raises:
        InputError: Two replicas differ.
    """
    from ckptx.formats.chunk_assembly import replicas_with_chunks
    from ckptx.transfer.digest_sink import digest_tensor
    from ckptx.transfer.stream import TensorReader

    reader = TensorReader(files)
    known: dict[Chunk, list[bytes]] = {}

    def digest_leaves(entry: TensorEntry, chunk: Chunk) -> list[bytes]:
        """Return the digests of a block, read as a separate tensor."""
        block = TensorEntry(
            entry.name, entry.dtype, chunk.region.sizes, (chunk._replace(region=full_region(chunk.region.sizes)),)
        )
        return digest_tensor(reader, block, entry.dtype).leaves

    for entry, first_chunk, replica in replicas_with_chunks(catalog):
        if first_chunk not in known:
            known = {first_chunk: digest_leaves(entry, first_chunk)}
        if digest_leaves(entry, replica) != known[first_chunk]:
            raise InputError(
                f'{catalog.location}: tensor "{entry.name}": {replica.file} and {first_chunk.file} have '
                "different bytes "
                f"for {replica.region}; one of them comes from another save, restore it"
            )


def resolve_duplicates(view: ModelView, files: SourceFiles, *, with_state: bool) -> ModelView:
    """Compare tensors that are stored under two names, and keep one of each with a note.

    Two names belong to one tensor if they differ only in wrappers and prefix, or if the rules of the class rename both
    to the same name.

    Args:
        view: View in which every chunk of the model, and with `with_state` of its state, is located.
        files: Files of the checkpoint.
        with_state: True to compare duplicates of training state as well.

    Raises:
        InputError: The bytes under two names of one tensor differ.
    """
    duplicates = dict(view.duplicates) if with_state else view.model_duplicates
    rules = rules_of(view)
    if rules is not None and not view.trainer_conversions:
        stored = {name: entry.name for name, entry in view.tensors.items()}
        duplicates |= {
            stored[name]: stored[first_name] for name, first_name in find_duplicate_names(rules, view.tensors).items()
        }
    if not duplicates:
        return view
    from ckptx.transfer.stream import TensorReader

    reader = TensorReader(files)
    for name, first_name in duplicates.items():
        difference = difference_between(reader, view.catalog.tensors[first_name], view.catalog.tensors[name])
        if difference is not None:
            is_outside = bool(view.prefix) and first_name == view.prefix + name
            advice = f'choose the first with --source-prefix "{view.prefix}"' if is_outside else "remove one of them"
            raise InputError(
                f'{view.catalog.location}: tensors "{first_name}" and "{name}" are one parameter under two names, but '
                f"{difference}; {advice}"
            )
    names = list(duplicates)
    note = f"{counted(len(names), 'tensor')} stored under two names with equal bytes, used once: {first_of(names)}"
    return replace(
        view,
        tensors={name: entry for name, entry in view.tensors.items() if entry.name not in duplicates},
        unknown=tuple(name for name in view.unknown if view.tensors[name].name not in duplicates),
        duplicates={**view.duplicates, **duplicates},
        notes=(*view.notes, note),
        _rules=view._rules,
    )


def difference_between(reader: TensorReader, a: TensorEntry, b: TensorEntry) -> str | None:
    """Return the first property in which two tensors differ, such as `have different bytes`; None if they are equal."""
    from ckptx.transfer.digest_sink import digest_tensor

    if a.dtype is not b.dtype:
        return f"have different dtypes, {a.dtype.name} and {b.dtype.name}"
    if a.shape != b.shape:
        return f"have different shapes, {list(a.shape)} and {list(b.shape)}"
    if a.chunks == b.chunks or digest_tensor(reader, a, a.dtype).leaves == digest_tensor(reader, b, b.dtype).leaves:
        return None
    return "have different bytes"


def decide_ties(
    view: ModelView, files: SourceFiles, *, tie_missing: bool = False, accepted_problems: list[str] | None = None
) -> list[TieDecision]:
    """Decide every tied pair of the architecture; bytes are read only if both tensors are on disk.

    Args:
        view: View in which every chunk of the model is located.
        files: Open files of the checkpoint.
        tie_missing, accepted_problems: See `resolve_ties`.

    Returns:
        A decision for each pair, in the order of `Architecture.ties`; empty without a class or config.

    Raises:
        InputError: See `resolve_ties`.
    """
    if view.architecture is None or view.config is None:
        return []
    from ckptx.architecture.tied import StoredTensor, resolve_ties
    from ckptx.transfer.digest_sink import digest_tensor
    from ckptx.transfer.stream import TensorReader

    stored = {name: StoredTensor(entry.shape, entry.dtype.name) for name, entry in view.tensors.items()}
    reader = TensorReader(files)

    def digest_leaves(entry: TensorEntry) -> list[bytes]:
        return digest_tensor(reader, entry, entry.dtype).leaves

    def are_equal(a: str, b: str) -> bool:
        first, second = view.tensors[a], view.tensors[b]
        return first.chunks == second.chunks or digest_leaves(first) == digest_leaves(second)

    return resolve_ties(
        view.architecture, view.config, stored, are_equal, tie_missing=tie_missing, accepted_problems=accepted_problems
    )


def tie_entries(decisions: list[TieDecision]) -> list[dict[str, Any]]:
    """Return an entry of the report for each decision."""
    return [
        {
            "name": decision.target,
            "tied_to": decision.source,
            "stored": decision.stored,
            "action": decision.action,
            "declared": decision.declared,
            "evidence": decision.evidence,
        }
        for decision in decisions
    ]
