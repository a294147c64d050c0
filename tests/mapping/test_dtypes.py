"""`--dtype`: floats are cast; integers, quantised weights, their scales, and what must stay float32 are not."""

from __future__ import annotations

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.mapping.dtypes import dtypes_after_cast, dtypes_as_in_base

SCALES = [
    "w_scale", "w_scales", "w_scale_inv", "w_scale_2", "w.scales", "w.absmax", "w.scale", "w.zero_point", "w_zp",
]  # fmt: skip


def entries(**rows: tuple[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, DTYPES_BY_NAME[dtype], shape, ()) for name, (dtype, shape) in rows.items()}


def cast(tensors: dict[str, TensorEntry], to: str | None, **settings: object) -> dict[str, str]:
    keeps = settings.pop("keeps", ())
    found = dtypes_after_cast(tensors, DTYPES_BY_NAME[to] if to else None, lambda name: name in keeps, **settings)  # type: ignore[arg-type,operator]
    return {name: dtype.name for name, dtype in found.items()}


def test_auto_keeps_everything() -> None:
    tensors = entries(a=("F32", (2,)), b=("I64", (2,)))
    assert cast(tensors, None) == {"a": "F32", "b": "I64"}


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_floats_are_cast(dtype: str) -> None:
    assert cast(entries(a=(dtype, (2, 2))), "BF16") == {"a": "BF16"}


@pytest.mark.parametrize("dtype", ["I64", "I32", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64"])
def test_others_are_not(dtype: str) -> None:
    assert cast(entries(a=(dtype, (2, 2))), "BF16") == {"a": dtype}


@pytest.mark.parametrize("scale", [*SCALES, "v", "scale_of_v", "w_scaled"])
def test_scales_stay_beside_a_quantised_weight_alone(scale: str) -> None:
    plain = {scale: TensorEntry(scale, DTYPES_BY_NAME["F32"], (2,), ())}
    assert cast(plain, "BF16") == {scale: "BF16"}
    assert cast(plain | entries(w=("F32", (2, 2))), "BF16") == {scale: "BF16", "w": "BF16"}
    expected = "F32" if scale in SCALES else "BF16"
    assert cast(plain | entries(w=("F8_E4M3", (2, 2))), "BF16") == {scale: expected, "w": "F8_E4M3"}


def test_an_integer_vector_is_no_quantised_weight() -> None:
    tensors = entries(position_ids=("I32", (512,)), w_scale=("F32", (2,)))
    assert cast(tensors, "BF16")["w_scale"] == "BF16"


def test_what_the_model_or_a_base_keeps_in_fp32_stays() -> None:
    tensors = entries(a=("F32", (2,)), b=("F32", (2,)), c=("F32", (2,)), d=("F16", (2,)))
    found = cast(tensors, "BF16", keeps=("a", "d"), also_fp32=("b",))
    assert found == {"a": "F32", "b": "F32", "c": "BF16", "d": "BF16"}


FLOATS = ("F64", "F32", "F16", "BF16")


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("name", [*SCALES, "v"])
@pytest.mark.parametrize("base", [*FLOATS, "F8_E4M3", "I32", None])
@pytest.mark.parametrize("dtype", [*FLOATS, "F8_E4M3", "I64"])
def test_plain_floats_get_the_dtype_of_the_base_apart_from_scales(
    dtype: str, base: str | None, name: str, is_quantized: bool
) -> None:
    """A scale keeps its dtype only if the checkpoint has quantized weights."""
    tensors = {name: TensorEntry(name, DTYPES_BY_NAME[dtype], (2,), ())}
    if is_quantized:
        tensors |= entries(w=("F8_E4M3", (2, 2)))
    found = dtypes_as_in_base(
        tensors, {} if base is None else {name: DTYPES_BY_NAME[base], "w": DTYPES_BY_NAME["BF16"]}
    )
    is_cast = dtype in FLOATS and base in FLOATS and (name == "v" or not is_quantized)
    assert found[name].name == (base if is_cast else dtype)
    assert {found[other].name for other in tensors if other != name} <= {"F8_E4M3"}
