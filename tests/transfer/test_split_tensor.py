"""Checksums of parts that several workers copied: contiguous parts are one, and a gap ends them."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.entry import Record
from ckptx.transfer.split_tensor import ChecksumPart, RecordPart, SplitTensor, join_parts


def part_of(data: bytes, begin: int, end: int) -> ChecksumPart:
    return ChecksumPart(begin, end - begin, zlib.crc32(data[begin:end]))


@given(st.binary(max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_parts_are_joined_up_to_the_first_gap(data: bytes, draw: st.DataObject) -> None:
    points = draw.draw(st.lists(st.integers(0, len(data)), max_size=6))
    edges = sorted({0, *points, len(data)})
    parts = [part_of(data, begin, end) for begin, end in pairwise(edges)]
    present = draw.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    prefix = edges[next((index for index, is_present in enumerate(present) if not is_present), len(parts))]
    given_parts = draw.draw(
        st.permutations([each for each, is_present in zip(parts, present, strict=True) if is_present])
    )
    assert join_parts(given_parts) == part_of(data, 0, prefix)


@pytest.mark.parametrize("missing", range(4))
def test_a_gap_is_not_skipped(missing: int) -> None:
    data = bytes(range(40))
    parts = [part_of(data, begin, begin + 10) for begin in range(0, 40, 10) if begin != 10 * missing]
    assert join_parts(reversed(parts)) == part_of(data, 0, 10 * missing)


def test_only_the_last_share_is_told_so_and_none_is_lost() -> None:
    data = bytes(range(30))
    record = Record(0, 30, zlib.crc32(data))
    split = SplitTensor(3)
    for number in (2, 0, 1):
        part = part_of(data, 10 * number, 10 * number + 10)
        is_last = split.add([(number, bytes([number]))], [(9, part), (number, part)], [RecordPart("f", record, part)])
        assert is_last is (number == 1)
    assert split.leaves == {number: bytes([number]) for number in range(3)}
    assert join_parts(split.blocks[9]) == join_parts(split.records["f", record]) == part_of(data, 0, 30)
    assert {index: len(parts) for index, parts in split.blocks.items()} == {0: 1, 1: 1, 2: 1, 9: 3}
