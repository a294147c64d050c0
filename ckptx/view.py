"""A checkpoint seen as the model in it: names without wrappers, optimizer state set apart, ties decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptx.architecture.find import find_architecture
from ckptx.architecture.infer import infer_class
from ckptx.architecture.installed import note_on
from ckptx.architecture.shapes import shapes_of
from ckptx.architecture.spec import Architecture
from ckptx.architecture.trainer_naming.detect import in_trainer_naming, trainer_naming_of
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import whole
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.hf_metadata import directory_of_config
from ckptx.formats.hf.reader import refuse_adapters
from ckptx.formats.sidecars import MANIFEST
from ckptx.mapping.names import Roles, Unwrapped, assign_roles, pattern_of, strip_wrappers
from ckptx.mapping.ops import Conversion
from ckptx.mapping.quantization_scales import parent_of, with_scales_of_blocks
from ckptx.mapping.rules import NameRules
from ckptx.storage.files import FilePool, read_small
from ckptx.untrusted.limits import METADATA_BYTES

if TYPE_CHECKING:  # what looks at headers alone pays for nothing that reads tensors, nor for readers of other formats
    from ckptx.architecture.tied import TieDecision
    from ckptx.catalog.manifest import Manifest


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
    notes: tuple[str, ...] = ()
    _rules: list[NameRules | None] = field(default_factory=list, compare=False, repr=False)

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes of the tensors with these names on disk."""
        return sum(self.catalog.tensors[name].nbytes for name in names)


def view_model(
    catalog: Catalog,
    *,
    config: dict[str, Any] | None = None,
    prefix: str | None = None,
    trust_remote_code: bool = False,
) -> ModelView:
    """Finds the model in a checkpoint.

    Args:
        catalog: The checkpoint.
        config: Overrides the `config.json` beside it.
        prefix: Prefix of the model's names; None finds it.
        trust_remote_code: Allows code from the checkpoint to run, for classes transformers lacks.

    Raises:
        InputError: No tensor has the prefix.
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
            config, config_dir=directory_of_config(catalog), trust_remote_code=trust_remote_code
        )
    published = architecture
    trainer_naming: tuple[Conversion, ...] = ()
    if architecture is not None and config is not None:
        trainer_naming = trainer_naming_of(architecture, config, catalog.tensors)
        architecture = in_trainer_naming(architecture, trainer_naming) if trainer_naming else architecture
    patterns = architecture.name_patterns if architecture is not None else frozenset()
    unwrapped, roles = _names_of_model(catalog, patterns, prefix, notes)
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
        tuple(on_disk[name] for name in roles.other),
        roles.prefix,
        unwrapped.counts,
        architecture,
        published,
        trainer_naming,
        tuple(name for name in tensors if name in unknown) if unknown else (),
        tuple(notes),
    )


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
    catalog: Catalog, patterns: frozenset[str], prefix: str | None, notes: list[str]
) -> tuple[Unwrapped, Roles]:
    """Names without wrappers, and what is the model among them. In an HF checkpoint every name is, and as it is."""
    plain = Unwrapped({name: name for name in catalog.tensors}, {})
    as_they_are = plain, Roles("", plain.names, [], [])
    if not catalog.form.is_of_training:
        return as_they_are
    unwrapped = strip_wrappers(catalog.tensors, patterns)
    roles = assign_roles(unwrapped.names.values(), patterns or None, prefix)
    if unwrapped.counts or roles.optimizer or roles.other:
        manifest = manifest_beside(catalog, [])
        apart = {*roles.optimizer, *roles.other}
        doubtful = [name for name, short in unwrapped.names.items() if name != short or short in apart]
        if manifest is not None and _were_in_a_model(doubtful, catalog, manifest):
            return as_they_are
    if unwrapped.collision is not None:
        first, second = unwrapped.collision
        notes.append(f'wrappers kept in names: "{first}" and "{second}" would become one')
    return unwrapped, roles


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
        notes: Gets a line when there is a manifest that describes other files.

    Raises:
        InputError: There is one, but it is damaged.
    """
    if not source.form.has_manifest or not (source.root / MANIFEST).is_file():
        return None
    from ckptx.catalog.manifest import FileRecord
    from ckptx.catalog.manifest_parser import read_manifest
    from ckptx.formats.dcp.reader import METADATA
    from ckptx.transfer.digest import digest_bytes

    manifest = read_manifest(source.root / MANIFEST)
    if manifest.form is not source.form:
        return None
    recorded = manifest.files
    markers = [f"{part.directory}/{METADATA}" for part in source.parts] or [METADATA]
    for name in markers if source.form.has_archives else ():
        if not (source.root / name).is_file():  # a part in sharded safetensors, which ckptx does not write
            return None
        data = read_small(source.root / name, METADATA_BYTES)
        if recorded.get(name) != FileRecord(len(data), digest_bytes(data)):
            notes.append(f"{MANIFEST} describes another {name}; ignored")
            return None
    if any(name not in recorded or recorded[name].nbytes != size for name, size in source.files.items()):
        notes.append(f"{MANIFEST} describes other files; ignored")
        return None
    return manifest


def locate_payloads(view: ModelView, files: FilePool, *, later: bool = False) -> ModelView:
    """The view with every block of its tensors located; archives of other tensors are not looked into.

    `later` is as in `open_payloads`.
    """
    if not view.catalog.form.has_archives:
        return view
    from ckptx.formats.dcp.reader import open_payloads

    names = {entry.name: name for name, entry in view.tensors.items()}
    located = open_payloads(
        replace(view.catalog, tensors={name: view.catalog.tensors[name] for name in names}), files, later=later
    )
    tensors = {short: located.tensors[name] for name, short in names.items()}
    return replace(view, tensors=tensors, catalog=replace(view.catalog, tensors=view.catalog.tensors | located.tensors))


def locate_all(view: ModelView, files: FilePool, *, later: bool = False) -> ModelView:
    """The view with every block of its checkpoint located, those of optimizer state too."""
    from ckptx.formats.dcp.reader import open_payloads

    located = open_payloads(view.catalog, files, later=later)
    tensors = {name: located.tensors[entry.name] for name, entry in view.tensors.items()}
    return replace(view, tensors=tensors, catalog=located)


def compare_replicas(catalog: Catalog, files: FilePool) -> None:
    """Holds blocks that several ranks stored against each other.

    Raises:
        InputError: Two of them differ.
    """
    from ckptx.formats.sharded.reader import replica_pairs
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


def decide_ties(
    view: ModelView, files: FilePool, *, tie_missing: bool = False, accepted: list[str] | None = None
) -> list[TieDecision]:
    """Resolves every tied pair of the architecture against what is on disk; bytes are read only for pairs on disk.

    `accepted` is as in `resolve_ties`.

    Raises:
        InputError: A tensor the model needs is missing, nothing says that it is tied, and there is no `accepted`.
    """
    if view.architecture is None or view.config is None:
        return []
    from ckptx.architecture.tied import Stored, resolve_ties
    from ckptx.transfer.digest_sink import digest_of
    from ckptx.transfer.stream import TensorReader

    stored = {name: Stored(entry.shape, entry.dtype.name) for name, entry in view.tensors.items()}
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
