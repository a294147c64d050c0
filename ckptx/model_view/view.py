"""A checkpoint seen as the model in it: names without wrappers, optimizer state set apart, ties decided."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptx.architecture.find import find_architecture
from ckptx.architecture.infer import infer_class
from ckptx.architecture.installed import note_on
from ckptx.architecture.names_found import ModelNames, find_names, in_naming_of, known_names
from ckptx.architecture.shapes import shapes_of
from ckptx.architecture.spec import Architecture
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import whole
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.hf_metadata import directory_of_config
from ckptx.formats.hf.reader import refuse_adapters
from ckptx.formats.manifest_file import manifest_in
from ckptx.formats.sidecars import MANIFEST
from ckptx.mapping.duplicates import second_namings
from ckptx.mapping.models import Models, OtherModel, below, find_models, repeated_prefixes
from ckptx.mapping.names import Roles, UnwrappedNames, pattern_of
from ckptx.mapping.ops import Conversion
from ckptx.mapping.quantization_scales import parent_of, with_scales_of_blocks
from ckptx.mapping.rules import NameRules
from ckptx.storage.interface import Location, SourceFiles
from ckptx.untrusted.limits import METADATA_BYTES
from ckptx.wording import counted, first_of

if TYPE_CHECKING:  # what looks at headers alone pays for nothing that reads tensors, nor for readers of other formats
    from ckptx.architecture.tied import TieDecision
    from ckptx.catalog.manifest import Manifest
    from ckptx.transfer.stream import TensorReader


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model of one checkpoint.

    Attributes:
        catalog: Where it comes from.
        config: The config used: its own, or that of a base.
        tensors: Tensors of the model by name, in catalog order; an entry keeps the name it has on disk.
        optimizer: Names on disk of optimizer tensors.
        other: Names on disk of tensors that belong to neither.
        prefix: What was stripped from names.
        wrappers: How often each wrapper was removed from names.
        architecture: Under the names of the checkpoint. None when there is no config, or its class is unknown.
        published: The same under published names; another one only for a checkpoint in a trainer_naming.
        trainer_naming: From the names of the checkpoint to published ones, when they differ.
        unknown: Model tensors the architecture does not have; they pass through.
        others: Further models in the checkpoint, their names as on disk; `other` has these names, too.
        duplicates: Name on disk -> another name on disk that is the same without wrappers or prefix. Neither `tensors`
            nor `optimizer` and `other` have the first; only their bytes say whether the two are one tensor.
        notes: What the user should know: of the reader of the checkpoint, and of how the model was found.
    """

    catalog: Catalog
    config: dict[str, Any] | None
    tensors: dict[str, TensorEntry]
    optimizer: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    prefix: str = ""
    wrappers: dict[str, int] = field(default_factory=dict)
    architecture: Architecture | None = None
    published: Architecture | None = None
    trainer_naming: tuple[Conversion, ...] = ()
    unknown: tuple[str, ...] = ()
    others: tuple[OtherModel, ...] = ()
    duplicates: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    _rules: list[NameRules | None] = field(default_factory=list, compare=False, repr=False)

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the bytes of the tensors with these names on disk; bytes that names share count once."""
        entries = (self.catalog.tensors[name] for name in names)
        return sum({entry.place: entry.nbytes for entry in entries if entry.nbytes}.values())

    @property
    def model_duplicates(self) -> dict[str, str]:
        """Those of `duplicates` that are of the model."""
        stored = {entry.name for entry in self.tensors.values()} if self.duplicates else set()
        return {name: kept for name, kept in self.duplicates.items() if kept in stored}

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of the models in it, that of this one first."""
        return (self.prefix, *(each.prefix for each in self.others))

    def notes_on_others(self, done: str) -> tuple[str, ...]:
        """A note on each further model; `done` says what is not done with it."""
        return tuple(
            f"{each.description}: {counted(len(each.names), 'tensor')}, {done}; "
            f'choose it with --source-prefix "{each.prefix}"'
            for each in self.others
        )


