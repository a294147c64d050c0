"""The config that says what the tensors of a checkpoint are, and where the files beside the weights come from."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.conversion.run import Conversion
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hub import resolve
from ckptx.formats.huggingface import read_json
from ckptx.formats.megatron import is_torch_dist
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sidecars import look_around
from ckptx.options import ConvertOptions
from ckptx.output_place import refuse_overlap
from ckptx.replacing import refuse_files_of


class Home(NamedTuple):
    """What a checkpoint is a checkpoint of.

    Attributes:
        base: The checkpoint named by `--base`, or None.
        config: That of the base, else the one beside the tensors; None with `--base none`.
    """

    base: Catalog | None
    config: dict[str, Any] | None


def home_of(run: Conversion) -> Home:
    """Finds the config.

    Raises:
        InputError: There is none.
    """
    base = _open_base(run.options)
    if base is not None:
        refuse_overlap(base.root, run.dst)
        refuse_files_of(base, run.dst)
        run.beside.append(base)
        return Home(base, base.config)
    if run.options.base == "none":
        run.report.warnings.append("--base none: no config, ties were not resolved and no prefix was looked for")
        return Home(None, None)
    if run.source.config is None and is_torch_dist(run.source.root):
        raise InputError(
            f"{run.source.root}: has Megatron's own names, which are not mapped to published ones, and no config.json; "
            "pass --base none to write the tensors under their own names"
        )
    if run.source.config is None:
        raise InputError(
            f"{run.source.root}: has no config.json, which names the architecture and its ties; pass --base HF, the "
            "checkpoint it was trained from, or --base none to write the tensors alone"
        )
    return Home(None, run.source.config)


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
            base = Catalog(root, "huggingface", {}, config=read_json(root / "config.json"))
            base.sidecars = look_around(root, frozenset()).carried
    else:
        base = open_checkpoint(root)
    if base.config is None:
        raise InputError(f"{base.root}: has no config.json; --base needs an HF checkpoint")
    if base.format == "dcp":
        raise UnsupportedError(f"{base.root}: is a DCP; --base needs an HF checkpoint")
    return base
