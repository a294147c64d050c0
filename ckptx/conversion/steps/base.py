"""The config that says what the tensors of a checkpoint are, and where the files beside the weights come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.dcp.megatron import is_torch_dist
from ckptx.formats.hf.hf_metadata import config_in, find_hf_metadata, read_hf_metadata, source_of_config
from ckptx.formats.hf.hub import resolve
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sidecars import MANIFEST, look_around
from ckptx.model_view.view import manifest_beside
from ckptx.options.conversion import ConversionOptions
from ckptx.publishing.output_place import refuse_overlap
from ckptx.publishing.replacing import refuse_files_of
from ckptx.storage.interface import local_path
from ckptx.storage.local import LocalSource

# What a conversion does without a config: go on, go on where a manifest says that there was none, refuse.
Need = Literal["none", "unless remembered", "config"]


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """What a checkpoint is a checkpoint of.

    Attributes:
        source: The checkpoint, with the files beside it that travel along.
        catalog: The checkpoint named by `--base`, else what the trainer left of it in `.hf_metadata/`, or None.
        config: That of the base, else the one beside the tensors; None with `--base none`.
        dtypes: Of the tensors of the base, by their names there.
        files: Tensor name -> number of its file in the base, where `.hf_metadata/` says so.
        is_none: True with `--base none`.
        notes: What the user should know.
    """

    source: Catalog
    catalog: Catalog | None
    config: dict[str, Any] | None
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    is_none: bool = False
    notes: tuple[str, ...] = ()

    @property
    def files_from(self) -> Catalog:
        """Where the files beside the weights come from."""
        return self.catalog if self.catalog is not None else self.source


def find_base(source: Catalog, dst: Path, options: ConversionOptions, need: Need) -> BaseCheckpoint:
    """Finds the config.

    Args:
        source: The source.
        dst: The directory to write, which must hold nothing of the base.
        options: `base` and what a Hub id of it needs.
        need: What to do where there is none.

    Raises:
        InputError: There is none, or it is damaged.
        UnsupportedError: `--base` names a DCP.
    """
    named = _open_base(options)
    if named is not None:
        refuse_overlap(local_path(named.root), dst)
        refuse_files_of(named, dst)
        return BaseCheckpoint(source, named, named.config, {name: entry.dtype for name, entry in named.tensors.items()})
    if options.base == "none":
        note = "--base none: no config, ties were not resolved and no prefix was looked for"
        return BaseCheckpoint(source, None, None, is_none=True, notes=(note,))
    beside = _base_beside(source)
    if beside.config is not None:
        return beside
    if need == "none":
        note = "no config.json: tied names are unknown, every tensor is converted as it is"
        return replace(beside, notes=(*beside.notes, note))
    if need == "unless remembered":
        return _without_config(beside)
    raise no_config(source)


def no_config(source: Catalog) -> InputError:
    """The error for tensors of an unknown model."""
    root = source.root
    if is_torch_dist(source.source):
        return InputError(
            f"{root}: has Megatron's own names, which are not mapped to published ones, and no config.json; pass "
            "--base none to write the tensors under their own names"
        )
    return InputError(
        f"{root}: has no config.json, which names the architecture and its ties; pass --base HF, the checkpoint it was "
        "trained from, or --base none to write the tensors alone"
    )


def _without_config(base: BaseCheckpoint) -> BaseCheckpoint:
    """The base of a source without a config, where a manifest remembers files that had none either.

    What lay beside them travels back, too: the manifest names it, and only what is found there is taken.

    Raises:
        InputError: No manifest does.
    """
    source = base.source
    notes: list[str] = []
    manifest = manifest_beside(source, notes)
    if manifest is None or manifest.original is None or "config.json" in manifest.sidecars:
        raise no_config(source)
    around = look_around(source.source, frozenset(source.files))
    sidecars = tuple(sidecar for sidecar in around.carried if sidecar.name in manifest.sidecars)
    found = {sidecar.name: around.identities[sidecar.name] for sidecar in sidecars}
    note = f"no config.json: the files are those that {MANIFEST} remembers, ties are unknown"
    return replace(
        base,
        source=replace(source, sidecars=sidecars, identities={**found, **source.identities}),
        notes=(*base.notes, *notes, note),
    )


def _base_beside(source: Catalog) -> BaseCheckpoint:
    """What lies beside the tensors: `.hf_metadata/`, or a config.

    Raises:
        InputError: It is damaged.
    """
    directory = find_hf_metadata(source)
    if directory is None:
        return BaseCheckpoint(source, None, source.config)
    before = directory.identities(directory.listing())
    found = read_hf_metadata(directory)
    if found.config is None:
        return BaseCheckpoint(source, None, source.config, found.dtypes, found.files)
    base = Catalog(
        directory.location, "huggingface", {}, config=found.config, sidecars=found.sidecars, storage=directory
    )
    base.identities = {**directory.identities(sidecar.name for sidecar in found.sidecars), **before}
    note = f"{directory.location.name} beside the tensors is the base: its config and other files are taken"
    return BaseCheckpoint(source, base, source.config, found.dtypes, found.files, notes=(note,))


def _open_base(options: ConversionOptions) -> Catalog | None:
    """The checkpoint whose config and sidecars the output gets."""
    if options.base in (None, "none"):
        return None
    root = resolve(str(options.base), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
    if root.is_dir() and (root / "config.json").is_file():
        try:
            base = open_checkpoint(root)
        except InputError:
            # Config and tokenizer alone are a base too.
            beside = LocalSource(root)
            before = beside.identities(("config.json",))
            base = Catalog(root, "huggingface", {}, config=config_in(beside), storage=beside)
            around = look_around(beside, frozenset())
            base.sidecars, base.identities = around.carried, {**around.identities, **before}
    else:
        base = open_checkpoint(root)
    if base.config is None or source_of_config(base).location != base.root:
        raise InputError(f"{base.root}: has no config.json; --base needs an HF checkpoint")
    if base.form.is_of_training:
        raise UnsupportedError(f"{base.root}: is of format {base.format}; --base requires an HF checkpoint")
    return base
