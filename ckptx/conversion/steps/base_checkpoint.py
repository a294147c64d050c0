"""Config of the source, and the checkpoint from which tokenizer and other files are copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.errors import InputError, ReadError, UnsupportedError
from ckptx.formats.dcp.megatron import is_torch_dist
from ckptx.formats.hf.hf_metadata import config_source, find_hf_metadata, read_config, read_hf_metadata
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sidecars import MANIFEST, list_sidecars
from ckptx.model_view.view import read_valid_manifest
from ckptx.options.conversion import ConversionOptions
from ckptx.publishing.output_checks import refuse_overlap
from ckptx.publishing.overwrite_checks import refuse_input_files
from ckptx.storage.files import is_regular_file
from ckptx.storage.interface import local_path
from ckptx.storage.listing import EntryKind
from ckptx.storage.local import LocalSource

# Behavior without a config. "none": convert. "unless recorded": convert only if the manifest of the source records
# original files without a config. "config": refuse, and name `--base none` as a way to convert without one. "always":
# refuse.
ConfigNeed = Literal["none", "unless recorded", "config", "always"]


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """Source, and the base: the checkpoint that the source was trained from, as far as it is known.

    Attributes:
        source: Source checkpoint, with its sidecar files.
        catalog: Checkpoint of `--base`, else the one that the trainer recorded in `.hf_metadata/`; None for neither.
        config: Config of the base, else the one next to the tensors; None if there is none, or if `uses_no_base`.
        dtypes: Tensor name in the base -> dtype; empty if unknown.
        file_numbers: Tensor name in the base -> number of its file, from 1; empty unless `.hf_metadata/` records it.
        uses_no_base: True with `--base none`, or if the output is an adapter. Then Megatron's names are not mapped to
            disk names, and no sidecar files are copied except those of Megatron's format.
        is_dequantized: True if the quantized weights of `source` are decoded.
        is_renamed: True if the tensors of `source` were renamed from Megatron's names to disk names.
        adapter_config: Contents of the `adapter_config.json` to write; None if the output is a model.
        is_merged: True if adapters are added to its weights.
        notes: Notes for the user.
    """

    source: Catalog
    catalog: Catalog | None
    config: dict[str, Any] | None
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    file_numbers: Mapping[str, int] = field(default_factory=dict)
    uses_no_base: bool = False
    is_dequantized: bool = False
    is_renamed: bool = False
    is_merged: bool = False
    adapter_config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def sidecar_source(self) -> Catalog:
        """Return the checkpoint that the sidecar files are copied from."""
        return self.catalog if self.catalog is not None else self.source


def find_base(source: Catalog, dst: Path, options: ConversionOptions, config_need: ConfigNeed) -> BaseCheckpoint:
    """Find the config of the source and the checkpoint it was trained from.

    Args:
        source: Source checkpoint.
        dst: Directory to write; must not contain files of the base.
        options: `base`, and the Hub options for it.
        config_need: Behavior when there is no config and `--base` is not set.

    Raises:
        InputError: There is no config although `config_need` requires one, or it is damaged.
        UnsupportedError: `--base` names a training checkpoint, such as a DCP.
        OutputError: `dst` overlaps the base.
    """
    base = _open_base(options)
    if base is not None:
        refuse_overlap(local_path(base.root), dst)
        refuse_input_files(base, dst)
        return BaseCheckpoint(source, base, base.config, {name: entry.dtype for name, entry in base.tensors.items()})
    if options.base == "none":
        note = "--base none: no config used; tied weights and name prefixes are not detected"
        if source.config is not None:
            note = f"--base none: {source.root}/config.json is read but not written; loaders need a config"
        return BaseCheckpoint(source, None, None, uses_no_base=True, notes=(note,))
    adjacent = _adjacent_base(source)
    if adjacent.config is not None:
        return adjacent
    if config_need == "none" and source.traits.is_adapter:
        return adjacent
    if config_need == "none":
        note = "no config.json: tied weights are not detected, no tensor is renamed or fused"
        return replace(adjacent, notes=(*adjacent.notes, note))
    if config_need == "unless recorded":
        return _base_without_config(adjacent)
    raise no_config_error(source, can_do_without=config_need == "config")


def no_config_error(source: Catalog, *, can_do_without: bool = True) -> InputError:
    """Return the error for a source without a config.

    Args:
        source: Source checkpoint.
        can_do_without: True if `--base none` would convert it without a config.
    """
    root = source.location
    if not can_do_without:
        return InputError(
            f"{root}: has no config.json, which gives the class, the heads and the vocabulary; pass --base PATH with "
            "an HF checkpoint whose config.json describes the model"
        )
    if is_torch_dist(source.source):
        return InputError(
            f"{root}: has no config.json, which mapping its Megatron-Core names to Hugging Face names requires; pass "
            "--base PATH with an HF checkpoint whose config.json describes the model, or --base none to keep the names"
        )
    return InputError(
        f"{root}: has no config.json, which names the architecture and its tied weights; pass --base PATH with an "
        "HF checkpoint whose config.json describes the model, or --base none to write tensors without a config"
    )


def _base_without_config(base: BaseCheckpoint) -> BaseCheckpoint:
    """Return the base of a source whose manifest records original files without a config.

    Sidecar files that the manifest records and that still exist are copied.

    Raises:
        InputError: No manifest records such files.
    """
    source = base.source
    notes: list[str] = []
    manifest = read_valid_manifest(source, notes)
    if manifest is None or manifest.original is None or "config.json" in manifest.sidecars:
        raise no_config_error(source)
    found_sidecars = list_sidecars(source.source, frozenset(source.files))
    sidecars = tuple(sidecar for sidecar in found_sidecars.copied if sidecar.name in manifest.sidecars)
    identities = {sidecar.name: found_sidecars.identities[sidecar.name] for sidecar in sidecars}
    note = f"no config.json: restoring the files that {MANIFEST} records; tied weights are not detected"
    return replace(
        base,
        source=replace(source, sidecars=sidecars, identities={**identities, **source.identities}),
        notes=(*base.notes, *notes, note),
    )


def _adjacent_base(source: Catalog) -> BaseCheckpoint:
    """Return the base recorded next to the tensors, in `.hf_metadata/` or as a config.

    Raises:
        InputError: `.hf_metadata/` is damaged.
    """
    directory = find_hf_metadata(source)
    if directory is None:
        return BaseCheckpoint(source, None, source.config)
    identities = directory.read_identities(directory.listing())
    metadata = read_hf_metadata(directory)
    if metadata.config is None:
        return BaseCheckpoint(source, None, source.config, metadata.dtypes, metadata.file_numbers)
    base = Catalog(
        directory.location,
        "huggingface",
        {},
        config=metadata.config,
        sidecars=metadata.sidecars,
        opened_source=directory,
    )
    base.identities = {**directory.read_identities(sidecar.name for sidecar in metadata.sidecars), **identities}
    note = f"using config, tokenizer and other files from {directory.location.name} in the source"
    return BaseCheckpoint(source, base, source.config, metadata.dtypes, metadata.file_numbers, notes=(note,))


def _open_base(options: ConversionOptions) -> Catalog | None:
    """Open the checkpoint of `--base`; None without one.

    Raises:
        InputError: It has no config.json.
        UnsupportedError: It is not an HF checkpoint.
    """
    if options.base in (None, "none"):
        return None
    try:
        root = resolve_source(
            str(options.base), revision=options.revision, token=options.token, cache_dir=options.cache_dir
        )
    except InputError as error:
        raise type(error)(f"--base {error}") from error
    if root.name == "config.json" and is_regular_file(root):
        root = root.parent
    source = LocalSource(root)
    if source.read_kind() is EntryKind.DIRECTORY and source.listing().is_file("config.json"):
        try:
            base = open_checkpoint(root)
        except ReadError:
            raise
        except InputError:
            # A directory with only config and tokenizer is a valid base.
            identities = source.read_identities(("config.json",))
            base = Catalog(root, "huggingface", {}, config=read_config(source), opened_source=source)
            found_sidecars = list_sidecars(source, frozenset())
            base.sidecars, base.identities = found_sidecars.copied, {**found_sidecars.identities, **identities}
    else:
        base = open_checkpoint(root)
    if base.config is None or config_source(base).location != base.root:
        raise InputError(f"{base.location}: has no config.json; --base requires an HF checkpoint")
    if base.traits.is_training_format:
        raise UnsupportedError(f"{base.location}: is of format {base.format}; --base requires an HF checkpoint")
    return base
