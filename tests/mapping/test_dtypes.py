"""`--dtype`: floats are cast; integers, quantised weights, their scales, and what must stay float32 are not."""

from __future__ import annotations

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.mapping.dtypes import cast_targets


def entries(**rows: tuple[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, DTYPES_BY_NAME[dtype], shape, ()) for name, (dtype, shape) in rows.items()}


def cast(tensors: dict[str, TensorEntry], to: str | None, **settings: object) -> dict[str, str]:
    keeps = settings.pop("keeps", ())
    found = cast_targets(tensors, DTYPES_BY_NAME[to] if to else None, lambda name: name in keeps, **settings)  # type: ignore[arg-type,operator]
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


@pytest.mark.parametrize("scale", ["w_scale", "w.scales", "w_scale_inv", "w.absmax"])
def test_scales_stay_beside_a_quantised_weight_alone(scale: str) -> None:
    plain = {scale: TensorEntry(scale, DTYPES_BY_NAME["F32"], (2,), ())}
    assert cast(plain, "BF16") == {scale: "BF16"}
    assert cast(plain | entries(w=("F8_E4M3", (2, 2))), "BF16")[scale] == "F32"


def test_an_integer_vector_is_no_quantised_weight() -> None:
    tensors = entries(position_ids=("I32", (512,)), w_scale=("F32", (2,)))
    assert cast(tensors, "BF16")["w_scale"] == "BF16"


def test_what_the_model_or_a_base_keeps_in_fp32_stays() -> None:
    tensors = entries(a=("F32", (2,)), b=("F32", (2,)), c=("F32", (2,)), d=("F16", (2,)))
    found = cast(tensors, "BF16", keeps=("a", "d"), also_fp32=("b",))
    assert found == {"a": "F32", "b": "F32", "c": "BF16", "d": "BF16"}
