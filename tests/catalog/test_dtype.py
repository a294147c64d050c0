"""The table of dtypes agrees with itself and with numpy."""

from __future__ import annotations

import pytest

from ckptx.catalog.dtype import DTYPE_BY_OPTION, DTYPES_BY_NAME, DTYPES_BY_STORAGE_CLASS, DTYPES_BY_TORCH_NAME
from tests.support.checkpoint_writers import BITS


@pytest.mark.parametrize(("name", "bits"), BITS.items())
def test_widths(name: str, bits: int) -> None:
    assert DTYPES_BY_NAME[name].bits == bits


def test_names_are_unique() -> None:
    assert len(DTYPES_BY_TORCH_NAME) == sum(dtype.torch_name is not None for dtype in DTYPES_BY_NAME.values())
    assert len(DTYPES_BY_STORAGE_CLASS) == sum(dtype.storage_class is not None for dtype in DTYPES_BY_NAME.values())


def test_sub_byte_elements_round_up_and_are_pairs_for_torch() -> None:
    assert [DTYPES_BY_NAME["F4"].nbytes(numel) for numel in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert DTYPES_BY_NAME["F4"].itemsize == 1


def test_torch_counts_pairs_of_elements_of_half_a_byte() -> None:
    f4, f32 = DTYPES_BY_NAME["F4"], DTYPES_BY_NAME["F32"]
    for shape in ((), (4,), (3, 6), (3, 0)):
        assert f4.from_torch_elements(f4.to_torch_elements(shape)) == shape == f32.to_torch_elements(shape)
    assert (f4.to_torch_elements((3, 6)), f4.from_torch_elements((3, 6))) == ((3, 3), (3, 12))
    with pytest.raises(AssertionError):
        f4.to_torch_elements((6, 3))


def test_only_plain_floats_are_cast() -> None:
    assert {dtype.name for dtype in DTYPES_BY_NAME.values() if dtype.is_castable} == {"F64", "F32", "F16", "BF16"}
    assert {key: dtype.name for key, dtype in DTYPE_BY_OPTION.items()} == {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
