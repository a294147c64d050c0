"""Rewritten entries, read from the files of their sources, against what the loader of transformers computes."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, find_coverage_fault, full_region
from ckptx.errors import InputError, InternalError, UnsupportedError
from ckptx.mapping.ops import Conversion, Op, convert
from ckptx.mapping.rewrite import (
    ZEROS_FILE,
    RegroupedRows,
    merge,
    permute_rope,
    regroup,
    slice_chunk,
    split,
    transpose,
)
from tests.support.conversions import CASES, ONE, run_by_loader
from tests.support.stored_tensors import LAYOUTS, bits, numbers, read, several, store


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_conversion_gives_what_the_loader_gives_and_comes_back(case: str, layout: str, tmp_path: Path) -> None:
    conversion, ops, shapes = CASES[case]
    columns = [several(len(column), column[0]) for column in shapes]
    columns = [[tensor + i for tensor in column] for i, column in enumerate(columns)]
    stored = [
        [store(tmp_path, f"{i}-{at}", tensor, layout) for at, tensor in enumerate(column)]
        for i, column in enumerate(columns)
    ]
    expected = run_by_loader(conversion, ops, columns)

    found = convert(conversion, stored, [None] * len(conversion.targets))

    assert [len(column) for column in found] == [len(column) for column in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for entry, tensor in zip(ours, theirs, strict=True):
            assert entry.shape == tensor.shape
            assert torch.equal(bits(read(tmp_path, entry)), bits(tensor))

    back = convert(conversion.inverse, found, [None] * len(conversion.sources))
    for ours, column in zip(back, columns, strict=True):
        for entry, tensor in zip(ours, column, strict=True):
            assert torch.equal(bits(read(tmp_path, entry)), bits(tensor))


@pytest.mark.parametrize("case", CASES)
def test_the_way_back_is_that_of_the_loader(case: str, tmp_path: Path) -> None:
    conversion, ops, shapes = CASES[case]
    made = run_by_loader(conversion, ops, [several(len(column), column[0]) for column in shapes])
    back = conversion.inverse
    entries = [[store(tmp_path, f"{i}-{at}", each) for at, each in enumerate(column)] for i, column in enumerate(made)]
    expected = run_by_loader(back, [op.reverse_op for op in reversed(ops)], made)
    found = convert(back, entries, [None] * len(back.targets))
    for ours, theirs in zip(found, expected, strict=True):
        for entry, tensor in zip(ours, theirs, strict=True):
            assert torch.equal(bits(read(tmp_path, entry)), bits(tensor))


@pytest.mark.parametrize("case", CASES)
def test_the_inverse_of_the_inverse_is_the_conversion(case: str) -> None:
    conversion = CASES[case][0]
    twice = conversion.inverse.inverse
    assert (twice.sources, twice.targets) == (conversion.sources, conversion.targets)
    assert [(op.kind, op.dim, op.other_dim) for op in twice.ops] == [
        (op.kind, op.dim, op.other_dim) for op in conversion.ops
    ]


def test_parts_of_given_sizes_come_back(tmp_path: Path) -> None:
    conversion = Conversion((ONE,), ("q", "k", "v"), (Op("split", args=(8, 2, 2)),))
    fused = numbers(12, 5)
    parts = convert(conversion, [[store(tmp_path, "x", fused, "grid")]], [None] * 3)
    for (entry,), tensor in zip(parts, fused.split([8, 2, 2]), strict=True):
        assert torch.equal(bits(read(tmp_path, entry)), bits(tensor))
    ((back,),) = convert(conversion.inverse, parts, [None])
    assert torch.equal(bits(read(tmp_path, back)), bits(fused))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_every_group_are_gathered(dim: int, layout: str, tmp_path: Path) -> None:
    conversion = Conversion((ONE,), ("q", "k", "v"), (Op("split_groups", dim, args=(3, 4, 2, 2)),))
    fused = numbers(24, 4) if dim == 0 else numbers(4, 24)
    q, k, v = (
        torch.cat([group.split([4, 2, 2], dim)[part] for group in fused.chunk(3, dim)], dim) for part in range(3)
    )
    parts = convert(conversion, [[store(tmp_path, "x", fused, layout)]], [None] * 3)
    for (entry,), expected in zip(parts, (q, k, v), strict=True):
        assert entry.shape == tuple(expected.shape)
        assert find_coverage_fault(entry.shape, [chunk.region for chunk in entry.chunks]) is None
        assert torch.equal(bits(read(tmp_path, entry)), bits(expected))
    ((back,),) = convert(conversion.inverse, parts, [None])
    assert find_coverage_fault(back.shape, [chunk.region for chunk in back.chunks]) is None
    assert torch.equal(bits(read(tmp_path, back)), bits(fused))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "padded"), [(5, 8), (8, 8)])
def test_rows_of_zeros_are_appended(size: int, padded: int, layout: str, tmp_path: Path) -> None:
    tensor = numbers(size, 3)
    (tmp_path / ZEROS_FILE).write_bytes(bytes(64))
    conversion = Conversion((ONE,), (ONE,), (Op("truncate", args=(size, padded)),))
    ((entry,),) = convert(conversion.inverse, [[store(tmp_path, "x", tensor, layout)]], [None])
    assert find_coverage_fault(entry.shape, [chunk.region for chunk in entry.chunks]) is None
    zeros = torch.zeros(padded - size, 3, dtype=tensor.dtype)
    assert torch.equal(bits(read(tmp_path, entry)), bits(torch.cat([tensor, zeros])))
    ((back,),) = convert(conversion, [[entry]], [None])
    assert torch.equal(bits(read(tmp_path, back)), bits(tensor))


def test_rows_of_unknown_number_do_not_come_back(tmp_path: Path) -> None:
    conversion = Conversion((ONE,), (ONE,), (Op("truncate", args=(5,)),))
    with pytest.raises(UnsupportedError):
        convert(conversion.inverse, [[store(tmp_path, "x", numbers(5, 3))]], [None])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 5, 8])
def test_the_first_rows_stay(size: int, layout: str, tmp_path: Path) -> None:
    tensor = numbers(8, 3)
    conversion = Conversion((ONE,), (ONE,), (Op("truncate", args=(size,)),))
    ((entry,),) = convert(conversion, [[store(tmp_path, "x", tensor, layout)]], [None])
    assert torch.equal(bits(read(tmp_path, entry)), bits(tensor[:size]))


def test_parts_may_take_their_sizes_from_the_model(tmp_path: Path) -> None:
    conversion = Conversion((ONE,), ("q", "k"), (Op("split"),))
    fused = numbers(12, 5)
    parts = convert(conversion, [[store(tmp_path, "x", fused)]], [(10, 5), (2, 5)])
    assert torch.equal(bits(read(tmp_path, parts[1][0])), bits(fused[10:]))
    with pytest.raises(UnsupportedError, match=r'"x".*splits it into 2 parts of unknown sizes'):
        convert(conversion, [[store(tmp_path, "x", fused)]], [(10, 5), None])


def test_one_tensor_becomes_a_list(tmp_path: Path) -> None:
    conversion = Conversion((ONE,), ("part.*",), (Op("chunk", args=(4,)),))
    tensor = numbers(8, 3)
    (parts,) = convert(conversion, [[store(tmp_path, "x", tensor)]], [None])
    assert [entry.shape for entry in parts] == [(2, 3)] * 4
    assert torch.equal(bits(read(tmp_path, parts[2])), bits(tensor[4:6]))


def test_what_may_be_stored_transposed_is_told_by_its_shape(tmp_path: Path) -> None:
    conversion = Conversion((ONE,), (ONE,), (Op("transpose", 1, 2, (1,)),))
    tensor = numbers(3, 4, 6)
    entry = store(tmp_path, "x", tensor)
    ((kept,),) = convert(conversion, [[entry]], [(3, 4, 6)])
    ((turned,),) = convert(conversion, [[entry]], [(3, 6, 4)])
    assert kept == entry
    assert torch.equal(bits(read(tmp_path, turned)), bits(tensor.transpose(1, 2)))
    with pytest.raises(UnsupportedError, match='"x": may be stored transposed, and the expected shape is unknown'):
        convert(conversion, [[entry]], [None])
    assert convert(conversion.inverse, [[turned]], [None]) == [[turned]]


@pytest.mark.parametrize("shape", [(5, 5), (5, 6), (3, 4, 4), (4, 4, 6), (4, 3, 4)])
@pytest.mark.parametrize("dims", [(0, 1), (0, -1), (1, -1)])
def test_a_tensor_of_the_expected_shape_stays_though_its_transpose_has_it_too(
    shape: tuple[int, ...], dims: tuple[int, int], tmp_path: Path
) -> None:
    first, second = (dim % len(shape) for dim in dims)
    conversion = Conversion((ONE,), (ONE,), (Op("transpose", first, second, (1,)),))
    tensor = numbers(*shape)
    entry = store(tmp_path, "x", tensor)
    assert convert(conversion, [[entry]], [shape]) == [[entry]]
    swapped = tuple(tensor.transpose(first, second).shape)
    if swapped != shape:
        ((turned,),) = convert(conversion, [[entry]], [swapped])
        assert torch.equal(bits(read(tmp_path, turned)), bits(tensor.transpose(first, second)))


def test_checksums_travel_with_permuted_rows(tmp_path: Path) -> None:
    tensor = numbers(24, 5)
    entry = permute_rope(store(tmp_path, "x", tensor, "rows"), 4, inverse=False)
    read(tmp_path, entry)
    data = bytearray((tmp_path / "x.bin").read_bytes())
    data[40] ^= 1
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(InputError, match="CRC-32"):
        read(tmp_path, entry)


def test_copies_of_a_tensor_are_rewritten_with_it(tmp_path: Path) -> None:
    tensor = numbers(8, 6)
    entry = store(tmp_path, "x", tensor)._replace(replicas=store(tmp_path, "copy", tensor, "rows").chunks)
    pair = merge([entry, entry], 0)
    for made in (transpose(pair, 0, 2), regroup(pair, 1, 2, 4), split(pair, 1, (3, 5))[1], pair):
        assert made.replicas and {chunk.file for chunk in made.replicas} == {"copy.bin"}
        copy = made._replace(chunks=made.replicas, replicas=())
        assert torch.equal(bits(read(tmp_path, copy)), bits(read(tmp_path, made)))


def test_permuted_rows_are_a_sequence(tmp_path: Path) -> None:
    entry = permute_rope(store(tmp_path, "x", numbers(24, 5), "grid"), 4, inverse=True)
    rows = entry.chunks
    assert isinstance(rows, RegroupedRows) and len(rows) == 48
    assert list(rows) == [rows[i] for i in range(48)] == list(rows[:]) and rows[-1] == rows[47]
    with pytest.raises(IndexError):
        rows[48]


def test_whole_rows_of_a_chunk_stay_row_major(tmp_path: Path) -> None:
    entry = store(tmp_path, "x", numbers(8, 6))
    chunk = entry.chunks[0]
    rows = slice_chunk(chunk, Region((2, 0), (3, 6)), entry)
    assert rows.strides is None and rows.offset == chunk.offset + 2 * 6 * 2 and rows.nbytes == 3 * 6 * 2
    columns = slice_chunk(chunk, Region((2, 1), (3, 2)), entry)
    assert columns.strides == (6, 1) and columns.offset == chunk.offset + (2 * 6 + 1) * 2


# -- refusals


def entry_of(shape: tuple[int, ...], dtype: str = "BF16", name: str = "x") -> TensorEntry:
    kind = DTYPES_BY_NAME[dtype]
    numel = 1
    for size in shape:
        numel *= size
    return TensorEntry(name, kind, shape, (Chunk(full_region(shape), "f", 0, kind.nbytes(numel)),))


@pytest.mark.parametrize(
    ("op", "columns", "message"),
    [
        (
            Op("merge"),
            [[entry_of((4, 6)), entry_of((4, 5), name="y")]],
            '"y": BF16 of shape .4, 5. cannot be combined with "x"',
        ),
        (Op("merge"), [[entry_of((4,)), entry_of((4,), "F32", "y")]], '"y": F32'),
        (Op("concat", 1), [[entry_of((4, 6))], [entry_of((3, 6), name="y")]], '"y": BF16 of shape .3, 6.'),
        (Op("concat", 2), [[entry_of((4, 6))]], "has no dim 2"),
        (Op("split", 0, args=(3, 2)), [[entry_of((4, 6))]], "does not split into parts of .3, 2. along dim 0"),
        (Op("chunk", 0, args=(3,)), [[entry_of((4, 6))]], "does not split into 3 parts along dim 0"),
        (Op("interleave", 1), [[entry_of((4, 5))]], "does not split into pairs along dim 1"),
        (Op("permute_rope", args=(3, 0)), [[entry_of((16, 2))]], "3 heads of rotary pairs"),
        (Op("split_groups", args=(3, 4, 1)), [[entry_of((16, 2))]], "does not split into parts"),
        (Op("truncate", args=(17,)), [[entry_of((16, 2))]], "smaller than 17 along dim 0"),
        (Op("pad", args=(15, 12)), [[entry_of((16, 2))]], "larger than 15 along dim 0"),
        (
            Op("join_groups", args=(2, 4, 1)),
            [[entry_of((8, 2))], [entry_of((4, 2), name="y")]],
            '"y".* does not split into parts of .1, 1.',
        ),
        (Op("transpose", 0, 1), [[entry_of((4,))]], "has no dim 1"),
        (Op("unmerge", 1), [[entry_of((4,))]], "has no dim 1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(op: Op, columns: list[list[TensorEntry]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(Conversion(tuple("ab"[: len(columns)]), ("y",), (op,)), columns, [None])


def test_an_unknown_op_is_refused_by_the_name_of_its_class() -> None:
    conversion = Conversion(("x",), ("y",), (Op("unsupported:Conv3dToLinear"),))
    assert conversion.unsupported_op == "Conv3dToLinear" and conversion.inverse.unsupported_op == "Conv3dToLinear"
    with pytest.raises(UnsupportedError, match=r'"x".*Conv3dToLinear of transformers'):
        convert(conversion, [[entry_of((2,))]], [None])


def test_shapes_of_targets_are_not_those_before_another_op() -> None:
    either = Op("transpose", 0, 1, (1,))
    for last, shape in ((Op("same"), (4, 6)), (Op("interleave"), (4, 6))):
        (column,) = convert(Conversion(("x",), ("y",), (either, last)), [[entry_of((6, 4))]], [shape])
        assert column[0].shape == shape
    with pytest.raises(UnsupportedError, match="the expected shape is unknown; keep its names: pass --names hf or"):
        convert(Conversion(("x.*",), ("y",), (either, Op("merge"))), [[entry_of((6, 4))]], [(6, 4)])


def test_pairs_that_share_a_byte_are_not_parted() -> None:
    entry = entry_of((4, 8), "F4")
    assert [part.shape for part in split(entry, 1, (4, 4))] == [(4, 4)] * 2
    assert split(entry, 1, (4, 4))[1].chunks[0].offset == 2
    experts = transpose(entry_of((3, 4, 8), "F4"), 0, 1)
    assert (
        experts.chunks[0].strides == (4, 16, 1) and find_coverage_fault((4, 3, 8), [experts.chunks[0].region]) is None
    )
    with pytest.raises(UnsupportedError, match="share bytes"):
        split(entry, 1, (3, 5))
    with pytest.raises(UnsupportedError, match="share bytes"):
        transpose(entry, 0, 1)
    with pytest.raises(UnsupportedError, match="share bytes"):
        regroup(entry, 1, 2, 4)
    for dtype, columns in (("F4", 3), ("F6_E2M3", 4)):
        with pytest.raises(UnsupportedError, match="two rows share a byte"):
            transpose(entry_of((2, 2, columns), dtype), 0, 1)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "U8"])
def test_a_part_that_begins_or_ends_inside_a_byte_is_refused(dtype: str) -> None:
    """Every part of a row; elements of six bits may share bytes with any of their neighbors."""
    entry = entry_of((3, 8), dtype)
    chunk = entry.chunks[0]
    for begin, end in combinations(range(9), 2):
        for row, rows in ((0, 3), (1, 1)):
            part = Region((row, begin), (rows, end - begin))
            is_refused = {"F4": begin % 2 == 1 or end % 2 == 1, "F6_E2M3": part != chunk.region, "U8": False}[dtype]
            if is_refused:
                with pytest.raises(UnsupportedError, match="share bytes"):
                    slice_chunk(chunk, part, entry)
            else:
                found = slice_chunk(chunk, part, entry)
                assert (found.region, found.offset) == (part, (row * 8 + begin) * entry.dtype.bits // 8)


def test_an_archive_that_was_not_opened_is_no_place_of_elements() -> None:
    entry = entry_of((4, 8))
    closed = entry._replace(chunks=(entry.chunks[0]._replace(is_archive=True),))
    for op in (
        Op("merge"),
        Op("concat"),
        Op("transpose", 0, 1),
        Op("interleave"),
        Op("unmerge"),
        Op("chunk", args=(2,)),
    ):
        with pytest.raises(InternalError, match="before its payload was located"):
            convert(Conversion(("x",), ("y",), (op,)), [[closed]], [None])