def view_model(
    catalog: Catalog,
    *,
    config: dict[str, Any] | None = None,
    prefix: str | None = None,
    trust_remote_code: bool = False,
    may_be_any: bool = False,
) -> ModelView:
    """Finds the model in a checkpoint.

    Args:
        catalog: The checkpoint.
        config: Overrides the `config.json` beside it.
        prefix: Prefix of the model's names; None finds it.
        trust_remote_code: Allows code from the checkpoint to run, for classes transformers lacks.
        may_be_any: Takes one of several complete models, and notes that there are others.

    Raises:
        InputError: No tensor has the prefix, or there are several complete models and no prefix was given.
        UnsupportedError: The tensors are an adapter, or have a name that cannot be told from a pattern of names.
    """
    _refuse_stars(catalog)
    config = config if config is not None else catalog.config
    architecture = None
    notes = list(catalog.notes)
    if config is not None and config.get("architectures") in (None, []):
        config = _with_class(config, catalog, notes)
    if config is not None:
        architecture = find_architecture(
            config,
            config_dir=directory_of_config(catalog) if trust_remote_code else None,
            trust_remote_code=trust_remote_code,
        )
    found = _names_of_model(catalog, architecture, config, prefix, notes)
    published, architecture = architecture, found.architecture
    patterns = architecture.name_patterns if architecture is not None else frozenset()
    roles, unwrapped = found.models.roles, found.unwrapped
    if len(found.models.complete) > 1 and prefix is None and catalog.form.is_of_training:
        if not may_be_any:
            raise SeveralModels(catalog.root, found.models.complete)
        notes.append(f"{_said_of_several(found.models.complete)}; what follows is {below(roles.prefix)}")
    on_disk = {short: name for name, short in unwrapped.names.items()}
    tensors = {name: catalog.tensors[on_disk[full]] for name, full in roles.model.items()}
    names_by_pattern: dict[str, list[str]] = {}
    for name in tensors:
        names_by_pattern.setdefault(pattern_of(name), []).append(name)
    refuse_adapters(names_by_pattern, catalog.root)
    note = note_on(published)
    if note is not None:
        notes.append(note)
    unknown: set[str] = set()
    if architecture is not None and patterns:
        unknown = {name for key, names in names_by_pattern.items() if not architecture.knows(key) for name in names}
        if isinstance(config, dict) and "quantization_config" in config:
            unknown = {name for name in unknown if not _lies_beside_a_weight(name, architecture)}
    return ModelView(
        catalog,
        config,
        tensors,
        tuple(on_disk[name] for name in roles.optimizer),
        tuple(on_disk[name] for name in roles.other if name not in found.models.twins),
        roles.prefix,
        unwrapped.counts,
        architecture,
        published,
        found.trainer_naming,
        tuple(name for name in tensors if name in unknown) if unknown else (),
        tuple(each._replace(names=tuple(on_disk[name] for name in each.names)) for each in found.models.others),
        {**unwrapped.duplicates, **{on_disk[name]: on_disk[kept] for name, kept in found.models.twins.items()}},
        tuple(notes),
    )


