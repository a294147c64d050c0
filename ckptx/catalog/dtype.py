"""The supported dtypes: safetensors name, torch name, and bits per element.

One table serves every format. `storage_class` is the legacy typed storage class that `torch.save` records for a dtype;
newer dtypes have none and are pickled with `torch.storage.UntypedStorage`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptx.catalog.region import Shape


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type.

    Attributes:
        name: The safetensors name (`BF16`); torch dtypes that safetensors lacks carry their torch name in capitals.
        torch_name: Name of the attribute of `torch` (`bfloat16`), or None if torch has no such dtype.
        storage_class: Name of the typed storage class in `torch.save` files (`BFloat16Storage`), or None for an untyped
            storage.
        bits: Bits per element; safetensors counts each F4 value as an element.
        is_castable: True for plain floats, which `--dtype` casts; False for quantized floats (fp8, fp4) and all other
            dtypes.
        in_safetensors: True if the safetensors format supports it.
        pack: Number of elements in one torch element; 2 for F4, which torch stores as pairs (`float4_e2m1fn_x2`).
    """

    name: str
    torch_name: str | None
    storage_class: str | None
    bits: int
    is_castable: bool = False
    in_safetensors: bool = True
    pack: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes per torch element; 1 for F4, whose torch elements are pairs."""
        return self.bits * self.pack // 8

    def nbytes(self, numel: int) -> int:
        """Return the size of `numel` elements in bytes; sub-byte elements round up to a whole byte."""
        return (numel * self.bits + 7) // 8

    def to_torch_elements(self, counts: Shape) -> Shape:
        """Convert a shape or offsets from elements to torch elements; the last count must be a multiple of `pack`."""
        if self.pack == 1 or not counts:
            return counts
        assert not counts[-1] % self.pack
        return (*counts[:-1], counts[-1] // self.pack)

    def from_torch_elements(self, counts: Shape) -> Shape:
        """Convert a shape or offsets from torch elements to elements."""
        return counts if self.pack == 1 or not counts else (*counts[:-1], counts[-1] * self.pack)

    def __repr__(self) -> str:
        return self.name


_ALL = (
    DType("F64", "float64", "DoubleStorage", 64, is_castable=True),
    DType("F32", "float32", "FloatStorage", 32, is_castable=True),
    DType("F16", "float16", "HalfStorage", 16, is_castable=True),
    DType("BF16", "bfloat16", "BFloat16Storage", 16, is_castable=True),
    DType("I64", "int64", "LongStorage", 64),
    DType("I32", "int32", "IntStorage", 32),
    DType("I16", "int16", "ShortStorage", 16),
    DType("I8", "int8", "CharStorage", 8),
    DType("U8", "uint8", "ByteStorage", 8),
    DType("BOOL", "bool", "BoolStorage", 8),
    DType("C64", "complex64", "ComplexFloatStorage", 64),
    DType("U64", "uint64", None, 64),
    DType("U32", "uint32", None, 32),
    DType("U16", "uint16", None, 16),
    DType("F8_E4M3", "float8_e4m3fn", None, 8),
    DType("F8_E5M2", "float8_e5m2", None, 8),
    DType("F8_E8M0", "float8_e8m0fnu", None, 8),
    DType("F8_E4M3FNUZ", "float8_e4m3fnuz", None, 8),
    DType("F8_E5M2FNUZ", "float8_e5m2fnuz", None, 8),
    DType("F4", "float4_e2m1fn_x2", None, 4, pack=2),
    # safetensors has these, torch does not.
    DType("F6_E2M3", None, None, 6),
    DType("F6_E3M2", None, None, 6),
    # torch has these, safetensors does not.
    DType("C128", "complex128", "ComplexDoubleStorage", 128, in_safetensors=False),
    DType("C32", "complex32", None, 32, in_safetensors=False),
)

DTYPES_BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}
DTYPES_BY_TORCH_NAME: dict[str, DType] = {dtype.torch_name: dtype for dtype in _ALL if dtype.torch_name is not None}
DTYPES_BY_STORAGE_CLASS: dict[str, DType] = {
    dtype.storage_class: dtype for dtype in _ALL if dtype.storage_class is not None
}

# Values of `--dtype` that cast to one dtype.
DTYPE_BY_OPTION: dict[str, DType] = {
    "bf16": DTYPES_BY_NAME["BF16"],
    "fp16": DTYPES_BY_NAME["F16"],
    "fp32": DTYPES_BY_NAME["F32"],
}
