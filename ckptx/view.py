"""A checkpoint seen as the model in it: names without wrappers, optimizer state set apart, ties decided."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ckptx.architecture.find import find_architecture
from ckptx.architecture.spec import Architecture
from ckptx.architecture.tied import Stored, TieDecision, resolve_ties
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.manifest import read_manifest
from ckptx.formats.dcp import METADATA, open_payloads
from ckptx.formats.huggingface import refuse_adapters
from ckptx.formats.sidecars import MANIFEST
from ckptx.mapping.names import Roles, Unwrapped, assign_roles, pattern_of, strip_wrappers
from ckptx.storage import FilePool
from ckptx.transfer.digest import digest_bytes
from ckptx.transfer.sinks import digest_of
from ckptx.transfer.stream import TensorReader


@dataclass(slots=True)
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
        architecture: None when there is no config, or nothing is known about its class.
        unknown: Model tensors the architecture does not have; they pass through.
    """

    catalog: Catalog
    config: dict[str, Any] | None
    tensors: dict[str, TensorEntry]
    optimizer: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    prefix: str = ""
    wrappers: dict[str, int] = field(default_factory=dict)
    architecture: Architecture | None = None
    unknown: list[str] = field(default_factory=list)

    def nbytes(self, names: list[str]) -> int:
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
        UnsupportedError: The tensors are an adapter.
    """
    config = config if config is not None else catalog.config
    architecture = None
    if config is not None:
        architecture = find_architecture(config, config_dir=catalog.root, trust_remote_code=trust_remote_code)
    patterns = architecture.name_patterns if architecture is not None else frozenset()
    unwrapped, roles = _names_of_model(catalog, patterns, prefix)
    on_disk = {short: name for name, short in unwrapped.names.items()}
    tensors = {name: catalog.tensors[on_disk[full]] for name, full in roles.model.items()}
    names_by_pattern: dict[str, list[str]] = {}
    for name in tensors:
        names_by_pattern.setdefault(pattern_of(name), []).append(name)
    refuse_adapters(names_by_pattern, catalog.root)
    view = ModelView(
        catalog,
        config,
        tensors,
        [on_disk[name] for name in roles.optimizer],
        [on_disk[name] for name in roles.other],
        roles.prefix,
        unwrapped.counts,
        architecture,
    )
    if architecture is not None and patterns:
        unknown = {name for key, names in names_by_pattern.items() if not architecture.knows(key) for name in names}
        view.unknown = [name for name in tensors if name in unknown] if unknown else []
    return view


def _names_of_model(catalog: Catalog, patterns: frozenset[str], prefix: str | None) -> tuple[Unwrapped, Roles]:
    """Names without wrappers, and what is the model among them. In an HF checkpoint every name is, and as it is."""
    plain = Unwrapped({name: name for name in catalog.tensors}, {})
    as_they_are = plain, Roles("", plain.names, [], [])
    if catalog.format != "dcp":
        return as_they_are
    unwrapped = strip_wrappers(catalog.tensors, patterns)
    roles = assign_roles(unwrapped.names.values(), patterns or None, prefix)
    if unwrapped.counts or roles.optimizer or roles.other:
        manifest = manifest_beside(catalog, [])
        if manifest is not None and manifest["tensors"].keys() >= catalog.tensors.keys():
            return as_they_are  # it was made from an HF checkpoint: all of it is the model, however it is called
    if unwrapped.collision is not None:
        first, second = unwrapped.collision
        catalog.notes.append(f'wrappers kept in names: "{first}" and "{second}" would become one')
    return unwrapped, roles


def manifest_beside(source: Catalog, notes: list[str]) -> dict[str, Any] | None:
    """The manifest of a DCP that ckptx wrote from an HF checkpoint and nobody saved over since, or None.

    Raises:
        InputError: There is one, but it is damaged.
    """
    if not (source.root / MANIFEST).is_file() or not (source.root / METADATA).is_file():
        return None
    manifest = read_manifest(source.root / MANIFEST)
    if manifest.get("format") != "dcp" or manifest.get("origin") is None:
        return None
    data = (source.root / METADATA).read_bytes()
    if manifest["files"].get(METADATA) != {"bytes": len(data), "digest": digest_bytes(data)}:
        notes.append(f"{MANIFEST} describes another {METADATA}; ignored")
        return None
    return manifest


def locate_payloads(view: ModelView, files: FilePool) -> None:
    """Looks into the archives of the model's tensors, and of no other; formats without archives have nothing to do."""
    if view.catalog.format != "dcp":
        return
    names = {entry.name: name for name, entry in view.tensors.items()}
    located = open_payloads(replace(view.catalog, tensors={name: view.catalog.tensors[name] for name in names}), files)
    view.tensors = {short: located.tensors[name] for name, short in names.items()}
    view.catalog = replace(view.catalog, tensors=view.catalog.tensors | located.tensors)


def decide_ties(view: ModelView, files: FilePool, *, tie_missing: bool = False) -> list[TieDecision]:
    """Resolves every tied pair of the architecture against what is on disk; bytes are read only for pairs on disk.

    Raises:
        InputError: A tensor the model needs is missing and nothing says that it is tied.
    """
    if view.architecture is None or view.config is None:
        return []
    stored = {name: Stored(entry.shape, entry.dtype.name) for name, entry in view.tensors.items()}
    reader = TensorReader(files)

    def leaves_of(entry: TensorEntry) -> list[bytes]:
        return digest_of(reader, entry, entry.dtype).leaves

    def equal(a: str, b: str) -> bool:
        first, second = view.tensors[a], view.tensors[b]
        return first.chunks == second.chunks or leaves_of(first) == leaves_of(second)

    return resolve_ties(view.architecture, view.config, stored, equal, tie_missing=tie_missing)


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
