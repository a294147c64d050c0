"""What `--dtype` casts and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry

# Companions of quantised weights; rounding them scales whole blocks of weights wrongly.
_SCALE_ENDINGS = ("_scale", "_scales", "_scale_inv", "_scale_2", ".scales", ".absmax", ".scale", ".zero_point", "_zp")
_QUANTISED = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F8_E8M0", "I8", "U8", "I32"})


def cast_targets(
    tensors: Mapping[str, TensorEntry],
    target: DType | None,
    keeps_fp32: Callable[[str], bool],
    also_fp32: Collection[str] = (),
) -> dict[str, DType]:
    """The dtype each tensor gets.

    Args:
        tensors: By the name they have in the output.
        target: The dtype asked for, or None to keep each tensor's own.
        keeps_fp32: True for a name the model keeps in float32.
        also_fp32: Names kept in float32 because a base checkpoint keeps them so.

    Returns:
        A dtype for every name. Integers, quantised floats, scales of quantised weights, and what must stay float32 keep
        their own.
    """
    if target is None:
        return {name: entry.dtype for name, entry in tensors.items()}
    quantised = any(is_quantised_weight(entry) for entry in tensors.values())
    result = {}
    for name, entry in tensors.items():
        keep = (
            not entry.dtype.cast
            or (quantised and name.endswith(_SCALE_ENDINGS))
            or (entry.dtype.name == "F32" and (keeps_fp32(name) or name in also_fp32))
        )
        result[name] = entry.dtype if keep else target
    return result


def base_targets(tensors: Mapping[str, TensorEntry], base: Mapping[str, DType]) -> dict[str, DType]:
    """The dtype each tensor gets when it is to be as in a base checkpoint.

    Args:
        tensors: By the name they have in the output.
        base: Dtypes in the base, by the same names; it may lack some.

    Returns:
        A dtype for every name. Floats that are plain floats in both get that of the base; everything else keeps its
        own, and so do scales of quantised weights.
    """
    quantised = any(is_quantised_weight(entry) for entry in tensors.values())
    result = {}
    for name, entry in tensors.items():
        wanted = base.get(name, entry.dtype)
        keep = not (entry.dtype.cast and wanted.cast) or (quantised and name.endswith(_SCALE_ENDINGS))
        result[name] = entry.dtype if keep else wanted
    return result


def is_quantised_weight(entry: TensorEntry) -> bool:
    """True for a matrix in a quantised dtype; an integer vector or counter is none."""
    return entry.dtype.name in _QUANTISED and len(entry.shape) >= 2
