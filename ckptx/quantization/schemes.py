"""Schemes of quantized weights, as a table: names of a weight and its companions, codes, and scales.

A weight is stored as codes (quantized values) of 8 or 4 bits. Each block of codes has a scale, in a companion tensor:

    value = decoded code * scale        dequantized: computed in float32, rounded once to the target dtype

In nvfp4, the scale of a block is also multiplied with, or divided by, a second scale of the whole weight. Integer codes
may have a zero point for each block, which is subtracted from them. Schemes differ in this, in names, in the values of
codes, in how these are packed, and in the shape of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CodeFormat = Literal["e4m3", "e2m1", "int4", "int8"]
Blocks = Literal["declared", "row groups of 32", "row groups of 16"]

FLOAT_SCALES = frozenset({"F32", "BF16", "F16"})
EXPONENT_SCALES = frozenset({"F8_E8M0", "U8"})


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store a quantized weight: the names and dtypes of its tensors, and how they are decoded.

    The tensors of a weight are named by suffixes of one name, which is that of the module or of the parameter.

    Attributes:
        name: Name of the scheme, as reports print it.
        methods: Values of `quant_method` that declare it; or `compressed-tensors:FORMAT`, `modelopt:ALGORITHM`.
        code_format: Number format of the codes.
        codes_suffix: Suffix of the tensor of codes.
        code_dtypes: Dtypes that the tensor of codes may have.
        decoded_suffix: Suffix of the decoded weight.
        scale_suffix: Suffix of the tensor of scales.
        scale_dtypes: Dtypes that the scales may have.
        blocks: Shape of a block of codes with one scale: "declared" if the config gives it, else a fixed number of
            elements of one row.
        second_scale_suffix: Suffix of a scale of the whole weight; empty for none.
        is_second_scale_divisor: True if values are divided by the second scale instead of multiplied with it.
        optional_suffixes: Suffixes of companions that may be absent: zero points, and the shape of the decoded weight.
        is_fused: True for weights of all experts in one tensor, which has three or more dims and no `.weight` in its
            name.
        is_transposed: True if decoding exchanges the last two dims.
    """

    name: str
    methods: tuple[str, ...]
    code_format: CodeFormat
    codes_suffix: str
    code_dtypes: frozenset[str]
    decoded_suffix: str
    scale_suffix: str
    scale_dtypes: frozenset[str]
    blocks: Blocks = "declared"
    second_scale_suffix: str = ""
    is_second_scale_divisor: bool = False
    optional_suffixes: tuple[str, ...] = ()
    is_fused: bool = False
    is_transposed: bool = False

    @property
    def is_integer(self) -> bool:
        """Return True if the codes are integers."""
        return self.code_format in ("int4", "int8")


_E4M3 = frozenset({"F8_E4M3"})
_BYTES = frozenset({"U8", "I8", "F4"})
_FP8_SCALES = FLOAT_SCALES | EXPONENT_SCALES
_FP8_METHODS = ("fp8", "fbgemm_fp8", "modelopt:FP8", "compressed-tensors:float-quantized",
                "compressed-tensors:naive-quantized")  # fmt: skip


def _fp8(scale: str, *, is_fused: bool = False) -> Scheme:
    weight = "" if is_fused else ".weight"
    return Scheme("fp8", _FP8_METHODS, "e4m3", weight, _E4M3, weight, scale, _FP8_SCALES, is_fused=is_fused)


_INTEGER_COMPANIONS = (".weight_shape", ".weight_zero_point")

# If several match a tensor and the config does not decide, the first one is used.
SCHEMES: tuple[Scheme, ...] = (
    _fp8(".weight_scale_inv"),
    _fp8(".weight_scale"),
    _fp8(".scale"),
    _fp8(".qscale_weight"),
    _fp8("_scale_inv", is_fused=True),
    _fp8("_scale", is_fused=True),
    Scheme(
        "mxfp4", ("mxfp4",), "e2m1", "_blocks", frozenset({"U8"}), "", "_scales", EXPONENT_SCALES, "row groups of 32",
        is_fused=True, is_transposed=True,
    ),
    Scheme(
        "mxfp4", ("fp8", "mxfp4"), "e2m1", ".weight", _BYTES, ".weight", ".scale", frozenset({"F8_E8M0"}),
        "row groups of 32",
    ),
    Scheme(
        "mxfp4", ("compressed-tensors:mxfp4-pack-quantized",), "e2m1", ".weight_packed", _BYTES, ".weight",
        ".weight_scale", EXPONENT_SCALES, "row groups of 32",
    ),
    Scheme(
        "nvfp4", ("compressed-tensors:nvfp4-pack-quantized",), "e2m1", ".weight_packed", _BYTES, ".weight",
        ".weight_scale", _E4M3, "row groups of 16", ".weight_global_scale", True,
    ),
    Scheme(
        "nvfp4", ("modelopt:NVFP4",), "e2m1", ".weight", _BYTES, ".weight", ".weight_scale", _E4M3,
        "row groups of 16", ".weight_scale_2",
    ),
    Scheme(
        "int4", ("compressed-tensors:pack-quantized",), "int4", ".weight_packed", frozenset({"I32"}), ".weight",
        ".weight_scale", FLOAT_SCALES, optional_suffixes=_INTEGER_COMPANIONS,
    ),
    Scheme(
        "int8", ("compressed-tensors:pack-quantized",), "int8", ".weight_packed", frozenset({"I32"}), ".weight",
        ".weight_scale", FLOAT_SCALES, optional_suffixes=_INTEGER_COMPANIONS,
    ),
)  # fmt: skip

# Suffixes of scales of activations and of the KV cache, which a model of plain floats does not have.
ACTIVATION_SCALES = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".qscale_act",
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale",
)  # fmt: skip

# Suffixes of codes and companions that no other tensor has. Outside a complete quantized weight such a tensor is an
# error, except `_blocks` and `_scales` of plain floats.
QUANTIZED_SUFFIXES = (
    ".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale", ".weight_zero_point",
    ".weight_shape", ".weight_packed", "_scale_inv", "_blocks", "_scales", ".qscale_weight",
)  # fmt: skip

# Suffix of a tensor -> the quantization it belongs to, which ckptx does not decode.
UNSUPPORTED_SUFFIXES = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ with reordered groups",
    ".weight_g_idx": "compressed-tensors with reordered groups (actorder)",
    ".absmax": "bitsandbytes",
    ".nested_absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_format": "bitsandbytes",
    ".bitmask": "compressed-tensors with sparsity",
}
