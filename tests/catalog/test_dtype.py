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


def test_only_plain_floats_are_cast() -> None:
    assert {dtype.name for dtype in DTYPES_BY_NAME.values() if dtype.is_castable} == {"F64", "F32", "F16", "BF16"}
    assert {key: dtype.name for key, dtype in DTYPE_BY_OPTION.items()} == {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
