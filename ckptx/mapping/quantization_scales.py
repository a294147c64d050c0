"""Tensors that belong to a quantized weight: scales, zero points and packed forms, in several naming schemes.

    q_proj.weight  q_proj.weight_scale_inv       fp8 in blocks
    q_proj.qweight q_proj.qzeros q_proj.scales   GPTQ, AWQ: there is no weight
    q_proj.weight  q_proj.weight.absmax          bitsandbytes
    experts.gate_up_proj_blocks, ..._scales      mxfp4

A scale follows its weight. If the weight is only renamed, so is its scale. If weights are combined or split, the scales
of block-wise fp8 go through the same steps, as in transformers; weights and scales of every other kind stay unchanged
under their current names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptx.mapping.ops import Conversion, Op

BLOCK_SCALE_SUFFIX = "_scale_inv"
_WEIGHT_SUFFIX = ".weight"
_MAX_LEVELS = 3  # weight.quant_state.bitsandbytes__nf4 is two levels under its module
_OPS_FOR_SCALES = frozenset({"merge", "unmerge", "concat", "chunk", "same", "transpose"})


class ParentWeight(NamedTuple):
    """Weight that a scale belongs to.

    Attributes:
        weight: Name of the weight, which need not be in the checkpoint.
        base: Common beginning of both names.
    """

    weight: str
    base: str

    def renamed_scale(self, scale: str, weight: str) -> str | None:
        """Return the name of `scale` after its weight is renamed to `weight`; None if the new name has another form."""
        tail = scale[len(self.base) :]
        if self.base == self.weight:
            return weight + tail
        return weight.removesuffix(_WEIGHT_SUFFIX) + tail if weight.endswith(_WEIGHT_SUFFIX) else None


def possible_parents(name: str) -> Iterator[ParentWeight]:
    """Yield the weights that `name` may be a scale of, in order of decreasing likelihood.

    They are its own name with words of the last component removed, then each module around it, and its `.weight`.
    """
    module, _, leaf = name.rpartition(".")
    words = leaf.split("_")
    for end in range(len(words) - 1, 0, -1):
        weight = ".".join([*([module] if module else []), "_".join(words[:end])])
        yield ParentWeight(weight, weight)
    for _ in range(_MAX_LEVELS):
        if not module:
            return
        yield ParentWeight(module, module)
        yield ParentWeight(module + _WEIGHT_SUFFIX, module)
        module = module.rpartition(".")[0]


def find_parent(name: str, is_known: Callable[[str], bool]) -> ParentWeight | None:
    """Return the weight that `name` is a scale of; None if there is none.

    Args:
        name: Name of a tensor that the class does not have.
        is_known: Function that returns True for the name of a weight.
    """
    return next((parent for parent in possible_parents(name) if is_known(parent.weight)), None)


def add_scale_conversions(conversions: Sequence[Conversion], config: Mapping[str, Any]) -> tuple[Conversion, ...]:
    """Return the conversions of a class, with those of the scales of its quantized weights.

    Only fp8 with a scale for each block of rows and columns has them: transformers stores these with fused experts, as
    `gate_up_proj_scale_inv` for `gate_up_proj`.

    Args:
        conversions: Conversions of weights, disk to model.
        config: Contents of `config.json`.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return tuple(conversions)
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        return tuple(conversions)
    return (*conversions, *(_scale_conversion(each) for each in conversions if each.ops and _applies_to_scales(each)))


def _applies_to_scales(conversion: Conversion) -> bool:
    """Return True if the ops apply to blocks too: no sizes in elements, no rows of heads, no dependence on shape."""
    are_weights = all(source.endswith(_WEIGHT_SUFFIX) for source in conversion.sources)
    return are_weights and all(op.kind in _OPS_FOR_SCALES and _has_no_sizes(op) for op in conversion.ops)


def _has_no_sizes(op: Op) -> bool:
    return op.kind == "chunk" or not op.args


def _scale_conversion(conversion: Conversion) -> Conversion:
    return Conversion(
        tuple(name + BLOCK_SCALE_SUFFIX for name in conversion.sources),
        tuple(name + BLOCK_SCALE_SUFFIX for name in conversion.targets),
        conversion.ops,
    )


def weight_conversions(conversions: Sequence[Conversion]) -> dict[int, int]:
    """Return index of each conversion of scales -> index of the conversion of their weights."""
    indices = {conversion: index for index, conversion in enumerate(conversions)}
    return {
        indices[scales]: index
        for conversion, index in indices.items()
        if conversion.ops and (scales := _scale_conversion(conversion)) in indices
    }
