"""Compare the config that decides the order of rows with the one that `ckptx.json` records.

Under torchtitan's names, and under those of the model, some tensors hold the rows of the published ones in another
order, or several of them. The way back depends on numbers in config.json: heads, groups, sizes. A config that somebody
edited in between gives tensors of the right shape with the wrong rows, which nothing but the recorded digest tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptx.architecture.trainer_naming.detect import trainer_naming_of
from ckptx.catalog.manifest import Manifest
from ckptx.conversion.steps.base import BaseCheckpoint
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.errors import CkptxError, InputError
from ckptx.formats.hf.hf_metadata import source_of_config
from ckptx.formats.hf.reader import json_in
from ckptx.formats.sidecars import MANIFEST
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion
from ckptx.model_view.view import ModelView, manifest_beside, rules_of
from ckptx.storage.interface import Location, Source
from ckptx.transfer.digest import digest_bytes
from ckptx.untrusted.limits import METADATA_BYTES

_CONFIG = "config.json"


def check_recorded_config(view: ModelView, base: BaseCheckpoint, named: NamedTarget) -> None:
    """Check that the config orders rows as the one did under which the checkpoint was written.

    Args:
        view: The model in the source.
        base: The checkpoint that gives the config.
        named: The target in the names that it will have.

    Raises:
        InputError: The config is another one, and tensors are put together, taken apart or reordered by it.
    """
    manifest = manifest_beside(view.catalog, [])
    recorded = None if manifest is None else manifest.sidecars.get(_CONFIG)
    if view.config is None or manifest is None or recorded is None:
        return
    source = source_of_config(base.files_from)
    used = source.location / _CONFIG
    if _digest(source) == recorded.digest:
        return
    lost = _out_of_reach(view, manifest)
    depending = _depending_on_config(view, named) or lost
    if not depending:
        return
    own = source_of_config(view.catalog)
    if used == own.location / _CONFIG:
        raise InputError(
            f"{used}: is not the config that {MANIFEST} records, by which the elements of tensors were ordered "
            f"({_first(depending)}); restore it, or pass --base HF with the config that the tensors were written with"
        )
    if lost:
        raise InputError(
            f"{used}: is of a class under which these tensors have no published names ({_first(lost)}); pass --base HF "
            "with the model that they came from"
        )
    if _digest(own) == recorded.digest:
        _compare(view, used, json_in(own, _CONFIG))


def _depending_on_config(view: ModelView, named: NamedTarget) -> list[str]:
    """Names of tensors whose elements were ordered by numbers of a config, or are about to be."""
    rules, trainer_rules = rules_of(view), named.naming.rules
    own = [each for each in view.trainer_naming if _reads_config(each)]
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
    """True for a conversion with numbers of the config in it; others put together what the shapes alone tell."""
    return any(op.kind == "permute_rope" or (op.args and op.kind != "interleave") for op in conversion.ops)


def _patterns_of(view: ModelView) -> set[str]:
    """The patterns of the names, with the name of the base model in front and without."""
    patterns = set(map(pattern_of, view.tensors))
    if view.published is not None and view.published.base_prefix:
        prefix = f"{view.published.base_prefix}."
        patterns |= {prefix + each for each in patterns} | {each.removeprefix(prefix) for each in patterns}
    return patterns


def _out_of_reach(view: ModelView, manifest: Manifest) -> list[str]:
    """Names of tensors that were called otherwise in the original files, and that the class now has no names for."""
    original = manifest.original
    is_known = rules_of(view) is not None and len(view.unknown) < len(view.tensors)
    if original is None or view.trainer_naming or is_known:
        return []
    tied = {name for name, row in manifest.tensors.items() if row.tied_to is not None}
    return [entry.name for name, entry in view.tensors.items() if name not in original.tensors and name not in tied]


def _digest(source: Source) -> str | None:
    """The digest of a config as a manifest has it; None where there is none."""
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
                f'{used}: orders the elements of "{sources[0]}" by {_described(ops)}, the {_CONFIG} that was written '
                f"with the tensors by {_described(theirs[sources])}; pass --base HF with the model that they came from"
            )


def _operations(view: ModelView, config: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """The operations of each conversion that a config gives, by its sources and targets."""
    published = view.published
    if published is None:
        return {}
    found: list[Conversion] = []
    try:
        found += trainer_naming_of(published, config, view.catalog.tensors)
        found += published.conversions(config)
    except CkptxError:  # a config without the numbers: there is nothing to compare
        return {}
    return {(*each.sources, *each.targets): each.ops for each in found if each.ops}


def _described(ops: Iterable[Any]) -> str:
    return ", ".join(f"{op.kind} {list(op.args)}" for op in ops)


def _first(names: list[str]) -> str:
    return f'"{names[0]}"' + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")
