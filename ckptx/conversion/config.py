"""The config that says what the tensors of a checkpoint are, and where the files beside the weights come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.conversion.run import Conversion
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.dcp.megatron import is_torch_dist
from ckptx.formats.hf.hf_metadata import DIRECTORY, directory_of_config, find_hf_metadata, read_hf_metadata
from ckptx.formats.hf.hub import resolve
from ckptx.formats.hf.reader import read_json
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sidecars import MANIFEST, look_around
from ckptx.options import ConvertOptions
from ckptx.publishing.output_place import refuse_overlap
from ckptx.publishing.replacing import refuse_files_of
from ckptx.storage.files import identities
from ckptx.view import manifest_beside


class Home(NamedTuple):
    """What a checkpoint is a checkpoint of.

    Attributes:
        base: The checkpoint named by `--base`, else what the trainer left of it in `.hf_metadata/`, or None.
        config: That of the base, else the one beside the tensors; None with `--base none`.
        dtypes: Of the tensors of the base, by their names there.
        files: Tensor name -> number of its file in the base, where `.hf_metadata/` says so.
    """

    base: Catalog | None
    config: dict[str, Any] | None
    dtypes: Mapping[str, DType] = {}
    files: Mapping[str, int] = {}


def home_of(run: Conversion, *, needs_config: bool = True) -> Home:
    """Finds the config.

    Args:
        run: The conversion.
        needs_config: False when it can do without where a manifest remembers the files of a checkpoint that had none.

    Raises:
        InputError: There is none.
    """
    base = _open_base(run.options)
    if base is not None:
        refuse_overlap(base.root, run.dst)
        refuse_files_of(base, run.dst)
        run.beside.append(base)
        return Home(base, base.config, {name: entry.dtype for name, entry in base.tensors.items()})
    if run.options.base == "none":
        run.report.warnings.append("--base none: no config, ties were not resolved and no prefix was looked for")
        return Home(None, None)
    home = home_beside(run)
    if home.config is None and (needs_config or not _never_had_one(run)):
        raise no_config(run.source.root)
    return home


def no_config(root: Path) -> InputError:
    """The error for tensors of an unknown model."""
    if is_torch_dist(root):
        return InputError(
            f"{root}: has Megatron's own names, which are not mapped to published ones, and no config.json; pass "
            "--base none to write the tensors under their own names"
        )
    return InputError(
        f"{root}: has no config.json, which names the architecture and its ties; pass --base HF, the checkpoint it was "
        "trained from, or --base none to write the tensors alone"
    )


def _never_had_one(run: Conversion) -> bool:
    """True when the manifest remembers the files of an HF checkpoint that had no config either.

    What lay beside them travels back, too: the manifest names it, and only what is found there is taken.
    """
    source = run.source
    manifest = manifest_beside(source, [])
    if manifest is None or manifest.original is None or "config.json" in manifest.sidecars:
        return False
    around = look_around(source.root, frozenset(source.files)).carried
    sidecars = tuple(sidecar for sidecar in around if sidecar.name in manifest.sidecars)
    found = identities(source.root, (sidecar.name for sidecar in sidecars))
    run.source = replace(source, sidecars=sidecars, identities={**found, **source.identities})
    run.report.warnings.append(f"no config.json: the files are those that {MANIFEST} remembers, ties are unknown")
    return True


def home_beside(run: Conversion) -> Home:
    """What lies beside the tensors: `.hf_metadata/`, or a config.

    Raises:
        InputError: It is damaged.
    """
    source = run.source
    directory = find_hf_metadata(source)
    if directory is None:
        return Home(None, source.config)
    before = identities(directory, os.listdir(directory))
    found = read_hf_metadata(directory)
    base = None
    if found.config is not None:
        base = Catalog(found.root, "huggingface", {}, config=found.config, sidecars=found.sidecars)
        base.identities = {**identities(found.root, (sidecar.name for sidecar in found.sidecars)), **before}
        run.beside.append(base)
        run.report.warnings.append(f"{DIRECTORY} beside the tensors is the base: its config and other files are taken")
    return Home(base, source.config, found.dtypes, found.files)


def _open_base(options: ConvertOptions) -> Catalog | None:
    """The checkpoint whose config and sidecars the output gets."""
    if options.base in (None, "none"):
        return None
    root = resolve(str(options.base), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
    if root.is_dir() and (root / "config.json").is_file():
        try:
            base = open_checkpoint(root)
        except InputError:
            # Config and tokenizer alone are a base too.
            base = Catalog(root, "huggingface", {}, identities=identities(root, ("config.json",)))
            base.config = read_json(root / "config.json")
            base.sidecars = look_around(root, frozenset()).carried
            base.identities = {**identities(root, (sidecar.name for sidecar in base.sidecars)), **base.identities}
    else:
        base = open_checkpoint(root)
    if base.config is None or directory_of_config(base) != base.root:
        raise InputError(f"{base.root}: has no config.json; --base needs an HF checkpoint")
    if base.format == "dcp":
        raise UnsupportedError(f"{base.root}: is a DCP; --base needs an HF checkpoint")
    return base
