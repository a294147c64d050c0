"""Check that config.json is the one that the tensors were converted with, whose digest `ckptx.json` records.

Under torchtitan names and under model names (state dict of transformers), some tensors are permuted or fused versions
of the tensors with disk names (as on the Hub). Undoing this depends on numbers in config.json: heads, groups, sizes.
With a config that was edited in between, it gives tensors of the right shape with rows in a wrong order, which only the
recorded digest of the config reveals. A manifest does not record these numbers, so that a config of the base can be
compared only if the config of the source still has the recorded digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptx.architecture.trainer_naming.detect import find_trainer_conversions
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.manifest import FileRecord, Manifest
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.errors import CkptxError, InputError
from ckptx.formats.hf.hf_metadata import config_source
from ckptx.formats.hf.reader import read_json_object
from ckptx.formats.manifest_file import read_manifest
from ckptx.formats.sidecars import MANIFEST
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion, Op
from ckptx.model_view.view import ModelView, read_valid_manifest, rules_of
from ckptx.storage.interface import Location, Source
from ckptx.transfer.digest import bytes_digest_hex
from ckptx.untrusted.limits import MAX_METADATA_BYTES

_CONFIG = "config.json"


def check_recorded_config(view: ModelView, base: BaseCheckpoint, named_target: NamedTarget) -> None:
    """Check that the config gives the same order of rows as the one that the checkpoint was written with.

    It returns without a check if there is no config or no recorded digest, or if no order depends on the config. If the
    config is that of the base, the two are compared only if the source still has the recorded config next to it.

    Args:
        view: Model in the source.
        base: Source and base, see `BaseCheckpoint`.
        named_target: Target tensors under their new names.

    Raises:
        InputError: The config of the source is not the recorded one, and the order of rows depends on it; or the config
            of the base gives operations that differ from those of the recorded one, or has no disk names for tensors of
            the source.
    """
    # Other steps add the note on a manifest that is ignored, which this list receives.
    manifest = read_valid_manifest(view.catalog, notes=[])
    recorded = None if manifest is None else manifest.sidecars.get(_CONFIG)
    if view.config is None or manifest is None or recorded is None:
        return
    source = config_source(base.sidecar_source)
    config_path = source.location / _CONFIG
    if _config_digest(source) == recorded.digest:
        return
    without_disk_name = _tensors_without_disk_name(view, manifest)
    config_dependent = _config_dependent_tensors(view, named_target) or without_disk_name
    if not config_dependent:
        return
    source_config = config_source(view.catalog)
    if config_path == source_config.location / _CONFIG:
        raise InputError(
            f"{config_path}: differs from the config that {MANIFEST} records, which sets the order of rows in "
            f"tensors ({_name_first(config_dependent)}); restore it, or pass --base PATH with the config that the "
            "tensors were written with"
        )
    if without_disk_name:
        raise InputError(
            f"{config_path}: its class has no disk names (as on the Hub) for tensors of the checkpoint "
            f"({_name_first(without_disk_name)}); pass --base PATH with the model that they came from"
        )
    if _config_digest(source_config) == recorded.digest:
        _compare_operations(view, config_path, read_json_object(source_config, _CONFIG))


def check_megatron_config(base: BaseCheckpoint) -> None:
    """Check that the config has the heads of the one that ckptx wrote a Megatron checkpoint with.

    The rows of `linear_qkv` are in groups of heads. Nothing is compared without a manifest that records the config, or
    if the recorded config is neither next to the tensors nor the one to use.

    Args:
        base: Source with Megatron's names, and the config to use.

    Raises:
        InputError: The heads differ, or the config next to the tensors was changed and is the one to use.
    """
    recorded = _recorded_megatron_config(base.source)
    source = config_source(base.sidecar_source)
    if base.config is None or recorded is None or _config_digest(source) == recorded.digest:
        return
    config_path, source_config = source.location / _CONFIG, config_source(base.source)
    if config_path == source_config.location / _CONFIG:
        raise InputError(
            f"{config_path}: differs from the config that {MANIFEST} records, whose numbers of heads set the order of "
            "rows in linear_qkv; restore it, or pass --base PATH with the config that the tensors were written with"
        )
    if _config_digest(source_config) != recorded.digest:
        return
    heads, recorded_heads = (_heads_of(each) for each in (base.config, read_json_object(source_config, _CONFIG)))
    if heads is not None and recorded_heads is not None and heads != recorded_heads:
        raise InputError(
            f"{config_path}: has {_describe_heads(heads)}, but the tensors were written with a {_CONFIG} that has "
            f"{_describe_heads(recorded_heads)}, and the order of rows in linear_qkv depends on them; pass --base PATH "
            "with the model that they came from"
        )


def _recorded_megatron_config(catalog: Catalog) -> FileRecord | None:
    """Return the record of the config in the manifest of a `to-megatron` output, which is above its `release/`.

    None without a manifest of these tensors.
    """
    from ckptx.formats.dcp.reader import METADATA

    source = catalog.source
    manifest = read_manifest(source.with_location(source.location.parent), [])
    if manifest is None or not source.listing().is_file(METADATA):
        return None
    data, directory = source.read_small(METADATA, MAX_METADATA_BYTES), source.location.name
    if manifest.files.get(f"{directory}/{METADATA}") != FileRecord(len(data), bytes_digest_hex(data)):
        return None
    return manifest.sidecars.get(f"{directory}/{_CONFIG}")


def _heads_of(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return heads, key-value heads and size of a head; None if the config lacks one, as with latent attention."""
    from ckptx.architecture.trainer_naming.megatron import head_counts

    try:
        return head_counts(config)
    except InputError:
        return None


