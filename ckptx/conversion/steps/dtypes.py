"""`--dtype`: dtypes of the target tensors, and the edits to config.json that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptx.catalog.dtype import DTYPE_BY_OPTION, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.naming import NamedTarget, NameMap
from ckptx.conversion.steps.restoration import usable_manifest
from ckptx.conversion.steps.target_tensors import TargetTensors
from ckptx.errors import UsageError
from ckptx.mapping.config_edits import dequantization_edits, dtype_edits, dtypes_in, is_exact_in, widening_edits
from ckptx.mapping.dtypes import dtypes_after_cast, dtypes_as_in_base
from ckptx.model_view.view import ModelView, rules_of
from ckptx.wording import counted, first_of


@dataclass(frozen=True, slots=True)
class CastTensors:
    """Target tensors with their final dtypes.

    Attributes:
        target: Target tensors.
        was_cast: True if any dtype differs from that in the source.
        uncast: Names of float tensors that `--dtype` does not cast; None for `--dtype auto`.
        base_dtype_counts: Result of `--dtype base` for the report: `matching` (number of tensors with the dtype of the
            base), `not_in_base` (names that the base lacks), `quantized_in_base` (names that are quantized in the
            base); None without `--dtype base`.
        notes: Notes for the user.
    """

    target: TargetTensors
    was_cast: bool = False
    uncast: list[str] | None = None
    base_dtype_counts: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def cast_tensors(view: ModelView, named_target: NamedTarget, base: BaseCheckpoint, dtype_option: Any) -> CastTensors:
    """Set the dtype of each target tensor.

    Args:
        view: Model in the source.
        named_target: Target tensors under their new names.
        base: Source and base, see `BaseCheckpoint`. `--dtype base` takes over the dtypes of the base; other casts do
            not cast a tensor that is float32 in the source and in the base, unless all tensors of the base are float32.
        dtype_option: Value of `--dtype`: "auto" keeps the dtypes of the source, "base" takes those of the base, and
            "bf16", "fp16" and "fp32" cast to one dtype.

    Raises:
        UsageError: `--dtype base` without known dtypes of a base.
    """
    target, architecture = named_target.target, view.architecture
    base_dtypes: dict[str, DType] = {}
    if dtype_option != "auto" and base.dtypes:
        base_dtypes = _base_dtypes_by_target(base.dtypes, view, target.tensors, named_target.naming)
    if dtype_option == "base":
        if not base.dtypes:
            raise UsageError(
                "--dtype base: the dtypes of the base are unknown; pass --base PATH with a checkpoint that has "
                "weights, or choose a dtype"
            )
        dtypes = dtypes_as_in_base(target.tensors, base_dtypes)
    else:
        dtypes = dtypes_after_cast(
            target.tensors,
            DTYPE_BY_OPTION.get(dtype_option),
            lambda name: (
                architecture is not None and dtype_option != "fp32" and architecture.keeps_fp32(name, dtype_option)
            ),
            _float32_names(base.dtypes, base_dtypes),
        )
    changed = {name for name, dtype in dtypes.items() if target.tensors[name].dtype is not dtype}
    if changed:
        tensors = {
            name: entry._replace(dtype=dtypes[name]) if name in changed else entry
            for name, entry in target.tensors.items()
        }
        target = replace(target, tensors=tensors)
    if dtype_option == "base":
        return _cast_to_base(target, base_dtypes, was_cast=bool(changed))
    if dtype_option == "auto":
        return CastTensors(target, was_cast=bool(changed))
    target_dtype = DTYPE_BY_OPTION[dtype_option]
    uncast = [
        name
        for name, entry in target.tensors.items()
        if entry.dtype.is_castable and name not in changed and entry.dtype is not target_dtype
    ]
    return CastTensors(target, bool(changed), uncast)


def _float32_names(base: Mapping[str, DType], base_dtypes: Mapping[str, DType]) -> frozenset[str]:
    """Return the names that the base keeps in float32; none if the whole base is in float32."""
    if all(dtype.name == "F32" for dtype in base.values()):
        return frozenset()
    return frozenset(name for name, dtype in base_dtypes.items() if dtype.name == "F32")


def _base_dtypes_by_target(
    base: Mapping[str, DType], view: ModelView, names: Iterable[str], naming: NameMap
) -> dict[str, DType]:
    """Map target names, which may follow another naming scheme than the base, to dtypes in the base `base`.

    Names that the base lacks are skipped.

    A tensor that is made of several base tensors has a dtype there only if all of them have the same.
    """
    names = list(names)
    if all(name in base for name in names):
        return {name: base[name] for name in names}
    rules = rules_of(view)
    dtypes_by_model_name: dict[str, set[DType]] = {}
    for name, dtype in base.items():
        dtypes_by_model_name.setdefault((rules and rules.model_name(name)) or name, set()).add(dtype)
    dtypes = {}
    for name in names:
        # Trainer names map to disk names, which map to model names.
        loaded_name = naming.loaded_name(name) or name
        dtype_in_base = next((base[each] for each in (name, loaded_name) if each in base), None)
        if dtype_in_base is None:
            model_dtypes = dtypes_by_model_name.get((rules and rules.model_name(loaded_name)) or loaded_name, set())
            dtype_in_base = next(iter(model_dtypes)) if len(model_dtypes) == 1 else None
        if dtype_in_base is not None:
            dtypes[name] = dtype_in_base
    return dtypes


def _cast_to_base(target: TargetTensors, base_dtypes: Mapping[str, DType], *, was_cast: bool) -> CastTensors:
    floats = {name: entry for name, entry in target.tensors.items() if entry.dtype.is_castable}
    missing = [name for name in floats if name not in base_dtypes]
    differing = [name for name, entry in floats.items() if name in base_dtypes and base_dtypes[name] is not entry.dtype]
    notes = []
    if missing:
        count = counted(len(missing), "tensor")
        notes.append(f"--dtype base: {count} not in the base, dtype unchanged: {first_of(missing)}")
    if differing:
        first = differing[0]
        notes.append(
            f"--dtype base: {counted(len(differing), 'tensor')} quantized in the base, dtype unchanged: "
            f'"{first}" is {base_dtypes[first]} in the base, {floats[first].dtype} here'
        )
    matching = len(floats) - len(missing) - len(differing)
    counts = {"matching": matching, "not_in_base": missing, "quantized_in_base": differing}
    return CastTensors(target, was_cast, [*missing, *differing], counts, tuple(notes))


def config_dtype_edits(
    view: ModelView, cast: CastTensors, base: BaseCheckpoint, naming: NameMap, dtype_option: str
) -> list[dict[str, Any]]:
    """Return edits to the dtypes in config.json, so that loading in the dtype of the config loses no precision.

    A cast to bf16, fp16 or fp32 sets the config to it. For "auto" and "base", the config is

    * unchanged if its dtype represents all tensors exactly, not counting those that the model keeps in float32 under
      any config;
    * unchanged if it is the checkpoint's own config, and the checkpoint is one of Hugging Face or an unchanged
      conversion of one by ckptx;
    * edited if some of the tensors that it would round have another dtype in the base: they got their dtype after the
      config was written;
    * edited if the base has no dtype for some of these tensors, and they have at least half of the elements of all
      floats.

    The output format does not matter.

    Args:
        view: Model in the source.
        cast: Target tensors with the dtypes that are written.
        base: Source and base, see `BaseCheckpoint`.
        naming: Map from target names to model names.
        dtype_option: Value of `--dtype`, see `cast_tensors`.
    """
    config, target = view.config, cast.target
    if config is None:
        return []
    config_dtypes = dtypes_in(config).values()
    floats = {
        name: entry
        for name, entry in target.tensors.items()
        if entry.dtype.is_castable and not _is_loaded_in_float32(view, name)
    }
    rounded = {
        name: entry
        for name, entry in floats.items()
        if not all(is_exact_in(entry.dtype.name, each) for each in config_dtypes)
    }
    if dtype_option in DTYPE_BY_OPTION:
        return dtype_edits(config, dtype_option) if cast.was_cast or rounded else []
    if not rounded or _is_unchanged_since_config(view, base):
        return []
    base_dtypes = _base_dtypes_by_target(base.dtypes, view, rounded, naming) if base.dtypes else {}
    changed = {
        name: entry for name, entry in rounded.items() if name in base_dtypes and base_dtypes[name] is not entry.dtype
    }
    added = {name: entry for name, entry in rounded.items() if name not in base_dtypes}
    if 2 * _numel(added.values()) < _numel(floats.values()):
        added = {}
    if not changed and not added:
        return []
    lossless = {name: entry for name, entry in floats.items() if name not in rounded}
    return widening_edits(
        config, {entry.dtype.name for entry in (*changed.values(), *added.values(), *lossless.values())}
    )


def dequantization_edits_if_float(view: ModelView, target: TargetTensors, base: BaseCheckpoint) -> list[dict[str, Any]]:
    """Return edits that remove the quantization from config.json if every weight that is written is a float.

    Loaders look for scales if the config declares quantization, find none, and keep randomly initialized weights. The
    config of a checkpoint that was not trained since is correct and stays unchanged.
    """
    if view.config is None or _is_unchanged_since_config(view, base):
        return []
    if any(not entry.dtype.is_castable for entry in target.tensors.values() if len(entry.shape) > 1):
        return []
    return dequantization_edits(view.config)


def _numel(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.numel for entry in entries)


def _is_loaded_in_float32(view: ModelView, name: str) -> bool:
    """Return True if transformers loads the tensor in float32 under a half-precision config."""
    return view.architecture is not None and view.architecture.keeps_fp32(name, "bf16")


def _is_unchanged_since_config(view: ModelView, base: BaseCheckpoint) -> bool:
    """Return True if the config is the checkpoint's own and no training took place since it was written.

    This holds for an HF checkpoint and for a conversion of one by ckptx. A config from `--base` was written for other
    files, and a state dict with another file name than `pytorch_model.bin` comes from a trainer.
    """
    if base.catalog is not None or base.is_dequantized:
        return False
    return view.catalog.is_published or usable_manifest(view, []) is not None