def view_model_under(
    catalog: Catalog,
    prefix: str | None,
    *,
    config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> ModelView:
    """Finds the model under a prefix where the checkpoint has one there, else as `view_model`.

    For commands that look at two checkpoints and take one prefix: it chooses among the models of those that have it.

    Raises:
        InputError, UnsupportedError: As `view_model`.
    """
    if prefix is not None and catalog.form.is_of_training:
        view = view_model(catalog, config=config, trust_remote_code=trust_remote_code, may_be_any=True)
        is_known = len(view.unknown) < len(view.tensors) and view.architecture is not None
        if prefix in view.prefixes or (not is_known and any(name.startswith(prefix) for name in view.tensors)):
            return view_model(catalog, config=config, prefix=prefix, trust_remote_code=trust_remote_code)
    return view_model(catalog, config=config, trust_remote_code=trust_remote_code)


class SeveralModels(InputError):
    """A checkpoint holds several complete models, and nothing says which is meant."""

    def __init__(self, root: Location, prefixes: tuple[str, ...]) -> None:
        how = ' (--source-prefix "" takes the names without one)' if "" in prefixes else ""
        super().__init__(f"{root}: {_said_of_several(prefixes)}; choose one with --source-prefix{how}")


def _said_of_several(prefixes: tuple[str, ...]) -> str:
    first, *others = (below(prefix) for prefix in sorted(prefixes)[:8])
    more = f" and {len(prefixes) - 8} more" if len(prefixes) > 8 else ""
    return f"holds {len(prefixes)} complete models, {first} and {', '.join(others)}{more}"


def _refuse_stars(catalog: Catalog) -> None:
    """Refuses names with a component "*", which stands for an index wherever names are looked up."""
    for name in catalog.tensors:
        if "*" in name and "*" in name.split("."):
            raise UnsupportedError(
                f'{catalog.root}: tensor "{name}": "*" stands for an index in patterns of names; rename the tensor'
            )


def _lies_beside_a_weight(name: str, architecture: Architecture) -> bool:
    return parent_of(name, lambda weight: architecture.knows(pattern_of(weight))) is not None


def _with_class(config: dict[str, Any], catalog: Catalog, notes: list[str]) -> dict[str, Any]:
    """The config, with the class that the names of the tensors tell where it says the model type alone."""
    inferred = infer_class(config, catalog.tensors)
    if inferred is None:
        return config
    notes.append(inferred.note)
    return {**config, "architectures": [inferred.class_name]}


def _names_of_model(
    catalog: Catalog,
    published: Architecture | None,
    config: dict[str, Any] | None,
    prefix: str | None,
    notes: list[str],
) -> ModelNames:
    """The names of a checkpoint as they are looked at. In an HF checkpoint every name is one of the model, as it is."""
    plain = UnwrappedNames({name: name for name in catalog.tensors}, {})
    as_they_are = plain, Models(Roles("", plain.names, [], []))
    if not catalog.form.is_of_training:
        architecture, trainer_naming = in_naming_of(published, config, catalog.tensors)
        others = find_models(as_they_are[1].roles, known_names(architecture, config), is_given=False).others
        notes.extend(
            f"holds a second complete model {below(each.prefix)}, {counted(len(each.names), 'tensor')}, taken as "
            "tensors that the class does not have"
            for each in others
            if each.is_complete
        )
        return ModelNames(*as_they_are, architecture, trainer_naming)
    found = find_names(catalog.tensors, published, config, prefix)
    unwrapped, models = found.unwrapped, found.models
    roles = models.roles
    if unwrapped.counts or unwrapped.duplicates or roles.optimizer or roles.other:
        manifest = manifest_beside(catalog, notes)
        apart = {*roles.optimizer, *roles.other}
        doubtful = [name for name, short in unwrapped.names.items() if name != short or short in apart]
        doubtful += unwrapped.duplicates
        if manifest is not None and _were_in_a_model(doubtful, catalog, manifest):
            return found._replace(unwrapped=plain, models=as_they_are[1])
    if unwrapped.kept:
        notes.append(
            f'"module." kept in {counted(len(unwrapped.kept), "name")}, as the names without it are there, too: '
            f"{first_of(unwrapped.kept)}"
        )
    if prefix is None and (found.architecture is None or not found.architecture.name_patterns):
        repeated = repeated_prefixes(roles.model)
        if repeated:
            notes.append(
                f"the same names under {', '.join(map(json.dumps, repeated[:8]))}, as of "
                f"{counted(len(repeated), 'model')} of an unknown class: all are taken; choose one with --source-prefix"
            )
    return found


def _were_in_a_model(names: list[str], catalog: Catalog, manifest: Manifest) -> bool:
    """True when the checkpoint was made from an HF checkpoint that held `names`, however they are called."""
    rows, original = manifest.tensors, manifest.original
    if original is None or not rows.keys() >= catalog.tensors.keys():
        return False
    return all(name in original.tensors or rows[name].tied_to is not None for name in names)


def rules_of(view: ModelView) -> NameRules | None:
    """The rules between published names and those of the model; None when the class is unknown.

    What they look up they keep, so all who ask about a view share them.
    """
    if not view._rules:
        view._rules.append(_rules_between(view.published, view.config))
    return view._rules[0]


def has_model_names(view: ModelView) -> bool:
    """True when the tensors have the names of the model, as in what a trainer saves; published ones may be others."""
    rules = rules_of(view)
    return view.catalog.form.has_model_names or (rules is not None and rules.are_model_names(view.tensors))


def _rules_between(architecture: Architecture | None, config: dict[str, Any] | None) -> NameRules | None:
    if architecture is None or config is None or not architecture.name_patterns:
        return None
    conversions = with_scales_of_blocks(architecture.conversions(config), config)
    return NameRules(
        conversions, architecture.base_prefix, architecture.model_names, shape_of=shapes_of(architecture, config)
    )


def trainer_rules(conversions: tuple[Conversion, ...]) -> NameRules:
    """The rules between a trainer_naming and published names."""
    patterns = {name for conversion in conversions for name in conversion.targets}
    return NameRules(conversions, "", patterns - {name for each in conversions for name in each.sources})


def manifest_beside(source: Catalog, notes: list[str]) -> Manifest | None:
    """The manifest of a checkpoint that ckptx wrote and nobody saved over since, or None.

    Args:
        source: A DCP or sharded safetensors.
        notes: Receives one line if there is a manifest that is ignored: it is damaged, or describes other files.
    """
    manifest = manifest_in(source.source, notes) if source.form.has_manifest else None
    if manifest is None or manifest.form is not source.form:
        return None
    from ckptx.catalog.manifest import FileRecord
    from ckptx.formats.dcp.reader import METADATA
    from ckptx.transfer.digest import digest_bytes

    recorded = manifest.files
    markers = [f"{part.directory}/{METADATA}" for part in source.parts] or [METADATA]
    for name in markers if source.form.has_archives else ():
        if not source.source.listing().is_file(name):  # a part in sharded safetensors, which ckptx does not write
            return None
        data = source.source.read_small(name, METADATA_BYTES)
        if recorded.get(name) != FileRecord(len(data), digest_bytes(data)):
            notes.append(f"{MANIFEST} describes another {name}; ignored")
            return None
    if any(name not in recorded or recorded[name].nbytes != size for name, size in source.files.items()):
        notes.append(f"{MANIFEST} describes other files; ignored")
        return None
    return manifest


def locate_archives(view: ModelView, files: SourceFiles, *, lazy: bool = False) -> ModelView:
    """The view with every block of its tensors located; archives of other tensors are not looked into.

    `lazy` is as in `open_payloads`.
    """
    if not view.catalog.form.has_archives:
        return view
    from ckptx.formats.dcp.reader import open_payloads

    names = {entry.name: name for name, entry in view.tensors.items()}
    wanted = (*names, *view.model_duplicates)
    located = open_payloads(
        replace(view.catalog, tensors={name: view.catalog.tensors[name] for name in wanted}), files, lazy=lazy
    )
    tensors = {short: located.tensors[name] for name, short in names.items()}
    return replace(view, tensors=tensors, catalog=replace(view.catalog, tensors=view.catalog.tensors | located.tensors))


def locate_all(view: ModelView, files: SourceFiles, *, lazy: bool = False) -> ModelView:
    """The view with every block of its checkpoint located, those of optimizer state too."""
    from ckptx.formats.dcp.reader import open_payloads

    located = open_payloads(view.catalog, files, lazy=lazy)
    tensors = {name: located.tensors[entry.name] for name, entry in view.tensors.items()}
    return replace(view, tensors=tensors, catalog=located)


def compare_replicas(catalog: Catalog, files: SourceFiles) -> None:
    """Holds blocks that several ranks stored against each other.

    Raises:
        InputError: Two of them differ.
    """
    from ckptx.formats.assembly import replica_pairs
    from ckptx.transfer.digest_sink import digest_of
    from ckptx.transfer.stream import TensorReader

    reader = TensorReader(files)
    known: dict[Chunk, list[bytes]] = {}

    def leaves_of(entry: TensorEntry, chunk: Chunk) -> list[bytes]:
        """Of a block, as a tensor of its own."""
        alone = TensorEntry(
            entry.name, entry.dtype, chunk.region.sizes, (chunk._replace(region=whole(chunk.region.sizes)),)
        )
        return digest_of(reader, alone, entry.dtype).leaves

    for entry, kept, replica in replica_pairs(catalog):
        if kept not in known:
            known = {kept: leaves_of(entry, kept)}
        if leaves_of(entry, replica) != known[kept]:
            raise InputError(
                f'{catalog.root}: tensor "{entry.name}": {replica.file} holds other bytes for {replica.region} than '
                f"{kept.file}; one of them is of another save, restore it"
            )


def resolve_duplicates(view: ModelView, files: SourceFiles, *, with_state: bool) -> ModelView:
    """Compares what is in the checkpoint under two names; the view has a note on what is one tensor.

    Two names are those of one tensor when they differ in nothing but wrappers and the prefix, or when the rules of the
    class rename both to the same name.

    Args:
        view: The model, every block of it located; with `with_state`, those of its state, too.
        files: Its files.
        with_state: Look at state, too.

    Raises:
        InputError: Two of them are different tensors.
    """
    duplicates = dict(view.duplicates) if with_state else view.model_duplicates
    rules = rules_of(view)
    if rules is not None and not view.trainer_naming:
        stored = {name: entry.name for name, entry in view.tensors.items()}
        duplicates |= {stored[name]: stored[kept] for name, kept in second_namings(rules, view.tensors).items()}
    if not duplicates:
        return view
    from ckptx.transfer.stream import TensorReader

    reader = TensorReader(files)
    for name, kept in duplicates.items():
        what = _difference(reader, view.catalog.tensors[kept], view.catalog.tensors[name])
        if what is not None:
            is_outside = bool(view.prefix) and kept == view.prefix + name
            way_out = f'choose the first with --source-prefix "{view.prefix}"' if is_outside else "remove one of them"
            raise InputError(
                f'{view.catalog.root}: tensors "{kept}" and "{name}" are one parameter under two names, but {what}; '
                f"{way_out}"
            )
    names = list(duplicates)
    note = f"{counted(len(names), 'tensor')} stored under two names with equal bytes, taken once: {first_of(names)}"
    return replace(
        view,
        tensors={name: entry for name, entry in view.tensors.items() if entry.name not in duplicates},
        unknown=tuple(name for name in view.unknown if view.tensors[name].name not in duplicates),
        duplicates={**view.duplicates, **duplicates},
        notes=(*view.notes, note),
        _rules=view._rules,
    )


def _difference(reader: TensorReader, a: TensorEntry, b: TensorEntry) -> str | None:
    """Return the first property in which two tensors differ; None if they have the same bytes."""
    from ckptx.transfer.digest_sink import digest_of

    if a.dtype is not b.dtype:
        return f"have different dtypes, {a.dtype.name} and {b.dtype.name}"
    if a.shape != b.shape:
        return f"have different shapes, {list(a.shape)} and {list(b.shape)}"
    if a.chunks == b.chunks or digest_of(reader, a, a.dtype).leaves == digest_of(reader, b, b.dtype).leaves:
        return None
    return "hold different bytes"


def decide_ties(
    view: ModelView, files: SourceFiles, *, tie_missing: bool = False, accepted: list[str] | None = None
) -> list[TieDecision]:
    """Resolves every tied pair of the architecture against what is on disk; bytes are read only for pairs on disk.

    `accepted` is as in `resolve_ties`.

    Raises:
        InputError: A tensor the model needs is missing, nothing says that it is tied, and there is no `accepted`.
    """
    if view.architecture is None or view.config is None:
        return []
    from ckptx.architecture.tied import StoredTensor, resolve_ties
    from ckptx.transfer.digest_sink import digest_of
    from ckptx.transfer.stream import TensorReader

    stored = {name: StoredTensor(entry.shape, entry.dtype.name) for name, entry in view.tensors.items()}
    reader = TensorReader(files)

    def leaves_of(entry: TensorEntry) -> list[bytes]:
        return digest_of(reader, entry, entry.dtype).leaves

    def equal(a: str, b: str) -> bool:
        first, second = view.tensors[a], view.tensors[b]
        return first.chunks == second.chunks or leaves_of(first) == leaves_of(second)

    return resolve_ties(view.architecture, view.config, stored, equal, tie_missing=tie_missing, accepted=accepted)


def tie_rows(decisions: list[TieDecision]) -> list[dict[str, Any]]:
    """Decisions as the report shows them."""
    return [
        {
            "target": decision.target,
            "source": decision.source,
            "case": decision.case,
            "action": decision.action,
            "declared": decision.declared,
            "evidence": decision.evidence,
        }
        for decision in decisions
    ]
