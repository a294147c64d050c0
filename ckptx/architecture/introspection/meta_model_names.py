"""Disk names of a meta model, and the conversions that loading applies to the tensors with these names.

The facts come from transformers: its reverse conversion gives the disk name of every model name, in each naming scheme
that it can load, and its loader the model name again. Imports transformers; see `meta_model`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from ckptx.architecture.namings import Rename, subsets
from ckptx.architecture.patterns import patterns_of
from ckptx.architecture.structure import LoadConversion, join_path
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import RENUMBERING


class LoadTarget(NamedTuple):
    """Result of the loader for a disk name.

    Attributes:
        name: Name of the model tensor that the disk tensor is loaded into, the first if there are several.
        converter: Converter that transformers applies to the tensor; None for a renaming.
        source: Source pattern of the converter that the disk name matches; empty for a renaming.
    """

    name: str
    converter: WeightConverter | None
    source: str = ""


def functions_to_disk_names(model: PreTrainedModel) -> list[Rename]:
    """Return functions from a model name to a disk name, one for each naming scheme.

    The first gives the names that ``save_pretrained`` writes; the last returns the model name unchanged.
    """

    def to_disk_name(prefix_changes: tuple[int, ...], name: str) -> str:
        reverted = _revert_conversions(model, {name: torch.empty(0, device="meta")}, prefix_changes)
        return next(iter(reverted)) if len(reverted) == 1 else name

    return [*(functools.partial(to_disk_name, each) for each in _prefix_change_subsets(model)), lambda name: name]


def function_to_model_name(model: PreTrainedModel) -> Rename:
    """Return the function from a disk name to a model name that ``from_pretrained`` applies."""
    load = _load_function(model)
    return lambda name: load(name).name


def disk_names_by_scheme(model: PreTrainedModel) -> list[list[str]]:
    """Return the disk names of the model, one list per naming scheme; the first is that of ``save_pretrained``."""
    state = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    return [list(_revert_conversions(model, dict(state), each)) for each in _prefix_change_subsets(model)]


def load_conversions(
    model: PreTrainedModel, disk_names: list[list[str]]
) -> tuple[frozenset[LoadConversion], frozenset[LoadConversion]]:
    """Return the conversions that loading applies to tensors with another name or another form than in the model.

    Args:
        model: Model on the meta device.
        disk_names: Its names on disk, from `disk_names_by_scheme`.

    Returns:
        The conversions of the first naming scheme in `disk_names`, and the additional ones of the others.
    """
    state = model.state_dict(keep_vars=True)
    load = _load_function(model)
    saved, *others = (frozenset(_conversions_of_naming(names, state, load)) for names in disk_names)
    return saved, frozenset[LoadConversion]().union(*others) - saved


def _conversions_of_naming(
    names: list[str], state: Mapping[str, Any], load: Callable[[str], LoadTarget]
) -> Iterator[LoadConversion]:
    """Yield the conversions of the tensors of one naming scheme that have another name or form in the model.

    Args:
        names: Disk names of the scheme.
        state: State dict of the model, whose keys are the model names.
        load: Result of `_load_function`.
    """
    converted: dict[str, list[tuple[str, LoadTarget]]] = {}
    for name in names:
        loaded = load(name)
        if loaded.name not in state:
            continue
        if loaded.converter is not None:
            converted.setdefault(loaded.name, []).append((name, loaded))
        elif loaded.name != name:
            yield _rename_conversion(name, loaded.name)
    for target, parts in converted.items():
        yield from _converter_conversion(target, parts)


def _rename_conversion(source: str, target: str) -> LoadConversion:
    """Return the conversion that renames `source` to `target`.

    If the names differ in the number of a layer, it has an unsupported operation (`RENUMBERING`).
    """
    old, new = _align_patterns(source, target)
    return (
        LoadConversion((old,), (new,))
        if old
        else LoadConversion((pattern_of(source),), (pattern_of(target),), (RENUMBERING,))
    )


def _align_patterns(source: str, target: str) -> tuple[str, str]:
    """Return both names as patterns, with `*` only for the indices that they have in common, in this order.

    An index that only one of them has stays a number. Two empty strings if the name with fewer indices has one that the
    other lacks.

    Example:
        layers.7.mlp.0.weight, layers.7.fc1.weight -> layers.*.mlp.0.weight, layers.*.fc1.weight
    """
    source_indices, target_indices = _index_components(source), _index_components(target)
    if len(source_indices) < len(target_indices):
        new, old = _align_patterns(target, source)
        return old, new
    parts, remaining = source.split("."), iter(target_indices)
    index = next(remaining, None)
    for position, part in enumerate(parts):
        if part.isdecimal() and part == index:
            parts[position], index = "*", next(remaining, None)
    return (".".join(parts), pattern_of(target)) if index is None else ("", "")


def _converter_conversion(target: str, parts: list[tuple[str, LoadTarget]]) -> Iterator[LoadConversion]:
    """Yield the conversion of the tensors in `parts`: one converter makes `target`, and maybe more tensors, of them.

    Args:
        target: Model name of the first tensor that the converter makes.
        parts: Disk name and result of the loader for each tensor.
    """
    converter = parts[0][1].converter
    assert converter is not None
    order = converter.source_patterns
    # An operation that ckptx lacks may take a list.
    has_list = any(type(op).__name__ not in _NON_LIST_OPS for op in converter.operations)

    def source_pattern(name: str) -> str:
        aligned = "" if has_list else _align_patterns(name, target)[0]
        return aligned or pattern_of(name)

    by_source = {source_pattern(name): order.index(loaded.source) for name, loaded in parts}
    sources = tuple(sorted(by_source, key=lambda name: by_source[name]))
    first, *others = converter.target_patterns
    targets = tuple(pattern_of(target.replace(first, each)) for each in (first, *others))
    # The first operation gets the tensors of the source patterns, the others those that become the targets.
    ops = [
        _op_text(each, order if index == 0 else converter.target_patterns)
        for index, each in enumerate(converter.operations)
    ]
    yield LoadConversion(sources, targets, tuple(filter(None, ops)))


# Operations that do not take a list of modules, so that their indices must be those of the model.
_NON_LIST_OPS = frozenset({"Chunk", "Concatenate", "Interleave", "PermuteForRope", "Split", "Transpose"})
# Operations of transformers as kind and numbers; others are unsupported and written with their name.
_OP_TEXTS: Mapping[str, Callable[[Any, list[str]], str]] = {
    "Chunk": lambda op, _: f"chunk {op.dim}" if op.num_shards_attribute is None else "unsupported:Chunk",
    "Concatenate": lambda op, _: f"concat {op.dim}",
    "Interleave": lambda op, _: f"interleave {op.dim} {int(op.inverse)}",
    "MergeModulelist": lambda op, _: f"merge {op.dim}",
    "PermuteForRope": lambda op, tensors: _permutation_text(op, tensors),
    "Split": lambda op, _: f"split {op.dim}",
    "Transpose": lambda op, _: f"transpose {op.dim0} {op.dim1} {int(op.check_dims)}",
}


def _op_text(op: Any, tensors: list[str]) -> str:
    """Return an operation of transformers as text, see `split_op`; empty if it does not affect `tensors`.

    Args:
        op: Operation of transformers.
        tensors: Patterns of the tensors that it gets.
    """
    kind = type(op).__name__
    return _OP_TEXTS[kind](op, tensors) if kind in _OP_TEXTS else f"unsupported:{kind}"


def _permutation_text(op: Any, tensors: list[str]) -> str:
    """Return a RoPE permutation as text; see `_op_text`."""
    parts: list[str] = []
    if op.permute_layer_names is not None:
        parts = [str(i) for i, name in enumerate(tensors) if any(each in name for each in op.permute_layer_names)]
        if not parts:
            return ""
    heads = join_path(op.subconfig_key or "", "num_attention_heads")
    return (
        " ".join(["permute_rope", str(int(op.inverse)), *(parts if len(parts) < len(tensors) else [])])
        + f" : {heads} ?? 1"
    )


def _index_components(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


def _prefix_change_subsets(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Return subsets (`subsets`) of the indices of prefix changes in the list of conversions, one for each scheme."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return subsets([index for index, entry in enumerate(conversions) if isinstance(entry, PrefixChange)])


def _revert_conversions(model: Any, tensors: dict[str, Any], prefix_changes: tuple[int, ...]) -> dict[str, Any]:
    """Return tensors by disk name: revert the conversions that are no prefix change or whose index is given.

    If transformers cannot revert them, the tensors keep their model names.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    selected = [
        each for index, each in enumerate(conversions) if index in prefix_changes or not isinstance(each, PrefixChange)
    ]
    if not selected:
        return tensors
    previous = getattr(model, "_weight_conversions", None)
    model._weight_conversions = selected
    try:
        reverted: dict[str, Any] = revert_weight_conversion(model, tensors)
    except Exception:  # an operation that cannot run on single or empty tensors: they keep their names
        return tensors
    finally:
        model._weight_conversions = previous
    return reverted


def _load_function(model: PreTrainedModel) -> Callable[[str], LoadTarget]:
    """Return the function from a disk name to the model name and the converter that loading chooses for it."""
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_source = {source: converter for converter in converters for source in converter.source_patterns}
    state = model.state_dict(keep_vars=True)
    prefix = model.base_model_prefix

    def load(name: str) -> LoadTarget:
        renamed, source = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:  # a model name, which a renaming of disk names changed by mistake
            renamed, source = rename_source_key(name, [], [], prefix, state)
        return LoadTarget(renamed, by_source[source], source) if source is not None else LoadTarget(renamed, None)

    return load


def name_patterns(model: PreTrainedModel, disk_names: list[list[str]]) -> frozenset[str]:
    """Return the patterns of the model's own names and of its disk names."""
    return patterns_of(model.state_dict(keep_vars=True)).union(*map(patterns_of, disk_names))
