"""Numbers whose hashes are chosen: opening what holds them takes work in proportion to its size.

Each case is written with few and with many numbers. They share a hash (`twins`: 2**61 - 1 has the hash of 0; `solved`:
the second of a pair follows from the first), or lie where a dict looks for the one that is asked for most.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, islice, product

import pytest

from ckptx.catalog.manifest import SCHEMA
from ckptx.catalog.manifest_parser import parse_manifest
from ckptx.catalog.region import CoverageFault, Region, find_coverage_fault, full_region
from ckptx.errors import InputError
from ckptx.formats.dcp.metadata import DcpMetadata, StorageInfo, TensorMetadata, parse_metadata
from ckptx.formats.dcp.metadata_writer import metadata_to_bytes
from ckptx.untrusted.hash_keys import HashFlood, UniqueTuples, identity_key, packed_key, salted_key

MODULUS = (1 << 61) - 1  # of the hash of a number
MANY = 4000
Tuples = Iterator[tuple[int, ...]]


def twins() -> Tuples:
    """Tuples of 14 numbers that share a hash."""
    return (tuple(MODULUS * bit for bit in bits) for bits in product((0, 1), repeat=14))


def solved(starts: Iterator[tuple[int, ...]] | None = None) -> Tuples:
    """Tuples that share a hash as Python 3.11 to 3.14 take it: xxHash, whose last step has one answer."""
    first, second, word = 11400714785074694791, 14029467366897019727, 1 << 64
    inverse = pow(second, -1, word)
    for start in starts or ((a,) for a in count()):
        state = 2870177450012600261
        for number in start:
            state = (state + number * second) % word
            state = (state << 31 | state >> 33) * first % word
        last = (12345 - state) * inverse % word
        if last < MODULUS:
            yield (*start, last)


def described() -> Tuples:
    """Shapes that share a hash and have less than 2**63 elements."""
    return solved(product((0, 1), repeat=17))


def honest() -> Tuples:
    """Where the blocks of a tensor begin."""
    return ((16 * row, 0) for row in count())


def seconds(run: Callable[[], object]) -> float:
    """Of CPU, the least of three times, without the garbage collector, which walks through whatever else is alive."""
    taken = []
    for _ in range(3):
        gc.disable()
        began = time.process_time()
        with suppress(InputError):
            run()
        taken.append(time.process_time() - began)
        gc.enable()
    return min(taken)


def metadata(regions: list[Region]) -> bytes:
    tensor = TensorMetadata("float32", (1,) * len(regions[0].sizes), tuple(regions))
    places = {("w", region.offsets): StorageInfo("f", 0, 4) for region in regions[:1]}
    return metadata_to_bytes(DcpMetadata({"w": tensor}, (), places, {}))


def as_offsets(numbers: list[tuple[int, ...]]) -> Callable[[], object]:
    data = metadata([Region(each, (1,) * len(each)) for each in numbers])
    return lambda: parse_metadata(data, "x")


def as_sizes(numbers: list[tuple[int, ...]]) -> Callable[[], object]:
    data = metadata([Region((0,) * len(each), each) for each in numbers])
    return lambda: parse_metadata(data, "x")


def as_spans(numbers: list[tuple[int, ...]]) -> Callable[[], object]:
    regions = [Region(each[:1], each[-1:]) for each in numbers]
    return lambda: find_coverage_fault(((1 << 63) - 1,), regions)


def as_shapes_of_a_manifest(numbers: list[tuple[int, ...]]) -> Callable[[], object]:
    cut = {"files": [0] * len(numbers), "offsets": numbers, "sizes": numbers, "replicas": []}
    document = {
        "ckptx": SCHEMA, "tool": "ckptx", "format": "dcp", "files": {"f": {"bytes": 1, "digest": "0" * 32}},
        "sidecars": {}, "cuts": [cut], "tensors": {}, "layout": {}, "origin": None,
    }  # fmt: skip
    data = json.dumps(document).encode()
    return lambda: parse_manifest(data, "x")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", [as_offsets, as_sizes, as_spans, as_shapes_of_a_manifest])
@pytest.mark.parametrize("numbers", [twins, solved, described])
def test_numbers_that_share_a_hash_cost_what_others_do(
    place: Callable[[list[tuple[int, ...]]], Callable[[], object]], numbers: Callable[[], Tuples]
) -> None:
    chosen, others = (place(list(islice(each(), MANY))) for each in (numbers, honest))
    assert seconds(chosen) < 10 * seconds(others) + 0.2
    if place in (as_offsets, as_sizes) or (place is as_shapes_of_a_manifest and numbers is described):
        with pytest.raises(InputError, match="share a hash"):
            chosen()


@pytest.mark.parametrize("numbers", [twins, solved, described])
def test_more_than_a_handful_of_one_hash_are_refused(numbers: Callable[[], Tuples]) -> None:
    kept: UniqueTuples[tuple[int, ...]] = UniqueTuples()
    with pytest.raises(HashFlood, match="share a hash"):
        for each in islice(numbers(), 100):
            kept.add(each)


def test_the_hash_of_a_key_is_not_that_of_its_numbers() -> None:
    assert all(hash(salted_key(each)) != hash(("", each)) for each in islice(honest(), 100))
    assert hash(salted_key((0, 1))) - hash(salted_key((0, 2))) != hash((0, 1)) - hash((0, 2))


def test_equal_tuples_are_one_object_and_many_of_them_one_text() -> None:
    kept: UniqueTuples[Region] = UniqueTuples()
    one = kept.add(Region((0, 0), (2, 2)))
    assert kept.get(Region((0, 0), (2, 2))) is one and kept.get(Region((0, 0), (2, 3))) is None
    assert identity_key([one, one]) == identity_key([one, one]) != identity_key([one])
    cuts = [(1, (2,), (0,), (2,)), (2, (2, 0), (2, 0)), (1, (2,), (0,), (3,)), (1, (2,), (0,), (1 << 63,))]
    assert len({packed_key(*cut) for cut in cuts}) == len(cuts)


@pytest.mark.parametrize("turned", [False, True])
def test_cuts_across_each_other_are_checked_up_to_a_limit(turned: bool) -> None:
    """Column j is cut below row j: as many slabs as columns, each held by every column."""

    def bricks(columns: int) -> tuple[tuple[int, int], list[Region]]:
        regions = []
        for j in range(columns):
            for offsets, sizes in (((0, j), (j + 1, 1)), ((j + 1, j), (columns - j, 1))):
                regions.append(Region(offsets[::-1], sizes[::-1]) if turned else Region(offsets, sizes))
        return ((columns, columns + 1) if turned else (columns + 1, columns)), regions

    shape, regions = bricks(200)
    assert find_coverage_fault(shape, regions) is None
    fault = find_coverage_fault(shape, regions[1:])
    assert fault is not None and fault.kind == "gap"
    shape, regions = bricks(3000)
    began = time.process_time()
    assert find_coverage_fault(shape, regions) == (
        None if turned else CoverageFault("unverifiable", full_region(shape))
    )
    assert time.process_time() - began < 3
