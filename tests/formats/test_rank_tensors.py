"""Errors about shards of one tensor in the files of several ranks."""

from __future__ import annotations

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.errors import InputError
from ckptx.formats.rank_tensors import RankTensors

F32, BF16 = DTYPES_BY_NAME["F32"], DTYPES_BY_NAME["BF16"]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((F32, (8,)), (F32, (8, 4)), r"r1: F32 \[8, 4\], but F32 \[8\] in r0"),
        ((F32, (8,)), (BF16, (8,)), r"r1: BF16 \[8\], but F32 \[8\] in r0"),
        ((None, (8,)), (F32, (8, 4)), r"r1: \[8, 4\], but \[8\] in r0"),
        ((F32, (8,)), (None, (8, 4)), r"r1: \[8, 4\], but \[8\] in r0"),
        ((None, (8,)), (None, (8, 4)), r"r1: \[8, 4\], but \[8\] in r0"),
    ],
)
def test_another_shape_or_dtype_is_named(first, second, message) -> None:  # type: ignore[no-untyped-def]
    """A file without elements of a tensor does not tell its dtype."""
    tensors = RankTensors()
    (dtype, shape), (other_dtype, other_shape) = first, second
    tensors.add("w", dtype, shape, (), "r0", "r0")
    with pytest.raises(InputError, match=message):
        tensors.add("w", other_dtype, other_shape, (), "r1", "r1")
