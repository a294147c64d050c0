"""Target dtypes of `--dtype`: tensors that it casts and tensors that keep their dtype."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry

# Scales of quantized weights; rounding them would scale whole blocks of weights wrongly.
_SCALE_ENDINGS = ("_scale", "_scales", "_scale_inv", "_scale_2", ".scales", ".absmax", ".scale", ".zero_point", "_zp")
_QUANTIZED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F8_E8M0", "I8", "U8", "I32"})


def dtypes_after_cast(
    tensors: Mapping[str, TensorEntry],
    target: DType | None,
    keeps_fp32: Callable[[str], bool],
    also_fp32: Collection[str] = (),
) -> dict[str, DType]:
    """Return the target dtype of each tensor.

    Args:
        tensors: Tensors by output name.
        target: Requested dtype; None to keep the dtype of each tensor.
        keeps_fp32: Function that returns True for a name that the model keeps in float32.
        also_fp32: Names that stay in float32 because a base checkpoint stores them so.

    Returns:
        A dtype for every name. Integers, quantized floats, scales of quantized weights, and those float32 tensors that
        must stay in float32 keep their dtype.
    """
    if target is None:
        return {name: entry.dtype for name, entry in tensors.items()}
    has_quantized_weights = any(is_quantized_weight(entry) for entry in tensors.values())
    result = {}
    for name, entry in tensors.items():
        is_kept = (
            not entry.dtype.is_castable
            or (has_quantized_weights and name.endswith(_SCALE_ENDINGS))
            or (entry.dtype.name == "F32" and (keeps_fp32(name) or name in also_fp32))
        )
        result[name] = entry.dtype if is_kept else target
    return result


def dtypes_as_in_base(tensors: Mapping[str, TensorEntry], base: Mapping[str, DType]) -> dict[str, DType]:
    """Return the target dtype of each tensor for `--dtype base`.

    Args:
        tensors: Tensors by output name.
        base: Dtypes in the base by the same names; some may be missing.

    Returns:
        A dtype for every name. Plain floats in both checkpoints get the dtype of the base; all other tensors, and
        scales of quantized weights, keep theirs.
    """
    has_quantized_weights = any(is_quantized_weight(entry) for entry in tensors.values())
    result = {}
    for name, entry in tensors.items():
        base_dtype = base.get(name, entry.dtype)
        is_kept = not (entry.dtype.is_castable and base_dtype.is_castable) or (
            has_quantized_weights and name.endswith(_SCALE_ENDINGS)
        )
        result[name] = entry.dtype if is_kept else base_dtype
    return result


def is_quantized_weight(entry: TensorEntry) -> bool:
    """Return True for a tensor of two or more dims in a dtype of quantized weights (8 bits or fewer, or int32)."""
    return entry.dtype.name in _QUANTIZED_DTYPES and len(entry.shape) >= 2