def _describe_heads(heads: tuple[int, int, int]) -> str:
    return f"{heads[0]} heads and {heads[1]} key-value heads of {heads[2]}"


def _config_dependent_tensors(view: ModelView, named_target: NamedTarget) -> list[str]:
    """Return names or patterns of tensors whose order of rows depends on numbers of a config, for a message.

    They are one pattern for each such rule (`Conversion`) of the source names; if there is none, the names of target
    tensors that the command combines, splits or reorders. Empty if no order depends on the config.
    """
    rules, target_rules = rules_of(view), named_target.naming.rules
    trainer_conversions = [each for each in view.trainer_conversions if _reads_config(each)]
    model_conversions = [each for each in rules.conversions if _reads_config(each)] if rules is not None else []
    target_conversions = (
        [each for each in target_rules.conversions if _reads_config(each)] if target_rules is not None else []
    )
    found = [conversion.sources[0] for conversion in trainer_conversions]
    patterns = _name_patterns(view)
    for conversion in model_conversions:
        if not patterns.isdisjoint(conversion.targets) and patterns.isdisjoint(conversion.sources):
            found.append(conversion.targets[0])
    if not found and (model_conversions or target_conversions):
        stored = {id(entry.chunks) for entry in view.tensors.values()}  # a tensor that is only renamed keeps its chunks
        source = named_target.target.source.tensors
        found = [name for name, old in named_target.target.source_names.items() if id(source[old].chunks) not in stored]
    return found


def _reads_config(conversion: Conversion) -> bool:
    """Return True for a conversion that may use numbers of the config; others depend on shapes only.

    Such numbers are arguments of an operation. The argument of `interleave`, which only means its inverse, does not
    count; the flag of `transpose` and the number of parts of `chunk` do, although they need not come from the config.
    """
    return any(op.args and op.kind != "interleave" for op in conversion.ops)


def _name_patterns(view: ModelView) -> set[str]:
    """Return the patterns of the names, with and without `base_model_prefix` of transformers, such as `model.`."""
    patterns = set(map(pattern_of, view.tensors))
    if view.disk_architecture is not None and view.disk_architecture.base_prefix:
        prefix = f"{view.disk_architecture.base_prefix}."
        patterns |= {prefix + each for each in patterns} | {each.removeprefix(prefix) for each in patterns}
    return patterns


def _tensors_without_disk_name(view: ModelView, manifest: Manifest) -> list[str]:
    """Return the tensors that had other names in the original files and have no disk name under this class."""
    original = manifest.original
    is_known = rules_of(view) is not None and len(view.unknown) < len(view.tensors)
    if original is None or view.trainer_conversions or is_known:
        return []
    tied = {name for name, row in manifest.tensors.items() if row.tied_to is not None}
    return [entry.name for name, entry in view.tensors.items() if name not in original.tensors and name not in tied]


def _config_digest(source: Source) -> str | None:
    """Return the digest of config.json as manifests record it, in hex; None if there is no config."""
    return bytes_digest_hex(source.read_small(_CONFIG, MAX_METADATA_BYTES)) if source.listing().has(_CONFIG) else None


def _compare_operations(view: ModelView, config_path: Location, recorded_config: Mapping[str, Any]) -> None:
    """Compare the operations that follow from a config with those that follow from the recorded one.

    Raises:
        InputError: They differ.
    """
    assert view.config is not None
    operations = _operations(view, view.config)
    recorded_operations = _operations(view, recorded_config)
    for sources, ops in operations.items():
        if recorded_operations.get(sources, ops) != ops:
            raise InputError(
                f"{config_path}: {_describe_difference(sources[0], ops, recorded_operations[sources])}; pass --base "
                "PATH with the model that they came from"
            )


def _operations(view: ModelView, config: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """Map sources and targets of each conversion of a config to its operations.

    Empty if the class is unknown, or if the config lacks a number that a conversion needs.
    """
    architecture = view.disk_architecture
    if architecture is None:
        return {}
    conversions: list[Conversion] = []
    try:
        conversions += find_trainer_conversions(architecture, config, view.catalog.tensors)
        conversions += architecture.conversions(config)
    except CkptxError:  # the config lacks the numbers, so there is nothing to compare
        return {}
    return {(*each.sources, *each.targets): each.ops for each in conversions if each.ops}


def _describe_difference(name: str, ops: Sequence[Op], recorded: Sequence[Op]) -> str:
    """Return the middle of an error: that the number of heads for tensor `name` differs, or the order of elements."""
    heads, recorded_heads = ([op.args[0] for op in each if op.kind == "permute_rope"] for each in (ops, recorded))
    if heads and recorded_heads and heads != recorded_heads:
        return (
            f'gives {heads[0]} heads for "{name}", but the tensors were written with a {_CONFIG} that gives '
            f"{recorded_heads[0]}, and the order of rows depends on this number"
        )
    return f'gives another order of elements in "{name}" than the {_CONFIG} that the tensors were written with'


def _name_first(names: list[str]) -> str:
    return f'"{names[0]}"' + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")
