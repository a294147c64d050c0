"""Compare the config that decides the order of rows with the one that `ckptx.json` records.

Under torchtitan names and under model names, some tensors hold the rows of published tensors in another order, or
several of them. The inverse depends on numbers in config.json: heads, groups, sizes. With a config that was edited in
between, it gives tensors of the right shape with wrong rows, which only the recorded digest reveals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptx.architecture.trainer_naming.detect import find_trainer_conversions
from ckptx.catalog.manifest import Manifest
from ckptx.conversion.steps.base import BaseCheckpoint
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.errors import CkptxError, InputError
from ckptx.formats.hf.hf_metadata import config_source
from ckptx.formats.hf.reader import read_json_object
from ckptx.formats.sidecars import MANIFEST
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion
from ckptx.model_view.view import ModelView, read_valid_manifest, rules_of
from ckptx.storage.interface import Location, Source
from ckptx.transfer.digest import digest_bytes
from ckptx.untrusted.limits import METADATA_BYTES

_CONFIG = "config.json"


def check_recorded_config(view: ModelView, base: BaseCheckpoint, named: NamedTarget) -> None:
    """Check that the config gives the same order of rows as the one that the checkpoint was written with.

    Args:
        view: Model in the source.
        base: Checkpoint that the config comes from.
        named: Target tensors under their new names.

    Raises:
        InputError: The config is a different one, and tensors are combined, split or reordered by it.
    """
    manifest = read_valid_manifest(view.catalog, [])
    recorded = None if manifest is None else manifest.sidecars.get(_CONFIG)
    if view.config is None or manifest is None or recorded is None:
        return
    source = config_source(base.files_from)
    used = source.location / _CONFIG
    if _digest(source) == recorded.digest:
        return
    unnamed = _without_published_name(view, manifest)
    dependent = _dependent_on_config(view, named) or unnamed
    if not dependent:
        return
    source_config = config_source(view.catalog)
    if used == source_config.location / _CONFIG:
        raise InputError(
            f"{used}: differs from the config that {MANIFEST} records, which sets the order of elements in tensors "
            f"({_first(dependent)}); restore it, or pass --base HF with the config that the tensors were written with"
        )
    if unnamed:
        raise InputError(
            f"{used}: its class has no published names for these tensors ({_first(unnamed)}); pass --base HF with the "
            "model that they came from"
        )
    if _digest(source_config) == recorded.digest:
        _compare(view, used, read_json_object(source_config, _CONFIG))


def _dependent_on_config(view: ModelView, named: NamedTarget) -> list[str]:
    """Return the names of tensors whose element order depends on numbers of a config, in the source or the target."""
    rules, trainer_rules = rules_of(view), named.naming.rules
    own = [each for each in view.trainer_conversions if _reads_config(each)]
    models = [each for each in rules.conversions if _reads_config(each)] if rules is not None else []
    wanted = [each for each in trainer_rules.conversions if _reads_config(each)] if trainer_rules is not None else []
    found = [conversion.sources[0] for conversion in own]
    patterns = _patterns_of(view)
    for conversion in models:
        if not patterns.isdisjoint(conversion.targets) and patterns.isdisjoint(conversion.sources):
            found.append(conversion.targets[0])
    if not found and (models or wanted):
        stored = {id(entry.chunks) for entry in view.tensors.values()}
        source = named.target.source.tensors
        found = [name for name, old in named.target.source_names.items() if id(source[old].chunks) not in stored]
    return found


def _reads_config(conversion: Conversion) -> bool:
    """Return True for a conversion that uses numbers of the config; others depend on shapes alone."""
    return any(op.kind == "permute_rope" or (op.args and op.kind != "interleave") for op in conversion.ops)


def _patterns_of(view: ModelView) -> set[str]:
    """Return the patterns of the names, with and without the prefix of the base model."""
    patterns = set(map(pattern_of, view.tensors))
    if view.disk_architecture is not None and view.disk_architecture.base_prefix:
        prefix = f"{view.disk_architecture.base_prefix}."
        patterns |= {prefix + each for each in patterns} | {each.removeprefix(prefix) for each in patterns}
    return patterns


def _without_published_name(view: ModelView, manifest: Manifest) -> list[str]:
    """Return the tensors that had other names in the original files and have no published name under this class."""
    original = manifest.original
    is_known = rules_of(view) is not None and len(view.unknown) < len(view.tensors)
    if original is None or view.trainer_conversions or is_known:
        return []
    tied = {name for name, row in manifest.tensors.items() if row.tied_to is not None}
    return [entry.name for name, entry in view.tensors.items() if name not in original.tensors and name not in tied]


def _digest(source: Source) -> str | None:
    """Return the digest of a config in the form of the manifest; None if there is no config."""
    return digest_bytes(source.read_small(_CONFIG, METADATA_BYTES)) if source.listing().has(_CONFIG) else None


def _compare(view: ModelView, used: Location, written_with: Mapping[str, Any]) -> None:
    """Compare the operations that follow from a config with those that follow from the recorded one.

    Raises:
        InputError: They differ.
    """
    assert view.config is not None
    ours = _operations(view, view.config)
    theirs = _operations(view, written_with)
    for sources, ops in ours.items():
        if theirs.get(sources, ops) != ops:
            raise InputError(
                f'{used}: orders the elements of "{sources[0]}" by {_describe(ops)}, but the {_CONFIG} that the '
                f"tensors were written with by {_describe(theirs[sources])}; pass --base HF with the model that they "
                "came from"
            )


def _operations(view: ModelView, config: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """Map sources and targets of each conversion of a config to its operations."""
    published = view.disk_architecture
    if published is None:
        return {}
    found: list[Conversion] = []
    try:
        found += find_trainer_conversions(published, config, view.catalog.tensors)
        found += published.conversions(config)
    except CkptxError:  # the config lacks the numbers, so there is nothing to compare
        return {}
    return {(*each.sources, *each.targets): each.ops for each in found if each.ops}


def _describe(ops: Iterable[Any]) -> str:
    return ", ".join(f"{op.kind} {list(op.args)}" for op in ops)


def _first(names: list[str]) -> str:
    return f'"{names[0]}"' + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")
